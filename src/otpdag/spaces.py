"""Spaces: what values a node takes, how they are laid out in a tensor, and all that depends on their kind alone.

Every value in the library is a floating tensor of shape ``(R, ..., width)``: replicas first, the value's own
coordinates last. A category is a one-hot vector, so that a soft assignment and a hard one look alike.

No other module asks which space it has before it; it asks the space. A new kind of values says how many coordinates it
has, how they come from unconstrained numbers and which numbers it refuses; everything else follows or is inherited.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.errors import check_choice
from otpdag.numerics import one_hot

Array = NDArray[Any]
CostKind = Literal["squared", "smooth l1", "cross-entropy"]

SMALLEST_SPREAD = 1e-12  # spreads and positive numbers below this are taken for zero
SUM_TOLERANCE = 1e-6  # how far shares that a user gives may be from summing to one


class Space(ABC):
    """The set of values of one node.

    The defaults are those of numbers on a line.

    Attributes:
        holds: What a column of a table must hold, for messages.
        total: What the coordinates of every value sum to.
        is_discrete: Whether values are one of finitely many categories.
        is_countable: Whether values can be listed one after the other: categories and whole numbers.
        is_unbounded: Whether any number is a value, so that values may be shifted, stretched and turned round.
        is_skewed: Whether most columns of this kind have their long tail above.
        has_noise_when_relaxed: Whether a relaxed value could have come from noise, so that this can be abducted.
        kinds: All spaces by the name that a file calls them.
        cost: What rebuilding a value wrongly costs, unless a method says otherwise.
    """

    holds: ClassVar[str] = "finite numbers"
    total: ClassVar[float | None] = None

    is_discrete: ClassVar[bool] = False
    is_countable: ClassVar[bool] = False
    is_unbounded: ClassVar[bool] = False
    is_skewed: ClassVar[bool] = False
    has_noise_when_relaxed: ClassVar[bool] = True

    kinds: ClassVar[dict[str, type[Space]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__name__.startswith("_"):
            Space.kinds[cls.__name__] = cls

    # -- layout ----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of coordinates of one value."""

    @property
    def cells(self) -> int:
        """Number of table cells that hold one value, each of which may be missing on its own."""
        return self.width

    def spec(self) -> dict[str, Any]:
        """The space as plain data, for a file: its name and its sizes.

        >>> space_from(Real(2).spec())
        Real(dim=2)
        """
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {"kind": type(self).__name__, **sizes}

    # -- from tables and back --------------------------------------------------------------------------------------

    def outside(self, cells: Array) -> NDArray[np.bool_]:
        """Which numbers of a table's cells are no values."""
        return np.isinf(cells)

    def encode(self, cells: Array, dtype: torch.dtype = torch.float64) -> Tensor:
        """Values (N, width) from cells (N, cells), zeros where these are NaN; they may share the cells' memory."""
        gaps = cells.size and np.isnan(cells.min())
        return torch.from_numpy(np.where(np.isnan(cells), 0.0, cells) if gaps else cells).to(dtype)

    def decode(self, values: Array) -> Array:
        """Cells (N, cells) from values (N, width): numbers as they are, codes of categories; NaN where unknown."""
        return values

    def contains(self, value: Tensor) -> bool:
        """Whether all values (..., width) are of this space."""
        if not bool(torch.isfinite(value).all()) or bool(self.outside(value.detach().numpy()).any()):
            return False
        return self.total is None or float((value.sum(-1) - self.total).abs().max()) < SUM_TOLERANCE

    # -- unconstrained coordinates ---------------------------------------------------------------------------------

    @property
    def free_width(self) -> int:
        """Number of unconstrained coordinates of a value."""
        return self.width

    @abstractmethod
    def constrain(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """Map unconstrained coordinates (..., free_width) to a value; also the map's log-determinant.

        The latter coordinate by coordinate; where these depend on each other, only its sum has a meaning.
        """

    @abstractmethod
    def unconstrain(self, value: Tensor) -> Tensor:
        """Invert :meth:`constrain`; values at the edge are moved off it."""

    # -- values that stand for others ------------------------------------------------------------------------------

    def neutral(self) -> Tensor:
        """A value (width,) that favours nothing; it also stands where a cell is missing and will not be looked at."""
        return self.constrain(torch.zeros(self.free_width, dtype=torch.float64))[0]

    def example(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Random values (*shape, width) for checks."""
        return self.constrain(torch.randn(*shape, self.free_width, generator=generator, dtype=torch.float64))[0]

    def in_other_units(self, value: Tensor, unit: float) -> Tensor:
        """The same values in small units, where there are units: numbers of ten ``unit`` and more."""
        return value

    def position(self, value: Tensor) -> Tensor:
        """One number (...) for each value that tells where it lies, to put values in an order."""
        return value[..., 0]

    def central(self, draws: Tensor, dim: int) -> Tensor:
        """The value that stands for several draws along an axis."""
        return draws.mean(dim)

    def filled(self, value: Tensor, mask: Tensor, drawn: Tensor) -> Tensor:
        """Values with what is missing drawn."""
        return torch.where(mask, value, drawn)

    # -- comparing columns -----------------------------------------------------------------------------------------

    cost: ClassVar[CostKind] = "squared"

    def comparable(self, columns: Array) -> Array:
        """Columns (N, width) with mean zero and spread one, on a scale where rows can be compared."""
        return _standardised(columns)

    # -- guessing a hidden column ----------------------------------------------------------------------------------

    def from_scores(self, scores: Array) -> Array:
        """Values (N, width) that follow standardised scores (N, width), to start a hidden node from."""
        return self.constrain(torch.from_numpy(scores[:, : self.free_width]))[0].numpy()

    # -- listing values --------------------------------------------------------------------------------------------


def space_from(spec: Mapping[str, Any]) -> Space:
    """Read :meth:`Space.spec` again; a space of your own is known once its class is imported.

    >>> space_from({"kind": "Discrete", "size": 3})
    Discrete(size=3)
    """
    sizes = dict(spec)
    kind = sizes.pop("kind", None)
    check_choice("a space", kind, sorted(Space.kinds))
    return Space.kinds[kind](**sizes)


@dataclass(frozen=True)
class Vector(Space):
    """Vectors of ``dim`` numbers."""

    dim: int = 1

    @property
    def width(self) -> int:
        """Number of coordinates."""
        return self.dim


class _Line(Space):
    """Any numbers: nothing to constrain."""

    is_unbounded: ClassVar[bool] = True

    def constrain(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing to do."""
        return free, torch.zeros_like(free)

    def unconstrain(self, value: Tensor) -> Tensor:
        """Nothing to do."""
        return value

    def in_other_units(self, value: Tensor, unit: float) -> Tensor:
        """Shifted and stretched."""
        return unit * (10.0 + value)


@dataclass(frozen=True)
class Real(_Line, Vector):
    """Vectors of real numbers.

    >>> Real(3).width
    3
    """


@dataclass(frozen=True)
class Interval(_Line, Vector):
    """What is known of a number: that it lies between a lower and an upper end, which are equal if it is known.

    An end that is missing is none: above the lower one, or below the upper one, the number may be anywhere.

    >>> Interval().width
    2
    """

    holds: ClassVar[str] = "a lower end (.0) that is not above the upper end (.1)"
    is_unbounded: ClassVar[bool] = False

    dim: int = 2

    def outside(self, cells: Array) -> NDArray[np.bool_]:
        """Ends in the wrong order."""
        return np.broadcast_to(cells[..., :1] > cells[..., 1:], cells.shape) | np.isinf(cells)

    def filled(self, value: Tensor, mask: Tensor, drawn: Tensor) -> Tensor:
        """A cell that lacks an end becomes a number: one end drawn beside the other would be an interval of its own."""
        number = torch.where(mask.logical_not(), drawn, drawn.flip(-1))
        return torch.where(mask.all(-1, keepdim=True), value, number)

    def example(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Numbers that are known."""
        return torch.randn(*shape, 1, generator=generator, dtype=torch.float64).expand(*shape, 2)


class _Exponential(Vector):
    """Vectors whose unconstrained coordinates are logarithms, of ``smallest`` numbers at least."""

    is_skewed: ClassVar[bool] = True
    smallest: ClassVar[float]

    def constrain(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """Exponentials."""
        return torch.exp(free), free

    def unconstrain(self, value: Tensor) -> Tensor:
        """Logarithms."""
        return torch.log(value.clamp(min=self.smallest))


@dataclass(frozen=True)
class Positive(_Exponential):
    """Vectors of positive numbers."""

    holds: ClassVar[str] = "numbers above 0"
    smallest: ClassVar[float] = SMALLEST_SPREAD

    def outside(self, cells: Array) -> NDArray[np.bool_]:
        """Zero and less, and infinity."""
        return (cells <= 0) | np.isinf(cells)

    def in_other_units(self, value: Tensor, unit: float) -> Tensor:
        """Stretched."""
        return 10.0 * unit * value

    def comparable(self, columns: Array) -> Array:
        """Logarithms, standardised."""
        return _standardised(np.log(np.maximum(columns, SMALLEST_SPREAD)))

    def from_scores(self, scores: Array) -> Array:
        """Log-normal with a coefficient of variation of about a half."""
        return np.exp(0.5 * scores)


@dataclass(frozen=True)
class Unit(Vector):
    """Vectors of numbers strictly between zero and one."""

    holds: ClassVar[str] = "numbers strictly between 0 and 1"
    edge: ClassVar[float] = 1e-6

    def outside(self, cells: Array) -> NDArray[np.bool_]:
        """Zero and one and what lies beyond."""
        return (cells <= 0) | (cells >= 1)

    def constrain(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """The logistic function."""
        log_det = torch.nn.functional.logsigmoid(free) + torch.nn.functional.logsigmoid(-free)
        return torch.sigmoid(free), log_det

    def unconstrain(self, value: Tensor) -> Tensor:
        """Logits."""
        return torch.logit(value.clamp(self.edge, 1 - self.edge))


@dataclass(frozen=True)
class Simplex(Vector):
    """Probability vectors: non-negative coordinates that sum to one."""

    holds: ClassVar[str] = "shares from 0 to 1"
    total: ClassVar[float | None] = 1.0
    edge: ClassVar[float] = 1e-9

    def outside(self, cells: Array) -> NDArray[np.bool_]:
        """Negative numbers, and more than all."""
        return (cells < 0) | (cells > 1 + SUM_TOLERANCE)

    @property
    def free_width(self) -> int:
        """The last coordinate follows from the others."""
        return self.width - 1

    def constrain(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """A softmax with zero for the last coordinate."""
        log_value = torch.log_softmax(torch.cat([free, torch.zeros_like(free[..., :1])], -1), -1)
        return torch.exp(log_value), log_value[..., :-1] + log_value[..., -1:] / free.shape[-1]

    def unconstrain(self, value: Tensor) -> Tensor:
        """Log-ratios to the last coordinate."""
        logs = torch.log(value.clamp(min=self.edge))
        return logs[..., :-1] - logs[..., -1:]

    def from_scores(self, scores: Array) -> Array:
        """A softmax that leaves most vectors with one or two large coordinates."""
        weights = np.exp(1.5 * scores)
        return weights / weights.sum(1, keepdims=True)


@dataclass(frozen=True)
class Count(_Exponential):
    """Vectors of non-negative integers, relaxed to positive numbers where a learned map draws them.

    Attributes:
        smallest: What a count of zero is taken for where its logarithm is needed.
    """

    holds: ClassVar[str] = "whole numbers of at least 0 and at most 7e10"
    is_countable: ClassVar[bool] = True
    has_noise_when_relaxed: ClassVar[bool] = False
    cost: ClassVar[CostKind] = "smooth l1"
    smallest: ClassVar[float] = 0.3

    def outside(self, cells: Array) -> NDArray[np.bool_]:
        """Negative numbers, fractions, and counts beyond the largest rate, whose differences are no longer exact."""
        return (cells < 0) | (cells != np.floor(cells)) | (cells > 7e10)

    def neutral(self) -> Tensor:
        """Zero."""
        return torch.zeros(self.width, dtype=torch.float64)

    def example(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Numbers around three."""
        normal = torch.randn(*shape, self.width, generator=generator, dtype=torch.float64)
        return torch.exp(0.5 * normal + 1).round()

    def central(self, draws: Tensor, dim: int) -> Tensor:
        """The median, which is a count."""
        return draws.median(dim).values

    def comparable(self, columns: Array) -> Array:
        """Square roots, standardised."""
        return _standardised(np.sqrt(np.maximum(columns, 0)))

    def from_scores(self, scores: Array) -> Array:
        """Whole numbers with the mean and the spread of a Poisson variable of mean three."""
        return np.maximum(np.round(3 + 1.7 * scores), 0.0)


@dataclass(frozen=True)
class Discrete(Space):
    """One of ``size`` categories, as a one-hot vector.

    >>> Discrete(4).width, Discrete(4).cells
    (4, 1)
    """

    is_discrete: ClassVar[bool] = True
    is_countable: ClassVar[bool] = True
    cost: ClassVar[CostKind] = "cross-entropy"

    size: int

    @property
    def width(self) -> int:
        """Length of the one-hot vector."""
        return self.size

    cells: ClassVar[int] = 1

    def outside(self, cells: Array) -> NDArray[np.bool_]:
        """Numbers that are not the code of a category."""
        return (cells < 0) | (cells >= self.size) | (cells != np.floor(cells))

    def encode(self, cells: Array, dtype: torch.dtype = torch.float64) -> Tensor:
        """One-hot vectors of codes; all zeros where these are NaN."""
        codes = np.where(self.outside(cells), -1, cells)[..., 0]
        return one_hot(torch.from_numpy(codes).long(), self.size, dtype)

    def decode(self, values: Array) -> Array:
        """The code of the largest entry; NaN where there is none."""
        known = ~np.isnan(values).any(1) & (values != 0).any(1)
        codes = np.where(np.isnan(values), -np.inf, values).argmax(1)
        return np.where(known, codes, np.nan)[:, None]

    def contains(self, value: Tensor) -> bool:
        """One-hot vectors only."""
        return bool(((value == 0) | (value == 1)).all() and (value.sum(-1) == 1).all())

    def constrain(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest category; there is no density."""
        return torch.nn.functional.one_hot(free.argmax(-1), self.size).to(free), torch.zeros_like(free)

    def unconstrain(self, value: Tensor) -> Tensor:
        """The vector itself."""
        return value

    def neutral(self) -> Tensor:
        """All categories alike."""
        return torch.full((self.size,), 1 / self.size, dtype=torch.float64)

    def example(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """All categories alike."""
        index = torch.randint(self.size, shape, generator=generator)
        return torch.nn.functional.one_hot(index, self.size).double()

    def position(self, value: Tensor) -> Tensor:
        """The expected number of the category."""
        return (value * torch.arange(self.size).to(value)).sum(-1)

    def comparable(self, columns: Array) -> Array:
        """Centred, with a total spread of one, as one column has."""
        return (columns - columns.mean(0)) / np.sqrt(max(float(columns.var(0).sum()), SMALLEST_SPREAD))


@dataclass(frozen=True)
class Image(_Line):
    """Images, channels first, flattened in a batch.

    >>> Image(3, 32, 32).width
    3072
    """

    channels: int
    height: int
    width_px: int

    @property
    def width(self) -> int:
        """Number of pixels times channels."""
        return self.channels * self.height * self.width_px


def _standardised(columns: Array) -> Array:
    """Columns with mean zero and spread one; a constant column becomes zeros."""
    spread = columns.std(0)
    return (columns - columns.mean(0)) / np.where(spread > SMALLEST_SPREAD, spread, 1.0)
