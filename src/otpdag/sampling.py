"""Ancestral sampling, with interventions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.mechanisms.base import Noise
from otpdag.structure import Naturals, Structure

__all__ = ["ancestral", "draw_noise"]


def draw_noise(
    noise: Noise, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Independent noise (*shape, dim)."""
    sampler = torch.randn if noise.kind == "normal" else torch.rand
    return sampler(*shape, noise.dim, generator=generator, dtype=dtype)


def ancestral(
    structure: Structure,
    naturals: Naturals,
    rows: int,
    generator: torch.Generator,
    *,
    do: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Draw every node from its mechanism, in topological order; nodes in ``do`` are set instead: (1, rows, width)."""
    values: dict[str, Tensor] = {}
    for node in structure.graph.order:
        if do is not None and node in do:
            values[node] = do[node].expand(-1, rows, -1)
            continue
        mechanism = structure.mechanisms[node]
        if mechanism.is_given:
            raise ModelError(f"node {node!r} is Given: pass its values, for instance sample(given=table)")
        noise = draw_noise(mechanism.noise, (1, rows), generator)
        value = mechanism.forward(naturals[node], structure.parents(node, values), noise)
        values[node] = value.detach().expand(-1, rows, -1)
    return values
