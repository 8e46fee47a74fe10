"""k-means, written out: scikit-learn's checks and threads cost more than the work on tables of a few thousand rows."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]


def k_means(columns: Array, size: int, generator: np.random.Generator, steps: int = 12) -> tuple[Array, float]:
    """Lloyd's algorithm from k-means++ centres.

    Args:
        columns: Points, one in each row (N, D).
        size: Number of centres; no more than there are points are made.
        generator: Draws the first centres.
        steps: How often the centres move at most.

    Returns:
        The centres (size, D), and the mean squared distance of a point from the nearest of them.

    >>> centres, distance = k_means(np.array([[0.0], [1.0], [10.0], [11.0]]), 2, np.random.default_rng(0))
    >>> sorted(centres[:, 0].tolist()), round(distance, 6)
    ([0.5, 10.5], 0.25)
    """
    centres = move_centres(columns, spread_centres(columns, min(size, len(columns)), generator), steps)
    return centres, float(squared_distances(columns, centres).min(1).mean())


def nearest(columns: Array, centres: Array) -> NDArray[np.intp]:
    """The number of the centre (K, D) that each point (N, D) is nearest to: where x . c - c . c / 2 is largest.

    >>> nearest(np.array([[0.0], [4.0], [9.0]]), np.array([[10.0], [1.0]])).tolist()
    [1, 1, 0]
    """
    return np.asarray((columns @ centres.T - (centres**2).sum(1) / 2).argmax(1))


def move_centres(columns: Array, centres: Array, steps: int) -> Array:
    """Move each centre to the mean of the points nearest to it, ``steps`` times or until none moves.

    Args:
        columns: Points (N, D).
        centres: Where to begin (K, D); one that is nearest to no point stays.
        steps: How often they move at most.

    Returns:
        The moved centres.
    """
    before = None
    for _ in range(steps):
        labels = nearest(columns, centres)
        if before is not None and (labels == before).all():
            break
        before, member = labels, (labels == np.arange(len(centres))[:, None]).astype(columns.dtype)
        counts = member.sum(1, keepdims=True)
        centres = np.where(counts > 0, member @ columns / np.maximum(counts, 1), centres)
    return centres


def spread_centres(columns: Array, size: int, generator: np.random.Generator) -> Array:
    """Pick rows by k-means++: in proportion to the squared distance from the nearest so far.

    Arthur and Vassilvitskii (2007).

    Args:
        columns: Points (N, D).
        size: Number of centres.
        generator: Draws them.

    Returns:
        Centres (size, D).
    """
    picked, lengths = [generator.integers(len(columns))], _squared_lengths(columns)
    nearest = np.full(len(columns), np.inf)
    for _ in range(size - 1):
        nearest = np.minimum(nearest, squared_distances(columns, columns[picked[-1:]], lengths)[:, 0])
        chances = np.cumsum(np.maximum(nearest, 0.0) + 1e-12)
        picked.append(np.searchsorted(chances, generator.random() * chances[-1], side="right"))
    return columns[picked]


def squared_distances(columns: Array, centres: Array, lengths: Array | None = None) -> Array:
    """Squared Euclidean distances (N, K) between rows and centres; rounding may leave some a little below zero.

    The squared ``lengths`` (N, 1) of the rows may be known.
    """
    lengths = _squared_lengths(columns) if lengths is None else lengths
    return np.asarray(lengths - 2 * (columns @ centres.T) + (centres**2).sum(1))


def _squared_lengths(columns: Array) -> Array:
    return np.asarray((columns**2).sum(1, keepdims=True))
