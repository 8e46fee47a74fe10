"""Exact forward-backward over the joint states of the hidden categories, step by step.

Messages are normalised at every step; time is linear in the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Block, Chain
from otpdag.backward.chain_potentials import Linear

__all__ = ["Marginals", "marginals_by_steps"]


@dataclass(frozen=True)
class Marginals:
    """What the chain says of a block: all without gradients.

    Attributes:
        state: Probabilities of the states of each column (R, S, m).
        log_scale: Log-probability of each column given those before it (R, m); they add up to the likelihood.
        pair: Sums of the probabilities of pairs of states, one for each row of the pair potentials.
    """

    state: Tensor
    log_scale: Tensor
    pair: Tensor


def marginals_by_steps(block: Block, potential: Linear, chain: Chain, weight: Tensor | None = None) -> Marginals:
    """Run forward and backward over one block, all its sequences side by side."""
    emission = potential.unary[:, :, block.kinds]
    steps = _Steps(block, potential, chain, weight)
    alpha, scale = _forward(emission, steps)
    pair = torch.zeros_like(potential.pair)
    _backward(alpha, emission, scale, steps, pair)
    return Marginals(alpha, torch.log(scale) + potential.log_unit[:, block.kinds], pair)


@dataclass(frozen=True)
class _Steps:
    """The pair potentials of a block's steps."""

    block: Block
    potential: Linear
    chain: Chain
    weight: Tensor | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First column and number of columns of each step."""
        return self.block.spans

    def propagate(self, step: int, message: Tensor) -> Tensor:
        """States before (R, S, n) to states now."""
        if self.chain.varying:
            return torch.einsum("rin,rnij->rjn", message, self._own(step))
        return torch.bmm(self._shared(step).transpose(1, 2), message)

    def recall(self, step: int, message: Tensor) -> Tensor:
        """States now (R, S, n) to states before."""
        if self.chain.varying:
            return torch.einsum("rnij,rjn->rin", self._own(step), message)
        return torch.bmm(self._shared(step), message)

    def count(self, step: int, before: Tensor, now: Tensor, pair: Tensor) -> None:
        """Add the probabilities of pairs of states to ``pair``, by the weights of their sequences."""
        now = now if self.weight is None else now * self.weight[:, None, : now.shape[2]]
        if self.chain.varying:
            both = torch.einsum("rin,rnij,rjn->rnij", before, self._own(step), now)
            pair.index_add_(1, self._kinds(step), both)
            return
        row = min(step, self.chain.longest_lag)
        pair[:, row] += torch.bmm(before, now.transpose(1, 2)) * self._shared(step)

    def _shared(self, step: int) -> Tensor:
        return self.potential.pair[:, min(step, self.chain.longest_lag)]

    def _kinds(self, step: int) -> Tensor:
        at, size = self.spans[step]
        return self.block.kinds[at : at + size]

    def _own(self, step: int) -> Tensor:
        return self.potential.pair.index_select(1, self._kinds(step))


def _forward(emission: Tensor, steps: _Steps) -> tuple[Tensor, Tensor]:
    """Filtered probabilities (R, S, m) and the normalisers (R, m)."""
    alpha = torch.empty_like(emission)
    scale = emission.new_empty(emission.shape[0], emission.shape[2])
    last = 0
    for step, (at, size) in enumerate(steps.spans):
        here = slice(at, at + size)
        message = emission[:, :, here]
        if step:
            message = steps.propagate(step, alpha[:, :, last : last + size]).mul_(message)
        total = message.sum(1)
        alpha[:, :, here] = message / total.unsqueeze(1)
        scale[:, here] = total
        last = at
    return alpha, scale


def _backward(alpha: Tensor, emission: Tensor, scale: Tensor, steps: _Steps, pair: Tensor) -> None:
    """Turn filtered probabilities into smoothed ones, in place, and count pairs of states."""
    spans = steps.spans
    later: Tensor | None = None  # emission times message over normaliser, of the step after
    for step in range(len(spans) - 1, -1, -1):
        at, size = spans[step]
        here = slice(at, at + size)
        filtered = alpha[:, :, here]
        message = torch.ones_like(filtered)
        if later is not None:
            many = later.shape[2]
            steps.count(step + 1, filtered[:, :, :many], later, pair)
            message[:, :, :many] = steps.recall(step + 1, later)
        later = emission[:, :, here] * message
        later /= scale[:, here].unsqueeze(1)
        filtered *= message
