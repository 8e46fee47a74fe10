r"""Normal, log-normal and Student-t nodes: a location, a scale, and how small a scale may become.

A density has no upper bound. Where a class holds rows that are equal, as rounded values are, or one row alone, its
scale falls to zero and the likelihood grows without end, though nothing is learned. Two floors keep it from that:

- **Rounding.** Values that are :math:`\delta` apart stand for intervals of that length. What is known of a value inside
  its interval has a standard deviation of :math:`\delta / \sqrt{12}`, and no scale of noise below it can be told from
  another. A column that was rounded honestly has residuals at least that large, so that the floor binds only where
  values stand in one place. It is at most a quarter of the column's spread: few values tell more than that.
- **Few rows.** Below a share of the spread, 1e-3 where a parent is hidden (rows choose their class, and a class may
  choose one row) and 1e-6 elsewhere, a scale is taken for zero.

The spread is the smaller of the standard deviation and what quartiles say, so that outliers raise no floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.errors import ModelError, check_number
from otpdag.mechanisms.base import Params, Parents
from otpdag.mechanisms.generalised_linear import IDENTITY
from otpdag.mechanisms.parameters import ABOVE_ONE, POSITIVE, Floored, Parameter, Ridge, SettingLike, Support, Tied
from otpdag.mechanisms.predictor import Cellwise, Censorable, Predicted, centre_and_spread
from otpdag.mechanisms.quantiles import STUDENT, student_log_density
from otpdag.spaces import Positive, Vector

if TYPE_CHECKING:
    from otpdag.mechanisms.terms import Terms

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def normal_log_density(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """Cell by cell."""
    return -0.5 * ((value - loc) / scale) ** 2 - torch.log(scale) - LOG_SQRT_2PI


@dataclass(eq=False, repr=False, kw_only=True)
class Located(Predicted):
    """Shared parts of nodes with a predicted location, normal noise around it, and a floor under its spread."""

    loc: SettingLike = None
    floor: float | None = None

    predicts: ClassVar[str] = "loc"
    noise_kind: ClassVar[Literal["normal", "uniform"]] = "normal"
    has_free_level: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the floor."""
        super().__post_init__()
        check_number("floor", self.floor or 0.0, 0.0)


