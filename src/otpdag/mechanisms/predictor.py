r"""The linear predictor that most mechanisms share, and what mechanisms with one have in common.

.. math:: \eta(\mathrm{pa}) = \mathrm{table}[\text{discrete parents}] + W^\top \text{numeric parents}
          \;(+\; \mathrm{network})

Discrete parents select a row of a table (one row per joint configuration), numeric parents enter linearly,
and a network of all parents can be added. Where a formula gives terms (:mod:`~otpdag.mechanisms.terms`), their features
stand in the place of the numeric parents, and there is one intercept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from otpdag.errors import ModelError, check_count, check_number
from otpdag.layers import apply_mlp, mlp_tensors
from otpdag.mechanisms.base import (
    LINE,
    Family,
    Held,
    Mechanism,
    Noise,
    Params,
    Parents,
    axis_count,
    configurations,
    numeric,
    sum_cells,
)
from otpdag.mechanisms.parameters import (
    POSITIVE,
    REAL,
    Axis,
    Between,
    Bounded,
    Formula,
    Parameter,
    Ridge,
    SettingLike,
    Tied,
    as_setting,
    between,
)
from otpdag.numerics import apply_linear, expand_to, side_by_side, sums_by_row, under
from otpdag.spaces import Interval, Positive, Real, Space, Vector

if TYPE_CHECKING:
    from otpdag.mechanisms.generalised_linear import Link
    from otpdag.mechanisms.terms import Terms

# fits `(config, values, target, weight, offset)`; returns the table (C, d) and the slopes (P, d)
Fit = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Ends = tuple[Tensor, Tensor, Tensor, Tensor]  # low and high, and whether there are any


def weighted_regression(design: Tensor, target: Tensor, weight: Tensor, ridge: float = 1e-6) -> Tensor:
    """Weighted least squares with a small ridge: coefficients (columns of design, columns of target)."""
    scaled = design * weight.unsqueeze(-1)
    gram = scaled.T @ design
    size = gram.diagonal().mean().clamp(min=1e-12)
    gram = gram + ridge * size * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram, scaled.T @ target)


class Equations:
    """Normal equations of both blocks, for weights (N, 1), or (N, d) where there are no slopes.

    The design has two blocks: ``config`` (N, C), the one-hot (or soft) configuration of the discrete parents, and
    ``values`` (N, P), the numeric parents. The first block's normal equations are diagonal, so the second is solved by
    its Schur complement and tables of any size stay cheap.

    By the ridges an empty configuration takes the overall mean, and a full one hardly notices.
    """

    table_ridge, slope_ridge = 1e-4, 1e-6

    def __init__(self, config: Tensor, values: Tensor, weight: Tensor) -> None:
        self.config, self.values, self.weight = config, values, weight
        self.total = weight.sum(0).clamp(min=1e-300)
        self.diagonal = sums_by_row(config, weight) + self.table_ridge * self.total / max(config.shape[1], 1)
        if values.shape[1]:
            self.cross = sums_by_row(config, weight * values)
            gram = values.T @ (weight * values) - self.cross.T @ (self.cross / self.diagonal)
            self.gram = gram + self.slope_ridge * self.total.max() * torch.eye(values.shape[1], dtype=values.dtype)

    def solved(self, response: Tensor) -> tuple[Tensor, Tensor]:
        """The table (C, d) and the slopes (P, d) of a response (N, d)."""
        weighed = self.weight * response
        mean = weighed.sum(0) / self.total if self.config.shape[1] else torch.zeros_like(response[0])
        centred = weighed - self.weight * mean
        table_side = sums_by_row(self.config, centred)
        if not self.values.shape[1]:
            return table_side / self.diagonal + mean, self.values.new_zeros(0, response.shape[1])
        slopes = torch.linalg.solve(self.gram, self.values.T @ centred - self.cross.T @ (table_side / self.diagonal))
        return (table_side - self.cross @ slopes) / self.diagonal + mean, slopes


def least_squares(
    config: Tensor, values: Tensor, target: Tensor, weight: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted least squares.

    Args:
        config: Configurations (N, C); of no columns where the table is given.
        values: Numeric parents (N, P), standardised; of no columns where there are none or their slopes are given.
        target: Values to predict (N, d).
        weight: Weights of the rows, (N, 1) or (N, d).
        offset: Part of the prediction that is known already, (N, d), or (1, d) where it is the same in all rows.

    Returns:
        The table (C, d) and the slopes (P, d); the one that is given has no rows.
    """
    response = target - offset
    if weight.shape[1] == 1 or values.shape[1] == 0:
        return Equations(config, values, weight).solved(response)
    columns = zip(response.split(1, 1), weight.split(1, 1), strict=True)
    solved = [Equations(config, values, own).solved(column) for column, own in columns]
    return torch.cat([table for table, _ in solved], -1), torch.cat([slopes for _, slopes in solved], -1)


@dataclass(frozen=True)
class Units:
    """Centre and spread of the numeric parents and of the predicted quantity."""

    in_shift: Tensor
    in_scale: Tensor
    out_shift: Tensor
    out_scale: Tensor

    @classmethod
    def of(cls, buffers: Mapping[str, Tensor]) -> Units | None:
        """Those that were saved, if any were."""
        return cls(*(buffers[part.name] for part in fields(cls))) if "in_shift" in buffers else None


