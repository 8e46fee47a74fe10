"""Families that are alike, side by side on the replica axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["stacked_replicas"]


def stacked_replicas(values: Sequence[Tensor], replicas: int) -> Tensor:
    """Tensors of n twins (1 or R, ...) on one axis (R * n, ...), replica by replica.

    >>> stacked_replicas([torch.zeros(1, 2), torch.ones(2, 2)], 2)[:, 0]
    tensor([0., 1., 0., 1.])
    """
    return torch.stack([value.expand(replicas, *value.shape[1:]) for value in values], 1).flatten(0, 1)
