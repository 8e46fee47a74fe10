"""Parameters in natural units: their supports, how a user fixes, starts or ties them, and what their axes run over.

By its axes tables name a parameter's numbers, and labels can be exchanged. Files hold what a user gave as plain data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.errors import ModelError, check_number
from otpdag.numerics import Flags
from otpdag.spaces import Space, space_from


class Support:
    """A bijection between an unconstrained tensor and a parameter in its natural units; as it is, of real numbers."""

    name = "a finite number"

    def natural(self, raw: Tensor) -> Tensor:
        """Map an unconstrained tensor to natural units."""
        return raw

    def raw(self, natural: Tensor) -> Tensor:
        """Invert :meth:`natural`."""
        return natural

    def holds(self, value: Tensor) -> Tensor:
        """Which finite numbers lie in the support."""
        return torch.ones_like(value, dtype=torch.bool)

    def check(self, value: Tensor) -> bool:
        """Whether all of ``value`` lies in the support."""
        return bool(torch.isfinite(value).all() and self.holds(value).all())


class _Positive(Support):
    name = "a number above zero"
    # either way: the exponential overflows long before a double runs out of room for any sensible parameter
    most_logarithm = 60.0

    def natural(self, raw: Tensor) -> Tensor:
        return torch.exp(raw.clamp(-self.most_logarithm, self.most_logarithm))

    def raw(self, natural: Tensor) -> Tensor:
        return torch.log(natural.clamp(min=1e-26))

    def holds(self, value: Tensor) -> Tensor:
        return value > 0


class Floored(_Positive):
    """Numbers above ``floor``, one or an array of them: the root of its square and that of a positive number.

    >>> Floored(3.0).natural(torch.log(torch.tensor([4.0])))
    tensor([5.])
    """

    def __init__(self, floor: float | Tensor) -> None:
        self.floor = torch.as_tensor(floor, dtype=torch.float64)

    def natural(self, raw: Tensor) -> Tensor:
        """Add the squares."""
        return torch.sqrt(super().natural(raw) ** 2 + self.floor.to(raw) ** 2)

    def raw(self, natural: Tensor) -> Tensor:
        """Subtract them; what lies at the floor comes back a sliver above it."""
        excess = natural**2 - self.floor.to(natural) ** 2
        return super().raw(excess.maximum(1e-12 * natural**2).sqrt())


class _Unit(Support):
    name = "a number between zero and one"

    def natural(self, raw: Tensor) -> Tensor:
        return torch.sigmoid(raw)

    def raw(self, natural: Tensor) -> Tensor:
        return torch.logit(natural.clamp(1e-9, 1 - 1e-9))

    def holds(self, value: Tensor) -> Tensor:
        return (value >= 0) & (value <= 1)


class _Simplex(Support):
    name = "non-negative numbers that sum to one"

    def natural(self, raw: Tensor) -> Tensor:
        return torch.softmax(raw, -1)

    def raw(self, natural: Tensor) -> Tensor:
        logits = torch.log(natural.clamp(min=1e-12))
        return logits - logits.mean(-1, keepdim=True)

    def holds(self, value: Tensor) -> Tensor:
        return (value >= 0) & ((value.sum(-1, keepdim=True) - 1).abs() < 1e-6)


class _Increasing(Support):
    name = "numbers each larger than the one before"

    def natural(self, raw: Tensor) -> Tensor:
        return torch.cat([raw[..., :1], POSITIVE.natural(raw[..., 1:])], -1).cumsum(-1)

    def raw(self, natural: Tensor) -> Tensor:
        return torch.cat([natural[..., :1], POSITIVE.raw(natural.diff(dim=-1))], -1)

    def holds(self, value: Tensor) -> Tensor:
        return torch.nn.functional.pad(value.diff(dim=-1), (1, 0), value=1.0) > 0


class Between(Support):
    """Numbers above ``low``, below ``high``, both or, where neither is finite, any in their ``unit``.

    Either may be an array, with bounds of each entry alone; None is no bound.

    >>> Between(2.0, 4.0).natural(torch.zeros(1)), Between(2.0, None).natural(torch.zeros(1))
    (tensor([3.]), tensor([3.]))
    """

    def __init__(self, low: float | Tensor | None, high: float | Tensor | None, unit: Tensor | None = None) -> None:
        ends = (-torch.inf if low is None else low, torch.inf if high is None else high)
        self.low, self.high = (torch.as_tensor(end, dtype=torch.float64) for end in ends)
        self.unit = torch.ones((), dtype=torch.float64) if unit is None else unit
        sides = [(word, end) for word, end in (("above", low), ("below", high)) if end is not None]
        named = [f"{word} {end:g}" for word, end in sides if not isinstance(end, Tensor)]
        self.name = f"a number {' and '.join(named)}" if named else "numbers inside their bounds"

    def _sides(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Bounds, zero where there is none, which there are, and units."""
        has_low, has_high = self.low.isfinite(), self.high.isfinite()
        ends = (end.where(has, 0.0).to(like) for end, has in ((self.low, has_low), (self.high, has_high)))
        return (*ends, has_low, has_high, self.unit.to(like))  # type: ignore[return-value]

    def natural(self, raw: Tensor) -> Tensor:
        """A logistic curve between two bounds, an exponential beyond one."""
        low, high, has_low, has_high, unit = self._sides(raw)
        beyond = unit * POSITIVE.natural(raw)
        beyond = torch.where(has_low, low + beyond, torch.where(has_high, high - beyond, unit * raw))
        return torch.where(has_low & has_high, low + (high - low) * torch.sigmoid(raw), beyond)

    def raw(self, natural: Tensor) -> Tensor:
        """Invert :meth:`natural`; what lies at a bound comes back a sliver inside."""
        low, high, has_low, has_high, unit = self._sides(natural)
        within = torch.where(has_low & has_high, (natural - low) / (high - low), 0.5)
        beyond = POSITIVE.raw(torch.where(has_low, natural - low, high - natural) / unit)
        beyond = torch.where(has_low | has_high, beyond, natural / unit)
        return torch.where(has_low & has_high, torch.logit(within, eps=1e-9), beyond)

    def holds(self, value: Tensor) -> Tensor:
        """Which lie inside."""
        return (value > self.low.to(value)) & (value < self.high.to(value))

    def inside(self, value: Tensor) -> Tensor:
        """A place to start from: where the value is, or well inside the bound that it is beyond."""
        low, high, has_low, has_high, unit = self._sides(value)
        edge = 0.01 * (high - low)
        sign, bound = torch.where(has_low, 1.0, -1.0).to(value), torch.where(has_low, low, high)
        beyond = sign * (value - bound)
        beyond = bound + sign * torch.where(beyond > 0, beyond, 0.1 * beyond.abs() + 1e-3 * unit)
        within = value.minimum(high - edge).maximum(low + edge)
        return torch.where(has_low & has_high, within, torch.where(has_low | has_high, beyond, value))

    def at_bound(self, value: float, place: int, least: float = 1e-3) -> bool:
        """Whether the entry at a place is so close to one of its bounds."""
        low, high, unit = (float(one.flatten()[place % one.numel()]) for one in (self.low, self.high, self.unit))
        return any(abs(value - end) < least * max(unit, abs(end)) for end in (low, high) if abs(end) < math.inf)


