r"""The objective of sequences, with the chain-structured backward map in closed form.

The gradient is not taken through the recursion over time: by Fisher's identity it is that of the expected
complete-data cost under the backward map, held fixed,

.. math:: \nabla_\theta \log P_\theta(x) = E_{\phi(s \mid x)} \nabla_\theta \log P_\theta(x, s),

so that one pass without gradients and sums over distinct steps are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Chain, lay_out_chain
from otpdag.backward.chain_marginals import marginals
from otpdag.backward.chain_potentials import Linear, potentials
from otpdag.data.sequence_parts import part_of
from otpdag.data.sequences import SequenceBatch
from otpdag.inference.simulated import simulated_sequences
from otpdag.objective.problem import Problem
from otpdag.objective.terms import LossTerms
from otpdag.structure import Naturals, Structure

__all__ = ["ChainProblem", "chain_problem", "chain_terms", "expected_log_potential"]

SHORT_UNIT = 50
"""Steps of the pieces in which few long sequences are resampled: longer than most dependence, and many of them."""

SIMULATED_STEPS = 200_000
"""Steps of all sequences that the model makes of its own, at most."""

FEWEST_UNITS = 30
"""Sequences below which resampling whole ones says little."""


@dataclass(frozen=True)
class ChainProblem(Problem):
    """Sequences whose hidden nodes are categories: minus the log-likelihood of a step."""

    structure: Structure
    batch: SequenceBatch
    shapes: Mapping[str, tuple[int, ...]]
    eps: float
    seed: int
    chain: Chain
    factors: Tensor
    """Weights of the sequences (R or 1, N)."""

    @property
    def rows(self) -> int:
        """Steps of all sequences."""
        return self.batch.rows

    def for_curvature(self, points: Tensor) -> ChainProblem:
        """Itself: states' probabilities are held fixed in the gradient, and distinct steps are few."""
        return self

    @property
    def is_likelihood(self) -> bool:
        """At temperature one."""
        return self.eps == 1.0

    @property
    def is_sum(self) -> bool:
        """Also at another temperature."""
        return True

    @property
    def unit_mass(self) -> Tensor:
        """Steps of each sequence, times its weight (1, N)."""
        return self.factors[:1] * self.batch.lengths.to(self.factors)

    def terms(self, point: Tensor) -> LossTerms:
        """Reconstruction and entropic terms of a step."""
        weight = None if bool((self.factors == 1).all()) else self.factors
        return chain_terms(self.structure, self.naturals(point), self.chain, eps=self.eps, weight=weight)

    def on_part(self, rows: int | Tensor, *, coarse: bool = False) -> ChainProblem:
        """About so many steps, or these sequences."""
        part = part_of(self.batch, rows, self.seed)
        if part is self.batch:
            return self
        return chain_problem(self.structure, part, self.shapes, self.eps, self.seed)

    @property
    def weight(self) -> Tensor:
        """Weights of the sequences (1, N)."""
        return self.factors[:1]

    def in_units(self) -> ChainProblem:
        """The problem in enough units to be resampled: few long sequences are cut, each piece one of its own."""
        if len(self.batch.lengths) >= FEWEST_UNITS:
            return self
        pieces = self.batch.cut(max(2, min(SHORT_UNIT, self.rows // FEWEST_UNITS)))
        return chain_problem(self.structure, pieces, self.shapes, self.eps, self.seed)

    def reweighted(self, factors: Tensor) -> ChainProblem:
        """The same sequences with other weights."""
        factors = factors.to(self.factors)
        steps = self.batch.steps
        weight = steps.weight * factors.repeat_interleave(self.batch.lengths, 1)
        batch = replace(self.batch, steps=replace(steps, weight=weight))
        return replace(self, batch=batch, factors=self.factors * factors)

    def unit_losses(self, points: Tensor) -> Tensor:
        """Minus the log-likelihood of a step of each sequence (R, N)."""
        with torch.no_grad():
            log_potentials = potentials(self.structure, self.naturals(points.detach()), self.chain)
            linear = Linear.of(log_potentials, self.eps)
            totals = linear.unary.new_zeros(len(linear.unary), len(self.batch.lengths))
            for block in self.chain.blocks:
                scale = marginals(block, linear, self.chain).log_scale
                totals.index_add_(1, block.sequences[block.owners], scale)
        return -self.eps * totals / self.batch.lengths.to(totals)

    def simulated(self, point: Tensor, size: int, seed: int) -> ChainProblem:
        """Sequences that the model makes, each as long as a random one of the data, with its gaps and covariates."""
        most = SIMULATED_STEPS * len(self.batch.lengths) // self.rows
        many = max(FEWEST_UNITS, min(size, most))
        sample = simulated_sequences(self.structure, self.naturals(point.detach()), self.batch, many, seed)
        return chain_problem(self.structure, sample, self.shapes, self.eps, seed)


def chain_problem(
    structure: Structure, batch: SequenceBatch, shapes: Mapping[str, tuple[int, ...]], eps: float, seed: int
) -> ChainProblem:
    """Lay out states and distinct steps once; sequences have the weight of their first step."""
    factors = batch.steps.weight[:, batch.starts]
    return ChainProblem(structure, batch, shapes, eps, seed, lay_out_chain(structure, batch), factors)


def chain_terms(
    structure: Structure, naturals: Naturals, chain: Chain, *, eps: float = 1.0, weight: Tensor | None = None
) -> LossTerms:
    r"""Reconstruction and entropic terms of a step, :math:`-\epsilon \log P(x) / \text{steps}` with eps = 1.

    ``weight`` (R or 1, N) are weights of the sequences, one if left out.
    """
    log_potentials = potentials(structure, naturals, chain)
    linear = Linear.of(log_potentials, eps)
    if weight is not None:
        linear = linear.for_replicas(len(weight))
    replicas, size, kinds = linear.unary.shape
    state = linear.unary.new_zeros(replicas, kinds, size)
    pair = torch.zeros_like(linear.pair)
    log_likelihood, total = linear.unary.new_zeros(replicas), linear.unary.new_zeros(1)
    for block in chain.blocks:
        own = None if weight is None else weight[:, block.sequences]
        part = marginals(block, linear, chain, own)
        columns = None if own is None else own[:, block.owners]
        log_likelihood += (part.log_scale if columns is None else part.log_scale * columns).sum(-1)
        total = total + (len(block.kinds) if columns is None else columns.sum(-1))
        pair += part.pair
        state += _by_kind(part.state if columns is None else part.state * columns.unsqueeze(1), block.kinds, kinds)
    cost = -expected_log_potential(state, log_potentials.observed) / total
    hidden = expected_log_potential(state, log_potentials.hidden) + expected_log_potential(pair, log_potentials.pair)
    surrogate = cost - eps * hidden / total
    loss = surrogate + (-eps * log_likelihood / total - surrogate).detach()
    return LossTerms.of(loss, reconstruction=cost.detach(), entropic=loss - cost.detach())


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
