"""Random numbers for several draws of each row: independent, or one in each stratum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RandomNumbers"]


@dataclass(frozen=True)
class RandomNumbers:
    """Uniform and normal numbers (..., draws, dim).

    Args:
        generator: Their source.
        stratified: Divide the line evenly among the draws, in random order (a Latin hypercube). Each draw has the
            distribution that it would have anyway, and means over the draws of a row are far more precise.

    >>> numbers = RandomNumbers(torch.Generator().manual_seed(0), stratified=True)
    >>> (numbers.uniform((1, 4, 1), torch.float64) * 4).floor().sort(1).values.flatten()
    tensor([0., 1., 2., 3.], dtype=torch.float64)
    """

    generator: torch.Generator
    stratified: bool = False

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Between zero and one."""
        if not self.stratified:
            return torch.rand(*shape, generator=self.generator, dtype=dtype)
        order = torch.rand(*shape, generator=self.generator, dtype=dtype).argsort(-2)
        return (order + torch.rand(*shape, generator=self.generator, dtype=dtype)) / shape[-2]

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Standard normal."""
        if not self.stratified:
            return torch.randn(*shape, generator=self.generator, dtype=dtype)
        return torch.special.ndtri(self.uniform(shape, dtype).clamp(1e-12, 1 - 1e-12))
