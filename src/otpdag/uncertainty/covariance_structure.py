r"""How well a linear normal model reproduces means and covariances: what users of structural equations look at.

With the slopes B and the variances :math:`\Psi` of the noise, values are :math:`x = (I - B)^{-1} (a + e)`, so that the
model implies :math:`\mu = (I - B)^{-1} a` and :math:`\Sigma = (I - B)^{-1} \Psi (I - B)^{-\top}`. The chi-square is
twice the distance of its log-likelihood from that of the best mean and covariance of any form, which is found by
expectation-maximisation where cells are missing (Little and Rubin, 2002, section 11.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special  # scipy.stats takes as long to import as pandas

from otpdag.answers.information import free_parameters
from otpdag.data import Batch
from otpdag.mechanisms import Normal
from otpdag.model import Model
from otpdag.tables import cell_names

Array = NDArray[np.float64]

EM_STEPS, EM_GAIN = 2000, 1e-9
SINGULAR = 1e-10
"""Smallest eigenvalue of the correlations from which on columns follow from each other."""


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
        return {
            "chi-square": self.chi_square,
            "degrees of freedom": self.degrees,
            "p-value": self.p_value,
            "CFI": self.cfi,
            "TLI": self.tli,
            "RMSEA": self.rmsea,
        }


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


def _has_density(values: Array, weight: Array) -> bool:
    """Whether columns vary and none follows from the others: else the best likelihood is infinite."""
    complete = values[~np.isnan(values).any(1) & (weight > 0)]
    if len(complete) <= values.shape[1] or not (np.ptp(complete, axis=0) > 0).all():
        return False
    return bool(np.linalg.eigvalsh(np.corrcoef(complete.T)).min() > SINGULAR) if values.shape[1] > 1 else True


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


def _best_moments(values: Array, weight: Array) -> tuple[Array, Array]:
    """The likeliest mean and covariance of any form."""
    mean, variance = _column_moments(values, weight)
    covariance = np.diag(variance)
    share = weight / weight.sum()
    if not np.isnan(values).any():
        mean = share @ values
        return mean, (values - mean).T @ ((values - mean) * share[:, None])
    before = -np.inf
    for _ in range(EM_STEPS):
        filled, spread = np.nan_to_num(values), np.zeros_like(covariance)
        for seen, rows in _patterns(values):
            if seen.all():
                continue
            hidden = ~seen
            gain = np.linalg.solve(covariance[np.ix_(seen, seen)], covariance[np.ix_(seen, hidden)])
            filled[np.ix_(rows, hidden)] = mean[hidden] + (values[rows][:, seen] - mean[seen]) @ gain
            left = covariance[np.ix_(hidden, hidden)] - covariance[np.ix_(hidden, seen)] @ gain
            spread[np.ix_(hidden, hidden)] += share[rows].sum() * left
        mean = share @ filled
        covariance = (filled - mean).T @ ((filled - mean) * share[:, None]) + spread
        now = _log_density(values, weight, mean, covariance)
        if now - before < EM_GAIN * abs(now):
            break
        before = now
    return mean, covariance
