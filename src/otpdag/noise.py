"""Draws of a mechanism's noise."""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.mechanisms.base import Noise

__all__ = ["draw_noise"]


def draw_noise(
    noise: Noise, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Independent noise (*shape, dim) from its prior.

    >>> draw_noise(Noise(2, "uniform"), (3, 5), torch.Generator().manual_seed(0)).shape
    torch.Size([3, 5, 2])
    """
    sampler = torch.randn if noise.kind == "normal" else torch.rand
    return sampler(*shape, noise.dim, generator=generator, dtype=dtype)
