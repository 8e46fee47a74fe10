"""Loss terms, and the two halves of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

__all__ = ["LossTerms", "split_theta"]


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


def split_theta(parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Separate the model's parameters from the backward map's."""
    theta = {key: value for key, value in parameters.items() if not key.startswith("phi.")}
    return theta, {key: value for key, value in parameters.items() if key.startswith("phi.")}
