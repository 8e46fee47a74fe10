"""Poisson and negative binomial nodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.mechanisms.base import Noise, Params, Parents, sum_cells
from otpdag.mechanisms.parameters import Fixed, Setting, Start, as_setting
from otpdag.mechanisms.predictor import Dispersed, Predicted, check_dim
from otpdag.mechanisms.quantiles import beta_cdf, inside_unit, poisson_quantile
from otpdag.mechanisms.regression import log_count
from otpdag.spaces import Count, Space


class LogLinearCount(Predicted):
    """Counts whose log-mean is predicted from the parents."""

    predicts: ClassVar[str] = "log_rate"
    largest_log_rate: ClassVar[float] = 25.0
    """Beyond, counts are no longer exact in floating point."""

    def __init__(
        self,
        dim: int = 1,
        *,
        log_rate: ArrayLike | Setting = None,
        rate: ArrayLike | Setting = None,
        weight: ArrayLike | Setting = None,
        network: Sequence[int] = (),
    ) -> None:
        self.dim = check_dim(dim)
        if log_rate is not None and rate is not None:
            raise ModelError("give `log_rate` or `rate`, not both")
        self.log_rate = as_setting(log_rate) if rate is None else _log_setting(as_setting(rate))
        self.weight = as_setting(weight)
        self.network = tuple(network)

    @property
    def space(self) -> Space:
        """Counts."""
        return Count(self.dim)

    @property
    def noise(self) -> Noise:
        """One uniform number for each coordinate, sent through the inverse distribution function."""
        return Noise(self.dim, "uniform")

    @property
    def relaxed_noise(self) -> Noise:
        """Standard normal noise of the paper's Gaussian reparameterisation."""
        return Noise(self.dim, "normal")

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """Adopt the units of the numeric parents and the centre of the log-counts."""
        self.predictor = self.predictor.with_units(torch.log(value + 0.5), parents, weight)

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Poisson regression."""
        return self.predictor.start(value, parents, weight, log_count)

    def log_rate_at(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """The log-rate at these parents: (R, ..., dim)."""
        return self.predictor(params, parents, like).clamp(max=self.largest_log_rate)

    def relaxed(self, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
        """The paper's Gaussian draw (Appendix C.2): ``rate + u * sqrt(variance)``."""
        log_rate = self.log_rate_at(params, parents, noise)
        return torch.exp(log_rate) + noise * torch.sqrt(self.variance(params, parents, log_rate))

    @abstractmethod
    def variance(self, params: Params, parents: Parents, log_rate: Tensor) -> Tensor:
        """Variance of the count."""

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The rate."""
        return torch.exp(self.log_rate_at(params, parents))


class Poisson(LogLinearCount):
    r"""A Poisson count, log-linear in its numeric parents, with an intercept for each discrete configuration.

    .. math:: x \sim \mathrm{Poisson}(\exp(\mathrm{log\_rate}[\mathrm{pa}] + W^\top \mathrm{pa}))

    Args:
        dim: Number of coordinates.
        log_rate: Intercepts of the log-rate.
        rate: The same as a rate, to fix or start it; give one of the two.
        weight: Slopes of the numeric parents.
        network: Sizes of hidden layers of a network of the parents.

    >>> Poisson().space
    Count(dim=1)
    """

    def features(self, value: Tensor, mask: Tensor) -> Tensor | None:
        """One and the count of every cell that is seen, and the logarithm of the factorials."""
        if not self.has_only_tables:
            return None
        seen = mask.expand_as(value).to(value)
        return torch.cat([seen, seen * value, (seen * torch.lgamma(value + 1)).sum(-1, keepdim=True)], -1)

    def coefficients(self, params: Params) -> Tensor:
        """Those of the Poisson log-probability."""
        log_rate = params["log_rate"].clamp(max=self.largest_log_rate)
        return torch.cat([-torch.exp(log_rate), log_rate, -torch.ones_like(log_rate[..., :1])], -1)

    def fitted(self, params: Params, sums: Tensor, fewest: float = 1e-6) -> dict[str, Tensor]:
        """The mean counts; a sum of none counts as ``fewest``, so that its logarithm is finite."""
        if not self.declared()["log_rate"].learned:
            return dict(params)
        count, total = sums[..., : self.dim], sums[..., self.dim : 2 * self.dim]
        log_rate = torch.log(total.clamp(min=fewest) / count.clamp(min=1e-300))
        return {"log_rate": torch.where(count > 0, log_rate, params["log_rate"])}

    def variance(self, params: Params, parents: Parents, log_rate: Tensor) -> Tensor:
        """The rate."""
        return torch.exp(log_rate)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The inverse distribution function at ``u``."""
        return poisson_quantile(noise, torch.exp(self.log_rate_at(params, parents, noise)))

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Poisson log-probability."""
        log_rate = self.log_rate_at(params, parents, value)
        return sum_cells(value * log_rate - torch.exp(log_rate) - torch.lgamma(value + 1), mask)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """A point between the distribution function just below the count and at it."""
        rate = torch.exp(self.log_rate_at(params, parents, value))
        # P(X <= k) = Q(k + 1, rate), the regularised upper incomplete gamma function
        return between(lambda count: torch.special.gammaincc(count + 1, rate), value, uniform)


Numbers = float | NDArray[np.float64]


def _quantile(level: Numbers, size: Numbers, success: Numbers) -> NDArray[np.float64]:
    """The negative binomial's inverse distribution function."""
    from scipy import stats  # takes a second to import

    return np.asarray(stats.nbinom.ppf(level, size, success))


