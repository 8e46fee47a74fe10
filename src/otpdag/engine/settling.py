"""L-BFGS on sequences: in the coordinates of a complete-data cost, from a part of the steps to all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from otpdag.engine.lbfgs import LBFGSState, minimise
from otpdag.engine.monitor import Monitor
from otpdag.engine.search import best_of
from otpdag.objective import LossTerms

__all__ = ["FINE", "ROUGH", "AbstractLoss", "Coordinates", "plain", "settle"]

MOST_CURVED = 200  # parameters up to which the curvature is worth its passes
FLATTEST = 1e-7  # the smallest curvature, relative to the largest
ROUGH, FINE = 1e-7, 1e-9  # relative changes of the loss at which a part, and everything, has settled


class AbstractLoss(Protocol):
    """A problem whose loss is smooth; it keeps its last terms for the history."""

    last: LossTerms | None

    def loss(self, flat: Tensor) -> Tensor:
        """Total loss of every replica."""
        ...


@dataclass(frozen=True)
class Coordinates:
    r"""Coordinates in which the expected complete-data cost is round: ``point = origin + matrix @ y``.

    A step of steepest descent in them is close to one of expectation-maximisation, and L-BFGS has only to learn what
    that misses (the quasi-Newton acceleration of EM of Jamshidian and Jennrich, 1997).
    """

    origin: Tensor
    matrix: Tensor

    @classmethod
    def of(cls, problem: AbstractLoss, points: Tensor) -> Coordinates:
        """Take the curvature at ``points`` (R, P); the chain's probabilities are held fixed in it."""
        replicas, size = points.shape
        if size > MOST_CURVED:
            return cls(points, torch.eye(size, dtype=points.dtype).expand(replicas, -1, -1))
        with torch.enable_grad():
            leaf = points.detach().clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(problem.loss(leaf).sum(), leaf, create_graph=True)
            rows = [torch.autograd.grad(column.sum(), leaf, retain_graph=True)[0] for column in gradient.unbind(-1)]
        curvature = torch.stack(rows, 1).detach()
        curvature = torch.where(
            curvature.isfinite().flatten(1).all(-1)[:, None, None], curvature, torch.eye(size).to(curvature)
        )
        values, vectors = torch.linalg.eigh(0.5 * (curvature + curvature.transpose(1, 2)))
        level = values.abs().maximum(FLATTEST * values.abs().amax(-1, keepdim=True)).clamp(min=1e-30)
        return cls(points, vectors * level.rsqrt().unsqueeze(1))

    def point(self, flat: Tensor) -> Tensor:
        """From these coordinates to parameters."""
        return self.origin + (self.matrix @ flat.unsqueeze(-1)).squeeze(-1)


def settle(
    problem: AbstractLoss,
    axes: Coordinates,
    before: LBFGSState | None,
    steps: int,
    monitor: Monitor,
    stage: str,
    starts: Tensor,
    *,
    tolerance: float = ROUGH,
    keep: bool = False,
) -> LBFGSState:
    """Minimise in new coordinates, from their origin or from where a run on a part of the steps ended."""
    monitor.stage(stage, steps, starts.tolist())

    def on_step(step: int, state: LBFGSState) -> bool:
        terms = problem.last.as_floats(int(best_of(state, 1)[0])) if problem.last is not None else {}
        record = {**terms, "loss": float(state.loss.min())}
        return monitor.record(stage, step, record, keep=keep, losses=state.loss.tolist())

    def loss(flat: Tensor) -> Tensor:
        return problem.loss(axes.point(flat))

    start = torch.zeros_like(axes.origin) if before is None else before.point
    history = () if before is None else before.history
    return minimise(loss, start, steps=steps, tolerance=tolerance, history=history, on_step=on_step)


def plain(points: Tensor) -> Coordinates:
    """The coordinates that parameters have anyway."""
    return Coordinates(points, torch.eye(points.shape[1], dtype=points.dtype).expand(len(points), -1, -1))
