r"""Rows in parts that stay where they are, as one problem: the loss is a sum over rows, and so is its gradient.

.. math:: \ell(\theta) = \frac{\sum_k w_k \ell_k(\theta)}{\sum_k w_k}, \qquad
    \nabla \ell(\theta) = \frac{\sum_k w_k \nabla \ell_k(\theta)}{\sum_k w_k}

A step sends parameters to the parts, and brings a loss and a gradient back from each. Whatever needs single rows (short
runs of many starts, curvature, checks) looks at a random part that is held in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Self

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.parts import LocalParts, Parts, Reading
from otpdag.errors import ModelError
from otpdag.likelihood.row_problem import route_of, row_problem, rows_along_graph
from otpdag.problem import (
    LossTerms,
    Pace,
    Proposals,
    Refinement,
    RowObjective,
    Units,
    WrappedProblem,
    curvature,
    loss_and_gradient,
    units_of,
    with_gradient,
)

# of a table in memory: random rows on which a search settles, and rows from which on this pays (0025, 0047)
HELD_ROWS, FROM_ROWS = 25_000, 200_000

# Rows from which on sums along the graph go block by block, and rows of a block. Laid out at once, a million rows of
# eight columns take a gigabyte; block by block a third of that, but three times as long: points are placed anew in
# every pass.
BLOCKS_FROM, BLOCK_ROWS = 1_000_000, 2**14

# rows at hand of which the curvature is taken, where they have so few points and the model so few parameters
CURVED_ROWS_AT_HAND, MOST_POINTS, MOST_CURVED = 5_000, 100, 200

REPLICAS_AT_ONCE = 4  # replicas that a part is evaluated for at a time: more would take more memory than rows do


@dataclass(frozen=True)
class PartitionedProblem(WrappedProblem, Units):
    """Parts of the rows, each a problem of its own; ``base`` is that of random rows at hand, laid out as they are.

    Attributes:
        problems: Those of the parts, where they are.
        total: Rows of all parts.
        placed: Parameters at which points of unknown numbers are placed; None if none were placed yet.
        whole: Lays all rows out at once, where they are in memory anyway.
    """

    base: Units
    problems: Parts
    total: int
    placed: Tensor | None = None
    whole: Callable[[], Units] | None = None

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return self.total

    def loss(self, point: Tensor) -> LossTerms:
        """The loss of a row: reported as reconstruction, since its parts are not told apart."""
        prior = self.structure.penalty(self.naturals(point)) / self.unit_mass.sum(-1)
        loss = with_gradient(self.gathered, point) + prior
        return LossTerms.of(loss, reconstruction=loss)

    def gathered(self, point: Tensor, slope: bool) -> tuple[Tensor, Tensor]:
        """Loss (R,) and gradient (R, P) from all parts; without ``slope`` the latter is zero."""
        weight, loss, gradient = torch.zeros(1).to(point), point.new_zeros(len(point)), torch.zeros_like(point)
        for own, part_loss, part_gradient in self.problems.each(_evaluated, point, self.placed, slope):
            weight, loss, gradient = weight + own, loss + part_loss, gradient + part_gradient
        return loss / weight, gradient / weight.unsqueeze(-1)

    @property
    def is_likelihood(self) -> bool:
        """As of the rows at hand."""
        return self.base.is_likelihood

    @property
    def pace(self) -> Pace:
        """Where rows cost little, few passes over all parts follow, each nearly a step of Newton's method."""
        return replace(super().pace, renews_curvature=self._curved is not None)

    def metric(self, points: Tensor) -> Tensor | None:
        """Of many of the rows at hand: a second derivative there costs less than a pass over all parts."""
        if self._curved is None or not 0 < points.shape[1] <= MOST_CURVED:
            return None
        placed = [(self._curved.laid_out_for(point), point) for point in points.split(1)]
        return torch.stack([curvature(rows.loss, point, at_once=REPLICAS_AT_ONCE) for rows, point in placed])

    @cached_property
    def _curved(self) -> Units | None:
        """Some of the rows at hand one by one, if that is little work."""
        rows = self.base.row_by_row(CURVED_ROWS_AT_HAND)
        return rows if rows.pace.points_per_row <= MOST_POINTS else None

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> Units:
        """Of the rows at hand, as many as there are."""
        if isinstance(rows, Tensor):
            return self.in_units().subset(rows, coarse=coarse)
        return self.base.subset(min(rows, self.base.rows), coarse=coarse)

    def laid_out_for(self, points: Tensor) -> Self:
        """Points of unknown numbers placed for these replicas, in all parts."""
        sample = self.base.laid_out_for(points)
        return self if sample is self.base else replace(self, base=sample, placed=points.detach().clone())

    def refine(self, point: Tensor) -> Refinement | None:
        """What the rows at hand are moved to, as long as that changes their loss."""
        moved = self.base.refine(point)
        if moved is None:
            return None
        problem = replace(self, base=units_of(moved.problem), placed=moved.point.detach().clone())
        return replace(moved, problem=problem)

    def proposals(self, point: Tensor) -> Proposals | None:
        """As the rows at hand suggest."""
        return self.base.proposals(point)

    # -- rows: they may not be at hand ---------------------------------------------------------------------------------

    def in_units(self) -> Units:
        """All rows laid out at once, where they are in memory; else refused."""
        if self.whole is None:
            raise ModelError(
                "rows of a partitioned table are not at hand, so that they cannot be picked, weighted or resampled: "
                "for intervals, fit a random part of them in memory"
            )
        return self.whole()

    @property
    def weight(self) -> Tensor:
        """Weights of the rows (1, N)."""
        return self.in_units().weight

    @property
    def unit_mass(self) -> Tensor:
        """Weights of the rows (1, N), whose mean is one; of rows that are not at hand, their sum (1, 1)."""
        return self.weight if self.whole is not None else torch.full((1, 1), float(self.total)).double()

    def reweighted(self, factors: Tensor) -> Units:
        """The same rows with other weights."""
        return self.in_units().reweighted(factors)

    def unit_losses(self, points: Tensor) -> Tensor:
        """The loss of every row (R, N)."""
        return self.in_units().unit_losses(points)

    def simulated(self, point: Tensor, size: int, seed: int) -> Units:
        """Like the rows at hand."""
        return self.base.simulated(point, size, seed)


