r"""Rotations of free factors: loadings that say the same, turned so that each column is large for few of its children.

Where all factors point to the same children, any rotation of them fits the data alike. Varimax (Kaiser, 1958) keeps
factors uncorrelated; oblimin with gamma zero, quartimin (Carroll, 1953), lets them correlate. Both by the gradient
projection of Bernaards and Jennrich (2005).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from otpdag.errors import ModelError
from otpdag.mechanisms import Normal
from otpdag.model import Model

Array = NDArray[np.float64]
Rotation = Literal["varimax", "oblimin"]
Criterion = Callable[[Array], tuple[float, Array]]

STEPS, TOLERANCE = 3000, 1e-8  # of gradient projection: the most, and the gradient at which it ends

STARTS = 5
"""Rotations from which the descent begins: a criterion may be level where loadings happen to stand."""


@dataclass(frozen=True)
class Rotated:
    """Loadings (children by factors) after a rotation, and the correlations of the factors then."""

    loadings: pd.DataFrame
    correlations: pd.DataFrame

    def __str__(self) -> str:
        return f"loadings\n{self.loadings.round(4)}\n\ncorrelations of the factors\n{self.correlations.round(4)}"


def varimax(loadings: Array) -> tuple[Array, Array]:
    """Rotated loadings (p, k), and the rotation T (k, k) with ``rotated = loadings @ T``.

    >>> turned, rotation = varimax(np.array([[1.0, 1.0], [2.0, 2.0], [1.0, -1.0]]))
    >>> np.abs(turned).round(4).tolist(), np.allclose(rotation.T @ rotation, np.eye(2))
    ([[1.4142, 0.0], [2.8284, 0.0], [0.0, 1.4142]], True)
    """

    def criterion(turned: Array) -> tuple[float, Array]:
        squares = turned**2
        centred = squares - squares.mean(0)
        return -0.25 * float((centred**2).sum()), -turned * centred

    rotation = _orthogonal(loadings, criterion)
    return loadings @ rotation, rotation


def oblimin(loadings: Array) -> tuple[Array, Array]:
    """Pattern loadings (p, k), and the correlations of the factors (k, k)."""

    def criterion(turned: Array) -> tuple[float, Array]:
        squares = turned**2
        others = squares @ (1 - np.eye(squares.shape[1]))
        return 0.25 * float((squares * others).sum()), turned * others

    matrix = _oblique(loadings, criterion, _orthogonal(loadings, criterion))
    return loadings @ np.linalg.inv(matrix).T, matrix.T @ matrix


def _orthogonal(loadings: Array, criterion: Criterion) -> Array:
    """The best rotation that is found from several starts, the first of them none at all."""
    size = loadings.shape[1]
    generator = np.random.default_rng(0)
    starts = [np.eye(size), *(np.linalg.qr(generator.standard_normal((size, size)))[0] for _ in range(STARTS - 1))]
    ends = [_descended(loadings, criterion, start) for start in starts]
    return min(ends, key=lambda rotation: round(criterion(loadings @ rotation)[0], 9))


def _descended(loadings: Array, criterion: Criterion, rotation: Array) -> Array:
    """Descend over rotations: project each step on them by its polar factor."""
    step = 1.0
    height, slope = criterion(loadings @ rotation)
    for _ in range(STEPS):
        gradient = loadings.T @ slope
        inner = rotation.T @ gradient
        along = gradient - rotation @ (inner + inner.T) / 2
        size = float(np.linalg.norm(along))
        if size < TOLERANCE * (1 + abs(height)):
            break
        step *= 2
        for _ in range(30):
            left, _, right = np.linalg.svd(rotation - step * along)
            trial = left @ right
            lower, next_slope = criterion(loadings @ trial)
            if lower < height - 0.5 * size**2 * step:
                break
            step /= 2
        else:  # rounding is all that is left
            break
        rotation, height, slope = trial, lower, next_slope
    return rotation


def _oblique(loadings: Array, criterion: Criterion, matrix: Array) -> Array:
    """Descend over matrices whose columns have length one."""
    step = 1.0
    inverse = np.linalg.inv(matrix)
    turned = loadings @ inverse.T
    height, slope = criterion(turned)
    for _ in range(STEPS):
        gradient = -(turned.T @ slope @ inverse).T
        along = gradient - matrix * (matrix * gradient).sum(0)
        size = float(np.linalg.norm(along))
        if size < TOLERANCE * (1 + abs(height)):
            break
        step *= 2
        for _ in range(30):
            trial = matrix - step * along
            trial = trial / np.linalg.norm(trial, axis=0)
            inverse = np.linalg.inv(trial)
            turned = loadings @ inverse.T
            lower, next_slope = criterion(turned)
            if lower < height - 0.5 * size**2 * step:
                break
            step /= 2
        else:  # rounding is all that is left
            break
        matrix, height, slope = trial, lower, next_slope
    return matrix


def rotated_loadings(model: Model, method: Rotation = "varimax") -> Rotated:
    """Rotate the loadings of a model's free factors: hidden normal roots that share all their children.

    Args:
        model: A fitted model.
        method: ``"varimax"``, which keeps factors uncorrelated, or ``"oblimin"``.
    """
    if method not in ("varimax", "oblimin"):
        raise ModelError(f"method must be 'varimax' or 'oblimin'; got {method!r}")
    graph = model.graph
    factors = [node for node in graph.hidden if type(model.mechanisms[node]) is Normal and not graph.parents(node)]
    if len(factors) < 2 or len({graph.children(node) for node in factors}) > 1:
        shared = ", ".join(f"{node}: {len(graph.children(node))}" for node in factors) or "none"
        raise ModelError(
            f"a rotation needs at least two hidden normal roots that share all their children; got {shared}"
        )
    params, rows, names = model.params(), [], []
    for child in graph.children(factors[0]):
        mechanism = model.mechanisms[child]
        if "weight" not in params[child] or mechanism.space.width != 1:
            raise ModelError(f"a rotation needs children with one slope for each factor; {child!r} has none")
        slopes = dict(zip(_numeric(model, child), np.ravel(params[child]["weight"]), strict=True))
        rows.append([slopes[factor] * float(np.ravel(params[factor]["scale"])[0]) for factor in factors])
        names.append(child)
    raw = np.array(rows)
    if method == "varimax":
        turned, correlations = varimax(raw)[0], np.eye(len(factors))
    else:
        turned, correlations = oblimin(raw)
    sign = np.where(turned.sum(0) < 0, -1.0, 1.0)
    labels = [f"factor {i + 1}" for i in range(len(factors))]
    order = np.argsort(-(turned**2).sum(0), kind="stable")
    turned, correlations = (turned * sign)[:, order], (correlations * np.outer(sign, sign))[np.ix_(order, order)]
    return Rotated(
        pd.DataFrame(turned, index=pd.Index(names, name="child"), columns=labels),
        pd.DataFrame(correlations, index=labels, columns=labels),
    )


def _numeric(model: Model, child: str) -> list[str]:
    """The numeric parents of a node, one entry for each slope."""
    return [name for name, space in model.mechanisms[child].family.continuous for _ in range(space.width)]
