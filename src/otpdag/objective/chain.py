r"""The objective of sequences, with the chain-structured backward map in closed form.

The gradient is not taken through the recursion over time: by Fisher's identity it is that of the expected
complete-data cost under the backward map, held fixed,

.. math:: \nabla_\theta \log P_\theta(x) = E_{\phi(s \mid x)} \nabla_\theta \log P_\theta(x, s),

so that one pass without gradients and sums over distinct steps are enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.backward.chain import Chain, Linear, marginals, potentials
from otpdag.objective.terms import LossTerms
from otpdag.structure import Naturals, Structure

__all__ = ["chain_terms"]


def chain_terms(structure: Structure, naturals: Naturals, chain: Chain, *, eps: float = 1.0) -> LossTerms:
    r"""Reconstruction and entropic terms of a step, :math:`-\epsilon \log P(x) / \text{steps}` with eps = 1."""
    found = potentials(structure, naturals, chain)
    linear = Linear.of(found, eps)
    replicas, size, kinds = linear.unary.shape
    state = linear.unary.new_zeros(replicas, kinds, size)
    pair = torch.zeros_like(linear.pair)
    log_likelihood = linear.unary.new_zeros(replicas)
    for block in chain.blocks:
        part = marginals(block, linear, chain)
        log_likelihood += part.log_scale.sum(-1)
        pair += part.pair
        state += _by_kind(part.state, block.kinds, kinds)
    cost = -_expected(state, found.observed) / chain.steps
    surrogate = cost - eps * (_expected(state, found.hidden) + _expected(pair, found.pair)) / chain.steps
    loss = surrogate + (-eps * log_likelihood / chain.steps - surrogate).detach()
    return LossTerms.of(loss, reconstruction=cost.detach(), entropic=loss - cost.detach())


def _by_kind(state: Tensor, kinds: Tensor, many: int) -> Tensor:
    """Sum the probabilities of states (R, S, m) over columns of the same kind: (R, many, S)."""
    replicas, size, columns = state.shape
    if many > columns:  # hardly any two are alike
        found = state.new_zeros(replicas, many, size)
        return found.index_add_(1, kinds, state.transpose(1, 2))
    sums = [torch.bincount(kinds, row, minlength=many) for row in state.reshape(-1, columns)]
    return torch.stack(sums).reshape(replicas, size, many).transpose(1, 2)


def _expected(weight: Tensor, log_potential: Tensor) -> Tensor:
    """Sum of weight times log-potential; what has no weight counts as zero even at minus infinity."""
    log_potential = log_potential.expand(weight.shape[0], *log_potential.shape[1:])
    known = torch.where(weight > 0, log_potential, torch.zeros_like(log_potential))
    return (weight * known).flatten(1).sum(-1)
