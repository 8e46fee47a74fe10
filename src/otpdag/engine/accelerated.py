"""Closed-form updates, accelerated: as few passes as a quasi-Newton method takes, without a gradient or a step length.

Updates are combined by Anderson's mixing (:mod:`otpdag.anderson`; for those of expectation-maximisation see Henderson
and Varadhan 2019). Where that raises the loss, the plain update is taken, which never does, and the history forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.anderson import correction
from otpdag.engine.optimiser import Leg, Memory, Outcome, Progress, Watch

__all__ = ["accelerated_updates"]

REMEMBERED = 8
"""Differences of points and of updates that are combined."""

SMALL_IN_A_ROW = 3
"""Small changes in a row that make an end."""

WORSE = 1e-11
"""A relative rise of the loss below which it is rounding."""


@dataclass
class _State:
    """Where all replicas stand: a point whose loss is known, and the trial that comes next."""

    point: Tensor
    loss: Tensor
    trial: Tensor
    plain: Tensor
    change: Tensor
    moves: Tensor
    changes: Tensor
    small: Tensor
    step: Tensor

    @classmethod
    def of(cls, points: Tensor) -> _State:
        replicas, size = points.shape
        none = torch.zeros(replicas, dtype=torch.float64)
        empty = points.new_zeros(replicas, REMEMBERED, size)
        start, step = points.detach().clone(), torch.tensor(0)
        infinite = torch.full_like(none, torch.inf)
        return cls(start, infinite, start, start, torch.zeros_like(start), empty, empty.clone(), none, step)

    def as_tensors(self) -> Memory:
        """All of it, for a file."""
        return {f"update.{name}": value for name, value in vars(self).items()}

    @classmethod
    def restored(cls, tensors: Memory) -> _State:
        """Invert :meth:`as_tensors`."""
        return cls(**{key.removeprefix("update."): one for key, one in tensors.items() if key.startswith("update.")})

    def follow(self, updates: Tensor, loss: Tensor, tolerance: float) -> None:
        """Keep or refuse the trial, and choose the next one."""
        change = updates - self.trial
        finite = torch.isfinite(loss) & torch.isfinite(change).all(-1)
        good = finite & (loss <= self.loss + WORSE * (1 + loss.abs()))
        near = good & ((self.loss - loss).abs() <= tolerance * (1 + loss.abs()))
        self.small = torch.where(good, torch.where(near, self.small + 1, 0.0), self.small)
        good = good & (loss <= self.loss)
        kept = good.unsqueeze(-1)
        known = torch.isfinite(self.loss).unsqueeze(-1)  # the first point has none before it
        move = torch.where(kept & known, self.trial - self.point, 0.0)
        turn = torch.where(kept & known, change - self.change, 0.0)
        slot = int(self.step) % REMEMBERED
        self.moves = torch.where(kept.unsqueeze(-1), self.moves, 0.0)
        self.changes = torch.where(kept.unsqueeze(-1), self.changes, 0.0)
        self.moves[:, slot], self.changes[:, slot] = move, turn
        plain = torch.where(kept, updates, self.plain)
        self.point = torch.where(kept, self.trial, self.point)
        self.change = torch.where(kept, change, self.change)
        self.loss = torch.where(good, loss, self.loss)
        ahead = torch.where(kept, plain - correction(self.change, self.moves, self.changes), plain)
        self.plain = plain
        self.trial = torch.where(torch.isfinite(ahead).all(-1, keepdim=True), ahead, plain)
        self.step = self.step + 1


def accelerated_updates(leg: Leg, tolerance: float, watch: Watch, resume: Memory | None = None) -> Outcome:
    """Update all replicas of a leg until nothing changes."""
    state = _State.of(leg.points) if resume is None else _State.restored(resume)
    for step in range(int(state.step), leg.steps):
        updates, terms = leg.problem.updated(state.trial)
        state.follow(updates, terms.total.detach().double().expand(len(state.point)), tolerance)
        stop = watch(Progress(step, terms, state.loss, state.point, state.as_tensors))
        if stop or bool((state.small >= SMALL_IN_A_ROW).all()):
            break
    converged, failed = state.small >= SMALL_IN_A_ROW, ~torch.isfinite(state.loss)
    return Outcome(state.point, state.loss, converged, failed, int(state.step))
