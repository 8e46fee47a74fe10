"""L-BFGS over many replicas at once, in coordinates in which the loss is round.

Each row of the parameter matrix ``(R, P)`` is a problem of its own, with its own curvature history and step length;
one evaluation serves all rows. Rows do not influence each other, so the result equals that of R separate runs.

A step of steepest descent in the coordinates is close to one of Newton's method or, where a problem's gradient holds
what is unknown fixed, to one of expectation-maximisation; L-BFGS has only to learn what that misses (Jamshidian and
Jennrich, 1997). Directions in which the loss bends down count by the size of their curvature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otpdag.engine.optimiser import SMALL_IN_A_ROW, Memory, Outcome, Progress, Run, Watch, as_memory, from_memory, under
from otpdag.problem import LossTerms, Problem, loss_and_gradient


@dataclass(frozen=True)
class Coordinates:
    """``point = origin + matrix @ y``, or ``origin + scale * y``, or ``origin + y``."""

    origin: Tensor
    matrix: Tensor | None = None
    scale: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, points: Tensor, flattest: float = 1e-7) -> Coordinates:
        """By the problem's metric at ``points`` (R, P), where it has one.

        The smallest curvature is ``flattest`` of the largest: flatter directions are as good as unknown.
        """
        metric = problem.metric(points)
        if metric is None or metric.dim() == 2:
            return cls(points, scale=None if metric is None else metric.rsqrt())
        finite = metric.isfinite().flatten(1).all(-1)[:, None, None]
        metric = torch.where(finite, metric, torch.eye(points.shape[1]).to(metric))
        values, vectors = torch.linalg.eigh(0.5 * (metric + metric.transpose(1, 2)))
        level = values.abs().maximum(flattest * values.abs().amax(-1, keepdim=True)).clamp(min=1e-30)
        # laid out like a matrix that was read from a file, so that a resumed run multiplies alike
        return cls(points, (vectors * level.rsqrt().unsqueeze(1)).contiguous())

    def point(self, y: Tensor) -> Tensor:
        """From these coordinates to parameters."""
        if self.matrix is None:
            return self.origin + (y if self.scale is None else self.scale * y)
        return self.origin + (self.matrix @ y.unsqueeze(-1)).squeeze(-1)


ORIGIN = "axes.origin"
"""What tells that a memory is of a run of L-BFGS."""

Pair = tuple[Tensor, Tensor, Tensor]
"""A step s, the change y of the gradient, and 1 / (s . y)."""

PAIR = ("s", "y", "rho")

Evaluate = Callable[[Tensor], Tensor | LossTerms]
"""Maps parameters (R, P) to losses (R,), or to their terms."""

OnStep = Callable[[int, "LBFGSState"], bool]
"""Called after each step; returning True stops the run."""


@dataclass
class LBFGSState:
    """Where a run stands."""

    point: Tensor
    loss: Tensor
    gradient: Tensor
    converged: Tensor
    failed: Tensor
    steps: int = 0
    evaluations: int = 1
    history: list[Pair] = field(default_factory=list)
    """Triples (s, y, 1 / (s . y)); the last is zero where the pair carries no curvature."""
    small_changes: Tensor = field(default_factory=lambda: torch.zeros(0))
    """In how many steps in a row each row's loss has hardly changed."""

    def as_tensors(self) -> dict[str, Tensor]:
        """All of it, for a file or a run that goes on from here."""
        columns = zip(PAIR, zip(*self.history, strict=True), strict=True) if self.history else ()
        return {**as_memory(self), **{f"pair.{name}": torch.stack(values) for name, values in columns}}


def pairs_of(tensors: Memory) -> list[Pair]:
    """The curvature pairs among named tensors, the oldest first."""
    held = under(tensors, "pair.")
    return list(zip(*(held[name] for name in PAIR), strict=True)) if held else []


def descended(run: Run, tolerance: float, watch: Watch, resume: Memory | None = None) -> Outcome:
    """Minimise in the problem's own coordinates, which a run that goes on shares with the one before."""
    before = resume or run.memory
    axes = Coordinates(**under(before, "axes.")) if ORIGIN in before else Coordinates.of(run.problem, run.points)
    last: list[LossTerms] = []

    def evaluate(y: Tensor) -> LossTerms:
        last[:] = [run.problem.loss(axes.point(y))]
        return last[0]

    def memory(state: LBFGSState) -> Memory:
        return {**state.as_tensors(), **{f"axes.{name}": value for name, value in as_memory(axes).items()}}

    def on_step(step: int, state: LBFGSState) -> bool:
        return watch(Progress(step, last[0], state.loss, axes.point(state.point), lambda: memory(state)))

    state = minimise(
        evaluate,
        before["point"] if before else torch.zeros_like(run.points),
        steps=run.steps,
        tolerance=tolerance,
        history=pairs_of(before),
        resume=None if resume is None else from_memory(LBFGSState, resume, history=pairs_of(resume)),
        on_step=on_step,
    )
    return Outcome(axes.point(state.point), state.loss, state.converged, state.failed, state.steps, memory(state))


