r"""Linear normal models, as users of structural equations and of factors look at them: fit indices and rotations.

The chi-square is twice the distance of a model's log-likelihood from that of the best mean and covariance of any form,
which is found by expectation-maximisation where cells are missing (Little and Rubin, 2002, section 11.2).

Where all factors point to the same children, any rotation of them fits the data alike. Varimax (Kaiser, 1958) keeps
factors uncorrelated; oblimin with gamma zero, quartimin (Carroll, 1953), lets them correlate, over matrices whose
columns have length one (Jennrich, 2002).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pandas as pd
import scipy as sp

from otpdag.answers.notes import point_of
from otpdag.answers.standard_errors import free_parameters
from otpdag.data import Batch
from otpdag.data.columns import cell_names
from otpdag.errors import ModelError, check_choice
from otpdag.likelihood.linear_normal import NormalFit, RowGroups, grouped_moments, structural_equations
from otpdag.likelihood.row_posterior import Fitted
from otpdag.likelihood.row_problem import is_linear_normal
from otpdag.mechanisms import Normal
from otpdag.numerics import Array, Flags, Ints, first_connected

Rotation = Literal["varimax", "oblimin"]


# -- fit indices -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moments:
    """Nodes and coordinates of single numbers, and their implied mean and covariance."""

    cells: tuple[tuple[str, int], ...]
    mean: Array
    covariance: Array


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
        srmr: Root mean square of the differences of variances and covariances, in units of the columns' spreads.
    """

    chi_square: float
    degrees: int
    p_value: float
    cfi: float
    tli: float
    rmsea: float
    srmr: float

    def __str__(self) -> str:
        return (
            f"chi-square {self.chi_square:.3f} on {self.degrees} degrees of freedom (p {self.p_value:.3g}), "
            f"CFI {self.cfi:.3f}, TLI {self.tli:.3f}, RMSEA {self.rmsea:.3f}, SRMR {self.srmr:.3f}"
        )

    def facts(self) -> dict[str, float]:
        """As a summary names them."""
        names = ("chi-square", "degrees of freedom", "p-value", "CFI", "TLI", "RMSEA", "SRMR")
        return dict(zip(names, asdict(self).values(), strict=True))


def implied_moments(fitted: Fitted) -> Moments | None:
    """Mean and covariance of all nodes; None unless every node is normal and linear in its parents."""
    structure = fitted.structure
    if structure.graph.is_dynamic or not is_linear_normal(structure):
        return None
    cells = tuple((node, cell) for node, own in structure.mechanisms.items() for cell in range(own.space.width))
    shapes = {key: parameter.shape for key, parameter in structure.parameters().items()}
    size = len(cells)
    rows = (np.zeros(size), np.ones((1, size), dtype=bool), np.zeros((1, 1, size + 1, size + 1)))  # none are looked at
    equations = structural_equations(structure, shapes, cells, *rows)
    return Moments(cells, *equations.moments(point_of(fitted, shapes).numpy()))


def standardised(fitted: Fitted, table: pd.DataFrame, moments: Moments) -> pd.Series:
    """Slopes in units of standard deviations, for the lines of a summary's table; NaN for what is no slope."""
    widths = {node: own.space.width for node, own in fitted.structure.mechanisms.items()}
    names = [cell_names(node, widths[node])[cell] for node, cell in moments.cells]
    spread = dict(zip(names, np.sqrt(np.diag(moments.covariance)), strict=True))
    slopes = np.full(len(table), np.nan)
    for place, (node, name, at, value) in enumerate(
        zip(table["node"], table["parameter"], table["at"], table["estimate"], strict=True)
    ):
        parent, _, child = str(at).partition(", ")
        if name == "weight" and parent in spread:
            slopes[place] = value * spread[parent] / spread[child or str(node)]
    return pd.Series(slopes, index=table.index, name="standardised")


