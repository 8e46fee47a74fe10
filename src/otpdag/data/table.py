"""From a table to a batch and back: numbers inside their space, codes of categories, NaN where missing, weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from otpdag.data.batch import ROWS_AT_ONCE, Batch
from otpdag.data.columns import (
    Column,
    Floats,
    Label,
    Schema,
    Table,
    as_label,
    as_numbers,
    column_title,
    frame_of,
    in_blocks,
    to_numpy,
)
from otpdag.errors import DataError, listed
from otpdag.numerics import Flags, Ints
from otpdag.spaces import SUM_TOLERANCE, Discrete

LARGEST = 1e150  # numbers whose squares, and sums of those over many rows, are still finite


def read_weights(weights: ArrayLike | None, rows: int, of: str = "rows") -> Floats:
    """Weights ``(R or 1, rows)`` of rows or other units, scaled to mean one."""
    if weights is None:
        return np.broadcast_to(1.0, (1, rows))
    array = np.atleast_2d(to_numpy(weights))
    if array.dtype.kind not in "biuf":
        raise DataError(f"weights must be numbers; got {weights!r:.60}")
    if array.ndim != 2 or array.shape[1] != rows:
        raise DataError(f"weights must have one entry for each of the {rows} {of}; got shape {np.shape(weights)}")
    array = array.astype(np.float64)
    check_weights(array, "" if of == "rows" else f"those of {of}")
    largest = array.max(1, keepdims=True)
    if (largest == 0).any():
        raise DataError("weights must not all be 0; found only zeros")
    array = array / largest  # whatever their size, their sum is finite
    total = np.array([[math.fsum(one)] for one in array])  # rounded once: the same in any order of the rows
    return array * (rows / total)


def check_weights(weights: Floats, where: str = "") -> None:
    """Refuse weights (..., rows) that are negative or not finite."""
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        where = where or f"row {first_row(bad.T)}"
        raise DataError(f"weights must be finite and at least 0; found {weights[bad][0]} in {where}")


def _checked_cells(frame: pd.DataFrame, node: str, column: Column, *, partial: bool, largest: float) -> Floats:
    """The cells (rows, cells) of a node as numbers, codes for categories, NaN where missing or absent."""
    if isinstance(column.space, Discrete) and column.names[0] in frame.columns:
        cells = _read_codes(frame[column.names[0]], node, column)[:, None]
    else:
        cells = _read_numbers(frame, node, column)
        _check_support(cells, node, column, largest)
    empty = np.isnan(cells[:1]).any() and np.isnan(cells).all(0)
    if not partial and np.any(empty):
        refuse_empty(node, column.names[int(np.argmax(empty))], len(cells))
    return cells


def refuse_empty(node: str, name: str, rows: int) -> NoReturn:
    """Tell that all cells of a column are missing."""
    raise DataError(
        f"{column_title(node, name)} must hold at least one value; all {rows} are missing. "
        f"If {node!r} is never seen, drop the column and make it hidden"
    )


def _read_numbers(frame: pd.DataFrame, node: str, column: Column) -> Floats:
    if len(column.names) > 1 and all(name in frame.columns for name in column.names):
        block = frame[list(column.names)]
        if all(isinstance(dtype, np.dtype) and dtype.kind in "biuf" for dtype in set(block.dtypes)):
            return block.to_numpy(dtype=np.float64)
    columns = [
        as_numbers(frame[name], column_title(node, name), "numbers")
        if name in frame.columns
        else np.full(len(frame), np.nan)
        for name in column.names
    ]
    return columns[0][:, None] if len(columns) == 1 else np.stack(columns, axis=1)


def _read_codes(series: pd.Series[Any], node: str, column: Column) -> Floats:
    where = column_title(node, column.names[0])
    if column.labels is not None:
        return _codes_of_labels(series, where, column.labels)
    expected = f"category codes from 0 to {column.space.width - 1}"
    codes = as_numbers(series, where, expected)
    with np.errstate(invalid="ignore"):
        bad = column.space.outside(codes) & ~np.isnan(codes)
    if bad.any():
        row = first_row(bad[:, None])
        raise DataError(
            f"{where} must hold {expected}; found {codes[row]:g} in row {row}. "
            "For categories of other names, use text or a pandas Categorical"
        )
    return codes


def _codes_of_labels(series: pd.Series[Any], where: str, labels: Sequence[Label]) -> Floats:
    code, codes, begin = {label: place for place, label in enumerate(labels)}, np.empty(len(series)), 0
    for part in in_blocks(series):
        try:
            place, distinct = pd.factorize(part)
        except TypeError:
            raise DataError(f"{where} must hold one of {listed(labels)}; some cell is a list or a table") from None
        shown = [as_label(value) for value in distinct]
        for index, label in enumerate(shown):
            if label not in code:
                row = begin + int((place == index).argmax())
                raise DataError(f"{where} must hold one of {listed(labels)}; found {label!r} in row {row}")
        known = np.array([*(code[label] for label in shown), np.nan])
        codes[begin : begin + len(part)] = known[place]  # a missing value has place -1: the NaN at the end
        begin += len(part)
    return codes


def _check_support(cells: Floats, node: str, column: Column, largest: float) -> None:
    if column.space.is_unbounded and cells.size and largest < np.inf:
        lowest, highest = np.float64(cells.min()), np.float64(cells.max())
        if -largest <= lowest <= highest <= largest:
            return  # there are no gaps either: the smallest of numbers with a gap among them is a gap
    expected, seen = column.space.holds, ~np.isnan(cells)
    bad = np.zeros_like(seen)
    for begin in range(0, len(cells), ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        with np.errstate(invalid="ignore"):
            bad[rows] = np.abs(cells[rows]) > np.float64(largest)
            bad[rows] |= seen[rows] & (np.isinf(cells[rows]) | column.space.outside(cells[rows]))
    if bad.any():
        row, cell = (int(place) for place in np.argwhere(bad)[0])
        if abs(cells[row, cell]) > largest or np.isinf(cells[row, cell]):
            expected = "finite numbers" if np.isinf(cells[row, cell]) else f"numbers of at most {largest:g} in size"
        where = column_title(node, column.names[cell])
        raise DataError(f"{where} must hold {expected}; found {cells[row, cell]:g} in row {row}")
    if column.space.total is not None:
        _check_sums(cells, seen, node)


def _check_sums(cells: Floats, seen: Flags, node: str) -> None:
    """Shares must sum to one; if some are missing, to at most one."""
    total = np.where(seen, cells, 0.0).sum(1)
    bad = (total > 1 + SUM_TOLERANCE) | (seen.all(1) & (total < 1 - SUM_TOLERANCE))
    if bad.any():
        row = first_row(bad[:, None])
        raise DataError(f"columns of node {node!r} must sum to 1 in every row; found {total[row]:g} in row {row}")


def first_row(bad: Flags) -> int:
    """The first row with a bad cell."""
    return int(bad.any(1).argmax())


@dataclass(frozen=True)
class Cells:
    """The checked cells of a table, which need not be copies of the table's own.

    Attributes:
        columns: What they mean, for each node.
        numbers: For each node numbers or codes of categories (N, cells), NaN where missing.
        weight: Weights of the rows (R or 1, N), whose mean is one.
    """

    columns: Mapping[str, Column]
    numbers: dict[str, Floats]
    weight: Floats

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.weight.shape[1]

    def batch(self, order: Ints | None = None, *, narrow: bool = False) -> Batch:
        """The rows as tensors of their own, in another order where one is given.

        The cells are used up on the way, so that a table is never held twice. A ``narrow`` batch has bytes for one-hot
        vectors, and one number for weights that are equal.
        """
        values, mask = {}, {}
        complete: dict[int, Tensor] = {}  # flags of columns without gaps, which share them
        for node in list(self.numbers):
            cells = self.numbers.pop(node)
            width = cells.shape[1]
            cells = cells.copy() if order is None else np.take(cells, order, axis=0)
            space = self.columns[node].space
            if space.is_discrete and len(cells) * space.width > 2**29:  # four gigabytes of one-hot vectors
                raise DataError(
                    f"column {node!r} has {space.width} categories in {len(cells)} rows, more than memory holds; "
                    "put rare categories together, or take a random part of the rows"
                )
            values[node] = space.encode(cells, torch.uint8 if narrow and space.is_discrete else torch.float64)[None]
            if cells.size and np.isnan(cells.min()):
                mask[node] = torch.from_numpy(~np.isnan(cells))[None]
            else:
                mask[node] = complete.setdefault(width, torch.ones(1, len(cells), width, dtype=torch.bool))
        alike = bool((self.weight == self.weight[:, :1]).all())
        if narrow and alike:
            weight = torch.from_numpy(self.weight[:, :1].copy()).expand(-1, self.rows)
        else:
            weight = torch.from_numpy(self.weight.copy() if order is None or alike else self.weight[:, order])
        return Batch(values, mask, weight)


def encode(
    data: Table, schema: Schema, *, hidden: Iterable[str], weights: ArrayLike | None = None, partial: bool = False
) -> Batch:
    """Check a table and turn it into a batch of the nodes that are not hidden.

    All checks come before any other work. Columns that belong to no node are ignored.

    Args:
        data: A DataFrame; a mapping from node names to arrays or tensors, ``(N,)`` or ``(N, cells)``; or a
            2-D array or tensor whose columns are the cells of the nodes in the order of the schema.
        schema: What the columns mean.
        hidden: Nodes to leave out; they must have no column.
        weights: Row weights ``(N,)``, or ``(R, N)`` for replicas that differ in their weights; scaled to mean
            one.
        partial: Allow columns that are absent or empty (all missing), and a single row.

    Returns:
        A batch with one replica, or as many as ``weights`` has rows.

    Raises:
        DataError: The table does not fit the schema; the message names the column, what it should hold and
            what was found.

    >>> from otpdag.graph import Graph
    >>> from otpdag.spaces import Discrete, Real
    >>> schema = Schema.of({"a": Discrete(3), "b": Real()}, Graph([("a", "b")]))
    >>> batch = encode({"a": [0, 2, None], "b": [1.5, None, 2.5]}, schema, hidden=())
    >>> batch.values["a"][0].tolist(), batch.mask["b"][0, :, 0].tolist()
    ([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], [True, False, True])
    """
    return read_cells(data, schema, hidden=hidden, weights=weights, partial=partial).batch()


def read_cells(
    data: Table,
    schema: Schema,
    *,
    hidden: Iterable[str],
    weights: ArrayLike | None = None,
    partial: bool = False,
    largest: float | None = None,
    least: int = 2,
) -> Cells:
    """Check a table, as :func:`encode` does, and leave its cells where they are; it needs so many rows at ``least``.

    Numbers of more than the ``largest`` size are refused: by default such whose squares overflow, none if ``partial``.
    """
    hidden = set(hidden)
    read = {node: column for node, column in schema.columns.items() if node not in hidden}
    frame = frame_of(data, read)
    known: Collection[Any] = data if isinstance(data, Mapping) else frame.columns
    for node, column in schema.columns.items():
        if node in hidden:
            check_unseen(known, node, column)
        elif not partial:
            check_seen(frame.columns, node, column, known)
    least = 1 if partial else least
    if len(frame) < least:
        raise DataError(f"data must have at least {least} row{'s' * (least > 1)}; got {len(frame)}")
    weight = read_weights(weights, len(frame))
    bound = largest or (np.inf if partial else LARGEST)
    cells = {node: _checked_cells(frame, node, read[node], partial=partial, largest=bound) for node in read}
    return Cells(read, cells, weight)


def check_seen(
    columns: Collection[Any], node: str, column: Column, known: Collection[Any], what: str = "table"
) -> None:
    """Refuse columns among which one of an observed node is missing; ``known`` is what the table has."""
    absent = next((name for name in column.names if name not in columns), None)
    if absent is not None:
        is_of_group = str(absent).endswith("]") and str(absent).rpartition("[")[0] in known
        cure = (
            "otp.interop.by_group makes a table of groups"
            if is_of_group
            else f"If {node!r} is never seen, make it hidden"
        )
        raise DataError(
            f"{column_title(node, absent)} is missing; the {what} has the columns {listed(list(known))}. {cure}"
        )


def check_unseen(known: Collection[Any], node: str, column: Column, what: str = "table") -> None:
    """Refuse columns among which there is one of a hidden node."""
    for name in dict.fromkeys((node, *column.names)):
        if name in known:
            raise DataError(
                f"node {node!r} is hidden, but the {what} has a column {name!r}; "
                "drop the column or take the node out of hidden"
            )


# -- and back ----------------------------------------------------------------------------------------------------------


def decode(values: Mapping[str, ArrayLike], schema: Schema) -> pd.DataFrame:
    """Turn values of nodes into a table, hidden nodes as well.

    Args:
        values: For each node an array ``(N, width)`` or ``(1, N, width)``; the category of a one-hot or soft
            row is its largest entry.
        schema: What the columns are called.

    Returns:
        One column for each cell, in the order of the schema, with labels restored and counts as integers.

    Raises:
        DataError: A node is unknown, or a shape does not fit.

    >>> from otpdag.graph import Graph
    >>> from otpdag.spaces import Discrete
    >>> schema = Schema.of({"a": Discrete(2)}, Graph([], nodes=["a"]), pd.DataFrame({"a": ["no", "yes"]}))
    >>> decode({"a": [[0.0, 1.0], [0.9, 0.1]]}, schema)["a"].tolist()
    ['yes', 'no']
    """
    for node in values:
        _ = schema[node]  # refuses an unknown node
    table: dict[str, Any] = {}
    rows: int | None = None
    for node in (name for name in schema.nodes if name in values):
        column = schema[node]
        array = _two_dimensional(node, values[node], column.space.width)
        rows = len(array) if rows is None else rows
        if len(array) != rows:
            raise DataError(f"values of node {node!r} must have {rows} rows like the others; got {len(array)}")
        table.update(zip(column.names, _to_columns(array, column), strict=True))
    return pd.DataFrame(table)


def _two_dimensional(node: str, value: Any, width: int) -> NDArray[Any]:
    array = to_numpy(value)
    if array.ndim == 1 and width == 1:
        array = array[:, None]
    elif array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or array.shape[1] != width:
        raise DataError(f"values of node {node!r} must have shape (rows, {width}); got {np.shape(value)}")
    return array


def _to_columns(array: NDArray[Any], column: Column) -> list[Any]:
    """One column for each cell, missing where NaN."""
    cells = column.space.decode(array)
    shown = ~np.isnan(cells)
    if column.space.is_discrete:
        codes = np.where(shown[:, 0], cells[:, 0], 0).astype(np.int64)
        return [_categories(codes, column.labels, shown[:, 0])]
    if column.space.is_countable:
        return [_whole(numbers, seen) for numbers, seen in zip(cells.T, shown.T, strict=True)]
    return list(cells.T)


def _whole(numbers: NDArray[Any], known: Flags) -> Any:
    """Whole numbers: plain integers if all are known, else pandas' nullable ones."""
    whole = np.rint(np.where(known, numbers, 0)).astype(np.int64)
    return whole if known.all() else pd.arrays.IntegerArray(whole, ~known)


def _categories(codes: Ints, labels: Sequence[Label] | None, known: Flags) -> Any:
    if labels is None:
        return _whole(codes, known)
    if all(isinstance(label, bool) for label in labels):
        truth = np.array(labels)[codes]
        return truth if known.all() else pd.arrays.BooleanArray(truth, ~known)
    names = np.empty(len(labels) + 1, dtype=object)  # None at the end stands for what is missing
    names[:-1] = labels
    return pd.Series(names[np.where(known, codes, -1)]).infer_objects()
