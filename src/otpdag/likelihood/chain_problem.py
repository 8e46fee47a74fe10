r"""The objective of sequences, with the chain-structured backward map in closed form.

The gradient is not taken through the recursion over time: by Fisher's identity it is that of the expected
complete-data cost under the backward map, held fixed,

.. math:: \nabla_\theta \log P_\theta(x) = E_{\phi(s \mid x)} \nabla_\theta \log P_\theta(x, s),

so that one pass without gradients and sums over distinct steps are enough.

Where every parameter has a maximum in closed form, updates ask the data for expected sums alone. Of observed nodes that
are read through few features, a step's log-densities in all states are a product of matrices, and so are the expected
sums of features. Both are taken in the order in which the recursion runs, so that nothing is looked up or put in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Self

import numpy as np
import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch
from otpdag.likelihood.chain_layout import SMALLEST_LOG, Chain, Lanes, Linear, Potentials, lay_out_chain, potentials
from otpdag.likelihood.chain_messages import Moves, marginals, smoothed
from otpdag.likelihood.state_problem import ReadStates, StateReader, Sums
from otpdag.likelihood.swapped_states import Reading
from otpdag.numerics import Array, in_order
from otpdag.problem import BatchUnits, LossTerms, Updates
from otpdag.simulation import simulated_sequences
from otpdag.structure import Naturals, Shapes, Structure, columns_of

# parameters up to which a backward pass for each costs less than a quasi-Newton method saves by its curvature
MOST_CURVED = 200


@dataclass(frozen=True, eq=False)
class PlacedSteps:
    """The features of sequences' steps, at the places of their lanes (L, F, B), and zero at empty ones."""

    features: Array
    lanes: Lanes

    @classmethod
    def of(cls, features: Tensor, lanes: Lanes) -> PlacedSteps:
        """Of the features of columns (m, F)."""
        placed = features.numpy()[lanes.columns].swapaxes(1, 2)
        return cls(np.where(lanes.inside[:, None], placed, 0.0), lanes)

    def sums(self, table: Tensor, first: Tensor, matrix: Tensor, weight: Tensor | None, every: int = 4) -> Sums | None:
        """Expected sums under these potentials; None where digits would be lost.

        Args:
            table: Coefficients of the features in each state (R, S, F).
            first: What is known of the first step's state (R, S), not as logarithms.
            matrix: Of the state after another one (R, S, S).
            weight: Of the sequences (R or 1, n); one if left out.
            every: Steps after which messages are normalised: they hardly become small before.
        """
        emission, log_unit = self._emission(table, first)
        passed = smoothed(emission, Moves(matrix.unsqueeze(1).numpy(), self.lanes), self.lanes, every)
        if passed is None:
            return None
        log_scale, state = np.log(passed.scale).sum(0) + log_unit.sum(0), passed.state
        if weight is not None:
            share = weight.numpy()[:, self.lanes.owners]
            log_scale, state = log_scale * share, np.multiply(state, share[:, None], out=state)
        begun = sum(state[at][..., which].sum(-1) for at, which in self.lanes.begins)
        flat = state.reshape(len(state), -1, state.shape[-1])
        features = np.matmul(flat, self.features.swapaxes(1, 2)).sum(0).reshape(*table.shape[:2], -1)
        return Sums(*map(torch.from_numpy, (log_scale.sum(-1), features, begun, passed.pairs(weight)[:, 0])))

    def _emission(self, table: Tensor, first: Tensor) -> tuple[Array, Array]:
        """Densities at all places (L, R, S, B) over the logarithms of the largest (L, R, B)."""
        replicas, size, _ = table.shape
        scores = np.matmul(table.reshape(replicas * size, -1).numpy(), self.features)
        logs = torch.from_numpy(scores.reshape(len(scores), replicas, size, -1))
        unit = logs.amax(2, keepdim=True)
        emission: Array = logs.sub_(unit).clamp_(min=SMALLEST_LOG).exp_().numpy()
        for at, which in self.lanes.begins:
            emission[at][..., which] *= first.numpy()[..., None]
        return emission, unit[:, :, 0].numpy()


FEWEST_UNITS = 30  # sequences below which resampling whole ones says little