def fit_indices(fitted: Fitted, batch: Batch) -> FitIndices | None:
    """Chi-square, CFI, TLI, RMSEA and SRMR on rows; None unless the model is linear normal with something to test."""
    moments, observed = implied_moments(fitted), fitted.structure.graph.observed
    if moments is None or not observed:
        return None
    rows = _Rows.of(fitted, batch)
    size, total = len(rows.shift), float(rows.second[..., -1, -1].sum())
    together = rows.together[np.tril_indices(size, -1)]  # of other pairs nothing is told
    base_degrees = int(together.sum())
    degrees = 2 * size + base_degrees - free_parameters(fitted.structure)
    if degrees <= 0 or not rows.has_density():
        return None
    at = [moments.cells.index(cell) for cell in rows.groups.cells]
    own = rows.log_density(moments.mean[at] - rows.shift, moments.covariance[np.ix_(at, at)])
    mean, variance = rows.columns()
    free = rows.best(mean, np.diag(variance))
    best, apart = rows.log_density(*free), rows.log_density(mean, np.diag(variance))
    spread = np.sqrt(np.diag(free[1]))
    missed = ((free[1] - moments.covariance[np.ix_(at, at)]) / np.outer(spread, spread))[np.tril(rows.together)]
    statistic, baseline = 2 * (best - own), 2 * (best - apart)
    excess, base_excess = max(statistic - degrees, 0.0), max(baseline - base_degrees, statistic - degrees, 0.0)
    ratio = baseline / base_degrees if base_degrees else 1.0
    return FitIndices(
        chi_square=statistic,
        degrees=degrees,
        p_value=float(sp.special.chdtrc(degrees, statistic)),
        cfi=1 - excess / base_excess if base_excess else 1.0,
        tli=(ratio - statistic / degrees) / (ratio - 1) if ratio > 1 else 1.0,
        rmsea=float(np.sqrt(len(rows.blocks) * excess / (degrees * total))),  # of several groups by Steiger (1998)
        srmr=float(np.sqrt(np.mean(missed**2))),
    )


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows in groups that show the same observed numbers, and their second moments (1, G, p + 1, p + 1) about a shift.

    Means are taken less that shift.
    """

    groups: RowGroups
    shift: Array
    second: Array

    @classmethod
    def of(cls, fitted: Fitted, batch: Batch) -> _Rows:
        groups, shift, second = grouped_moments(fitted.structure, batch, fitted.structure.graph.observed)
        return cls(groups, shift, second[:1])

    @cached_property
    def together(self) -> Flags:
        """Which pairs of cells (D, D) some row shows."""
        return np.asarray((self.groups.shown[:, :, None] & self.groups.shown[:, None]).any(0))

    @cached_property
    def blocks(self) -> list[Ints]:
        """Cells that rows connect: those of all columns, or of each group of a model of several groups."""
        block = first_connected(len(self.together), *np.nonzero(self.together))
        return [np.flatnonzero(block == first) for first in np.unique(block)]

    def has_density(self, least: float = 1e-10) -> bool:
        """Whether columns vary and none follows from the others, or else the best likelihood is infinite.

        They do by the smallest eigenvalue of their correlations in complete rows.
        """
        return all(self._block_has_density(block, least) for block in self.blocks)

    def _block_has_density(self, block: Ints, least: float) -> bool:
        complete = np.flatnonzero(self.groups.shown[:, block].all(-1))
        if not len(complete) or self.second[0, complete[0], -1, -1] <= len(block):
            return False
        average = self.second[0, complete[0]] / self.second[0, complete[0], -1, -1]
        own = average[np.ix_(block, block)]
        covariance = own - np.outer(average[block, -1], average[block, -1])
        variance, squares = np.diag(covariance), np.diag(own)
        if not (variance > least * squares).all():
            return False
        return bool(np.linalg.eigvalsh(covariance / np.sqrt(np.outer(variance, variance))).min() > least)

    def columns(self) -> tuple[Array, Array]:
        """Mean and variance of each column where it is seen."""
        seen = (self.groups.shown * self.second[0, :, -1:, -1]).sum(0)
        mean = self.second[0, :, :-1, -1].sum(0) / seen
        return mean, np.diagonal(self.second[0], axis1=-2, axis2=-1)[:, :-1].sum(0) / seen - mean**2

    def fit(self, mean: Array, covariance: Array) -> NormalFit:
        return NormalFit.of(mean[None, None, :, None], covariance[None, None], self.second, self.groups.shown)

    def log_density(self, mean: Array, covariance: Array) -> float:
        return -float((self.second[..., -1, -1] * self.fit(mean, covariance).loss).sum())

    def best(self, mean: Array, covariance: Array, steps: int = 2000, gain: float = 1e-9) -> tuple[Array, Array]:
        """The likeliest mean and covariance of any form; steps end where the log-likelihood gains so small a share."""
        count = self.second[0, :, -1, -1]
        share = (count / count.sum())[:, None, None]
        before = np.inf
        for _ in range(steps):
            fit = self.fit(mean, covariance)
            loss = float((share[:, 0, 0] * fit.loss[0]).sum())
            if before - loss < gain * abs(loss):
                break
            before = loss
            # deviations of all cells from those that are shown, and what is left unknown of them
            onto = covariance @ fit.inverse[0]
            step = (share * (onto @ fit.missed[0])).sum(0)[:, 0]
            left = covariance - onto @ covariance
            covariance = (share * (onto @ fit.around[0] @ onto.swapaxes(-1, -2) + left)).sum(0) - np.outer(step, step)
            mean = mean + step
        return mean, covariance


# -- rotations ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rotated:
    """Loadings (children by factors) after a rotation, and the correlations of the factors then."""

    loadings: pd.DataFrame
    correlations: pd.DataFrame

    def __str__(self) -> str:
        return f"loadings\n{self.loadings.round(4)}\n\ncorrelations of the factors\n{self.correlations.round(4)}"


def varimax(loadings: Array, starts: int = 5, steps: int = 3000, tolerance: float = 1e-10) -> tuple[Array, Array]:
    """Rotated loadings (p, k), and the rotation T (k, k) with ``rotated = loadings @ T``: the best of several starts.

    The first start is no rotation at all, but the criterion may be level there. A step goes to the rotation nearest to
    the gradient, until it moves by less than the ``tolerance``.

    >>> turned, rotation = varimax(np.array([[1.0, 1.0], [2.0, 2.0], [1.0, -1.0]]))
    >>> np.sort(np.abs(turned), -1).round(4).tolist(), np.allclose(rotation.T @ rotation, np.eye(2))
    ([[0.0, 1.4142], [0.0, 2.8284], [0.0, 1.4142]], True)
    """
    size, generator, ends = loadings.shape[1], np.random.default_rng(0), []
    for start in range(starts):
        rotation = np.linalg.qr(generator.standard_normal((size, size)))[0] if start else np.eye(size)
        for _ in range(steps):
            turned = loadings @ rotation
            left, _, right = np.linalg.svd(loadings.T @ (turned * (turned**2 - (turned**2).mean(0))))
            moved, rotation = np.abs(left @ right - rotation).max(), left @ right
            if moved < tolerance:
                break
        ends.append(rotation)
    best = max(ends, key=lambda rotation: round(float(((loadings @ rotation) ** 2).var(0).sum()), 9))
    return loadings @ best, best


def oblimin(loadings: Array) -> tuple[Array, Array]:
    """Pattern loadings (p, k), and the correlations of the factors (k, k)."""
    from scipy import optimize  # takes as long to import as pandas

    shape = (loadings.shape[1],) * 2

    def criterion(flat: Array) -> tuple[float, Array]:
        """The products of squares in the same row, and their gradient in columns of any length."""
        length = np.linalg.norm(flat.reshape(shape), axis=0)
        matrix = flat.reshape(shape) / length
        turned = loadings @ np.linalg.inv(matrix).T
        squares = turned**2
        others = squares @ (1 - np.eye(len(length)))
        slope = -(turned.T @ (turned * others) @ np.linalg.inv(matrix)).T
        return 0.25 * float((squares * others).sum()), ((slope - matrix * (matrix * slope).sum(0)) / length).ravel()

    start = varimax(loadings)[1].ravel()
    end = optimize.minimize(criterion, start, jac=True, options={"gtol": 1e-8, "maxiter": 3000}).x.reshape(shape)
    matrix = end / np.linalg.norm(end, axis=0)
    return loadings @ np.linalg.inv(matrix).T, matrix.T @ matrix


def rotated_loadings(fitted: Fitted, method: Rotation = "varimax") -> Rotated:
    """Rotate the loadings of a model's free factors: hidden normal roots that share all their children.

    Args:
        fitted: The model.
        method: ``"varimax"``, which keeps factors uncorrelated, or ``"oblimin"``.
    """
    check_choice("method", method, ("varimax", "oblimin"))
    graph, mechanisms = fitted.structure.graph, fitted.structure.mechanisms
    factors = [node for node in graph.hidden if type(mechanisms[node]) is Normal and not graph.parents(node)]
    if len(factors) < 2 or len({graph.children(node) for node in factors}) > 1:
        shared = ", ".join(f"{node}: {len(graph.children(node))}" for node in factors) or "none"
        raise ModelError(f"a rotation needs at least two hidden normal roots with the same children; got {shared}")
    params, rows, names = fitted.params(), [], []
    for child in graph.children(factors[0]):
        if "weight" not in params[child] or mechanisms[child].space.width != 1:
            raise ModelError(f"a rotation needs children with one slope for each factor; {child!r} has none")
        numbers = [name for name, space in mechanisms[child].family.continuous for _ in range(space.width)]
        slopes = dict(zip(numbers, np.ravel(params[child]["weight"]), strict=True))
        rows.append([slopes[factor] * float(np.ravel(params[factor]["scale"])[0]) for factor in factors])
        names.append(child)
    raw = np.array(rows)
    turned, correlations = (varimax(raw)[0], np.eye(len(factors))) if method == "varimax" else oblimin(raw)
    sign = np.where(turned.sum(0) < 0, -1.0, 1.0)
    labels = [f"factor {i + 1}" for i in range(len(factors))]
    order = np.argsort(-(turned**2).sum(0), kind="stable")
    turned, correlations = (turned * sign)[:, order], (correlations * np.outer(sign, sign))[np.ix_(order, order)]
    return Rotated(
        pd.DataFrame(turned, index=pd.Index(names, name="child"), columns=labels),
        pd.DataFrame(correlations, index=labels, columns=labels),
    )
