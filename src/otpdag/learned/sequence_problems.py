r"""Objectives of sequences with a learned backward map: the evidence lower bound, Algorithm 1 and its relatives.

Hidden numbers are drawn from the map's Gaussian chain: of all steps with noise that stays fixed, or of pieces with
fresh noise in every step of Adam. Where noise is integrated out, hidden categories need no draw: the map's chain tells
all its expectations or, beside hidden numbers z, categories s are summed over exactly given each draw,

.. math:: E_{\phi(z \mid x)} [\log \phi(z \mid x) - \log \textstyle\sum_s P(x, z, s)],

so that nothing of theirs is relaxed; the gradient, in the parameters as in the draws, is that of the expected
complete-data cost. Where noise is sampled or abducted they are drawn as relaxed paths. Families of the push-forward
term are those of tables, with earlier values as further parents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch, part_of
from otpdag.learned.algorithm import Algorithm1, Drawn, Family, Moment, Step
from otpdag.learned.sampled import Draw, family, noise_family, rebuild
from otpdag.learned.sequence_map import BidirectionalMap, ChainMarginals, SequenceDraw, SequenceMap
from otpdag.learned.sequence_steps import Cuts, Steps
from otpdag.likelihood.chain_layout import Chain, Linear, Potentials, one_block, potentials
from otpdag.likelihood.chain_messages import marginals
from otpdag.likelihood.chain_problem import expected_log_potential
from otpdag.mechanisms.base import Noise
from otpdag.noise import Streams
from otpdag.numerics import side_by_side
from otpdag.problem import LossTerms, Pace, Problem, Refinement, split_point
from otpdag.settings import Objective
from otpdag.structure import Naturals, Structure, Theta

# --- all steps, with noise that stays fixed --------------------------------------------------------------------------


@dataclass(frozen=True)
class NumberProblem(Problem):
    """Sequences with hidden numbers, whose backward map is learned along with the model."""

    structure: Structure
    batch: SequenceBatch
    backward: SequenceMap
    shapes: Mapping[str, tuple[int, ...]]
    eps: float
    seed: int
    steps: Steps
    noise: Tensor
    """The map's noise (1, D, M, d), the same in every evaluation."""
    chain: Chain | None
    """The hidden categories given each draw, if there are any."""
    readings: int = 0
    """Times that the map has read the categories."""
    most_readings: int = 8
    last_loss: float = float("inf")
    """The loss when the categories were read last."""
    small_fall: float = 1e-4
    """A fall of the loss since then that ends readings."""

    @property
    def rows(self) -> int:
        """Steps of all sequences."""
        return self.batch.rows

    @property
    def pace(self) -> Pace:
        """With categories, few steps before they are read anew: the last of many steps on an old reading are lost."""
        return Pace(steps=None if self.chain is None else 100)

    def loss(self, point: Tensor) -> LossTerms:
        """Reconstruction and entropic terms of a step."""
        theta, phi = split_point(point, self.shapes)
        drawn = self.backward.draw(phi, self.steps.block, self.steps.features, self.noise)
        cost, kl = given_draws(self.structure.naturals(theta), self.steps, drawn, self.chain)
        return LossTerms.of(cost, reconstruction=cost / self.rows, entropic=self.eps * kl / self.rows)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> NumberProblem:
        """About so many steps, or these sequences."""
        part = part_of(self.batch, rows, self.seed)
        if part is self.batch:
            return self
        return number_problem(part, self.backward, self.shapes, self.eps, self.seed)

    def refine(self, point: Tensor) -> Refinement | None:
        """The map reads the probabilities that the categories have now, until that lowers the loss no more."""
        if self.chain is None or self.readings == self.most_readings:
            return None
        with torch.no_grad():
            loss = float(self.loss(point).total[0])
            if self.last_loss - loss < self.small_fall:
                return None
            read = self._reading(point, self.chain)
        refined = replace(self, steps=read, readings=self.readings + 1, last_loss=loss)
        return Refinement(refined, point, f"categories read {refined.readings}")

    def _reading(self, point: Tensor, chain: Chain) -> Steps:
        """The same steps, whose features end with the probabilities of the categories now and one step later.

        Given the categories, the potentials of linear Gaussian numbers are linear in them: what the map reads of them
        it need not guess from what is seen.
        """
        theta, phi = split_point(point, self.shapes)
        steps, size = self.steps, chain.states.size
        drawn = self.backward.draw(phi, steps.block, steps.features, self.noise)
        state = _summed(self.structure.naturals(theta), steps, drawn, chain)[1]
        now = state[:1].unflatten(1, (-1, self.rows)).mean(1)
        later, follows = torch.zeros_like(now), steps.block.steps > 0
        later[:, steps.block.back(1)[follows]] = now[:, follows]
        return replace(steps, features=torch.cat([steps.features[..., : -2 * size], now, later], -1))


