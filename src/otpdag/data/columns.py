"""Columns: a table of any kind as columns, which node they hold, and what they are taken for by their values.

A table (a frame of any library, a mapping, an array, a tensor) is a pandas frame first, with a column for each cell of
a node. A :class:`Schema` settles once which columns these are and what their categories are called.

:func:`column_type` decides whether a column holds numbers, counts or categories, each choice with its reason. The dtype
plays no part: pandas stores whole numbers with a gap as floats, so that a rule on dtypes would decide otherwise as soon
as one cell is empty. The rules look at what a random part of the rows shows as well (how many values there are, how
they are spaced, where they lie), never at how many cells are missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy as sp
from torch import Tensor

from otpdag.errors import DataError, listed
from otpdag.graph import Graph
from otpdag.spaces import Count, Discrete, Interval, Real, Space

Floats: TypeAlias = npt.NDArray[np.float64]
Label: TypeAlias = str | bool | int | float
Table: TypeAlias = pd.DataFrame | Mapping[str, Any] | npt.NDArray[Any] | Tensor

_NUMERIC_KINDS = {"integer", "floating", "mixed-integer-float", "decimal", "boolean", "empty"}
_CONSTANT = "constant: it tells nothing of other columns"


@dataclass(frozen=True)
class Column:
    """Where and how a table holds one node.

    Attributes:
        space: The node's values.
        labels: What the categories are called, in the order of their codes; None for plain codes.
        names: The columns, one for each cell.
    """

    space: Space
    labels: tuple[Label, ...] | None
    names: tuple[str, ...]


def cell_names(node: str, cells: int) -> tuple[str, ...]:
    """The columns of a node: its own name, or numbered if it has several cells.

    >>> cell_names("x", 1), cell_names("x", 2)
    (('x',), ('x.0', 'x.1'))
    """
    return (node,) if cells == 1 else tuple(f"{node}.{cell}" for cell in range(cells))


def column_title(node: str, name: str) -> str:
    """What an error message calls a column."""
    return f"column {name!r}" if name == node else f"column {name!r} of node {node!r}"


# -- tables of any kind ------------------------------------------------------------------------------------------------


def known_table(data: Any) -> Any:
    """The same data, as a pandas frame if they are a table of another library; anything else as it is.

    Raises:
        DataError: The table is lazy: its cells are not there yet.
    """
    if isinstance(data, pd.DataFrame | Mapping | np.ndarray):
        return data
    import narwhals

    table = narwhals.from_native(data, pass_through=True)
    if isinstance(table, narwhals.LazyFrame):
        raise DataError(f"data must be a table; got a lazy {type(data).__name__}: collect() or compute() it first")
    if not isinstance(table, narwhals.DataFrame):
        return data
    return pd.DataFrame({name: _cells(table[name]) for name in table.columns})


def as_frame(data: Any) -> pd.DataFrame:
    """A table of any library, or a dictionary of columns, as a pandas frame with one column of each name.

    >>> as_frame({"x": [1.0, None], "k": ["a", "b"]}).shape
    (2, 2)
    """
    table = known_table(data)
    if isinstance(table, Mapping):
        _check_aligned(table)
        try:
            table = pd.DataFrame({name: to_numpy(column) for name, column in table.items()})
        except ValueError as error:
            raise DataError(f"data must be a dictionary of columns of one length; {error}") from None
    if not isinstance(table, pd.DataFrame):
        raise DataError(f"data must be a DataFrame or a dictionary of columns; got {type(data).__name__}")
    check_once(table, table.columns)
    return table


def _check_aligned(data: Mapping[str, Any]) -> None:
    """Refuse series of one length whose indexes differ: by their places, other rows would come together."""
    series = {name: column for name, column in data.items() if isinstance(column, pd.Series)}
    for name, column in series.items():
        first, known = next(iter(series.items()))
        if len(column) == len(known) and not column.index.equals(known.index):
            raise DataError(
                f"data[{name!r}] has another index than data[{first!r}]: a DataFrame of both brings rows together by "
                "their index, and to_numpy() of each takes them in their order"
            )


def check_once(frame: pd.DataFrame, names: Iterable[Any]) -> None:
    """Refuse a frame that has several columns of one of these names, or names of several parts."""
    if isinstance(frame.columns, pd.MultiIndex):
        raise DataError(f"columns must have plain names; got pairs such as {frame.columns[0]!r}: join their parts")
    if not frame.columns.is_unique:
        several = set(frame.columns[frame.columns.duplicated()])
        for name in names:
            if name in several:
                raise DataError(f"column {name!r} must be there once; the table has several of that name")


def _cells(column: Any) -> Any:
    """Numbers as an array with NaN for what is missing, anything else cell by cell with None."""
    if column.dtype.is_numeric() and not column.dtype.is_decimal():
        return column.to_numpy()
    return column.to_list()


def frame_of(data: object, columns: Mapping[str, Column]) -> pd.DataFrame:
    """A table as a frame with the columns of these nodes; one that is a frame stays as it is."""
    data = known_table(data)
    names = [name for column in columns.values() for name in column.names]
    if isinstance(data, pd.DataFrame):
        check_once(data, names)
        return _with_ends(data, columns)
    if isinstance(data, Mapping):
        return _with_ends(_from_mapping(data, columns), columns)
    if isinstance(data, np.ndarray | Tensor):
        array = to_numpy(data)
        array = array[:, None] if array.ndim == 1 and len(names) == 1 else array
        if array.ndim != 2 or array.shape[1] != len(names):
            raise DataError(f"data must have {len(names)} columns ({listed(names)}); got shape {array.shape}")
        return _with_ends(pd.DataFrame(array, columns=names), columns)
    hint = "; read a file with pandas, for instance pd.read_csv" if isinstance(data, str | Path) else ""
    raise DataError(
        "data must be a DataFrame, a mapping from nodes to arrays, or a 2-D numpy or torch array; "
        f"got {type(data).__name__}{hint}"
    )


def _with_ends(frame: pd.DataFrame, columns: Mapping[str, Column]) -> pd.DataFrame:
    """The ends of intervals as columns of their own; an infinite one is missing."""
    for node, column in columns.items():
        if not isinstance(column.space, Interval):
            continue
        if node in frame and isinstance(frame[node].dtype, pd.IntervalDtype):
            ends = pd.arrays.IntervalArray(frame[node])
            frame = frame.assign(**dict(zip(column.names, (ends.left, ends.right), strict=True)))
        if set(column.names) <= set(frame.columns):
            frame = frame.assign(**frame[list(column.names)].replace([np.inf, -np.inf], np.nan))
    return frame


def _from_mapping(data: Mapping[str, Any], columns: Mapping[str, Column]) -> pd.DataFrame:
    """Entries are nodes with all of their cells, or single cells; others are left out."""
    _check_aligned(data)
    blocks: dict[str, pd.DataFrame] = {}
    for node, column in columns.items():
        if node in data:
            value = data[node]
            is_ends = isinstance(getattr(value, "dtype", None), pd.IntervalDtype)
            blocks[node] = _block(value, node, (node,) if is_ends else column.names)
        else:
            blocks |= {name: _block(data[name], name, (name,)) for name in column.names if name in data}
    lengths = {name: len(block) for name, block in blocks.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"data must have the same number of rows for every node; got {lengths}")
    return pd.concat(list(blocks.values()), axis=1) if blocks else pd.DataFrame()


def _block(value: Any, entry: str, names: Sequence[str]) -> pd.DataFrame:
    """The cells that one entry of a mapping holds."""
    is_column = isinstance(value, (pd.Series, pd.Categorical, pd.Index, pd.api.extensions.ExtensionArray))
    if is_column and len(names) == 1:
        return pd.DataFrame({names[0]: pd.Series(value).reset_index(drop=True)})
    array = np.atleast_1d(to_numpy(value))
    if array.dtype.kind in "OU" and not isinstance(value, np.ma.MaskedArray):  # keep None and text as they are
        array = np.atleast_1d(np.asarray(value, dtype=object))
    wide = array[:, None] if array.ndim == 1 else array.reshape(len(array), -1)
    if wide.shape[1] != len(names):
        raise DataError(f"data[{entry!r}] must have shape (rows, {len(names)}) for that node; got {array.shape}")
    return pd.DataFrame(wide, columns=list(names))


def to_numpy(value: Any) -> npt.NDArray[Any]:
    """An array from a tensor or whatever numpy takes."""
    if isinstance(value, Tensor):
        if value.is_meta:
            raise DataError("data must hold numbers; got a tensor on the device 'meta', which holds none")
        value = value.detach().cpu().to_dense()
        return (value.float() if value.is_floating_point() and value.itemsize < 4 else value).numpy()
    if isinstance(value, np.ma.MaskedArray):
        held: npt.NDArray[Any] = np.ma.filled(value.astype(object), np.nan)
        return held
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"data must be an array with rows of equal length: {error}") from None


# -- what columns mean -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schema:
    """Which columns hold which node, hidden ones included.

    A node of one cell has the column of its own name, a node ``x`` of several the columns ``x.0``, ``x.1``
    and so on. Build one with :meth:`of`.

    >>> from otpdag.spaces import Real
    >>> graph = Graph([("season", "load")], hidden=["load"])
    >>> frame = pd.DataFrame({"season": ["wet", "dry", None]})
    >>> schema = Schema.of({"season": Discrete(2), "load": Real(2)}, graph, frame)
    >>> schema["season"].labels, schema["load"].names
    (('dry', 'wet'), ('load.0', 'load.1'))
    """

    columns: Mapping[str, Column]

    @classmethod
    def of(cls, spaces: Mapping[str, Space], graph: Graph, data: Table | None = None) -> Schema:
        """Settle column names and category labels.

        A discrete column may hold codes 0, 1, ..., K-1, or anything else that names categories: the
        categories of a pandas Categorical in their order, False and True, the sorted distinct values of a
        column of text, or of a column of numbers if there are exactly K (such as 10, 20, 30, or 1 and 2).
        Categories that the space has and the table does not show are called ``(unseen k)``.

        Args:
            spaces: The space of each node.
            graph: The graph; its order is the order of the columns.
            data: The table that shows the categories; without one, all discrete columns hold codes.

        Returns:
            The schema.

        Raises:
            DataError: A node has no space, two nodes claim one column, or a column shows too many categories.
        """
        for node in graph.nodes:
            if node not in spaces:
                raise DataError(f"spaces must have an entry for every node; node {node!r} has none")
        plain = {node: Column(spaces[node], None, cell_names(node, spaces[node].cells)) for node in graph.nodes}
        _check_claims(plain)
        if data is None:
            return cls(plain)
        categories = {
            node: column
            for node, column in plain.items()
            if isinstance(column.space, Discrete) and node not in graph.hidden
        }
        # columns of an array have no names but by their place among all others
        frame = frame_of(
            data,
            categories if isinstance(data, pd.DataFrame | Mapping) else {node: plain[node] for node in graph.observed},
        )
        shown = {node: column.names[0] for node, column in categories.items() if column.names[0] in frame.columns}
        return cls(plain).with_levels({node: frame[name] for node, name in shown.items()})

    def with_levels(self, shown: Mapping[str, pd.Series[Any]]) -> Schema:
        """Settle labels by what columns of categories show, all of it or each value once.

        >>> plain = Schema.of({"season": Discrete(2)}, Graph([], nodes=["season"]))
        >>> plain.with_levels({"season": pd.Series(["wet", "dry"])})["season"].labels
        ('dry', 'wet')
        """
        labelled = {node: _with_labels(node, self[node], series) for node, series in shown.items()}
        return Schema({**self.columns, **labelled})

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, in the order of the graph."""
        return tuple(self.columns)

    def __getitem__(self, node: str) -> Column:
        if node not in self.columns:
            raise DataError(f"node {node!r} is not in the schema, which holds {listed(self.nodes)}")
        return self.columns[node]

    def labelled(self, labels: Mapping[str, Sequence[Label]]) -> Schema:
        """The schema with other names of categories.

        Raises:
            DataError: A node is no category, or has another number of them.
        """
        columns = dict(self.columns)
        for node, names in labels.items():
            column = self[node]
            if not column.space.is_discrete or len(names) != column.space.width or len(set(names)) != len(names):
                raise DataError(f"labels of node {node!r} must name each category of {column.space}; got {names!r}")
            columns[node] = replace(column, labels=tuple(names))
        return Schema(columns)

    def to_dict(self) -> dict[str, Any]:
        """Write lists, numbers and strings only, for JSON.

        >>> from otpdag.spaces import Count
        >>> schema = Schema.of({"a": Discrete(3), "b": Count()}, Graph([("a", "b")]))
        >>> schema.to_dict()["b"]
        {'space': {'kind': 'Count', 'dim': 1}, 'labels': None, 'names': ['b']}
        """
        return {
            node: {
                "space": column.space.spec(),
                "labels": None if column.labels is None else list(column.labels),
                "names": list(column.names),
            }
            for node, column in self.columns.items()
        }


