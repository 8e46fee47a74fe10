"""Rows of a table as a problem, with what they miss summed along the graph: any pattern of unknowns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.backward.elimination import (
    Budget,
    Layout,
    Tempering,
    WeighedRows,
    expectations,
    lay_out,
    lay_out_within,
    log_evidence,
    moved,
    restless_copies,
    told,
    total_evidence,
)
from otpdag.backward.elimination.family_statistics import Rows, Statistics
from otpdag.data import Batch, random_part
from otpdag.inference.simulated import simulated_rows
from otpdag.mechanisms.base import Mechanism, Params
from otpdag.objective.problem import Moved, Problem
from otpdag.objective.row_objective import RowObjective
from otpdag.objective.settings import ClosedForm, Objective
from otpdag.objective.terms import LossTerms
from otpdag.structure import Structure, pack, unpack

__all__ = ["SAME_SUM", "WORST_LOSS", "GraphProblem", "rows_along_graph"]

FINE_TABLE = 2048
"""Entries of one table of one row up to which unknown numbers have more points than they need: fewer would save
nothing."""

SAME_SUM = 1e-6
"""A relative change of the loss below which points of unknown numbers that are placed anew make no difference."""

MOST_AT_ONCE = 60
"""Parameters of a node up to which a second derivative of its expected log-density is worth its passes."""

CURVED_ENTRIES = 2**11
"""Entries of the tables of rows, by node, that tell the curvature of its expected log-density."""

FLATTEST = 1e-9
"""The smallest curvature, relative to the largest, by which a step is divided."""

FLATTEST_OF_SAMPLE = 2e-3
"""The same where a sample tells the curvature: what it does not show is no rarer than this."""

WORST_LOSS = 1e12
"""What counts as the loss of a row that the model rules out: finite, so that quantiles and means stay so."""


@dataclass(frozen=True)
class GraphProblem(Problem):
    """Rows whose unknowns fall into pieces of the graph, each summed along a good order of elimination."""

    structure: Structure
    batch: Batch
    shapes: Mapping[str, tuple[int, ...]]
    objective: Objective
    closed: ClosedForm
    seed: int
    unplaced: Layout
    """Rows laid out, with points of numbers and counts around their columns."""
    placed: Layout
    """The same with points where posteriors are."""
    placed_for: Tensor | None = None
    """The parameters whose posteriors they are."""

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.batch.rows

    @property
    def points_per_row(self) -> int:
        """Entries of all tables, by row."""
        return max(1, self.unplaced.elements // self.rows)

    @property
    def tempering(self) -> Tempering:
        """How the densities of what is seen are weighed."""
        weights = self.objective.at(1.0)
        return Tempering(weights.reconstruction / weights.eps, uniform=self.closed.reference == "uniform")

    def terms(self, point: Tensor) -> LossTerms:
        """The loss of a row: reported as reconstruction, since its parts are not told apart."""
        weight = self.batch.weight
        total = total_evidence(self.naturals(point), self.placed, weight, self.tempering)
        loss = -self.objective.at(1.0).eps * total / weight.sum(-1)
        return LossTerms.of(loss, reconstruction=loss)

    @property
    def is_likelihood(self) -> bool:
        """Unless densities are tempered."""
        return self.tempering == Tempering() and self.objective.at(1.0).eps == 1.0

    @property
    def is_sum(self) -> bool:
        """Always."""
        return True

    @property
    def has_updates(self) -> bool:
        """Whether the objective is the likelihood, and no two nodes share a parameter; networks are left to descent."""
        keys = [key for names in self.structure.keys.values() for key in names.values()]
        plain = self.tempering == Tempering() and len(keys) == len(set(keys))
        sizes = [
            sum(math.prod(self.shapes[key]) for key in names.values())
            for node, names in self.structure.keys.items()
            if not self._has_maximiser(node)
        ]
        return plain and max(sizes, default=0) <= MOST_AT_ONCE

    def updated(self, point: Tensor) -> tuple[Tensor, LossTerms]:
        """One step of expectation-maximisation: expected statistics, then each mechanism's own maximiser.

        A mechanism without one goes a step of Newton's method up its expected log-density, or less if that is too far.
        """
        theta, naturals, weight = self.parts(point.detach())[0], self.naturals(point.detach()), self.batch.weight
        climbing = [node for node, names in self.structure.keys.items() if names and not self._has_maximiser(node)]
        summary = expectations(naturals, self.placed, weight, sampled=dict.fromkeys(climbing, CURVED_ENTRIES))
        total = summary.pieces.clone()
        after = dict(theta)
        for node, statistics in summary.families.items():
            names, mechanism = self.structure.keys[node], self.structure.mechanisms[node]
            if node in climbing:
                raw = {key: theta[key].expand(len(point), *self.shapes[key]) for key in names.values()}
                slopes = {name: slope for (owner, name), slope in summary.slopes.items() if owner == node}
                reached, complete = _newton_step(mechanism, raw, names, statistics, slopes)
                after |= reached
                total += complete
                continue
            with torch.no_grad():
                total += sum(complete for one in statistics for complete, _ in one.parts(naturals[node]))
                if names:
                    own = mechanism.raw(self._maximised(node, naturals[node], statistics))
                    after |= {key: own[name] for name, key in names.items()}
        loss = -total / weight.sum(-1)
        moved_to = pack({key: after[key].expand(len(point), *shape) for key, shape in self.shapes.items()})
        return moved_to, LossTerms.of(loss, reconstruction=loss)

    def _has_maximiser(self, node: str) -> bool:
        return self.structure.mechanisms[node].has_maximiser

    def _maximised(self, node: str, params: Params, statistics: Sequence[Statistics]) -> dict[str, Tensor]:
        """Statistics of a family as weighted rows, side by side, for its mechanism."""
        parts = [one.rows() for one in statistics]
        rows = [part for made in parts for part in ([made] if isinstance(made, WeighedRows) else made)]
        replicas = max(len(part.weight) for part in rows)
        names = (node, *self.structure.graph.parents(node))
        values = {name: torch.cat([_flat(part, name, replicas) for part in rows], 1) for name in names}
        weight = torch.cat([part.weight.expand(replicas, *part.weight.shape[1:]).flatten(1) for part in rows], 1)
        parents = {name: value for name, value in values.items() if name != node}
        return self.structure.mechanisms[node].maximised(params, values[node], parents, weight)

    @property
    def approximation(self) -> str | None:
        """What exact sums would take, and what is done instead."""
        return None if self.unplaced.beyond is None else told(self.unplaced)

    def notes_at(self, point: Tensor) -> tuple[str, ...]:
        """What is approximate, and whether its messages came to rest."""
        if self.approximation is None:
            return ()
        restless, pairs = restless_copies(self.naturals(point.detach()), self.placed, self.tempering)
        if not restless:
            return (self.approximation,)
        return (
            self.approximation,
            f"messages between {restless} of {pairs} pairs of copies had not come to rest: sums there are rougher than "
            "elsewhere; a larger `largest_table` needs fewer copies",
        )

    def on_part(self, rows: int | Tensor, *, coarse: bool = False) -> Problem:
        """Fewer rows."""
        part = random_part(self.rows, rows, self.seed)
        if part is None:
            return self
        batch = self.batch.take(part)
        layout = lay_out(self.structure, batch, self.unplaced.options)
        return replace(self, batch=batch, unplaced=layout, placed=layout, placed_for=None)

    def laid_out_for(self, points: Tensor, *, precisely: bool = False) -> GraphProblem:
        """Place the points of numbers and counts where the posteriors of these replicas are."""
        if not self.unplaced.has_points or (self.placed_for is not None and torch.equal(points, self.placed_for)):
            return self
        naturals = self.naturals(points.detach())
        if self.placed_for is not None and len(points) == len(self.placed_for):
            near = moved(naturals, self.placed, self.tempering)
            if not near.is_outgrown:
                return replace(self, placed=near, placed_for=points.detach())
        placed = moved(naturals, self.unplaced, self.tempering)
        return replace(self, placed=placed, placed_for=points.detach())

    def moved(self, point: Tensor) -> Moved | None:
        """Points moved to the posteriors, as long as that changes the loss."""
        if not self.unplaced.has_points:
            return None
        anew = self.laid_out_for(point)
        if anew is self:
            return None
        before, after = self._loss_alone(point), anew._loss_alone(point)
        same = (after - before).abs() <= SAME_SUM * (1 + after.abs())
        if bool(same.all()) or not bool(torch.isfinite(after).all()):
            return None
        return Moved(anew, point, "moved grids", after)

    def _loss_alone(self, point: Tensor) -> Tensor:
        """The loss without its gradient."""
        evidence = log_evidence(self.naturals(point.detach()), self.placed, self.tempering)
        weight = self.batch.weight
        return -self.objective.at(1.0).eps * (weight * evidence).sum(-1) / weight.sum(-1)

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> Tensor:
        """Weights of the rows (1, N)."""
        return self.batch.weight

    def reweighted(self, factors: Tensor) -> GraphProblem:
        """The same rows with other weights."""
        return replace(self, batch=replace(self.batch, weight=self.batch.weight * factors))

    def unit_losses(self, points: Tensor) -> Tensor:
        """The loss of every row (R, N)."""
        placed = self.laid_out_for(points).placed
        losses = -self.objective.at(1.0).eps * log_evidence(self.naturals(points.detach()), placed, self.tempering)
        return losses.nan_to_num(nan=WORST_LOSS, posinf=WORST_LOSS)

    def simulated(self, point: Tensor, size: int, seed: int) -> GraphProblem:
        """Rows that the model makes, each with the gaps and covariates of a random row."""
        batch = simulated_rows(self.structure, self.naturals(point.detach()), self.batch, size, seed)
        layout = lay_out(self.structure, batch, self.unplaced.options)
        return replace(self, batch=batch, unplaced=layout, placed=layout, placed_for=None)


def rows_along_graph(about: RowObjective, batch: Batch, seed: int) -> GraphProblem | None:
    """Lay rows out along the graph; None where that does not apply (other terms, nodes without a density)."""
    objective, sums = about.weights, about.closed.sums
    if objective.direct is not None or not objective.is_likelihood:
        return None
    budget = Budget(sums.largest_table, sums.memory, sums.entries, sums.approximate, fine_table=FINE_TABLE)
    layout = lay_out_within(about.structure, batch, budget)
    if layout is None:
        return None
    return GraphProblem(about.structure, batch, about.shapes, objective, about.closed, seed, layout, layout)


def _newton_step(
    mechanism: Mechanism,
    raw: Mapping[str, Tensor],
    names: Mapping[str, str],
    statistics: Sequence[Statistics],
    slopes: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], Tensor]:
    """One node's raw parameters, moved up its expected log-density; what would go down stays.

    A sample of the rows tells the curvature. Its height is tilted until its gradient is that of all rows: of those
    that show the family, and by ``slopes`` (in natural parameters) of those on points. Also returns the sum of the
    log-densities of rows that show the family (R,).
    """
    if not statistics:
        return dict(raw), torch.zeros(len(next(iter(raw.values())))).to(next(iter(raw.values())))
    shapes = {key: tuple(value.shape[1:]) for key, value in raw.items()}

    def natural(flat: Tensor) -> dict[str, Tensor]:
        parts = unpack(flat, shapes)
        return mechanism.natural({name: parts[key] for name, key in names.items()})

    def height(flat: Tensor) -> Tensor:
        params = natural(flat)
        return torch.stack([one.height(params).expand(len(flat)) for one in statistics]).sum(0)

    with torch.enable_grad():
        leaf = pack(raw).detach().requires_grad_(True)
        params = natural(leaf)
        complete = torch.zeros(len(leaf)).to(leaf)
        exact = torch.zeros(()).to(leaf)
        for shown, expected in (part for one in statistics for part in one.parts(params)):
            complete += shown.detach()
            exact = exact + (shown + expected).sum()
        exact = exact + sum((value * slopes[name]).sum() for name, value in params.items() if name in slopes)
        (slope,) = torch.autograd.grad(exact, leaf)
        before, own, curvature = _curved(height, leaf)
    with torch.no_grad():
        values, vectors = torch.linalg.eigh(-curvature.nan_to_num())
        thinned = any(isinstance(one, Rows) and one.thinned for one in statistics)
        flattest = FLATTEST_OF_SAMPLE if thinned else FLATTEST
        bend = values.abs().maximum(flattest * values.abs().amax(-1, keepdim=True)).clamp(min=1e-30)
        step = (vectors @ ((vectors.mT @ slope.unsqueeze(-1)) / bend.unsqueeze(-1))).squeeze(-1)
        tilt = ((slope - own) * step).sum(-1)
        reached = leaf.detach()
        waiting = torch.ones_like(before, dtype=torch.bool)
        for size in (1.0, 0.25, 0.05):
            trial = leaf + size * step
            higher = waiting & (height(trial) + size * tilt >= before)
            reached = torch.where(higher.unsqueeze(-1), trial, reached)
            waiting = waiting & ~higher
            if not bool(waiting.any()):
                break
    return unpack(reached, shapes), complete


def _curved(height: Callable[[Tensor], Tensor], leaf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A height (R,), its gradient (R, P) and its second derivative (R, P, P) at ``leaf`` (R, P).

    A single replica stands P times on the replica axis, so that one pass gives all rows of its second derivative.
    """
    size = leaf.shape[-1]
    if len(leaf) > 1:
        before = height(leaf)
        (own,) = torch.autograd.grad(before.sum(), leaf, create_graph=True)
        rows = [torch.autograd.grad(one.sum(), leaf, retain_graph=True)[0] for one in own.unbind(-1)]
        return before, own, torch.stack(rows, 1)
    copies = leaf.detach().expand(size, size).clone().requires_grad_(True)
    before = height(copies)
    (own,) = torch.autograd.grad(before.sum(), copies, create_graph=True)
    (rows_of_one,) = torch.autograd.grad(own.diagonal().sum(), copies)
    return before[:1], own[:1], rows_of_one.unsqueeze(0)


def _flat(rows: WeighedRows, name: str, replicas: int) -> Tensor:
    """Values of weighted rows (R, n, width), whatever axes they have."""
    shape = (replicas, *rows.weight.shape[1:], rows.values[name].shape[-1])
    return rows.values[name].expand(shape).flatten(1, -2)
