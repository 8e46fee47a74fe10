"""Data: tables of any kind become a :class:`Batch` of tensors, and tensors become tables again.

Three steps, each a pure function of its arguments: :meth:`Schema.of` settles once which columns hold which
node and what the categories are called; :func:`encode` checks a table against the schema and turns it into a
batch; :func:`decode` turns tensors back into a table. NaN, None, ``pd.NA`` and ``NaT`` are missing values.
This is the only module that knows pandas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from otpdag import spaces as _spaces
from otpdag.errors import DataError
from otpdag.graph import Graph
from otpdag.spaces import Count, Discrete, Real, Space

__all__ = [
    "Batch",
    "Column",
    "Label",
    "Schema",
    "Table",
    "decode",
    "distinct_rows",
    "encode",
    "infer_space",
    "read_table",
    "unique_rows",
]

Label: TypeAlias = str | bool | int | float
Table: TypeAlias = pd.DataFrame | Mapping[str, Any] | npt.NDArray[Any] | Tensor
Floats: TypeAlias = npt.NDArray[np.float64]
Codes: TypeAlias = npt.NDArray[np.int64]

_NUMERIC_KINDS = {"integer", "floating", "mixed-integer-float", "decimal", "boolean", "empty"}
_SUM_TOLERANCE = 1e-6
_MOST_CATEGORIES = 10  # whole numbers 0..K-1 with K up to here are taken for categories


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a table as tensors, with a leading replica axis.

    The replica axis of a tensor has length R, or 1 where all replicas share it. A missing value is 0 in
    ``values``; the row of a missing category is all zeros.

    Attributes:
        values: For each node a tensor ``(R or 1, N, width)``.
        mask: For each node a Boolean tensor ``(R or 1, N, cells)``, true where the cell was seen.
        weight: Weights of the rows, ``(R or 1, N)``.

    >>> batch = Batch({"x": torch.zeros(1, 5, 2)}, {"x": torch.ones(1, 5, 2).bool()}, torch.ones(1, 5))
    >>> batch.rows, batch.replicas, batch.nodes
    (5, 1, ('x',))
    >>> batch.take(torch.tensor([[0, 1, 2], [4, 4, 4]]))
    Batch(3 rows, 2 replicas: x)
    """

    values: dict[str, Tensor]
    mask: dict[str, Tensor]
    weight: Tensor

    def __repr__(self) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"Batch({self.rows} rows{replicas}: {', '.join(self.nodes)})"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that the batch holds."""
        return tuple(self.values)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.weight.shape[1]

    @property
    def replicas(self) -> int:
        """Number of replicas; 1 if all tensors are shared."""
        return max(tensor.shape[0] for tensor in (self.weight, *self.values.values(), *self.mask.values()))

    def take(self, index: Tensor) -> Batch:
        """Pick rows.

        Args:
            index: Row numbers ``(n,)``, the same for all replicas (or a Boolean tensor of length N), or row
                numbers ``(R, n)`` for each replica.

        Returns:
            A batch of the rows in the order of ``index``.

        Raises:
            DataError: ``index`` has another number of dimensions.
        """
        if index.ndim not in (1, 2):
            raise DataError(f"index must have shape (n,) or (replicas, n); got {tuple(index.shape)}")
        if index.ndim == 1:
            return self._map(lambda tensor: _pick_rows(tensor, index))
        replicas = max(self.replicas, len(index))
        index = index.expand(replicas, -1)
        start = torch.arange(0, replicas * self.rows, self.rows, device=index.device)[:, None]
        own, shared = (index + start).flatten(), index.flatten()

        def gathered(tensor: Tensor) -> Tensor:
            flat = tensor.flatten(0, 1).index_select(0, shared if len(tensor) == 1 else own)
            return flat.unflatten(0, index.shape)

        return self._map(gathered)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batch:
        """Move to another device, or change the floating type.

        Args:
            device: Where to; if left out, stay.
            dtype: Floating type of values and weights; masks stay Boolean.

        Returns:
            A new batch.
        """
        return self._map(lambda tensor: tensor.to(device, None if tensor.dtype == torch.bool else dtype))

    def fully_observed(self, node: str) -> Tensor:
        """Tell in which rows every cell of ``node`` was seen, as a Boolean tensor ``(R or 1, N)``."""
        if node not in self.mask:
            raise DataError(f"node {node!r} is not in the batch, which holds {_listed(self.nodes)}")
        return self.mask[node].all(-1)

    @staticmethod
    def stack(batches: Sequence[Batch]) -> Batch:
        """Join batches of the same number of rows as replicas of one.

        Args:
            batches: Batches with the same nodes; their replicas follow each other.

        Returns:
            One batch.

        Raises:
            DataError: There is none, or they differ in rows or nodes.

        >>> batch = Batch({}, {}, torch.ones(1, 5))
        >>> Batch.stack([batch, batch]).replicas
        2
        """
        if not batches:
            raise DataError("batches must hold at least one batch; got none")
        first = batches[0]
        for other in batches:
            if (other.rows, set(other.nodes)) != (first.rows, set(first.nodes)):
                raise DataError(f"batches must have the same rows and nodes; got {first!r} and {other!r}")

        def joined(parts: Iterable[Tensor]) -> Tensor:
            sized = zip(parts, batches, strict=True)
            return torch.cat([part.expand(batch.replicas, *part.shape[1:]) for part, batch in sized])

        return Batch(
            {node: joined(batch.values[node] for batch in batches) for node in first.nodes},
            {node: joined(batch.mask[node] for batch in batches) for node in first.nodes},
            joined(batch.weight for batch in batches),
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            {node: function(tensor) for node, tensor in self.values.items()},
            {node: function(tensor) for node, tensor in self.mask.items()},
            function(self.weight),
        )


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


@dataclass(frozen=True)
class Schema:
    """Which columns hold which node, hidden ones included.

    A node of one cell has the column of its own name, a node ``x`` of several the columns ``x.0``, ``x.1``
    and so on. Build one with :meth:`of`.

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
        categories of a pandas Categorical in their order, False and True, or the sorted distinct values of a
        column of text. Categories that the space has and the table does not show are called ``(unseen k)``.

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
        plain = {node: Column(spaces[node], None, _cell_names(node, spaces[node])) for node in graph.nodes}
        _check_claims(plain)
        if data is None:
            return cls(plain)
        seen = {node: column for node, column in plain.items() if node not in graph.hidden}
        blocks, _ = _read_blocks(data, seen, partial=True)
        return cls({node: _with_labels(node, column, blocks.get(node)) for node, column in plain.items()})

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, in the order of the graph."""
        return tuple(self.columns)

    def __getitem__(self, node: str) -> Column:
        if node not in self.columns:
            raise DataError(f"node {node!r} is not in the schema, which holds {_listed(self.nodes)}")
        return self.columns[node]

    def to_dict(self) -> dict[str, Any]:
        """Write lists, numbers and strings only, for JSON."""
        return {
            node: {
                "space": {"kind": type(column.space).__name__, **asdict(column.space)},  # type: ignore[call-overload]
                "labels": None if column.labels is None else list(column.labels),
                "names": list(column.names),
            }
            for node, column in self.columns.items()
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Schema:
        """Read what :meth:`to_dict` wrote.

        Args:
            state: For each node its ``space``, ``labels`` and ``names``.

        Returns:
            The schema.

        Raises:
            DataError: A space is of an unknown kind.
        """
        return cls({node: _column_from_dict(node, entry) for node, entry in state.items()})

    def to_json(self) -> str:
        """Write JSON text.

        >>> schema = Schema.of({"a": Discrete(3), "b": Count()}, Graph([("a", "b")]))
        >>> Schema.from_json(schema.to_json()) == schema
        True
        """
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Read what :meth:`to_json` wrote."""
        return cls.from_dict(json.loads(text))


