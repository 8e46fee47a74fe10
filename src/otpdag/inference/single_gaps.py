"""Rows that miss a single cell: points that lie evenly over all that it may hold.

A mean over few draws has noise, and a fixed point at which estimates and completed rows agree multiplies it by how
little of the information is seen. One unknown cell has an integral in one dimension, which as many evenly spread points
give to many digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.structure import Structure

__all__ = ["EvenPoints", "single_gaps"]


@dataclass(frozen=True, eq=False)
class EvenPoints:
    """Points of one node in rows that miss one of its cells and nothing else."""

    node: str
    rows: Tensor
    values: Tensor
    """(R, n, points, width)."""
    log_volume: Tensor
    """(R, n, points)."""


def single_gaps(
    structure: Structure, batch: Batch, draws: Mapping[str, Tensor], generator: torch.Generator
) -> Iterator[EvenPoints]:
    """Points for all rows that miss one cell, cell by cell of the table; hidden nodes are missing in every row.

    Args:
        structure: Graph and mechanisms.
        batch: Rows with gaps.
        draws: Joint draws of every node (R, N, points, width), which tell where a cell's values are.
        generator: Shifts the points of each row.
    """
    graph = structure.graph
    if any(graph.observed_descendants(node) for node in graph.hidden):
        return
    missing = sum((~mask[0]).sum(-1) for mask in batch.mask.values())
    for node in graph.observed:
        space = structure.mechanisms[node].space
        for cell in range(space.cells):
            rows = torch.nonzero((missing == 1) & ~batch.mask[node][0, :, cell])[:, 0]
            if not len(rows):
                continue
            values = draws[node][:, rows]
            own = space.cell_of(values, cell)
            phase = torch.rand(len(rows), 1, generator=generator, dtype=torch.float64)
            evenly = space.around(own, phase)
            if evenly is not None:
                own.copy_(evenly[0])
                yield EvenPoints(node, rows, values, evenly[1])
