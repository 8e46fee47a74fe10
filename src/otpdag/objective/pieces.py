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

from otpdag.backward.bidirectional import BidirectionalMap, ChainMarginals
from otpdag.backward.chain import Chain, Linear, Potentials, joint_states, marginals, pairs_vary, potentials
from otpdag.backward.pieces import Pieces
from otpdag.data import Batch
from otpdag.layers import side_by_side
from otpdag.mechanisms.base import Noise
from otpdag.objective.sampled import Evaluated, SampledOptions, Streams, family, noise_family, rebuild
from otpdag.objective.terms import LossTerms
from otpdag.structure import Naturals, Structure, Theta, lag_name

__all__ = ["piece_terms"]

COMPARED = 256  # steps of a family that the push-forward term compares


def piece_terms(
    structure: Structure,
    backward: BidirectionalMap,
    theta: Theta,
    phi: Theta,
    pieces: Pieces,
    streams: Streams,
    options: SampledOptions,
) -> LossTerms:
    """Terms of a counted step, one number for each replica."""
    naturals = structure.naturals(theta)
    zero = torch.zeros(len(streams)).to(pieces.features)
    total = pieces.counted.sum()
    adjustment, unary = backward.read(phi, pieces)
    values = dict(pieces.values)
    log_q = zero.unsqueeze(-1)
    if backward.smoother.targets:
        noise = streams.draw(Noise(backward.free, "normal"), len(pieces.times), pieces.features)
        drawn = backward.smoother.draw(phi, pieces.block, pieces.features[..., :-1], noise.unsqueeze(1), adjustment)
        values |= {node: value.squeeze(1) for node, value in drawn.values.items()}
        log_q = drawn.log_prob.squeeze(1)
    if unary is not None and options.noise == "marginal":
        posterior = backward.marginals(phi, pieces, unary)
        cost, kl = _expected(structure, naturals, backward.categories, pieces, posterior)
        return _terms(zero, options, cost / total, kl / total, zero)
    summed = tuple(n for n in structure.graph.order if n in structure.graph.hidden and n not in backward.targets)
    if summed:
        cost = _summed(structure, naturals, summed, pieces, values, backward.smoother.targets)
        return _terms(zero, options, cost / total, (log_q * pieces.counted).sum(-1) / total, zero)
    if unary is not None:
        uniform = streams.draw(Noise(unary.shape[-1], "uniform"), len(pieces.times), unary)
        hard, temperature = options.straight_through, options.temperature
        values |= backward.split(backward.relaxed(phi, pieces, unary, uniform, temperature, hard=hard))
    for edge in structure.graph.lags:
        if edge.parent in backward.targets:
            values[lag_name(edge.parent, edge.by)] = pieces.lagged(values[edge.parent], edge.by)
    at = Evaluated(structure, naturals, pieces.as_batch(structure), streams, options)
    cost, noises = rebuild(at, backward, values)
    kl = zero
    if options.eps:
        kl = _number_kl(structure, naturals, backward, pieces, values, log_q)
        if unary is not None:
            kl = (
                kl
                + _expected(structure, naturals, backward.categories, pieces, backward.marginals(phi, pieces, unary))[1]
            )
    divergence = _push_forward(at, backward, pieces, values, noises) if options.eta else zero
    return _terms(zero, options, (cost * at.batch.weight).sum(-1) / total, kl / total, divergence)


def _terms(zero: Tensor, options: SampledOptions, cost: Tensor, kl: Tensor, divergence: Tensor) -> LossTerms:
    return LossTerms.of(
        zero,
        reconstruction=options.reconstruction * cost + zero,
        entropic=options.eps * kl + zero,
        divergence=options.eta * divergence + zero,
    )


# --- expectations over the chain of states ---------------------------------------------------------------------------


def _expected(
    structure: Structure, naturals: Naturals, categories: tuple[str, ...], pieces: Pieces, posterior: ChainMarginals
) -> tuple[Tensor, Tensor]:
    """Expected cost of what is observed, and the entropic term of the categories, summed over counted steps."""
    chain = _as_chain(structure, categories, pieces)
    potential = potentials(structure, naturals, chain)
    counted = pieces.counted.to(pieces.features)
    state = posterior.state.flatten(1, 2) * counted.unsqueeze(-1)
    cost = -_weighted(state, potential.observed)
    prior = _weighted(state, potential.hidden) + _pair_prior(pieces, posterior, potential, chain)
    return cost, (posterior.negentropy() * counted).sum(-1) - prior


