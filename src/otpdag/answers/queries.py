r"""Questions to a fitted model: the distribution of one node given what rows show and what is done to them, exact.

An intervention cuts the edges into its node and sets it (Pearl, 2009),

.. math:: P(x \mid do(t)) = \prod_{v \ne t} P(x_v \mid x_{pa(v)}) \;\text{at}\; x_t = t,

so that a question is always one of the model, or of the model with fewer edges: sums along the graph answer both.

Effects are differences of such answers after interventions, with intervals by the delta method.
"""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy as sp
import torch
from torch import Tensor

from otpdag.answers.identification import Identification, identify_all, identify_path
from otpdag.answers.notes import point_of, row_information
from otpdag.answers.standard_errors import Errors, Information, delta_errors, information_at
from otpdag.data import Batch, Schema, decode
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ApproximationWarning, ModelError
from otpdag.graph import Graph
from otpdag.likelihood.elimination.evidence import moved, on_other_points
from otpdag.likelihood.elimination.layout import Layout, lay_out_within
from otpdag.likelihood.elimination.posterior import likeliest_states, node_moments, state_probabilities
from otpdag.likelihood.grouped_rows import given_shared, placed_shares, rows_at
from otpdag.likelihood.row_posterior import BESIDE, BUDGET, Fitted, posterior_draws
from otpdag.likelihood.sequence_posterior import fill_in
from otpdag.mechanisms import Given
from otpdag.mechanisms.base import Buffered, Family, buffers_of
from otpdag.mechanisms.predictor import Censorable
from otpdag.numerics import Flags, at_work
from otpdag.problem import Problem, Units, differences
from otpdag.simulation import ancestral, ancestral_sequences, batch_of
from otpdag.structure import Naturals, Structure, columns_of
from otpdag.tables import number


@dataclass(frozen=True)
class Belief:
    """What a model says of one node in each row.

    Attributes:
        expected: Probabilities of a category (N, K), or the mean of a number (N, width).
        variance: Of a number (N, width).
    """

    expected: Tensor
    variance: Tensor | None = None

    @property
    def unit(self) -> Tensor:
        """What a move of one in raw parameters may change it by: a number's spread, a quarter of a probability."""
        return torch.full_like(self.expected, 0.25) if self.variance is None else self.variance.sqrt()


def with_nodes_set(fitted: Fitted, done: Collection[str] = (), shown: Collection[str] = ()) -> Fitted:
    """The same model after an intervention on ``done``: their edges are cut, their values come from outside.

    Hidden nodes among ``done`` and ``shown`` count as observed: a question may say what they are.
    """
    if not done and not set(shown) & set(fitted.structure.graph.hidden):
        return fitted
    naturals = {**fitted.naturals, **{node: {} for node in done}}
    return replace(fitted, structure=fitted.structure.with_given(done, shown), naturals=naturals)


class Question:
    """Rows laid out to be asked about one node; the answer is a function of the parameters.

    Args:
        fitted: The model, with nodes set if the question says so.
        batch: What rows show; the node's own cells are looked at too.
        node: The node in question.

    Raises:
        ModelError: A node has no density, or the sums are too large.
    """

    def __init__(self, fitted: Fitted, batch: Batch, node: str) -> None:
        fitted.check_densities("a question")
        fitted, batch = _of_number(fitted, batch, node)
        self.structure, self.node, self.batch = fitted.structure, node, batch
        self.layout = moved(fitted.naturals, lay_out_within(fitted.structure, batch, BUDGET, keep=(node,)))
        self.moves = self._moves_with_fewer_points(fitted.naturals)
        self.note = ""

    def _moves_with_fewer_points(self, naturals: Naturals, shares: Sequence[float] = (0.7, 0.55)) -> Tensor:
        """How far each row's answer moves if points are fewer (N,): far, where ridges or steps lie between them."""
        moves = torch.zeros(self.batch.rows, dtype=torch.float64)
        if not self.layout.has_points:
            return moves
        told = self._summed(naturals, self.layout)
        for share in shares:
            other = self._summed(naturals, on_other_points(naturals, self.layout, share, keep=(self.node,)))
            gap = (told.expected - other.expected).abs() / told.unit.clamp(min=1e-12)
            moves = torch.maximum(moves, gap.amax(-1))
        return moves

    def _summed(self, naturals: Naturals, layout: Layout) -> Belief:
        with at_work(0):
            if self.structure.mechanisms[self.node].space.is_discrete:
                return Belief(state_probabilities(naturals, layout, self.node))
            return Belief(*node_moments(naturals, layout, self.node))

    def at(self, naturals: Naturals, close: float = 5e-3) -> Belief:
        """The answer at some parameters (1, ...); where sums do not settle, by draws if these are better."""
        told = self._summed(naturals, self.layout)
        unsettled = torch.nonzero(self.moves > close)[:, 0]
        if len(unsettled):
            drawn, error = _by_weighted_draws(self.structure, naturals, self.batch.take(unsettled), self.node)
            better = error < self.moves[unsettled]
            told.expected[unsettled[better]] = drawn.expected[better]
            if told.variance is not None and drawn.variance is not None:
                told.variance[unsettled[better]] = drawn.variance[better]
            worst = float(torch.minimum(error, self.moves[unsettled]).max())
            self.note = (
                f"node {self.node!r}: sums on points do not settle, and {len(unsettled)} answers have errors of up to "
                f"{worst:.1g} standard deviations"
            )
        return told


