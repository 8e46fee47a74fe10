"""Loss terms, and the two halves of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["LossTerms", "loss_and_gradient", "split_theta"]

Held = TypeVar("Held")


@dataclass(frozen=True)
class LossTerms:
    """Weighted terms of the objective, one number for each replica."""

    reconstruction: Tensor
    divergence: Tensor
    entropic: Tensor
    direct: Tensor

    @classmethod
    def of(cls, like: Tensor, **terms: Tensor) -> LossTerms:
        """Terms that are not named are zero."""
        zero = torch.zeros_like(like)
        return cls(**{field.name: terms.get(field.name, zero) for field in fields(cls)})

    @property
    def total(self) -> Tensor:
        """Their sum."""
        return self.reconstruction + self.divergence + self.entropic + self.direct

    def __add__(self, other: LossTerms) -> LossTerms:
        """Add term by term."""
        return LossTerms(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_floats(self, replica: int) -> dict[str, float]:
        """The terms of one replica, for a history."""
        terms = {f.name: float(getattr(self, f.name).detach().reshape(-1)[replica]) for f in fields(self)}
        return {"loss": float(self.total.detach().reshape(-1)[replica]), **terms}


def loss_and_gradient(evaluate: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (R,) at a point (R, P), and each replica's gradient (R, P)."""
    with torch.enable_grad():
        leaf = point.detach().clone().requires_grad_(True)
        loss = evaluate(leaf)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient.detach()


def split_theta(parameters: Mapping[str, Held]) -> tuple[dict[str, Held], dict[str, Held]]:
    """Separate the model's parameters, or what is known of each, from the backward map's."""
    theta = {key: value for key, value in parameters.items() if not key.startswith("phi.")}
    return theta, {key: value for key, value in parameters.items() if key.startswith("phi.")}
