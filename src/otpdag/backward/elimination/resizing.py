r"""How many points unknown numbers and counts need where they meet.

Numbers that meet are summed on products of their points, so each should have no more of them than its posterior asks
for. A count has one point for each whole number that is likely, a number a few, evenly spread over its posterior: at a
distance of h standard deviations the sum over a normal posterior errs by :math:`e^{-2 \pi^2 / h^2}`, and twelve points
are 1.1 apart. Correlated ones need more, which a comparison with finer points tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from otpdag.backward.elimination.clouds import Cloud
from otpdag.backward.elimination.points import Placement
from otpdag.backward.elimination.unknowns import Ints

__all__ = ["COARSE_POINTS", "FINER", "FINEST", "joined", "needed_points", "two_sizes", "with_points"]

COARSE_POINTS = 12
"""Points of each number and count that meets others, until it is known where its posterior is."""
FINER, FINEST = 1.4, 2.0
"""Points of numbers that meet, over what the posterior asks for: to compare, and where that makes a difference."""
SHARE_OF_SMALLER = 0.9  # share of the rows that the smaller of two sizes is for
SIZES = np.array([6, 9, 12, 18, 24, 36, 48, 72, 96])  # that points are rounded up to, so that pieces share their sums
TAIL, TAIL_COUNTS = 4.8, 3  # half a window of counts: standard deviations, and more for skewed tails

Floats = npt.NDArray[np.float64]


def needed_points(placement: Placement | Cloud, by: float, most: int) -> Ints:
    """Number of points of each row (n,): what the posterior asks for, times ``by`` where it is a matter of distance.

    Args:
        placement: Where the posteriors are.
        by: Over twelve points of a number, or the most of a count with a wide posterior.
        most: Points of a count that has more likely values than these.

    >>> from otpdag.spaces import Count
    >>> one = torch.ones(1, 2, dtype=torch.float64)
    >>> rows, means = torch.arange(2), torch.tensor([[2.0, 90.0]]).double()
    >>> needed_points(Placement("x", Count(), rows, 12, means, means.sqrt()), 1.0, 48).tolist()
    [12, 48]
    """
    rows = len(placement.rows)
    if isinstance(placement, Cloud):
        return np.full(rows, placement.size)
    if not placement.space.is_countable:
        return _rounded(np.full(rows, COARSE_POINTS * by))
    reach = TAIL * placement.spread + TAIL_COUNTS
    width = torch.minimum(2 * reach, placement.centre + reach).amax(0).numpy()
    return _rounded(np.where(width <= most, width, most * by))


def _rounded(wanted: Floats) -> Ints:
    at = np.searchsorted(SIZES, wanted - 1e-6).clip(max=len(SIZES) - 1)
    return np.asarray(SIZES[at], dtype=np.int64)


def two_sizes(needed: Ints) -> Ints:
    """Numbers of points, each raised to one of two, that of most rows or the largest: so that sums are shared.

    >>> two_sizes(np.array([9, 12] * 9 + [18, 36])).tolist() == [12] * 18 + [36, 36]
    True
    """
    usual = np.quantile(needed, SHARE_OF_SMALLER, method="inverted_cdf")
    return np.where(needed <= usual, usual, needed.max()).astype(np.int64)


def with_points(placement: Placement | Cloud, rows: Ints, places: Ints, size: int) -> Placement | Cloud:
    """Some rows of a placement with another number of points."""
    some = placement.at(torch.from_numpy(rows), torch.from_numpy(places))
    return some if isinstance(some, Cloud) else replace(some, size=size)


def joined(parts: Sequence[Placement | Cloud]) -> Placement | Cloud:
    """Placements of one node side by side."""
    first, rows = parts[0], torch.cat([part.rows for part in parts])
    centre = torch.cat([part.centre for part in parts], 1)
    if isinstance(first, Cloud):
        factors = [part.factor for part in parts if isinstance(part, Cloud)]
        return replace(first, rows=rows, centre=centre, factor=torch.cat(factors, 1))
    spreads = [part.spread for part in parts if isinstance(part, Placement)]
    return replace(first, rows=rows, centre=centre, spread=torch.cat(spreads, 1))
