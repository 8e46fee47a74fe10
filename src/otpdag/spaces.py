"""Spaces: what values a node takes, and how they are laid out in a tensor.

Every value in the library is a floating tensor of shape ``(R, ..., width)``: replicas first, the value's own
coordinates last. A category is a one-hot vector, so that a soft assignment and a hard one look alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

__all__ = ["Count", "Discrete", "Image", "Positive", "Real", "Simplex", "Space", "Unit"]

Support = Literal["real", "positive", "unit", "simplex", "discrete", "count"]


class Space(ABC):
    """The set of values of one node."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of coordinates of one value."""

    @property
    @abstractmethod
    def support(self) -> Support:
        """What one coordinate may be."""

    @property
    def cells(self) -> int:
        """Number of table cells that hold one value, each of which may be missing on its own."""
        return self.width

    @property
    def is_discrete(self) -> bool:
        """Whether values are one of finitely many categories."""
        return False


@dataclass(frozen=True)
class Real(Space):
    """Vectors of real numbers.

    >>> Real(3).width
    3
    """

    dim: int = 1

    @property
    def width(self) -> int:
        """Number of coordinates."""
        return self.dim

    @property
    def support(self) -> Support:
        """Any real number."""
        return "real"


@dataclass(frozen=True)
class Positive(Real):
    """Vectors of positive numbers."""

    @property
    def support(self) -> Support:
        """Numbers above zero."""
        return "positive"


@dataclass(frozen=True)
class Unit(Real):
    """Vectors of numbers strictly between zero and one."""

    @property
    def support(self) -> Support:
        """Numbers in (0, 1)."""
        return "unit"


@dataclass(frozen=True)
class Simplex(Real):
    """Probability vectors: non-negative coordinates that sum to one."""

    @property
    def support(self) -> Support:
        """Non-negative numbers that sum to one."""
        return "simplex"


@dataclass(frozen=True)
class Count(Real):
    """Vectors of non-negative integers."""

    @property
    def support(self) -> Support:
        """Zero, one, two, and so on."""
        return "count"


@dataclass(frozen=True)
class Discrete(Space):
    """One of ``size`` categories, as a one-hot vector.

    >>> Discrete(4).width, Discrete(4).cells
    (4, 1)
    """

    size: int

    @property
    def width(self) -> int:
        """Length of the one-hot vector."""
        return self.size

    @property
    def cells(self) -> int:
        """A category stands in one cell."""
        return 1

    @property
    def support(self) -> Support:
        """A category."""
        return "discrete"

    @property
    def is_discrete(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Image(Space):
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

    @property
    def support(self) -> Support:
        """Any real number."""
        return "real"
