"""What the chain says of a block of sequences: probabilities of states, of pairs of states, and the likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Block, Chain
from otpdag.backward.chain_potentials import Linear
from otpdag.backward.chain_recursion import Marginals, marginals_by_steps
from otpdag.backward.chain_stretches import marginals_by_stretches

__all__ = ["Marginals", "marginals"]


# A sequence of more than a thousand steps is cut in stretches that run side by side, unless there are a twentieth as
# many sequences as steps, which run side by side as they are. The choice changes time, not the result.
_LONG_STEPS = 1000
_STEPS_FOR_EACH_SEQUENCE = 20


def marginals(block: Block, potential: Linear, chain: Chain, weight: Tensor | None = None) -> Marginals:
    """Run forward and backward over one block; pairs of states count by the ``weight`` (R or 1, n) of a sequence."""
    with torch.no_grad():
        few = block.sizes[0] * _STEPS_FOR_EACH_SEQUENCE < len(block.sizes)
        if len(block.sizes) > _LONG_STEPS and few and not chain.varying and chain.longest_lag <= 1:
            return marginals_by_stretches(block, potential, weight)
        return marginals_by_steps(block, potential, chain, weight)
