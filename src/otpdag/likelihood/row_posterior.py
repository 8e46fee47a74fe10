"""What a fitted model says of rows: draws of hidden and missing values, exact state probabilities, likelihoods."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from otpdag.backward import AmortizedMap
from otpdag.data import Batch
from otpdag.errors import ApproximationWarning, ModelError
from otpdag.likelihood import elimination
from otpdag.likelihood.elimination import Budget
from otpdag.likelihood.enumeration import RowGroup, SumSizes, enumerates_easily, evaluate, group_rows, integrated
from otpdag.likelihood.posterior_grids import adapted
from otpdag.mechanisms.base import Mechanism, Noise, Params, Parents
from otpdag.noise import draw_noise
from otpdag.numerics import bounded_threads
from otpdag.structure import Naturals, Structure

P = ParamSpec("P")
T = TypeVar("T")

GRID_REACH = 7.0  # of grids, in posterior standard deviations: wider than in a fit, for tails count in draws
FINE = SumSizes(grid=96, draws=96)  # twice the grid of a fit and three times its draws: a posterior is asked for once
BUDGET = Budget(finest=(48, 96), merged=False)  # twice the points of a fit; rows alike are drawn each for itself
ROWS_OF_A_LAYOUT = 50_000  # that are laid out along the graph at a time, which bounds memory
ROWS_AT_ONCE = 2000  # whose points are evaluated at a time
CHUNK_ELEMENTS = 4_000_000  # numbers that they may take: 32 MB


@dataclass(frozen=True)
class Fitted:
    """Everything that inference needs: natural parameters (1, ...), and the map that a fit learned, if any."""

    structure: Structure
    naturals: Naturals
    phi: Mapping[str, Tensor]
    sampler: AmortizedMap | None
    count_range: Mapping[str, float]

    def check_densities(self, purpose: str) -> None:
        """Refuse what needs densities where a node has none."""
        for node in self.structure.graph.observed:
            mechanism = self.structure.mechanisms[node]
            if not mechanism.has_density and not mechanism.is_given:
                raise ModelError(
                    f"{purpose} needs the density of every observed node; {type(mechanism).__name__} at node {node!r} "
                    "has none"
                )


def _on_few_threads(function: Callable[P, T]) -> Callable[P, T]:
    """Chunks are small: more threads would cost more than they save."""

    @functools.wraps(function)
    def bounded(*args: P.args, **kwargs: P.kwargs) -> T:
        with bounded_threads(0):
            return function(*args, **kwargs)

    return bounded


def _layouts(
    fitted: Fitted,
    batch: Batch,
    notes: list[str] | None,
    keep: tuple[str, ...] = (),
    *,
    even_if_few: bool = False,
) -> list[tuple[Tensor, elimination.Layout]] | None:
    """Blocks of rows with what they miss laid out along the graph; what is approximate goes to the notes, or warns.

    None where joint enumeration is faster (unless ``even_if_few``), or all that serves (a vector that is seen in part
    and is not linear).
    """
    if not even_if_few and enumerates_easily(fitted.structure, batch, FINE):
        return None
    layouts = []
    for index in torch.arange(batch.rows).split(ROWS_OF_A_LAYOUT):
        layout = elimination.lay_out_within(fitted.structure, batch.take(index), BUDGET, keep=keep)
        if layout is None:
            return None
        layouts.append((index, elimination.moved(fitted.naturals, layout) if layout.has_points else layout))
    for _, layout in layouts:
        if layout.beyond is not None and notes is None:
            warnings.warn(elimination.told(layout), ApproximationWarning, stacklevel=4)
        elif layout.beyond is not None and notes is not None:
            notes.append(elimination.told(layout))
    return layouts


def _groups(fitted: Fitted, batch: Batch, seed: int, *, exact: bool = False) -> Iterator[RowGroup]:
    """Rows laid out on fine points, in chunks that fit in memory; with ``exact``, none where a closed form serves."""
    generator = torch.Generator().manual_seed(seed)
    at, most = 0, ROWS_AT_ONCE
    while at < batch.rows:
        index = torch.arange(at, min(at + most, batch.rows))
        part = batch.take(index)
        groups = group_rows(
            fitted.structure,
            part,
            generator=generator,
            options=FINE,
            count_range=fitted.count_range,
            exact=exact,
        )
        elements = max(group.least_points * len(group.rows) for group in groups)
        if elements > CHUNK_ELEMENTS and len(index) > 1:
            most = max(1, len(index) * CHUNK_ELEMENTS // (2 * elements))
            continue
        for group in groups:
            moved = adapted(fitted.structure, fitted.naturals, group, reach=GRID_REACH)
            yield replace(moved, rows=index[group.rows])
        at += len(index)


@_on_few_threads
def log_likelihood(fitted: Fitted, batch: Batch, seed: int = 0, notes: list[str] | None = None) -> Tensor:
    """Log-likelihood of each row's seen cells, hidden and missing values integrated out: (N,).

    What is approximate is added to the notes; without them, an :class:`~otpdag.ApproximationWarning` says it.
    """
    fitted.check_densities("a likelihood")
    by_row = torch.zeros(batch.rows, dtype=torch.float64)
    layouts = _layouts(fitted, batch, notes)
    if layouts is not None:
        for index, layout in layouts:
            by_row[index] = elimination.log_evidence(fitted.naturals, layout)[0]
        return by_row
    for group in _groups(fitted, batch, seed, exact=True):
        joint = _joint(fitted, group)
        by_row[group.rows] = torch.logsumexp(joint, -1).expand(1, len(group.rows))[0].detach()
    return by_row


def _joint(fitted: Fitted, group: RowGroup) -> Tensor:
    """Log-density of each row with each point of what it misses, or each state where numbers are integrated out."""
    evaluation = evaluate(fitted.structure, fitted.naturals, group)
    if not group.quadratic:
        return evaluation.log_prior + evaluation.log_likelihood
    prior, likelihood = torch.broadcast_tensors(evaluation.log_prior, evaluation.log_likelihood)
    return integrated(prior, likelihood, 1.0, group.quadratic, split=False)[0]


@_on_few_threads
def state_probabilities(
    fitted: Fitted, batch: Batch, node: str, seed: int = 0, notes: list[str] | None = None
) -> Tensor:
    """Posterior probabilities of a hidden or missing category, row by row: (N, K); notes as in `log_likelihood`."""
    fitted.check_densities("state probabilities")
    size = fitted.structure.mechanisms[node].space.width
    by_row = torch.zeros(batch.rows, size, dtype=torch.float64)
    layouts = _layouts(fitted, batch, notes, keep=(node,))
    if layouts is not None:
        for index, layout in layouts:
            by_row[index] = elimination.state_probabilities(fitted.naturals, layout, node)
        return by_row
    for group in _groups(fitted, batch, seed, exact=True):
        if node not in group.states:
            raise ModelError(f"node {node!r} has no observed descendants: its probabilities are those of the model")
        weight = torch.softmax(_joint(fitted, group), -1).expand(1, len(group.rows), -1)
        states = group.states[node]
        states = states[:, :, :: group.copies] if group.quadratic else states
        by_row[group.rows] = (weight.unsqueeze(-1) * states).sum(-2)[0].detach()
    return by_row


@_on_few_threads
def posterior_draws(
    fitted: Fitted,
    batch: Batch,
    draws: int,
    seed: int,
    notes: list[str] | None = None,
    *,
    stratified: bool = False,
) -> dict[str, Tensor]:
    """Joint draws of every node given what each row shows: node -> (N, draws, width); notes as in `log_likelihood`.

    ``stratified`` ones are spread evenly over the distribution of each unknown of a row (where sums are exact).
    """
    generator = torch.Generator().manual_seed(seed)
    structure = fitted.structure
    drawn = {
        node: torch.zeros(batch.rows, draws, mechanism.space.width, dtype=torch.float64)
        for node, mechanism in structure.mechanisms.items()
    }
    if not all(m.has_density or m.is_given for n, m in structure.mechanisms.items() if n in structure.graph.observed):
        return _map_draws(fitted, batch, draws, generator)
    layouts = _layouts(fitted, batch, notes, even_if_few=stratified)
    if layouts is not None:
        for index, layout in layouts:
            made = elimination.posterior_draws(fitted.naturals, layout, draws, generator, stratified=stratified)
            for node, value in made.items():
                drawn[node][index] = value
        return drawn
    for group in _groups(fitted, batch, seed):
        result = evaluate(structure, fitted.naturals, group)
        joint = (result.log_prior + result.log_likelihood).detach().expand(1, len(group.rows), -1)[0]
        probs = torch.softmax(joint, -1)
        if not bool(torch.isfinite(probs).all()):
            row = int(group.rows[(~torch.isfinite(probs)).any(-1).nonzero()[0, 0]])
            raise ModelError(
                f"row {row} has no density under the model: its parameters or the row are out of all range"
            )
        chosen = torch.multinomial(probs, draws, replacement=True, generator=generator)  # (n, draws)
        values: dict[str, Tensor] = {}
        for node in group.unknown:
            value = result.values[node].detach().expand(1, len(group.rows), group.points, -1)[0]
            values[node] = torch.gather(value, 1, chosen.unsqueeze(-1).expand(-1, -1, value.shape[-1]))
        _complete(fitted, group, values, draws, generator)
        for node, value in values.items():
            drawn[node][group.rows] = value
    return drawn


def _complete(
    fitted: Fitted, group: RowGroup, values: dict[str, Tensor], draws: int, generator: torch.Generator
) -> None:
    """Seen cells keep their value; what the row tells nothing about is drawn from the model."""
    structure = fitted.structure
    for node in structure.graph.order:
        mechanism = structure.mechanisms[node]
        drawn = values.get(node)
        if drawn is None and not (node in group.values and node in group.complete):
            if mechanism.is_given:
                raise ModelError(f"node {node!r} is Given: its values must not be missing")
            parents = {p: values[p].unsqueeze(0) for p in structure.graph.parents(node)}
            noise = draw_noise(mechanism.noise, (1, len(group.rows), draws), generator)
            drawn = _made(mechanism, fitted.naturals[node], parents, noise, group, node)[0]
            drawn = drawn.detach().expand(len(group.rows), draws, -1)
        if node in group.values:
            seen, value = (
                group.mask[node][0].expand(-1, draws, -1),
                group.values[node][0].expand(-1, draws, -1),
            )
            drawn = value if drawn is None else torch.where(seen, value, drawn)
        if drawn is None:
            raise RuntimeError(f"node {node!r} has neither a value nor a draw")
        values[node] = drawn


def _made(mechanism: Mechanism, params: Params, parents: Parents, noise: Tensor, group: RowGroup, node: str) -> Tensor:
    """A node drawn from the model, given those of its cells that are seen."""
    if node not in group.values or not mechanism.correlated:
        return mechanism.forward(params, parents, noise)
    return mechanism.complete(params, group.values[node], parents, group.mask[node], noise)


def _map_draws(fitted: Fitted, batch: Batch, draws: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Without densities: draws of the learned backward map, the rest from the model."""
    backward = fitted.sampler
    if backward is None:
        raise ModelError(
            "hidden values cannot be drawn: a node has no density and no backward map was learned; fit with "
            "method='paper' or otp.transport('backward')"
        )
    values = {node: value[0].unsqueeze(1).expand(-1, draws, -1).unsqueeze(0) for node, value in batch.values.items()}
    mask = {node: seen[0].unsqueeze(1).expand(-1, draws, -1).unsqueeze(0) for node, seen in batch.mask.items()}
    row = backward.code(values, mask)
    for node in fitted.structure.graph.order:
        mechanism = fitted.structure.mechanisms[node]
        if node in backward.targets:
            drawn = _one_map_draw(fitted, backward, node, row, values, generator)
        elif node in values and bool(mask[node].all()):
            continue
        else:
            noise = draw_noise(mechanism.noise, (1, batch.rows, draws), generator)
            drawn = mechanism.forward(fitted.naturals[node], fitted.structure.parents(node, values), noise).detach()
        values[node] = torch.where(mask[node], values[node], drawn) if node in mask else drawn
    return {node: value[0] for node, value in values.items()}


def _one_map_draw(
    fitted: Fitted,
    backward: AmortizedMap,
    node: str,
    row: Tensor,
    values: Mapping[str, Tensor],
    generator: torch.Generator,
) -> Tensor:
    """A draw for each row and draw of what the map sees, ``row`` (1, N, draws, width)."""
    space, shape = fitted.structure.mechanisms[node].space, tuple(row.shape[:3])
    if space.is_discrete:
        noise = draw_noise(Noise(space.width, "uniform"), shape, generator)
        value, _ = backward.relaxed(fitted.phi, node, row, values, noise, 1.0, hard=True)
        return value.detach()
    noise = draw_noise(Noise(backward.output_width(node) // 2, "normal"), shape, generator)
    return backward.draw(fitted.phi, node, row, values, noise).value.detach()
