"""The vector-quantised backward map: encode, send each position to the nearest codeword, copy the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.backward.encoder import EncoderMap

__all__ = ["QuantizedMap"]

POTENTIAL = "phi.potential"
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
