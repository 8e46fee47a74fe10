"""Rows of a table as a problem: which way they are summed, and the one along the graph, for any pattern of unknowns.

The way is chosen once, from graph, mechanisms, gaps and objective: the first that holds.

| What holds | Route |
|---|---|
| terms are weighed otherwise than in a likelihood | graph |
| every node is normal and linear in numbers, and rows show few different sets of cells | moments |
| hidden categories alone are unknown, and every observed node is read through features | states |
| anything else | graph |

All give the same likelihood. Sequences and documents have problems of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.likelihood.elimination.evidence import (
    Counts,
    complete_sums,
    expectations,
    log_evidence,
    moved,
    on_other_points,
    total_evidence,
)
from otpdag.likelihood.elimination.layout import Layout, lay_out, lay_out_within
from otpdag.likelihood.elimination.plans import EliminationOptions
from otpdag.likelihood.elimination.posterior import state_probabilities
from otpdag.likelihood.elimination.sums import Tempering
from otpdag.likelihood.linear_normal import MomentProblem, gap_groups, rows_as_moments
from otpdag.likelihood.m_step import information, maximised, newton_step
from otpdag.likelihood.push_forward import push_forward, pushed_nodes
from otpdag.likelihood.state_problem import StateProblem, has_features, rows_by_states
from otpdag.likelihood.swapped_states import swapped_rows
from otpdag.mechanisms import Normal
from otpdag.mechanisms.base import has_closed_form
from otpdag.mechanisms.parameters import Ridge
from otpdag.problem import (
    LossTerms,
    Pace,
    Proposals,
    Refinement,
    RowObjective,
    TableRows,
    Units,
    Updates,
    packed_point,
    split_point,
)
from otpdag.settings import ClosedForm, Objective
from otpdag.structure import Naturals, Structure, parameter_places

# entries of one table of one row up to which unknown numbers have more points than they need: fewer would save nothing
FINE_TABLE = 2048

# parameters of a node up to which a second derivative of its expected log-density is worth its passes
MOST_AT_ONCE = 60

CURVED_ENTRIES = 2**10  # entries of the tables of rows, by node, that tell the curvature of its expected log-density

LEAST_COUNT = 0.1  # rows that tell of a state of a table at least, where slopes are set off against what they tell

# up to which moments are read: groups of rows that show the same cells, each of which costs about as much as so many
# columns' worth of rows, and parameters, whose square is held
MOST_GROUPS, COLUMNS_FOR_EACH_ROW, MOST_PARAMETERS = 512, 4, 4_000

# spreads of columns between which no digit is lost in fourth powers of deviations, which gradients of moments hold
SMALLEST, LARGEST = 1e-60, 1e60

# what counts as the loss of a row that the model rules out: finite, so that quantiles and means stay so
WORST_LOSS = 1e12


@dataclass(frozen=True)
class GraphProblem(TableRows):
    """Rows whose unknowns fall into pieces of the graph, each summed along a good order of elimination.

    Attributes:
        unplaced: Rows laid out, with points of numbers and counts around their columns.
        placed: The same with points where posteriors are.
        placed_for: The parameters whose posteriors they are.
        most_curved: Parameters of networks up to which a matrix of how the loss bends is worth its time.
    """

    route: ClassVar[str] = "graph"

    objective: Objective
    closed: ClosedForm
    unplaced: Layout
    placed: Layout
    placed_for: Tensor | None = None
    most_curved: ClassVar[int] = 1_000

    @cached_property
    def complete(self) -> Mapping[int, Tensor]:
        """What rows that show all of a family add up to, whatever the parameters."""
        return complete_sums(self.unplaced, self.batch.weight)

    @cached_property
    def pace(self) -> Pace:
        """The work of a row: entries of the largest table for each of its pieces, or of all tables if that is less."""
        layout = self.unplaced
        largest = math.ceil(layout.pieces / self.rows) * layout.largest_table
        each = max(1, min(layout.elements // self.rows, largest))
        steps = 20 if self.networks else None
        return Pace(points_per_row=each, metric_steps=steps, easy_rows=self._rows_of_networks())

    def _rows_of_networks(self) -> Tensor | None:
        """Rows that show all that networks join, if there are others, and more of them than parameters."""
        nodes = {node for one in self.networks for node in (one, *self.structure.graph.parents(one))}
        shown = self.batch.shows(nodes)
        parameters = sum(math.prod(shape) for shape in self.shapes.values())
        return shown.nonzero().flatten() if parameters < int(shown.sum()) < self.rows else None

    @cached_property
    def networks(self) -> tuple[str, ...]:
        """Nodes with layers that are learned, few enough for a second derivative."""
        sizes = {
            node: sum(math.prod(self.shapes[key]) for key in names.values())
            for node, names in self.structure.keys.items()
            if any(name.startswith("network.") for name in names)
        }
        return tuple(sizes) if sum(sizes.values()) <= self.most_curved and not self.structure.ties_parameters else ()

    @property
    def tempering(self) -> Tempering:
        """How the densities of what is seen are weighed: the cheapest state counts alone where eps is zero."""
        weights, uniform = self.objective.at(1.0), self.closed.reference == "uniform"
        return Tempering(weights.reconstruction / (weights.eps or 1.0), uniform=uniform, best=not weights.eps)

    def loss(self, point: Tensor) -> LossTerms:
        r"""For each row, :math:`-\epsilon \log \sum_z \pi(z) P(x \mid z)^{w / \epsilon}`, and the push-forward term.

        A likelihood is reported as reconstruction: its parts are not told apart. Nor are they of several replicas.
        """
        naturals, weight = self.naturals(point), self.batch.weight
        total = total_evidence(naturals, self.placed, weight, self.tempering, self.complete)
        loss = self._as_loss(total, naturals)
        cost = loss if self.is_likelihood or len(point) > 1 else self._cost(naturals, loss)
        terms = LossTerms.of(loss, reconstruction=cost, entropic=loss - cost)
        eta, push = self.objective.at(1.0).eta, self.objective.push_forward
        if not eta or push is None:
            return terms
        pushed = push_forward(naturals, self.placed, weight, self.tempering, push.divergence)
        return terms + LossTerms.of(loss, divergence=eta * pushed)

    def _as_loss(self, total: Tensor, naturals: Naturals) -> Tensor:
        """The loss of a row (R,) from the evidence of all, and what priors add to it."""
        evidence = (self.objective.at(1.0).eps or 1.0) * total
        return (self.structure.penalty(naturals) - evidence) / self.batch.weight.sum(-1)

    def _cost(self, naturals: Naturals, loss: Tensor, step: float = 1e-4) -> Tensor:
        """The cost of a row (R,) under its posterior, by how the evidence changes with the power of what is seen.

        Errors of a relative step and of rounding are about 1e-8 both.
        """
        tempering, weight = self.tempering, self.batch.weight
        if tempering.best:
            return loss
        powers = [tempering.power * (1 + by) for by in (step, -step)]
        told = (log_evidence(naturals, self.placed, replace(tempering, power=power)) for power in powers)
        up, down = ((weight * one).sum(-1) for one in told)
        return self._as_loss((up - down) / (2 * step), naturals)

    @property
    def is_likelihood(self) -> bool:
        """Unless densities are tempered, or another term counts."""
        return self.is_sum and self.tempering == Tempering() and self.objective.at(1.0).eps == 1.0

    @property
    def is_sum(self) -> bool:
        """Unless all rows are compared with the model."""
        return not self.objective.at(1.0).eta

    @property
    def updates(self) -> Updates | None:
        """Where the objective is the likelihood, and no two nodes share a parameter; networks are left to descent.

        They suffice where all families are linear and normal, with gaps as all that is unknown: updates are quick then.
        With hidden nodes they creep, as most of what a row would tell is missing; so do probabilities near zero. Where
        numbers are hidden and some node has no maximiser, an update costs more than the step of descent that it saves.
        """
        plain = self.is_sum and self.tempering == Tempering() and not self.structure.ties_parameters
        plain = plain and not self.networks and not any(family.follows for family in self.unplaced.families)
        sizes = [
            sum(math.prod(self.shapes[key]) for key in names.values())
            for node, names in self.structure.keys.items()
            if not self._has_maximiser(node)
        ]
        if not plain or max(sizes, default=0) > MOST_AT_ONCE or (sizes and self.structure.hidden_numbers):
            return None
        learned = (node for node, names in self.structure.keys.items() if names)
        linear = not self.structure.graph.hidden and all(family.is_linear for family in self.unplaced.families)
        return Updates(suffice=linear and all(self._has_maximiser(node) for node in learned))

    def update(self, point: Tensor) -> tuple[Tensor, LossTerms]:
        """One step of expectation-maximisation: expected statistics, then each mechanism's own maximiser.

        A mechanism without one goes a step of Newton's method up its expected log-density, or less if that is too far.
        """
        point = point.detach()
        theta, naturals, weight = split_point(point, self.shapes)[0], self.naturals(point), self.batch.weight
        climbing = (node for node, names in self.structure.keys.items() if names and not self._has_maximiser(node))
        sampled = dict.fromkeys(climbing, CURVED_ENTRIES)
        summary = expectations(naturals, self.placed, weight, sampled=sampled, complete=self.complete)
        total, after = summary.pieces.clone(), dict(theta)
        for family in self.unplaced.families:
            mechanism, keys, own = family.mechanism, self.structure.keys[family.node], summary.families[family.node]
            if not own or not mechanism.has_density or mechanism.is_given:
                continue
            if family.node in sampled:
                raw, slopes = {name: theta[key] for name, key in keys.items()}, summary.slopes[family.node]
                reached, shown = newton_step(mechanism, raw, own, slopes)
            else:
                params = naturals[family.node]
                with torch.no_grad():
                    shown = torch.stack([complete for one in own for complete, _ in one.parts(params)]).sum(0)
                    reached = maximised(mechanism, params, own) if keys else {}
            total += shown
            after |= {keys[name]: value for name, value in reached.items()}
        loss = self._as_loss(total, naturals)
        return packed_point(after, self.shapes, len(point)), LossTerms.of(loss, reconstruction=loss)

    def metric(self, points: Tensor) -> Tensor | None:
        """Of logits of tables n p (1 - p), by expected counts n of a configuration and its probabilities p; else one.

        Rare states would otherwise be the last to move: their slopes are as small as their counts. Of nodes with a
        network it is a matrix, by the scores of rows that show node and parents, and the prior.
        """
        diagonal = self._table_metric(points)
        if not self.networks or not self.is_likelihood:
            return diagonal
        metric = torch.diag_embed(torch.ones_like(points) if diagonal is None else diagonal)
        places = parameter_places(self.shapes)
        for node in self.networks:
            columns = torch.cat([places[key].flatten() for key in self.structure.keys[node].values()])
            own = self._information(node, points)
            if own is not None:
                metric[:, columns[:, None], columns] = own
        return metric

    def _information(self, node: str, points: Tensor) -> Tensor | None:
        """What rows that show a node and its parents tell of its parameters (R, p, p); None where no row does."""
        mechanism, keys = self.structure.mechanisms[node], self.structure.keys[node]
        family = (node, *(name for name, _ in mechanism.family.parents))
        rows = self.batch.shows(family).nonzero()[:1000, 0]
        if not len(rows):
            return None
        own, *parents = (self.batch.values[name][0, rows] for name in family)
        theta, given = split_point(points, self.shapes)[0], dict(zip(family[1:], parents, strict=True))
        raws = ({name: theta[key][at : at + 1] for name, key in keys.items()} for at in range(len(points)))
        prior = getattr(mechanism, "network_prior", 0.0) / float(self.batch.weight.sum())
        shrunk = [prior * ("network." in name) * torch.ones(self.shapes[key]).flatten() for name, key in keys.items()]
        ridge = torch.diag(torch.cat(shrunk)).to(points)
        return torch.stack([information(mechanism, raw, own, given) + ridge for raw in raws])

    def _table_metric(self, points: Tensor) -> Tensor | None:
        """Of logits of tables (R, P); None where there are none."""
        tables = [family for family in self.placed.families if family.is_table]
        if not tables or not self.is_likelihood:
            return None
        places, weight = parameter_places(self.shapes), self.batch.weight
        others = (f.node for f in self.placed.families if not f.is_table and not f.is_linear)
        sampled = dict.fromkeys(others, 0)
        naturals = self.naturals(points)
        summary = expectations(naturals, self.placed, weight, sampled=sampled, complete=self.complete)
        told: dict[str, Tensor] = {}
        for family in tables:
            (summed,) = summary.families[family.node]
            assert isinstance(summed, Counts), "a table is summed up by its counts"
            counts = summed.table()
            share = counts / counts.sum(-1, keepdim=True).clamp(min=torch.finfo(counts.dtype).tiny)
            own = (counts * (1 - share)).flatten(1)
            keys = list(self.structure.keys[family.node].values())
            if len(keys) == 1 and places[keys[0]].numel() == own.shape[1]:
                told[keys[0]] = told.get(keys[0], 0.0) + own
        information = torch.ones_like(points)
        for key, own in told.items():
            information[:, places[key].flatten()] = own.clamp(min=LEAST_COUNT) / weight.sum(-1, keepdim=True)
        return information

    def _has_maximiser(self, node: str) -> bool:
        """Whether a node's M-step has a closed form, and is the one of its density."""
        family, masks = next(one for one in self.unplaced.families if one.node == node), self.batch.mask
        is_seen = not family.follows and all(name in masks and bool(masks[name].all()) for name in family.names)
        return (family.is_table or family.is_linear or is_seen) and has_closed_form(family.mechanism)

    def laid_out_for(self, points: Tensor) -> Self:
        """Place the points of numbers and counts where the posteriors of these replicas are."""
        if not self.unplaced.has_points or (self.placed_for is not None and torch.equal(points, self.placed_for)):
            return self
        naturals = self.naturals(points)
        if self.placed_for is not None and len(points) == len(self.placed_for):
            near = moved(naturals, self.placed, self.tempering)
            if not near.is_outgrown:
                return replace(self, placed=near, placed_for=points.detach())
        placed = moved(naturals, self.unplaced, self.tempering)
        return replace(self, placed=placed, placed_for=points.detach())

    def refine(self, point: Tensor) -> Refinement | None:
        """Points moved to the posteriors, or twice as many of them, as long as that changes the loss."""
        before = self._loss_alone(point)
        for make in (self.laid_out_for, self._finer):
            anew = make(point)
            after = before if anew is self else anew._loss_alone(point)
            changes = (after - before).abs() * self.batch.weight.sum(-1) > 1e-4  # of all rows: estimates stay there
            if bool(changes.any()) and bool(torch.isfinite(after).all()):
                return Refinement(anew, point, "moved grids", after, curved_alike=True)
        return None

    def _finer(self, point: Tensor) -> Self:
        """Numbers on all of their points: a fit takes half of them until it has ended."""
        most, options = self.closed.sums.grid, self.unplaced.planner.options
        if not self.unplaced.has_points or 2 * options.grid != most:
            return self
        twice = replace(options, grid=most, fine_table=2 * FINE_TABLE)
        layout = lay_out_within(self.structure, self.batch, twice, keep=_kept(self.structure, self.objective))
        return replace(self, unplaced=layout, placed=layout, placed_for=None).laid_out_for(point)

    def notes(self, point: Tensor | None = None) -> tuple[str, ...]:
        """Whether sums over numbers settle at an estimate."""
        if point is None or not self.unplaced.has_points:
            return ()
        moves = self._moves_on_other_points(point)
        unsettled = int((moves > 0.01).sum())
        if float(moves.mean()) * self.rows < 1:
            return ()
        return (
            f"sums over unknown numbers do not settle in {unsettled} of {len(moves)} rows: on other points their "
            f"log-likelihoods move by {float(moves.sum()):.2g} in all; a node may follow what is unknown too closely",
        )

    def _moves_on_other_points(self, point: Tensor, share: float = 0.7, entries: int = 10_000_000) -> Tensor:
        """How far the log-likelihoods of some rows move on a share of all points, within so many entries of tables."""
        rows = max(20, min(200, entries // max(1, self.unplaced.largest_table)))
        part = self.subset(rows).laid_out_for(point)
        naturals, layout = part.naturals(point), part.placed
        other = on_other_points(
            naturals, layout, share * self.closed.sums.grid / layout.planner.options.grid, self.tempering
        )
        mine, others = (log_evidence(naturals, one, self.tempering)[0] for one in (layout, other))
        return (mine - others).abs()

    def proposals(self, point: Tensor) -> Proposals | None:
        """The point (1, P) with states of a hidden category swapped."""
        return swapped_rows(self, point, _state_probabilities) if self.structure.hidden_categories else None

    def _loss_alone(self, point: Tensor) -> Tensor:
        """The loss without its gradient."""
        naturals = self.naturals(point)
        evidence = log_evidence(naturals, self.placed, self.tempering)
        return self._as_loss((self.batch.weight * evidence).sum(-1), naturals)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def unit_losses(self, points: Tensor) -> Tensor:
        """The loss of every row (R, N)."""
        placed = self.laid_out_for(points).placed
        losses = -(self.objective.at(1.0).eps or 1.0) * log_evidence(self.naturals(points), placed, self.tempering)
        return losses.nan_to_num(nan=WORST_LOSS, posinf=WORST_LOSS)

    def of_batch(self, batch: Batch, seed: int) -> Self:
        """The same of other rows."""
        options, kept = self.unplaced.planner.options, _kept(self.structure, self.objective)
        layout = lay_out(self.structure, batch, options, keep=kept)
        return replace(self, batch=batch, seed=seed, unplaced=layout, placed=layout, placed_for=None)


def rows_along_graph(about: RowObjective, batch: Batch, seed: int) -> GraphProblem:
    """Lay rows out along the graph."""
    objective, sums = about.weights, about.closed.sums
    budget = EliminationOptions(
        sums.grid // 2,
        sums.count_atoms // 2,
        sums.prior_draws,
        sums.largest_table,
        memory=sums.memory,
        fine_table=FINE_TABLE,
        integrate=objective.at(1.0).eps > 0,
    )
    layout = lay_out_within(about.structure, batch, budget, keep=_kept(about.structure, objective))
    return GraphProblem(about.structure, batch, about.shapes, seed, objective, about.closed, layout, layout)


def _state_probabilities(part: TableRows, point: Tensor, node: str) -> Tensor:
    """Posterior probabilities of a hidden category in each row (N, K)."""
    assert isinstance(part, GraphProblem), "rows whose states are swapped are summed along the graph"
    naturals = part.naturals(point)
    layout = lay_out(part.structure, part.batch, part.unplaced.planner.options, keep=(node,))
    return state_probabilities(naturals, moved(naturals, layout), node)


def _kept(structure: Structure, objective: Objective) -> tuple[str, ...]:
    """Nodes whose posteriors are read in every row."""
    return pushed_nodes(structure) if objective.push_forward is not None else ()


# -- which way ---------------------------------------------------------------------------------------------------------


def route_of(about: RowObjective, batch: Batch) -> Lay:
    """What lays these rows out: the first whose rule holds."""
    return next(lay_out for holds, lay_out in ROUTES if holds(about, batch))


def row_problem(about: RowObjective, batch: Batch, seed: int) -> Units:
    """Rows laid out by their route; the same seed lays them out alike."""
    return route_of(about, batch)(about, batch, seed)


def reads_moments(about: RowObjective, batch: Batch) -> bool:
    """Whether moments of rows tell all that the model reads of them, and are quicker to read."""
    if not is_linear_normal(about.structure) or about.size > MOST_PARAMETERS:
        return False
    units = (mechanism.unit for mechanism in about.structure.mechanisms.values() if isinstance(mechanism, Normal))
    if any(unit is not None and bool(((unit < SMALLEST) | (unit > LARGEST)).any()) for unit in units):
        return False
    if not batch.shares_rows or batch.weight.device.type != "cpu":
        return False
    groups = gap_groups(about.structure, batch, about.structure.graph.nodes)
    return len(groups.members) <= min(MOST_GROUPS, max(1, COLUMNS_FOR_EACH_ROW * batch.rows // (len(groups.cells) + 1)))


def is_linear_normal(structure: Structure) -> bool:
    """Whether every node is normal as the library has it, and linear in numbers alone."""
    return all(
        type(mechanism) is Normal
        and mechanism.group is None
        and mechanism.is_affine
        and not mechanism.family.discrete
        and mechanism.terms is None
        and not any(isinstance(one.setting, Ridge) or one.is_bounded for one in mechanism.declared().values())
        for mechanism in structure.mechanisms.values()
    )


def reads_states(about: RowObjective, batch: Batch) -> bool:
    """Whether hidden categories alone are unknown, and every observed node is read through features."""
    only_categories = about.structure.hidden_categories and not about.structure.hidden_numbers
    return bool(only_categories) and has_features(about.structure, batch)


def by_moments(about: RowObjective, batch: Batch, seed: int) -> MomentProblem:
    """Moments of rows, with the rows along the graph for whoever asks about single ones."""
    return rows_as_moments(about.structure, batch, about.shapes, seed, partial(rows_along_graph, about))


def by_states(about: RowObjective, batch: Batch, seed: int) -> StateProblem:
    """Rows read in every joint state, with the rows along the graph for whoever asks about single ones."""
    return rows_by_states(about.structure, batch, about.shapes, seed, partial(rows_along_graph, about))


Lay = Callable[[RowObjective, Batch, int], Units]
# the rules of the table above, and what lays rows out where they hold
ROUTES: tuple[tuple[Callable[[RowObjective, Batch], bool], Lay], ...] = (
    (lambda about, batch: not about.is_plain_likelihood, rows_along_graph),
    (reads_moments, by_moments),
    (reads_states, by_states),
    (lambda about, batch: True, rows_along_graph),
)