@dataclass(eq=False, repr=False, kw_only=True)
class LocationScale(Located):
    """Shared parts of nodes with a predicted location and a scale for each discrete configuration.

    Attributes:
        smallest_at_start: Of a scale, as a share of the column's spread.
        smallest: The smallest scale of each coordinate, once the data are known.
        is_symmetric: Whether the noise is as likely as its negative: then the node is turned round with its location.
        scales_when_hidden: Whether a hidden node learns its scale; else it is one unless it is given: children's slopes
            tell the rest.
        keeps_rounding: Whether values that are evenly spaced are so where location and scale act.
    """

    scale: SettingLike = None
    shared_scale: bool = False

    beside: ClassVar[tuple[str, ...]] = ("scale",)
    isotropic = False
    smallest_at_start: ClassVar[float] = 1e-3
    smallest: Tensor | None = field(default=None, init=False)
    from_data: ClassVar[tuple[str, ...]] = ("smallest",)
    is_symmetric: ClassVar[bool] = False
    scales_when_hidden: ClassVar[bool] = False

    @property
    def scale_setting(self) -> SettingLike:
        """What is given of the scale, or known since the node is hidden."""
        return 1.0 if self.scale is None and self.family.hidden and not self.scales_when_hidden else self.scale

    @property
    def scale_rows(self) -> int:
        """One scale for each configuration of the discrete parents, or one for all."""
        return 1 if self.shared_scale or self.network else self.predictor.rows

    def parameters(self) -> dict[str, Parameter]:
        """Location table, slopes, scale table."""
        if self.spreads:
            return super().parameters()
        unit = None if self.unit is None else self._over_coordinates(self.unit)
        columns = 1 if self.isotropic else self.dim
        scale = Parameter((self.scale_rows, columns), self._scale_support(unit), self.scale_setting, unit=unit)
        return {**self.predictor.parameters(), "scale": scale}

    def _scale_support(self, unit: Tensor | None) -> Support:
        """Positive numbers, above the floor once it is known; nodes that share a scale share none of their floors."""
        if isinstance(self.scale_setting, Tied):
            return POSITIVE
        if self.floor is not None or self.smallest is None or unit is None:
            return Floored(self.floor) if self.floor else POSITIVE
        smallest = self.smallest.min().reshape(1) if self.isotropic else self.smallest
        return Floored(smallest / unit)

    @property
    def smallest_scale(self) -> Tensor | None:
        """The floor of the scales, by coordinate, in natural units; None if there is none."""
        if self.spreads:
            return None if self.floor == 0 else self.smallest
        support = self.declared()["scale"].support
        if not isinstance(support, Floored):
            return None
        return support.floor if self.unit is None else support.floor * self._over_coordinates(self.unit)

    def beside_at(self, name: str, params: Params, parents: Parents, line: Tensor) -> Tensor:
        """A scale that is predicted has its floor here."""
        found = super().beside_at(name, params, parents, line)
        if name not in self.spreads or self.smallest_scale is None:
            return found
        return torch.sqrt(found.square() + self.smallest_scale.to(found).square())

    def turned_self(self, params: Params, sign: Tensor) -> dict[str, Tensor] | None:
        """Turn the location, where values may be negative and the noise is symmetric."""
        if not self.is_symmetric or not self.space.is_unbounded:
            return None
        return self.predictor.with_output_turned(params, sign)

    keeps_rounding: ClassVar[bool] = True

    def on_line(self, value: Tensor) -> Tensor:
        """The value on the real line, where location and scale act."""
        return value

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """Adopt the units of the column."""
        line = self.on_line(value)
        self.predictor = self.predictor.with_units(line, parents, weight).smoothed(line, parents, weight, IDENTITY)
        self._scale_spreads(parents, weight, None if self.unit is None else torch.log(self.unit))
        if not self.family.hidden and self.floor is None:
            unseen = self.family.hidden_parents
            smallest = default_floor(line, weight, hidden_parents=unseen, rounding=self.keeps_rounding)
            self.smallest = smallest if bool((smallest > 0).all()) else None

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Weighted regression, then the residuals' spread in each configuration."""
        target = self.on_line(value)
        regression = self.predictor.start(target, parents, weight)
        residual = (target - self.predictor.predict_rows(regression, parents)) ** 2
        floor = self._start_floor(target, weight)
        if self.spreads:
            # the logarithm of a normal variable's size is -0.635 on average
            sizes = 0.5 * torch.log(residual.clamp(min=1e-6 * residual.mean(0)).clamp(min=1e-300)) + 0.635
            return {**regression, **self.started_spread("scale", sizes, parents, weight)}
        # two rows' worth of the overall variance keeps a nearly empty configuration sane
        variance = self.pooled(residual, self.scale_rows, parents, weight)
        return {**regression, "scale": self._over_coordinates(variance.sqrt().maximum(floor))}

    def _start_floor(self, target: Tensor, weight: Tensor) -> Tensor:
        """What no scale is below at the start (dim,)."""
        floor = self.smallest_at_start * centre_and_spread(target, weight)[1]
        return floor if self.smallest_scale is None else floor.maximum(1.5 * self.smallest_scale.to(floor))

    def _over_coordinates(self, scale: Tensor) -> Tensor:
        """Scales (..., dim) as they are, or the root mean square over the coordinates that share one: (..., 1)."""
        return scale.square().mean(-1, keepdim=True).sqrt() if self.isotropic else scale


