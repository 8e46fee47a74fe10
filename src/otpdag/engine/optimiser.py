"""What an optimiser is asked for, what it tells on its way, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

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