def number_problem(
    batch: SequenceBatch,
    backward: SequenceMap,
    shapes: Mapping[str, tuple[int, ...]],
    eps: float,
    seed: int,
    *,
    most: int = 8,
    in_all: int = 8000,
) -> NumberProblem:
    """Draw the noise once, each with its mirror image, and lay out the hidden categories beside the numbers.

    A step is drawn ``most`` times, beside categories, of which each draw is a chain of its own, half as often; fewer
    times where there would be more than ``in_all`` draws.
    """
    structure, generator = backward.structure, torch.Generator().manual_seed(seed)
    mixed = bool(structure.hidden_categories)
    draws = min(most // 2 if mixed else most, max(1, in_all // batch.rows))
    noise = torch.randn(1, draws, batch.rows, sum(backward.widths), generator=generator, dtype=torch.float64)
    block = one_block(batch)
    noise = torch.cat([noise, -noise], 1)[:, :, block.rows]
    steps = Steps.of(structure, batch, block, backward.features(batch))
    chain = steps.chain(structure.hidden_categories, noise.shape[1]) if mixed else None
    return NumberProblem(structure, batch, backward, shapes, eps, seed, steps, noise, chain)


# --- pieces, with fresh noise ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PieceProblem(Algorithm1):
    """Sequences cut in pieces; every step of Adam draws some, the same for all replicas."""

    structure: Structure
    backward: BidirectionalMap
    cuts: Cuts
    features: Tensor
    shapes: Mapping[str, tuple[int, ...]]
    objective: Objective
    drawn: Drawn
    fewest: int = 8
    """Pieces in a step of Adam, however long: fewer would show too few beginnings and ends."""

    @property
    def rows(self) -> int:
        """Steps of all sequences."""
        return self.cuts.batch.rows

    def steps(self, theta: Theta, phi: Theta, streams: Streams, progress: float) -> Iterator[Step]:
        """Fresh pieces, the same for all replicas."""
        many = min(len(self.cuts), max(self.fewest, self.drawn.batch_size // self.cuts.span))
        steps = self.cuts.draw(self.structure, self.features, many, streams.shared)
        moment = Moment.of(self.objective, self.drawn, progress)
        yield piece_step(self.backward, self.structure.naturals(theta), phi, steps, streams, moment)


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


def piece_step(
    backward: BidirectionalMap, naturals: Naturals, phi: Theta, steps: Steps, streams: Streams, moment: Moment
) -> Step:
    """What is drawn of pieces, and what it costs to rebuild a step that counts."""
    structure, many = steps.structure, len(steps.times)
    zero, total = torch.zeros(len(streams)).to(steps.features), steps.counted.sum()
    adjustment, unary = backward.read(phi, steps)
    drawn, families = SequenceDraw({}, zero[:, None, None]), iter(tuple[Family]())
    if backward.smoother.targets:
        noise = streams.draw(Noise(backward.free, "normal"), many, steps.features).unsqueeze(1)
        drawn = backward.smoother.draw(phi, steps.block, steps.features[..., :-1], noise, adjustment)
    if moment.drawn.noise == "marginal":
        if unary is not None:
            cost, kl = _expected(naturals, steps, backward.categories, backward.marginals(phi, steps, unary))
        else:
            summed = tuple(node for node in structure.hidden_categories if node not in backward.targets)
            cost, kl = given_draws(naturals, steps, drawn, steps.chain(summed) if summed else None)
    else:
        values = {node: value.squeeze(1) for node, value in drawn.values.items()}
        if unary is not None:
            uniform = streams.draw(Noise(unary.shape[-1], "uniform"), many, unary)
            hard, temperature = moment.drawn.straight_through, moment.temperature
            values |= backward.split(backward.relaxed(phi, steps, unary, uniform, temperature, hard=hard))
        values = {**steps.values, **steps.with_earlier(values)}
        batch = steps.as_batch()
        draw = Draw(structure, backward, naturals, batch, values, streams, moment)
        rebuilt, noises = rebuild(draw)
        cost, kl = (rebuilt * batch.weight).sum(-1), zero
        if moment.with_kl:
            own = (drawn.log_prob.squeeze(1) * steps.counted).sum(-1)
            kl = own - _log_density(naturals, steps, values, backward.smoother.targets)
        if moment.with_kl and unary is not None:
            kl = kl + _expected(naturals, steps, backward.categories, backward.marginals(phi, steps, unary))[1]
        families = _families(draw, steps, noises)
    return Step(cost / total, families, kl / total)


# --- terms, summed over counted steps --------------------------------------------------------------------------------


def given_draws(naturals: Naturals, steps: Steps, drawn: SequenceDraw, chain: Chain | None) -> tuple[Tensor, Tensor]:
    """Cost of what is seen and the entropic term of drawn numbers (R,), means over draws.

    Hidden categories of a ``chain`` are summed over: minus the log-density of all else is the cost.
    """
    own = (drawn.log_prob * steps.counted).sum(-1).mean(1)
    if chain is not None:
        return _summed(naturals, steps, drawn, chain)[0] / drawn.log_prob.shape[1], own
    values = {name: value.unsqueeze(1) for name, value in steps.values.items()} | steps.with_earlier(drawn.values)
    cost = -_log_density(naturals, steps, values, steps.structure.graph.observed).mean(1)
    return cost, own - _log_density(naturals, steps, values, tuple(drawn.values)).mean(1)


def _log_density(naturals: Naturals, steps: Steps, values: Mapping[str, Tensor], nodes: tuple[str, ...]) -> Tensor:
    """Log-density of some nodes, of what is seen of them, at values (R, ..., M, width): (R, ...)."""
    structure, total = steps.structure, torch.zeros(1, *next(iter(values.values())).shape[1:-2]).to(steps.features)
    for name, mechanism in structure.mechanisms.items():
        base = structure.base(name)
        if base not in nodes or mechanism.is_given:
            continue
        seen = steps.mask[base].unsqueeze(1) if base in steps.mask else None
        log_p = mechanism.log_prob(naturals[name], values[base], structure.parents(name, values), seen)
        total = total + torch.where(steps.made(name), log_p, 0.0).sum(-1)
    return total


def _summed(naturals: Naturals, steps: Steps, drawn: SequenceDraw, chain: Chain) -> tuple[Tensor, Tensor]:
    """Minus the log-density of what is seen and drawn, categories summed over, added up over all draws.

    Pairs of states are those of all steps that are read, by the share of them that count. Also the probabilities of
    states (R, D M, S).
    """
    (block,) = chain.blocks
    copies = drawn.log_prob.shape[1]
    inside, counted = (which.repeat(copies) for which in (steps.inside, steps.counted.to(steps.features)))
    numbers = {name: value.flatten(1, 2) for name, value in steps.with_earlier(drawn.values).items()}
    laid = replace(chain, values={**chain.values, **numbers})
    given = potentials(steps.structure, naturals, laid)
    # what lies beyond the end of a sequence is no first step, and must not reach back to the steps before it
    given = replace(given, hidden=torch.where(inside.unsqueeze(-1), given.hidden, 0.0))
    part = marginals(block, Linear.of(given), laid)
    state = torch.empty_like(part.state).index_copy_(2, block.kinds, part.state).transpose(1, 2)
    share = counted.sum() / inside.sum()
    expected = expected_log_potential(state * counted.unsqueeze(-1), given.observed + given.hidden)
    expected = expected + share * expected_log_potential(part.pair, given.pair)
    log_likelihood = (part.log_scale * counted[block.kinds]).sum(-1)
    return -expected + (expected - log_likelihood).detach(), state


def _expected(
    naturals: Naturals, steps: Steps, categories: tuple[str, ...], states: ChainMarginals
) -> tuple[Tensor, Tensor]:
    """Expected cost of what is observed under a map's chain, and the entropic term of the categories."""
    chain = steps.chain(categories)
    potential = potentials(steps.structure, naturals, chain)
    counted = steps.counted.to(steps.features)
    state = states.state.flatten(1, 2) * counted.unsqueeze(-1)
    cost = -_weighted(state, potential.observed)
    prior = _weighted(state, potential.hidden) + _pair_prior(steps, states, potential, chain)
    return cost, (states.negentropy() * counted).sum(-1) - prior


def _pair_prior(steps: Steps, states: ChainMarginals, potential: Potentials, chain: Chain) -> Tensor:
    """Expected log-potentials of pairs of states, over counted steps that follow another."""
    later = slice(steps.block.sizes[0], None)
    counted = (steps.counted & steps.follows(1))[later].to(steps.features)
    weight = states.pair.flatten(1, 2) * counted[:, None, None]
    rows = chain.pair_rows[later]
    summed = weight.new_zeros(len(weight), potential.pair.shape[1], *weight.shape[2:]).index_add(1, rows, weight)
    return _weighted(summed, potential.pair)


def _weighted(weight: Tensor, log_potential: Tensor) -> Tensor:
    """Sum of weight times log-potential; states that cannot be count as very unlikely."""
    return expected_log_potential(weight, log_potential.clamp(min=-100.0))


def _families(draw: Draw, steps: Steps, noises: Mapping[str, Tensor]) -> Iterator[Family]:
    """Backward and forward families, first steps and later ones by their shares."""
    structure, streams, most = draw.structure, draw.streams, draw.moment.drawn.compared
    owners = [name for name in structure.mechanisms if structure.base(name) in draw.backward.targets]
    for name in (*owners, *noises):
        made = steps.made(name)
        rows = made.nonzero()[:, 0]
        if len(rows) > most:
            rows = rows[torch.randperm(len(rows), generator=streams.shared)[:most]]
        if len(rows) < 2:
            continue
        batch = Batch({}, {}, torch.ones(1, len(rows)).to(steps.features))
        part = {node: value[:, rows] for node, value in draw.values.items()}
        noise = {node: value[:, rows] for node, value in noises.items()}
        if name in owners:
            part[name] = part[structure.base(name)]
        here = replace(draw, batch=batch, values=part)
        pushed, forward = family(here, name, noise) if name in owners else noise_family(here, name, noise)
        if pushed:
            share = float(made.sum() / steps.counted.sum())
            yield Family(side_by_side(pushed), side_by_side(forward), share=share)
