"""Rows of a table by Algorithm 1, and by its abducted and entropic relatives.

Hidden and missing values are drawn from the map. Observed nodes are rebuilt from them with noise that is sampled from
its prior, abducted (then the rebuilding is exact and the noise joins the divergence), or integrated out.

A stochastic optimiser sees ``steps`` times ``batch_size`` rows, however many there are. So of a table in parts random
rows are held, as many as its reader allows; minibatches are drawn from them, and when each has been drawn about once
others take their place, by one pass over the parts. Every minibatch is a random one of the whole table, whatever the
order of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from otpdag.backward import AmortizedMap
from otpdag.costs import DEFAULT_COSTS, AbstractCost, PointFunction, as_cost
from otpdag.data import Batch, random_part
from otpdag.learned.algorithm import Algorithm1, Drawn, Family, Moment, Step
from otpdag.learned.sequence_map import BidirectionalMap
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.base import Noise, Params, Parents, abducted, can_abduct, relaxed, relaxed_noise
from otpdag.noise import Streams, normal_score
from otpdag.numerics import side_by_side
from otpdag.problem import LossTerms, WrappedProblem
from otpdag.settings import Objective
from otpdag.structure import Naturals, Structure, Theta

Values = Mapping[str, Tensor]

DrawnBy = AmortizedMap | BidirectionalMap
"""The maps that make draws, of rows or of sequences."""


@dataclass(frozen=True)
class Draw:
    """A minibatch whose unknown values were drawn, with all that is needed to judge the draw.

    Attributes:
        structure: Graph and mechanisms.
        backward: The map that made the draws.
        naturals: Parameters of the model.
        batch: What is seen.
        values: What is seen and what was drawn.
        streams: Where further noise comes from.
        moment: Settings.
        made: The model's own draws, for maps that see one child only.
    """

    structure: Structure
    backward: DrawnBy
    naturals: Naturals
    batch: Batch
    values: Values
    streams: Streams
    moment: Moment
    made: Values = field(default_factory=dict)

    def parents(self, node: str) -> Parents:
        """The values of a node's parents."""
        return self.structure.parents(node, self.values)

    def standard(self, node: str, value: Tensor | None = None) -> Tensor:
        """A value, or what was drawn, in the units in which families are compared."""
        return self.backward.code.standard(node, self.values[node] if value is None else value)


# --- the problem -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnRows(Algorithm1):
    """Rows of a table whose unknown values a learned map draws; every step sees a minibatch."""

    structure: Structure
    batch: Batch
    maps: tuple[AmortizedMap, ...]
    shapes: Mapping[str, tuple[int, ...]]
    objective: Objective
    drawn: Drawn

    def __post_init__(self) -> None:
        """Refuse costs of nodes that are not there."""
        self.drawn.check_nodes(self.structure)

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.batch.rows

    def steps(self, theta: Theta, phi: Theta, streams: Streams, progress: float) -> Iterator[Step]:
        """Every replica has a minibatch of its own."""
        batch, moment = self.batch, Moment.of(self.objective, self.drawn, progress)
        if self.drawn.batch_size < self.rows:
            batch = batch.take(streams.rows(self.rows, self.drawn.batch_size))
        naturals, share = self.structure.naturals(theta), batch.weight / batch.weight.sum(-1, keepdim=True)
        for backward in self.maps:
            draw = Draw(self.structure, backward, naturals, batch, batch.values, streams, moment)
            if self.drawn.scope == "local":
                draw = replace(draw, made=_ancestral(draw, self.maps))
            draw, kl = _drawn_backward(draw, backward, phi)
            cost, noises = rebuild(draw)
            yield Step((share * cost).sum(-1), _families(draw, noises, share), (share * kl).sum(-1))


# --- terms -----------------------------------------------------------------------------------------------------------


