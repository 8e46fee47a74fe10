"""A table in parts that stay where they are: work goes to them, results come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from otpdag.threads import in_order

__all__ = ["LocalParts", "Parts", "Work"]

Work: TypeAlias = Callable[..., Any]
"""Called as ``work(part, number, *arguments)``; where parts are elsewhere, it must be a function that can be sent."""

Step: TypeAlias = tuple[Work, tuple[Any, ...]]
"""Work and its arguments."""


class Parts(ABC):
    """Parts in a fixed order, numbered from zero."""

    @abstractmethod
    def each(self, work: Work, *arguments: Any) -> Iterator[Any]:
        """What ``work`` returns for every part, in their order."""

    @abstractmethod
    def mapped(self, work: Work, *arguments: Any, keep: bool) -> Parts:
        """The parts after some work: kept where they are or, to save memory, made anew whenever they are asked for."""

    @abstractmethod
    def only(self, numbers: Sequence[int]) -> Parts:
        """These parts, numbered anew in their order."""

    def with_columns(self, names: Sequence[str], *, coded: bool = False) -> Parts:
        """The same with these columns only, where reading fewer costs less; ``coded`` allows categories for text."""
        return self


class LocalParts(Parts):
    """Parts that are made one after another in this process, and worked on by the threads that a fit may use.

    >>> numbers = LocalParts(lambda: iter([1, 2, 3]))
    >>> list(numbers.mapped(lambda part, number: 10 * part, keep=True).each(lambda part, number, more: part + more, 5))
    [15, 25, 35]
    """

    def __init__(self, made: Callable[[], Iterator[Any]], works: tuple[Step, ...] = ()) -> None:
        self.made, self.works = made, works

    def each(self, work: Work, *arguments: Any) -> Iterator[Any]:
        """In their order; only as many parts are held at a time as there are threads, and one more."""
        works = (*self.works, (work, arguments))
        return in_order(partial(_through, works, part, number) for number, part in enumerate(self.made()))

    def mapped(self, work: Work, *arguments: Any, keep: bool) -> LocalParts:
        """Kept from the first pass on, or made anew in every pass."""
        if not keep:
            return LocalParts(self.made, (*self.works, (work, arguments)))
        return LocalParts(_Kept(lambda: self.each(work, *arguments)))

    def only(self, numbers: Sequence[int]) -> LocalParts:
        """Others are made, and dropped.

        >>> list(LocalParts(lambda: iter("abc")).only([0, 2]).each(lambda part, number: (part, number)))
        [('a', 0), ('c', 1)]
        """
        wanted = frozenset(numbers)
        return LocalParts(lambda: (part for at, part in enumerate(self.made()) if at in wanted), self.works)


def _through(works: Sequence[Step], part: Any, number: int) -> Any:
    """One part after all work on it."""
    for work, arguments in works:
        part = work(part, number, *arguments)
    return part


class _Kept:
    """Makes parts once, when they are first asked for."""

    def __init__(self, made: Callable[[], Iterator[Any]]) -> None:
        self.made = made
        self.parts: list[Any] | None = None

    def __call__(self) -> Iterator[Any]:
        if self.parts is None:
            self.parts = list(self.made())
        return iter(self.parts)
