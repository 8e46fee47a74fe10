r"""Weighted regressions that start a mechanism near the data.

The design has two blocks: ``config`` (N, C), the one-hot (or soft) configuration of the discrete parents, and
``values`` (N, P), the numeric parents. The first block's normal equations are diagonal, so the second is
solved by its Schur complement and tables of any size stay cheap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Fit = Callable[[Tensor | None, Tensor | None, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Fits ``(config, values, target, weight, offset)``; returns the table (C, d) and the slopes (P, d)."""


class _Link(ABC):
    """How a mean follows from a linear prediction, and how the variance follows from the mean."""

    steps = 12
    largest = 30.0
    """Of a prediction, either way: the exponential of it is 1e13."""
    settled = 1e-8
    """A change of coefficients, in logarithms or logits, after which Newton's steps have nothing to add."""

    @abstractmethod
    def mean(self, eta: Tensor) -> Tensor:
        """The mean at a prediction."""

    @abstractmethod
    def begin(self, target: Tensor, centre: Tensor) -> Tensor:
        """A first prediction from the target and its overall mean."""

    @abstractmethod
    def slope(self, mean: Tensor) -> Tensor:
        """Derivative of the mean in the prediction."""

    @abstractmethod
    def precision(self, mean: Tensor) -> Tensor:
        """Weight of a row in the working regression: squared slope over variance."""


class _Identity(_Link):
    steps = 1

    def mean(self, eta: Tensor) -> Tensor:
        return eta

    def begin(self, target: Tensor, centre: Tensor) -> Tensor:
        return target

    def slope(self, mean: Tensor) -> Tensor:
        return torch.ones_like(mean)

    def precision(self, mean: Tensor) -> Tensor:
        return torch.ones_like(mean[:, :1])


class _Log(_Link):
    """Log link; the variance is proportional to the mean (counts) or to its square (constant variation)."""

    def __init__(self, *, variance_power: int) -> None:
        self.variance_power = variance_power

    def mean(self, eta: Tensor) -> Tensor:
        return torch.exp(eta)

    def begin(self, target: Tensor, centre: Tensor) -> Tensor:
        return torch.log((0.5 * (target + centre)).clamp(min=1e-12))

    def slope(self, mean: Tensor) -> Tensor:
        return mean

    def precision(self, mean: Tensor) -> Tensor:
        return mean if self.variance_power == 1 else torch.ones_like(mean[:, :1])


class _Logit(_Link):
    def mean(self, eta: Tensor) -> Tensor:
        return torch.sigmoid(eta)

    def begin(self, target: Tensor, centre: Tensor) -> Tensor:
        return torch.logit((0.5 * (target + centre)).clamp(1e-9, 1 - 1e-9))

    def slope(self, mean: Tensor) -> Tensor:
        return mean * (1 - mean)

    def precision(self, mean: Tensor) -> Tensor:
        return mean * (1 - mean)


def _fit_link(
    config: Tensor | None, values: Tensor | None, target: Tensor, weight: Tensor, offset: Tensor, link: _Link
) -> tuple[Tensor, Tensor]:
    """Fit a generalised linear model by iterated weighted least squares.

    Args:
        config: Configurations (N, C), or None where the table is given.
        values: Numeric parents (N, P), standardised, or None where there are none or their slopes are given.
        target: Values to predict (N, d).
        weight: Weights of the rows, (N,) or (N, d).
        offset: Part of the prediction that is known already, broadcast to (N, d).
        link: _Link and variance function.

    Returns:
        The table (C, d) and the slopes (P, d); the one that is given has no rows.
    """
    config = torch.zeros(len(target), 0, dtype=target.dtype) if config is None else config
    values = torch.zeros(len(target), 0, dtype=target.dtype) if values is None else values
    weight = weight.unsqueeze(-1) if weight.ndim == 1 else weight
    centre = (weight * target).sum(0) / weight.sum(0).clamp(min=1e-12)
    eta = link.begin(target, centre)
    table, slopes = _solve_blocks(config, values, eta - offset, weight * link.precision(link.mean(eta)))
    if link.steps > 1 and not values.shape[1] and len(offset) == 1:
        config, target, weight = _merged(config, target, weight)
        values = values[: len(target)]
    for _ in range(link.steps - 1):
        eta = (offset + config @ table + values @ slopes).clamp(-link.largest, link.largest)
        mean = link.mean(eta)
        working = eta + (target - mean) / link.slope(mean).clamp(min=1e-12)
        before = torch.cat([table, slopes])
        table, slopes = _solve_blocks(config, values, working - offset, weight * link.precision(mean))
        if torch.allclose(torch.cat([table, slopes]), before, rtol=0.0, atol=link.settled):
            break
    return table, slopes


