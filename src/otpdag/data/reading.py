"""Tables of any kind -- frames, mappings, arrays, tensors -- become one frame for each node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
from torch import Tensor

from otpdag.data.column import Column, column_title
from otpdag.data.frames import known_table
from otpdag.errors import DataError, listed

__all__ = ["Table", "check_unseen", "read_blocks", "to_numpy"]


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
    if absent and not partial:
        raise DataError(
            f"{column_title(node, absent[0])} is missing; the table has the columns {listed(list(known))}. "
            f"If {node!r} is never seen, make it hidden"
        )
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
    blocks, start = {}, 0
    for node, column in columns.items():
        stop = start + len(column.names)
        blocks[node] = pd.DataFrame(array[:, start:stop], columns=list(column.names))
        start = stop
    return blocks, len(array)


def to_numpy(value: Any) -> npt.NDArray[Any]:
    """An array from a tensor or whatever numpy takes."""
    if isinstance(value, Tensor):
        if value.is_meta:
            raise DataError("data must hold numbers; got a tensor on the device 'meta', which holds none")
        return value.detach().cpu().numpy()
    return np.asarray(value)


def check_unseen(data: Table, node: str, column: Column) -> None:
    """Refuse a table that has a column of a hidden node."""
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
