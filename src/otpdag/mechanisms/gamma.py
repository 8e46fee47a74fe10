"""Gamma nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.mechanisms.base import Params, Parents, sum_cells
from otpdag.mechanisms.parameters import Setting, as_setting
from otpdag.mechanisms.predictor import Dispersed, check_dim
from otpdag.mechanisms.quantiles import gamma_cdf, gamma_quantile
from otpdag.mechanisms.regression import log_positive
from otpdag.spaces import Positive, Space


class Gamma(Dispersed):
    r"""A positive node, log-linear in its numeric parents, with a shape for each discrete configuration.

    .. math:: x = \frac{\mu}{k} F_k^{-1}(u), \quad
              \log \mu = \mathrm{log\_mean}[\mathrm{pa}] + W^\top \mathrm{pa},
              \quad k = \mathrm{shape}[\mathrm{pa}], \quad u \sim U(0, 1)

    with :math:`F_k` the distribution function of the gamma distribution of shape :math:`k` and scale one; the
    mean is :math:`\mu`, the variance :math:`\mu^2 / k`.

    Args:
        dim: Number of coordinates.
        log_mean: Intercept of the log-mean; fixed at zero for a hidden node without discrete parents unless
            it is given, for its children's slopes can take it over.
        weight: Slopes of the numeric parents.
        shape: Shape; one over the squared coefficient of variation.
        network: Sizes of hidden layers of a network of the parents that replaces the linear prediction.

    >>> Gamma(shape=2.0).space
    Positive(dim=1)
    """

    predicts: ClassVar[str] = "log_mean"
    has_free_level: ClassVar[bool] = True
    table: ClassVar[str] = "shape"
    starts_between: ClassVar[tuple[float, float]] = (1e-2, 1e4)
    largest_log_mean: ClassVar[float] = 60.0
    """Beyond, products of means would overflow."""

    def __init__(
        self,
        dim: int = 1,
        *,
        log_mean: ArrayLike | Setting = None,
        weight: ArrayLike | Setting = None,
        shape: ArrayLike | Setting = None,
        network: Sequence[int] = (),
    ) -> None:
        self.dim = check_dim(dim)
        self.log_mean, self.weight, self.shape = as_setting(log_mean), as_setting(weight), as_setting(shape)
        self.network = tuple(network)

    @property
    def space(self) -> Space:
        """Positive vectors."""
        return Positive(self.dim)

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """Adopt the units of the numeric parents and of the log-values."""
        line = torch.log(value.clamp(min=torch.finfo(value.dtype).tiny))
        self.predictor = self.predictor.with_units(line, parents, weight)

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Log-linear regression, then the shape from mean and mean logarithm of the ratios to the fit."""
        regression = self.predictor.start(value, parents, weight, log_positive)
        most = self.largest_log_mean
        fitted = torch.exp(self.predictor.predict_rows(regression, parents).clamp(-most, most))
        relative = (value / fitted).clamp(min=1e-12)
        rows = self.predictor.rows
        mean, mean_log = (self.pooled(part, rows, parents, weight) for part in (relative, torch.log(relative)))
        # Minka (2002): log k - digamma(k) = log mean - mean log, solved to 1.5 % in closed form
        gap = (torch.log(mean) - mean_log).clamp(min=1e-6)
        shape = (3 - gap + torch.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
        return {**regression, "shape": shape.clamp(*self.starts_between)}

    def log_mean_and_shape(self, params: Params, parents: Parents, like: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both at these parents: (R, ..., dim)."""
        log_mean = self.predictor(params, parents, like).clamp(-self.largest_log_mean, self.largest_log_mean)
        return log_mean, self.row_of(params["shape"], parents, log_mean.ndim)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The quantile at ``u``."""
        log_mean, shape = self.log_mean_and_shape(params, parents, noise)
        value = torch.exp(log_mean) / shape * gamma_quantile(noise, shape)
        return value.clamp(min=torch.finfo(value.dtype).tiny)

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Gamma log-density."""
        log_mean, shape = self.log_mean_and_shape(params, parents, value)
        log_rate = torch.log(shape) - log_mean
        line = torch.log(value.clamp(min=torch.finfo(value.dtype).tiny))
        log_prob = shape * log_rate + (shape - 1) * line - torch.exp(log_rate) * value - torch.lgamma(shape)
        return sum_cells(log_prob, mask)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """The distribution function."""
        log_mean, shape = self.log_mean_and_shape(params, parents, value)
        return gamma_cdf(value * shape * torch.exp(-log_mean), shape)

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The mean."""
        return torch.exp(self.log_mean_and_shape(params, parents, None)[0])
