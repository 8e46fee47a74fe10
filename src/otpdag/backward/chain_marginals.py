"""What the chain says of a block of sequences: probabilities of states, of pairs of states, and the likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Block, Chain
from otpdag.backward.chain_potentials import Linear
from otpdag.backward.chain_recursion import Marginals, marginals_by_steps
from otpdag.backward.chain_stretches import marginals_by_stretches

__all__ = ["Marginals", "marginals"]


# Stretches of sequences run side by side, unless enough sequences do so as they are, most of a block would be filled up
# to the longest, or states are many, for products of matrices cost their cube. The choice changes time, not the result.
_LONG_STEPS, _SIDE_BY_SIDE, _PADDED, _FEW_STATES = 64, 400, 1.5, 12


def marginals(block: Block, potential: Linear, chain: Chain, weight: Tensor | None = None) -> Marginals:
    """Run forward and backward over one block; pairs of states count by the ``weight`` (R or 1, n) of a sequence."""
    with torch.no_grad():
        if _suits_stretches(block, potential, chain):
            quickly = marginals_by_stretches(block, potential, weight)
            if quickly is not None:
                return quickly
        return marginals_by_steps(block, potential, chain, weight)


def _suits_stretches(block: Block, potential: Linear, chain: Chain) -> bool:
    longest, many, size = len(block.sizes), block.sizes[0], chain.states.size
    if chain.varying or chain.longest_lag > 1 or size > _FEW_STATES or longest < _LONG_STEPS:
        return False
    return many * len(potential.unary) <= _SIDE_BY_SIDE and longest * many <= _PADDED * len(block.kinds)
