"""Rows of a table, or steps of sequences, by Algorithm 1 and by its abducted and entropic relatives.

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
from functools import partial
from typing import cast

import torch
from torch import Tensor

from otpdag.backward import AmortizedMap
from otpdag.costs import DEFAULT_COSTS, AbstractCost, PointFunction, as_cost
from otpdag.data import Batch, random_part
from otpdag.data.sequences import SequenceBatch
from otpdag.learned.algorithm import Algorithm1, Drawn, Family, Step
from otpdag.mechanisms.base import Noise, Parents, abducted, can_abduct, relaxed, relaxed_noise
from otpdag.noise import Streams, normal_score
from otpdag.numerics import side_by_side
from otpdag.problem import Batched, LossTerms, WrappedProblem
from otpdag.settings import Objective, value_at
from otpdag.spaces import Space
from otpdag.structure import Naturals, Structure, Theta, lag_name

Values = Mapping[str, Tensor]


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
        drawn: Settings.
        temperature: Of relaxed categories by now.
        made: The model's own draws, for maps that see one child only.
        log_q: Log-densities of draws (R, n), or log-probabilities of categories (R, n, K), under the map.
    """

    structure: Structure
    backward: AmortizedMap
    naturals: Naturals
    batch: Batch
    values: Values
    streams: Streams
    drawn: Drawn
    temperature: float
    made: Values = field(default_factory=dict)
    log_q: Values = field(default_factory=dict)

    def parents(self, node: str) -> Parents:
        """The values of a node's parents."""
        return self.structure.parents(node, self.values)

    def standard(self, node: str, value: Tensor | None = None) -> Tensor:
        """A value, or what was drawn, in the units in which families are compared."""
        return self.backward.code.standard(node, self.values[node] if value is None else value)


# --- the problem -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnRows(Batched, Algorithm1):
    """Rows of a table whose unknown values a learned map draws; every step sees a minibatch."""

    batch: Batch
    maps: tuple[AmortizedMap, ...]
    objective: Objective
    drawn: Drawn

    def steps(self, theta: Theta, phi: Theta, streams: Streams, progress: float) -> Iterator[Step]:
        """Every replica has a minibatch of its own."""
        batch, temperature = self.batch, value_at(self.drawn.temperature, progress)
        if self.drawn.batch_size < self.rows:
            batch = batch.take(streams.rows(self.rows, self.drawn.batch_size))
        naturals, share = self.structure.naturals(theta), batch.weight / batch.weight.sum(-1, keepdim=True)
        for backward in self.maps:
            draw = Draw(self.structure, backward, naturals, batch, batch.values, streams, self.drawn, temperature)
            if self.drawn.scope == "local":
                draw = replace(draw, made=_ancestral(draw, self.maps))
            draw = _drawn_backward(draw, phi)
            cost, noises = rebuild(draw)
            yield Step((share * cost).sum(-1), _families(draw, noises, share), partial(_kl, draw, share))


