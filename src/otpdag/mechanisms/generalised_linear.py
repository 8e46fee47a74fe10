r"""Generalised linear nodes, Poisson, negative binomial, gamma and beta, and the regressions that start nodes.

A node is a link from the prediction to its mean, a density and its inverse distribution function. Regressions with a
link, and of categories, are weighted least squares again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from otpdag.errors import ModelError, check_choice
from otpdag.mechanisms.base import Noise, Params, Parents, sum_cells
from otpdag.mechanisms.parameters import UNIT, Axis, Fixed, Parameter, Setting, SettingLike, Start, as_setting
from otpdag.mechanisms.predictor import Cellwise, Censorable, Equations, Truncatable, least_squares
from otpdag.mechanisms.quantiles import BETA, GAMMA, inside_unit, poisson_quantile
from otpdag.numerics import apply_linear
from otpdag.spaces import Count, Positive, Unit, Vector

# -- regressions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """How a mean follows from a linear prediction, and how the variance follows from the mean.

    Attributes:
        line: Its inverse: the prediction at a mean.
        slope: Derivative of the mean in the prediction, as a function of the mean.
        precision: Weight of a row in the working regression, squared slope over variance, as a function of the mean.
        inside: Means that have a prediction.
        has_spread: Whether the variance at a mean is known but for a factor.
        largest: Of a prediction, either way: the exponential of it is 1e13.
        settled: A change of coefficients, in logarithms or logits, after which Newton's steps have nothing to add.
    """

    mean: Callable[[Tensor], Tensor]
    line: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    precision: Callable[[Tensor], Tensor]
    inside: tuple[float, float]
    steps: int = 12
    has_spread: bool = True
    largest: float = 30.0
    settled: ClassVar[float] = 1e-8

    def fit(
        self, config: Tensor, values: Tensor, target: Tensor, weight: Tensor, offset: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fit a generalised linear model by iterated :func:`~otpdag.mechanisms.predictor.least_squares`."""
        centre = (weight * target).sum(0) / weight.sum(0).clamp(min=1e-12)
        eta = self.line((0.5 * (target + centre)).clamp(*self.inside))
        found = least_squares(config, values, eta, weight * self.precision(self.mean(eta)), offset)
        for _ in range(self.steps - 1):
            eta = offset + apply_linear(config[None], found[0][None])[0] + values @ found[1]
            eta = eta.clamp(-self.largest, self.largest)
            mean = self.mean(eta)
            working = eta + (target - mean) / self.slope(mean).clamp(min=1e-12)
            before, found = found, least_squares(config, values, working, weight * self.precision(mean), offset)
            if torch.allclose(torch.cat(found), torch.cat(before), rtol=0.0, atol=self.settled):
                break
        return found


