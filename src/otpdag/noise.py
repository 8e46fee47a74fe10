"""Draws of a mechanism's noise, and the random streams that they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from otpdag.mechanisms.base import Noise


def draw_noise(
    noise: Noise, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Independent noise (*shape, dim) from its prior.

    >>> draw_noise(Noise(2, "uniform"), (3, 5), torch.Generator().manual_seed(0)).shape
    torch.Size([3, 5, 2])
    """
    sampler = torch.randn if noise.kind == "normal" else torch.rand
    return sampler(*shape, noise.dim, generator=generator, dtype=dtype)


def normal_score(prior: Noise, noise: Tensor, edge: float = 1e-6) -> Tensor:
    """Bring uniform noise to the scale of normal noise, so that no part of a family outweighs another."""
    return noise if prior.kind == "normal" else torch.special.ndtri(noise.clamp(edge, 1 - edge))


class Streams:
    """One random stream for each replica, so that training together equals training apart.

    What a divergence draws, such as directions of projection, is the same for all replicas: ``shared``.
    """

    def __init__(self, seeds: Sequence[int], *, shared: int = 0) -> None:
        self.generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
        self.shared = torch.Generator().manual_seed(shared)

    def __len__(self) -> int:
        return len(self.generators)

    def draw(self, noise: Noise, rows: int, like: Tensor) -> Tensor:
        """Fresh noise (R, rows, dim)."""
        drawn = [draw_noise(noise, (rows,), generator, like.dtype) for generator in self.generators]
        return torch.stack(drawn).to(like.device)

    def rows(self, total: int, size: int) -> Tensor:
        """Row numbers of a minibatch (R, size), drawn independently; all rows where there are not more."""
        if size >= total:
            return torch.arange(total).expand(len(self), total)
        return torch.stack([torch.randint(total, (size,), generator=g) for g in self.generators])

    def state(self) -> dict[str, Tensor]:
        """Where every stream stands, for a checkpoint."""
        own = {f"stream.{number}": generator.get_state() for number, generator in enumerate(self.generators)}
        return {"stream.shared": self.shared.get_state(), **own}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from where :meth:`state` was taken."""
        self.shared.set_state(state["stream.shared"])
        for number, generator in enumerate(self.generators):
            generator.set_state(state[f"stream.{number}"])