class NegativeBinomial(LogLinearCount, Dispersed):
    r"""An over-dispersed count with mean :math:`\mu = \exp(\mathrm{log\_rate} + W^\top \mathrm{pa})`.

    .. math:: \mathrm{Var}(x) = \mu + \mu^2 / \mathrm{dispersion}[\mathrm{pa}]

    A large ``dispersion`` approaches the Poisson distribution.

    Args:
        dim: Number of coordinates.
        log_rate: Intercepts of the log-mean.
        rate: The same as a mean, to fix or start it; give one of the two.
        weight: Slopes of the numeric parents.
        dispersion: Dispersion, above zero.
        network: Sizes of hidden layers of a network of the parents.

    >>> NegativeBinomial().space
    Count(dim=1)
    """

    table: ClassVar[str] = "dispersion"
    starts_between: ClassVar[tuple[float, float]] = (1e-2, 1e3)

    def __init__(
        self,
        dim: int = 1,
        *,
        log_rate: ArrayLike | Setting = None,
        rate: ArrayLike | Setting = None,
        weight: ArrayLike | Setting = None,
        dispersion: ArrayLike | Setting = None,
        network: Sequence[int] = (),
    ) -> None:
        super().__init__(dim, log_rate=log_rate, rate=rate, weight=weight, network=network)
        self.dispersion = as_setting(dispersion)

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """The Poisson start, and a dispersion from the excess of the squared residuals over the mean."""
        regression = super().start(value, parents, weight)
        fitted = torch.exp(self.predictor.predict_rows(regression, parents).clamp(max=self.largest_log_rate))
        fitted = fitted.expand_as(value)
        rows = self.predictor.rows
        excess = self.pooled((value - fitted) ** 2 - fitted, rows, parents, weight)
        square = self.pooled(fitted**2, rows, parents, weight)
        return {**regression, "dispersion": (square / excess.clamp(min=1e-9)).clamp(*self.starts_between)}

    def size_and_log_rate(self, params: Params, parents: Parents, like: Tensor) -> tuple[Tensor, Tensor]:
        """The dispersion and the log-mean at these parents."""
        log_rate = self.log_rate_at(params, parents, like)
        return self.row_of(params["dispersion"], parents, log_rate.ndim), log_rate

    def variance(self, params: Params, parents: Parents, log_rate: Tensor) -> Tensor:
        """``mu + mu^2 / dispersion``."""
        mean = torch.exp(log_rate)
        return mean + mean**2 / self.row_of(params["dispersion"], parents, log_rate.ndim)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The inverse distribution function at ``u``."""
        size, log_rate = self.size_and_log_rate(params, parents, noise)
        success = size / (size + torch.exp(log_rate))
        level, size, success = torch.broadcast_tensors(inside_unit(noise), size, success)
        counts = _quantile(*(tensor.detach().cpu().numpy() for tensor in (level, size, success)))
        return torch.as_tensor(np.maximum(counts, 0.0)).to(noise)

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Negative binomial log-probability."""
        size, log_rate = self.size_and_log_rate(params, parents, value)
        log_total = torch.logaddexp(torch.log(size), log_rate)
        coefficient = torch.lgamma(value + size) - torch.lgamma(size) - torch.lgamma(value + 1)
        return sum_cells(coefficient + size * (torch.log(size) - log_total) + value * (log_rate - log_total), mask)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """A point between the distribution function just below the count and at it."""
        size, log_rate = self.size_and_log_rate(params, parents, value)
        success = size / (size + torch.exp(log_rate))
        # P(X <= k) = I_p(size, k + 1), the regularised incomplete beta function
        return between(lambda count: beta_cdf(success, size, count + 1), value, uniform)


def between(cdf: Callable[[Tensor], Tensor], value: Tensor, uniform: Tensor) -> Tensor:
    """Randomised probability integral transform: the point of (F(k - 1), F(k)] that ``uniform`` picks."""
    below = torch.where(value > 0, cdf((value - 1).clamp(min=0)), 0.0)
    return below + uniform * (cdf(value) - below)


def _log_setting(setting: Setting) -> Setting:
    """The logarithm of a given rate."""
    if not isinstance(setting, Fixed | Start):
        return setting
    value = np.asarray(setting.value, dtype=float)
    if not (value > 0).all():
        raise ModelError(f"`rate` must be above zero; got {setting.value}")
    return type(setting)(np.log(value))