def rows_in_blocks(about: RowObjective, batch: Batch, seed: int) -> Units:
    """Many rows in memory, block by block where sums along the graph would hold what is unknown of all at once."""
    sample = batch.part(HELD_ROWS, seed)
    has_gaps = bool(about.structure.graph.hidden) or not all(bool(seen.all()) for seen in batch.mask.values())
    if has_gaps and about.weights.is_sum_over_rows and route_of(about, sample) is rows_along_graph:
        begins = range(0, batch.rows, BLOCK_ROWS)
        blocks = LocalParts(lambda: (batch.between(begin, begin + BLOCK_ROWS) for begin in begins))
        part = _without_priors(about)
        problems = blocks.mapped(lambda block, number: rows_along_graph(part, block, seed), keep=False)
        whole = cache(lambda: rows_along_graph(about, batch.widened(), seed))
        return PartitionedProblem(rows_along_graph(about, sample, seed), problems, batch.rows, whole=whole)
    return row_problem(about, batch.widened(), seed)


def part_problem(frame: Any, number: int, reading: Reading, about: RowObjective, seed: int) -> Units:
    """The problem of one part, made where the part is."""
    return row_problem(_without_priors(about), reading.batch(frame, number), seed + number)


def _without_priors(about: RowObjective) -> RowObjective:
    """The objective of one of many parts: the whole has the priors, once."""
    return replace(about, structure=replace(about.structure, counts_priors=False))


def _evaluated(
    problem: Units, number: int, point: Tensor, placed: Tensor | None, slope: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, loss (R,) and gradient (R, P) of one part, both times the weight."""
    problem = problem if placed is None else problem.laid_out_for(placed)
    weight = problem.weight.sum(-1)
    parts = point.split(REPLICAS_AT_ONCE) if placed is None or len(placed) == 1 else (point,)
    if slope:
        losses, gradients = zip(*(loss_and_gradient(problem.loss, few) for few in parts), strict=True)
        return weight, weight * torch.cat(losses), weight.unsqueeze(-1) * torch.cat(gradients)
    with torch.no_grad():
        return weight, weight * torch.cat([problem.loss(few).total for few in parts]), torch.zeros_like(point)