def minimise(
    evaluate: Evaluate,
    start: Tensor,
    *,
    steps: int = 200,
    tolerance: float = 1e-9,
    gradient_tolerance: float = 1e-7,
    memory: int = 12,
    history: Sequence[Pair] = (),
    resume: LBFGSState | None = None,
    on_step: OnStep | None = None,
) -> LBFGSState:
    """Minimise each row's loss from ``start`` (R, P).

    ``history`` is that of an earlier run on a similar problem, whose curvature serves from the first step on;
    ``resume`` the state of this very run, which then goes on as if it had never stopped.

    A row has converged when its loss has changed by less than ``tolerance`` (relative) in three steps in a row, or its
    largest gradient component is below ``gradient_tolerance``. A row whose loss is not finite is marked failed and
    keeps its last good point.
    """
    state = _begin(evaluate, start, history) if resume is None else resume
    for step in range(state.steps, steps):
        if bool((state.converged | state.failed).all()):
            break
        point, loss, gradient = _line_search(evaluate, state, _direction(state), first=not state.history)
        previous = state.loss
        _remember(state, point - state.point, gradient - state.gradient, memory)
        state.point, state.loss, state.gradient = point, loss, gradient
        state.steps = step + 1
        small = (previous - state.loss).abs() <= tolerance * (1 + state.loss.abs())
        state.small_changes = torch.where(small, state.small_changes + 1, torch.zeros_like(state.small_changes))
        flat = state.gradient.abs().amax(-1) <= gradient_tolerance
        state.converged = state.converged | (state.small_changes >= SMALL_IN_A_ROW) | flat
        if on_step is not None and on_step(step, state):
            break
    return state


def _begin(evaluate: Evaluate, start: Tensor, history: Sequence[Pair]) -> LBFGSState:
    loss, gradient = loss_and_gradient(evaluate, start)
    failed = ~torch.isfinite(loss) | ~torch.isfinite(gradient).all(-1)
    gradient = torch.where(failed.unsqueeze(-1), torch.zeros_like(gradient), gradient)
    point, converged, unchanged = start.detach().clone(), torch.zeros_like(failed), torch.zeros_like(loss)
    return LBFGSState(point, loss, gradient, converged, failed, history=list(history), small_changes=unchanged)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def _direction(state: LBFGSState) -> Tensor:
    """The two-loop recursion, row by row."""
    q = state.gradient.clone()
    alphas = []
    for s, y, rho in reversed(state.history):
        alpha = rho * _dot(s, q)
        q = q - alpha.unsqueeze(-1) * y
        alphas.append(alpha)
    q = q * _first_scale(state).unsqueeze(-1)
    for (s, y, rho), alpha in zip(state.history, reversed(alphas), strict=True):
        beta = rho * _dot(y, q)
        q = q + (alpha - beta).unsqueeze(-1) * s
    uphill = _dot(q, state.gradient) <= 0
    return -torch.where(uphill.unsqueeze(-1), state.gradient, q)


def _first_scale(state: LBFGSState) -> Tensor:
    scale = torch.ones_like(state.loss)
    for _, y, rho in state.history:
        # the latest pair with curvature wins: gamma = s.y / y.y
        scale = torch.where(rho > 0, 1.0 / (rho.clamp(min=1e-300) * _dot(y, y).clamp(min=1e-300)), scale)
    return scale


def _line_search(
    evaluate: Evaluate, state: LBFGSState, direction: Tensor, *, first: bool, trials: int = 20
) -> tuple[Tensor, Tensor, Tensor]:
    """Points, losses and gradients after every row has decreased enough (Armijo); rows that cannot stay as they are.

    So many step lengths are tried: 0.1 to the power of 20 of a step moves nothing.
    """
    slope = _dot(direction, state.gradient)
    step = torch.ones_like(state.loss)
    if first:
        step = step / state.gradient.norm(dim=-1).clamp(min=1.0)
    point, loss, gradient = state.point.clone(), state.loss.clone(), state.gradient.clone()
    waiting = ~(state.converged | state.failed)
    for _ in range(trials):
        state.evaluations += 1
        trial = torch.where(waiting.unsqueeze(-1), state.point + step.unsqueeze(-1) * direction, point)
        trial_loss, trial_gradient = loss_and_gradient(evaluate, trial)
        finite = torch.isfinite(trial_loss) & torch.isfinite(trial_gradient).all(-1)
        enough = trial_loss <= state.loss + 1e-4 * step * slope + 1e-13 * state.loss.abs()
        accepted = waiting & finite & enough
        take = accepted.unsqueeze(-1)
        point = torch.where(take, trial, point)
        loss = torch.where(accepted, trial_loss, loss)
        gradient = torch.where(take, trial_gradient, gradient)
        waiting = waiting & ~accepted
        if not bool(waiting.any()):
            break
        step = torch.where(waiting, step * _shrink(state.loss, slope, step, trial_loss, finite), step)
    # a row that found no decrease restarts from the gradient; if it has no history, it is done
    if state.history:
        for index, (s, y, rho) in enumerate(state.history):
            state.history[index] = (s, y, torch.where(waiting, torch.zeros_like(rho), rho))
    else:
        state.converged = state.converged | waiting
    return point, loss, gradient


def _shrink(loss: Tensor, slope: Tensor, step: Tensor, trial_loss: Tensor, finite: Tensor) -> Tensor:
    """Minimise the parabola through what is known, within [0.1, 0.5] of the step."""
    curvature = 2 * (trial_loss - loss - step * slope)
    best = -slope * step / curvature.clamp(min=1e-300)
    return torch.where(finite, best.nan_to_num(0.5).clamp(0.1, 0.5), torch.full_like(step, 0.1))


def _remember(state: LBFGSState, s: Tensor, y: Tensor, memory: int) -> None:
    curvature = _dot(s, y)
    useful = curvature > 1e-12 * _dot(y, y).clamp(min=1e-300)
    rho = torch.where(useful, 1.0 / torch.where(useful, curvature, 1.0), 0.0)
    state.history.append((s, y, rho))
    if len(state.history) > memory:
        state.history.pop(0)