@dataclass(eq=False, repr=False, kw_only=True)
class NormalOnLine(Censorable, LocationScale):
    """A node that is normal on the line where location and scale act."""

    def quantile(self, noise: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """``loc + scale * u``."""
        return loc + scale * noise

    def log_density(self, value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """Normal log-density on the line."""
        return normal_log_density(self.on_line(value), loc, scale)

    def noise_of(self, value: Tensor, uniform: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """``(x - loc) / scale``, with x on the line."""
        return (self.on_line(value) - loc) / scale

    def log_tails(self, value: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the normal distribution."""
        standard = (self.on_line(value) - loc) / scale
        return torch.special.log_ndtr(standard), torch.special.log_ndtr(-standard)


@dataclass(eq=False, repr=False, kw_only=True)
class Normal(NormalOnLine):
    r"""A normal node, linear in its numeric parents, with a mean and a scale for each discrete configuration.

    .. math:: x = \mathrm{loc}[\mathrm{pa}] + W^\top \mathrm{pa} + \mathrm{scale}[\mathrm{pa}] \, u,
              \quad u \sim N(0, I)

    Args:
        dim: Number of coordinates of the node (columns ``x.0``, ``x.1``, ... in a table).
        loc: Intercept; a number fixes it, ``otp.start(v)`` starts it, ``otp.tie(name)`` shares it.
        weight: Slopes of the numeric parents, in the order of the edges; NaN for one that is to be learned.
        scale: Standard deviation of the noise. Hidden nodes have it fixed at one unless it is given: the
            scale of something never seen can be moved into its children without changing what is seen.
        network: Sizes of hidden layers of a network of the parents that replaces the linear prediction.
        network_prior: Precision of a normal prior on its layers, in units of the columns' spreads; zero for none.
        terms: A formula of the parents for the location, such as ``"x * C(z)"``, with one scale for all rows.
        shared_scale: One scale for all configurations of the discrete parents.
        isotropic: One scale for all coordinates.
        floor: A scale that none falls below, as a share of the column's own spread; it keeps a configuration with few
            or equal rows from collapsing to a point, where the likelihood is infinite. Left out, it comes from the
            column: how far apart rounded values are, and a small share of the spread. Zero allows any scale.
        censored: Whether values are intervals, in two columns ``x.0`` and ``x.1``; an end that is missing is none.
        truncated: Limits between which alone values were recorded, such as ``(0, None)``.
        group: Of a hidden node, a column that tells groups of rows: all rows of a group share its value, which is a
            random intercept of the nodes that read it, or a random slope if they multiply it with another parent.

    >>> Normal(scale=1.0).space
    Real(dim=1)
    """

    isotropic: bool = False
    group: str | None = None

    is_symmetric: ClassVar[bool] = True

    @property
    def has_closed_form(self) -> bool:
        """A linear mean and scales of which nothing is given but a prior of slopes, or a hidden node's scale."""
        known = {"scale": self.family.hidden, "weight": isinstance(self.weight, Ridge)}
        declared = self.declared()
        free = all(p.setting is None for name, p in declared.items() if not known.get(name))
        free = free and not any(p.is_bounded for p in declared.values())
        return self.is_affine and not self.isotropic and not self.floor and free

    def features(self, value: Tensor, mask: Tensor) -> Tensor | None:
        """One, the value in its units, and its square: of every cell that is seen."""
        if not self.has_only_tables:
            return None
        shift, unit = self.centre_and_unit(value)
        seen = mask.expand_as(value).to(value)
        inside = seen * (value - shift) / unit
        return torch.cat([seen, inside, inside.square()], -1)

    def coefficients(self, params: Params) -> Tensor:
        """Those of the normal log-density."""
        loc, scale = params["loc"], params["scale"]
        shift, unit = self.centre_and_unit(loc)
        inside, precision = (loc - shift) / unit, (unit / scale).square()
        one = -0.5 * precision * inside.square() - torch.log(scale) - LOG_SQRT_2PI
        return torch.cat(torch.broadcast_tensors(one, precision * inside, -0.5 * precision), -1)

    def fitted(self, params: Params, sums: Tensor) -> dict[str, Tensor]:
        """Means, then the spread around them, or around the level that is given."""
        count, first, second = sums.split(self.dim, -1)
        shift, unit = self.centre_and_unit(sums)
        declared, fitted = self.declared(), dict(params)
        if declared["loc"].learned:
            centre = first / count.clamp(min=torch.finfo(count.dtype).tiny)
            fitted["loc"] = torch.where(count > 0, shift + unit * centre, params["loc"])
        else:
            centre = (params["loc"] - shift) / unit
        if declared["scale"].learned:
            squares = second - centre * (2 * first - count * centre)
            fitted["scale"] = self._spread(squares * unit.square(), count, params["scale"])
        return fitted

    def regressed(
        self, params: Params, moments: Tensor, shift: Tensor, unit: Tensor, least: float = 1e-8
    ) -> dict[str, Tensor]:
        """Least squares of each coordinate, configurations weighed by the present scales; then the residuals' spread.

        Slopes are the same in all configurations, so that they depend on the scales: each is the best given the other.
        Arguments are those of :class:`~otpdag.mechanisms.base.Regressed`; a scale is no smaller than ``least`` of
        the column's spread, below which digits are lost.
        """
        if self.predictor.terms is not None:
            moments, shift = of_features(self.predictor.terms, moments, shift, unit)
        learned = {name for name, parameter in self.declared().items() if parameter.learned}
        count, first, fitted = moments[..., -1, -1], moments[..., :-1, -1], dict(params)
        if "loc" in learned:
            centre = first / count.clamp(min=torch.finfo(count.dtype).tiny).unsqueeze(-1)
        else:  # a line through the level that is given
            level = ((params["loc"] - shift[:, 0]) / unit).unsqueeze(-1)
            centre = torch.cat([level, -shift[:, 1:].expand(*level.shape[:-1], -1)], -1)
        crossed = centre.unsqueeze(-1) * first.unsqueeze(-2)
        squared = centre.unsqueeze(-1) * centre.unsqueeze(-2)
        around = moments[..., :-1, :-1] - crossed - crossed.mT + count[..., None, None] * squared
        line = torch.ones_like(around[:, 0, ..., 0])  # of the value and, negative, of the parents
        if "weight" in params:
            slopes = (params["weight"] / unit).mT
            if "weight" in learned:
                slopes = self._slopes((around / params["scale"][..., None, None].square()).sum(1), slopes, unit)
                fitted["weight"] = slopes.mT * unit
            line = torch.cat([line[..., :1], -slopes.expand_as(line[..., 1:])], -1)
        if "loc" in learned:
            moved = (centre * line.unsqueeze(1)).sum(-1) + (line * shift)[..., 1:].sum(-1).unsqueeze(1)
            fitted["loc"] = torch.where(count > 0, shift[:, 0] + unit * moved, params["loc"])
        if "scale" in learned:
            along = (around * line[:, None, :, None]).sum(-1)
            squares = (along * line.unsqueeze(1)).sum(-1) * unit.square()
            fitted["scale"] = self._spread(squares, count, params["scale"], least)
        return fitted

    def _slopes(self, trusted: Tensor, before: Tensor, unit: Tensor, ridge: float = 1e-12) -> Tensor:
        """Slopes (R, dim, P) from weighed moments of value and parents; the ridge keeps what no row tells."""
        normal, right = trusted[..., 1:, 1:], trusted[..., 1:, :1]
        diagonal = normal.diagonal(dim1=-2, dim2=-1)
        pull = ridge * torch.where(diagonal > 0, diagonal, 1.0)
        normal, right = normal + torch.diag_embed(pull), right + (pull * before).unsqueeze(-1)
        prior = self.declared()["weight"].pull(normal)
        if prior is not None:
            normal, right = normal + prior[0], right + (prior[1] / unit.unsqueeze(-1)).unsqueeze(-1)
        return torch.linalg.solve(normal, right).squeeze(-1)

    def _spread(self, squares: Tensor, count: Tensor, before: Tensor, least: float = 1e-8) -> Tensor:
        """Scales from sums of squares and counts (R, C, dim); where there is no row, those from before."""
        if self.scale_rows == 1:
            squares, count = squares.sum(1, keepdim=True), count.sum(1, keepdim=True)
        if self.isotropic:
            squares, count = squares.sum(-1, keepdim=True), count.sum(-1, keepdim=True)
        smallest, floor = least * self._over_coordinates(self.centre_and_unit(squares)[1]), self.smallest_scale
        smallest = smallest if floor is None else smallest.maximum(floor.to(squares))
        spread = (squares / count.clamp(min=torch.finfo(count.dtype).tiny)).maximum(smallest.square()).sqrt()
        return torch.where(count > 0, spread, before)

    @property
    def is_linear(self) -> bool:
        """Unless a network, or terms that bend, predict the location."""
        return self.is_affine


@dataclass(eq=False, repr=False, kw_only=True)
class LogNormal(NormalOnLine):
    r"""A positive node whose logarithm is normal, with the location of a linear predictor.

    .. math:: \log x = \mathrm{loc}[\mathrm{pa}] + W^\top \mathrm{pa} + \mathrm{scale}[\mathrm{pa}] \, u,
              \quad u \sim N(0, I)

    ``exp(loc)`` is the median. Of a hidden node the location is fixed at zero unless it is given (its
    children's slopes can take it over), while the scale shapes the distribution and is learned.

    Args:
        dim: Number of coordinates.
        loc: Intercept of the logarithm.
        weight: Slopes of the numeric parents.
        scale: Standard deviation of the logarithm.
        network: Sizes of hidden layers of a network of the parents that replaces the linear prediction.
        network_prior: Precision of a normal prior on its layers, in units of the columns' spreads; zero for none.
        terms: A formula of the parents for the location, such as ``"x * C(z)"``, with one scale for all rows.
        shared_scale: One scale for all configurations of the discrete parents.
        floor: A scale that none falls below, as a share of the column's own spread; see :class:`Normal`.
        censored: Whether values are intervals, in two columns ``x.0`` and ``x.1``; an end that is missing is none.
        truncated: Limits between which alone values were recorded, such as ``(0, None)``.

    >>> LogNormal().space
    Positive(dim=1)
    """

    keeps_rounding: ClassVar[bool] = False
    scales_when_hidden: ClassVar[bool] = True
    space_kind: ClassVar[type[Vector]] = Positive

    def on_line(self, value: Tensor) -> Tensor:
        """The logarithm."""
        return torch.log(value.clamp(min=torch.finfo(value.dtype).tiny))

    def quantile(self, noise: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """``exp(loc + scale * u)``."""
        return torch.exp(super().quantile(noise, loc, scale))

    def log_density(self, value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """Normal log-density of the logarithm, less the logarithm itself."""
        return super().log_density(value, loc, scale) - self.on_line(value)

    def mean_at(self, line: Tensor, *beside: Tensor) -> Tensor:
        """``exp(loc + scale^2 / 2)``."""
        return torch.exp(line + 0.5 * beside[0] ** 2)


@dataclass(eq=False, repr=False, kw_only=True)
class StudentT(Cellwise, LocationScale):
    r"""A node with heavy tails, linear in its numeric parents.

    .. math:: x = \mathrm{loc}[\mathrm{pa}] + W^\top \mathrm{pa} + \mathrm{scale}[\mathrm{pa}] \,
              F_\nu^{-1}(u), \quad u \sim U(0, 1)

    with :math:`F_\nu` the distribution function of Student's t with ``df`` :math:`\nu > 1` degrees of
    freedom, one for each coordinate.

    Args:
        dim: Number of coordinates.
        loc: Intercept.
        weight: Slopes of the numeric parents.
        scale: Scale of the noise (not its standard deviation); fixed at one for a hidden node unless it is
            given.
        df: Degrees of freedom, above one.
        network: Sizes of hidden layers of a network of the parents that replaces the linear prediction.
        network_prior: Precision of a normal prior on its layers, in units of the columns' spreads; zero for none.
        terms: A formula of the parents for the location, such as ``"x * C(z)"``, with one scale for all rows.
        shared_scale: One scale for all configurations of the discrete parents.
        floor: A scale that none falls below, as a share of the column's own spread; see :class:`Normal`.

    Attributes:
        df_grid: Degrees of freedom to start from: from nearly Cauchy to nearly normal.
        start_steps: Of expectation-maximisation, enough for a start.

    >>> StudentT(df=4.0).noise
    Noise(dim=1, kind='uniform')
    """

    df: SettingLike = None

    beside: ClassVar[tuple[str, ...]] = ("scale", "df")
    noise_kind: ClassVar[Literal["normal", "uniform"]] = "uniform"
    is_symmetric: ClassVar[bool] = True
    df_grid: ClassVar[tuple[float, ...]] = (1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 25.0, 50.0)
    start_steps: ClassVar[int] = 20

    def on_setup(self) -> None:
        """Refuse scales that terms predict: they and the degrees of freedom say nearly the same."""
        super().on_setup()
        if self.spreads:
            raise ModelError(
                f"node {self.family.node!r}: the {next(iter(self.spreads))} of a StudentT takes no formula"
            )

    def parameters(self) -> dict[str, Parameter]:
        """Location table, slopes, scale table, degrees of freedom."""
        return {**super().parameters(), "df": Parameter((1, self.dim), ABOVE_ONE, self.df)}

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Expectation-maximisation with the degrees of freedom on a grid (Lange, Little and Taylor 1989)."""
        params, given = super().start(value, parents, weight), self.declared()["df"]
        floor = self._start_floor(value, weight)
        lifted = {name: parent.unsqueeze(0) for name, parent in parents.items()}
        for _ in range(self.start_steps):
            scale = self.row_of(params["scale"].unsqueeze(0), lifted, 3)[0]
            ratio = ((value - self.predictor.predict_rows(params, parents)) / scale) ** 2
            df = given.constant(self.family.node, "df").to(value) if given.has_value else self._best_df(ratio, weight)
            trust = (df + 1) / (df + ratio)
            params |= self.predictor.start(value, parents, weight.unsqueeze(-1) * trust)
            residual = value - self.predictor.predict_rows(params, parents)
            variance = self.pooled(trust * residual**2, self.scale_rows, parents, weight)
            params |= {"scale": variance.sqrt().maximum(floor), "df": df.reshape(1, self.dim)}
        return params

    def _best_df(self, ratio: Tensor, weight: Tensor) -> Tensor:
        """The degrees of freedom on the grid that fit squared standardised residuals (N, dim) best."""
        grid = torch.tensor(self.df_grid, dtype=ratio.dtype).reshape(-1, 1, 1)
        fit = (weight.unsqueeze(-1) * student_log_density(ratio, grid)).sum(1)
        return grid[fit.argmax(0), 0, 0].unsqueeze(0)

    def quantile(self, noise: Tensor, loc: Tensor, scale: Tensor, df: Tensor) -> Tensor:
        """The location and scaled quantiles of Student's t."""
        return loc + scale * STUDENT.quantile(noise, df)

    def log_density(self, value: Tensor, loc: Tensor, scale: Tensor, df: Tensor) -> Tensor:
        """Student-t log-density."""
        return student_log_density(((value - loc) / scale) ** 2, df) - torch.log(scale)

    def noise_of(self, value: Tensor, uniform: Tensor, loc: Tensor, scale: Tensor, df: Tensor) -> Tensor:
        """The distribution function at the standardised value."""
        return STUDENT.cdf((value - loc) / scale, df)


def of_features(terms: Terms, moments: Tensor, shift: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Moments (R, 1, dim, k + 2, k + 2) of value less offset, features and one, from those by configuration.

    Features are affine in the numeric parents, so that theirs are products with the maps. What was subtracted from
    the value stays so; features are taken as they are.
    """
    slopes, offset = (one.to(moments) for one in terms.maps)
    dim, inputs = shift.shape[0], shift.shape[1] - 1
    maps = moments.new_zeros(len(slopes), dim, slopes.shape[1] + 2, inputs + 2)
    maps[..., 0, 0] = maps[..., -1, -1] = 1.0
    known = -offset[:, None, None] / unit[:, None, None]
    lines = torch.cat([known, slopes.unsqueeze(1).expand(-1, dim, -1, -1)], -2)
    centre = torch.cat([shift[:, 1:], torch.ones_like(shift[:, :1])], -1)
    maps[..., :-1, 1:-1], maps[..., :-1, -1] = lines[..., :-1], (lines * centre.unsqueeze(-2)).sum(-1)
    mapped = torch.einsum("cdki,rcdij,cdlj->rdkl", maps, moments, maps).unsqueeze(1)
    return mapped, torch.cat([shift[:, :1], shift.new_zeros(dim, slopes.shape[1])], -1)


def default_floor(
    target: Tensor,
    weight: Tensor,
    *,
    hidden_parents: bool,
    rounding: bool = True,
    shares: tuple[float, float] = (1e-6, 1e-3),
    most: float = 0.25,
) -> Tensor:
    """The smallest scale of each column (dim,) of ``target`` (N, dim), of rows that have a weight (N,).

    ``shares`` of a column's spread it is at least, without and with hidden parents: a hidden state may sit on a row.
    ``most`` is what the resolution may ask for: coarse columns keep three quarters of their spread to explain.

    >>> answers = torch.tensor([[1.0], [2.0], [3.0], [2.0], [1.0], [3.0]])
    >>> default_floor(answers, torch.ones(6), hidden_parents=True)
    tensor([0.1853])
    """
    values, counts = target.cpu().numpy(), weight.cpu().numpy() > 0
    seen = values if counts.all() else values[counts]
    if not len(seen):
        return torch.zeros(target.shape[-1], dtype=target.dtype, device=target.device)
    ordered = np.sort(seen, axis=0)
    spread = _spread(seen, ordered)
    floor = shares[hidden_parents] * spread
    if rounding:
        rounded = np.array([resolution(column) for column in ordered.T]) / math.sqrt(12)
        floor = np.maximum(floor, np.minimum(rounded, most * spread))
    return torch.from_numpy(floor).to(target)


def resolution(ordered: NDArray[np.floating[Any]]) -> float:
    """How far apart the sorted values (N,) of a rounded column are; zero if fewer than every second comes back.

    >>> resolution(np.array([1.0, 1.0, 1.5, 1.5, 2.0, 2.0]))
    0.5
    """
    gaps = ordered[1:] - ordered[:-1]
    gaps = gaps[gaps > 0]
    return float(gaps.min()) if len(gaps) and 2 * (len(gaps) + 1) <= len(ordered) else 0.0


def _spread(seen: NDArray[np.floating[Any]], ordered: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    deviation, last = seen.std(0), len(seen) - 1
    # 1.349 lie between the quartiles of a standard normal variable
    quartiles = (ordered[last * 3 // 4] - ordered[last // 4]) / 1.349
    spread = np.where(quartiles > 0, np.minimum(deviation, quartiles), deviation)
    # a constant column has no spread: its own size stands for it
    size = np.abs(seen[0])
    return np.where(spread > 1e-12 * size, spread, np.where(size > 0, size, 1.0))
