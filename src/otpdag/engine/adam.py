"""Adam on minibatches with fresh noise, all replicas in one tensor: joint or alternating updates, iterate averaging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.engine.problem import Problem
from otpdag.objective import LossTerms, Streams
from otpdag.schedules import Cosine

__all__ = ["AdamOutcome", "descend"]

LARGEST_GRADIENT = 10.0

OnStep = Callable[[int, LossTerms], bool]


@dataclass(frozen=True)
class AdamOutcome:
    """Where a run ended: averaged parameters, a smoothed loss, and which replicas met a loss that was not finite."""

    point: Tensor
    loss: Tensor
    failed: Tensor
    steps: int
    slope: Tensor
    """Relative fall of the smoothed loss over the last tenth of the steps."""


def descend(
    problem: Problem, start: Tensor, streams: Streams, *, steps: int, on_step: OnStep | None = None
) -> AdamOutcome:
    """Run ``steps`` steps from ``start`` (R, P)."""
    method = problem.method
    flat = start.detach().clone().requires_grad_(True)
    optimiser = torch.optim.Adam([flat], lr=method.learning_rate, fused=flat.device.type == "cuda")
    rate = Cosine(method.learning_rate)
    is_phi = _phi_columns(problem)
    averaged, averaged_steps = torch.zeros_like(start), 0
    losses: list[Tensor] = []
    last_good, failed = start.detach().clone(), torch.zeros(start.shape[0], dtype=torch.bool)
    for step in range(steps):
        progress = step / max(steps, 1)
        optimiser.param_groups[0]["lr"] = rate(progress)
        terms = problem.sampled(flat, streams, progress)
        optimiser.zero_grad()
        terms.total.sum().backward()
        _tidy_gradient(flat, is_phi if method.alternating else None, step)
        bad = ~torch.isfinite(terms.total.detach()) | ~torch.isfinite(_gradient(flat)).all(-1)
        failed = failed | bad.cpu()
        if bool(failed.all()):
            return AdamOutcome(
                last_good,
                terms.total.detach(),
                failed,
                step,
                torch.full_like(terms.total.detach(), torch.nan),
            )
        flat.grad = torch.where(failed.to(flat.device).unsqueeze(-1), 0.0, _gradient(flat))
        last_good = torch.where(failed.to(flat.device).unsqueeze(-1), last_good, flat.detach())
        optimiser.step()
        losses.append(terms.total.detach())
        if progress >= 1 - method.averaging:
            averaged, averaged_steps = averaged + flat.detach(), averaged_steps + 1
        if on_step is not None and on_step(step, terms):
            break
    point = averaged / averaged_steps if averaged_steps else flat.detach()
    point = torch.where(failed.to(point.device).unsqueeze(-1), last_good, point)
    history = torch.stack(losses)
    return AdamOutcome(point, _tail_mean(history, 0.1), failed, len(losses), _late_slope(history))


def _phi_columns(problem: Problem) -> Tensor:
    sizes = [
        (key.startswith("phi."), int(torch.tensor(shape).prod()) if shape else 1)
        for key, shape in problem.shapes.items()
    ]
    return torch.cat([torch.full((size,), float(is_phi)) for is_phi, size in sizes])


def _tidy_gradient(flat: Tensor, is_phi: Tensor | None, step: int) -> None:
    """Clip each replica's gradient; in alternating mode move only the map or only the model."""
    gradient = _gradient(flat)
    norm = gradient.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    gradient.mul_((LARGEST_GRADIENT / norm).clamp(max=1.0))
    if is_phi is not None and bool(is_phi.any()):
        turn = is_phi if step % 2 == 0 else 1 - is_phi
        gradient.mul_(turn.to(gradient))


def _gradient(flat: Tensor) -> Tensor:
    if flat.grad is None:
        raise RuntimeError("backward() has not run")
    return flat.grad


def _tail_mean(history: Tensor, share: float) -> Tensor:
    return history[-max(1, int(len(history) * share)) :].mean(0)


def _late_slope(history: Tensor) -> Tensor:
    tenth = max(1, len(history) // 10)
    late, before = (
        history[-tenth:].mean(0),
        history[-2 * tenth : -tenth].mean(0) if len(history) > tenth else history.mean(0),
    )
    return (before - late) / (late.abs() + 1e-12)