def _check_claims(columns: Mapping[str, Column]) -> None:
    owner: dict[str, str] = {}
    for node, column in columns.items():
        for name in column.names:
            if name in owner:
                raise DataError(f"nodes {owner[name]!r} and {node!r} both claim column {name!r}; rename one of them")
            owner[name] = node


def _with_labels(node: str, column: Column, shown: pd.Series[Any]) -> Column:
    present, size = _distinct(shown).dropna(), column.space.width
    labels = find_labels(present)
    if labels is None:
        labels = find_number_labels(present, size)
    if labels is None:
        return column
    if len(labels) > size and isinstance(present.dtype, pd.CategoricalDtype):
        labels = find_labels(present.cat.remove_unused_categories()) or ()
    if len(labels) > size:
        raise DataError(
            f"{column_title(node, column.names[0])} must hold at most {size} categories; "
            f"found {len(labels)}: {listed(labels)}"
        )
    unseen = tuple(f"(unseen {code})" for code in range(len(labels), size))
    return Column(column.space, (*labels, *unseen), column.names)


def _distinct(series: pd.Series[Any]) -> pd.Series[Any]:
    """The values of a column once each, where values that are equal are alike: a long column is not copied then."""
    if not isinstance(series.dtype, pd.StringDtype) and not pd.api.types.is_numeric_dtype(series.dtype):
        return series
    distinct = [pd.Series(part.unique(), name=series.name) for part in in_blocks(series)]
    return pd.concat(distinct, ignore_index=True) if distinct else series