REAL, POSITIVE, ABOVE_ONE, UNIT, SIMPLEX = Support(), _Positive(), Between(1.0, None), _Unit(), _Simplex()
INCREASING = _Increasing()


@dataclass(frozen=True)
class Fixed:
    """A parameter held at ``value``; a plain number or array given to a mechanism means this.

    Of slopes some may be held and others learned: the value of these is NaN.

    Attributes:
        ties: Places of learned entries, with the names that they share with entries elsewhere.
        bounds: Places of learned entries, with the bounds between which they are.
    """

    value: ArrayLike
    ties: tuple[tuple[int, str], ...] = ()
    bounds: tuple[tuple[int, Bounded], ...] = ()


@dataclass(frozen=True)
class Start:
    """A parameter that is learned from ``value`` on."""

    value: ArrayLike


@dataclass(frozen=True)
class Tied:
    """A parameter shared by every mechanism that names the same tie."""

    name: str


@dataclass(frozen=True)
class Bounded:
    """A real parameter that is learned between bounds, either of which may be None."""

    low: float | None
    high: float | None


@dataclass(frozen=True)
class Formula:
    """A positive parameter whose logarithm terms of the parents predict; a string means this."""

    text: str


@dataclass(frozen=True)
class Ridge:
    """A parameter that is learned under a normal prior: mean ``centre``, precision ``penalty``, None if rows say it."""

    penalty: float | Tensor | None
    centre: float = 0.0
    named: ClassVar[str] = "ridge"
    support: ClassVar[Support] = REAL

    def log_density(self, value: Tensor) -> Tensor:
        """Of natural values (R, ...), up to a constant: (R,)."""
        penalty = 0.0 if self.penalty is None else self.penalty
        return -0.5 * (penalty * (value - self.centre).square()).flatten(1).sum(-1)


