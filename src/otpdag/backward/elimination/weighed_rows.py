"""Rows of a family with weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["WeighedRows"]


@dataclass(frozen=True)
class WeighedRows:
    """Rows of a family with weights: values (1 or R, n, ..., width), weights (1 or R, n, ...)."""

    values: Mapping[str, Tensor]
    weight: Tensor
    mask: Tensor | None = None