def _of_number(fitted: Fitted, batch: Batch, node: str) -> tuple[Fitted, Batch]:
    """The number between the ends of a censored node in its place: ends have no moments."""
    own = fitted.structure.mechanisms[node]
    if not isinstance(own, Censorable) or not own.censored:
        return fitted, batch
    mechanisms = {**fitted.structure.mechanisms, node: own.uncensored()}
    return replace(fitted, structure=fitted.structure.with_mechanisms(mechanisms)), batch.without(node)


def believe(
    fitted: Fitted, batch: Batch, node: str, notes: list[str], *, at_once: int = 20_000, draws: int = 1000
) -> Belief:
    """What the model says of a node in each row: exact, by sums along the graph; what is not is told in the notes.

    So many rows are laid out at a time, which bounds memory; where a node has no density, so many draws answer.
    """
    parts = []
    for index in torch.arange(batch.rows).split(at_once):
        part = batch.take(index)
        if getattr(fitted.structure.mechanisms[node], "truncated", None) is not None:
            parts.append(_between_limits(fitted, part, node, draws))
            continue
        try:
            question = Question(fitted, part, node)
        except ModelError as error:
            notes.append(f"node {node!r} is answered by {draws} draws: {error}")
            drawn = posterior_draws(*_of_number(fitted, part, node), draws, 0, stratified=True)[node]
            is_category = fitted.structure.mechanisms[node].space.is_discrete
            parts.append(Belief(drawn.mean(1), None if is_category else drawn.var(1)))
        else:
            parts.append(question.at(fitted.naturals))
            notes += [question.note] if question.note else []
    variances = [part.variance for part in parts if part.variance is not None]
    return Belief(torch.cat([part.expected for part in parts]), torch.cat(variances) if variances else None)


def believe_in_groups(fitted: Fitted, batch: SequenceBatch, node: str, notes: list[str]) -> Tensor:
    """The mean of a number, or probabilities of a category (N, width), given all that the rows of its group show.

    Rows that show the node itself are answered as if none of their group did.
    """
    fitted.check_densities("a prediction")
    steps = batch.steps
    seen = steps.mask[node][0].any(-1, keepdim=True) if node in steps.mask else torch.zeros(batch.rows, 1).bool()
    if not bool(seen.any()):
        return _told_by_groups(fitted, batch, node, notes)
    alone = _told_by_groups(fitted, replace(batch, steps=steps.without(node)), node, notes)
    return alone if bool(seen.all()) else torch.where(seen, alone, _told_by_groups(fitted, batch, node, notes))


def _told_by_groups(fitted: Fitted, batch: SequenceBatch, node: str, notes: list[str]) -> Tensor:
    structure, owner = fitted.structure, batch.owners
    at, share = placed_shares(fitted, batch)
    if node in structure.shared:
        return (share * at).sum(1)[owner][:, [structure.shared.index(node)]]
    each = believe(given_shared(fitted), rows_at(structure, batch, at), node, notes).expected
    return (share[owner].transpose(0, 1) * each.unflatten(0, (-1, batch.rows))).sum(0)


