"""Schedules: weights that change along a fit, as functions of the share of steps done."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Constant", "Cosine", "Linear", "Schedule"]

Schedule = Callable[[float], float]


@dataclass(frozen=True)
class Constant:
    """The same value throughout."""

    value: float

    def __call__(self, progress: float) -> float:
        """The value."""
        return self.value


@dataclass(frozen=True)
class Linear:
    """A straight line from ``start`` to ``end``, reached at the share ``until``.

    >>> Linear(0.3, 1.0, until=0.5)(0.25)
    0.65
    """

    start: float
    end: float
    until: float = 1.0

    def __call__(self, progress: float) -> float:
        """The value at a share of the steps."""
        return self.start + (self.end - self.start) * min(progress / self.until, 1.0)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from ``start`` to ``end``, for learning rates."""

    start: float
    end: float = 0.0

    def __call__(self, progress: float) -> float:
        """The value at a share of the steps."""
        return self.end + 0.5 * (self.start - self.end) * (1 + math.cos(math.pi * min(progress, 1.0)))