@dataclass(frozen=True)
class DrawnSteps(Batched, Algorithm1):
    r"""Steps of sequences, whose hidden values a learned map draws from their own cells (Appendix C.2).

    The model makes a step from what was drawn of those before it, so that the transition is held to draws of
    neighbouring steps. Draws are those of tables, with earlier values as further columns.
    """

    batch: SequenceBatch
    backward: AmortizedMap
    objective: Objective
    drawn: Drawn

    def steps(self, theta: Theta, phi: Theta, streams: Streams, progress: float) -> Iterator[Step]:
        """The same steps for all replicas: how many of them are first ones must not differ between them."""
        structure, temperature = self.structure, value_at(self.drawn.temperature, progress)
        rows = torch.randint(self.rows, (min(self.drawn.batch_size, self.rows),), generator=streams.shared)
        times, lags = self.batch.times[rows], structure.graph.lags
        before = {by: rows - times.clamp(max=by) for by in sorted({0, *(edge.by for edge in lags)})}
        drawn = {by: self._drawn(earlier, theta, phi, streams, temperature) for by, earlier in before.items()}
        now = drawn[0]
        values, mask = dict(now.values), dict(now.batch.mask)
        for edge in lags:
            name, earlier = lag_name(edge.parent, edge.by), drawn[edge.by]
            values[name] = earlier.values[edge.parent]
            if edge.parent in mask:
                mask[name] = earlier.batch.mask[edge.parent]
        made = {name: structure.explains(name, times, mask) for name in structure.mechanisms}
        seen = {node: mask[node] & made[node].unsqueeze(-1) for node in now.batch.mask}
        draw = replace(now, values=values, batch=replace(now.batch, mask=seen))
        cost, noises = rebuild(draw)
        yield Step(cost.mean(-1), self._families(draw, made, noises), partial(_kl, draw, 1 / len(rows), made))

    def _drawn(self, rows: Tensor, theta: Theta, phi: Theta, streams: Streams, temperature: float) -> Draw:
        batch, naturals = self.batch.steps.take(rows), self.structure.naturals(theta)
        draw = Draw(self.structure, self.backward, naturals, batch, batch.values, streams, self.drawn, temperature)
        return _drawn_backward(draw, phi)

    def _families(self, draw: Draw, made: Values, noises: Values) -> Iterator[Family]:
        """Families of nodes and of their first steps, by the shares of steps that they make."""
        for name in (*_owners(draw), *noises):
            rows = made[name][0].nonzero()[:, 0]
            if len(rows) < 2:
                continue
            values = {node: value[:, rows] for node, value in draw.values.items()}
            here = replace(draw, batch=draw.batch.take(rows), values=values | {name: values[self.structure.base(name)]})
            own = {node: noise[:, rows] for node, noise in noises.items()}
            columns = noise_family(here, name, own) if name in noises else family(here, name, own)
            if columns:
                pushed, forward = map(side_by_side, zip(*columns, strict=True))
                yield Family(pushed, forward, share=len(rows) / len(made[name][0]))


# --- terms -----------------------------------------------------------------------------------------------------------


def _drawn_backward(draw: Draw, phi: Theta) -> Draw:
    """Fill in what is unknown, and keep the map's log-density of it."""
    batch, streams, backward = draw.batch, draw.streams, draw.backward
    row = backward.code(batch.values, batch.mask)
    values, log_q = dict(batch.values), dict[str, Tensor]()
    for node in backward.targets:
        unknown = ~batch.mask[node] if node in batch.mask else None
        noise = streams.draw(backward.noise(node), batch.rows, row)
        if backward.space(node).is_discrete:
            drawn, log_q[node] = backward.relaxed(phi, node, row, values, noise, draw.temperature)
        else:
            number = backward.draw(phi, node, row, values, noise)
            drawn, log_q[node] = number.value, number.log_prob if unknown is None else number.log_prob_of(unknown)
        values[node] = drawn if unknown is None else torch.where(unknown, drawn, batch.values[node])
    return replace(draw, values=values, log_q=log_q)


def _owners(draw: Draw) -> list[str]:
    """Names of the mechanisms that make what was drawn."""
    return [name for name in draw.structure.mechanisms if draw.structure.base(name) in draw.log_q]


def _kl(draw: Draw, share: Tensor | float, made: Values | None = None) -> Tensor:
    """Log q - log p of what was drawn, by shares of the rows (R,); of sequences, where a mechanism ``made`` it (1, n).

    Parents that a local map does not draw itself are taken from the model's own draws.
    """
    total = torch.zeros(1, 1).to(draw.batch.weight)
    for name in _owners(draw):
        node, mechanism, params = draw.structure.base(name), draw.structure.mechanisms[name], draw.naturals[name]
        unknown = ~draw.batch.mask[node] if node in draw.batch.mask else None
        parents, log_q = draw.structure.parents(name, {**draw.made, **draw.values}), draw.log_q[node]
        if mechanism.space.is_discrete:
            kl = (torch.exp(log_q) * (log_q - mechanism.log_probs(params, parents, log_q))).sum(-1)
            kl = kl if unknown is None else torch.where(unknown[..., 0], kl, 0.0)
        else:
            kl = log_q - mechanism.log_prob(params, draw.values[node], parents, unknown)
        total = total + (kl if made is None else torch.where(made[name], kl, 0.0))
    return (share * total).sum(-1)