@dataclass(frozen=True)
class PseudoCounts:
    """Probabilities that are learned as if every cell had been seen so many times more: all alike, or by category."""

    penalty: float | Tensor
    named: ClassVar[str] = "pseudo_counts"
    support: ClassVar[Support] = SIMPLEX

    def log_density(self, value: Tensor) -> Tensor:
        """Of natural values (R, ...), up to a constant: (R,)."""
        return (self.penalty * torch.log(value.clamp(min=1e-12))).flatten(1).sum(-1)


Prior = Ridge | PseudoCounts
Setting = Fixed | Start | Tied | Bounded | Formula | Prior | None
SettingLike = ArrayLike | Setting  # what a user may pass for a parameter: nothing, a setting, or a value to fix it at


def start(value: ArrayLike) -> Start:
    """Learn a parameter, starting at ``value``: ``m.Normal(scale=otp.start(0.5))``."""
    as_setting(value)  # refuses what is no number
    return Start(value)


def tie(name: str) -> Tied:
    """Share a parameter between nodes, ``m.Normal(scale=otp.tie("s"))``, or a slope, ``weight=[otp.tie("k"), 1]``."""
    if not isinstance(name, str) or not name:
        raise ModelError(f"a tie must have a name; got {name!r:.60}")
    return Tied(name)


def between(low: float | None, high: float | None) -> Bounded:
    """Learn a parameter between bounds: ``m.Normal(weight=otp.between(0, None))`` has slopes above zero."""
    ends = [one for one in (low, high) if one is not None]
    real = all(isinstance(one, int | float | np.number) and np.isfinite(one) for one in ends)
    if not ends or not real or ends != sorted(set(ends)):
        raise ModelError(
            f"otp.between takes a lower and a larger upper bound, one of which may be None; got {low}, {high}"
        )
    return Bounded(*(None if one is None else float(one) for one in (low, high)))


def ridge(penalty: float | None = None, centre: float = 0.0) -> Ridge:
    r"""Draw a parameter towards ``centre`` by a normal prior: ``m.Normal(weight=otp.ridge(2.0))``.

    Estimates are then those of the largest posterior density: half of ``penalty`` times the squared distance is taken
    off the log-likelihood, so that ``penalty`` is one over the prior variance. Zero is maximum likelihood. Left out, of
    slopes, the restricted likelihood chooses it for each term, or for all parents alike in units of their spread.
    """
    check_number("centre", centre)
    return Ridge(None if penalty is None else _penalty(penalty, "ridge"), float(centre))


def pseudo_counts(count: float) -> PseudoCounts:
    """Estimate probabilities as if every cell of the table had been seen ``count`` times more, a Dirichlet prior.

    ``m.Categorical(3, probs=otp.pseudo_counts(0.5))``; zero is maximum likelihood.
    """
    return PseudoCounts(_penalty(count, "pseudo_counts"))


