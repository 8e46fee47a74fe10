r"""Linear normal models, as users of structural equations and of factors look at them: fit indices and rotations.

With the slopes B and the variances :math:`\Psi` of the noise, values are :math:`x = (I - B)^{-1} (a + e)`, so that the
model implies :math:`\mu = (I - B)^{-1} a` and :math:`\Sigma = (I - B)^{-1} \Psi (I - B)^{-\top}`. The chi-square is
twice the distance of its log-likelihood from that of the best mean and covariance of any form, which is found by
expectation-maximisation where cells are missing (Little and Rubin, 2002, section 11.2).

Where all factors point to the same children, any rotation of them fits the data alike. Varimax (Kaiser, 1958) keeps
factors uncorrelated; oblimin with gamma zero, quartimin (Carroll, 1953), lets them correlate. Both by the gradient
projection of Bernaards and Jennrich (2005).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special  # scipy.stats takes as long to import as pandas

from otpdag.answers.information import free_parameters
from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.mechanisms import Normal
from otpdag.model import Model
from otpdag.tables import cell_names

Array = NDArray[np.float64]
Rotation = Literal["varimax", "oblimin"]
Criterion = Callable[[Array], tuple[float, Array]]


# -- fit indices -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moments:
    """Names of single numbers, and their implied mean and covariance."""

    names: tuple[str, ...]
    mean: Array
    covariance: Array

    def of(self, names: tuple[str, ...]) -> tuple[Array, Array]:
        """Mean and covariance of some of them."""
        at = [self.names.index(name) for name in names]
        return self.mean[at], self.covariance[np.ix_(at, at)]


@dataclass(frozen=True)
class FitIndices:
    """Chi-square against the best mean and covariance, and what is made of it.

    Attributes:
        chi_square: Twice the log-likelihood that the restrictions of the model cost.
        degrees: Numbers that they save.
        p_value: Of a chi-square at least as large, if the model is right.
        cfi: Comparative fit index (Bentler, 1990): 1 is best, 0 as bad as independence.
        tli: Tucker-Lewis index.
        rmsea: Root mean square error of approximation (Steiger, 1990): 0 is best.
    """

    chi_square: float
    degrees: int
    p_value: float
    cfi: float
    tli: float
    rmsea: float

    def facts(self) -> dict[str, float]:
        """As a summary names them."""
        names = ("chi-square", "degrees of freedom", "p-value", "CFI", "TLI", "RMSEA")
        return dict(zip(names, asdict(self).values(), strict=True))


def implied_moments(model: Model) -> Moments | None:
    """Mean and covariance of all nodes; None unless every node is normal and linear in its parents."""
    if model.graph.is_dynamic or not all(
        type(one) is Normal and one.is_linear and not one.family.discrete for one in model.mechanisms.values()
    ):
        return None
    cells = {node: mechanism.space.width for node, mechanism in model.mechanisms.items()}
    names = [name for node, width in cells.items() for name in cell_names(node, width)]
    slopes = np.zeros((len(names), len(names)))
    level, variance = np.zeros(len(names)), np.zeros(len(names))
    for node, params in model.params().items():
        own = [names.index(name) for name in cell_names(node, cells[node])]
        level[own], variance[own] = np.broadcast_to(params["loc"], len(own)), np.square(params["scale"])
        above = [names.index(n) for parent in model.graph.parents(node) for n in cell_names(parent, cells[parent])]
        if above:
            slopes[np.ix_(own, above)] = np.asarray(params["weight"]).reshape(len(above), len(own)).T
    total = np.linalg.inv(np.eye(len(names)) - slopes)
    return Moments(tuple(names), total @ level, total * variance @ total.T)


def standardised(model: Model, table: pd.DataFrame, moments: Moments) -> pd.Series:
    """Slopes in units of standard deviations, for the lines of a summary's table; NaN for what is no slope."""
    spread = dict(zip(moments.names, np.sqrt(np.diag(moments.covariance)), strict=True))
    slopes = np.full(len(table), np.nan)
    for place, (node, name, at, value) in enumerate(
        zip(table["node"], table["parameter"], table["at"], table["estimate"], strict=True)
    ):
        parent, _, child = str(at).partition(", ")
        if name == "weight" and parent in spread:
            slopes[place] = value * spread[parent] / spread[child or str(node)]
    return pd.Series(slopes, index=table.index, name="standardised")