@dataclass(frozen=True)
class Predictor:
    """Predict ``dim`` numbers from the parents; the intercept is called ``name``, the slopes ``weight``.

    With ``no_level`` the intercepts of all configurations average zero unless they are given: of a hidden node only
    their differences are identified, for its children's intercepts can take up the rest.

    Attributes:
        bent: Precision (inputs, inputs) of the prior by which curves are smooth.
        contrast: How often an offset counts in each of the ``dim`` numbers; once where left out.
        most_rows: Of a table: more configurations than any data could tell apart.
    """

    family: Family
    dim: int
    name: str
    intercept: SettingLike = None
    weight: SettingLike = None
    network: Sequence[int] = ()
    network_prior: float = 0.0
    units: Units | None = None
    no_level: bool = False
    terms: Terms | None = None
    bent: Tensor | None = None
    contrast: tuple[float, ...] = (1.0,)

    most_rows: ClassVar[int] = 20_000

    def __post_init__(self) -> None:
        """Refuse tables that no data could fill, and a network of terms."""
        if self.network and self.terms is not None:
            raise ModelError(f"node {self.family.node!r}: give terms or a network, not both")
        if self.rows > self.most_rows:
            raise ModelError(
                f"node {self.family.node!r}: a table over its discrete parents needs {self.rows} rows; "
                f"at most {self.most_rows} are supported: give it fewer parents, a network, or main effects alone, "
                f"terms={self.main_effects!r}"
            )

    @cached_property
    def rows(self) -> int:
        """Number of joint configurations of the discrete parents that have an intercept each."""
        if self.network or self.terms is not None:
            return 1
        return prod(space.width for _, space in self.family.discrete)

    @cached_property
    def inputs(self) -> int:
        """Number of features: of terms, or of numeric parent coordinates."""
        if self.terms is not None:
            return len(self.terms.features)
        return sum(space.width for _, space in self.family.continuous)

    @property
    def main_effects(self) -> str:
        """A formula in which every parent has an effect of its own."""
        return " + ".join(f"C({name})" if space.is_discrete else name for name, space in self.family.parents)

    def configurations(self, parents: Parents) -> Tensor | None:
        """Which intercept holds at these parents, (R, ..., rows); None where there is one."""
        return None if self.network or self.terms is not None else configurations(self.family, parents)

    def features(self, parents: Parents) -> Tensor | None:
        """What slopes are multiplied with: (R, ..., inputs)."""
        if self.terms is not None:
            return self.terms(parents) if self.inputs else None
        return numeric(self.family, parents)

    def offset(self, parents: Parents) -> Tensor:
        """What is known of the prediction: (R, ..., 1), or (R, ..., dim) where it counts differently."""
        return torch.tensor(self.contrast) * (0.0 if self.terms is None else self.terms.offset(parents))

    def parameters(self) -> dict[str, Parameter]:
        """Intercept table, slopes, and the network's layers."""
        units = self.units
        origin, unit = (units.out_shift, units.out_scale) if units else (None, None)
        declared = {self.name: Parameter((self.rows, self.dim), REAL, self.intercept, origin=origin, unit=unit)}
        if self.inputs and not self.network:
            slope_unit = units.out_scale / units.in_scale.unsqueeze(-1) if units else None
            rising = None if self.terms is None else self.terms.rising
            rising = None if rising is None else rising * torch.tensor(self.contrast).double().sign()
            declared["weight"] = Parameter(
                (self.inputs, self.dim), REAL, self.weight, unit=slope_unit, in_part=True, bent=self.bent, rising=rising
            )
        if self.network:
            width = self.inputs + sum(space.width for _, space in self.family.discrete)
            for name, (shape, spread) in mlp_tensors((width, *self.network, self.dim)).items():
                own = unit if name.startswith(f"{len(self.network)}.") else None  # the last layer predicts
                penalty = self.network_prior / (1.0 if own is None else own.square())
                prior = Ridge(penalty) if self.network_prior else None
                declared[f"network.{name}"] = Parameter(shape, REAL, prior, unit=own, init_scale=spread)
        return declared

    def with_units(self, target: Tensor | None, parents: Parents, weight: Tensor) -> Predictor:
        """Adopt the centre and spread of ``target`` (N, dim) and of the numeric parents.

        Without a target, as logits are of order one already, those of the parents alone.
        """
        plain = (torch.zeros(self.dim).to(weight), torch.ones(self.dim).to(weight))
        terms = None if self.terms is None else self.terms.with_knots(parents)
        if terms is not None and target is not None:
            target = target - terms.offset(parents)
        own = plain if target is None else centre_and_spread(target, weight)
        values = replace(self, terms=terms).features(parents)
        inputs = (plain[0][:0], plain[1][:0]) if values is None else centre_and_spread(values, weight)
        return replace(self, units=Units(*inputs, *own), terms=terms)

    def smoothed(self, target: Tensor, parents: Parents, weight: Tensor, link: Link, times: float = 1.0) -> Predictor:
        """Choose how smooth curves are, where ``target`` (N, dim) is predicted through a link; ``times`` as much."""
        values, bends = self.features(parents), self._bends()
        if values is None or not bends:
            return self
        from otpdag.mechanisms.smoothing import penalty_of  # only nodes with such priors pay for it

        offset = times * self.offset(parents)
        return replace(self, bent=times * penalty_of(values, target, weight, offset, bends, link))

    def _bends(self) -> list[tuple[slice, Tensor]]:
        """Columns whose prior the rows say the strength of, and its quadratic form: curves, and terms of a ridge."""
        found = [] if self.terms is None else list(self.terms.bends())
        if self.units is None or self.network or not isinstance(self.weight, Ridge) or self.weight.penalty is not None:
            return found
        known, scale = {place.start for place, _ in found}, self.units.in_scale.double().square()
        if self.terms is None:
            return [(slice(0, self.inputs), torch.diag(scale))]
        for place, block in zip(self.terms.places, self.terms.blocks, strict=True):
            if place.start not in known:
                # levels of a category are alike, however often each occurs
                alike = any(one.kind == "category" for one, _ in block)
                own = scale[place].mean().expand_as(scale[place]) if alike else scale[place]
                found.append((place, torch.diag(own)))
        return found

    def restore_units(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn the intercept at the parents' centre into the intercept at zero."""
        if self._centred:
            params[self.name] = params[self.name] - self._at_centre(params["weight"])
        if self.is_levelled:
            params[self.name] = params[self.name] - params[self.name].mean(1, keepdim=True)
        return params

    def remove_units(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn the intercept at zero into the intercept at the parents' centre."""
        if self._centred and self.name in params:
            if "weight" not in params:
                raise ModelError(
                    f"node {self.family.node!r}: {self.name!r} cannot be set without 'weight': it is the "
                    f"intercept where the numeric parents are zero"
                )
            params[self.name] = params[self.name] + self._at_centre(params["weight"])
        return params

    @property
    def is_levelled(self) -> bool:
        """Whether the intercepts of all configurations average zero."""
        return self.no_level and self.intercept is None

    @property
    def centre(self) -> Tensor:
        """The numeric parents' values (inputs,) at which the raw intercept is taken."""
        return self.units.in_shift if self.units is not None and self._centred else torch.zeros(self.inputs).double()

    @cached_property
    def _centred(self) -> bool:
        declared = self.parameters()
        free = declared[self.name].learned and not isinstance(self.intercept, Tied | Bounded)
        return self.units is not None and "weight" in declared and free

    def _at_centre(self, weight: Tensor) -> Tensor:
        return (self.centre.to(weight) @ weight).unsqueeze(1)

    def __call__(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """Evaluate: (R, ..., dim), broadcast over whatever axes the parents (and the value ``like``) have."""
        ndim = axis_count(parents, like)
        config, values = self.configurations(parents), self.features(parents)
        table = params[self.name]
        out = expand_to(table[:, 0], ndim) if config is None else apply_linear(config, table)
        if self.network:
            return out + apply_mlp(params, self._network_inputs(parents, values), "network.")
        if self.terms is not None:
            out = out + self.offset(parents)
        if LINE in parents:
            out = out + parents[LINE]
        return out if values is None else out + apply_linear(values, params["weight"])

    def _network_inputs(self, parents: Parents, values: Tensor | None) -> Tensor:
        columns = [parents[name] for name, _ in self.family.discrete]
        if values is not None:
            if self.units is not None:
                values = (values - self.units.in_shift.to(values)) / self.units.in_scale.to(values)
            columns.append(values)
        return side_by_side(columns)

    def start(self, target: Tensor, parents: Parents, weight: Tensor, fit: Fit = least_squares) -> dict[str, Tensor]:
        """Regress ``target`` (N, dim) on the parents, around what the user fixed or started.

        Args:
            target: Values to predict.
            parents: Values of the parents (N, width).
            weight: Weights of the rows, (N,) or (N, dim).
            fit: How.
        """
        declared = self.parameters()
        given = {
            name: parameter.constant(self.family.node, name).to(target)
            for name, parameter in declared.items()
            if parameter.has_value
        }
        weight = weight if weight.ndim == 2 else weight.unsqueeze(-1)
        config = self.configurations(parents)
        config = target.new_ones(len(target), 1) if config is None else config
        values = None if self.network else self.features(parents)
        offset, known = torch.zeros_like(target[:1]) + self.offset(parents), given.get(self.name)
        if values is None:
            alone = known is None
            return {self.name: fit(config, config[:, :0], target, weight, offset)[0] if alone else given[self.name]}
        shift, spread = centre_and_spread(values, weight.mean(-1))
        if known is not None:
            shift, offset = torch.zeros_like(shift), offset + config @ known
        values = (values - shift) / spread
        slopes = given.get("weight", target.new_full((self.inputs, self.dim), torch.nan))
        free = slopes.isnan().any(-1)
        levels, told = config if known is None else config[:, :0], values @ (slopes.nan_to_num() * spread.unsqueeze(-1))
        table, fitted = fit(levels, values[:, free], target, weight, offset + told)
        own = slopes[free]
        slopes = slopes.index_put((free,), own.where(~own.isnan(), fitted / spread[free].unsqueeze(-1)))
        support = declared["weight"].support
        if isinstance(support, Between):  # the level follows slopes that are moved inside
            slopes = support.inside(slopes)
            table, _ = fit(levels, values[:, :0], target, weight, offset + values @ (slopes * spread.unsqueeze(-1)))
        return {self.name: table - shift @ slopes if known is None else known, "weight": slopes}

    def predict_rows(self, start: dict[str, Tensor], parents: Parents) -> Tensor:
        """Evaluate natural values without a replica axis on parents (N, width)."""
        params = {name: value.unsqueeze(0) for name, value in start.items()}
        if self.network:
            return params[self.name][:, 0].expand(next(iter(parents.values())).shape[0], -1)
        lifted = {name: value.unsqueeze(0) for name, value in parents.items()}
        return self(params, lifted)[0] if lifted else params[self.name][0]

    def buffers(self) -> dict[str, Tensor]:
        """Units, knots and penalties that came from data."""
        units, terms = self.units, self.terms
        if units is None:
            return {}
        held = {part.name: getattr(units, part.name) for part in fields(units)}
        held |= {} if terms is None or terms.knots is None else {"knots": terms.knots}
        return held if self.bent is None else held | {"bent": self.bent}

    def with_buffers(self, buffers: Mapping[str, Tensor]) -> Predictor:
        """The same with saved :meth:`buffers`."""
        terms = None if self.terms is None else replace(self.terms, knots=buffers.get("knots"))
        return replace(self, units=Units.of(buffers), terms=terms, bent=buffers.get("bent"))

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all that :meth:`buffers` may hold."""
        shapes: dict[str, tuple[int, ...]] = {
            one.name: (self.inputs if one.name.startswith("in_") else self.dim,) for one in fields(Units)
        }
        if self.terms is not None and self.terms.splines:
            shapes["knots"] = (len(self.terms.splines), max(one.size for one in self.terms.splines) + 1)
            shapes["bent"] = (self.inputs, self.inputs)
        return shapes

    # -- symmetry ------------------------------------------------------------------------------------------------

    @property
    def row_axis(self) -> Axis:
        """The rows of a table: one for each configuration of the discrete parents."""
        return Axis() if self.network or self.terms is not None else Axis.of_categories(self.family.discrete)

    def axes(self, own: Axis) -> dict[str, tuple[Axis, ...]]:
        """The axes of intercepts and slopes, where ``own`` is that of the node; layers of a network have none."""
        named: dict[str, tuple[Axis, ...]] = {self.name: (self.row_axis, own)}
        if self.inputs and not self.network:
            features = Axis.of_coordinates(self.family.continuous) if self.terms is None else self.terms.axis
            named["weight"] = (features, own)
        return named

    def slopes_of(self, params: Params, parent: str) -> Tensor | None:
        """The slopes of one numeric parent, (R, width, dim); None if it has none."""
        where = self._rows_of(parent)
        where = where[:1] if isinstance(where, list) else where  # of terms the first
        return None if where is None or "weight" not in params else params["weight"][:, where]

    def _rows_of(self, parent: str) -> slice | list[int] | None:
        """The rows of the slopes that belong to one parent; None if it does not enter linearly."""
        if self.terms is not None:
            return self.terms.columns_of(parent)
        at = 0
        for name, space in () if self.network else self.family.continuous:
            if name == parent:
                return slice(at, at + space.width)
            at += space.width
        return None

    def with_inputs_turned(self, params: Params, parents: Collection[str], sign: Tensor) -> dict[str, Tensor] | None:
        """Slopes for numeric parents whose coordinates are multiplied by ``sign``; None if one does not enter so."""
        turned = dict(params)
        for parent in parents:
            where = self._rows_of(parent)
            if where is None or "weight" not in params:
                return None
            turned["weight"] = turned["weight"].clone()
            turned["weight"][:, where] *= sign.unsqueeze(-1)
        return turned

    def with_output_turned(self, params: Params, sign: Tensor) -> dict[str, Tensor] | None:
        """Intercepts and slopes that predict the same times ``sign``; None from a network, or beside an offset."""
        if self.network or (self.terms is not None and self.terms.offsets):
            return None
        return {**params, **{name: params[name] * sign for name in (self.name, "weight") if name in params}}


@dataclass(frozen=True)
class Spread:
    """A positive parameter beside the prediction, whose logarithm has a predictor of its own.

    Its intercept is called ``log_scale``, its slopes ``scale_weight``, where the parameter is the scale.

    Attributes:
        most: Of a logarithm, either way.
    """

    name: str
    predictor: Predictor
    most: ClassVar[float] = 60.0

    def __call__(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """The parameter at these parents: (R, ..., dim)."""
        return torch.exp(self.predictor(self.inner(params), parents, like).clamp(-self.most, self.most))

    def inner(self, params: Mapping[str, Held]) -> dict[str, Held]:
        """What the predictor reads, as it calls it."""
        names = {f"log_{self.name}": f"log_{self.name}", f"{self.name}_weight": "weight"}
        return {own: params[name] for name, own in names.items() if name in params}

    def outer(self, params: Mapping[str, Held]) -> dict[str, Held]:
        """Invert :meth:`inner`."""
        return {f"{self.name}_weight" if name == "weight" else name: value for name, value in params.items()}


def centre_and_spread(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation per column; a constant column has spread one.

    Constant is what varies by no more than rounding does, at the size of its values.

    >>> centre_and_spread(torch.tensor([[1e-30, 5.0], [3e-30, 5.0]], dtype=torch.float64), torch.ones(2))
    (tensor([2.0000e-30, 5.0000e+00], dtype=torch.float64), tensor([1.0000e-30, 1.0000e+00], dtype=torch.float64))
    """
    numbers, counted = values.detach().cpu().numpy(), weight.detach().cpu().numpy()
    precision = np.finfo(numbers.dtype)
    share = (counted / max(counted.sum(), 1e-12)).astype(numbers.dtype)
    mean = share @ numbers
    gaps = numbers - mean
    largest = np.maximum(np.abs(gaps).max(0, initial=0.0), precision.tiny)  # squares of tiny gaps would vanish
    gaps /= largest
    spread = largest * np.sqrt(share @ np.square(gaps, out=gaps))
    spread = np.where(spread > 32 * precision.eps * np.abs(mean), spread, 1.0).astype(numbers.dtype)
    return torch.from_numpy(mean).to(values), torch.from_numpy(spread).to(values)


@dataclass(eq=False, repr=False, kw_only=True)
class Predicted(Mechanism):
    """A mechanism with a predictor, and perhaps tables with a row for each discrete configuration.

    Attributes:
        spreads: Of tables beside the prediction that are given as formulas, what predicts their logarithms.
        predicts: The name of the intercept; the attribute of that name is its setting.
        beside: The names of the tables beside the prediction, each with a row for each configuration or with one for
            all.
        within: Where predictions are cut off, beyond which numbers are lost to rounding.
        space_kind: The kind of the node's space.
        noise_kind: The noise of each coordinate; what is uniform goes through the inverse distribution function.
        from_data: Attributes that come from the data besides the units; None where there are none.
        has_free_level: Whether children's intercepts can take up the level of a hidden node, so that only differences
            are identified.
    """

    dim: int = field(default=1, kw_only=False)
    weight: SettingLike = None
    network: Sequence[int] = ()
    network_prior: float = 0.1
    terms: str | None = None

    predictor: Predictor = field(init=False)
    spreads: Mapping[str, Spread] = field(default_factory=dict, init=False)
    predicts: ClassVar[str]
    beside: ClassVar[tuple[str, ...]] = ()
    within: ClassVar[tuple[float | None, float | None]] = (None, None)
    space_kind: ClassVar[type[Vector]] = Real
    noise_kind: ClassVar[Literal["normal", "uniform"]] = "uniform"
    from_data: ClassVar[tuple[str, ...]] = ()
    has_free_level: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse a node without coordinates."""
        check_count("dim", self.dim)
        self.network = tuple(self.network)
        check_number("network_prior", self.network_prior, least=0.0)

    @property
    def space(self) -> Space:
        """Vectors."""
        return self.space_kind(self.dim)

    @property
    def noise(self) -> Noise:
        """One for each coordinate."""
        return Noise(self.dim, self.noise_kind)

    def on_setup(self) -> None:
        """Build the predictor; a level that is not identified is zero unless it is given."""
        family, level, free = self.read_by_predictor, getattr(self, self.predicts), self.is_level_free
        terms = self.terms_of(family)
        self.spreads = {name: one for name in self.beside if (one := self._spread_of(name)) is not None}
        alone = terms is not None or bool(self.network) or not family.discrete
        if level is None and ((free and alone) or (terms is not None and not terms.has_intercept)):
            level = 0.0
        settings = level, self.weight, self.network, self.network_prior
        self.predictor = Predictor(family, self.dim, self.predicts, *settings, no_level=free, terms=terms)

    @property
    def read_by_predictor(self) -> Family:
        """The node and the parents that the prediction reads."""
        return self.family

    @property
    def is_level_free(self) -> bool:
        """Whether others can take up the level of the prediction, so that only differences are identified."""
        return self.has_free_level and self.family.hidden

    def _spread_of(self, name: str) -> Spread | None:
        """What predicts a table beside the prediction, if a formula is given for it."""
        setting = as_setting(getattr(self, name))
        if not isinstance(setting, Formula):
            return None
        from otpdag.mechanisms.terms import Terms

        terms, level = Terms.read(setting.text, self.family, left=name), f"log_{name}"
        return Spread(name, Predictor(self.family, self.dim, level, None if terms.has_intercept else 0.0, terms=terms))

    def _scale_spreads(self, parents: Parents, weight: Tensor, level: Tensor | None = None) -> None:
        """Adopt the units of what tables given as formulas read, around a level (dim,) of their logarithms."""
        level = torch.zeros(self.dim).to(weight) if level is None else level
        target = level.expand(len(weight), -1)
        self.spreads = {
            name: replace(one, predictor=one.predictor.with_units(target, parents, weight))
            for name, one in self.spreads.items()
        }

    def terms_of(self, family: Family) -> Terms | None:
        """The terms of the formula, if there is one."""
        if self.terms is None:
            return None
        from otpdag.mechanisms.terms import Terms  # only nodes that have some pay for it

        return Terms.read(self.terms, family, full=isinstance(self.weight, Ridge) and bool(self.weight.penalty != 0))

    def parameters(self) -> dict[str, Parameter]:
        """What is predicted, and positive tables beside it."""
        shape = self.predictor.rows, self.dim
        tables = {n: Parameter(shape, POSITIVE, getattr(self, n)) for n in self.beside if n not in self.spreads}
        named = self.predictor.parameters() | tables
        for one in self.spreads.values():
            named |= one.outer(one.predictor.parameters())
        return named

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """Intercepts and tables by configuration, slopes by numeric parent; all by coordinate, or one for all."""
        own, rows, declared = self.own_axis, self.predictor.row_axis, self.declared()
        tables: dict[str, tuple[Axis, ...]] = {}
        for name in self.beside:
            if name in self.spreads:
                tables |= self.spreads[name].outer(self.spreads[name].predictor.axes(own))
                continue
            first, *others = declared[name].shape
            tables[name] = (Axis() if first == 1 else rows, *(own if size == own.length else Axis() for size in others))
        return self.predictor.axes(own) | tables

    def at(self, params: Params, parents: Parents, like: Tensor | None = None) -> tuple[Tensor, ...]:
        """The prediction and the tables at these parents, ready to meet a value or noise ``like``: (R, ..., dim)."""
        line = self.predictor(params, parents, like)
        line = line if self.within == (None, None) else line.clamp(*self.within)
        return line, *(self.beside_at(name, params, parents, line) for name in self.beside)

    def started_spread(self, name: str, logarithm: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Where the terms of a table start: a regression of its ``logarithm`` (N, dim)."""
        one = self.spreads[name]
        return one.outer(one.predictor.start(logarithm, parents, weight))

    def beside_at(self, name: str, params: Params, parents: Parents, line: Tensor) -> Tensor:
        """A table, or what is predicted of it, at these parents, with as many axes as ``line``."""
        if name in self.spreads:
            return self.spreads[name](params, parents, line)
        return self.row_of(params[name], parents, line.ndim)

    def restore_units(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Uncentre the intercept."""
        for one in self.spreads.values():
            params |= one.outer(one.predictor.restore_units(one.inner(params)))
        return self.predictor.restore_units(params)

    def remove_units(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Centre the intercept."""
        for one in self.spreads.values():
            params |= one.outer(one.predictor.remove_units(one.inner(params)))
        return self.predictor.remove_units(params)

    def buffers(self) -> dict[str, Tensor]:
        """The units of the data."""
        held = self.predictor.buffers()
        for name, one in self.spreads.items():
            held |= {f"{name}.{key}": value for key, value in one.predictor.buffers().items()}
        own = {name: getattr(self, name) for name in self.from_data}
        return held | {name: value for name, value in own.items() if value is not None}

    def with_buffers(self, buffers: Mapping[str, Tensor]) -> Self:
        """Return a copy with the units of the data that was saved."""
        restored = copy.copy(self)
        restored._declared = None
        restored.predictor = self.predictor.with_buffers(buffers)
        restored.spreads = {
            name: replace(one, predictor=one.predictor.with_buffers(under(buffers, f"{name}.")))
            for name, one in self.spreads.items()
        }
        vars(restored).update((name, buffers.get(name)) for name in self.from_data)
        return restored

    @property
    def unit(self) -> Tensor | None:
        """Spread of the predicted quantity in the data, once known."""
        return None if self.predictor.units is None else self.predictor.units.out_scale

    @property
    def has_only_tables(self) -> bool:
        """Whether the prediction is a table over discrete parents: no numeric parent, no network, no terms."""
        alone = not self.network and not self.predictor.family.continuous and self.terms is None
        return alone and not self.spreads and self.is_plain

    @property
    def is_affine(self) -> bool:
        """Whether predictions are affine in the numeric parents, and nothing else depends on these."""
        terms = self.predictor.terms
        return not self.network and not self.spreads and (terms is None or terms.is_affine) and self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether values are what they are, and rows kept whatever they are: then features and moments tell of them."""
        return True

    def centre_and_unit(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Where values are centred and how they are scaled before squares are taken: in them no digits are lost."""
        units = self.predictor.units
        zero = torch.zeros(self.dim).to(like)
        return (zero, zero + 1.0) if units is None else (units.out_shift.to(like), units.out_scale.to(like))

    def row_of(self, table: Tensor, parents: Parents, ndim: int) -> Tensor:
        """A table (R, rows, d) at these parents: (R, ..., d). A table of one row serves all of them."""
        config = None if table.shape[1] == 1 else configurations(self.family, parents)
        return expand_to(table[:, 0], ndim) if config is None else apply_linear(config, table)

    def summed(self, values: Tensor, rows: int, parents: Parents) -> Tensor:
        """Sums of ``values`` (N, d) by row of a table: (rows, d)."""
        config = None if rows == 1 else configurations(self.family, parents)
        return values.sum(0, keepdim=True) if config is None else sums_by_row(config, values)

    def pooled(self, values: Tensor, rows: int, parents: Parents, weight: Tensor, prior: float = 2.0) -> Tensor:
        """Weighted means of ``values`` (N, d) by row, each with ``prior`` rows' worth of the overall mean."""
        weight = weight.unsqueeze(-1)
        overall = (weight * values).sum(0) / weight.sum().clamp(min=1e-12)
        sums = self.summed(weight * values, rows, parents) + prior * overall
        return sums / (self.summed(weight, rows, parents) + prior)

    @property
    def own_axis(self) -> Axis:
        """The categories or coordinates of the node itself."""
        return Axis.of_values(self.family.node, self.space)

    def turned(self, params: Params, nodes: Collection[str], sign: Tensor) -> dict[str, Tensor] | None:
        """Turn the slopes of parents, which enter through the predictor alone, and the node as it says itself."""
        turned = self.turned_self(params, sign) if self.family.node in nodes else dict(params)
        if turned is None or self.spreads:
            return None
        return self.predictor.with_inputs_turned(turned, set(nodes) - {self.family.node}, sign)

    def relabelled(self, params: Params, nodes: Collection[str], order: Sequence[int]) -> dict[str, Tensor] | None:
        """As the axes say; not where a formula tells categories apart besides."""
        return None if self.spreads else super().relabelled(params, nodes, order)

    def turned_self(self, params: Params, sign: Tensor) -> dict[str, Tensor] | None:
        """Hook: parameters of the node times ``sign``, given its parents; None where there are none."""
        return None

    def slopes(self, params: Params, parent: str) -> Tensor | None:
        """The slopes of the first coordinate."""
        slopes = self.predictor.slopes_of(params, parent)
        return None if slopes is None else slopes[..., 0]


class Cellwise(Predicted):
    """A node whose coordinates are independent given the parents: what each cell is at a prediction and its tables.

    A subclass says so in three hooks, whose further arguments are what :meth:`Predicted.at` returns.

    Attributes:
        quantile: ``(noise, *at)``: the value of each cell that noise makes.
        log_density: ``(value, *at)``: the log-density of each cell.
        noise_of: ``(value, uniform, *at)``: the noise of each cell; of a whole interval the point at ``uniform``.
    """

    quantile: ClassVar[Callable[..., Tensor]]
    log_density: ClassVar[Callable[..., Tensor]]
    noise_of: ClassVar[Callable[..., Tensor]]

    @property
    def lines(self) -> int:
        """Through how many linear predictions alone the density reads the numeric parents; zero if it reads more."""
        return self.dim if self.is_affine else 0

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Cell by cell."""
        return self.quantile(noise, *self.at(params, parents, noise))

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """The sum over the cells that are seen."""
        return sum_cells(self.log_density(value, *self.at(params, parents, value)), mask)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """Cell by cell."""
        return self.noise_of(value, uniform, *self.at(params, parents, value))

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """Cell by cell."""
        return self.mean_at(*self.at(params, parents))

    def mean_at(self, line: Tensor, *beside: Tensor) -> Tensor:
        """Hook: the mean of each cell; the prediction."""
        return line


@dataclass(eq=False, repr=False, kw_only=True)
class Truncatable(Cellwise):
    r"""A number of which only rows between two limits were kept, ``truncated=(low, high)``; either may be None.

    .. math:: \log p = \log f(x) - \log (F(\mathrm{high}) - F(\mathrm{low}))

    Attributes:
        log_tails: ``(value, *at)``: logarithms of the mass below and above each cell.
        points: Of the Gauss-Hermite sum that is a mean between the limits.
    """

    truncated: Sequence[float | None] | None = None

    log_tails: ClassVar[Callable[..., tuple[Tensor, Tensor]]]
    points: ClassVar[int] = 64

    def __post_init__(self) -> None:
        """Refuse limits that are none."""
        super().__post_init__()
        if self.truncated is not None:
            try:
                between(*self.truncated)
            except (ModelError, TypeError):
                raise ModelError(
                    "truncated takes a lower and a larger upper limit, one of which may be None; "
                    f"got {self.truncated!r:.60}"
                ) from None

    def on_setup(self) -> None:
        """Refuse what no row shows."""
        super().on_setup()
        if self.truncated is not None and self.family.hidden:
            raise ModelError(f"node {self.family.node!r} is hidden: truncated is for values that rows show")

    @property
    def is_plain(self) -> bool:
        """Not between limits."""
        return self.truncated is None

    def log_mass(self, low: Tensor, high: Tensor, has_low: Tensor, has_high: Tensor, *at: Tensor) -> Tensor:
        """Logarithm of the mass between two ends, of which either may not be there."""
        (below, above), (below_high, above_high) = self.log_tails(low, *at), self.log_tails(high, *at)
        known = has_low & has_high & (high <= low)
        outside = torch.where(above < below, above_high - above, below - below_high)
        larger = torch.where(above < below, above, below_high)
        mass = larger + torch.log(-torch.expm1(torch.where(known, -1.0, outside).clamp(max=-1e-15)))
        one_sided = torch.where(has_low, above, torch.where(has_high, below_high, 0.0))
        return torch.where(has_low & has_high, mass, one_sided)

    def limits(self, like: Tensor, less: float = 0.0) -> Ends:
        """Both limits, and whether there are any; of counts half a count beyond, ``less`` so much."""
        half = 0.5 if self.space.is_countable else 0.0
        ends = [
            None if end is None else end + by - less
            for end, by in zip(self.truncated or (), (-half, half), strict=True)
        ]
        known = [torch.full_like(like, next(one for one in (end, *ends) if one is not None)) for end in ends]
        return (*known, *(torch.full_like(like, end is not None, dtype=torch.bool) for end in ends))  # type: ignore[return-value]

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Less the mass of what would have been kept; nothing is outside."""
        found = super().log_prob(params, value, parents, mask)
        if self.truncated is None:
            return found
        at = self.at(params, parents, value)
        low, high, *has = self.limits(at[0])
        outside = (has[0] & (value < low)) | (has[1] & (value > high))
        return found - sum_cells(torch.where(outside, torch.inf, self.log_mass(low, high, *has, *at)), mask)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Quantiles between the limits."""
        if self.truncated is None:
            return super().forward(params, parents, noise)
        at = self.at(params, parents, noise)
        return self.drawn_between(self.limits(at[0]), noise, *at)

    def levels(self, ends: Ends, *at: Tensor) -> tuple[Tensor, Tensor]:
        """The distribution function at both ends."""
        low, high, has_low, has_high = ends
        below, above = (torch.exp(self.log_tails(end, *at)[0]) for end in (low, high))
        return torch.where(has_low, below, 0.0), torch.where(has_high, above, 1.0)

    def drawn_between(self, ends: Ends, noise: Tensor, *at: Tensor) -> Tensor:
        """What noise makes between two ends."""
        first, last = self.levels(ends, *at)
        is_normal = self.noise_kind == "normal"
        level = torch.special.ndtr(noise) if is_normal else noise
        level = (first + level * (last - first)).clamp(1e-15, 1 - 1e-15)
        return self.quantile(torch.special.ndtri(level) if is_normal else level, *at)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """By the level between those of the limits."""
        noise = super().abduct(params, value, parents, uniform)
        if self.truncated is None:
            return noise
        at = self.at(params, parents, value)
        first, last = self.levels(self.limits(at[0]), *at)
        is_normal = self.noise_kind == "normal"
        level = (torch.special.ndtr(noise) if is_normal else noise) - first
        level = (level / (last - first)).clamp(0.0, 1.0)
        return torch.special.ndtri(level.clamp(1e-15, 1 - 1e-15)) if is_normal else level

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """That between the limits."""
        if self.truncated is None:
            return super().mean(params, parents)
        nodes, weights = (torch.from_numpy(one) for one in np.polynomial.hermite_e.hermegauss(self.points))
        noise = nodes if self.noise_kind == "normal" else torch.special.ndtr(nodes)
        at = [one.unsqueeze(-1) for one in self.at(params, parents)]
        return self.drawn_between(self.limits(at[0]), noise.to(at[0]), *at) @ (weights / weights.sum()).to(at[0])


@dataclass(eq=False, repr=False, kw_only=True)
class Censorable(Truncatable):
    r"""A number that may be known as an interval: with ``censored`` the node has two columns, its lower and upper end.

    .. math:: \log p = \log f(x) \text{ where both ends are } x, \quad \log (F(u) - F(l)) \text{ elsewhere}

    An end that is missing is none: a time that is only known to exceed the lower end has no upper end.
    """

    censored: bool = False

    def __post_init__(self) -> None:
        """Refuse intervals of vectors."""
        super().__post_init__()
        if self.censored and self.dim != 1:
            raise ModelError(f"a censored node has one number, known by two ends; got dim={self.dim}")
        if self.censored and self.truncated is not None:
            raise ModelError("a node is censored or truncated, not both")

    @property
    def space(self) -> Space:
        """Numbers, or intervals."""
        return Interval() if self.censored else super().space

    @property
    def own_axis(self) -> Axis:
        """The one number that is between the ends."""
        return Axis.of_coordinates([(self.family.node, Real())]) if self.censored else super().own_axis

    @property
    def is_plain(self) -> bool:
        """Not of intervals."""
        return super().is_plain and not self.censored

    def uncensored(self) -> Self:
        """The same node of the number itself."""
        plain = copy.copy(self)
        plain.censored = False
        return plain

    def on_scale(self, value: Tensor, parents: Parents, weight: Tensor) -> None:
        """By a number in each interval."""
        super().on_scale(self._inside(value), parents, weight)

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """By a number in each interval."""
        return super().start(self._inside(value), parents, weight)

    def _inside(self, value: Tensor) -> Tensor:
        """The middle of each interval; an end that was missing may have been filled with anything."""
        if not self.censored:
            return value
        low, high = value.split(1, -1)
        middle = torch.where(high > low, 0.5 * (low + high), low)
        return middle.clamp(min=torch.finfo(value.dtype).tiny) if self.space_kind is Positive else middle

    def as_value(self, number: Tensor) -> Tensor:
        """A number (..., 1) as a value of the node: both ends, where it has two."""
        return number.repeat_interleave(2, -1) if self.censored else number

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Numbers that are known."""
        return self.as_value(super().forward(params, parents, noise))

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """That of the number."""
        return self.as_value(super().mean(params, parents))

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """The density of a number, or the mass of an interval."""
        if not self.censored:
            return super().log_prob(params, value, parents, mask)
        low, high, has_low, has_high = self._ends(value, mask)
        at = self.at(params, parents, low)
        known = has_low & has_high & (high <= low)
        mass = self.log_mass(low, high, has_low, has_high, *at)
        return torch.where(known, self.log_density(low, *at), mass)[..., 0]

    def _ends(self, value: Tensor, mask: Tensor | None) -> Ends:
        """Both ends, where one is missing twice the other, and whether each is there (R, ..., 1)."""
        low, high = value.split(1, -1)
        has_low, has_high = (torch.ones_like(value) if mask is None else mask).bool().split(1, -1)
        if self.space_kind is Positive:  # zero is no end of what is positive
            has_low = has_low & (low > 0)
        fallback = torch.where(has_high, high, torch.ones_like(high))
        low = torch.where(has_low, low, fallback)
        return low, torch.where(has_high, high, low), has_low, has_high

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """The noise of the number, or of a random one in the interval."""
        if not self.censored:
            return super().abduct(params, value, parents, uniform)
        low, high, *_ = self._ends(value, None)
        at = self.at(params, parents, low)
        levels = [self.noise_of(end, uniform, *at) for end in (low, high)]
        return levels[0] + uniform * (levels[1] - levels[0])

    def complete(self, params: Params, value: Tensor, parents: Parents, mask: Tensor, noise: Tensor) -> Tensor:
        """Ends that are missing: a number that is drawn between those that are there."""
        if not self.censored:
            return super().complete(params, value, parents, mask, noise)
        drawn = self.drawn_between(self._ends(value, mask), noise, *self.at(params, parents, noise))
        return torch.where(mask, value, drawn)
