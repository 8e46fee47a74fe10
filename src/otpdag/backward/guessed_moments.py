"""A first guess of hidden numbers from the moments of complete rows, as :mod:`otpdag.backward.guessed_rows` makes it.

Principal components, residuals and regressions are functions of second moments, so that rows need not be read again. A
guessed number is a sum of the columns around it; in a restart that sum is a rougher one, with noise of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from otpdag.backward.elimination.families import FamilyView
from otpdag.backward.guessed_rows import NOISE, RESCALED
from otpdag.graph import Graph
from otpdag.mechanisms import Normal
from otpdag.mechanisms.normal import SMALLEST_SCALE

__all__ = ["can_be_guessed", "completed_moments", "regressed_entries"]

Array = NDArray[np.float64]

LITTLE = 1e-9  # of a column's spread: what is left of it then is rounding


def can_be_guessed(families: Sequence[FamilyView]) -> bool:
    """Whether all are normal nodes without categories among their parents, and no user says where they start."""

    def is_plain(family: FamilyView) -> bool:
        settings = [p.setting for p in family.mechanism.declared().values() if p.learned]
        return type(family.mechanism) is Normal and not family.selectors and all(one is None for one in settings)

    return all(is_plain(family) for family in families)


def completed_moments(
    graph: Graph, cells: Sequence[tuple[str, int]], second: Array, generator: np.random.Generator, *, first: bool
) -> tuple[Array, Array]:
    """Mean (D,) and covariance (D, D) of all numbers less their shift, hidden ones guessed, with mean zero.

    Args:
        graph: The graph, whose hidden nodes are numbers.
        cells: The node and coordinate of each number.
        second: Second moments of the numbers and a one (D + 1, D + 1), zero where they are hidden.
        generator: Where restarts differ.
        first: Whether this is the first start, which is the plain one.
    """
    average = second / second[-1, -1]
    mean = average[:-1, -1]
    seen = average[:-1, :-1] - np.outer(mean, mean)
    places: dict[str, list[int]] = {}
    for number, (node, _) in enumerate(cells):
        places.setdefault(node, []).append(number)
    sums: dict[str, Array] = {}
    complete, noise = np.diag([float(node not in graph.hidden) for node, _ in cells]), np.zeros(len(cells))
    # nodes near the leaves first: they explain the columns, and are explained by what lies above
    for node in [name for name in reversed(graph.order) if name in graph.hidden]:
        columns = _columns_around(graph, node, places, sums, seen)
        if not first:
            columns *= np.exp(generator.normal(0.0, RESCALED, (len(columns), 1)))
        sums[node] = _components(columns, len(places[node]), seen, None if first else generator)
        complete[places[node]] = sums[node]
        noise[places[node]] = 0.0 if first else NOISE**2
    return mean, complete @ seen @ complete.T + np.diag(noise)


def _columns_around(
    graph: Graph, node: str, places: Mapping[str, list[int]], sums: Mapping[str, Array], seen: Array
) -> Array:
    """The columns that tell of a hidden node, each of spread one, as sums (m, D) of all numbers."""
    near = [name for name in graph.markov_blanket(node) if name in places and name not in graph.hidden]
    children = [sums[name] for name in graph.children(node) if name in sums]
    if not near and not children:
        near = [name for name in graph.observed_descendants(node) if name in places]
    columns = _of_spread_one(np.eye(len(seen))[[place for name in near for place in places[name]]], seen)
    others = [name for name in sums if name not in graph.children(node)]
    explained = [sums[name] for name in others if set(graph.children(name)) & set(near)]
    if explained and len(columns):
        by = np.concatenate(explained)
        slopes = np.linalg.lstsq(by @ seen @ by.T, by @ seen @ columns.T, rcond=None)[0]
        columns = _of_spread_one(columns - slopes.T @ by, seen)
    return np.concatenate([columns, *children])


def _of_spread_one(sums: Array, seen: Array) -> Array:
    spread = np.sqrt(np.maximum(((sums @ seen) * sums).sum(-1, keepdims=True), 0.0))
    size = np.sqrt(np.maximum(seen.diagonal(), 0.0)).max(initial=0.0)
    return sums / np.where(spread > LITTLE * size, spread, max(size, 1e-300))


def _components(columns: Array, dim: int, seen: Array, generator: np.random.Generator | None) -> Array:
    """The leading principal components as sums (dim, D), of spread one; turned where there is a generator."""
    _, vectors = np.linalg.eigh(columns @ seen @ columns.T)
    leading = np.zeros((dim, len(seen)))
    own = vectors[:, ::-1][:, :dim].T @ columns
    leading[: len(own)] = _of_spread_one(own, seen)
    if generator is not None and dim > 1:
        turn, _ = np.linalg.qr(generator.standard_normal((dim, dim)))
        leading = turn.T @ leading
    return leading


def regressed_entries(
    families: Sequence[FamilyView], places: Sequence[Sequence[int]], mean: Array, covariance: Array
) -> Array:
    """Levels at their centre, slopes and scales (E,) of all families, regressed on their parents by moments.

    Args:
        families: As :func:`can_be_guessed` takes them.
        places: For each family the numbers that its columns are.
        mean: Of all numbers (D,).
        covariance: Of all numbers (D, D).
    """
    entries: list[Array] = []
    for family, own in zip(families, places, strict=True):
        entries += _regressed(family, own, mean, covariance)
    return np.concatenate(entries)


def _regressed(family: FamilyView, own: Sequence[int], mean: Array, covariance: Array) -> list[Array]:
    mechanism, dim = family.mechanism, family.widths[-1]
    assert isinstance(mechanism, Normal), "checked before"
    declared = mechanism.declared()
    given = {name: p.constant(family.node, name).numpy() for name, p in declared.items() if not p.learned}
    target, parents = list(own[:dim]), list(own[dim:])
    among, across = covariance[np.ix_(parents, parents)], covariance[np.ix_(parents, target)]
    above = mean[target] - given["loc"][0] if "loc" in given else np.zeros(dim)
    middle = mean[parents] if "loc" in given else np.zeros(len(parents))  # a line through the level that is given
    slopes = given.get("weight")
    if slopes is None:
        right = across + np.outer(middle, above)
        slopes = np.linalg.lstsq(among + np.outer(middle, middle), right, rcond=None)[0]
    loc = given["loc"][0] if "loc" in given else mean[target] - mean[parents] @ slopes
    missed = mean[target] - mean[parents] @ slopes - loc
    variance = covariance[target, target]
    residual = variance - 2 * (across * slopes).sum(0) + (slopes * (among @ slopes)).sum(0) + missed**2
    floor = SMALLEST_SCALE * np.sqrt(np.maximum(variance, 0.0))
    if mechanism.smallest_scale is not None:
        floor = np.maximum(floor, 1.5 * mechanism.smallest_scale.numpy())
    scale = np.maximum(np.sqrt(np.maximum(residual, 0.0)), floor)
    if mechanism.isotropic:
        scale = np.full(dim, np.sqrt((scale**2).mean()))
    made = {"loc": loc + mechanism.predictor.centre.numpy() @ slopes, "weight": slopes.ravel(), "scale": scale}
    return [made[name] for name in declared]