def fit_indices(model: Model, batch: Batch) -> FitIndices | None:
    """Chi-square, CFI, TLI and RMSEA on rows; None unless the model is linear and normal with something to test."""
    moments = implied_moments(model)
    if moments is None or not model.graph.observed:
        return None
    values, weight = _columns(model, batch)
    size, total = values.shape[1], float(weight.sum())
    degrees = size * (size + 3) // 2 - free_parameters(model.structure)
    if degrees <= 0:
        return None
    names = tuple(n for node in model.graph.observed for n in cell_names(node, model.mechanisms[node].space.width))
    if not _has_density(values, weight):
        return None
    best = _log_density(values, weight, *_best_moments(values, weight))
    own = _log_density(values, weight, *moments.of(names))
    mean, variance = _column_moments(values, weight)
    apart = _log_density(values, weight, mean, np.diag(variance))
    statistic, baseline = 2 * (best - own), 2 * (best - apart)
    base_degrees = size * (size - 1) // 2
    excess, base_excess = max(statistic - degrees, 0.0), max(baseline - base_degrees, statistic - degrees, 0.0)
    ratio = baseline / base_degrees if base_degrees else 1.0
    return FitIndices(
        chi_square=statistic,
        degrees=degrees,
        p_value=float(special.chdtrc(degrees, statistic)),
        cfi=1 - excess / base_excess if base_excess else 1.0,
        tli=(ratio - statistic / degrees) / (ratio - 1) if ratio > 1 else 1.0,
        rmsea=float(np.sqrt(excess / (degrees * total))),
    )


def _has_density(values: Array, weight: Array, least: float = 1e-10) -> bool:
    """Whether columns vary and none follows from the others: else the best likelihood is infinite.

    They do by the smallest eigenvalue of their correlations.
    """
    complete = values[~np.isnan(values).any(1) & (weight > 0)]
    if len(complete) <= values.shape[1] or not (np.ptp(complete, axis=0) > 0).all():
        return False
    return bool(np.linalg.eigvalsh(np.corrcoef(complete.T)).min() > least) if values.shape[1] > 1 else True


def _columns(model: Model, batch: Batch) -> tuple[Array, Array]:
    """Observed cells side by side, NaN where missing (N, p), and weights (N,)."""
    parts = []
    for node in model.graph.observed:
        value, mask = batch.values[node][0].numpy(), batch.mask[node][0].numpy()
        parts.append(np.where(mask, value, np.nan))
    return np.concatenate(parts, 1), batch.weight[0].numpy()


def _column_moments(values: Array, weight: Array) -> tuple[Array, Array]:
    seen = ~np.isnan(values) * weight[:, None]
    filled = np.nan_to_num(values)
    mean = (seen * filled).sum(0) / seen.sum(0)
    return mean, (seen * (filled - mean) ** 2).sum(0) / seen.sum(0)


def _patterns(values: Array) -> list[tuple[NDArray[np.bool_], NDArray[np.intp]]]:
    """Which columns are seen, and the rows that see just these."""
    seen = ~np.isnan(values)
    kinds, place = np.unique(seen, axis=0, return_inverse=True)
    return [(kind, np.flatnonzero(place.ravel() == number)) for number, kind in enumerate(kinds)]


def _log_density(values: Array, weight: Array, mean: Array, covariance: Array) -> float:
    total = 0.0
    for seen, rows in _patterns(values):
        if not seen.any():
            continue
        part = covariance[np.ix_(seen, seen)]
        gap = values[rows][:, seen] - mean[seen]
        square = (gap * np.linalg.solve(part, gap.T).T).sum(1)
        constant = np.linalg.slogdet(2 * np.pi * part)[1]
        total += float((weight[rows] * -0.5 * (square + constant)).sum())
    return total


