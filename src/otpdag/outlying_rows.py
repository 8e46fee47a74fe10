"""Which rows of a matrix in robust units lie apart from the rest, and which are surely among it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from otpdag.clustering import k_means, squared_distances

__all__ = ["ApartOptions", "apart_groups", "apart_sides", "central_rows", "dense_rows", "joined_rows"]

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
