"""What the chain says of a block of sequences: probabilities of states, of pairs of states, and the likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Block, Chain
from otpdag.backward.chain_potentials import Linear
from otpdag.backward.chain_recursion import Marginals, marginals_by_steps
from otpdag.backward.chain_stretches import marginals_by_stretches

__all__ = ["Marginals", "marginals", "suits_stretches"]


# Stretches of sequences run side by side, unless enough sequences do so as they are, or many places of stretches would
# be empty. The choice changes time, not the result.
_LONG_STEPS, _SIDE_BY_SIDE, _PADDED = 64, 400, 1.5


def marginals(block: Block, potential: Linear, chain: Chain, weight: Tensor | None = None) -> Marginals:
    """Run forward and backward over one block; pairs of states count by the ``weight`` (R or 1, n) of a sequence."""
    with torch.no_grad():
        if suits_stretches(block, len(potential.unary), chain):
            quickly = marginals_by_stretches(block, potential, weight)
            if quickly is not None:
                return quickly
        return marginals_by_steps(block, potential, chain, weight)


def suits_stretches(block: Block, replicas: int, chain: Chain) -> bool:
    """Whether a block of sequences is better cut than taken as it is."""
    longest, many = len(block.sizes), block.sizes[0]
    if chain.varying or chain.longest_lag > 1 or longest < _LONG_STEPS or many * replicas > _SIDE_BY_SIDE:
        return False
    return block.in_stretches.inside.size <= _PADDED * len(block.kinds)
