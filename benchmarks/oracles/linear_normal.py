"""Exact expectation-maximisation for a linear-normal graph with gaps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from otpdag.datasets import Truth

Parents = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class LinearNormal:
    r"""Nodes :math:`x = a + B x + s\,e` with standard normal :math:`e`; ``B`` follows the graph."""

    loc: np.ndarray
    weight: np.ndarray
    scale: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        return np.linalg.solve(np.eye(len(self.loc)) - self.weight, self.loc)

    @property
    def precision(self) -> np.ndarray:
        root = (np.eye(len(self.loc)) - self.weight) / self.scale[:, None]
        return root.T @ root


def linear_normal_em(
    frame: pd.DataFrame, parents: Parents, tolerance: float = 1e-9, steps: int = 2000
) -> tuple[Truth, list[float]]:
    """Maximum likelihood from the rows as they are, and the mean log-likelihood of a row before each step.

    The columns are standardised meanwhile. Rows that lack equally many cells share their linear algebra.
    """
    values = frame[list(parents)].to_numpy(dtype=float)
    centre, spread = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    values = (values - centre) / spread
    log_units = float((~np.isnan(values)).mean(axis=0) @ np.log(spread))
    families = [[list(parents).index(name) for name in parents[node]] for node in parents]
    size = len(families)
    model = LinearNormal(np.zeros(size), np.zeros((size, size)), np.ones(size))
    history: list[float] = []
    for _ in range(steps):
        first, second, likelihood = _expect(model, values)
        history.append(float(likelihood - log_units))
        before, model = model, _maximise(first, second, families)
        moved = max(np.abs(a - b).max() for a, b in zip(_fields(before), _fields(model), strict=True))
        if moved < tolerance:
            break
    return _described(model, parents, families, centre, spread), history


def _fields(model: LinearNormal) -> tuple[np.ndarray, ...]:
    return model.loc, model.weight, model.scale


def _expect(model: LinearNormal, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    r"""Means of :math:`x` and :math:`x x^\top` given what is seen, and the mean log-likelihood of a row.

    With the precision :math:`K` of all nodes, the missing ones have covariance :math:`K_{mm}^{-1}` and mean
    :math:`\mu_m - K_{mm}^{-1} K_{mo} (x_o - \mu_o)`; and
    :math:`\log p(x_o) = \log p(x_o, \hat x_m) + \tfrac12 \log |2 \pi K_{mm}^{-1}|`.
    """
    precision, mean = model.precision, model.mean
    missing = np.isnan(values)
    filled = np.where(missing, mean, values)
    extra = np.zeros_like(precision)
    log_volume = 0.0
    for lacking in np.unique(missing.sum(axis=1)):
        rows = np.flatnonzero(missing.sum(axis=1) == lacking)
        if lacking == 0:
            continue
        gaps = np.nonzero(missing[rows])[1].reshape(len(rows), lacking)
        covariance = np.linalg.inv(precision[gaps[:, :, None], gaps[:, None, :]])
        pull = (filled[rows] - mean) @ precision
        shift = np.einsum("nij,nj->ni", covariance, np.take_along_axis(pull, gaps, axis=1))
        filled[rows[:, None], gaps] -= shift
        np.add.at(extra, (gaps[:, :, None], gaps[:, None, :]), covariance)
        log_volume += 0.5 * (np.linalg.slogdet(2 * np.pi * covariance)[1]).sum()
    residual = filled - mean
    log_density = -0.5 * np.einsum("ni,ij,nj->", residual, precision, residual)
    log_density += len(values) * (-0.5 * len(mean) * np.log(2 * np.pi) - np.log(model.scale).sum())
    return filled.mean(axis=0), (filled.T @ filled + extra) / len(values), (log_density + log_volume) / len(values)


def _maximise(first: np.ndarray, second: np.ndarray, families: list[list[int]]) -> LinearNormal:
    """Regress every node on its parents, by expected moments."""
    covariance = second - np.outer(first, first)
    weight = np.zeros_like(covariance)
    for node, parents in enumerate(families):
        if parents:
            weight[node, parents] = np.linalg.solve(covariance[np.ix_(parents, parents)], covariance[parents, node])
    variance = np.diag(covariance) - 2 * (weight * covariance).sum(axis=1)
    variance = variance + np.einsum("ij,jk,ik->i", weight, covariance, weight)
    return LinearNormal(first - weight @ first, weight, np.sqrt(variance))


def _described(
    model: LinearNormal, parents: Parents, families: list[list[int]], centre: np.ndarray, spread: np.ndarray
) -> Truth:
    """The parameters in the units of the table, in the layout of ``Model.params()``."""
    weight = model.weight * spread[:, None] / spread
    loc = model.loc * spread + centre - weight @ centre
    params: Truth = {}
    for at, (node, family) in enumerate(zip(parents, families, strict=True)):
        params[node] = {"loc": np.asarray(loc[at]), "scale": np.asarray(model.scale[at] * spread[at])}
        if family:
            params[node]["weight"] = weight[at, family]
    return params