# -- labels ------------------------------------------------------------------------------------------------------------


def find_labels(present: pd.Series[Any]) -> tuple[Label, ...] | None:
    """The categories of a column without missing values, or None if it holds numbers (or nothing)."""
    if isinstance(present.dtype, pd.CategoricalDtype):
        return tuple(as_label(value) for value in present.dtype.categories)
    kind = pd.api.types.infer_dtype(present, skipna=True)
    if kind == "boolean":
        return (False, True)
    if kind in _NUMERIC_KINDS or kind.startswith(("datetime", "timedelta", "complex")):
        return None
    try:
        distinct = present.unique()
    except TypeError:
        odd = next((value for value in present.array if not isinstance(value, Hashable)), "a list inside another")
        raise DataError(f"column {present.name!r} must hold labels; found {odd!r:.100}") from None
    kinds = set(map(type, present)) if present.dtype == object else set()
    if kinds & {bool, np.bool_} and kinds & {int, float}:
        raise DataError(
            f"column {present.name!r} holds truth values and numbers, and True would be taken for 1: use one of them"
        )
    if str in kinds and kinds - {str}:
        alike = {str(value) for value in distinct if not isinstance(value, str)} & {*distinct}
        if alike:
            raise DataError(
                f"column {present.name!r} holds {min(alike)!r} as text and as a number, which would be two: use one"
            )
    return tuple(sorted({as_label(value) for value in distinct}, key=lambda x: (type(x).__name__, x)))