def rebuild(draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
    """Cost of rebuilding each row (R, n), and the abducted noise of each observed node."""
    batch, drawn = draw.batch, draw.drawn
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
            rebuilt = relaxed(mechanism, params, parents, noise, draw.temperature)
            spread = draw.backward.code.spread(node, value)
            total = total + ground_cost(mechanism.space, value, rebuilt, mask, spread, drawn.costs.get(node))
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
    space: Space, value: Tensor, rebuilt: Tensor, mask: Tensor, unit: Tensor, cost: AbstractCost | PointFunction | None
) -> Tensor:
    """The cost of rebuilding ``value``, over the cells that are seen.

    Numbers are in units of the column's spread, for a cost that the user gave in the column's own.
    """
    chosen = DEFAULT_COSTS[space.cost] if cost is None else as_cost(cost)
    if space.is_discrete:
        return chosen.between(value, rebuilt) * mask[..., 0]
    seen = mask.to(value) if cost is not None else mask.to(value) / unit
    return chosen.between(value * seen, rebuilt * seen)


def _families(draw: Draw, noises: Values, share: Tensor) -> Iterator[Family]:
    """Backward and forward families of a minibatch, by shares (1 or R, n) of its rows."""
    # equal weights are left unsaid: exact solvers are faster without them
    mass = None if bool((share == share[:, :1]).all()) else share
    if draw.drawn.scope == "local":
        families = [_local_family(draw, noises)]
    else:
        # the noise of a missing node that was drawn joins its parents' families, where noise is abducted; a relaxed
        # count has no noise of its own
        spaces = {node: draw.structure.mechanisms[node].space for node in draw.backward.targets}
        nodes = [n for n, space in spaces.items() if n not in noises or not space.has_noise_when_relaxed]
        families = [family(draw, node, noises) for node in nodes]
    for columns in filter(None, families + [noise_family(draw, node, noises) for node in noises]):
        pushed, forward = map(side_by_side, zip(*columns, strict=True))
        yield Family(pushed, forward, mass, mass)


# of a family: each as it is pushed backward, and as the model makes it
Columns = list[tuple[Tensor, Tensor]]


def family(draw: Draw, node: str, noises: Values) -> Columns:
    """A node that was drawn, with its parents and its children's noises."""
    mechanisms, parents = draw.structure.mechanisms, draw.parents(node)
    fresh = draw.streams.draw(relaxed_noise(mechanisms[node]), draw.batch.rows, draw.values[node])
    made = relaxed(mechanisms[node], draw.naturals[node], parents, fresh, draw.temperature)
    children = [c for c in draw.structure.graph.children(draw.structure.base(node)) if c in noises]
    own = (draw.standard(node), draw.standard(node, made))
    return [own, *_above(draw, parents), *(_noise(draw, child, noises) for child in children)]


def _local_family(draw: Draw, noises: Values) -> Columns:
    """All that a local map draws, with the noise of the node that it explains."""
    drawn = [(draw.standard(node), draw.standard(node, draw.made[node])) for node in draw.backward.targets]
    return drawn and drawn + [_noise(draw, node, noises) for node in noises]


def noise_family(draw: Draw, node: str, noises: Values) -> Columns:
    """A node's noise with all its parents, of which it is independent; none if drawn parents' families hold it."""
    parents, hidden = draw.parents(node), draw.structure.graph.hidden
    if parents and all(parent in draw.backward.targets and parent in hidden for parent in parents):
        return []
    return [_noise(draw, node, noises), *_above(draw, parents)]


def _above(draw: Draw, parents: Parents) -> Columns:
    """Parents, which are the same on both sides."""
    return [(value, value) for value in (draw.standard(parent, value) for parent, value in parents.items())]


def _noise(draw: Draw, node: str, noises: Values) -> tuple[Tensor, Tensor]:
    """A node's noise as it was abducted, on the scale of normal noise, and fresh noise."""
    prior = draw.structure.mechanisms[node].noise
    fresh = draw.streams.draw(Noise(prior.dim, "normal"), draw.batch.rows, draw.batch.weight)
    return normal_score(prior, noises[node]), fresh


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
        made = relaxed(mechanism, draw.naturals[node], parents, noise, draw.temperature)
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