def moved_answers(
    fitted: Fitted, nodes: Iterable[str], about: Callable[[Fitted, str], Belief], least: float = 0.05
) -> list[str]:
    """Nodes about which an answer moves where parameters fit the data as well.

    Along directions that are known up to a few hundredths, it may move by ``least`` of its unit for each of theirs.
    """

    def moved(node: str) -> float:
        here = about(fitted, node)
        there = torch.stack([about(replace(fitted, naturals=one), node).expected for one in fitted.beside])
        return float(((there - here.expected).norm(dim=0) / (BESIDE * here.unit + 1e-15)).mean())

    return [node for node in nodes if moved(node) > least] if fitted.beside else []


def _between_limits(fitted: Fitted, batch: Batch, node: str, draws: int) -> Belief:
    """The mean of a leaf whose density jumps at limits, which no points sum well, over draws of unknown parents."""
    drawn, mechanism = posterior_draws(fitted, batch, draws, 0, stratified=True), fitted.structure.mechanisms[node]
    parents = {name: drawn[name].flatten(0, 1).unsqueeze(0) for name, _ in mechanism.family.parents}
    mean = mechanism.mean(fitted.naturals[node], parents)
    assert mean is not None, "what has limits has a mean"
    mean = mean.detach()[0].expand(batch.rows * draws, -1).unflatten(0, (batch.rows, draws))
    seen = batch.mask[node][0] if node in batch.mask else torch.zeros(batch.rows, 1, dtype=torch.bool)
    return Belief(torch.where(seen, drawn[node][:, 0], mean.mean(1)), drawn[node].var(1))