def find_number_labels(present: pd.Series[Any], size: int) -> tuple[Label, ...] | None:
    """Numbers that name categories: exactly ``size`` of them, other than the codes 0, 1, ...; None if they do not.

    >>> find_number_labels(pd.Series([30.0, 10.0, 20.0]), 3)
    (10, 20, 30)
    """
    if pd.api.types.infer_dtype(present, skipna=True) not in _NUMERIC_KINDS:
        return None
    try:
        distinct = np.unique(present.to_numpy(dtype=np.float64, na_value=np.nan))
    except OverflowError:  # more digits than a number has: refused where it is read
        return None
    if len(distinct) != size or not np.isfinite(distinct).all() or np.array_equal(distinct, np.arange(size)):
        return None
    return tuple(int(value) if value == np.floor(value) else float(value) for value in distinct)


def in_blocks(series: pd.Series[Any], rows: int = 2**16) -> Iterator[pd.Series[Any]]:
    """A column part by part: what is looked up in a long one takes as much memory as the column, and keeps it."""
    for begin in range(0, len(series), rows):
        yield series.iloc[begin : begin + rows]


def aligned(values: Any, index: pd.Index | None, what: str) -> Any:
    """A series in the order of a table with this index; anything else as it is.

    >>> aligned(pd.Series({"b": 2, "a": 1}), pd.Index(["a", "b"]), "weights").tolist()
    [1, 2]
    """
    if index is None or not isinstance(values, pd.Series) or values.index.equals(index):
        return values
    if not values.index.is_unique or len(values) != len(index) or set(values.index) != set(index):
        raise DataError(
            f"{what} must have the index of the table, or the names of its sequences; to take them in their order "
            "whatever it is, give to_numpy()"
        )
    return values.reindex(index)


