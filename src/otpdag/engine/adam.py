"""Adam over all replicas at once: Algorithm 1 of the paper, alternating or joint, with averaging of the last steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from otpdag.engine.optimiser import Memory, Outcome, Progress, Run, Watch, as_memory
from otpdag.errors import ModelError, check_count, check_positive
from otpdag.noise import Streams
from otpdag.numerics import under
from otpdag.problem import Minibatched, split_theta
from otpdag.schedules import Cosine, Schedule
from otpdag.structure import Shapes


@dataclass(frozen=True)
class Adam:
    """Stochastic descent on minibatches, for problems that are drawn anew in every step.

    Args:
        steps: Number of steps.
        learning_rate: At the beginning, from where it falls to zero along a cosine; or a schedule.
        averaging: Share of the last steps whose parameters are averaged.
        alternating: Update the backward map and the model in turn (Algorithm 1) or together.
        largest_gradient: Length at which a replica's gradient is cut: losses are of order one in the data's units, and
            so are gradients.

    Attributes:
        is_stochastic: Every step draws a minibatch and noise.
    """

    steps: int = 300
    learning_rate: float | Schedule = 0.01
    averaging: float = 0.25
    alternating: bool = False
    largest_gradient: float = 10.0

    def __post_init__(self) -> None:
        """Refuse what makes no step."""
        check_count("steps", self.steps)
        first = self.learning_rate(0.0) if callable(self.learning_rate) else self.learning_rate
        check_positive("learning_rate", first)

    def rate(self, progress: float) -> float:
        """The learning rate at a share of the steps."""
        return (self.learning_rate if callable(self.learning_rate) else Cosine(self.learning_rate))(progress)

    is_stochastic: ClassVar[bool] = True

    def run(self, run: Run, watch: Watch, resume: Memory | None = None) -> Outcome:
        """Run all steps of a run, under the part of the schedule that its problem spans."""
        state = _State.begin(self, run) if resume is None else _State.restore(self, run, resume)
        problem = run.problem
        if not isinstance(problem, Minibatched):
            raise ModelError(f"{type(problem).__name__} is evaluated in closed form: use otp.engine.Deterministic")
        begin, end = problem.pace.span
        steps = round((end - begin) * run.steps)
        for step in range(state.step, steps):
            progress = begin + (end - begin) * step / max(steps, 1)
            terms = problem.sampled(state.point, state.streams, progress)
            (gradient,) = torch.autograd.grad(terms.total.sum(), state.point)
            state.meet(terms.total.detach(), gradient)
            if bool(state.failed.all()):
                return state.outcome(steps, converged=False)
            state.advance(self, gradient, step, progress)
            if watch(Progress(step, terms, terms.total.detach(), state.point.detach(), state.snapshot)):
                break
        return state.outcome(steps, converged=state.step == steps)


@dataclass
class _State:
    """Where a run stands."""

    halves: list[Tensor]
    optimiser: torch.optim.Adam
    streams: Streams
    point: Tensor
    last_good: Tensor
    failed: Tensor
    averaged: Tensor
    averaged_steps: int = 0
    step: int = 0
    losses: list[Tensor] = field(default_factory=list)

    @classmethod
    def begin(cls, adam: Adam, run: Run) -> _State:
        halves = _halves(run.problem.shapes, run.points)
        fused = run.points.device.type == "cuda"
        return cls(
            halves,
            torch.optim.Adam(halves, lr=adam.rate(0.0), fused=fused),
            Streams(run.seeds),
            torch.cat(halves, -1),
            last_good=run.points.detach().clone(),
            failed=torch.zeros(run.points.shape[0], dtype=torch.bool, device=run.points.device),
            averaged=torch.zeros_like(run.points),
        )

    @classmethod
    def restore(cls, adam: Adam, run: Run, saved: Memory) -> _State:
        state = cls.begin(adam, replace(run, points=saved["point"]))
        for number, half in enumerate(state.halves):
            moments = under(saved, f"moments.{number}.")
            if moments:
                state.optimiser.state[half] = {key: value.clone() for key, value in moments.items()}
        state.streams.restore(saved)
        state.last_good, state.failed, state.averaged = saved["last_good"], saved["failed"], saved["averaged"]
        state.averaged_steps, state.step = int(saved["averaged_steps"]), int(saved["step"])
        state.losses = list(saved["losses"])
        return state

    def snapshot(self) -> Memory:
        """All of it as named tensors."""
        moments = {
            f"moments.{number}.{key}": value.clone()
            for number, half in enumerate(self.halves)
            for key, value in self.optimiser.state[half].items()
        }
        held = {**as_memory(self), "point": self.point.detach(), "losses": torch.stack(self.losses)}
        return {**held, **moments, **self.streams.state()}

    def meet(self, loss: Tensor, gradient: Tensor) -> None:
        """Take note of a loss; a replica whose loss is not finite has failed, and stays where it was."""
        self.failed = self.failed | ~torch.isfinite(loss) | ~torch.isfinite(gradient).all(-1)
        self.last_good = torch.where(self.failed.unsqueeze(-1), self.last_good, self.point.detach())
        self.losses.append(loss)

    def advance(self, adam: Adam, gradient: Tensor, step: int, progress: float) -> None:
        """One update of the halves whose turn it is."""
        shorter = adam.largest_gradient / gradient.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        gradient = torch.where(self.failed.unsqueeze(-1), 0.0, gradient * shorter.clamp(max=1.0))
        turns = [step % len(self.halves)] if adam.alternating else range(len(self.halves))
        for turn, part in enumerate(gradient.split([half.shape[-1] for half in self.halves], -1)):
            self.halves[turn].grad = part.contiguous() if turn in turns else None
        self.optimiser.param_groups[0]["lr"] = adam.rate(progress)
        self.optimiser.step()
        self.point = torch.cat(self.halves, -1)
        self.step = step + 1
        if progress >= 1 - adam.averaging:
            self.averaged = self.averaged + self.point.detach()
            self.averaged_steps += 1

    def outcome(self, steps: int, *, converged: bool) -> Outcome:
        """The averaged parameters, with a smoothed loss."""
        history = torch.stack(self.losses or [torch.full_like(self.failed, torch.nan, dtype=torch.float64)])
        point = self.averaged / self.averaged_steps if self.averaged_steps else self.point.detach()
        point = torch.where(self.failed.unsqueeze(-1), self.last_good, point)
        settled = _has_settled(history) & ~self.failed & converged & (len(self.losses) == steps)
        smoothed = 1 if bool(self.failed.all()) else max(1, int(len(history) * 0.1))
        return Outcome(point, history[-smoothed:].mean(0), settled.cpu(), self.failed.cpu(), self.step)


def _halves(shapes: Shapes, start: Tensor) -> list[Tensor]:
    """The model's parameters and the backward maps', which follow them, each a leaf; none of them empty.

    In alternating mode, momentum must not move a half whose turn it is not: it then has no gradient at all.
    """
    own, of_maps = split_theta(shapes)
    if [*own, *of_maps] != [*shapes]:
        raise RuntimeError("the parameters of backward maps must follow those of the model")
    split = sum(math.prod(shape) for shape in own.values())
    parts = start.detach().split([split, start.shape[-1] - split], -1)
    return [part.clone().requires_grad_(True) for part in parts if part.shape[-1]]


def _has_settled(history: Tensor, fewest: int = 50) -> Tensor:
    """Whether losses (steps, R) hardly fell after the middle: within their noise, by a tenth of all, or by a fiftieth.

    The learning rate falls to zero, so that the last steps alone always look settled. Of fewer than ``fewest``
    nothing can be said about a noisy loss.
    """
    steps = len(history)
    if steps < fewest:
        return torch.zeros_like(history[0], dtype=torch.bool)
    first, middle = history[: steps // 10], history[2 * steps // 5 : 3 * steps // 5]
    late = history[4 * steps // 5 :]
    noise = torch.sqrt(middle.var(0) / len(middle) + late.var(0) / len(late))
    fall = middle.mean(0) - late.mean(0)
    small = torch.maximum(0.1 * (first.mean(0) - late.mean(0)), 0.02 * (1 + late.mean(0).abs()))
    return fall <= torch.maximum(3 * noise, small)