def _merged(config: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of equal configurations as one row with their mean, where rows with the same likeliest entry are equal.

    From there on a prediction is that of a configuration, and rows are read through the sums of their targets alone.
    """
    if not config.shape[1]:
        return config, target, weight
    label = config.argmax(-1)
    first = torch.zeros(config.shape[1], dtype=torch.long).scatter_(0, label, torch.arange(len(label)))
    if not bool((config == config[first[label]]).all()):
        return config, target, weight
    met = torch.unique(label)
    total = weight.new_zeros(config.shape[1], weight.shape[1]).index_add_(0, label, weight)[met]
    sums = target.new_zeros(config.shape[1], target.shape[1]).index_add_(0, label, weight * target)[met]
    return config[first[met]], torch.where(total > 0, sums / total.clamp(min=1e-300), 0.0), total


least_squares: Fit = partial(_fit_link, link=_Identity())
log_count: Fit = partial(_fit_link, link=_Log(variance_power=1))
log_positive: Fit = partial(_fit_link, link=_Log(variance_power=2))
logit: Fit = partial(_fit_link, link=_Logit())


def softmax(
    config: Tensor | None,
    values: Tensor | None,
    counts: Tensor,
    weight: Tensor,
    offset: Tensor,
    steps: int = 60,
    settled: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """Fit a multinomial logit to ``counts`` (N, K) with the fixed curvature bound of Böhning (1992).

    A step that changes no coefficient by more than ``settled`` is the last. Each comes nearer by a share: what is left
    is a few times as much, and less than what rows tell.
    """
    config = torch.zeros(len(counts), 0, dtype=counts.dtype) if config is None else config
    values = torch.zeros(len(counts), 0, dtype=counts.dtype) if values is None else values
    size = counts.sum(-1, keepdim=True)
    shares, equations = counts / size.clamp(min=1e-12), _Equations(config, values, weight.unsqueeze(-1) * size)
    table = torch.zeros(config.shape[1], counts.shape[1], dtype=counts.dtype)
    slopes = torch.zeros(values.shape[1], counts.shape[1], dtype=counts.dtype)
    for _ in range(steps):
        probs = torch.softmax(offset + config @ table + values @ slopes, -1)
        step = equations.solved(2 * (shares - probs))
        table, slopes = table + step[0], slopes + step[1]
        if torch.cat(step).abs().amax() <= settled:
            break
    return table - table.mean(-1, keepdim=True), slopes - slopes.mean(-1, keepdim=True)


def _solve_blocks(config: Tensor, values: Tensor, response: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted least squares of (N, d) on both blocks, for weights (N, 1) or (N, d)."""
    if weight.shape[1] == 1 or values.shape[1] == 0:
        return _Equations(config, values, weight).solved(response)
    columns = [
        _Equations(config, values, weight[:, d : d + 1]).solved(response[:, d : d + 1])
        for d in range(response.shape[1])
    ]
    return torch.cat([table for table, _ in columns], -1), torch.cat([slopes for _, slopes in columns], -1)


class _Equations:
    """Normal equations of both blocks, for weights (N, 1), or (N, d) where there are no slopes.

    By the ridges an empty configuration takes the overall mean, and a full one hardly notices.
    """

    table_ridge, slope_ridge = 1e-4, 1e-6

    def __init__(self, config: Tensor, values: Tensor, weight: Tensor) -> None:
        self.config, self.values, self.weight = config, values, weight
        self.total = weight.sum(0).clamp(min=1e-300)
        self.diagonal = config.T @ weight + self.table_ridge * self.total / max(config.shape[1], 1)
        if values.shape[1]:
            self.cross = config.T @ (weight * values)
            gram = values.T @ (weight * values) - self.cross.T @ (self.cross / self.diagonal)
            self.gram = gram + self.slope_ridge * self.total.max() * torch.eye(values.shape[1], dtype=values.dtype)

    def solved(self, response: Tensor) -> tuple[Tensor, Tensor]:
        """The table (C, d) and the slopes (P, d) of a response (N, d)."""
        weighed = self.weight * response
        mean = weighed.sum(0) / self.total if self.config.shape[1] else torch.zeros_like(response[0])
        centred = weighed - self.weight * mean
        table_side = self.config.T @ centred
        if not self.values.shape[1]:
            return table_side / self.diagonal + mean, self.values.new_zeros(0, response.shape[1])
        slopes = torch.linalg.solve(self.gram, self.values.T @ centred - self.cross.T @ (table_side / self.diagonal))
        return (table_side - self.cross @ slopes) / self.diagonal + mean, slopes
