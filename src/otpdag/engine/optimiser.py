"""What an optimiser is asked for, what it tells on its way, and where it ends.

How much work each stage of a search does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.problem import LossTerms, Problem

SMALL_IN_A_ROW = 3
"""Small changes in a row that make an end: one or two happen in narrow valleys."""

Memory = Mapping[str, Tensor]
"""What an optimiser has learned on its way, as named tensors: it can be handed on, and written to a file."""

State = TypeVar("State")


def as_memory(state: Any) -> dict[str, Tensor]:
    """The fields of a state that are tensors or whole numbers, by name."""
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: torch.as_tensor(value) for name, value in values.items() if isinstance(value, Tensor | int)}


def from_memory(kind: type[State], memory: Memory, /, **others: Any) -> State:
    """Invert :func:`as_memory`; fields that it left out are given."""
    held = [field for field in fields(kind) if field.name not in others]  # type: ignore[arg-type]
    own = {one.name: int(memory[one.name]) if one.type in (int, "int") else memory[one.name] for one in held}
    return kind(**own, **others)


def under(memory: Memory, prefix: str) -> dict[str, Tensor]:
    """What stands under a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in memory.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class Rivalry:
    """How replicas compete that run only until one of them is chosen.

    Args:
        margin: By how much a replica's loss may end above the best one's for its end to matter.
        same: Relative difference of losses below which two replicas count as having come to the same end.
    """

    margin: float
    same: float


@dataclass(frozen=True)
class Run:
    """One run of an optimiser: a part of a search.

    Args:
        problem: What to minimise.
        points: From where (R, P).
        steps: Most steps.
        tolerance: Relative change of the loss at which it has converged; the optimiser's own if left out.
        seeds: One for each replica's random stream.
        memory: What an earlier run learned, if this one goes on from it.
        is_over: Whether work before the first step shall be cut short: somebody asked for the end.
        rivalry: How replicas compete, if all but one are given up afterwards; every end matters if left out.
    """

    problem: Problem
    points: Tensor
    steps: int
    tolerance: float | None = None
    seeds: Sequence[int] = ()
    memory: Memory = field(default_factory=dict)
    is_over: Callable[[], bool] = lambda: False
    rivalry: Rivalry | None = None


@dataclass(frozen=True)
class Outcome:
    """Where a run ended, for each replica: point and loss, whether it converged, whether it met an infinite loss."""

    point: Tensor
    loss: Tensor
    converged: Tensor
    failed: Tensor
    steps: int
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """A step that was made: its number, terms, losses and points of all replicas, and how to write it down."""

    step: int
    terms: LossTerms
    losses: Tensor
    points: Tensor
    snapshot: Callable[[], Memory]
    """All that is needed to go on from here."""


Watch = Callable[[Progress], bool]
"""Called after every step; returning True stops the run."""


class Optimiser(Protocol):
    """Minimises a problem for all replicas at once."""

    @property
    def steps(self) -> int:
        """Most steps of the last, longest run."""
        ...

    @property
    def is_stochastic(self) -> bool:
        """Whether it draws minibatches and noise, so that losses of single steps do not compare."""
        ...

    def run(self, run: Run, watch: Watch, resume: Memory | None = None) -> Outcome:
        """Run a run, from its beginning or from a snapshot of it."""
        ...


FEWEST_ROWS = 300
"""Rows that a short run sees at least, however many starts there are: fewer would not tell them apart."""


@dataclass(frozen=True)
class SearchSchedule:
    """Sizes of the stages: short runs of all starts, finalists on (nearly) all rows, a part for the best, the finish.

    Args:
        short_rows: Most rows (steps of sequences) in the short runs.
        short_elements: Most starts times rows times points in the short runs; fewer than 300 rows are never taken.
        short_steps: Steps of the short runs; none, and all starts run to the end.
        short_share: Of a stochastic optimiser the share of its steps that the short runs take.
        short_tolerance: Relative change of the loss at which a start has settled there; the optimiser's if left out.
        short_moves: How often a problem may be moved in them.
        halving: Whether the better half of the starts goes on, round by round, until no more than the finalists are
            left: a round is as long as all before it together.
        finalists: How many continue on all rows.
        finalist_gap: By how much a start's loss may be above the best one's after the short runs, times the rows of
            these, for it to be a finalist: more is no chance. Any if left out.
        finalist_steps: For how many steps, before the best alone goes on.
        finalist_moves: How often their problem may be moved.
        finalist_rows: Most rows that they see; all if left out.
        part_rows: Rows on which the best settles before it sees everything, if there are more.
        part_tolerance: Relative change of the loss at which it has settled there; all rows then need no finer one.
        alternative_steps: Steps on a part of the rows of points that a problem suggests beside the optimum: of all of
            them, then twice of those that came near it.
        alternatives_kept: How many of them are left after each of these stages but the last, which leaves one.
        alternative_gap: By how much the loss of these may be above the optimum's then: what is further above comes
            back to it, or ends above (decision 0048).
        moves: How often the problem of the best may be moved to its end.
        small_gain: Relative fall of the loss that two moves in a row must reach, or the best of them is the end.
        same_loss: Relative difference below which two starts count as having reached the same optimum.
    """

    short_rows: int = 600
    short_elements: int = 150_000
    short_steps: int = 24
    short_share: float = 0.15
    short_tolerance: float | None = None
    short_moves: int = 0
    halving: bool = True
    finalists: int = 3
    finalist_gap: float | None = None
    finalist_steps: int = 15
    finalist_moves: int = 0
    finalist_rows: int | None = None
    part_rows: int | None = None
    part_tolerance: float = 1e-7
    alternative_steps: tuple[int, int, int] = (3, 6, 12)
    alternatives_kept: int = 3
    alternative_gap: float = 0.01
    moves: int = 12
    small_gain: float = 1e-5
    same_loss: float = 2e-4

    def __post_init__(self) -> None:
        """Refuse stages that make no sense."""
        for name in ("short_rows", "short_elements", "finalists", "finalist_steps", "alternatives_kept"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1; got {getattr(self, name)}")
        if min(self.alternative_steps) < 1:
            raise ModelError(f"alternative_steps must be at least 1; got {self.alternative_steps}")
        for name in ("short_steps", "short_moves", "finalist_moves", "moves"):
            if getattr(self, name) < 0:
                raise ModelError(f"{name} must not be negative; got {getattr(self, name)}")

    def rows_for(self, points: int) -> int:
        """Rows of the short runs, where a row of all starts has so many points."""
        return max(min(FEWEST_ROWS, self.short_rows), min(self.short_rows, self.short_elements // points))