def _penalty(value: float, named: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value < np.inf:
        raise ModelError(f"otp.{named} takes a number of at least 0; got {value!r:.60}")
    return float(value)


def as_setting(value: object) -> Setting:
    """Read what a user passed for a parameter."""
    if value is None or isinstance(value, Fixed | Start | Tied | Bounded | Formula | Ridge | PseudoCounts):
        return value
    if isinstance(value, str) and value.lstrip().startswith("~"):
        return Formula(value)
    try:
        entries = np.array(value, dtype=object) if isinstance(value, list | tuple) else np.empty(0)
        told = [(place, one) for place, one in enumerate(entries.flat) if isinstance(one, Tied | Bounded)]
        for place, _ in told:
            entries.flat[place] = np.nan
        ties = tuple((place, one.name) for place, one in told if isinstance(one, Tied))
        bounds = tuple((place, one) for place, one in told if isinstance(one, Bounded))
        return Fixed(np.asarray(entries if told else value, dtype=float), ties, bounds)
    except (TypeError, ValueError, OverflowError):
        raise ModelError(
            f"a parameter must be numbers, otp.start(...), otp.tie(...) or a prior; got {value!r:.60}"
        ) from None


@dataclass(frozen=True)
class Parameter:
    """One parameter of one mechanism: its shape (without the replica axis), support and setting.

    ``origin`` and ``unit`` scale the raw tensor to the data, so that the optimiser sees numbers near one
    whatever the columns' units: ``natural = origin + unit * raw`` on the real line, ``unit * exp(raw)`` above
    zero. A tied parameter ignores them: nodes that share a raw tensor must share the natural value.

    Attributes:
        in_part: Whether single entries may be given or tied, the others NaN.
        bent: Precision (rows, rows) of a normal prior of each column, for instance of how a curve bends.
        rising: Entries that are above zero (1), below it (-1) or neither, as those of a monotone effect.
        most_spread: Entries over which a single given number is spread out: 32 MB.
    """

    shape: tuple[int, ...]
    support: Support = REAL
    setting: SettingLike = None
    origin: Tensor | None = None
    unit: Tensor | None = None
    init_scale: float = 0.0
    in_part: bool = False
    bent: Tensor | None = None
    rising: Tensor | None = None
    _cache: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    most_spread: ClassVar[int] = 1 << 22

    def __post_init__(self) -> None:
        """Read the setting; what is tied has no units."""
        object.__setattr__(self, "setting", as_setting(self.setting))
        if isinstance(self.setting, Tied | Bounded):
            object.__setattr__(self, "origin", None)
            object.__setattr__(self, "unit", None)
        entries = self.setting.bounds if isinstance(self.setting, Fixed) else ()
        if isinstance(self.setting, Bounded):
            if self.support is not REAL:
                raise ModelError(f"otp.between is for any real number; the parameter must be {self.support.name}")
            object.__setattr__(self, "support", Between(self.setting.low, self.setting.high))
        if isinstance(self.setting, Fixed) and (self.setting.ties or entries):
            size = np.size(self.setting.value)
            if not self.in_part or size != prod(self.shape):
                raise ModelError(
                    f"entries can be tied or bounded of slopes, all of which are told: {prod(self.shape)}; got {size}"
                )
        if entries or self.rising is not None:
            object.__setattr__(self, "support", self._between(entries))
            object.__setattr__(self, "unit", None)
        if isinstance(self.setting, Formula):
            raise ModelError(f"a parameter must be numbers here, not the formula {self.setting.text!r:.60}")
        if isinstance(self.setting, Ridge | PseudoCounts) and self.setting.support is not self.support:
            fits, own = self.setting.support.name, self.support.name
            raise ModelError(f"otp.{self.setting.named} is a prior of {fits}; the parameter must be {own}")

    def _between(self, entries: Sequence[tuple[int, Bounded]]) -> Between:
        """The support in which single entries have bounds; it keeps the unit of the others."""
        if self.setting is not None and not isinstance(self.setting, Fixed):
            raise ModelError("slopes of a monotone effect have no prior, tie or bounds but single ones, in a list")
        sign = torch.zeros(self.shape).double() if self.rising is None else self.rising.expand(self.shape)
        low, high = torch.where(sign > 0, 0.0, -torch.inf).flatten(), torch.where(sign < 0, 0.0, torch.inf).flatten()
        for place, one in entries:
            low[place] = -torch.inf if one.low is None else one.low
            high[place] = torch.inf if one.high is None else one.high
        unit = None if self.unit is None else self.unit.expand(self.shape)
        return Between(low.reshape(self.shape), high.reshape(self.shape), unit)

    def log_prior(self, value: Tensor) -> Tensor | None:
        """Log-density of its prior at natural values (R, ...), up to a constant; None if it has none."""
        if not self.learned:
            return None
        told = self.setting.log_density(value) if isinstance(self.setting, Ridge | PseudoCounts) else None
        if self.bent is None:
            return told
        bent = -0.5 * (value * (self.bent.to(value) @ value)).flatten(1).sum(-1)
        return bent if told is None else told + bent

    def pull(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Precision (rows, rows) of the normal prior of a column, and its product with the mean, if there is one."""
        rows, columns = self.shape
        if not isinstance(self.setting, Ridge) and self.bent is None:
            return None
        told = self.setting if isinstance(self.setting, Ridge) else Ridge(0.0)
        penalty = told.penalty if isinstance(told.penalty, float) else 0.0
        matrix, right = penalty * torch.eye(rows).to(like), torch.full((columns, rows), penalty * told.centre).to(like)
        return matrix if self.bent is None else matrix + self.bent.to(like), right

    @property
    def learned(self) -> bool:
        """Whether the optimiser moves it, or some of it."""
        return not isinstance(self.setting, Fixed) or self.is_given_in_part

    @property
    def is_given_in_part(self) -> bool:
        """Whether some of its entries are fixed and others learned."""
        if not self.in_part or not isinstance(self.setting, Fixed):
            return False
        unknown = np.isnan(np.asarray(self.setting.value, dtype=float))
        return bool(self.setting.ties or self.setting.bounds) or bool(unknown.any() and not unknown.all())

    @property
    def is_bounded(self) -> bool:
        """Whether some of its entries have bounds, so that no equations have their solution."""
        return isinstance(self.support, Between)

    @property
    def ties(self) -> tuple[tuple[int, str], ...]:
        """Places of entries that are shared, and their names."""
        if isinstance(self.setting, Tied):
            return tuple((place, self.setting.name) for place in range(prod(self.shape)))
        return self.setting.ties if isinstance(self.setting, Fixed) else ()

    def fixed_entries(self) -> Flags:
        """Which entries are held at a given value, in the parameter's shape."""
        if not isinstance(self.setting, Fixed):
            return np.zeros(self.shape, dtype=bool)
        return ~np.isnan(self.constant("", "").numpy())

    @property
    def has_value(self) -> bool:
        """Whether the user gave a value, to fix it at or to start from."""
        return isinstance(self.setting, Fixed | Start)

    def natural(self, raw: Tensor) -> Tensor:
        """Natural value of a raw tensor ``(R, *shape)``."""
        value = self.support.natural(raw)
        if self.unit is not None:
            value = value * self.unit.to(value)
        if self.origin is not None:
            value = value + self.origin.to(value)
        return self.with_fixed(value) if self.is_given_in_part else value

    def with_fixed(self, value: Tensor) -> Tensor:
        """Natural values (..., *shape) with those entries put in that are given."""
        if not isinstance(self.setting, Fixed):
            return value
        given = self.constant("", "").to(value)
        return torch.where(given.isnan(), value, given)

    @property
    def origin_and_unit(self) -> tuple[Tensor, Tensor]:
        """By which a value of the support becomes natural; zero and one where it is so already."""
        zero = torch.zeros((), dtype=torch.float64)
        return zero if self.origin is None else self.origin, zero + 1 if self.unit is None else self.unit

    def raw(self, natural: Tensor) -> Tensor:
        """Invert :meth:`natural`."""
        value = natural if self.origin is None else natural - self.origin.to(natural)
        return self.support.raw(value if self.unit is None else value / self.unit.to(value))

    def constant(self, node: str, name: str) -> Tensor:
        """The fixed or starting value, broadcast to the parameter's shape."""
        if self._cache is None:
            object.__setattr__(self, "_cache", self._checked_value(node, name))
        return self._cache  # type: ignore[return-value]

    def _checked_value(self, node: str, name: str) -> Tensor:
        if not isinstance(self.setting, Fixed | Start):
            raise TypeError(f"parameter {name!r} of node {node!r} has no given value")
        value = torch.as_tensor(np.array(self.setting.value, dtype=float, order="C"))
        if int(np.prod(self.shape, dtype=float)) > max(self.most_spread, value.numel()):
            raise ModelError(
                f"parameter {name!r} of node {node!r} has shape {self.shape}; a given value is spread over at most "
                f"{self.most_spread} entries"
            )
        if value.numel() == int(np.prod(self.shape)):
            value = value.reshape(self.shape)
        try:
            value = value.broadcast_to(self.shape).clone()
        except RuntimeError:
            raise ModelError(
                f"parameter {name!r} of node {node!r} must have a shape that broadcasts to {self.shape}; "
                f"got {tuple(value.shape)}"
            ) from None
        if not (REAL.check(value[~value.isnan()]) if self.is_given_in_part else self.support.check(value)):
            raise ModelError(
                f"parameter {name!r} of node {node!r} must be {self.support.name}; got {self.setting.value}"
            )
        return value


# names of nodes, as the mechanism's family has them, each with a number of categories or coordinates
Sizes = tuple[tuple[str, int], ...]
# factors of a product: a parent and one of its categories, or a number by its name
Feature = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class Axis:
    """One axis of a parameter: the categories of some nodes, the coordinates of some nodes, or nothing.

    Attributes:
        categories: One entry for each joint configuration of these nodes, the last node fastest. Exchanging two
            categories of a node must come to exchanging their entries, and to nothing else.
        coordinates: One entry for each coordinate of these nodes, side by side.
        features: One entry for each product of parents: their names, with a code where one category is meant.

    >>> from otpdag.spaces import Discrete, Real
    >>> Axis.of_categories([("season", Discrete(4)), ("town", Discrete(2))]).length
    8
    >>> Axis.of_coordinates([("height", Real()), ("place", Real(2))]).length
    3
    >>> Axis().length
    1
    """

    categories: Sizes = ()
    coordinates: Sizes = ()
    features: tuple[Feature, ...] = ()

    @classmethod
    def of_categories(cls, nodes: Sequence[tuple[str, Space]]) -> Axis:
        """All joint configurations of nodes that are categories."""
        return cls(categories=tuple((name, space.width) for name, space in nodes))

    @classmethod
    def of_coordinates(cls, nodes: Sequence[tuple[str, Space]]) -> Axis:
        """The coordinates of nodes that are numbers, side by side."""
        return cls(coordinates=tuple((name, space.width) for name, space in nodes))

    @classmethod
    def of_values(cls, node: str, space: Space) -> Axis:
        """The categories or the coordinates of one node, whichever it has."""
        return cls.of_categories([(node, space)]) if space.is_discrete else cls.of_coordinates([(node, space)])

    @property
    def length(self) -> int:
        """Number of entries along the axis."""
        if self.features:
            return len(self.features)
        if self.coordinates:
            return sum(size for _, size in self.coordinates)
        return prod(size for _, size in self.categories)

    def shown(self, node: str) -> list[int]:
        """The axes that a reader of a parameter of ``node`` sees: by parent, and none for a single coordinate of it.

        >>> Axis(categories=(("season", 4), ("town", 2))).shown("x"), Axis(coordinates=(("x", 1),)).shown("x")
        ([4, 2], [])
        """
        none = self in (Axis(), Axis(coordinates=((node, 1),)))
        return [] if none else [size for _, size in self.categories] or [self.length]

    @property
    def labelled_by(self) -> frozenset[str]:
        """Nodes whose categories the axis runs over."""
        return frozenset(name for name, _ in self.categories)

    def relabelled(self, value: Tensor, dim: int, nodes: Collection[str], order: Sequence[int]) -> Tensor:
        """Take the categories of ``nodes`` in another order along axis ``dim`` of ``value``.

        >>> axis = Axis(categories=(("season", 2), ("town", 2)))
        >>> axis.relabelled(torch.tensor([1, 2, 3, 4]), 0, {"town"}, [1, 0])
        tensor([2, 1, 4, 3])
        """
        if not self.labelled_by & set(nodes):
            return value
        split = value.unflatten(dim, [size for _, size in self.categories])
        index = torch.tensor(order, device=value.device)
        for place, (name, _) in enumerate(self.categories):
            if name in nodes:
                split = split.index_select(dim + place, index)
        return split.reshape(value.shape)


# -- plain data --------------------------------------------------------------------------------------------------------

FUNCTION = {"function": True}  # stands for code, which is never saved
# by what a file calls them: the class of a setting, and what makes one of its fields
_SETTINGS: dict[str, tuple[Any, Callable[..., Setting]]] = {
    "fixed": (Fixed, lambda value: as_setting(decode(value))),
    "start": (Start, lambda value: Start(np.asarray(value, dtype=float))),
    "tied": (Tied, tie),
    "between": (Bounded, between),
    "formula": (Formula, as_setting),
    "ridge": (Ridge, ridge),
    "pseudo_counts": (PseudoCounts, pseudo_counts),
}


def encode(value: Any, owner: type, name: str) -> Any:
    """An argument of a mechanism as plain data, for a file."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Fixed() | Start() | Tied() | Bounded() | Formula() | Ridge() | PseudoCounts():
            called = next(one for one, (kind, _) in _SETTINGS.items() if isinstance(value, kind))
            held = [np.asarray(value.value, dtype=float).tolist()] if isinstance(value, Fixed | Start) else None
            held = _without_nan([*vars(value).values()] if held is None else held)
            if isinstance(value, Fixed) and (value.ties or value.bounds):
                entries = np.array(value.value, dtype=object)
                for place, one in (*((place, Tied(tied)) for place, tied in value.ties), *value.bounds):
                    entries.flat[place] = encode(one, owner, name)
                held = _without_nan([entries.tolist()])
            return {called: held if len(held) > 1 else held[0]}
        case Space():
            sizes = value.spec()
            return {"space": sizes.pop("kind"), **sizes}
        case np.ndarray() | np.generic() | Tensor():
            return value.tolist()
        case list() | tuple():
            return [encode(item, owner, name) for item in value]
        case dict():
            return {"named": {str(key): encode(item, owner, name) for key, item in value.items()}}
        case _ if callable(value):
            return dict(FUNCTION)
    raise ModelError(f"{owner.__name__} cannot be saved: its {name!r} is {value!r}, neither plain data nor a function")


def _without_nan(value: Any) -> Any:
    """Numbers in nested lists, None for those that are NaN: entries to be learned."""
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def decode(value: Any) -> Any:
    """Invert :func:`encode`."""
    match value:
        case dict() if len(value) == 1 and next(iter(value)) in _SETTINGS:
            ((called, held),) = value.items()
            kind, made = _SETTINGS[called]
            return made(*held) if kind in (Bounded, Ridge) else made(held)
        case {"space": str(item), **sizes} if item in Space.kinds:
            return space_from({"kind": item, **{str(key): size for key, size in sizes.items()}})
        case list():
            return [decode(item) for item in value]
        case {"named": dict(items)}:
            return {key: decode(item) for key, item in items.items()}
        case dict():
            raise ModelError(f"a saved argument cannot be read: {value}")
    return value
