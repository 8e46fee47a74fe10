"""Rows of a table as a problem: the closed-form terms over groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from otpdag.data import Batch, random_part
from otpdag.likelihood.entropic_terms import closed_terms, row_losses
from otpdag.likelihood.enumeration import RowGroup, enumerates_easily, group_rows
from otpdag.likelihood.graph_problem import SAME_SUM, WORST_LOSS, rows_along_graph
from otpdag.likelihood.moment_problem import MomentProblem
from otpdag.likelihood.posterior_grids import adapted
from otpdag.likelihood.row_moments import moments_of
from otpdag.likelihood.rows import RowObjective, TableRows, count_ranges
from otpdag.likelihood.state_problem import rows_by_features
from otpdag.likelihood.swapped_states import swapped_rows
from otpdag.problem import LossTerms, Pace, Proposals, Refinement, Units, curvature
from otpdag.settings import ClosedForm, Objective
from otpdag.structure import Structure

CURVED_ROWS, CURVED_FROM = 1_000, 10_000
"""Rows of which the curvature is taken, and rows from which on that pays (steps fall to a third: 15 to 7, 30 to 10)."""


@dataclass(frozen=True)
class RowProblem(TableRows):
    """Rows with the fixed points that stand for what they miss."""

    structure: Structure
    batch: Batch
    shapes: Mapping[str, tuple[int, ...]]
    objective: Objective
    closed: ClosedForm
    seed: int
    groups: tuple[RowGroup, ...] = ()

    @property
    def _about(self) -> RowObjective:
        return RowObjective(self.structure, self.shapes, self.objective, self.closed)

    @property
    def pace(self) -> Pace:
        """The work of the group that has most points, once placed."""
        return Pace(points_per_row=max((group.least_points for group in self.groups), default=1))

    def loss(self, point: Tensor) -> LossTerms:
        """Loss terms with all points fixed."""
        push = self.objective.push_forward
        return closed_terms(
            self.structure,
            self.naturals(point),
            self.groups,
            self.objective.at(1.0),
            divergence=None if push is None else push.divergence,
            reference=self.closed.reference,
            split=point.shape[0] == 1,
        )

    @property
    def is_likelihood(self) -> bool:
        """The closed form at temperature one, with nothing added."""
        weights = self.objective.at(1.0)
        return self.is_sum and weights.eps == weights.reconstruction == 1.0

    @property
    def is_sum(self) -> bool:
        """Also at another temperature."""
        weights, closed = self.objective, self.closed
        return weights.is_likelihood and closed.reference == "model" and weights.reconstruction == 1.0

    def metric(self, points: Tensor) -> Tensor | None:
        """Of a part of many rows: a step on all of them costs more than the second derivative there."""
        if self.rows < CURVED_FROM:
            return None
        return curvature(lambda: self.subset(CURVED_ROWS).laid_out_for(points), points)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> Units:
        """Fewer rows and, if ``coarse``, grids of half the points."""
        part = random_part(self.rows, rows, self.seed)
        batch = self.batch if part is None else self.batch.take(part)
        sums = replace(self.closed.sums, grid=self.closed.sums.grid // 2) if coarse else self.closed.sums
        return row_problem(replace(self._about, closed=replace(self.closed, sums=sums)), batch, self.seed)

    # -- points of unknown numbers, and weights of features -----------------------------------------------------------

    def laid_out_for(self, points: Tensor, *, precisely: bool = False) -> Self:
        """Place the points of several unknown numbers, of which few from the prior would count; or, precisely, all."""
        if precisely:
            return self._at_posteriors(points) or self
        if all(group.base is None for group in self.groups):
            return self
        naturals = self.naturals(points)
        placed = tuple(g if g.base is None else adapted(self.structure, naturals, g) for g in self.groups)
        return replace(self, groups=placed)

    def refine(self, point: Tensor) -> Refinement | None:
        """Grids moved to the posteriors, as long as that changes the loss."""
        placed = self._at_posteriors(point)
        if placed is None:
            return None
        with torch.no_grad():
            return Refinement(placed, point, "moved grids", placed.loss(point).total)

    def proposals(self, point: Tensor) -> Proposals | None:
        """The point (1, P) with states of a hidden category swapped."""
        return swapped_rows(self, point)

    def _at_posteriors(self, points: Tensor) -> Self | None:
        """The problem with its points where the posteriors are, if that makes a difference to the loss."""
        if not any(group.noise and not group.quadratic for group in self.groups):
            return None
        naturals = self.naturals(points)
        moved = replace(self, groups=tuple(adapted(self.structure, naturals, group) for group in self.groups))
        if not all(group.serves(len(points)) for group in self.groups):
            return moved
        with torch.no_grad():
            before, after = self.loss(points).total, moved.loss(points).total
        same = (after - before).abs() <= SAME_SUM * (1 + after.abs())
        return None if bool(same.all()) or not bool(torch.isfinite(after).all()) else moved

    # -- rows ---------------------------------------------------------------------------------------------------------

    def reweighted(self, factors: Tensor) -> RowProblem:
        """The same rows with other weights, in every term."""
        groups = tuple(replace(group, weight=group.weight * factors[:, group.rows]) for group in self.groups)
        batch = replace(self.batch, weight=self.batch.weight * factors)
        return replace(self, batch=batch, groups=groups)

    def unit_losses(self, points: Tensor) -> Tensor:
        """The loss of every row (R, N)."""
        problem = self.laid_out_for(points)
        with torch.no_grad():
            eps = self.objective.at(1.0).eps
            losses = row_losses(self.structure, self.naturals(points), problem.groups, eps)
        return losses.nan_to_num(nan=WORST_LOSS, posinf=WORST_LOSS)

    def simulated(self, point: Tensor, size: int, seed: int) -> Units:
        """Rows that the model makes, each with the gaps and covariates of a random row."""
        return row_problem(self._about, self.drawn(point, size, seed), seed)


def row_problem(about: RowObjective, batch: Batch, seed: int) -> Units:
    """Rows laid out for the closed form: summed up where moments tell all that the model reads, else one by one.

    The same seed lays them out alike.
    """
    summed = summed_rows(about, batch, seed)
    if summed is not None:
        return summed
    if _is_plain_likelihood(about):
        in_rows = partial(each_row_problem, about)
        by_states = rows_by_features(about.structure, batch, about.shapes, in_rows, seed)
        if by_states is not None:
            return by_states
    return each_row_problem(about, batch, seed)


def summed_rows(
    about: RowObjective, batch: Batch, seed: int, in_order: Callable[[], Batch] | None = None
) -> MomentProblem | None:
    """Rows as moments, where these tell all that the model reads; else None.

    ``in_order`` makes the same rows, which are complete then, in the order in which they are asked for by number.
    """
    moments = moments_of(about.structure, batch, about.shapes) if _is_plain_likelihood(about) else None
    if moments is None:
        return None
    in_rows, anew = partial(each_row_problem, about), partial(row_problem, about)
    return MomentProblem(about.structure, about.shapes, moments, in_rows, anew, seed, in_order)


def _is_plain_likelihood(about: RowObjective) -> bool:
    objective, weights = about.weights, about.weights.at(1.0)
    plain = weights.eps == weights.reconstruction == 1.0 and about.closed.reference == "model"
    return plain and objective.is_likelihood


def each_row_problem(about: RowObjective, batch: Batch, seed: int) -> Units:
    """Rows one by one: enumerated where what they miss is little, else summed along the graph."""
    structure, objective, sums = about.structure, about.weights, about.closed.sums
    if not enumerates_easily(structure, batch, sums):
        along = rows_along_graph(about, batch, seed)
        if along is not None:
            return along
    generator = torch.Generator().manual_seed(seed)
    ranges, exact = count_ranges(structure, batch.values), objective.is_likelihood
    groups = group_rows(structure, batch, generator=generator, options=sums, count_range=ranges, exact=exact)
    return RowProblem(structure, batch, about.shapes, objective, about.closed, seed, tuple(groups))
