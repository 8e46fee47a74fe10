"""Expectation-maximisation, over-relaxed: closed-form updates that go further where they point, as long as it pays."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from otpdag.engine.optimiser import SMALL_IN_A_ROW, Leg, Memory, Outcome, Progress, Watch, as_memory, from_memory
from otpdag.errors import ModelError
from otpdag.objective import LossTerms

__all__ = ["EM"]


@dataclass(frozen=True)
class EM:
    r"""Closed-form updates, for problems that have them.

    With ``M`` the update and a pace :math:`p \geq 1`, a step goes to :math:`x + p (M(x) - x)` in unconstrained
    coordinates (Salakhutdinov & Roweis 2003). The pace grows as long as the loss falls, and is one again when it rises.

    Args:
        steps: Most steps.
        tolerance: Relative change of the loss, in three steps in a row, at which it has converged.
        growth: By what the pace grows in a step; one for plain updates.
        longest: The largest pace.
    """

    steps: int = 100
    tolerance: float = 1e-6
    growth: float = 1.1
    longest: float = 4.0

    def __post_init__(self) -> None:
        """Refuse what makes no step."""
        if self.steps < 1:
            raise ModelError(f"steps must be at least 1; got {self.steps}")

    is_stochastic: ClassVar[bool] = False
    """Every loss is the same at the same point."""

    def run(self, leg: Leg, watch: Watch, resume: Memory | None = None) -> Outcome:
        """Update until nothing changes; the loss is that of the point before the last update."""
        state = _State.of(leg.points) if resume is None else from_memory(_State, resume)
        tolerance = self.tolerance if leg.tolerance is None else leg.tolerance
        for step in range(state.step, leg.steps):
            updates, terms = _updated(leg, state.point)
            loss = terms.total.detach().double().expand(len(state.point))
            state.follow(self, updates, loss, tolerance, leg.problem.stretched)
            progress = Progress(step, terms, loss, state.point, partial(as_memory, state))
            if watch(progress) or bool((state.small_changes >= SMALL_IN_A_ROW).all()):
                break
        converged = state.small_changes >= SMALL_IN_A_ROW
        failed = ~torch.isfinite(state.loss) & (state.step > 0)
        return Outcome(state.point, state.loss, converged, failed, state.step, {})


def _updated(leg: Leg, points: Tensor) -> tuple[Tensor, LossTerms]:
    """The updates of all replicas, one after another: each is a pass over all of the data."""
    pairs = [leg.problem.updated(point) for point in points.split(1)]
    terms = LossTerms(*(torch.cat([getattr(one, f.name).reshape(1) for _, one in pairs]) for f in fields(LossTerms)))
    return torch.cat([point for point, _ in pairs]).detach(), terms


@dataclass
class _State:
    point: Tensor
    loss: Tensor
    pace: Tensor
    small_changes: Tensor
    step: int = 0

    @classmethod
    def of(cls, points: Tensor) -> _State:
        replicas = points.shape[0]
        none = torch.zeros(replicas, dtype=torch.float64)
        return cls(points.detach().clone(), torch.full_like(none, torch.inf), torch.ones_like(none), none)

    def follow(self, em: EM, updates: Tensor, loss: Tensor, tolerance: float, stretched: Tensor | None) -> None:
        """Go where the updates point, and further."""
        small = (self.loss - loss).abs() <= tolerance * (1 + loss.abs())
        self.small_changes = torch.where(small, self.small_changes + 1, torch.zeros_like(self.small_changes))
        grown = (em.growth * self.pace).clamp(max=em.longest)
        self.pace = torch.where(loss <= self.loss, grown, torch.ones_like(self.pace))
        finite = torch.isfinite(loss) & torch.isfinite(updates).all(-1)
        pace = self.pace.to(updates).unsqueeze(-1)
        pace = pace if stretched is None else torch.where(stretched, pace, 1.0)
        moved = self.point + pace * (updates - self.point)
        self.point = torch.where(finite.unsqueeze(-1), moved, self.point)
        self.loss, self.step = loss, self.step + 1