def _by_weighted_draws(
    structure: Structure, naturals: Naturals, batch: Batch, node: str, draws: int = 2**16, fewest: int = 2**10
) -> tuple[Belief, Tensor]:
    """Means over draws of what a row does not show, weighed by the likelihood of what it shows.

    Draws are the same in all rows and at all parameters. Beside the answers are their errors (N,), in standard
    deviations of the node; they are infinite where a row shows part of a vector.
    """
    own, expected, variances, errors = structure.mechanisms[node], [], [], []
    many = max(fewest, draws // batch.rows)
    for row in range(batch.rows):
        generator, log_weight = torch.Generator().manual_seed(0), torch.zeros(many, dtype=torch.float64)
        seen = {name: mask[0, row] for name, mask in batch.mask.items() if name != node and mask[0, row].any()}
        shown = {name: batch.values[name][:, [row]].expand(-1, many, -1) for name in seen}
        values = ancestral(structure, naturals, many, generator, do=shown)
        for name, value in shown.items():
            mechanism, parents = structure.mechanisms[name], structure.parents(name, values)
            if not mechanism.is_given:
                log_weight += mechanism.log_prob(naturals[name], value, parents)[0]
        weight, value = torch.softmax(log_weight, 0).unsqueeze(-1), values[node][0]
        mean = (weight * value).sum(0)
        gap = (value - mean).square()
        variance = (weight * gap).sum(0)
        error = ((weight.square() * gap).sum(0) / variance.clamp(min=1e-24)).sqrt().max()
        expected.append(mean)
        variances.append(variance)
        errors.append(error if all(bool(mask.all()) for mask in seen.values()) else torch.full_like(error, torch.inf))
    drawn = Belief(torch.stack(expected), None if own.space.is_discrete else torch.stack(variances))
    return drawn, torch.stack(errors)


def most_probable(fitted: Fitted, batch: Batch, notes: list[str]) -> tuple[dict[str, Tensor], Tensor]:
    """The most probable joint state of all unknown categories of each row, and the log-density of the row with it.

    Numbers are integrated out first, then take their mean given these categories: values (N, width) of all nodes.
    """
    structure = fitted.structure
    fitted.check_densities("an explanation")
    categories = [node for node, m in structure.mechanisms.items() if m.space.is_discrete]
    layout = lay_out_within(structure, batch, BUDGET, keep=categories)
    with at_work(0):
        states, log_density = likeliest_states(fitted.naturals, layout)
    explained = batch.showing({node: value.unsqueeze(0) for node, value in states.items()})
    known = with_nodes_set(fitted, shown=tuple(states))
    values = dict(states)
    for node in structure.graph.nodes:
        if node not in values:
            width = structure.mechanisms[node].space.width
            values[node] = believe(known, explained, node, notes).expected.expand(-1, width)
    return values, log_density


def joint_probabilities(
    fitted: Fitted, names: Sequence[str], known: Mapping[str, Tensor], notes: list[str], most: int = 4096
) -> Tensor:
    """Probabilities of all joint states of some categories, the last one's first; at most so many.

    The chain rule, :math:`P(a, b) = P(a) P(b | a)`: each factor for all states of those before it at once.
    """
    sizes = [fitted.structure.mechanisms[name].space.width for name in names]
    if not all(fitted.structure.mechanisms[name].space.is_discrete for name in names):
        raise ModelError("a query of several nodes needs categories; ask for numbers one by one")
    if math.prod(sizes) > most or any(value.shape[1] > 1 for value in known.values()):
        raise ModelError(f"a query of several nodes lists at most {most} joint states, of one question")
    total = torch.ones(1, dtype=torch.float64)
    states: dict[str, Tensor] = {}
    for name, size in zip(names, sizes, strict=True):
        inner = with_nodes_set(fitted, shown=tuple(states))
        possible = total > 0  # what is impossible has no distribution given it
        chosen = {n: value[:, possible] for n, value in states.items()}
        own = {n: value.expand(1, int(possible.sum()), -1) for n, value in known.items()}
        likely = believe(inner, batch_of(inner.structure, {**own, **chosen}), name, notes).expected
        share = torch.zeros(len(total), size, dtype=torch.float64)
        share[possible] = likely.expand(int(possible.sum()), size)
        states = {n: value.repeat_interleave(size, 1) for n, value in states.items()}
        states[name] = torch.eye(size, dtype=torch.float64).repeat(len(total), 1).unsqueeze(0)
        total = (total.unsqueeze(-1) * share).flatten()
    return total


# -- effects ----------------------------------------------------------------------------------------------------------


Path = Literal["total", "direct", "indirect"]


@dataclass(frozen=True)
class Effect:
    """The effect of one node on another.

    Attributes:
        treatment: The node that is set.
        outcome: The node that is looked at.
        table: One row for each value of the treatment but the first, and each coordinate or level of the outcome:
            ``effect`` is the difference to the first value, with ``std_error``, ``lower`` and ``upper``.
        means: Means, or probabilities, of the outcome for each value of the treatment.
        identification: Whether what is observed determines the effect, by the graph alone or by the form of the
            mechanisms; one that is not identified has no interval.
        level: Nominal coverage of the intervals.
        path: Along which paths of the graph: all, the edge alone, or all others.
    """

    treatment: str
    outcome: str
    table: pd.DataFrame
    means: pd.DataFrame
    identification: Identification
    level: float = 0.95
    path: Path = "total"

    @property
    def difference(self) -> pd.Series:
        """The effects alone."""
        return self.table["effect"]

    def __str__(self) -> str:
        shown = self.table if np.isfinite(self.table["std_error"]).any() else self.table[["effect"]]
        shown = shown.apply(lambda column: [*map(number, column, self.table["std_error"])])
        return f"{self.head}\n{shown.to_string()}\n{self.identification}"

    __repr__ = __str__

    @property
    def head(self) -> str:
        """What the table has, with the level of its intervals."""
        kind = "" if self.path == "total" else f"{self.path} "
        told = np.isfinite(self.table["std_error"]).any()
        level = f", with intervals of {100 * self.level:g} %" if told else ""
        return f"{kind}effect of {self.treatment} on {self.outcome}, against {self.means.index[0]}{level}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.head)}</p>{self.table.to_html()}<p>{html.escape(str(self.identification))}</p>"


def effect_of(
    fitted: Fitted,
    treatment: str,
    outcome: str,
    *,
    set_to: Tensor,
    values: Sequence[Any],
    seen: Mapping[str, Tensor],
    path: Path,
    names: Sequence[str],
    problem: Problem | None,
    errors: Errors,
    level: float,
) -> Effect:
    """Ask for an outcome after a treatment is set to each of some values; and, for the delta method, around it.

    Args:
        fitted: The model.
        treatment: The node that is set.
        outcome: The node that is looked at.
        set_to: What the treatment is set to (1, values, width).
        values: What a user calls these.
        seen: What the effect is conditional on (1, 1, width).
        path: Along which paths.
        names: Coordinates or levels of the outcome.
        problem: What the model was fitted by; None if the effect has no interval.
        errors: Where standard errors come from.
        level: Nominal coverage of the interval.
    """
    cut = with_nodes_set(fitted, done=(treatment,), shown=tuple(seen))
    done, first = {treatment: set_to}, set_to[:, :1].expand_as(set_to)
    if path != "total" and treatment in cut.structure.graph.parents(outcome):
        cut, twin = with_edge_apart(cut, treatment, outcome)
        done = {treatment: first, twin: set_to} if path == "direct" else {treatment: set_to, twin: first}
    elif path == "direct":
        done = {treatment: first}
    question = Question(cut, batch_of(cut.structure, {**seen, **done}), outcome)

    def means(naturals: Naturals) -> Belief:
        """Means, or probabilities, of the outcome for each value of the treatment (values, width)."""
        return question.at({**naturals, **{node: {} for node in done}})

    def change(naturals: Naturals) -> Tensor:
        """Their differences to the first value (1, differences)."""
        told = means(naturals).expected
        return (told[1:] - told[:1]).reshape(1, -1)

    def differing(own: Fitted, _: str) -> Belief:
        told = means(own.naturals)
        return replace(told, expected=told.expected - told.expected[:1])

    effect = change(fitted.naturals)[0]
    error, given = torch.full_like(effect, torch.nan), tuple(seen)
    identification = identify_all(fitted.structure.graph, [treatment], outcome, given)
    if path != "total":
        identification = identify_path(fitted.structure.graph, identification)
    if problem is None and moved_answers(fitted, [outcome], differing):
        identification = replace(identification, told=False)
    if problem is not None and identification.by == "no effect":
        error = torch.zeros_like(effect)
    elif problem is not None:
        above = {node for one in (outcome, *seen) for node in (one, *cut.structure.graph.ancestors(one))}
        slopes = partial(_slopes, problem, change, above - set(done))
        point = point_of(fitted, problem.shapes)
        known = information_at(problem, point, errors)
        if identification:  # a function of what is seen: by a share of the slope that is no rounding, data lack
            untold = known.untold(slopes(point), least=0.05)
        else:
            untold = known.untold(slopes(point)) | _is_untold_elsewhere(problem, point, slopes)
        error = delta_errors(slopes(point), known.covariance).where(torch.from_numpy(~untold), torch.nan)
        identification = replace(identification, told=not bool(untold.any()))
    reach = float(sp.special.ndtri((1 + level) / 2)) * error
    index = pd.MultiIndex.from_product([list(values)[1:], list(names)], names=[treatment, outcome])
    columns = {"effect": effect, "std_error": error, "lower": effect - reach, "upper": effect + reach}
    table = pd.DataFrame({name: column.numpy() for name, column in columns.items()}, index=index)
    rows = pd.Index(list(values), name=treatment)
    told = pd.DataFrame(means(fitted.naturals).expected.numpy(), index=rows, columns=list(names))
    if question.note:
        warnings.warn(question.note, ApproximationWarning, stacklevel=4)
    return Effect(treatment, outcome, table, told, identification, level, path)


def with_edge_apart(fitted: Fitted, treatment: str, outcome: str) -> tuple[Fitted, str]:
    """The model in which the outcome reads a twin of the treatment that may be set otherwise, and the twin's name."""
    twin, before, mechanism = f"{treatment}'", fitted.structure, fitted.structure.mechanisms[outcome]
    if getattr(mechanism, "terms", None):
        raise ModelError(f"node {outcome!r} has terms: effects along single paths are told of slopes and tables only")
    parents = tuple((twin if name == treatment else name, space) for name, space in mechanism.family.parents)
    own = mechanism.setup(replace(mechanism.family, parents=parents))
    own = own.with_buffers(buffers_of(mechanism)) if isinstance(own, Buffered) else own
    edges = [(twin if edge == (treatment, outcome) else edge[0], edge[1]) for edge in before.graph.edges]
    graph = Graph(edges, nodes=[*before.graph.nodes, twin], hidden=before.graph.hidden)
    given = Given(before.mechanisms[treatment].space).setup(Family(twin))
    mechanisms, keys = {**before.mechanisms, outcome: own, twin: given}, {**before.keys, twin: {}}
    structure = replace(before, graph=graph, mechanisms=mechanisms, keys=keys)
    return replace(fitted, structure=structure, naturals={**fitted.naturals, twin: {}}), twin


def _slopes(problem: Problem, change: Callable[[Naturals], Tensor], relevant: Collection[str], point: Tensor) -> Tensor:
    """Derivatives of differences (1, differences) at a point (1, P) of the raw parameters (differences, P).

    What lies neither above the outcome nor above what is conditioned on has no say.
    """
    keys = {key for node in relevant for key in problem.structure.keys_of(node)}
    free = columns_of(problem.shapes, keys)

    def changed(points: Tensor) -> Tensor:
        return change(problem.naturals(points))

    slopes = torch.zeros(changed(point).shape[1], point.shape[1], dtype=torch.float64)
    if bool(free.any()):
        slopes[:, free] = differences(changed, point, torch.eye(len(free)).to(point)[free], at_once=1).T
    return slopes


def _is_untold_elsewhere(
    problem: Problem, point: Tensor, slopes: Callable[[Tensor], Tensor], move: float = 0.3, least: float = 1e-4
) -> Flags:
    """Which differences move along what no row tells, at parameters (1, P) so far from the estimate.

    Where hidden classes are equal, say, an effect stands still along what is not told, but at no other point. There
    the scores of all rows are zero along it, too, if the form of the mechanisms is why it is not told.
    """
    assert isinstance(problem, Units), "there is no information without rows"
    moved = point + move * torch.randn(point.shape, generator=torch.Generator().manual_seed(0), dtype=point.dtype)
    size = 2 * point.shape[1]
    # scores of rows that are far from likely are nearly parallel, but a symmetry leaves rounding only
    known = Information(row_information(problem, moved, rows=max(400, size), groups=size), smallest=1e-10)
    return known.untold(slopes(moved), least, least)


# -- forecasts ---------------------------------------------------------------------------------------------------------


def future_draws(
    fitted: Fitted, batch: SequenceBatch, steps: int, *, draws: int, seed: int, given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Draw what follows each sequence: node -> (sequences, steps, draws, width).

    States at the end are drawn from what the sequence shows, then the model goes on; before the first step there is
    nothing, so that the first one stands for it. ``given`` has the values of Given nodes, (1, sequences * steps,
    width).
    """
    generator, structure = torch.Generator().manual_seed(seed), fitted.structure
    filled = fill_in(fitted, batch, draws, generator)
    many, last = len(batch.lengths), batch.starts + batch.lengths - 1
    past = [
        {
            node: value[torch.maximum(last - back, batch.starts)].reshape(1, many * draws, -1)
            for node, value in filled.items()
        }
        for back in reversed(range(max(edge.by for edge in structure.graph.lags)))
    ]
    shaped = {node: value.reshape(1, many, 1, steps, -1) for node, value in given.items()}
    known = {node: value.expand(-1, -1, draws, -1, -1).flatten(1, 2) for node, value in shaped.items()}
    drawn = ancestral_sequences(structure, fitted.naturals, many * draws, steps, generator, do=known, past=past)
    return {node: value[0].unflatten(0, (many, draws)).transpose(1, 2) for node, value in drawn.items()}


def forecast_table(drawn: Mapping[str, Tensor], schema: Schema, nodes: Sequence[str], level: float) -> pd.DataFrame:
    """Means and quantiles of numbers, likeliest categories and their probabilities, by sequence and step."""
    many, steps = next(iter(drawn.values())).shape[:2]
    index = pd.MultiIndex.from_product([range(many), range(1, steps + 1)], names=["sequence", "step"])
    table = pd.DataFrame(index=index)
    for node in nodes:
        values, column = drawn[node].flatten(0, 1), schema[node]
        if column.space.is_discrete:
            shares = values.mean(1)
            table[node] = decode({node: shares}, schema)[node].to_numpy()
            table[f"{node}.probability"] = shares.amax(-1).numpy()
            continue
        lower, upper = np.quantile(values.numpy(), [(1 - level) / 2, (1 + level) / 2], axis=1)
        for cell, name in enumerate(column.names):
            table[name] = values[..., cell].mean(1).numpy()
            table[f"{name}.lower"], table[f"{name}.upper"] = lower[:, cell], upper[:, cell]
    return table
