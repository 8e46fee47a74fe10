"""The vector-quantised backward map: encode, send each position to the nearest codeword, copy the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.backward.encoder import EncoderMap
from otpdag.clustering import move_centres
from otpdag.layers import nearest

__all__ = ["QuantizedMap", "lloyd"]

POTENTIAL = "phi.potential"
START_LATENTS = 20  # for each codeword that k-means places among them
ROWS_AT_ONCE = 250  # images that are encoded at a time, which bounds memory
PACE = 30.0  # potentials are in units of squared latents, and must follow them


@dataclass(frozen=True)
class QuantizedMap:
    r"""``phi(x) = [f_e(x), Q(f_e(x))]`` (Appendix C.3), with the potentials of its transport to the codewords.

    Potentials are ordinary parameters of the map that ascend where all others descend. They are kept from batch to
    batch, so that codewords get their weight over the data set and not within every 32 images.

    Args:
        encoder: Encodes images to all positions' latents side by side.
        positions: Number of positions, M.
        size: Number of codewords, K.
        dim: Length of a codeword, D.
        by_position: Whether every position has its own transport problem (the paper's reading), or all of them one.
    """

    encoder: EncoderMap
    positions: int
    size: int
    dim: int
    by_position: bool = False

    def init(self) -> dict[str, Tensor]:
        """The encoder's parameters, and potentials of zero."""
        problems = self.positions if self.by_position else 1
        return {**self.encoder.init(), POTENTIAL: torch.zeros(1, problems, self.size)}

    def latents(self, phi: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Encode rows (1, n, pixels): (1, n, positions * dim)."""
        return self.encoder.latents(phi, rows)

    def at_positions(self, latents: Tensor) -> Tensor:
        """Latents (1, n, positions * dim) as one sample for each position: (positions, n, dim)."""
        return latents[0].unflatten(-1, (self.positions, self.dim)).transpose(0, 1)

    def potentials(self, phi: Mapping[str, Tensor]) -> Tensor:
        """Potentials of the codewords: (problems, size)."""
        return PACE * phi[POTENTIAL][0]

    def placed_codewords(
        self, phi: Mapping[str, Tensor], images: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Codewords (size, dim) among the latents of some images (N, pixels), and scales at what is left of them."""
        many = min(len(images), math.ceil(START_LATENTS * self.size / self.positions))
        some = images[torch.randperm(len(images), generator=generator)[:many]]
        with torch.no_grad():
            parts = [self.latents(phi, part.unsqueeze(0)) for part in some.split(ROWS_AT_ONCE)]
        centres, residual = lloyd(torch.cat(parts, 1).reshape(-1, self.dim), self.size, generator)
        return centres, residual.mean().clamp(min=1e-8).sqrt().expand_as(centres)


def lloyd(points: Tensor, size: int, generator: torch.Generator, steps: int = 5) -> tuple[Tensor, Tensor]:
    """A few steps of k-means from random points (N, D): centres (size, D), and the mean squared residual (D,).

    With fewer points than centres, points repeat with a little noise.
    """
    index = torch.randperm(len(points), generator=generator)
    index = index.repeat(math.ceil(size / len(index)))[:size].to(points.device)
    jitter = torch.randn(size, points.shape[1], generator=generator).to(points)
    centres = points[index] + 1e-3 * points.std() * jitter
    centres = torch.from_numpy(move_centres(points.cpu().numpy(), centres.cpu().numpy(), steps)).to(points)
    own = nearest(torch.cdist(points, centres))
    return centres, (points - centres[own]).square().mean(0)
