"""A table in parts that stay where they are: work goes to them, results come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

__all__ = ["LocalParts", "Parts", "Work"]

Work: TypeAlias = Callable[..., Any]
"""Called as ``work(part, number, *arguments)``; where parts are elsewhere, it must be a function that can be sent."""


class Parts(ABC):
    """Parts in a fixed order, numbered from zero."""

    @abstractmethod
    def each(self, work: Work, *arguments: Any) -> Iterator[Any]:
        """What ``work`` returns for every part, in their order."""

    @abstractmethod
    def mapped(self, work: Work, *arguments: Any, keep: bool) -> Parts:
        """The parts after some work: kept where they are or, to save memory, made anew whenever they are asked for."""

    def with_columns(self, names: Sequence[str], *, coded: bool = False) -> Parts:
        """The same with these columns only, where reading fewer costs less; ``coded`` allows categories for text."""
        return self


class LocalParts(Parts):
    """Parts that are made one after another in this process.

    >>> numbers = LocalParts(lambda: iter([1, 2, 3]))
    >>> list(numbers.mapped(lambda part, number: 10 * part, keep=True).each(lambda part, number, more: part + more, 5))
    [15, 25, 35]
    """

    def __init__(self, made: Callable[[], Iterator[Any]]) -> None:
        self.made = made

    def each(self, work: Work, *arguments: Any) -> Iterator[Any]:
        """One after another; only one part is held at a time."""
        for number, part in enumerate(self.made()):
            yield work(part, number, *arguments)

    def mapped(self, work: Work, *arguments: Any, keep: bool) -> LocalParts:
        """Kept from the first pass on, or made anew in every pass."""
        if not keep:
            return LocalParts(lambda: self.each(work, *arguments))
        return LocalParts(_Kept(lambda: self.each(work, *arguments)))


class _Kept:
    """Makes parts once, when they are first asked for."""

    def __init__(self, made: Callable[[], Iterator[Any]]) -> None:
        self.made = made
        self.parts: list[Any] | None = None

    def __call__(self) -> Iterator[Any]:
        if self.parts is None:
            self.parts = list(self.made())
        return iter(self.parts)