def softmax(
    config: Tensor,
    values: Tensor,
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
    size = counts.sum(-1, keepdim=True)
    shares, equations = counts / size.clamp(min=1e-12), Equations(config, values, weight * size)
    table, slopes = (counts.new_zeros(block.shape[1], counts.shape[1]) for block in (config, values))
    for _ in range(steps):
        probs = torch.softmax(offset + apply_linear(config[None], table[None])[0] + values @ slopes, -1)
        step = equations.solved(2 * (shares - probs))
        table, slopes = table + step[0], slopes + step[1]
        if torch.cat(step).abs().amax() <= settled:
            break
    return table - table.mean(-1, keepdim=True), slopes - slopes.mean(-1, keepdim=True)


def _itself(mean: Tensor) -> Tensor:
    return mean


def _alike(mean: Tensor) -> Tensor:
    return torch.ones_like(mean[:, :1])


def _of_shares(mean: Tensor) -> Tensor:
    return mean * (1 - mean)


IDENTITY = Link(_itself, _itself, torch.ones_like, _alike, (-torch.inf, torch.inf), largest=torch.inf)
LOG_COUNT = Link(torch.exp, torch.log, _itself, _itself, (1e-12, torch.inf))
LOG_POSITIVE = Link(torch.exp, torch.log, _itself, _alike, (1e-12, torch.inf))  # the variance goes with the square
LOGIT = Link(torch.sigmoid, torch.logit, _of_shares, _of_shares, (1e-9, 1 - 1e-9), has_spread=False)

# -- nodes -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False, kw_only=True)
class GeneralisedLinear(Cellwise):
    """A node whose mean follows from the prediction by a link; noise is uniform, sent through the quantiles.

    Where there is a table beside the prediction, :attr:`start_beside` says where it starts.

    Attributes:
        starts_between: Where the table beside may start: beyond, it says nothing that rows could tell.
        start_beside: ``(value, mean, pooled)``: the table beside, from values and fitted means (N, dim) by means in
            each row of it.
    """

    link: ClassVar[Link]
    starts_between: ClassVar[tuple[float, float]] = (1e-2, 1e4)
    start_beside: ClassVar[Callable[..., Tensor]]

    def on_line(self, value: Tensor) -> Tensor | None:
        """Values on the scale of predictions, to take the units of; None where predictions are of order one already."""
        return None

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """Adopt the units of the numeric parents, and those of predictions."""
        predictor = self.predictor.with_units(self.on_line(value), parents, weight)
        self.predictor = predictor.smoothed(value, parents, weight, self.link)
        self._scale_spreads(parents, weight)

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """A regression, then what the residuals say of the table beside."""
        params = self.predictor.start(value, parents, weight, self.link.fit)
        if not self.beside:
            return params

        rows = 1 if self.spreads else self.predictor.rows

        def pooled(values: Tensor) -> Tensor:
            return self.pooled(values, rows, parents, weight)

        mean = self.link.mean(self.predictor.predict_rows(params, parents).clamp(*self.within))
        table = self.start_beside(value, mean.expand_as(value), pooled)
        table = table.clamp(*self.starts_between)
        if self.spreads:
            return params | self.started_spread(self.beside[0], torch.log(table).expand_as(value), parents, weight)
        return {**params, self.beside[0]: table}

    def mean_at(self, line: Tensor, *beside: Tensor) -> Tensor:
        """By the link."""
        return self.link.mean(line)


@dataclass(eq=False, repr=False, kw_only=True)
class LogLinearCount(GeneralisedLinear):
    """Counts whose log-mean is predicted from the parents.

    Attributes:
        start_steps: Of expectation-maximisation, enough for a start.
        variance: ``(*at)``: that of each cell.
        cdf: ``(count, *at)``: the distribution function of each cell.
    """

    log_rate: SettingLike = None
    rate: SettingLike = None
    extra_zeros: Literal["inflated", "hurdle"] | None = None
    zeros: SettingLike = None

    predicts: ClassVar[str] = "log_rate"
    space_kind: ClassVar[type[Vector]] = Count
    link: ClassVar[Link] = LOG_COUNT
    within: ClassVar[tuple[float | None, float | None]] = (None, 25.0)  # beyond, counts are no longer exact
    start_steps: ClassVar[int] = 15
    variance: ClassVar[Callable[..., Tensor]]
    cdf: ClassVar[Callable[..., Tensor]]

    def __post_init__(self) -> None:
        """Take the logarithm of a given rate."""
        super().__post_init__()
        if self.log_rate is not None and self.rate is not None:
            raise ModelError("give `log_rate` or `rate`, not both")
        if self.rate is not None:
            self.log_rate = _log_setting(as_setting(self.rate))
        check_choice("extra_zeros", self.extra_zeros, (None, "inflated", "hurdle"))
        if self.zeros is not None and self.extra_zeros is None:
            raise ModelError("zeros is the share of extra zeros: say extra_zeros='inflated' or 'hurdle', too")

    @property
    def has_only_tables(self) -> bool:
        """Not where zeros have a share of their own, which no features tell."""
        return super().has_only_tables and self.extra_zeros is None

    def parameters(self) -> dict[str, Parameter]:
        """The share of zeros, too."""
        zeros = Parameter((self.predictor.rows, self.dim), UNIT, self.zeros)
        return super().parameters() | ({"zeros": zeros} if self.extra_zeros else {})

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """The share of zeros by configuration."""
        zeros = self.predictor.row_axis, self.own_axis
        return super().axes() | ({"zeros": zeros} if self.extra_zeros else {})

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """By expectation-maximisation, where zeros have a share: of their kind, or of those that a hurdle hides."""
        params = super().start(value, parents, weight)
        if self.extra_zeros is None:
            return params
        rows, lifted = self.predictor.rows, {name: parent.unsqueeze(0) for name, parent in parents.items()}
        none = (value == 0).to(value)
        share = 0.5 * self.pooled(none, rows, parents, weight)
        for _ in range(self.start_steps):
            at = self.at({name: one.unsqueeze(0) for name, one in params.items()}, lifted)
            chance = torch.exp(self.log_density(torch.zeros_like(value), *at)[0]).expand_as(value)
            own, trust, counted = none, 1 - none, value
            if self.extra_zeros == "inflated":
                alone = self.row_of(share.unsqueeze(0), lifted, 3)[0]
                own = none * alone / (alone + (1 - alone) * chance)
                trust = 1 - own
            else:
                trust, counted = trust / (1 - chance).clamp(min=1e-3), value * (1 - chance)
            params = super().start(counted, parents, weight * trust.mean(-1))
            share = self.pooled(own, rows, parents, weight).clamp(1e-3, 1 - 1e-3)
        return params | {"zeros": share}

    def _kept(
        self, params: Params, parents: Parents, like: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """The count at these parents, the share of zeros of their own, and the chance that the count lets through."""
        at = self.at(params, parents, like)
        share, kept = self.row_of(params["zeros"], parents, at[0].ndim), torch.ones_like(at[0])
        if self.extra_zeros == "hurdle":
            kept = -torch.expm1(self.log_density(torch.zeros_like(at[0]), *at).clamp(max=-1e-12))
        return at, share, kept

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """That of the count, or of a zero of its own."""
        if self.extra_zeros is None:
            return super().log_prob(params, value, parents, mask)
        at, share, kept = self._kept(params, parents, value)
        own = torch.log1p(-share) - torch.log(kept) + self.log_density(value, *at)
        alone = torch.log(share.clamp(min=1e-300))
        none = torch.logaddexp(alone, own) if self.extra_zeros == "inflated" else alone
        return sum_cells(torch.where(value == 0, none, own), mask)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Zeros of their own at the lowest noise, then the count's quantiles."""
        if self.extra_zeros is None:
            return super().forward(params, parents, noise)
        at, share, kept = self._kept(params, parents, noise)
        level = (noise - share) / (1 - share)
        return torch.where(level > 0, self.quantile(1 - kept * (1 - level.clamp(0, 1)), *at), 0.0)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """A point between the distribution function just below the count and at it."""
        if self.extra_zeros is None:
            return super().abduct(params, value, parents, uniform)
        at, share, kept = self._kept(params, parents, value)
        return between(lambda count: share + (1 - share) * (1 - (1 - self.cdf(count, *at)) / kept), value, uniform)

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The mean count times the chance of one."""
        if self.extra_zeros is None:
            return super().mean(params, parents)
        at, share, kept = self._kept(params, parents)
        return (1 - share) / kept * torch.exp(at[0])

    def on_line(self, value: Tensor) -> Tensor:
        """Logarithms."""
        return torch.log(value + 0.5)

    @property
    def relaxed_noise(self) -> Noise:
        """Standard normal noise of the paper's Gaussian reparameterisation."""
        return Noise(self.dim, "normal")

    def relaxed(self, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
        """The paper's Gaussian draw (Appendix C.2): ``rate + u * sqrt(variance)``."""
        at = self.at(params, parents, noise)
        mean, variance = torch.exp(at[0]), self.variance(*at)
        if self.extra_zeros is not None:
            _, share, kept = self._kept(params, parents, noise)
            counts = (1 - share) / kept
            variance, mean = counts * (variance + mean**2) - (counts * mean) ** 2, counts * mean
        return mean + noise * torch.sqrt(variance)

    def noise_of(self, value: Tensor, uniform: Tensor, *at: Tensor) -> Tensor:
        """A point between the distribution function just below the count and at it."""
        return between(lambda count: self.cdf(count, *at), value, uniform)


@dataclass(eq=False, repr=False, kw_only=True)
class Poisson(Truncatable, LogLinearCount):
    r"""A Poisson count, log-linear in its numeric parents, with an intercept for each discrete configuration.

    .. math:: x \sim \mathrm{Poisson}(\exp(\mathrm{log\_rate}[\mathrm{pa}] + W^\top \mathrm{pa}))

    Args:
        dim: Number of coordinates.
        log_rate: Intercepts of the log-rate.
        rate: The same as a rate, to fix or start it; give one of the two.
        weight: Slopes of the numeric parents.
        terms: A formula of the parents for the prediction, such as ``"x * C(z) + offset(log(t))"``.
        network: Sizes of hidden layers of a network of the parents.
        network_prior: Precision of a normal prior on its layers, in units of the columns' spreads; zero for none.
        extra_zeros: ``"inflated"`` where a share ``zeros`` of the counts is zero whatever the rate; ``"hurdle"`` where
            that is the share of all zeros, and other counts are at least one.
        zeros: That share.
        truncated: Counts between which alone rows were recorded, such as ``(1, None)``.

    >>> Poisson().space
    Count(dim=1)
    """

    def __post_init__(self) -> None:
        """Refuse zeros of their own among counts that are kept."""
        super().__post_init__()
        if self.truncated is not None and self.extra_zeros is not None:
            raise ModelError("a count has extra zeros or is truncated, not both")

    def log_tails(self, value: Tensor, log_rate: Tensor) -> tuple[Tensor, Tensor]:
        """By the distribution function."""
        below = self.cdf(value.floor(), log_rate)
        return torch.log(below), torch.log1p(-below)

    def mean(self, params: Params, parents: Parents) -> Tensor:
        r"""Between limits :math:`\mu P(a - 1 \le X \le b - 1) / P(a \le X \le b)`."""
        if self.truncated is None:
            return super().mean(params, parents)
        (line,) = self.at(params, parents)
        less, whole = (self.log_mass(*self.limits(line, by), line) for by in (1.0, 0.0))
        return torch.exp(line + less - whole)

    @property
    def has_closed_form(self) -> bool:
        """A table of rates that is all to be learned."""
        return self.has_only_tables and self.declared()["log_rate"].setting is None

    def features(self, value: Tensor, mask: Tensor) -> Tensor | None:
        """One and the count of every cell that is seen, and the logarithm of the factorials."""
        if not self.has_only_tables:
            return None
        seen = mask.expand_as(value).to(value)
        return torch.cat([seen, seen * value, (seen * torch.lgamma(value + 1)).sum(-1, keepdim=True)], -1)

    def coefficients(self, params: Params) -> Tensor:
        """Those of the Poisson log-probability."""
        log_rate = params["log_rate"].clamp(*self.within)
        return torch.cat([-torch.exp(log_rate), log_rate, -torch.ones_like(log_rate[..., :1])], -1)

    def fitted(self, params: Params, sums: Tensor, fewest: float = 1e-6) -> dict[str, Tensor]:
        """The mean counts; a sum of none counts as ``fewest``, so that its logarithm is finite."""
        if not self.declared()["log_rate"].learned:
            return dict(params)
        count, total = sums[..., : self.dim], sums[..., self.dim : 2 * self.dim]
        log_rate = torch.log(total.clamp(min=fewest) / count.clamp(min=1e-300))
        return {"log_rate": torch.where(count > 0, log_rate, params["log_rate"])}

    def variance(self, log_rate: Tensor) -> Tensor:
        """The rate."""
        return torch.exp(log_rate)

    def quantile(self, noise: Tensor, log_rate: Tensor) -> Tensor:
        """The inverse distribution function at ``u``."""
        return poisson_quantile(noise, torch.exp(log_rate))

    def log_density(self, value: Tensor, log_rate: Tensor) -> Tensor:
        """Poisson log-probability."""
        return value * log_rate - torch.exp(log_rate) - torch.lgamma(value + 1)

    def cdf(self, count: Tensor, log_rate: Tensor) -> Tensor:
        """``P(X <= k) = Q(k + 1, rate)``, the regularised upper incomplete gamma function."""
        return torch.special.gammaincc(count + 1, torch.exp(log_rate))


@dataclass(eq=False, repr=False, kw_only=True)
class NegativeBinomial(LogLinearCount):
    r"""An over-dispersed count with mean :math:`\mu = \exp(\mathrm{log\_rate} + W^\top \mathrm{pa})`.

    .. math:: \mathrm{Var}(x) = \mu + \mu^2 / \mathrm{dispersion}[\mathrm{pa}]

    A large ``dispersion`` approaches the Poisson distribution.

    Args:
        dim: Number of coordinates.
        log_rate: Intercepts of the log-mean.
        rate: The same as a mean, to fix or start it; give one of the two.
        weight: Slopes of the numeric parents.
        dispersion: Dispersion, above zero.
        terms: A formula of the parents for the prediction, such as ``"x * C(z) + offset(log(t))"``.
        network: Sizes of hidden layers of a network of the parents.
        network_prior: Precision of a normal prior on its layers, in units of the columns' spreads; zero for none.
        extra_zeros: ``"inflated"`` where a share ``zeros`` of the counts is zero whatever the rate; ``"hurdle"`` where
            that is the share of all zeros, and other counts are at least one.
        zeros: That share.

    >>> NegativeBinomial().space
    Count(dim=1)
    """

    dispersion: SettingLike = None

    beside: ClassVar[tuple[str, ...]] = ("dispersion",)
    starts_between: ClassVar[tuple[float, float]] = (1e-2, 1e3)

    def start_beside(self, value: Tensor, mean: Tensor, pooled: Callable[[Tensor], Tensor]) -> Tensor:
        """From the excess of the squared residuals over the mean."""
        return pooled(mean**2) / pooled((value - mean) ** 2 - mean).clamp(min=1e-9)

    def variance(self, log_rate: Tensor, size: Tensor) -> Tensor:
        """``mu + mu^2 / dispersion``."""
        mean = torch.exp(log_rate)
        return mean + mean**2 / size

    def quantile(self, noise: Tensor, log_rate: Tensor, size: Tensor) -> Tensor:
        """The inverse distribution function at ``u``."""
        from scipy import stats  # takes a second to import

        given = torch.broadcast_tensors(inside_unit(noise), size, size / (size + torch.exp(log_rate)))
        counts = stats.nbinom.ppf(*(tensor.detach().cpu().numpy() for tensor in given))
        return torch.as_tensor(np.maximum(counts, 0.0)).to(noise)

    def log_density(self, value: Tensor, log_rate: Tensor, size: Tensor) -> Tensor:
        """Negative binomial log-probability."""
        log_total = torch.logaddexp(torch.log(size), log_rate)
        coefficient = torch.lgamma(value + size) - torch.lgamma(size) - torch.lgamma(value + 1)
        return coefficient + size * (torch.log(size) - log_total) + value * (log_rate - log_total)

    def cdf(self, count: Tensor, log_rate: Tensor, size: Tensor) -> Tensor:
        """``P(X <= k) = I_p(size, k + 1)``, the regularised incomplete beta function."""
        return BETA.cdf(size / (size + torch.exp(log_rate)), size, count + 1)


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


@dataclass(eq=False, repr=False, kw_only=True)
class LogLinearPositive(GeneralisedLinear):
    """A positive node, the logarithm of whose mean or scale is predicted from the parents."""

    space_kind: ClassVar[type[Vector]] = Positive
    link: ClassVar[Link] = LOG_POSITIVE
    within: ClassVar[tuple[float | None, float | None]] = (-60.0, 60.0)  # beyond, products of means would overflow
    has_free_level: ClassVar[bool] = True

    def on_line(self, value: Tensor) -> Tensor:
        """Logarithms."""
        return torch.log(value.clamp(min=torch.finfo(value.dtype).tiny))


@dataclass(eq=False, repr=False, kw_only=True)
class Gamma(LogLinearPositive):
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
        terms: A formula of the parents for the prediction, such as ``"x * C(z) + offset(log(t))"``.
        network: Sizes of hidden layers of a network of the parents that replaces the linear prediction.
        network_prior: Precision of a normal prior on its layers, in units of the columns' spreads; zero for none.

    >>> Gamma(shape=2.0).space
    Positive(dim=1)
    """

    log_mean: SettingLike = None
    shape: SettingLike = None

    predicts: ClassVar[str] = "log_mean"
    beside: ClassVar[tuple[str, ...]] = ("shape",)

    def start_beside(self, value: Tensor, mean: Tensor, pooled: Callable[[Tensor], Tensor]) -> Tensor:
        """The shape from mean and mean logarithm of the ratios to the fit.

        By Minka (2002): log k - digamma(k) = log mean - mean log, solved to 1.5 % in closed form.
        """
        relative = (value / mean).clamp(min=1e-12)
        gap = (torch.log(pooled(relative)) - pooled(torch.log(relative))).clamp(min=1e-6)
        return (3 - gap + torch.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)

    def quantile(self, noise: Tensor, log_mean: Tensor, shape: Tensor) -> Tensor:
        """The quantile at ``u``."""
        value = torch.exp(log_mean) / shape * GAMMA.quantile(noise, shape)
        return value.clamp(min=torch.finfo(value.dtype).tiny)

    def log_density(self, value: Tensor, log_mean: Tensor, shape: Tensor) -> Tensor:
        """Gamma log-density."""
        log_rate = torch.log(shape) - log_mean
        powers = shape * log_rate + (shape - 1) * self.on_line(value)
        return powers - torch.exp(log_rate) * value - torch.lgamma(shape)

    def noise_of(self, value: Tensor, uniform: Tensor, log_mean: Tensor, shape: Tensor) -> Tensor:
        """The distribution function."""
        return GAMMA.cdf(value * shape * torch.exp(-log_mean), shape)


ONE = torch.ones(())  # the shape of an exponential variable


@dataclass(eq=False, repr=False, kw_only=True)
class WaitingTime(Censorable, LogLinearPositive):
    """A time whose cumulative hazard H(x) is a power of time: it is survived with probability exp(-H)."""

    def log_hazard(self, value: Tensor, log_scale: Tensor, shape: Tensor = ONE) -> Tensor:
        """The logarithm of the cumulative hazard."""
        return shape * (self.on_line(value) - log_scale)

    def quantile(self, noise: Tensor, log_scale: Tensor, shape: Tensor = ONE) -> Tensor:
        """The quantile at ``u``."""
        return torch.exp(log_scale + torch.log(-torch.log1p(-inside_unit(noise))) / shape)

    def log_density(self, value: Tensor, log_scale: Tensor, shape: Tensor = ONE) -> Tensor:
        """Weibull log-density."""
        hazard = self.log_hazard(value, log_scale, shape)
        return torch.log(shape) + hazard - self.on_line(value) - torch.exp(hazard)

    def mean_at(self, line: Tensor, *beside: Tensor) -> Tensor:
        """``lambda * Gamma(1 + 1 / k)``."""
        return torch.exp(line + torch.lgamma(1 + 1 / (*beside, ONE)[0]))

    def noise_of(self, value: Tensor, uniform: Tensor, *at: Tensor) -> Tensor:
        """The distribution function."""
        return -torch.expm1(-torch.exp(self.log_hazard(value, *at)))

    def log_tails(self, value: Tensor, *at: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 - exp(-H)) and -H."""
        hazard = torch.exp(self.log_hazard(value, *at).clamp(-700.0, 700.0))
        return torch.log(-torch.expm1(-hazard)), -hazard


@dataclass(eq=False, repr=False, kw_only=True)
class Exponential(WaitingTime):
    r"""A waiting time with a constant hazard, log-linear in its numeric parents.

    .. math:: x = -\mu \log(1 - u), \quad \log \mu = \mathrm{log\_mean}[\mathrm{pa}] + W^\top \mathrm{pa},
              \quad u \sim U(0, 1)

    Args:
        dim: Number of coordinates.
        log_mean: Intercept of the log-mean.
        weight: Slopes of the numeric parents.
        terms: A formula of the parents for the prediction, such as ``"x * C(z) + offset(log(t))"``.
        network: Sizes of hidden layers of a network of the parents that replaces the linear prediction.
        censored: Whether values are intervals, in two columns ``x.0`` and ``x.1``; an end that is missing is none.
        truncated: Limits between which alone values were recorded, such as ``(0, None)``.

    >>> Exponential(censored=True).space
    Interval(dim=2)
    """

    log_mean: SettingLike = None

    predicts: ClassVar[str] = "log_mean"


@dataclass(eq=False, repr=False, kw_only=True)
class Weibull(WaitingTime):
    r"""A waiting time whose hazard rises or falls with a power of time, log-linear in its numeric parents.

    .. math:: x = \lambda (-\log(1 - u))^{1 / k}, \quad
              \log \lambda = \mathrm{log\_scale}[\mathrm{pa}] + W^\top \mathrm{pa},
              \quad k = \mathrm{shape}[\mathrm{pa}], \quad u \sim U(0, 1)

    An accelerated failure time model: slopes stretch time. With a shape of one it is :class:`Exponential`.

    Args:
        dim: Number of coordinates.
        log_scale: Intercept of the logarithm of the scale, the time that 63 % do not survive.
        weight: Slopes of the numeric parents.
        shape: Above one where the hazard rises.
        terms: A formula of the parents for the prediction, such as ``"x * C(z)"``.
        network: Sizes of hidden layers of a network of the parents that replaces the linear prediction.
        censored: Whether values are intervals, in two columns ``x.0`` and ``x.1``; an end that is missing is none.
        truncated: Limits between which alone values were recorded, such as ``(0, None)``.

    >>> Weibull().space
    Positive(dim=1)
    """

    log_scale: SettingLike = None
    shape: SettingLike = None

    predicts: ClassVar[str] = "log_scale"
    beside: ClassVar[tuple[str, ...]] = ("shape",)

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """A regression of the logarithm of the mean, from which the scale follows by the shape."""
        params = super().start(value, parents, weight)
        if "shape" in params:
            params["log_scale"] = params["log_scale"] - torch.lgamma(1 + 1 / params["shape"])
        return params

    def start_beside(self, value: Tensor, mean: Tensor, pooled: Callable[[Tensor], Tensor]) -> Tensor:
        """The shape from the variance of logarithms, which is pi^2 / (6 k^2)."""
        relative = torch.log((value / mean).clamp(min=1e-12))
        return np.pi / np.sqrt(6) / (pooled(relative**2) - pooled(relative) ** 2).clamp(min=1e-6).sqrt()


@dataclass(eq=False, repr=False, kw_only=True)
class Beta(GeneralisedLinear):
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
        terms: A formula of the parents for the prediction, such as ``"x * C(z) + offset(log(t))"``.
        network: Sizes of hidden layers of a network of the parents that replaces the linear prediction.
        network_prior: Precision of a normal prior on its layers, in units of the columns' spreads; zero for none.

    >>> Beta(logit_mean=0.0).space
    Unit(dim=1)
    """

    logit_mean: SettingLike = None
    concentration: SettingLike = None

    predicts: ClassVar[str] = "logit_mean"
    space_kind: ClassVar[type[Vector]] = Unit
    beside: ClassVar[tuple[str, ...]] = ("concentration",)
    link: ClassVar[Link] = LOGIT
    within: ClassVar[tuple[float | None, float | None]] = (-15.0, 15.0)  # beyond, one of the two shapes would be lost
    starts_between: ClassVar[tuple[float, float]] = (0.1, 1e4)

    def start_beside(self, value: Tensor, mean: Tensor, pooled: Callable[[Tensor], Tensor]) -> Tensor:
        """The concentration from the residuals' variance."""
        mean = mean.clamp(1e-6, 1 - 1e-6)
        return 1 / pooled((value - mean) ** 2 / (mean * (1 - mean))).clamp(min=1e-9) - 1

    def quantile(self, noise: Tensor, line: Tensor, concentration: Tensor) -> Tensor:
        """The quantile at ``u``."""
        return inside_unit(BETA.quantile(noise, *_shapes(line, concentration)))

    def log_density(self, value: Tensor, line: Tensor, concentration: Tensor) -> Tensor:
        """Beta log-density."""
        (a, b), value = _shapes(line, concentration), inside_unit(value)  # at the ends it may be infinite
        log_norm = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
        return (a - 1) * torch.log(value) + (b - 1) * torch.log1p(-value) - log_norm

    def noise_of(self, value: Tensor, uniform: Tensor, line: Tensor, concentration: Tensor) -> Tensor:
        """The distribution function."""
        return BETA.cdf(inside_unit(value), *_shapes(line, concentration))


def _shapes(line: Tensor, concentration: Tensor) -> tuple[Tensor, Tensor]:
    """Both shape parameters of the beta distribution."""
    return concentration * torch.sigmoid(line), concentration * torch.sigmoid(-line)
