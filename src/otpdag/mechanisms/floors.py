r"""How small a scale may become: what rounding leaves open, and what few rows cannot tell.

A density has no upper bound. Where a class holds rows that are equal, as rounded values are, or one row alone, its
scale falls to zero and the likelihood grows without end, though nothing is learned. Two floors keep it from that:

- **Rounding.** Values that are :math:`\delta` apart stand for intervals of that length. What is known of a value inside
  its interval has a standard deviation of :math:`\delta / \sqrt{12}`, and no scale of noise below it can be told from
  another. A column that was rounded honestly has residuals at least that large, so that the floor binds only where
  values stand in one place. It is at most a quarter of the column's spread: few values tell more than that.
- **Few rows.** Below a share of the spread, 1e-3 where a parent is hidden (rows choose their class, and a class may
  choose one row) and 1e-6 elsewhere, a scale is taken for zero.

The spread is the smaller of the standard deviation and what quartiles say, so that outliers raise no floor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["default_floor", "resolution"]

OF_SPREAD_WITH_HIDDEN_PARENTS, OF_SPREAD = 1e-3, 1e-6  # shares of a column's spread: a hidden state may sit on a row
MOST_OF_SPREAD = 0.25  # that resolution may ask for: coarse columns keep three quarters of their spread to explain
QUARTILES_OF_NORMAL = 1.349  # between the quartiles of a standard normal variable


def default_floor(target: Tensor, weight: Tensor, *, hidden_parents: bool, rounding: bool = True) -> Tensor:
    """The smallest scale of each column (dim,) of ``target`` (N, dim), of rows that have a weight (N,).

    >>> answers = torch.tensor([[1.0], [2.0], [3.0], [2.0], [1.0], [3.0]])
    >>> default_floor(answers, torch.ones(6), hidden_parents=True)
    tensor([0.1853])
    """
    values, counts = target.cpu().numpy(), weight.cpu().numpy() > 0
    seen = values if counts.all() else values[counts]
    if not len(seen):
        return torch.zeros(target.shape[-1], dtype=target.dtype, device=target.device)
    ordered = np.sort(seen, axis=0)
    spread = _spread(seen, ordered)
    floor = (OF_SPREAD_WITH_HIDDEN_PARENTS if hidden_parents else OF_SPREAD) * spread
    if rounding:
        rounded = np.array([resolution(column) for column in ordered.T]) / math.sqrt(12)
        floor = np.maximum(floor, np.minimum(rounded, MOST_OF_SPREAD * spread))
    return torch.from_numpy(floor).to(target)


def resolution(ordered: NDArray[np.floating[Any]]) -> float:
    """How far apart the sorted values (N,) of a rounded column are; zero if fewer than every second comes back.

    >>> resolution(np.array([1.0, 1.0, 1.5, 1.5, 2.0, 2.0]))
    0.5
    """
    gaps = ordered[1:] - ordered[:-1]
    gaps = gaps[gaps > 0]
    return float(gaps.min()) if len(gaps) and 2 * (len(gaps) + 1) <= len(ordered) else 0.0


def _spread(seen: NDArray[np.floating[Any]], ordered: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    deviation, last = seen.std(0), len(seen) - 1
    quartiles = (ordered[last * 3 // 4] - ordered[last // 4]) / QUARTILES_OF_NORMAL
    spread = np.where(quartiles > 0, np.minimum(deviation, quartiles), deviation)
    # a constant column has no spread: its own size stands for it
    size = np.abs(seen[0])
    return np.where(spread > 1e-12 * size, spread, np.where(size > 0, size, 1.0))