def as_label(value: Any) -> Label:
    """A category as a value that JSON knows."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, (str, bool, int, float)) else str(value)


def as_numbers(series: pd.Series[Any], where: str, expected: str) -> Floats:
    """A column as floats, NaN where missing; text and dates are refused even if they look like numbers."""
    if isinstance(series.dtype, np.dtype) and series.dtype.kind in "biuf":
        return series.to_numpy(dtype=np.float64)
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(object)
    present = series.dropna()
    if pd.api.types.infer_dtype(present, skipna=True) not in _NUMERIC_KINDS:
        odd = np.isnan(_parsed(present))  # one odd cell makes a column of a file text
        odd = odd if odd.any() else np.array([isinstance(cell, str) for cell in present])
        place = int(np.flatnonzero(series.notna())[odd.argmax()])
        odd_value = as_label(series.iloc[place])
        raise DataError(f"{where} must hold {expected}; found {odd_value!r} in row {place}")
    try:
        return series.to_numpy(dtype=np.float64, na_value=np.nan)
    except OverflowError:
        raise DataError(f"{where} must hold finite numbers; found a whole number of too many digits") from None


# -- what a column is taken for ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rules:
    """What the choices go by.

    Attributes:
        codes: So many whole numbers, evenly spaced, are taken for codes of categories.
        fewest_counts: So many whole numbers from zero on may be counts; fewer are taken for codes.
        least_dispersion: Variance over mean below which whole numbers are no counts.
        mean_count: Beyond this mean, a Poisson count is as good as normal, and most whole numbers are amounts.
        levels: More levels need many rows.
        share_of_names: A level for every second row: names rather than kinds.
        few_rows: With fewer nothing can be said of ids.
        scale: So many levels from one on may be answers on a scale.
        skewed: A third moment, of standardised numbers above zero, beyond which their logarithms are looked at.
        below_zero: A share of the normal distribution with the mean and spread of numbers none of which is negative.
        share_of_text: Up to so many cells may be text in a column of numbers.
    """

    codes: int = 10
    fewest_counts: int = 5
    least_dispersion: float = 0.7
    mean_count: float = 30.0
    levels: int = 30
    share_of_names: float = 0.5
    few_rows: int = 20
    scale: int = 5
    skewed: float = 1.5
    below_zero: float = 0.1
    share_of_text: float = 0.2


_RULES = _Rules()


@dataclass(frozen=True)
class ColumnType:
    """What a column is taken for.

    Attributes:
        column: The column's name.
        space: What its values are; None if it cannot be a node at all.
        reason: Why, in words.
        doubt: What speaks against it and what to do then; empty if nothing does.
        useless: Whether a model is better off without it: ids, names, dates as text, a constant.
        is_ordered: Whether its categories have an order: answers on a scale.
    """

    column: str
    space: Space | None
    reason: str
    doubt: str = ""
    useless: bool = False
    is_ordered: bool = False

    @property
    def kind(self) -> str:
        """``"category"``, ``"count"``, ``"number"`` or ``"none"``."""
        kinds = {Discrete: "category", Count: "count", Real: "number"}
        return "none" if self.space is None else kinds[type(self.space)]

    def __str__(self) -> str:
        size = f" of {self.space.size}" if isinstance(self.space, Discrete) else ""
        doubt = f" [doubtful: {self.doubt}]" if self.doubt else ""
        return f"{self.column}: {self.kind}{size}, {self.reason}{doubt}"


def column_types(frame: pd.DataFrame) -> list[ColumnType]:
    """What each column is taken for; one that can be no node (dates, no value at all) says why.

    >>> frame = pd.DataFrame({"vote": [0.0, 1.0, None, 1.0], "day": pd.to_datetime(["2020-01-01"] * 4)})
    >>> [(one.column, one.kind) for one in column_types(frame)]
    [('vote', 'category'), ('day', 'none')]
    """
    types = []
    for place, name in enumerate(frame.columns):
        try:
            types.append(column_type(frame.iloc[:, place]))
        except DataError as error:
            types.append(ColumnType(str(name), None, str(error)))
    return types


def column_type(series: pd.Series[Any]) -> ColumnType:
    """Decide what a column holds, by its values.

    - Text, Booleans and pandas categories are categories, as many as there are; text is taken for numbers if nearly all
      cells are numbers of more than ten values (and the cells that are none must be mended before a fit).
    - Any two values are a category, however they are written: 0/1, 1.0/2.0, -1/1.
    - Up to ten whole numbers that begin at 0 or 1 or are evenly spaced (10, 20, 30) are codes of categories; five or
      more from 0 on with the shares of a count are counts.
    - Other whole numbers are counts if none is negative and they lie as counts do: near zero, with a tail to the right.
    - All other numbers are real. Rates, shares and durations are among them: name a tighter mechanism yourself.

    Args:
        series: A column.

    Returns:
        The choice, the reason, and what is doubtful about it.

    Raises:
        DataError: The column has no value, or holds neither numbers nor categories.

    >>> column_type(pd.Series([10, 20, 30, 20, None, 10, 30], name="code")).doubt
    'amounts rather than codes? then m.Normal()'
    """
    name, present = str(series.name), series.dropna()
    where = f"column {series.name!r}"
    if present.empty:
        raise DataError(f"{where} must hold at least one value; all {len(series)} are missing")
    if isinstance(present.dtype, pd.CategoricalDtype):
        what = "an ordered pandas Categorical" if present.dtype.ordered else "a pandas Categorical"
        levels = len(present.dtype.categories)
        return replace(
            _of_levels(name, levels, len(present), what), is_ordered=bool(present.dtype.ordered) and levels > 2
        )
    kind = pd.api.types.infer_dtype(present, skipna=True)
    if kind == "boolean":
        return ColumnType(name, Discrete(2), "False and True")
    if kind.startswith(("datetime", "timedelta", "date", "period", "time")):
        raise DataError(
            f"{where} must hold numbers or categories; found {as_label(present.iloc[0])!r}, a time: make it a number, "
            "for instance the days since the first, or a category such as the month"
        )
    if kind in _NUMERIC_KINDS:
        return _of_numbers(name, as_numbers(present, where, "numbers or categories"))
    if kind.startswith("complex"):
        as_numbers(present, where, "numbers or categories")  # refuses
    return _of_text(name, present)


# -- text --------------------------------------------------------------------------------------------------------------


def _parsed(present: pd.Series[Any]) -> Floats:
    """Cells as the numbers that their text says, NaN where it says none."""
    texts = np.array([str(value) for value in present], dtype=object)  # pandas refuses text that is no Unicode
    return np.asarray(pd.to_numeric(texts, errors="coerce"), dtype=np.float64)


def begin_with_zeros(cells: Sequence[str]) -> bool:
    """Whether cells are digits of one length, some of which begin with zero, as postcodes: a number would lose it."""
    alike = all(map(str.isdigit, cells)) and len({len(cell) for cell in cells}) == 1
    return alike and len(cells[0]) > 1 and any(cell[0] == "0" for cell in cells)


def _of_text(name: str, present: pd.Series[Any]) -> ColumnType:
    numbers, cells = _parsed(present), [str(value) for value in present]
    if begin_with_zeros(cells):
        doubt = "digits that begin with zero are codes or ids: join them to a few kinds, or leave the column out"
        return ColumnType(name, Discrete(max(2, len(set(cells)))), "digits as text", doubt, useless=True)
    odd = np.isnan(numbers)
    whole = np.unique(numbers[~odd])
    if odd.mean() <= _RULES.share_of_text and len(whole) > _RULES.codes:
        decided = _of_numbers(name, numbers[~odd])
        if not isinstance(decided.space, Discrete):
            return _numbers_as_text(decided, present[odd])
    labels = sorted(set(cells))
    decided = _of_levels(name, len({as_label(value) for value in present}), len(present), "text")
    if len(labels) > _RULES.codes and _are_dates(present):
        return replace(decided, doubt="dates? then make them numbers, or leave the column out", useless=True)
    if len(labels) > _RULES.codes and all(map(_NUMBER_WITH_SIGN.fullmatch, labels)):
        return replace(decided, doubt=f"numbers with a sign or unit, {labels[0]!r}? then take it off", useless=True)
    plain = [" ".join(label.casefold().split()) for label in labels]
    alike = [label for label, same in zip(labels, plain, strict=True) if plain.count(same) > 1]
    if alike and not decided.doubt and len(labels) <= _RULES.levels:
        return replace(decided, doubt=f"levels differ by capitals or blanks alone, {listed(alike)}: make them one")
    return decided


def _numbers_as_text(decided: ColumnType, odd: pd.Series[Any]) -> ColumnType:
    """Numbers, but for some cells; a fit reads no text as numbers, so that these must be mended first."""
    if odd.empty:
        doubt = "the numbers are text: pd.to_numeric makes them numbers"
    else:
        doubt = (
            f"{len(odd)} of the cells hold text, first {as_label(odd.iloc[0])!r} in row {odd.index[0]}: "
            "pd.to_numeric(column, errors='coerce') makes them missing"
        )
    return ColumnType(decided.column, decided.space, decided.reason, doubt)


def _of_levels(name: str, levels: int, rows: int, what: str) -> ColumnType:
    reason = f"{what} with {levels} level{'s' * (levels != 1)}"
    doubt, are_names = "", rows >= _RULES.few_rows and levels >= _RULES.share_of_names * rows
    if levels == 1:
        doubt = _CONSTANT
    elif are_names:
        doubt = f"{levels} levels in {rows} rows: names or ids rather than kinds; leave the column out"
    elif levels > _RULES.levels:
        doubt = f"{levels} levels need many rows: join rare ones, or leave the column out"
    return ColumnType(name, Discrete(max(2, levels)), reason, doubt, useless=levels == 1 or are_names)


def _are_dates(present: pd.Series[Any]) -> bool:
    """Whether text reads as days in the usual form."""
    return bool(present.astype(str).str.fullmatch(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?").all())


# -- numbers -----------------------------------------------------------------------------------------------------------


def _of_numbers(name: str, numbers: Floats) -> ColumnType:
    distinct = np.unique(numbers)
    levels = len(distinct)
    if levels == 1:
        return ColumnType(name, Real(), f"one value, {distinct[0]:g}", _CONSTANT, useless=True)
    whole = bool(np.isfinite(distinct).all() and (distinct == np.floor(distinct)).all())
    if levels == 2 and (_is_repeated(numbers, 2) or (whole and distinct[0] == 0 and distinct[1] == 1)):
        return ColumnType(name, Discrete(2), f"two values, {_shown(distinct)}")
    if not whole:
        reason = f"numbers with fractions, {levels} values"
        return ColumnType(name, Real(), reason, _doubt_of_real(numbers, distinct))
    if levels <= _RULES.codes and (codes := _codes(name, numbers, distinct)):
        return codes
    return _of_many_whole(name, numbers, distinct)


def _codes(name: str, numbers: Floats, distinct: Floats) -> ColumnType | None:
    """Whole numbers that are codes: from zero or one on, or evenly spaced; None if they are something else."""
    levels, first = len(distinct), distinct[0]
    step = np.diff(distinct)
    if first == 0 and (step == 1).all():
        if levels >= _RULES.fewest_counts and _lie_as_counts(numbers):
            doubt = f"if they are codes, m.Categorical({levels})"
            return ColumnType(name, Count(), f"whole numbers 0 to {levels - 1}, distributed as counts are", doubt)
        return ColumnType(name, Discrete(levels), f"whole numbers 0 to {levels - 1}")
    if not _is_repeated(numbers, levels):
        return None
    if first == 1 and (step == 1).all():
        scale = levels >= _RULES.scale
        doubt = f"answers on a scale (m.Ordinal({levels}), if they have parents) or kinds (m.Categorical({levels}))?"
        return ColumnType(
            name, Discrete(levels), f"whole numbers 1 to {levels}", doubt if scale else "", is_ordered=scale
        )
    if step[0] > 1 and (step == step[0]).all() and first in (0, step[0]):
        doubt = "amounts rather than codes? then m.Normal()"
        return ColumnType(name, Discrete(levels), f"{levels} values, evenly spaced: {_shown(distinct)}", doubt)
    return None


def _lie_as_counts(numbers: Floats) -> bool:
    """Whether shares of 0, 1, 2, ... are those of a Poisson or negative binomial count with their mean and variance.

    The last one is rare beside the commonest. Shares may differ from those of the count by a twentieth in all, beyond
    what chance makes of so many rows.
    """
    mean, variance, rows = float(numbers.mean()), float(numbers.var()), len(numbers)
    share = np.bincount(numbers.astype(np.int64)) / rows
    if rows < 10 * len(share) or variance < _RULES.least_dispersion * mean or share[-1] > 0.25 * share.max():
        return False
    # a negative binomial's size; as good as endless where the variance is a Poisson count's
    at, size = np.arange(len(share)), mean**2 / max(variance - mean, 1e-3 * mean)
    ways = sp.special.gammaln(at + size) - sp.special.gammaln(at + 1) - sp.special.gammaln(size)
    expected = np.exp(ways + size * np.log(size / (size + mean)) + at * np.log(mean / (size + mean)))
    expected[-1] += 1 - expected.sum()
    chance = 0.5 * np.sqrt(expected * (1 - expected) / rows).sum()
    return bool(0.5 * np.abs(share - expected).sum() <= 0.05 + chance)


def _of_many_whole(name: str, numbers: Floats, distinct: Floats) -> ColumnType:
    low, mean = float(distinct[0]), float(numbers.mean())
    reason = f"whole numbers from {low:g} to {distinct[-1]:g}"
    if _NAMES_CODES.search(name) and low >= 0:
        doubt = "by its name codes or ids: leave the column out, or make it a category of a few kinds"
        return ColumnType(name, Real(), reason, doubt, useless=len(distinct) == len(numbers))
    if _is_row_number(numbers, distinct):
        doubt = "every row has its own, nearly one after another: an id, a row number or a time; leave an id out"
        return ColumnType(name, Real(), reason, doubt, useless=True)
    if unlike := _unlike_counts(numbers, low, mean):
        return ColumnType(name, Real(), f"{reason}, {unlike}", _doubt_of_real(numbers, distinct))
    ratio = float(numbers.var()) / mean
    spread_out = ratio > 5 and len(numbers) >= _RULES.few_rows
    doubt = f"their variance is {ratio:.0f} times their mean: m.NegativeBinomial()?" if spread_out else ""
    return ColumnType(name, Count(), f"{reason}, as counts lie", doubt)


def _unlike_counts(numbers: Floats, low: float, mean: float) -> str:
    """What tells whole numbers from counts, which lie near zero with a tail to the right; empty if nothing does."""
    if low < 0:
        return "some of them negative"
    if low > max(2.0, mean / 3) or mean > _RULES.mean_count:
        return "too far from zero for counts"
    leans_left = _skewness(numbers) < -max(0.3, 2 * math.sqrt(6 / len(numbers)))  # beyond twice its error
    return "with their tail on the left, unlike counts" if leans_left else ""


_NUMBER_WITH_SIGN = re.compile(r"[-+]?[^\w\s.,+-]? ?[-+]?\d[\d.,]* ?([^\w\s.,]|[A-Za-z]{1,3})?")
_NAMES_CODES = re.compile(r"(^|[_\W])(id|key|zip|plz|post_?(al)?_?code|zip_?code|code|nr|no)($|[_\W])", re.IGNORECASE)


def _is_repeated(numbers: Floats, levels: int) -> bool:
    """Whether values come back, as those of categories do."""
    return len(numbers) >= 2 * levels


def _skewness(numbers: Floats) -> float:
    centred = numbers - numbers.mean()
    return float((centred**3).mean() / max((centred**2).mean() ** 1.5, 1e-300))


def _is_row_number(numbers: Floats, distinct: Floats) -> bool:
    """Whether all differ and fill most of their range."""
    rows = len(numbers)
    return rows >= _RULES.few_rows and len(distinct) == rows and distinct[-1] - distinct[0] <= 1.5 * rows


def _doubt_of_real(numbers: Floats, distinct: Floats) -> str:
    for code, others in ((distinct[0], distinct[1:]), (distinct[-1], distinct[:-1])):
        apart = code < 0 <= others.min() if code < others.min() else code > 2 * others.max() > 0
        if apart and (many := int((numbers == code).sum())) > 1 and re.fullmatch("-?9+", f"{code:.0f}"):
            return f"{many} cells are {code:g}, far from the others: a code for missing? then make them empty"
    if len(distinct) <= _RULES.codes and _is_repeated(numbers, len(distinct)):
        return f"only {len(distinct)} values, {_shown(distinct)}: if they are codes, m.Categorical({len(distinct)})"
    zeros = float((numbers == 0).mean())
    if distinct[0] >= 0 and zeros >= 0.25 and len(numbers) >= _RULES.few_rows:
        return f"{zeros:.0%} are zero: no normal column"
    if distinct[0] >= 0 and len(numbers) >= _RULES.few_rows:
        above = numbers[numbers > 0]
        instead = "m.LogNormal() or m.Gamma()" if distinct[0] > 0 else "as there are zeros, np.log1p of the column"
        if _skewness(above) > _RULES.skewed and abs(_skewness(np.log(above))) < _skewness(above):
            return f"a long tail to the right, as of areas, incomes and populations: {instead}?"
        below = float(sp.special.ndtr(-numbers.mean() / numbers.std()))
        if below > _RULES.below_zero:
            return f"a normal column would have {below:.0%} below zero, this one has none: {instead}?"
    return ""


def _shown(values: Iterable[float]) -> str:
    return listed(list(values), most=4, show=lambda value: f"{value:g}")


def count_categories(series: pd.Series[Any]) -> int | None:
    """How many categories a column shows, if it must be one: all values of text; None for numbers that are no codes."""
    labels = find_labels(series.dropna())
    if labels is not None:
        return max(2, len(labels))
    space = column_type(series).space
    return space.size if isinstance(space, Discrete) else None