def _pair_prior(pieces: Pieces, posterior: ChainMarginals, potential: Potentials, chain: Chain) -> Tensor:
    """Expected log-potentials of pairs of states, over counted steps that follow another."""
    counted = (pieces.counted & pieces.follows(1))[pieces.many :].to(pieces.features)
    weight = posterior.pair.flatten(1, 2) * counted[:, None, None]
    if chain.varying:
        return _weighted(weight, potential.pair[:, pieces.many :])
    phases = chain.phase[pieces.many :]
    rows = [weight[:, phases == phase].sum(1) for phase in range(chain.longest_lag + 1)]
    return _weighted(torch.stack(rows, 1), potential.pair)


def _weighted(weight: Tensor, log_potential: Tensor) -> Tensor:
    """Sum of weight times log-potential; states that cannot be count as very unlikely."""
    return (weight * log_potential.clamp(min=-100.0)).flatten(1).sum(-1)


def _as_chain(structure: Structure, categories: tuple[str, ...], pieces: Pieces) -> Chain:
    """Pieces in the shape in which the potentials of mechanisms are evaluated."""
    states = joint_states(structure, categories)
    longest = max((edge.by for edge in structure.graph.lags), default=0)
    return Chain(
        states,
        pieces.values,
        pieces.mask,
        pieces.times.clamp(max=longest),
        pieces.counted.to(pieces.features),
        (pieces.block,),
        longest,
        pairs_vary(structure, states),
        len(pieces.times),
        pieces.many,
    )


def _summed(
    structure: Structure,
    naturals: Naturals,
    categories: tuple[str, ...],
    pieces: Pieces,
    values: Mapping[str, Tensor],
    numbers: tuple[str, ...],
) -> Tensor:
    """Minus the log-density of what is seen and drawn, categories summed over, of the counted steps.

    Pairs of states are those of all steps that are read, by the share of them that count.
    """
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
    chain = replace(_as_chain(structure, categories, pieces), values={**pieces.values, **drawn}, mask=mask)
    potential = potentials(structure, naturals, chain)
    posterior = marginals(pieces.block, Linear.of(potential), chain)
    counted = pieces.counted.to(pieces.features)
    share = counted.sum() / pieces.inside.sum()
    expected = _weighted(posterior.state.transpose(1, 2) * counted.unsqueeze(-1), potential.observed + potential.hidden)
    expected = expected + share * _weighted(posterior.pair, potential.pair)
    return -expected + (expected - (posterior.log_scale * counted).sum(-1)).detach()


# --- draws -----------------------------------------------------------------------------------------------------------


def _number_kl(
    structure: Structure,
    naturals: Naturals,
    backward: BidirectionalMap,
    pieces: Pieces,
    values: Mapping[str, Tensor],
    log_q: Tensor,
) -> Tensor:
    """Log-density of the drawn numbers under the map less that under the model, summed over counted steps."""
    total = (log_q * pieces.counted.to(log_q)).sum(-1)
    for name, mechanism in structure.mechanisms.items():
        base = structure.base(name)
        if base in backward.smoother.targets:
            log_p = mechanism.log_prob(naturals[name], values[base], structure.parents(name, values))
            total = total - torch.where(pieces.made(structure, name), log_p, 0.0).sum(-1)
    return total


@dataclass(frozen=True)
class _Family:
    """The steps of one family: the mechanism that makes them, and which they are."""

    name: str
    rows: Tensor
    share: float


def _push_forward(
    at: Evaluated,
    backward: BidirectionalMap,
    pieces: Pieces,
    values: Mapping[str, Tensor],
    noises: Mapping[str, Tensor],
) -> Tensor:
    """Sum of divergences between backward and forward families, first steps and later ones by their shares."""
    structure, streams = at.structure, at.streams
    total = torch.zeros(len(streams)).to(pieces.features)
    owners = [name for name in structure.mechanisms if structure.base(name) in backward.targets]
    for name in (*owners, *noises):
        one = _family_of(structure, pieces, name, streams)
        if len(one.rows) < 2:
            continue
        chosen = replace(at, batch=Batch({}, {}, torch.ones(1, len(one.rows)).to(pieces.features)))
        part = {node: value[:, one.rows] for node, value in values.items()}
        noise = {node: value[:, one.rows] for node, value in noises.items()}
        if name in owners:
            part[name] = part[structure.base(name)]
            pair = family(chosen, backward, name, part, noise)
        else:
            pair = noise_family(chosen, backward, name, part, noise)
        if pair[0]:
            sides = side_by_side(pair[0]), side_by_side(pair[1])
            total = total + one.share * at.options.divergence(*sides, None, None, generator=streams.shared)
    return total


def _family_of(structure: Structure, pieces: Pieces, name: str, streams: Streams) -> _Family:
    made = pieces.made(structure, name)
    rows = made.nonzero()[:, 0]
    if len(rows) > COMPARED:
        rows = rows[torch.randperm(len(rows), generator=streams.shared)[:COMPARED]]
    return _Family(name, rows, float(made.sum() / pieces.counted.sum()))
