r"""Sequences with gaps in numbers that others read: windows of steps as rows of the graph written out over time.

An unknown value joins the steps that read it, now or later. Steps that nothing unknown joins are independent given what
is seen, so that the likelihood of a sequence is a product over windows,

.. math:: P(x_{1:T}) = \prod_w \int \prod_{t \in w} P(x_t \mid x_{t-1}, \dots) \, dx_{w, \text{unknown}},

each given the values before it. Windows of one length are rows of one graph, summed along it like those of any table:
exactly where mechanisms are linear and normal, on points elsewhere. Most windows are single steps with all that they
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.graph import Graph
from otpdag.likelihood.chain_problem import SequenceUnits
from otpdag.likelihood.row_posterior import Fitted, log_likelihood, posterior_draws
from otpdag.likelihood.row_problem import GraphProblem, rows_along_graph
from otpdag.mechanisms import Given, Mechanism
from otpdag.mechanisms.base import Family
from otpdag.numerics import Flags, Ints
from otpdag.problem import LossTerms, Refinement, RowObjective, split_point
from otpdag.structure import Naturals, Structure, lag_name


def has_unknown_parents(structure: Structure, batch: SequenceBatch) -> bool:
    """Whether nothing is hidden, and a number that another value is drawn from has gaps."""
    return not structure.graph.hidden and bool(unknown_numbers(structure, batch))


def unknown_numbers(structure: Structure, batch: SequenceBatch) -> list[str]:
    """Observed numbers and counts with gaps that other values are drawn from."""
    mask = batch.steps.mask
    read = [node for node in _read_nodes(structure) if node in mask and not bool(mask[node].all())]
    return [node for node in read if not structure.mechanisms[node].space.is_discrete]


def _read_nodes(structure: Structure) -> list[str]:
    """Nodes that others are drawn from, in the same step or later."""
    lagged = {edge.parent for edge in structure.graph.lags}
    return [n for n in structure.graph.nodes if n in lagged or structure.graph.children(n)]


# -- the graph over time -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """So many steps in a row: those that a sequence begins with, or later ones, which read the values before them."""

    steps: int
    begins: bool = False

    def written_out(self, structure: Structure) -> Structure:
        """The graph of all steps; what they read from before, or what nothing is drawn from at the beginning, is given.

        Its mechanisms are in natural units.
        """
        made: dict[str, Mechanism] = {}
        edges: list[tuple[str, str]] = []
        for step in range(self.steps):
            for node in structure.graph.order:
                if self.begins and step < structure.longest_lag(node):
                    continue
                family = structure.mechanisms[node].family
                names = [at_step(*_moment(structure, name, step)) for name, _ in family.parents]
                for name, (_, space) in zip(names, family.parents, strict=True):
                    if name not in made:
                        made[name] = Given(space).setup(Family(name))
                    edges.append((name, at_step(node, step)))
                parents = tuple((name, space) for name, (_, space) in zip(names, family.parents, strict=True))
                own = at_step(node, step)
                made[own] = structure.mechanisms[node].setup(replace(family, node=own, parents=parents))
        graph = Graph(edges, nodes=made)
        return Structure(graph, made, {name: {} for name in made}, counts_priors=False)


def at_step(node: str, step: int) -> str:
    """The name of a node in one step of a window; earlier ones have negative numbers.

    >>> at_step("x", -1)
    'x@-1'
    """
    return f"{node}@{step}"


def _of_name(name: str) -> tuple[str, int]:
    """Invert :func:`at_step`."""
    node, _, step = name.rpartition("@")
    return node, int(step)


def _moment(structure: Structure, parent: str, step: int) -> tuple[str, int]:
    """The node behind the name of a parent, and the step in which a node of ``step`` reads it."""
    lags = {lag_name(edge.parent, edge.by): edge for edge in structure.graph.lags}
    return (lags[parent].parent, step - lags[parent].by) if parent in lags else (parent, step)


def cut_windows(structure: Structure, batch: SequenceBatch) -> dict[Window, Ints]:
    """Where windows of each kind begin, as rows of the batch: together they hold every step that can be explained.

    A sequence is explained given its first steps, as many as the longest lag, in which all is seen that is read later.
    """
    steps, longest = batch.rows, max(edge.by for edge in structure.graph.lags)
    ends = (batch.starts + batch.lengths - 1).repeat_interleave(batch.lengths).numpy()
    at, unseen, reach = np.arange(steps), np.zeros(steps, dtype=bool), np.zeros(steps, dtype=np.int64)
    for node in _read_nodes(structure):
        missing = ~batch.steps.mask[node][0].all(-1).numpy()
        by = max((edge.by for edge in structure.graph.lags if edge.parent == node), default=0)
        unseen |= missing & (by > 0)
        reach = np.maximum(reach, np.where(missing, by, 0))
    far = np.maximum.accumulate(np.minimum(at + reach, ends))
    joined = np.concatenate([[False], far[:-1] >= at[1:]])
    begun = _first_seen(unseen, batch.starts.numpy(), ends[batch.starts.numpy()], longest)
    first = np.repeat(begun, batch.lengths.numpy())
    opens = (at >= first + longest) & (~joined | (at == first + longest))
    where = np.flatnonzero(opens)
    following = np.concatenate([where[1:], [steps]])
    lengths = np.minimum(following - 1, ends[where]) - where + 1
    found = {Window(int(length)): where[lengths == length] for length in np.unique(lengths)}
    whole = begun[(begun == batch.starts.numpy()) & (batch.lengths.numpy() >= longest)]
    explains = any(structure.longest_lag(node) < longest for node in structure.graph.nodes)
    return {Window(longest, begins=True): whole, **found} if explains and len(whole) else found


def _first_seen(unseen: Flags, starts: Ints, ends: Ints, longest: int) -> Ints:
    """The first row of each sequence from which on so many show all that is read later; past its end if none is."""
    run, count = np.zeros(len(unseen), dtype=np.int64), 0
    boundary = set(starts.tolist())
    for row, missing in enumerate(unseen):
        count = 0 if row in boundary else count
        count = 0 if missing else count + 1
        run[row] = count
    enough = np.append(np.flatnonzero(run == longest), len(unseen) + longest)
    found = enough[np.searchsorted(enough, starts)] - longest + 1
    return np.where(found <= ends, found, ends + 1)


# -- the problem -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowRows(GraphProblem):
    """Windows of one kind as rows of the graph over time, whose nodes have the parameters of the model of one step."""

    model: Structure = field(kw_only=True)

    def naturals(self, point: Tensor) -> Naturals:
        """Those of the model, in every step."""
        return in_all_steps(self.structure, self.model.naturals(split_point(point, self.shapes)[0]))


def in_all_steps(written_out: Structure, naturals: Naturals) -> Naturals:
    """Natural parameters of the nodes of a graph over time."""
    mechanisms = written_out.mechanisms.items()
    return {name: {} if one.is_given else naturals[_of_name(name)[0]] for name, one in mechanisms}


def window_batch(written_out: Structure, batch: SequenceBatch, first: Tensor) -> Batch:
    """What the windows that begin at these rows show."""
    steps, values, mask = batch.steps, {}, {}
    for name in written_out.graph.nodes:
        node, step = _of_name(name)
        values[name] = steps.values[node][:, first + step]
        mask[name] = steps.mask[node][:, first + step]
    return Batch(values, mask, steps.weight[:, first])


@dataclass(frozen=True)
class WindowProblem(SequenceUnits):
    """Sequences without hidden nodes, in windows that unknown numbers join: minus the log-likelihood of a step.

    Attributes:
        parts: The windows of each kind.
        first: The rows of the batch at which they begin.
    """

    objective: RowObjective
    parts: tuple[GraphProblem, ...]
    first: tuple[Tensor, ...]

    is_likelihood = True  # other objectives are not laid out so

    def of_batch(self, batch: SequenceBatch, seed: int) -> WindowProblem:
        """Cut into windows anew."""
        return window_problem(self.objective, batch, seed)

    def loss(self, point: Tensor) -> LossTerms:
        """Of a step, as reconstruction: its parts are not told apart."""
        total = self.unit_mass.sum(-1)
        prior = torch.zeros(1) + self.structure.penalty(self.naturals(point)) / total
        loss = sum((part.loss(point).total * (part.weight.sum(-1) / total) for part in self.parts), prior)
        return LossTerms.of(loss, reconstruction=loss)

    def laid_out_for(self, points: Tensor) -> Self:
        """Place the points of unknown numbers where the posteriors of these replicas are."""
        return replace(self, parts=tuple(part.laid_out_for(points) for part in self.parts))

    def refine(self, point: Tensor) -> Refinement | None:
        """Points moved to the posteriors, as long as that changes the loss."""
        refined = [part.refine(point) for part in self.parts]
        if not any(refined):
            return None
        problem = self.laid_out_for(point)
        return Refinement(problem, point, "moved grids", problem.loss(point).total.detach())

    def reweighted(self, factors: Tensor) -> WindowProblem:
        """The same sequences with other weights."""
        by_step = factors.to(self.weight)[:, self.batch.owners]
        parts = tuple(part.reweighted(by_step[:, at]) for part, at in zip(self.parts, self.first, strict=True))
        return replace(super().reweighted(factors), parts=parts)

    def unit_losses(self, points: Tensor) -> Tensor:
        """Minus the log-likelihood of a step of each sequence (R, N)."""
        totals = torch.zeros(len(points), len(self.batch.lengths), dtype=points.dtype)
        for part, first in zip(self.parts, self.first, strict=True):
            totals.index_add_(1, self.batch.owners[first], part.unit_losses(points))
        return totals / self.batch.lengths.to(totals)


def window_problem(about: RowObjective, batch: SequenceBatch, seed: int) -> WindowProblem:
    """Cut sequences into windows, and lay out those of each kind."""
    parts, begins = [], []
    for window, first in cut_windows(about.structure, batch).items():
        written_out, rows = window.written_out(about.structure), torch.from_numpy(first)
        laid = rows_along_graph(replace(about, structure=written_out), window_batch(written_out, batch, rows), seed)
        parts.append(WindowRows(**{one.name: getattr(laid, one.name) for one in fields(laid)}, model=about.structure))
        begins.append(rows)
    return WindowProblem(about.structure, batch, about.shapes, seed, about, tuple(parts), tuple(begins))


# -- what a fitted model says ------------------------------------------------------------------------------------------


def window_log_likelihood(model: Fitted, batch: SequenceBatch) -> Tensor:
    """Log-likelihood of each sequence (N,), given its first steps."""
    owner = torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths)
    total = torch.zeros(len(batch.lengths), dtype=torch.float64)
    for fitted, rows in _fitted_windows(model, batch):
        total.index_add_(0, owner[rows], log_likelihood(fitted, window_batch(fitted.structure, batch, rows)))
    return total


def window_draws(model: Fitted, batch: SequenceBatch, draws: int, seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Joint draws of windows given what they show: a node, rows of the batch (n,), and values (n, draws, width)."""
    for fitted, rows in _fitted_windows(model, batch):
        drawn = posterior_draws(fitted, window_batch(fitted.structure, batch, rows), draws, seed)
        for name, values in drawn.items():
            if not fitted.structure.mechanisms[name].is_given:
                node, step = _of_name(name)
                yield node, rows + step, values


def _fitted_windows(model: Fitted, batch: SequenceBatch) -> Iterator[tuple[Fitted, Tensor]]:
    """The model of each kind of windows, and where these begin."""
    for window, first in cut_windows(model.structure, batch).items():
        written_out = window.written_out(model.structure)
        yield Fitted(written_out, in_all_steps(written_out, model.naturals)), torch.from_numpy(first)
