"""Adam on minibatches with fresh noise, all replicas in one tensor: joint or alternating updates, iterate averaging."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from otpdag.engine.method import Method
from otpdag.objective import LossTerms, Streams
from otpdag.schedules import Cosine

__all__ = ["AdamOutcome", "descend"]

LARGEST_GRADIENT = 10.0
FEWEST_STEPS = 50

OnStep = Callable[[int, LossTerms], bool]
Moments = dict[str, Tensor]
"""Adam's memory of one half of the parameters: number of steps, mean gradient, mean square."""


class DrawnLoss(Protocol):
    """A problem whose loss is drawn anew in every step."""

    @property
    def method(self) -> Method:
        """How it is minimised."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all parameters, those of backward maps last."""
        ...

    def sampled(self, flat: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Loss terms of every replica."""
        ...


@dataclass(frozen=True)
class AdamOutcome:
    """Where a run ended: averaged parameters, a smoothed loss, and which replicas met a loss that was not finite."""

    point: Tensor
    loss: Tensor
    failed: Tensor
    steps: int
    settled: Tensor
    """Whether the loss had stopped falling, by the end of all steps."""
    memory: tuple[Moments, ...] = ()
    """What a run that goes on from here starts with."""


def descend(
    problem: DrawnLoss,
    start: Tensor,
    streams: Streams,
    *,
    steps: int,
    on_step: OnStep | None = None,
    span: tuple[float, float] = (0.0, 1.0),
    memory: Sequence[Moments] = (),
) -> AdamOutcome:
    """Run ``steps`` steps from ``start`` (R, P).

    A long run may be cut in parts: ``span`` is the share of all steps at the part's beginning and end, ``memory`` that
    of the part before.
    """
    method, device = problem.method, start.device
    halves = _halves(problem, start)
    optimisers = [torch.optim.Adam([half], lr=method.learning_rate, fused=device.type == "cuda") for half in halves]
    for optimiser, moments in zip(optimisers, memory, strict=bool(memory)):
        optimiser.state[optimiser.param_groups[0]["params"][0]] = {key: value.clone() for key, value in moments.items()}
    rate = Cosine(method.learning_rate)
    averaged, averaged_steps = torch.zeros_like(start), 0
    losses: list[Tensor] = []
    last_good, failed = start.detach().clone(), torch.zeros(start.shape[0], dtype=torch.bool, device=device)
    for step in range(steps):
        progress = span[0] + (span[1] - span[0]) * step / max(steps, 1)
        flat = torch.cat(halves, -1)
        terms = problem.sampled(flat, streams, progress)
        (gradient,) = torch.autograd.grad(terms.total.sum(), flat)
        failed = failed | ~torch.isfinite(terms.total.detach()) | ~torch.isfinite(gradient).all(-1)
        if bool(failed.all()):
            loss = terms.total.detach()
            return AdamOutcome(last_good, loss, failed.cpu(), step, torch.zeros_like(failed).cpu())
        gradient = torch.where(failed.unsqueeze(-1), 0.0, _clipped(gradient))
        last_good = torch.where(failed.unsqueeze(-1), last_good, flat.detach())
        turns = [step % len(halves)] if method.alternating else range(len(halves))
        for turn, part in enumerate(gradient.split([half.shape[-1] for half in halves], -1)):
            if turn in turns:
                halves[turn].grad = part.contiguous()
                optimisers[turn].param_groups[0]["lr"] = rate(progress)
                optimisers[turn].step()
        losses.append(terms.total.detach())
        if progress >= 1 - method.averaging:
            averaged, averaged_steps = averaged + torch.cat(halves, -1).detach(), averaged_steps + 1
        if on_step is not None and on_step(step, terms):
            break
    point = averaged / averaged_steps if averaged_steps else torch.cat(halves, -1).detach()
    point = torch.where(failed.unsqueeze(-1), last_good, point)
    history = torch.stack(losses)
    settled = _has_settled(history) & ~failed & (len(losses) == steps)
    left = tuple(dict(optimiser.state[half]) for optimiser, half in zip(optimisers, halves, strict=True))
    return AdamOutcome(point, _tail_mean(history, 0.1), failed.cpu(), len(losses), settled.cpu(), left)


def _halves(problem: DrawnLoss, start: Tensor) -> list[Tensor]:
    """The model's parameters and the backward maps', which follow them, each a leaf; none of them empty.

    Each has an optimiser of its own: in alternating mode, momentum must not move a half whose turn it is not.
    """
    is_map = [key.startswith("phi.") for key in problem.shapes]
    if is_map != sorted(is_map):
        raise RuntimeError("the parameters of backward maps must follow those of the model")
    sizes = [math.prod(shape) for shape in problem.shapes.values()]
    split = sum(size for size, of_map in zip(sizes, is_map, strict=True) if not of_map)
    parts = start.detach().split([split, start.shape[-1] - split], -1)
    return [part.clone().requires_grad_(True) for part in parts if part.shape[-1]]


def _clipped(gradient: Tensor) -> Tensor:
    """Bound the length of each replica's gradient."""
    norm = gradient.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return gradient * (LARGEST_GRADIENT / norm).clamp(max=1.0)


def _tail_mean(history: Tensor, share: float) -> Tensor:
    return history[-max(1, int(len(history) * share)) :].mean(0)


def _has_settled(history: Tensor) -> Tensor:
    """Whether losses (steps, R) hardly fell after the middle: within their noise, by a tenth of all, or by a fiftieth.

    The learning rate falls to zero, so that the last steps alone always look settled.
    """
    steps = len(history)
    if steps < FEWEST_STEPS:
        return torch.zeros_like(history[0], dtype=torch.bool)
    first, middle = history[: steps // 10], history[2 * steps // 5 : 3 * steps // 5]
    late = history[4 * steps // 5 :]
    noise = torch.sqrt(middle.var(0) / len(middle) + late.var(0) / len(late))
    fall = middle.mean(0) - late.mean(0)
    small = torch.maximum(0.1 * (first.mean(0) - late.mean(0)), 0.02 * (1 + late.mean(0).abs()))
    return fall <= torch.maximum(3 * noise, small)
