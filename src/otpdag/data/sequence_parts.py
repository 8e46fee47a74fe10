"""Parts of sequences, on which a search begins before it sees them all."""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch

__all__ = ["part_of"]

PIECE = 250
"""Steps in a piece of a long sequence, at least: its first step is explained by itself, one error in 250."""

PIECES = 40
"""Pieces that a part has, if sequences are long: enough to see all of a series."""


def part_of(batch: SequenceBatch, steps: int | Tensor, seed: int) -> SequenceBatch:
    """A random part of about that many steps, whole sequences or pieces of long ones; or the sequences asked for."""
    if isinstance(steps, Tensor):
        return batch.take(steps)
    if batch.rows <= steps:
        return batch
    pieces = batch.cut(max(PIECE, min(int(batch.lengths.max()), steps // PIECES)))
    order = torch.randperm(len(pieces.lengths), generator=torch.Generator().manual_seed(seed))
    enough = int((pieces.lengths[order].cumsum(0) < steps).sum()) + 1
    return pieces.take(order[:enough])
