"""Tables of any kind (frames of any library, mappings, arrays, tensors, files) become one frame for each node."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import narwhals
import numpy as np
import numpy.typing as npt
import pandas as pd
from torch import Tensor

from otpdag.errors import DataError, listed
from otpdag.files import write_bytes
from otpdag.spaces import Space

Label: TypeAlias = str | bool | int | float


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


def cell_names(node: str, space: Space) -> tuple[str, ...]:
    """The columns of a node: its own name, or ``x.0``, ``x.1`` and so on if it has several cells."""
    return (node,) if space.cells == 1 else tuple(f"{node}.{cell}" for cell in range(space.cells))


def column_title(node: str, name: str) -> str:
    """What an error message calls a column."""
    return f"column {name!r}" if name == node else f"column {name!r} of node {node!r}"


def known_table(data: Any) -> Any:
    """The same data, as a pandas frame if they are a table of another library; anything else as it is.

    Raises:
        DataError: The table is lazy: its cells are not there yet.
    """
    if isinstance(data, pd.DataFrame | Mapping | np.ndarray):
        return data
    table = narwhals.from_native(data, pass_through=True)
    if isinstance(table, narwhals.LazyFrame):
        raise DataError(
            f"data must be a table with its cells; got a lazy {type(data).__name__}: collect() or compute() it first"
        )
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
        try:
            table = pd.DataFrame({name: np.asarray(column) for name, column in table.items()})
        except ValueError as error:
            raise DataError(f"data must be a dictionary of columns of one length; {error}") from None
    if not isinstance(table, pd.DataFrame):
        raise DataError(f"data must be a DataFrame or a dictionary of columns; got {type(data).__name__}")
    if not table.columns.is_unique:
        name = table.columns[table.columns.duplicated()][0]
        raise DataError(f"column {name!r} must be there once; the table has several of that name")
    return table


def _cells(column: narwhals.Series[Any]) -> Any:
    """Numbers as an array with NaN for what is missing, anything else cell by cell with None."""
    if column.dtype.is_numeric() and not column.dtype.is_decimal():
        return column.to_numpy()
    return column.to_list()


Table: TypeAlias = pd.DataFrame | Mapping[str, Any] | npt.NDArray[Any] | Tensor


def read_blocks(data: object, columns: Mapping[str, Column], *, partial: bool) -> tuple[dict[str, pd.DataFrame], int]:
    """One frame for each node, with the node's columns, and the number of rows."""
    data = known_table(data)
    if isinstance(data, pd.DataFrame):
        return {node: _from_frame(data, node, column, partial) for node, column in columns.items()}, len(data)
    if isinstance(data, Mapping):
        return _read_mapping(data, columns, partial=partial)
    if isinstance(data, (np.ndarray, Tensor)):
        return _read_array(to_numpy(data), columns)
    hint = "; read a file with pandas, for instance pd.read_csv" if isinstance(data, (str, Path)) else ""
    raise DataError(
        "data must be a DataFrame, a mapping from nodes to arrays, or a 2-D numpy or torch array; "
        f"got {type(data).__name__}{hint}"
    )


def _from_frame(frame: pd.DataFrame, node: str, column: Column, partial: bool) -> pd.DataFrame:
    known = frame.columns
    absent = [name for name in column.names if name not in known]
    if not partial:
        check_seen(known, node, column)
    if len(column.names) == 1 and not absent and known.is_unique:
        return frame[column.names[0]].to_frame()  # many times faster than a list of one column
    block = frame.loc[:, [name for name in column.names if name not in absent]]
    if block.shape[1] > len(column.names) - len(absent):
        name = block.columns[block.columns.duplicated()][0]
        raise DataError(f"{column_title(node, name)} must be there once; the table has several of that name")
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
    array = np.atleast_1d(to_numpy(value))
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
        raise DataError(f"data must have {len(names)} columns ({listed(names)}); got shape {array.shape}")
    frame = pd.DataFrame(array, columns=names)
    return {node: frame[list(column.names)] for node, column in columns.items()}, len(array)


def to_numpy(value: Any) -> npt.NDArray[Any]:
    """An array from a tensor or whatever numpy takes."""
    if isinstance(value, Tensor):
        if value.is_meta:
            raise DataError("data must hold numbers; got a tensor on the device 'meta', which holds none")
        return value.detach().cpu().numpy()
    return np.asarray(value)


def check_seen(known: Collection[Any], node: str, column: Column, what: str = "table") -> None:
    """Refuse columns among which one of an observed node is missing."""
    absent = next((name for name in column.names if name not in known), None)
    if absent is not None:
        raise DataError(
            f"{column_title(node, absent)} is missing; the {what} has the columns {listed(list(known))}. "
            f"If {node!r} is never seen, make it hidden"
        )


def check_unseen(known: Collection[Any], node: str, column: Column, what: str = "table") -> None:
    """Refuse columns among which there is one of a hidden node."""
    for name in dict.fromkeys((node, *column.names)):
        if name in known:
            raise DataError(
                f"node {node!r} is hidden, but the {what} has a column {name!r}; "
                "drop the column or take the node out of hidden"
            )


def read_table(path: str | Path) -> pd.DataFrame:
    """Read a table from a file.

    Args:
        path: A file that ends in ``.csv``, ``.tsv`` (cells between tabs) or ``.parquet``; the last needs pyarrow.

    Returns:
        The table.

    Raises:
        DataError: The file is of another kind, does not exist, or needs a package that is not installed.
    """
    path = Path(path)
    if path.suffix not in (".csv", ".tsv", ".parquet"):
        raise DataError(f"path must end in .csv, .tsv or .parquet; got {str(path)!r}")
    if not path.is_file():
        raise DataError(f"path must be a file that exists; got {str(path)!r}")
    if path.suffix != ".parquet":
        return pd.read_csv(path, sep="\t" if path.suffix == ".tsv" else ",")
    try:
        return pd.read_parquet(path)
    except ImportError as error:
        raise DataError(f"path {str(path)!r} needs the package pyarrow: pip install pyarrow") from error


def write_table(table: pd.DataFrame, path: str | Path, *, index: bool = False) -> None:
    """Write a table to a file, into a folder that is made if there is none.

    Args:
        table: The table.
        path: A file; one that ends in ``.parquet`` needs pyarrow, ``.tsv`` has tabs, any other becomes CSV.
        index: Whether the index becomes a column.

    Raises:
        DataError: The file needs a package that is not installed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, table_bytes(table, path, index=index))


def table_bytes(table: pd.DataFrame, path: Path, *, index: bool = False) -> bytes:
    """What a file of this name holds of a table."""
    if path.suffix != ".parquet":
        text: str = table.to_csv(sep="\t" if path.suffix == ".tsv" else ",", index=index, lineterminator="\n")
        return text.encode("utf-8")
    buffer = io.BytesIO()
    try:
        table.to_parquet(buffer, index=index)
    except ImportError:
        raise DataError(f"{str(path)!r} needs the package pyarrow: pip install pyarrow") from None
    return buffer.getvalue()
