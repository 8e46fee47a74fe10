"""Which rows of a matrix in robust units lie apart from the rest, and which are surely among it.

How much a fit that survives outliers may leave out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

from otpdag.clustering import k_means, squared_distances
from otpdag.errors import ModelError

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Rows = NDArray[np.int64]

MOST_SAMPLED = 1500  # rows among which neighbours and centres are looked for: more change little and take long


@dataclass(frozen=True)
class ApartOptions:
    """What counts as apart; lengths are in robust standard deviations of a column.

    Args:
        furthest: Distance from the median beyond which a value is apart in any case.
        gap: Length of an empty stretch beyond which values are apart,
        middle: which begins at least this far from the median
        most: and has no more than this share of the rows behind it.
        smallest_group: Share of rows from which on rows that are apart in the same columns are a group to be tested.
        rows: Most rows in a test.
    """

    furthest: float = 6.0
    gap: float = 0.5
    middle: float = 1.0
    most: float = 0.25
    smallest_group: float = 0.02
    rows: int = 2000


def apart_sides(columns: Array, options: ApartOptions) -> Flags:
    """Whether each row lies apart, above and below in each column: (N, 2 * columns)."""
    sides = [side for column in columns.T for side in (column, -column)]
    return np.stack([(side > options.furthest) | _beyond_gap(side, options) for side in sides], 1)


def _beyond_gap(column: Array, options: ApartOptions) -> Flags:
    """Which values lie above an empty stretch outside the middle of a column: emptier than what lies above it is full.

    >>> _beyond_gap(np.array([*np.linspace(-2, 2, 96), 5.0, 5.1, 5.2, 5.3]), ApartOptions()).sum()
    np.int64(4)
    """
    ordered = np.sort(column)
    ends = np.searchsorted(ordered, ordered + options.gap, side="right")
    inside, above = ends - np.arange(1, len(ordered) + 1), len(ordered) - ends
    empty = (ordered >= options.middle) & (above > 0) & (inside <= 0.01 * above)
    empty &= above <= options.most * len(ordered)
    return column > ordered[empty.argmax()] if empty.any() else np.zeros(len(column), dtype=bool)


def apart_groups(apart: Flags, options: ApartOptions) -> list[Rows]:
    """Rows that are apart in the same columns, where they are many; the largest group first."""
    rows = np.flatnonzero(apart.any(1))
    if not len(rows):
        return []
    _, group, size = np.unique(apart[rows], axis=0, return_inverse=True, return_counts=True)
    large = [g for g in np.argsort(-size) if size[g] >= max(options.smallest_group * len(apart), 2)]
    return [rows[group.ravel() == g] for g in large]


def central_rows(columns: Array) -> Rows:
    """Three quarters of the rows, those whose furthest column is nearest to the middle."""
    norm = np.abs(columns).max(1)
    return np.argsort(norm)[: max(2, int(0.75 * len(norm)))]


def dense_rows(columns: Array, generator: np.random.Generator) -> Rows:
    """Rows whose tenth neighbour among a sample is near."""
    jittered = columns + 1e-6 * generator.standard_normal(columns.shape)
    sample = jittered[generator.choice(len(columns), min(len(columns), MOST_SAMPLED), replace=False)]
    neighbour = min(10, len(sample))
    distance = np.asarray(cKDTree(sample).query(jittered, k=[neighbour])[0])
    return np.argsort(distance[:, 0])[: max(2, int(0.8 * len(columns)))]


def joined_rows(columns: Array, generator: np.random.Generator, groups: int = 8) -> Rows:
    """Rows without the most isolated of a few groups, up to a quarter of all."""
    sample = columns[generator.choice(len(columns), min(len(columns), MOST_SAMPLED), replace=False)]
    centres, _ = k_means(sample, min(groups, len(sample)), generator)
    squared = squared_distances(columns, centres)
    group, distance = squared.argmin(1), np.sqrt(np.maximum(squared.min(1), 0.0))
    apart = np.sort(np.linalg.norm(centres[:, None] - centres[None], axis=-1), axis=1)[:, 1]
    radius = np.array([np.median(distance[group == g]) if (group == g).any() else 1.0 for g in range(len(centres))])
    kept = np.ones(len(columns), dtype=bool)
    for g in np.argsort(-apart / np.maximum(radius, 1e-9)):
        if (group[kept] == g).sum() + (~kept).sum() <= 0.25 * len(columns):
            kept[group == g] = False
            break
    return np.flatnonzero(kept)


def tail_weights(
    losses: Tensor, model: Tensor, tails: Sequence[float], slack: float, chance: float, most: float
) -> Tensor:
    """Weights (N,) of rows by their losses, which keep the mass in each tail of the model's losses near the model's.

    Args:
        losses: Of the rows (N,).
        model: Of rows that the model makes (sample,).
        tails: Upper tail probabilities under the model that cut regions, falling.
        slack: How far the data's mass in a region may exceed the model's.
        chance: The same in standard errors, which count where rows are few.
        most: Largest share that may be left out; beyond it the most likely rows are kept.

    >>> normal = torch.linspace(0, 1, 1001)
    >>> tail_weights(torch.tensor([0.1, 0.5, 9.0]), normal, (0.1, 0.01), 1.25, 2.0, 0.5)
    tensor([1., 1., 0.])
    """
    edges = torch.stack([model.quantile(1 - tail) for tail in tails])
    beyond = edges[-1] + 0.5 * (edges[-1] - edges[0])
    region = torch.bucketize(losses, edges)
    weights, lowest = torch.ones_like(losses), 1.0
    for k, (tail, further) in enumerate(pairwise((*tails, 0.0)), start=1):
        inside, mass = region == k, tail - further
        share = float(inside.to(losses).mean())
        allowed = max(slack * mass, mass + chance * (mass * (1 - mass) / len(losses)) ** 0.5)
        lowest = min(lowest, allowed / share) if share > 0 else lowest
        weights[inside] = lowest
    weights[losses > beyond] = 0.0
    likeliest = (losses <= losses.quantile(1 - most)).to(losses)
    return weights if float(1 - weights.mean()) <= most else likeliest


@dataclass(frozen=True)
class RobustOptions:
    """How much a fit may leave out: ``otp.fit(..., robust=otp.RobustOptions(most_dropped=0.4))``.

    Args:
        most_dropped: Largest share of rows that may be left out; beyond it the most likely rows are kept.
        slack: How far the data's mass in a region may exceed the model's.
        chance: The same in standard errors, which count where rows are few.
        apart: What counts as apart from the rest; rows apart take no part in the search for a start.
        tails: Upper tail probabilities of the loss under the model that cut the regions.
        cap: Tail probability whose loss caps a row's loss when starts are compared.
        rounds: How often fit and weights alternate at most.
        round_steps: Steps of the fit in each of these rounds.
        same_weights: Mean change of a row's weight below which they stop.
        concentration: Rounds of the short runs on the most likely rows alone, and as many with capped weights.
        sample: Model rows that the loss's distribution is taken from.
    """

    most_dropped: float = 0.25
    slack: float = 1.25
    chance: float = 2.0
    apart: ApartOptions = field(default_factory=ApartOptions)
    tails: tuple[float, ...] = (0.1, 0.05, 0.02, 0.01, 0.004, 0.001)
    cap: float = 0.004
    rounds: int = 8
    round_steps: int = 15
    same_weights: float = 5e-4
    concentration: int = 3
    sample: int = 4000

    def __post_init__(self) -> None:
        """Refuse shares that are none, and limits below what they limit."""
        if not 0 < self.most_dropped < 1:
            raise ModelError(f"most_dropped must be a share between 0 and 1; got {self.most_dropped!r}")
        if not self.slack >= 1:
            raise ModelError(f"slack must be at least 1, the model's own mass; got {self.slack!r}")
        falling = all(0 < later < earlier < 1 for earlier, later in zip(self.tails, self.tails[1:], strict=False))
        if not self.tails or not falling or not 0 < self.tails[0] < 1:
            raise ModelError(f"tails must be probabilities that fall; got {self.tails!r}")
        if not 0 < self.cap < 1:
            raise ModelError(f"cap must be a probability between 0 and 1; got {self.cap!r}")
