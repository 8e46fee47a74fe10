r"""The objective of sequences with a learned backward map: Algorithm 1 and its relatives, on pieces of sequences.

Hidden numbers are drawn from the map's Gaussian chain. Hidden categories are drawn as relaxed paths where noise is
sampled or abducted. Where it is integrated out they need no draw: the map's chain tells all its expectations or, beside
hidden numbers, they are summed over exactly given each draw. Families of the push-forward term are those of tables,
with earlier values as further parents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.layers import side_by_side
from otpdag.learned.sampled import Draw, Moment, family, noise_family, rebuild
from otpdag.learned.sequence_map import BidirectionalMap, ChainMarginals, Cuts, Pieces
from otpdag.likelihood.chain_layout import Chain, joint_states
from otpdag.likelihood.chain_messages import marginals
from otpdag.likelihood.chain_potentials import Linear, Potentials, potentials
from otpdag.mechanisms.base import Noise
from otpdag.noise import Streams
from otpdag.problem import LossTerms, Problem, split_point
from otpdag.settings import Drawn, Objective
from otpdag.structure import Naturals, Structure, Theta, lag_name

FEWEST_PIECES = 8
"""Pieces in a step of Adam, however long: fewer would show too few beginnings and ends."""


@dataclass(frozen=True)
class PieceProblem(Problem):
    """Sequences cut in pieces; every step of Adam draws some, the same for all replicas."""

    structure: Structure
    backward: BidirectionalMap
    cuts: Cuts
    features: Tensor
    shapes: Mapping[str, tuple[int, ...]]
    objective: Objective
    drawn: Drawn

    @property
    def rows(self) -> int:
        """Steps of all sequences."""
        return self.cuts.batch.rows

    def sampled(self, point: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Loss terms of every replica on fresh pieces with fresh noise."""
        theta, phi = split_point(point, self.shapes)
        many = min(len(self.cuts), max(FEWEST_PIECES, self.drawn.batch_size // self.cuts.span))
        pieces = self.cuts.draw(self.structure, self.features, many, streams.shared)
        moment = Moment.of(self.objective, self.drawn, progress)
        context = PieceContext(self.structure, self.backward, self.structure.naturals(theta), phi, pieces)
        return piece_terms(context, streams, moment)


def piece_problem(
    structure: Structure,
    backward: BidirectionalMap,
    batch: SequenceBatch,
    shapes: Mapping[str, tuple[int, ...]],
    objective: Objective,
    drawn: Drawn,
) -> PieceProblem:
    """Cut all sequences; what steps read is laid out once."""
    features = backward.features(batch)
    return PieceProblem(structure, backward, Cuts.of(batch), features, shapes, objective, drawn)


@dataclass(frozen=True)
class PieceContext:
    """Pieces with the model and the map that are judged on them."""

    structure: Structure
    backward: BidirectionalMap
    naturals: Naturals
    phi: Theta
    pieces: Pieces

    @property
    def counted(self) -> Tensor:
        """One for each step that counts."""
        return self.pieces.counted.to(self.pieces.features)

    @property
    def summed(self) -> tuple[str, ...]:
        """Hidden categories that are not drawn, but summed over."""
        graph = self.structure.graph
        return tuple(n for n in graph.order if n in graph.hidden and n not in self.backward.targets)

    def chain(self, categories: tuple[str, ...]) -> Chain:
        """The pieces in the shape in which the potentials of mechanisms are evaluated."""
        states, pieces = joint_states(self.structure, categories), self.pieces
        return Chain.of(self.structure, states, pieces.values, pieces.mask, pieces.times, (pieces.block,))


def piece_terms(context: PieceContext, streams: Streams, moment: Moment) -> LossTerms:
    """Terms of a counted step, one number for each replica."""
    backward, pieces, phi = context.backward, context.pieces, context.phi
    zero = torch.zeros(len(streams)).to(pieces.features)
    total = pieces.counted.sum()
    adjustment, unary = backward.read(phi, pieces)
    values = dict(pieces.values)
    log_q = zero.unsqueeze(-1)
    if backward.smoother.targets:
        noise = streams.draw(Noise(backward.free, "normal"), len(pieces.times), pieces.features)
        numbers = backward.smoother.draw(phi, pieces.block, pieces.features[..., :-1], noise.unsqueeze(1), adjustment)
        values |= {node: value.squeeze(1) for node, value in numbers.values.items()}
        log_q = numbers.log_prob.squeeze(1)
    if unary is not None and moment.drawn.noise == "marginal":
        cost, kl = _expected(context, backward.marginals(phi, pieces, unary))
        return _terms(zero, moment, cost / total, kl / total, zero)
    if context.summed:
        cost = _summed(context, values)
        return _terms(zero, moment, cost / total, (log_q * pieces.counted).sum(-1) / total, zero)
    if unary is not None:
        uniform = streams.draw(Noise(unary.shape[-1], "uniform"), len(pieces.times), unary)
        hard, temperature = moment.drawn.straight_through, moment.temperature
        values |= backward.split(backward.relaxed(phi, pieces, unary, uniform, temperature, hard=hard))
    for edge in context.structure.graph.lags:
        if edge.parent in backward.targets:
            values[lag_name(edge.parent, edge.by)] = pieces.lagged(values[edge.parent], edge.by)
    batch = pieces.as_batch(context.structure)
    draw = Draw(context.structure, backward, context.naturals, batch, values, streams, moment)
    cost, noises = rebuild(draw)
    kl = _number_kl(context, values, log_q) if moment.weights.eps else zero
    if moment.weights.eps and unary is not None:
        kl = kl + _expected(context, backward.marginals(phi, pieces, unary))[1]
    divergence = _push_forward(context, draw, noises) if moment.weights.eta else zero
    return _terms(zero, moment, (cost * batch.weight).sum(-1) / total, kl / total, divergence)


def _terms(zero: Tensor, moment: Moment, cost: Tensor, kl: Tensor, divergence: Tensor) -> LossTerms:
    weights = moment.weights
    return LossTerms.of(
        zero,
        reconstruction=weights.reconstruction * cost + zero,
        entropic=weights.eps * kl + zero,
        divergence=weights.eta * divergence + zero,
    )


# --- expectations over the chain of states ---------------------------------------------------------------------------


def _expected(context: PieceContext, states: ChainMarginals) -> tuple[Tensor, Tensor]:
    """Expected cost of what is observed, and the entropic term of the categories, summed over counted steps."""
    chain = context.chain(context.backward.categories)
    potential = potentials(context.structure, context.naturals, chain)
    counted = context.counted
    state = states.state.flatten(1, 2) * counted.unsqueeze(-1)
    cost = -_weighted(state, potential.observed)
    prior = _weighted(state, potential.hidden) + _pair_prior(context.pieces, states, potential, chain)
    return cost, (states.negentropy() * counted).sum(-1) - prior


def _pair_prior(pieces: Pieces, states: ChainMarginals, potential: Potentials, chain: Chain) -> Tensor:
    """Expected log-potentials of pairs of states, over counted steps that follow another."""
    counted = (pieces.counted & pieces.follows(1))[pieces.many :].to(pieces.features)
    weight = states.pair.flatten(1, 2) * counted[:, None, None]
    if chain.varying:
        return _weighted(weight, potential.pair[:, pieces.many :])
    phases = chain.phase[pieces.many :]
    rows = [weight[:, phases == phase].sum(1) for phase in range(chain.longest_lag + 1)]
    return _weighted(torch.stack(rows, 1), potential.pair)


def _weighted(weight: Tensor, log_potential: Tensor) -> Tensor:
    """Sum of weight times log-potential; states that cannot be count as very unlikely."""
    return (weight * log_potential.clamp(min=-100.0)).flatten(1).sum(-1)


def _summed(context: PieceContext, values: Mapping[str, Tensor]) -> Tensor:
    """Minus the log-density of what is seen and drawn, categories summed over, of the counted steps.

    Pairs of states are those of all steps that are read, by the share of them that count.
    """
    structure, pieces, numbers = context.structure, context.pieces, context.backward.smoother.targets
    drawn = {node: values[node] for node in numbers}
    mask = dict(pieces.mask)
    for node in numbers:
        lag = structure.longest_lag(node)
        known = pieces.inside & ((pieces.times < lag) | pieces.follows(lag))
        mask[node] = known[None, :, None].expand(1, -1, structure.mechanisms[node].space.cells)
    for edge in structure.graph.lags:
        if edge.parent in numbers:
            name = lag_name(edge.parent, edge.by)
            drawn[name] = pieces.lagged(values[edge.parent], edge.by)
            mask[name] = (pieces.inside & pieces.follows(edge.by))[None, :, None]
    chain = replace(context.chain(context.summed), values={**pieces.values, **drawn}, mask=mask)
    potential = potentials(structure, context.naturals, chain)
    # what lies beyond the end of a sequence is no first step, and must not reach back to the steps before it
    potential = replace(potential, hidden=torch.where(pieces.inside.unsqueeze(-1), potential.hidden, 0.0))
    states = marginals(pieces.block, Linear.of(potential), chain)
    counted = context.counted
    share = counted.sum() / pieces.inside.sum()
    expected = _weighted(states.state.transpose(1, 2) * counted.unsqueeze(-1), potential.observed + potential.hidden)
    expected = expected + share * _weighted(states.pair, potential.pair)
    return -expected + (expected - (states.log_scale * counted).sum(-1)).detach()


# --- draws -----------------------------------------------------------------------------------------------------------


def _number_kl(context: PieceContext, values: Mapping[str, Tensor], log_q: Tensor) -> Tensor:
    """Log-density of the drawn numbers under the map less that under the model, summed over counted steps."""
    structure, pieces = context.structure, context.pieces
    total = (log_q * pieces.counted.to(log_q)).sum(-1)
    for name, mechanism in structure.mechanisms.items():
        base = structure.base(name)
        if base in context.backward.smoother.targets:
            log_p = mechanism.log_prob(context.naturals[name], values[base], structure.parents(name, values))
            total = total - torch.where(pieces.made(structure, name), log_p, 0.0).sum(-1)
    return total


def _push_forward(context: PieceContext, draw: Draw, noises: Mapping[str, Tensor]) -> Tensor:
    """Sum of divergences between backward and forward families, first steps and later ones by their shares."""
    structure, pieces, streams, most = context.structure, context.pieces, draw.streams, draw.moment.drawn.compared
    total = torch.zeros(len(streams)).to(pieces.features)
    owners = [name for name in structure.mechanisms if structure.base(name) in context.backward.targets]
    for name in (*owners, *noises):
        made = pieces.made(structure, name)
        rows = made.nonzero()[:, 0]
        if len(rows) > most:
            rows = rows[torch.randperm(len(rows), generator=streams.shared)[:most]]
        if len(rows) < 2:
            continue
        batch = Batch({}, {}, torch.ones(1, len(rows)).to(pieces.features))
        part = {node: value[:, rows] for node, value in draw.values.items()}
        noise = {node: value[:, rows] for node, value in noises.items()}
        if name in owners:
            part[name] = part[structure.base(name)]
        here = replace(draw, batch=batch, values=part)
        pushed, forward = family(here, name, noise) if name in owners else noise_family(here, name, noise)
        if pushed:
            sides, share = (side_by_side(pushed), side_by_side(forward)), float(made.sum() / pieces.counted.sum())
            total = total + share * draw.moment.divergence(*sides, None, None, generator=streams.shared)
    return total
