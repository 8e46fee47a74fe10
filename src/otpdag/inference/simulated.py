"""Data that a model makes of its own: complete, or with the gaps and covariates of given data."""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.inference.ancestral import ancestral, ancestral_sequences
from otpdag.structure import Naturals, Structure

__all__ = ["complete_batch", "simulated_rows", "simulated_sequences"]


def complete_batch(structure: Structure, values: dict[str, Tensor]) -> Batch:
    """Sampled values (1, N, width) as a batch in which every cell is seen."""
    observed = structure.graph.observed
    rows = values[observed[0]].shape[1]
    seen = {n: torch.ones(1, rows, structure.mechanisms[n].space.cells, dtype=torch.bool) for n in observed}
    return Batch({n: values[n] for n in observed}, seen, torch.ones(1, rows, dtype=torch.float64))


def simulated_rows(structure: Structure, naturals: Naturals, batch: Batch, size: int, seed: int) -> Batch:
    """Rows that the model makes, each with the gaps and covariates of a random row of a batch."""
    generator = torch.Generator().manual_seed(seed)
    pattern = batch.take(torch.randint(batch.rows, (size,), generator=generator))
    given = {node: pattern.values[node][:1] for node in structure.given}
    with torch.no_grad():
        values = ancestral(structure, naturals, size, generator, do=given)
    return _with_gaps(pattern, values)


def simulated_sequences(
    structure: Structure, naturals: Naturals, batch: SequenceBatch, size: int, seed: int
) -> SequenceBatch:
    """Sequences that the model makes, each as long as a random one of a batch, with its gaps and covariates."""
    generator = torch.Generator().manual_seed(seed)
    pattern = batch.take(torch.randint(len(batch.lengths), (size,), generator=generator))
    longest = int(pattern.lengths.max())
    column = torch.arange(longest).unsqueeze(0)
    last = (pattern.lengths - 1).unsqueeze(1)
    rows = pattern.starts.unsqueeze(1) + torch.minimum(column, last)
    given = {n: pattern.steps.values[n][:1, rows.flatten()].unflatten(1, rows.shape) for n in structure.given}
    with torch.no_grad():
        drawn = ancestral_sequences(structure, naturals, size, longest, generator, do=given)
    inside = (column <= last).flatten()
    values = {n: drawn[n].flatten(1, 2)[:, inside] for n in pattern.steps.values}
    return SequenceBatch(_with_gaps(pattern.steps, values), pattern.lengths)


def _with_gaps(pattern: Batch, values: dict[str, Tensor]) -> Batch:
    made = {n: torch.where(pattern.mask[n], values[n], 0.0) for n in pattern.values}
    return Batch(made, pattern.mask, torch.ones_like(pattern.weight[:1]))