def encode(
    data: Table,
    schema: Schema,
    *,
    hidden: Iterable[str],
    weights: npt.ArrayLike | Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    partial: bool = False,
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
        dtype: Floating type of the batch.
        partial: Allow columns that are absent or empty (all missing), and a single row.

    Returns:
        A batch with one replica, or as many as ``weights`` has rows.

    Raises:
        DataError: The table does not fit the schema; the message names the column, what it should hold and
            what was found.

    >>> schema = Schema.of({"a": Discrete(3), "b": Real()}, Graph([("a", "b")]))
    >>> batch = encode({"a": [0, 2, None], "b": [1.5, None, 2.5]}, schema, hidden=())
    >>> batch.values["a"][0].tolist(), batch.mask["b"][0, :, 0].tolist()
    ([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], [True, False, True])
    """
    hidden = set(hidden)
    read = {node: column for node, column in schema.columns.items() if node not in hidden}
    for node in schema.nodes:
        if node in hidden:
            _check_unseen(data, node, schema[node])
    blocks, rows = _read_blocks(data, read, partial=partial)
    if rows < (1 if partial else 2):
        raise DataError(f"data must have at least {1 if partial else 2} rows; got {rows}")
    weight = _read_weights(weights, rows)
    cells = {node: _checked(node, read[node], block, partial) for node, block in blocks.items()}
    return Batch(
        {node: _to_values(cells[node], read[node].space, dtype) for node in read},
        {node: torch.from_numpy(~np.isnan(cells[node]))[None] for node in read},
        torch.from_numpy(weight).to(dtype),
    )


def decode(
    values: Mapping[str, npt.ArrayLike | Tensor],
    schema: Schema,
    *,
    mask: Mapping[str, npt.ArrayLike | Tensor] | None = None,
) -> pd.DataFrame:
    """Turn values of nodes into a table, hidden nodes as well.

    Args:
        values: For each node an array ``(N, width)`` or ``(1, N, width)``; the category of a one-hot or soft
            row is its largest entry.
        schema: What the columns are called.
        mask: For each node, or for some, which cells to show, ``(N, cells)`` or ``(1, N, cells)``; the others
            become missing.

    Returns:
        One column for each cell, in the order of the schema, with labels restored and counts as integers.

    Raises:
        DataError: A node is unknown, or a shape does not fit.

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
        array = _two_dimensional(node, "values", values[node], column.space.width)
        rows = len(array) if rows is None else rows
        if len(array) != rows:
            raise DataError(f"values of node {node!r} must have {rows} rows like the others; got {len(array)}")
        shown = np.ones((rows, column.space.cells), dtype=bool)
        if mask is not None and node in mask:
            shown = _two_dimensional(node, "mask", mask[node], column.space.cells).astype(bool)
            if len(shown) != rows:
                raise DataError(f"mask of node {node!r} must have {rows} rows like its values; got {len(shown)}")
        table.update(zip(column.names, _to_columns(array, column, shown), strict=True))
    return pd.DataFrame(table)


def read_table(path: str | Path) -> pd.DataFrame:
    """Read a table from a file.

    Args:
        path: A file that ends in ``.csv`` or ``.parquet``; the latter needs pyarrow.

    Returns:
        The table.

    Raises:
        DataError: The file is of another kind, does not exist, or needs a package that is not installed.
    """
    path = Path(path)
    if path.suffix not in (".csv", ".parquet"):
        raise DataError(f"path must end in .csv or .parquet; got {str(path)!r}")
    if not path.is_file():
        raise DataError(f"path must be a file that exists; got {str(path)!r}")
    if path.suffix == ".csv":
        return pd.read_csv(path)
    try:
        return pd.read_parquet(path)
    except ImportError as error:
        raise DataError(f"path {str(path)!r} needs the package pyarrow: pip install pyarrow") from error


def infer_space(series: pd.Series[Any]) -> Space:
    """Suggest a space for a column, by this rule.

    - Text, Booleans and pandas categories: :class:`~otpdag.spaces.Discrete`, as many as there are.
    - Whole numbers that are exactly 0, 1, ..., K-1 with K from 2 to 10: ``Discrete(K)``.
    - Other whole numbers, none negative: :class:`~otpdag.spaces.Count`.
    - All other numbers: :class:`~otpdag.spaces.Real`.

    A floating column is taken for whole numbers only if all its values are whole and some are missing,
    because pandas stores integers with gaps that way. Rates, shares and durations come out as ``Real``: name
    a tighter space yourself.

    Args:
        series: A column.

    Returns:
        The suggestion.

    Raises:
        DataError: The column has no value, or holds neither numbers nor categories.

    >>> infer_space(pd.Series(["wet", "dry", None]))
    Discrete(size=2)
    >>> infer_space(pd.Series([12, 0, 7])), infer_space(pd.Series([1.0, 2.5]))
    (Count(dim=1), Real(dim=1))
    """
    present = series.dropna()
    where = f"column {series.name!r}"
    if present.empty:
        raise DataError(f"{where} must hold at least one value; all {len(series)} are missing")
    labels = _find_labels(present)
    if labels is not None:
        return Discrete(max(2, len(labels)))
    numbers = _numbers(present, where, "numbers or categories")
    whole = bool((numbers == np.floor(numbers)).all())
    if pd.api.types.is_float_dtype(present.dtype) and len(present) == len(series):
        whole = False
    if not whole:
        return Real()
    distinct = np.unique(numbers)
    if 2 <= len(distinct) <= _MOST_CATEGORIES and np.array_equal(distinct, np.arange(len(distinct))):
        return Discrete(len(distinct))
    return Count() if distinct[0] >= 0 else Real()


def unique_rows(batch: Batch, *, shrink: float = 0.5) -> Batch:
    """Collapse rows that agree in all values and masks, and add up their weights.

    Tables of categories often have few distinct rows. The total weight stays what it was, so that the mean
    weight of the collapsed rows is above one.

    Args:
        batch: Any batch; with several replicas, rows collapse only where they agree in all of them.
        shrink: Collapse only to at most this share of the rows; otherwise return the batch as it is.

    Returns:
        The distinct rows in the order of their first appearance.

    >>> schema = Schema.of({"a": Discrete(2)}, Graph([], nodes=["a"]))
    >>> unique_rows(encode({"a": [0, 1, 1, 1]}, schema, hidden=())).weight
    tensor([[1., 3.]], dtype=torch.float64)
    """
    group, groups = distinct_rows((*batch.values.values(), *batch.mask.values()))
    if groups > shrink * batch.rows:
        return batch
    first = np.empty(groups, dtype=np.int64)
    first[group[::-1]] = np.arange(batch.rows)[::-1]
    collapsed = batch.take(torch.from_numpy(first).to(batch.weight.device))
    summed = torch.zeros_like(collapsed.weight)
    summed.index_add_(1, torch.from_numpy(group).to(batch.weight.device), batch.weight)
    return Batch(collapsed.values, collapsed.mask, summed)


def distinct_rows(tensors: Sequence[Tensor]) -> tuple[Codes, int]:
    """Number the distinct rows of tensors ``(R, N, width)`` taken together.

    Args:
        tensors: At least one tensor, all with the same rows.

    Returns:
        The number of each row's kind, and how many kinds there are.

    >>> distinct_rows([torch.tensor([[[5.0], [7.0], [5.0]]])])
    (array([0, 1, 0]), 2)
    """
    group, groups = np.zeros(tensors[0].shape[1], dtype=np.int64), 1
    for tensor in tensors:
        for codes, size in _tensor_codes(tensor):
            if groups > 2**62 // size:
                group, groups = _factorize(group)
            group, groups = group * size + codes, groups * size
    return _factorize(group)


# --- rows of a batch --------------------------------------------------------------------------------------


def _pick_rows(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor[:, index] if index.dtype == torch.bool else tensor.index_select(1, index)


def _factorize(array: npt.NDArray[Any]) -> tuple[Codes, int]:
    codes, distinct = pd.factorize(array, use_na_sentinel=False)
    return codes.astype(np.int64), len(distinct)


def _tensor_codes(tensor: Tensor) -> Iterable[tuple[Codes, int]]:
    """Integers that differ where rows differ: one array for a one-hot tensor, else one per coordinate."""
    array = tensor.detach().cpu().numpy()
    wide = array.transpose(1, 0, 2).reshape(array.shape[1], -1)
    if array.dtype != bool and array.shape[0] == 1 and _is_one_hot(wide):
        yield (wide @ np.arange(1, wide.shape[1] + 1)).astype(np.int64), wide.shape[1] + 1
        return
    for column in wide.T:
        yield _factorize(column)


def _is_one_hot(wide: npt.NDArray[Any]) -> bool:
    return bool(((wide == 0) | (wide == 1)).all() and (wide.sum(1) <= 1).all())


# --- schema -----------------------------------------------------------------------------------------------


def _cell_names(node: str, space: Space) -> tuple[str, ...]:
    return (node,) if space.cells == 1 else tuple(f"{node}.{cell}" for cell in range(space.cells))


def _check_claims(columns: Mapping[str, Column]) -> None:
    owner: dict[str, str] = {}
    for node, column in columns.items():
        for name in column.names:
            if name in owner:
                raise DataError(f"nodes {owner[name]!r} and {node!r} both claim column {name!r}; rename one of them")
            owner[name] = node


def _with_labels(node: str, column: Column, block: pd.DataFrame | None) -> Column:
    if block is None or not isinstance(column.space, Discrete):
        return column
    present, size = block.iloc[:, 0].dropna(), column.space.size
    labels = _find_labels(present)
    if labels is None:
        return column
    if len(labels) > size and isinstance(present.dtype, pd.CategoricalDtype):
        labels = _find_labels(present.cat.remove_unused_categories()) or ()
    if len(labels) > size:
        raise DataError(
            f"{_where(node, column.names[0])} must hold at most {size} categories; "
            f"found {len(labels)}: {_listed(labels)}"
        )
    unseen = tuple(f"(unseen {code})" for code in range(len(labels), size))
    return Column(column.space, (*labels, *unseen), column.names)


def _find_labels(present: pd.Series[Any]) -> tuple[Label, ...] | None:
    """The categories of a column without missing values, or None if it holds numbers (or nothing)."""
    if isinstance(present.dtype, pd.CategoricalDtype):
        return tuple(_label(value) for value in present.dtype.categories)
    kind = pd.api.types.infer_dtype(present, skipna=True)
    if kind == "boolean":
        return (False, True)
    if kind in _NUMERIC_KINDS or kind.startswith(("datetime", "timedelta", "complex")):
        return None
    return tuple(sorted({_label(value) for value in present.unique()}, key=lambda x: (type(x).__name__, x)))


def _label(value: Any) -> Label:
    """A category as a value that JSON knows."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, (str, bool, int, float)) else str(value)


def _column_from_dict(node: str, entry: Mapping[str, Any]) -> Column:
    kinds = [name for name in _spaces.__all__ if name != "Space"]
    settings = dict(entry["space"])
    kind = settings.pop("kind", None)
    if kind not in kinds:
        raise DataError(f"node {node!r}: space must be one of {_listed(kinds)}; got {kind!r}")
    labels = entry["labels"]
    space = getattr(_spaces, kind)(**settings)
    return Column(space, None if labels is None else tuple(labels), tuple(entry["names"]))


# --- reading tables of any kind -----------------------------------------------------------------------------


def _read_blocks(data: object, columns: Mapping[str, Column], *, partial: bool) -> tuple[dict[str, pd.DataFrame], int]:
    """One frame for each node, with the node's columns, and the number of rows."""
    if isinstance(data, pd.DataFrame):
        return {node: _from_frame(data, node, column, partial) for node, column in columns.items()}, len(data)
    if isinstance(data, Mapping):
        return _read_mapping(data, columns, partial=partial)
    if isinstance(data, (np.ndarray, Tensor)):
        return _read_array(_to_numpy(data), columns)
    hint = "; read a file with read_table" if isinstance(data, (str, Path)) else ""
    raise DataError(
        "data must be a DataFrame, a mapping from nodes to arrays, or a 2-D numpy or torch array; "
        f"got {type(data).__name__}{hint}"
    )


def _from_frame(frame: pd.DataFrame, node: str, column: Column, partial: bool) -> pd.DataFrame:
    known = frame.columns
    absent = [name for name in column.names if name not in known]
    if absent and not partial:
        raise DataError(
            f"{_where(node, absent[0])} is missing; the table has the columns {_listed(list(known))}. "
            f"If {node!r} is never seen, make it hidden"
        )
    block = frame.loc[:, [name for name in column.names if name not in absent]]
    if block.shape[1] > len(column.names) - len(absent):
        name = block.columns[block.columns.duplicated()][0]
        raise DataError(f"{_where(node, name)} must be there once; the table has several of that name")
    return block.reindex(columns=list(column.names)) if absent else block


def _read_mapping(
    data: Mapping[str, Any], columns: Mapping[str, Column], *, partial: bool
) -> tuple[dict[str, pd.DataFrame], int]:
    blocks: dict[str, pd.DataFrame] = {}
    for node, column in columns.items():
        if node in data:
            blocks[node] = _from_value(data[node], node, column)
        elif any(name in data for name in column.names) or not partial:
            cells = {name: _from_value(data[name], node, column, name) for name in column.names if name in data}
            joined = pd.concat([*cells.values()], axis=1) if cells else pd.DataFrame(columns=list(data))
            blocks[node] = _from_frame(joined, node, column, partial)
    lengths = {node: len(block) for node, block in blocks.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"data must have the same number of rows for every node; got {lengths}")
    rows = next(iter(lengths.values()), 0)
    for node in columns.keys() - blocks.keys():
        blocks[node] = pd.DataFrame(np.nan, index=range(rows), columns=list(columns[node].names))
    return {node: blocks[node] for node in columns}, rows


def _from_value(value: Any, node: str, column: Column, name: str | None = None) -> pd.DataFrame:
    """A frame from one entry of a mapping: all cells of a node, or the cell called ``name``."""
    names = column.names if name is None else (name,)
    if isinstance(value, (pd.Series, pd.Categorical, pd.Index, pd.api.extensions.ExtensionArray)):
        return pd.DataFrame({names[0]: pd.Series(value).reset_index(drop=True)}, columns=list(names))
    array = np.atleast_1d(_to_numpy(value))
    if array.dtype.kind in "OU":  # keep None and text as they are
        array = np.atleast_1d(np.asarray(value, dtype=object))
    wide = array[:, None] if array.ndim == 1 else array.reshape(len(array), -1)
    if wide.shape[1] != len(names):
        raise DataError(f"data[{name or node!r}] must have shape (rows, {len(names)}) for that node; got {array.shape}")
    return pd.DataFrame(wide, columns=list(names))


def _read_array(array: npt.NDArray[Any], columns: Mapping[str, Column]) -> tuple[dict[str, pd.DataFrame], int]:
    names = [name for column in columns.values() for name in column.names]
    if array.ndim == 1 and len(names) == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] != len(names):
        raise DataError(f"data must have {len(names)} columns ({_listed(names)}); got shape {array.shape}")
    blocks, start = {}, 0
    for node, column in columns.items():
        stop = start + len(column.names)
        blocks[node] = pd.DataFrame(array[:, start:stop], columns=list(column.names))
        start = stop
    return blocks, len(array)


def _to_numpy(value: Any) -> npt.NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _check_unseen(data: Table, node: str, column: Column) -> None:
    known: Iterable[Any] = ()
    if isinstance(data, pd.DataFrame):
        known = data.columns
    elif isinstance(data, Mapping):
        known = data.keys()
    for name in dict.fromkeys((node, *column.names)):
        if name in known:
            raise DataError(
                f"node {node!r} is hidden, but the table has a column {name!r}; "
                "drop the column or take the node out of hidden"
            )


def _read_weights(weights: npt.ArrayLike | Tensor | None, rows: int) -> Floats:
    if weights is None:
        return np.ones((1, rows))
    array = np.atleast_2d(_to_numpy(weights))
    if array.dtype.kind not in "biuf":
        raise DataError(f"weights must be numbers; got {weights!r:.60}")
    if array.ndim != 2 or array.shape[1] != rows:
        raise DataError(f"weights must have one entry for each of the {rows} rows; got shape {np.shape(weights)}")
    array = array.astype(np.float64)
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        raise DataError(f"weights must be finite and at least 0; found {array[bad][0]} in row {_first_row(bad.T)}")
    total = array.sum(1, keepdims=True)
    if (total == 0).any():
        raise DataError("weights must not all be 0; found only zeros")
    return array * (rows / total)


# --- checking cells ---------------------------------------------------------------------------------------


def _checked(node: str, column: Column, block: pd.DataFrame, partial: bool) -> Floats:
    """The cells of a node as numbers, codes for categories, NaN where missing."""
    if isinstance(column.space, Discrete):
        cells = _read_codes(block.iloc[:, 0], node, column)[:, None]
    else:
        cells = _read_numbers(block, node)
        _check_support(cells, node, column)
    empty = np.isnan(cells).all(0)
    if empty.any() and not partial:
        name = column.names[int(empty.argmax())]
        raise DataError(
            f"{_where(node, name)} must hold at least one value; all {len(cells)} are missing. "
            f"If {node!r} is never seen, drop the column and make it hidden"
        )
    return cells


def _read_numbers(block: pd.DataFrame, node: str) -> Floats:
    dtypes = set(block.dtypes)
    if all(isinstance(dtype, np.dtype) and dtype.kind in "biuf" for dtype in dtypes):
        return block.to_numpy() if dtypes == {np.dtype(np.float32)} else block.to_numpy(dtype=np.float64)
    columns = [_numbers(block[name], _where(node, str(name)), "numbers") for name in block.columns]
    return np.stack(columns, axis=1)


def _numbers(series: pd.Series[Any], where: str, expected: str) -> Floats:
    """A column as floats, NaN where missing; text and dates are refused even if they look like numbers."""
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(object)
    present = series.dropna()
    if pd.api.types.infer_dtype(present, skipna=True) not in _NUMERIC_KINDS:
        odd = [not isinstance(value, (int, float, np.number, np.bool_)) for value in present.array]
        place = int(np.flatnonzero(series.notna())[odd.index(True) if True in odd else 0])
        found = series.iloc[place]
        raise DataError(f"{where} must hold {expected}; found {_label(found)!r} in row {place}")
    return series.to_numpy(dtype=np.float64, na_value=np.nan)


def _read_codes(series: pd.Series[Any], node: str, column: Column) -> Floats:
    where = _where(node, column.names[0])
    if column.labels is not None:
        return _codes_of_labels(series, where, column.labels)
    expected = f"category codes from 0 to {column.space.width - 1}"
    codes = _numbers(series, where, expected)
    with np.errstate(invalid="ignore"):
        bad = (codes < 0) | (codes >= column.space.width) | (codes != np.floor(codes))
    bad &= ~np.isnan(codes)
    if bad.any():
        row = _first_row(bad[:, None])
        raise DataError(
            f"{where} must hold {expected}; found {codes[row]:g} in row {row}. "
            "For categories of other names, use text or a pandas Categorical"
        )
    return codes


def _codes_of_labels(series: pd.Series[Any], where: str, labels: Sequence[Label]) -> Floats:
    code = {label: place for place, label in enumerate(labels)}
    place, distinct = pd.factorize(series)
    found = [_label(value) for value in distinct]
    for index, label in enumerate(found):
        if label not in code:
            row = int((place == index).argmax())
            raise DataError(f"{where} must hold one of {_listed(labels)}; found {label!r} in row {row}")
    codes = np.array([*(code[label] for label in found), np.nan])
    return codes[place]  # a missing value has place -1: the NaN at the end


_OUTSIDE: dict[str, tuple[str, Callable[[Floats], npt.NDArray[np.bool_]]]] = {
    "real": ("finite numbers", np.isinf),
    "positive": ("numbers above 0", lambda x: x <= 0),
    "unit": ("numbers strictly between 0 and 1", lambda x: (x <= 0) | (x >= 1)),
    "simplex": ("shares from 0 to 1", lambda x: (x < 0) | (x > 1 + _SUM_TOLERANCE)),
    "count": ("whole numbers of at least 0", lambda x: (x < 0) | (x != np.floor(x))),
}


def _check_support(cells: Floats, node: str, column: Column) -> None:
    expected, outside = _OUTSIDE[column.space.support]
    seen = ~np.isnan(cells)
    bad = seen & (np.isinf(cells) | outside(cells))
    if bad.any():
        row, cell = (int(place) for place in np.argwhere(bad)[0])
        expected = "finite numbers" if np.isinf(cells[row, cell]) else expected
        where = _where(node, column.names[cell])
        raise DataError(f"{where} must hold {expected}; found {cells[row, cell]:g} in row {row}")
    if column.space.support == "simplex":
        _check_sums(cells, seen, node)


def _check_sums(cells: Floats, seen: npt.NDArray[np.bool_], node: str) -> None:
    """Shares must sum to one; if some are missing, to at most one."""
    total = np.where(seen, cells, 0.0).sum(1)
    bad = (total > 1 + _SUM_TOLERANCE) | (seen.all(1) & (total < 1 - _SUM_TOLERANCE))
    if bad.any():
        row = _first_row(bad[:, None])
        raise DataError(f"columns of node {node!r} must sum to 1 in every row; found {total[row]:g} in row {row}")


def _first_row(bad: npt.NDArray[np.bool_]) -> int:
    return int(bad.any(1).argmax())


# --- tensors and columns ----------------------------------------------------------------------------------


def _to_values(cells: Floats, space: Space, dtype: torch.dtype) -> Tensor:
    seen = ~np.isnan(cells)
    if not space.is_discrete:
        return torch.tensor(cells if seen.all() else np.where(seen, cells, 0.0), dtype=dtype)[None]
    values = torch.zeros(1, len(cells), space.width, dtype=dtype)
    rows = torch.from_numpy(np.flatnonzero(seen[:, 0]))
    values[0, rows, torch.from_numpy(cells[seen[:, 0], 0].astype(np.int64))] = 1.0
    return values


def _two_dimensional(node: str, argument: str, value: Any, width: int) -> npt.NDArray[Any]:
    array = _to_numpy(value)
    if array.ndim == 1 and width == 1:
        array = array[:, None]
    elif array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or array.shape[1] != width:
        raise DataError(f"{argument} of node {node!r} must have shape (rows, {width}); got {np.shape(value)}")
    return array


def _to_columns(array: npt.NDArray[Any], column: Column, shown: npt.NDArray[np.bool_]) -> list[Any]:
    """One column for each cell, missing where not shown or NaN."""
    if column.space.is_discrete:
        known = shown[:, 0] & ~np.isnan(array).any(1) & (array != 0).any(1)
        codes = np.where(np.isnan(array), -np.inf, array).argmax(1)
        return [_categories(codes, column.labels, known)]
    shown = shown & ~np.isnan(array)
    if column.space.support == "count":
        return [_whole(cells, seen) for cells, seen in zip(array.T, shown.T, strict=True)]
    return list(np.where(shown, array, np.nan).T)


def _whole(numbers: npt.NDArray[Any], known: npt.NDArray[np.bool_]) -> Any:
    """Whole numbers: plain integers if all are known, else pandas' nullable ones."""
    whole = np.rint(np.where(known, numbers, 0)).astype(np.int64)
    return whole if known.all() else pd.arrays.IntegerArray(whole, ~known)


def _categories(codes: Codes, labels: Sequence[Label] | None, known: npt.NDArray[np.bool_]) -> Any:
    if labels is None:
        return _whole(codes, known)
    if all(isinstance(label, bool) for label in labels):
        truth = np.array(labels)[codes]
        return truth if known.all() else pd.arrays.BooleanArray(truth, ~known)
    names = np.empty(len(labels) + 1, dtype=object)  # None at the end stands for what is missing
    names[:-1] = labels
    return pd.Series(names[np.where(known, codes, -1)]).infer_objects()


# --- messages -----------------------------------------------------------------------------------------------


def _where(node: str, name: str) -> str:
    return f"column {name!r}" if name == node else f"column {name!r} of node {node!r}"


def _listed(items: Sequence[Any], most: int = 8) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(repr(item) for item in items[:most]) + more
