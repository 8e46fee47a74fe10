"""What a fit asks of a kind of data: its problem, and the layout of all parameters in the data's units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from otpdag.backward import AmortizedMap
from otpdag.data import Schema
from otpdag.engine.method import Method, SearchSchedule, likelihood, paper, transport
from otpdag.engine.search import Searcher, SearchResult
from otpdag.errors import DataError, ModelError
from otpdag.learned.sequence_map import BidirectionalMap
from otpdag.learned.smoother import SequenceMap
from otpdag.model import Model
from otpdag.problem import Problem
from otpdag.structure import Structure, Theta, pack, unpack


@dataclass(frozen=True)
class Layout:
    """What a flat point (R, P) means."""

    structure: Structure
    shapes: Mapping[str, tuple[int, ...]]
    maps: tuple[AmortizedMap, ...] = ()
    """Learned maps of rows, which a model keeps."""
    sequence_map: SequenceMap | BidirectionalMap | None = None
    """The learned map of sequences, which serves the fit alone."""

    @classmethod
    def of(
        cls,
        structure: Structure,
        phi: Theta | None = None,
        maps: tuple[AmortizedMap, ...] = (),
        sequence_map: SequenceMap | BidirectionalMap | None = None,
    ) -> Layout:
        """The model's own parameters, then those of its maps as they start (1, ...)."""
        shapes = {key: parameter.shape for key, parameter in structure.parameters().items()}
        shapes |= {key: tuple(value.shape[1:]) for key, value in (phi or {}).items()}
        return cls(structure, shapes, maps, sequence_map)

    def pack(self, theta: Theta) -> Tensor:
        """Parameters by name as a flat point."""
        return pack({key: theta[key] for key in self.shapes})


MANY_STARTS, FEW_STARTS = 16, 4
"""Of 95 fits with hidden categories and sixteen starts none was stuck; hidden numbers have few local optima."""


class DataKind(ABC):
    """One data set, adapted to a model. A subclass of your own is passed to :func:`otpdag.fit` in place of a table.

    It says which problem the data make, where a search for its minimum starts, and how long it takes; the search is the
    engine's, and so are checkpoints, progress and the result.
    """

    honours: ClassVar[frozenset[str]] = frozenset()
    """Which of ``weights``, ``robust`` and ``device`` a fit of such data can honour."""

    advice: ClassVar[Mapping[str, str]] = {}
    """What to do instead, where one of these is not honoured."""

    units: ClassVar[str] = "rows"
    """What is weighed, or left out."""

    most_restarts: ClassVar[int | None] = None
    """How many starts may train together; any number if None."""

    model: Model

    @property
    def structure(self) -> Structure:
        """Graph and mechanisms."""
        return self.model.structure

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows, steps, documents or images."""

    @abstractmethod
    def named(self, name: str) -> Method:
        """The method behind ``"auto"``, ``"likelihood"``, ``"transport"`` or ``"paper"``."""

    def check(self, method: Method) -> None:  # noqa: B027
        """Refuse a method that such data are not fitted by."""

    @abstractmethod
    def lay_out(self, method: Method, seed: int) -> Layout:
        """Adopt the data's units and declare all parameters."""

    @abstractmethod
    def problem(self, layout: Layout, method: Method, seed: int) -> Problem:
        """What is minimised."""

    @abstractmethod
    def starts(
        self, layout: Layout, problem: Problem, seed: int, numbers: Sequence[int], units: Tensor | None = None
    ) -> Tensor:
        """Where a search starts: a point for each of these numbers (R, P), the first of which is the plainest guess.

        ``units`` are the rows, or sequences, to look at; all of them (or enough of them) if left out.
        """

    def restarts(self, method: Method) -> int:
        """How many starts there are if the user does not say.

        Hidden categories and counts have many local optima, hidden numbers few, complete data none.
        """
        hidden = [self.structure.mechanisms[node].space for node in self.structure.graph.hidden]
        many = any(space.is_countable for space in hidden) and not method.optimiser.is_stochastic
        return (MANY_STARTS if many else FEW_STARTS) if hidden else 1

    def course(self, method: Method) -> SearchSchedule:
        """Sizes of the search's stages if the user does not say."""
        return SearchSchedule()

    def work(self, method: Method) -> int | None:
        """Roughly the size of the largest tensors of a step, by which threads are bounded; None leaves them alone."""
        return 1

    def check_robust(self, method: Method) -> None:  # noqa: B027
        """Refuse to leave out units where that has no meaning, of data that honour ``robust``."""

    def as_given(self, per_unit: NDArray[np.float64]) -> NDArray[np.float64]:
        """Numbers for each unit of the problem, in the order in which the units were given."""
        return per_unit

    def concluded(
        self, layout: Layout, ended: SearchResult, method: Method, searcher: Searcher
    ) -> tuple[Layout, SearchResult]:
        """What is done once the search has ended, with the parameters that there are then."""
        return layout, ended

    def adopt(self, layout: Layout, ended: SearchResult) -> None:
        """Leave the end in the model."""
        schema = Schema.of(self.model.spaces, self.model.graph)
        self.model.adopt(layout.structure, unpack(ended.point.cpu(), layout.shapes), schema, layout.maps)

    def notes(self, ended: SearchResult) -> list[str]:
        """What a user should know of the end, once it is adopted: what the data do not tell."""
        return []


def named_method(name: str) -> Method:
    """A method by its name."""
    named: dict[str, Callable[[], Method]] = {"paper": paper, "transport": transport, "likelihood": likelihood}
    if name not in named:
        raise ModelError(f"method must be 'auto', {', '.join(map(repr, named))} or a Method; got {name!r}")
    return named[name]()


def check_rows(structure: Structure, rows: int) -> None:
    """Refuse fewer rows than a node has slopes and other parameters."""
    needed = structure.rows_needed
    if rows <= needed:
        raise DataError(f"the table has {rows} rows; at least {needed + 1} are needed for this model")