@dataclass(frozen=True, eq=False)
class SequenceUnits(BatchUnits):
    """Whole sequences as units, each with the weight of its first step; the loss is that of a step."""

    batch: SequenceBatch

    @cached_property
    def factors(self) -> Tensor:
        """Weights of the sequences (R or 1, N)."""
        return self.batch.steps.weight[:, self.batch.starts]

    @property
    def weight(self) -> Tensor:
        """Weights of the sequences (1, N)."""
        return self.factors[:1]

    @property
    def unit_mass(self) -> Tensor:
        """Steps of each sequence, times its weight (R or 1, N)."""
        return self.factors * self.batch.lengths.to(self.factors)

    def in_units(self, most: int = 50) -> Self:
        """The problem in enough units to be resampled: few long sequences are cut, each piece one of its own.

        Pieces have at ``most`` so many steps: longer than most dependence, and many of them.
        """
        if len(self.batch.lengths) >= FEWEST_UNITS:
            return self
        pieces = self.batch.cut(max(2, min(most, self.rows // FEWEST_UNITS)))
        return self.of_batch(pieces, self.seed)

    def reweighted(self, factors: Tensor) -> Self:
        """The same sequences with weights multiplied by ``factors`` (R or 1, N)."""
        steps = self.batch.steps
        weight = steps.weight * factors.to(steps.weight)[:, self.batch.owners]
        return replace(self, batch=replace(self.batch, steps=replace(steps, weight=weight)))

    def simulated(self, point: Tensor, size: int, seed: int, most_steps: int = 200_000) -> Self:
        """Sequences that the model makes, each as long as a random one of the data, with its gaps and covariates."""
        most = most_steps * len(self.batch.lengths) // self.rows
        many = max(FEWEST_UNITS, min(size, most))
        sample = simulated_sequences(self.structure, self.naturals(point.detach()), self.batch, many, seed)
        return self.of_batch(sample, seed)


@dataclass(frozen=True)
class ChainProblem(SequenceUnits, ReadStates):
    """Sequences whose hidden nodes are categories: minus the log-likelihood of a step.

    Attributes:
        few_features: Features up to which reading every step anew costs no more than looking up what steps alike say.
    """

    eps: float
    chain: Chain
    reader: StateReader | None = None
    few_features: int = 8

    def of_batch(self, batch: SequenceBatch, seed: int) -> ChainProblem:
        """Laid out anew."""
        return chain_problem(self.structure, batch, self.shapes, self.eps, seed)

    def metric(self, points: Tensor) -> Tensor | None:
        """Its own: states' probabilities are held fixed in the gradient, and distinct steps are few."""
        if not 0 < points.shape[1] <= MOST_CURVED:
            return None
        with torch.enable_grad():
            leaf = points.detach().clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(self.loss(leaf).total.sum(), leaf, create_graph=True)
            second = partial(torch.autograd.grad, inputs=leaf, retain_graph=True)
            rows = [row for (row,) in in_order(partial(second, column.sum()) for column in gradient.unbind(-1))]
        return torch.stack(rows, 1).detach()

    @property
    def is_likelihood(self) -> bool:
        """At temperature one."""
        return self.eps == 1.0

    is_sum = True  # also at another temperature

    def loss(self, point: Tensor) -> LossTerms:
        r"""Reconstruction and entropic terms of a step, :math:`-\epsilon \log P(x) / \text{steps}` with eps = 1."""
        naturals, total = self.naturals(point), self.unit_mass.sum(-1)
        given = potentials(self.structure, naturals, self.chain)
        log_likelihood, state, pair = self._expected(given)
        cost = -expected_log_potential(state, given.observed) / total
        hidden = expected_log_potential(state, given.hidden) + expected_log_potential(pair, given.pair)
        surrogate = cost - self.eps * hidden / total
        loss = surrogate + (-self.eps * log_likelihood / total - surrogate).detach()
        loss = loss + self.structure.penalty(naturals) / total
        return LossTerms.of(loss, reconstruction=cost.detach(), entropic=loss - cost.detach())

    def _expected(self, given: Potentials) -> tuple[Tensor, Tensor, Tensor]:
        """Log-likelihood (R,), and expected counts of states by kind (R, U, S) and of pairs of states."""
        linear = Linear.of(given, self.eps, len(self.factors))
        replicas, size, kinds = linear.unary.shape
        log_likelihood, state = linear.unary.new_zeros(replicas), linear.unary.new_zeros(replicas, kinds, size)
        pair = torch.zeros_like(linear.pair)
        for block in self.chain.blocks:
            weight = self.factors[:, block.sequences]
            part, columns = marginals(block, linear, self.chain, weight), weight[:, block.owners]
            log_likelihood += (part.log_scale * columns).sum(-1)
            state += _by_kind(part.state * columns.unsqueeze(1), block.kinds, kinds)
            pair += part.pair
        return log_likelihood, state, pair

    @cached_property
    def updates(self) -> Updates | None:
        """Where emissions, transitions and first steps all have a maximum in closed form.

        All are stretched but what few first steps say of themselves: the best probabilities are zero, which no logits
        reach.
        """
        if self.reader is None:
            return None
        apart = len(self.factors) == 1
        if len(self.batch.lengths) >= FEWEST_UNITS:
            return Updates(apart=apart)
        keys = self.structure.keys.items()
        first = {key for name, own in keys if self.structure.base(name) != name for key in own.values()}
        return Updates(stretched=~columns_of(self.shapes, first), apart=apart)

    def sums(self, naturals: Naturals, reader: StateReader) -> Sums:
        """Of all steps, every one of them read anew where features are few: that costs no more than to look it up."""
        hidden = reader.hidden.potentials(naturals)
        few = sum(reader.sizes) <= self.few_features or len(self.chain.phase) == self.rows
        sums = self._placed_sums(naturals, reader, *hidden) if few else None
        if sums is None:
            log_likelihood, state, pair = self._expected(potentials(self.structure, naturals, self.chain))
            first = state[:, self.chain.phase == 0].sum(1)
            sums = Sums(log_likelihood, state.mT @ self._features, first, pair[:, -1])
        return replace(sums, first=_likeliest(sums.first, hidden[0]) * self.rows) if self._chooses_first else sums

    def reading(self, naturals: Naturals, reader: StateReader) -> tuple[Reading, Tensor]:
        """Distinct steps by their counts."""
        _, (state, *_), (pair, *_) = self._expected(potentials(self.structure, naturals, self.chain))
        count = state.sum(-1)
        return Reading(self._features, count, state / count.clamp(min=1e-300).unsqueeze(-1)), pair[-1]

    def _placed_sums(self, naturals: Naturals, reader: StateReader, begun: Tensor, joined: Tensor) -> Sums | None:
        """Expected sums, features read in the order in which the recursion runs; None where digits would be lost."""
        table = reader.coefficients(naturals, self.factors.new_zeros(1, self.chain.states.size))
        held = (table, torch.exp(begun), torch.exp(joined))
        replicas = max(len(one) for one in (*held, self.factors))
        table, first, late = (part.expand(replicas, *part.shape[1:]).contiguous() for part in held)
        total: Sums | None = None
        for block in self.chain.blocks:
            lanes = block.lanes(*table.shape[:2])
            if lanes not in self._placed:
                self._placed[lanes] = PlacedSteps.of(self._features[block.kinds], lanes)
            own = None if self._weight is None else self._weight[:, block.sequences]
            sums = self._placed[lanes].sums(table, first, late, own)
            if sums is None:
                return None
            total = sums if total is None else total + sums
        return total

    @property
    def _chooses_first(self) -> bool:
        """Whether the best probabilities of the first state are known: one for the state that explains all most.

        So it is for a single sequence of a single hidden node. Updates would come there slowly where states are alike.
        """
        return len(self.batch.lengths) == 1 and len(self.chain.states.nodes) == 1 and self.chain.longest_lag == 1

    @cached_property
    def _placed(self) -> dict[Lanes, PlacedSteps]:
        """The features of steps at the places of lanes that were asked for."""
        return {}

    @cached_property
    def _features(self) -> Tensor:
        """Of the distinct steps (U, F + 1)."""
        assert self.reader is not None, "there is a reader where sums are asked for"
        values = {name: one[0].double() for name, one in self.chain.values.items()}
        return self.reader.features(values, {name: one[0] for name, one in self.chain.mask.items()})

    @cached_property
    def _weight(self) -> Tensor | None:
        return None if bool((self.factors == 1).all()) else self.factors

    def unit_losses(self, points: Tensor) -> Tensor:
        """Minus the log-likelihood of a step of each sequence (R, N)."""
        with torch.no_grad():
            log_potentials = potentials(self.structure, self.naturals(points), self.chain)
            linear = Linear.of(log_potentials, self.eps)
            totals = linear.unary.new_zeros(len(linear.unary), len(self.batch.lengths))
            for block in self.chain.blocks:
                scale = marginals(block, linear, self.chain).log_scale
                totals.index_add_(1, block.sequences[block.owners], scale)
        return -self.eps * totals / self.batch.lengths.to(totals)


def chain_problem(structure: Structure, batch: SequenceBatch, shapes: Shapes, eps: float, seed: int) -> ChainProblem:
    """Lay out states and distinct steps once; sequences have the weight of their first step."""
    chain = lay_out_chain(structure, batch)
    reader = None
    if eps == 1.0 and chain.is_uniform:
        values, mask = ({name: one[0] for name, one in held.items()} for held in (chain.values, chain.mask))
        reader = StateReader.of(structure, chain.states, values, mask)
    return ChainProblem(structure, batch, shapes, seed, eps, chain, reader)


def _likeliest(counts: Tensor, log_prior: Tensor) -> Tensor:
    """One for the first state under which the sequence is likeliest (R, S), from expected counts with this prior."""
    prior = torch.exp(log_prior)
    likelihood = torch.where(prior > 0, counts / prior, 0.0)
    return torch.nn.functional.one_hot(likelihood.argmax(-1), counts.shape[-1]).to(counts)


def _by_kind(state: Tensor, kinds: Tensor, many: int) -> Tensor:
    """Sum the probabilities of states (R, S, m) over columns of the same kind: (R, many, S)."""
    replicas, size, columns = state.shape
    if many > columns:  # hardly any two are alike
        sums = state.new_zeros(replicas, many, size)
        return sums.index_add_(1, kinds, state.transpose(1, 2))
    rows = [torch.bincount(kinds, row, minlength=many) for row in state.reshape(-1, columns)]
    return torch.stack(rows).reshape(replicas, size, many).transpose(1, 2)


def expected_log_potential(weight: Tensor, log_potential: Tensor) -> Tensor:
    """Sum of weight times log-potential; what has no weight counts as zero even at minus infinity."""
    log_potential = log_potential.expand(weight.shape[0], *log_potential.shape[1:])
    known = torch.where(weight > 0, log_potential, torch.zeros_like(log_potential))
    return (weight * known).flatten(1).sum(-1)
