"""Cells and weights checked: numbers inside their space, codes of categories, NaN where missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from torch import Tensor

from otpdag.data.column import Column, Label, column_title
from otpdag.data.reading import to_numpy
from otpdag.data.types import Floats, as_label, as_numbers, in_blocks
from otpdag.errors import DataError, listed
from otpdag.spaces import SUM_TOLERANCE, Discrete

__all__ = ["checked_cells", "read_weights"]

LARGEST = 1e150
"""Numbers whose squares, and sums of those over many rows, are still finite."""


def read_weights(weights: npt.ArrayLike | Tensor | None, rows: int) -> Floats:
    """Row weights ``(R or 1, rows)``, scaled to mean one."""
    if weights is None:
        return np.broadcast_to(1.0, (1, rows))
    array = np.atleast_2d(to_numpy(weights))
    if array.dtype.kind not in "biuf":
        raise DataError(f"weights must be numbers; got {weights!r:.60}")
    if array.ndim != 2 or array.shape[1] != rows:
        raise DataError(f"weights must have one entry for each of the {rows} rows; got shape {np.shape(weights)}")
    array = array.astype(np.float64)
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        raise DataError(f"weights must be finite and at least 0; found {array[bad][0]} in row {first_row(bad.T)}")
    largest = array.max(1, keepdims=True)
    if (largest == 0).any():
        raise DataError("weights must not all be 0; found only zeros")
    array = array / largest  # whatever their size, their sum is finite
    total = np.array([[math.fsum(one)] for one in array])  # rounded once: the same in any order of the rows
    return array * (rows / total)


def checked_cells(node: str, column: Column, block: pd.DataFrame | Floats, partial: bool) -> Floats:
    """The cells of a node as numbers, codes for categories, NaN where missing."""
    if isinstance(block, np.ndarray):
        cells = block
        _check_support(cells, node, column, np.inf if partial else LARGEST)
    elif isinstance(column.space, Discrete):
        cells = _read_codes(block.iloc[:, 0], node, column)[:, None]
    else:
        cells = _read_numbers(block, node)
        _check_support(cells, node, column, np.inf if partial else LARGEST)
    empty = np.isnan(cells[:1]).any() and np.isnan(cells).all(0)
    if not partial and np.any(empty):
        name = column.names[int(np.argmax(empty))]
        raise DataError(
            f"{column_title(node, name)} must hold at least one value; all {len(cells)} are missing. "
            f"If {node!r} is never seen, drop the column and make it hidden"
        )
    return cells


def _read_numbers(block: pd.DataFrame, node: str) -> Floats:
    dtypes = set(block.dtypes)
    if all(isinstance(dtype, np.dtype) and dtype.kind in "biuf" for dtype in dtypes):
        return block.to_numpy() if dtypes == {np.dtype(np.float32)} else block.to_numpy(dtype=np.float64)
    columns = [as_numbers(block[name], column_title(node, str(name)), "numbers") for name in block.columns]
    return np.stack(columns, axis=1)


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
    with np.errstate(invalid="ignore"):
        bad = seen & ((np.abs(cells) > np.float64(largest)) | np.isinf(cells) | column.space.outside(cells))
    if bad.any():
        row, cell = (int(place) for place in np.argwhere(bad)[0])
        if abs(cells[row, cell]) > largest or np.isinf(cells[row, cell]):
            expected = "finite numbers" if np.isinf(cells[row, cell]) else f"numbers of at most {largest:g} in size"
        where = column_title(node, column.names[cell])
        raise DataError(f"{where} must hold {expected}; found {cells[row, cell]:g} in row {row}")
    if column.space.total is not None:
        _check_sums(cells, seen, node)


def _check_sums(cells: Floats, seen: npt.NDArray[np.bool_], node: str) -> None:
    """Shares must sum to one; if some are missing, to at most one."""
    total = np.where(seen, cells, 0.0).sum(1)
    bad = (total > 1 + SUM_TOLERANCE) | (seen.all(1) & (total < 1 - SUM_TOLERANCE))
    if bad.any():
        row = first_row(bad[:, None])
        raise DataError(f"columns of node {node!r} must sum to 1 in every row; found {total[row]:g} in row {row}")


def first_row(bad: npt.NDArray[np.bool_]) -> int:
    return int(bad.any(1).argmax())
