"""Beta nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.mechanisms.base import Params, Parents, sum_cells
from otpdag.mechanisms.parameters import Setting, as_setting
from otpdag.mechanisms.predictor import Dispersed, check_dim
from otpdag.mechanisms.quantiles import beta_cdf, beta_quantile
from otpdag.mechanisms.regression import logit
from otpdag.spaces import Space, Unit


class Beta(Dispersed):
    r"""A node in (0, 1) with a logit-linear mean and a concentration for each discrete configuration.

    .. math:: x \sim \mathrm{Beta}(\mu c, (1 - \mu) c), \quad
              \mathrm{logit}\, \mu = \mathrm{logit\_mean}[\mathrm{pa}] + W^\top \mathrm{pa},
              \quad c = \mathrm{concentration}[\mathrm{pa}]

    The noise is uniform and goes through the inverse distribution function; the variance is
    :math:`\mu (1 - \mu) / (1 + c)`.

    Args:
        dim: Number of coordinates.
        logit_mean: Intercept of the mean's logit.
        weight: Slopes of the numeric parents.
        concentration: Concentration; large values make the node nearly constant at its mean.
        network: Sizes of hidden layers of a network of the parents that replaces the linear prediction.

    >>> Beta(logit_mean=0.0).space
    Unit(dim=1)
    """

    predicts: ClassVar[str] = "logit_mean"
    table: ClassVar[str] = "concentration"
    starts_between: ClassVar[tuple[float, float]] = (0.1, 1e4)
    largest_logit: ClassVar[float] = 15.0
    """Beyond, one of the two shapes would be lost to rounding."""

    def __init__(
        self,
        dim: int = 1,
        *,
        logit_mean: ArrayLike | Setting = None,
        weight: ArrayLike | Setting = None,
        concentration: ArrayLike | Setting = None,
        network: Sequence[int] = (),
    ) -> None:
        self.dim = check_dim(dim)
        self.logit_mean, self.weight = as_setting(logit_mean), as_setting(weight)
        self.concentration = as_setting(concentration)
        self.network = tuple(network)

    @property
    def space(self) -> Space:
        """Vectors between zero and one."""
        return Unit(self.dim)

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """Adopt the units of the numeric parents; logits are of order one already."""
        self.predictor = self.predictor.with_units(None, parents, weight)

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Logit-linear regression, then the concentration from the residuals' variance."""
        regression = self.predictor.start(value, parents, weight, logit)
        mean = torch.sigmoid(self.predictor.predict_rows(regression, parents)).clamp(1e-6, 1 - 1e-6)
        relative = (value - mean) ** 2 / (mean * (1 - mean))
        share = self.pooled(relative, self.predictor.rows, parents, weight)
        return {**regression, "concentration": (1 / share.clamp(min=1e-9) - 1).clamp(*self.starts_between)}

    def shapes(self, params: Params, parents: Parents, like: Tensor) -> tuple[Tensor, Tensor]:
        """Both shape parameters of the beta distribution: (R, ..., dim)."""
        line = self.predictor(params, parents, like).clamp(-self.largest_logit, self.largest_logit)
        concentration = self.row_of(params["concentration"], parents, line.ndim)
        return concentration * torch.sigmoid(line), concentration * torch.sigmoid(-line)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The quantile at ``u``."""
        return _inside(beta_quantile(noise, *self.shapes(params, parents, noise)))

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Beta log-density."""
        a, b = self.shapes(params, parents, value)
        value = _inside(value)
        log_norm = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
        return sum_cells((a - 1) * torch.log(value) + (b - 1) * torch.log1p(-value) - log_norm, mask)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """The distribution function."""
        return beta_cdf(_inside(value), *self.shapes(params, parents, value))

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The mean."""
        return torch.sigmoid(self.predictor(params, parents))


def _inside(value: Tensor) -> Tensor:
    """Keep values off the ends, where the density may be infinite."""
    info = torch.finfo(value.dtype)
    return value.clamp(info.tiny, 1 - info.eps / 2)