def _best_moments(values: Array, weight: Array, steps: int = 2000, gain: float = 1e-9) -> tuple[Array, Array]:
    """The likeliest mean and covariance of any form; steps end where the log-likelihood gains so small a share."""
    mean, variance = _column_moments(values, weight)
    covariance = np.diag(variance)
    share = weight / weight.sum()
    before = -np.inf
    for _ in range(steps):
        filled, spread = np.nan_to_num(values), np.zeros_like(covariance)
        for seen, rows in _patterns(values):
            if seen.all():
                continue
            hidden = ~seen
            slopes = np.linalg.solve(covariance[np.ix_(seen, seen)], covariance[np.ix_(seen, hidden)])
            filled[np.ix_(rows, hidden)] = mean[hidden] + (values[rows][:, seen] - mean[seen]) @ slopes
            left = covariance[np.ix_(hidden, hidden)] - covariance[np.ix_(hidden, seen)] @ slopes
            spread[np.ix_(hidden, hidden)] += share[rows].sum() * left
        mean = share @ filled
        covariance = (filled - mean).T @ ((filled - mean) * share[:, None]) + spread
        now = _log_density(values, weight, mean, covariance)
        if now - before < gain * abs(now):
            break
        before = now
    return mean, covariance


# -- rotations ---------------------------------------------------------------------------------------------------------


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

    matrix = _descended(loadings, criterion, _orthogonal(loadings, criterion), oblique=True)
    return loadings @ np.linalg.inv(matrix).T, matrix.T @ matrix


def _orthogonal(loadings: Array, criterion: Criterion, starts: int = 5) -> Array:
    """The best rotation that is found from several starts, the first of them none at all.

    A criterion may be level where loadings happen to stand.
    """
    size = loadings.shape[1]
    generator = np.random.default_rng(0)
    others = (np.linalg.qr(generator.standard_normal((size, size)))[0] for _ in range(starts - 1))
    ends = [_descended(loadings, criterion, start) for start in (np.eye(size), *others)]
    return min(ends, key=lambda rotation: round(criterion(loadings @ rotation)[0], 9))


def _descended(
    loadings: Array,
    criterion: Criterion,
    matrix: Array,
    *,
    oblique: bool = False,
    steps: int = 3000,
    tolerance: float = 1e-8,
) -> Array:
    """Descend over rotations, or over matrices whose columns have length one, and project each step on them.

    The gradient ends it, at ``tolerance`` for each unit of the criterion.
    """

    def turned(matrix: Array) -> Array:
        return loadings @ (np.linalg.inv(matrix).T if oblique else matrix)

    step = 1.0
    height, slope = criterion(turned(matrix))
    for _ in range(steps):
        if oblique:
            gradient = -(turned(matrix).T @ slope @ np.linalg.inv(matrix)).T
            along = gradient - matrix * (matrix * gradient).sum(0)
        else:
            gradient = loadings.T @ slope
            inner = matrix.T @ gradient
            along = gradient - matrix @ (inner + inner.T) / 2
        size = float(np.linalg.norm(along))
        if size < tolerance * (1 + abs(height)):
            break
        step *= 2
        for _ in range(30):
            trial = _projected(matrix - step * along, oblique)
            lower, next_slope = criterion(turned(trial))
            if lower < height - 0.5 * size**2 * step:
                break
            step /= 2
        else:  # rounding is all that is left
            break
        matrix, height, slope = trial, lower, next_slope
    return matrix


def _projected(matrix: Array, oblique: bool) -> Array:
    """The nearest matrix with columns of length one, or the nearest rotation: its polar factor."""
    if oblique:
        return np.asarray(matrix / np.linalg.norm(matrix, axis=0))
    left, _, right = np.linalg.svd(matrix)
    return np.asarray(left @ right)


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
        numbers = [name for name, space in mechanism.family.continuous for _ in range(space.width)]
        slopes = dict(zip(numbers, np.ravel(params[child]["weight"]), strict=True))
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