def _drawn_backward(draw: Draw, backward: AmortizedMap, phi: Theta) -> tuple[Draw, Tensor]:
    """Fill in what is unknown; also log q - log p of the draws, row by row.

    Parents that a local map does not draw itself are taken from the model's own draws.
    """
    batch, streams, moment = draw.batch, draw.streams, draw.moment
    row = backward.code(batch.values, _extra_mask(batch, streams, moment.drawn.extra_masking))
    values: dict[str, Tensor] = dict(batch.values)
    kl = torch.zeros(1, 1).to(row)
    for node in backward.targets:
        mechanism = draw.structure.mechanisms[node]
        unknown = ~batch.mask[node] if node in batch.mask else None
        if mechanism.space.is_discrete:
            noise = streams.draw(Noise(mechanism.space.width, "uniform"), batch.rows, row)
            hard = moment.drawn.straight_through
            drawn, log_q = backward.relaxed(phi, node, row, values, noise, moment.temperature, hard=hard)
        else:
            noise = streams.draw(Noise(backward.output_width(node) // 2, "normal"), batch.rows, row)
            number = backward.draw(phi, node, row, values, noise)
            drawn, log_q = number.value, number.log_prob if unknown is None else number.log_prob_of(unknown)
        if unknown is not None:
            drawn = torch.where(unknown, drawn, batch.values[node])
        if moment.with_kl:
            parents = draw.structure.parents(node, {**draw.made, **values})
            kl = kl + _kl(mechanism, draw.naturals[node], drawn, log_q, parents, unknown)
        values[node] = drawn
    return replace(draw, values=values), kl


def _kl(
    mechanism: Mechanism, params: Params, drawn: Tensor, log_q: Tensor, parents: Parents, unknown: Tensor | None
) -> Tensor:
    """The entropic term of one node, over its cells that are unknown."""
    if not mechanism.space.is_discrete:
        return log_q - mechanism.log_prob(params, drawn, parents, unknown)
    log_p = mechanism.log_probs(params, parents, log_q)
    expected = (torch.exp(log_q) * (log_q - log_p)).sum(-1)
    return expected if unknown is None else torch.where(unknown[..., 0], expected, 0.0)


def _extra_mask(batch: Batch, streams: Streams, chance: float) -> Mapping[str, Tensor]:
    """Hide some seen cells from the map, so that it serves any pattern of missing cells."""
    if not chance:
        return batch.mask
    return {node: seen & ~streams.coins(tuple(seen.shape[1:]), chance) for node, seen in batch.mask.items()}


def rebuild(draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
    """Cost of rebuilding each row (R, n), and the abducted noise of each observed node."""
    batch, drawn = draw.batch, draw.moment.drawn
    total = torch.zeros(1, 1).to(batch.weight)
    noises: dict[str, Tensor] = {}
    for node in draw.backward.explains:
        mechanism, parents = draw.structure.mechanisms[node], draw.parents(node)
        if mechanism.is_given:
            continue
        params, value, mask = draw.naturals[node], batch.values[node], batch.mask[node]
        if drawn.noise == "marginal":
            total = total - mechanism.log_prob(params, value, parents, mask)
        elif drawn.noise == "abducted" and can_abduct(mechanism):
            noises[node] = _abduct(draw, node, parents)
        else:
            noise = draw.streams.draw(relaxed_noise(mechanism), batch.rows, value)
            rebuilt = relaxed(mechanism, params, parents, noise, draw.moment.temperature)
            spread = draw.backward.code.spread(node, value)
            total = total + ground_cost(mechanism, value, rebuilt, mask, spread, drawn.costs.get(node))
    return total, noises


def _abduct(draw: Draw, node: str, parents: Parents) -> Tensor:
    """The noise behind a value; where the value is missing, that of its draw or, without one, fresh noise."""
    mechanism, params = draw.structure.mechanisms[node], draw.naturals[node]
    was_drawn = node in draw.backward.targets and mechanism.space.has_noise_when_relaxed
    value, mask = draw.values[node] if was_drawn else draw.batch.values[node], draw.batch.mask[node]
    uniform = draw.streams.draw(Noise(mechanism.noise.dim, "uniform"), value.shape[1], value)
    # drawn whether it is needed or not: a stream must not depend on what other replicas' rows miss
    fresh = draw.streams.draw(mechanism.noise, value.shape[1], value)
    if was_drawn or bool(mask.all()):
        return abducted(mechanism, params, value, parents, uniform)
    harmless = mechanism.space.neutral().to(value)
    noise = abducted(mechanism, params, torch.where(mask, value, harmless), parents, uniform)
    return torch.where(mask if mask.shape[-1] == noise.shape[-1] else mask.all(-1, keepdim=True), noise, fresh)


def ground_cost(
    mechanism: Mechanism,
    value: Tensor,
    rebuilt: Tensor,
    mask: Tensor,
    spread: Tensor,
    cost: AbstractCost | PointFunction | None,
) -> Tensor:
    """The cost of rebuilding ``value``, over the cells that are seen.

    Numbers are in units of the column's spread, for a cost that the user gave in the column's own.
    """
    chosen = DEFAULT_COSTS[mechanism.space.cost] if cost is None else as_cost(cost)
    if mechanism.space.is_discrete:
        return chosen.between(value, rebuilt) * mask[..., 0]
    seen = mask.to(value) if cost is not None else mask.to(value) / spread
    return chosen.between(value * seen, rebuilt * seen)


def _families(draw: Draw, noises: Values, share: Tensor) -> Iterator[Family]:
    """Backward and forward families of a minibatch, by shares (1 or R, n) of its rows."""
    # equal weights are left unsaid: exact solvers are faster without them
    mass = None if bool((share == share[:, :1]).all()) else share
    if draw.moment.drawn.scope == "local":
        pairs = [_local_family(draw, noises)]
    else:
        # the noise of a missing node that was drawn joins its parents' families, where noise is abducted; a relaxed
        # count has no noise of its own
        spaces = {node: draw.structure.mechanisms[node].space for node in draw.backward.targets}
        nodes = [n for n, space in spaces.items() if n not in noises or not space.has_noise_when_relaxed]
        pairs = [family(draw, node, noises) for node in nodes]
    for pushed, forward in pairs + [noise_family(draw, node, noises) for node in noises]:
        if pushed:
            yield Family(side_by_side(pushed), side_by_side(forward), mass)


Pair = tuple[list[Tensor], list[Tensor]]
"""The columns of a family as they are pushed backward, and as the model makes them."""


def family(draw: Draw, node: str, noises: Values) -> Pair:
    """A node that was drawn, with its parents and its children's noises."""
    mechanisms, parents = draw.structure.mechanisms, draw.parents(node)
    fresh = draw.streams.draw(relaxed_noise(mechanisms[node]), draw.batch.rows, draw.values[node])
    made = relaxed(mechanisms[node], draw.naturals[node], parents, fresh, draw.moment.temperature)
    children = [c for c in draw.structure.graph.children(draw.structure.base(node)) if c in noises]
    above = [draw.standard(parent, value) for parent, value in parents.items()]
    pushed = [draw.standard(node), *above]
    forward = [draw.standard(node, made), *above]
    pushed += [normal_score(mechanisms[c].noise, noises[c]) for c in children]
    forward += [_fresh(draw, c) for c in children]
    return pushed, forward


def _local_family(draw: Draw, noises: Values) -> Pair:
    """All that a local map draws, with the noise of the node that it explains."""
    pushed = [draw.standard(node) for node in draw.backward.targets]
    forward = [draw.standard(node, draw.made[node]) for node in draw.backward.targets]
    if pushed:
        pushed += [normal_score(draw.structure.mechanisms[node].noise, noise) for node, noise in noises.items()]
        forward += [_fresh(draw, node) for node in noises]
    return pushed, forward


def noise_family(draw: Draw, node: str, noises: Values) -> Pair:
    """A node's noise with all its parents, of which it is independent; none if drawn parents' families hold it."""
    parents, hidden = draw.parents(node), draw.structure.graph.hidden
    if parents and all(parent in draw.backward.targets and parent in hidden for parent in parents):
        return [], []
    above = [draw.standard(parent, value) for parent, value in parents.items()]
    own = normal_score(draw.structure.mechanisms[node].noise, noises[node])
    return [own, *above], [_fresh(draw, node), *above]


def _fresh(draw: Draw, node: str) -> Tensor:
    """Normal noise of a node's dimension."""
    dim = draw.structure.mechanisms[node].noise.dim
    return draw.streams.draw(Noise(dim, "normal"), draw.batch.rows, draw.batch.weight)


def _ancestral(draw: Draw, maps: Sequence[AmortizedMap]) -> dict[str, Tensor]:
    """Hidden nodes and missing parents drawn from the model itself; what is seen is taken from the data."""
    structure, batch = draw.structure, draw.batch
    unknown = {*structure.graph.hidden, *(node for backward in maps for node in backward.targets)}
    values: dict[str, Tensor] = {}
    for node in structure.graph.order:
        if node not in unknown:
            values[node] = batch.values[node]
            continue
        mechanism, seen = structure.mechanisms[node], batch.mask.get(node)
        noise = draw.streams.draw(relaxed_noise(mechanism), batch.rows, batch.weight)
        parents = structure.parents(node, values)
        made = relaxed(mechanism, draw.naturals[node], parents, noise, draw.moment.temperature)
        values[node] = made if seen is None else torch.where(seen, batch.values[node], made)
    return values


@dataclass(frozen=True)
class Pools:
    """Random rows of a table, others for each share of an optimiser's steps.

    Which they are depends on the share alone, so that a run that is resumed meets the same; only the last ones are
    kept.

    Args:
        first: Those that are at hand from the beginning.
        picked: Reads rows by their numbers (n,).
        total: Rows of the table.
        number: How many pools all steps take.
        seed: Determines which rows they are.
    """

    first: Batch
    picked: Callable[[Tensor], Batch]
    total: int
    number: int
    seed: int
    last: dict[int, Batch] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, progress: float) -> Batch:
        """The rows at a share of all steps."""
        which = min(int(progress * self.number), self.number - 1)
        if which == 0:
            return self.first
        if which not in self.last:
            rows = random_part(self.total, self.first.rows, self.seed + which)
            assert rows is not None, "the table has more rows than are held"
            self.last.clear()  # before others are read: both together would be twice the memory
            self.last[which] = self.picked(rows)
        return self.last[which]


def pools_for(steps: int, batch_size: int, held: int) -> int:
    """How many pools of so many rows a run takes, each row of one being drawn about once.

    >>> pools_for(1000, 128, 50_000)
    3
    """
    return max(1, math.ceil(steps * batch_size / held))


@dataclass(frozen=True)
class StreamedRows(WrappedProblem):
    """A table in parts whose unknown values a learned map draws; ``base`` is the problem of the rows at hand."""

    pools: Pools

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return self.pools.total

    def sampled(self, point: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Loss terms of every replica on a minibatch of the rows that are at hand by then."""
        rows = replace(cast(DrawnRows, self.base), batch=self.pools.at(progress))
        return rows.sampled(point, streams, progress)
