r"""Exact forward-backward over the joint states of the hidden categories, step by step.

Messages are normalised at every step; time is linear in the number of steps.

Forward-backward for few or long sequences: stretches of all run side by side, and their joints are made to agree.

Filtered probabilities forget where they began. So the message that enters a stretch is guessed by running over the
stretch before it from even probabilities; if the message that leaves each stretch is then the one that the next was
entered with, all of them obey the recursion, and are exact. Products of non-negative matrices never carry
two messages further apart in Hilbert's metric (the largest difference of log-ratios), in which agreement is measured:
errors of joints add up at most.

Where a chain does not forget so soon, a stretch turns the state before it into that at its end by a transfer matrix,
the product of :math:`A_t(i, j) = P(i, j) U_t(j)`. Products of two stretches, of four, and so on up to all of them tell,
on the way back down, the filtered probabilities before each stretch and the backward messages after it (Blelloch 1990;
Särkkä and García-Fernández 2021).

Either way, all that is done step by step is as many steps as a stretch has. Arrays are numpy's, whose calls cost less.

What the chain says of a block of sequences: probabilities of states, of pairs of states, and the likelihood.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.likelihood.chain_layout import Block, Chain, Stretches
from otpdag.likelihood.chain_potentials import Linear


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


Array: TypeAlias = NDArray[np.float64]

SMALLEST_SUM = 1e-140
"""A sum of probabilities below which digits may have been lost since it was one."""

AGREED = 1e-12
"""A relative difference between two messages at a joint that is rounding."""

HALFWAY_AGREED = AGREED**0.5
"""Where a stretch leaves a difference of less, twice as many steps leave none."""

FEW_STATES = 12
"""Products of matrices cost their cube: with more states, sequences that do not forget are taken step by step."""


@dataclass(frozen=True, eq=False)
class Smoothed:
    """What a pass forward and one backward say of stretches (places, replicas, states, stretches).

    Attributes:
        before: Filtered probabilities before each step, up to a factor.
        state: Probabilities of states; meaningless where a place is empty.
        later: What steps say from each one on, given its state: with ``before`` and the matrix the probabilities of
            pairs; zero where a step has none before it.
        scale: Normalisers (N, R, B), whose logarithms add up to the likelihood.
    """

    before: Array
    state: Array
    later: Array
    scale: Array


def smoothed(emission: Array, matrix: Array, stretches: Stretches, every: int, *, products: bool) -> Smoothed | None:
    """Run forward and backward over ``emission`` (L, R, S, B), the same ``matrix`` (R, S, S) before every step.

    Messages are normalised at ``every`` so many steps. Joints are guessed, or known from ``products`` of transfer
    matrices. None where guesses do not agree, or a message has become too small. Emissions are overwritten: fresh
    memory is what a pass would cost most.
    """
    with np.errstate(all="ignore"):
        passes = _Passes(emission, matrix, stretches, every)
        levels = passes.products() if products else None
        messages = passes.forward(levels)
        behind = None if messages is None else passes.backward(messages[-1], levels)
        if messages is None or behind is None:
            return None
        beta, later = behind
        for at, which in stretches.begins:
            later[: at + 1, :, :, which] = 0.0
        state = np.multiply(messages[1:], beta, out=beta)
        scale = np.where(stretches.inside[passes.normalised, None], passes.scale[:, :, 0], 1.0)
        fine = bool((scale > SMALLEST_SUM).all()) and bool(np.isfinite(scale).all()) and bool(np.isfinite(state).all())
    return Smoothed(messages[:-1], state, later, scale) if fine else None


class _Passes:
    """Both directions over all stretches, and how stretches are joined."""

    def __init__(self, emission: Array, matrix: Array, stretches: Stretches, every: int) -> None:
        self.emission, self.stretches = emission, stretches
        self.back = np.ascontiguousarray(matrix.swapaxes(-1, -2))
        self.length, replicas, self.size, self.many = emission.shape
        # a single replica needs no stack of matrices, whose product takes twice as long
        self.is_single = replicas == 1
        self.multiply: Callable[..., Array] = np.dot if self.is_single else np.matmul
        self.matrices = (matrix[0], self.back[0]) if self.is_single else (matrix, self.back)
        self.emission_at = self._places(emission)
        places = np.arange(self.length)
        self.normalised = np.flatnonzero((places % every == every - 1) | (places == self.length - 1))
        self.scale = np.ones((len(self.normalised), replicas, 1, self.many))
        self.scale_at: list[Array | None] = [None] * self.length
        for place, scale in zip(self.normalised, self._places(self.scale), strict=True):
            self.scale_at[place] = scale
        self.begins = dict(stretches.begins)
        self.firsts = np.concatenate([which for _, which in stretches.begins])
        self.tries = 1
        """Stretches that it took the filtered probabilities to forget what came before."""

    def _places(self, values: Array) -> list[Array]:
        """What stands at each place (R, S, B), or (S, B) of a single replica: looked up once for all passes."""
        return list(values[:, 0] if self.is_single else values)

    def _scratch(self, places: int) -> tuple[Array, list[Array]]:
        """Room for messages that nobody reads again: two take turns, which stay at hand."""
        pair = np.empty((2, *self.emission.shape[1:]))
        turns = self._places(pair)
        return pair, [turns[place % 2] for place in range(places)]

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, levels: list[Array] | None) -> Array | None:
        """Filtered probabilities before each step and after the last (L + 1, R, S, B), up to factors."""
        messages = np.empty((self.length + 1, *self.emission.shape[1:]))
        at = self._places(messages)
        if levels is not None:
            messages[0] = _before(levels)[..., : self.many]
            self._run_forward(at)
            return messages
        guessed, turns = self._scratch(self.length + 1)
        guessed[0] = 1 / self.size
        self._run_forward(turns)
        leaving = guessed[self.length % 2]
        for self.tries in (1, 2):
            entry = messages[0] = self._entering(leaving)
            self._run_forward(at)
            leaving = messages[-1]
            gap = _gap(self._entering(leaving), entry)
            if gap <= AGREED:
                return messages
            if not gap <= HALFWAY_AGREED:
                break
        return None

    def _run_forward(self, messages: list[Array]) -> None:
        """From ``messages[0]`` on."""
        multiply, back = self.multiply, self.matrices[1]
        before = messages[0]
        for place, (moved, emission, scale) in enumerate(
            zip(messages[1:], self.emission_at, self.scale_at, strict=True)
        ):
            multiply(back, before, out=moved)
            if place in self.begins:  # sequences begin here: their first step's potentials say all
                moved[..., self.begins[place]] = 1.0
            np.multiply(moved, emission, out=moved)
            if scale is not None:
                np.add.reduce(moved, axis=-2, keepdims=True, out=scale)
                np.divide(moved, scale, out=moved)
            before = moved

    def _entering(self, leaving: Array) -> Array:
        """What enters each stretch: what leaves the one before it."""
        entry = np.empty_like(leaving)
        entry[..., 1:] = leaving[..., :-1]
        entry[..., self.firsts] = 1 / self.size
        return entry

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, last: Array, levels: list[Array] | None) -> tuple[Array, Array] | None:
        """Backward messages after each step, and those before it without the matrix (L, R, S, B)."""
        beta = np.empty_like(self.emission)
        after = self._places(beta)
        if levels is not None:
            beta[-1] = self._normalised(_after(levels)[..., : self.many], last)
            self._run_backward(after, self.emission_at)
            return beta, self.emission
        exits = np.ones_like(beta[-1])
        guessed, turns = self._scratch(self.length)
        _, unread = self._scratch(self.length)
        for _ in range(self.tries):
            guessed[(self.length - 1) % 2] = exits
            exits = self._leaving(self._run_backward(turns, unread), last)
        beta[-1] = exits
        message = self._run_backward(after, self.emission_at)
        return (beta, self.emission) if _gap(self._leaving(message, last), exits) <= AGREED else None

    def _run_backward(self, beta: list[Array], later: list[Array]) -> Array:
        """From ``beta[-1]`` back, with what steps say put into ``later``; what comes out before the first place."""
        message = np.empty_like(self.emission[0])
        multiply, matrix = self.multiply, self.matrices[0]
        behind = [self._places(message[None])[0], *beta[:-1]]
        for place in range(self.length - 1, -1, -1):
            ahead, scale = later[place], self.scale_at[place]
            np.multiply(self.emission_at[place], beta[place], out=ahead)
            if scale is not None:
                np.divide(ahead, scale, out=ahead)
            multiply(matrix, ahead, out=behind[place])
        return message

    def _leaving(self, message: Array, last: Array) -> Array:
        """What comes after each stretch: what the next one says, and nothing after the last of a sequence."""
        exits = np.empty_like(message)
        exits[..., :-1] = message[..., 1:]
        exits[..., self.stretches.ends] = 1.0
        return self._normalised(exits, last)

    def _normalised(self, exits: Array, last: Array) -> Array:
        """Backward messages that meet filtered probabilities with probability one."""
        return exits / (exits * last).sum(1, keepdims=True)

    # -- transfer matrices --------------------------------------------------------------------------------------------

    def products(self) -> list[Array]:
        """Transfer matrices of stretches, of two, of four, and so on, of all: (R, N, S, S).

        A sequence's first stretch forgets all before it, so that sequences may follow one another.
        """
        return _products(np.moveaxis(self._transfers(), -1, 1))

    def _transfers(self) -> Array:
        """From the state before each stretch to that at its end: (R, S before, S end, B), each up to a factor."""
        _, replicas, size, many = self.emission.shape
        message = np.tile(np.eye(size)[None, :, :, None], (replicas, 1, 1, many))
        for place in range(self.length):
            moved = np.matmul(self.back[:, None], message)
            if place in self.begins:
                moved[..., self.begins[place]] = 1.0
            moved *= self.emission[place][:, None]
            message = moved / moved.max((1, 2), keepdims=True) if self.scale_at[place] is not None else moved
        return message


def _gap(left: Array, used: Array) -> float:
    """How far messages are apart at joints, relative to each of their entries."""
    return float((np.abs(left - used) / np.maximum(used, np.finfo(float).tiny)).max())


def _products(matrices: Array) -> list[Array]:
    """The matrices (R, N, S, S), products of two, of four, and so on; each scaled by its largest entry."""
    levels = [matrices]
    while levels[-1].shape[1] > 1:
        last = levels[-1]
        if last.shape[1] % 2:
            one = np.broadcast_to(np.eye(last.shape[-1]), last[:, :1].shape)
            last = levels[-1] = np.concatenate([last, one], 1)
        product = last[:, 0::2] @ last[:, 1::2]
        levels.append(product / product.max((-1, -2), keepdims=True))
    return levels


def _before(levels: list[Array]) -> Array:
    """Probabilities of the state before each matrix (R, S, N)."""
    replicas, _, size, _ = levels[0].shape
    values = np.full((replicas, 1, size), 1 / size)
    for level in reversed(levels[:-1]):
        values = values[:, : level.shape[1] // 2]
        second = (values[:, :, None] @ level[:, 0::2])[:, :, 0]
        both = np.stack([values, second / second.sum(-1, keepdims=True)], 2)
        values = both.reshape(replicas, -1, size)
    return values.swapaxes(1, 2)


def _after(levels: list[Array]) -> Array:
    """Backward messages after each matrix (R, S, N), up to a factor."""
    replicas, _, size, _ = levels[0].shape
    values = np.ones((replicas, 1, size))
    for level in reversed(levels[:-1]):
        values = values[:, : level.shape[1] // 2]
        first = (level[:, 1::2] @ values[..., None])[..., 0]
        both = np.stack([first / first.max(-1, keepdims=True), values], 2)
        values = both.reshape(replicas, -1, size)
    return values.swapaxes(1, 2)


def marginals_by_stretches(block: Block, potential: Linear, weight: Tensor | None = None) -> Marginals | None:
    """Marginals of a block whose pair potentials are the same at every step but the first.

    None where a product has lost a state that the data later ask for.
    """
    stretches, matrix = block.in_stretches, np.ascontiguousarray(potential.pair[:, -1].numpy())
    unary, passed = potential.unary.numpy(), None
    for products in (False, True) if unary.shape[1] <= FEW_STATES else (False,):
        passed = passed or smoothed(_placed(unary, block), matrix, stretches, 1, products=products)
    if passed is None:
        return None
    shape = (*potential.unary.shape[:2], -1)
    state = np.moveaxis(passed.state, 0, 2).reshape(shape)[:, :, stretches.place]
    log_scale = np.log(np.moveaxis(passed.scale, 0, 1).reshape(len(state), -1)[:, stretches.place])
    later = passed.later if weight is None else passed.later * weight.numpy()[:, None, stretches.owners]
    pair = torch.zeros_like(potential.pair)
    pair[:, -1] = torch.from_numpy(np.matmul(passed.before, later.swapaxes(-1, -2)).sum(0) * matrix)
    return Marginals(torch.from_numpy(state), torch.from_numpy(log_scale) + potential.log_unit[:, block.kinds], pair)


def _placed(unary: Array, block: Block) -> Array:
    """The potentials (R, S, U) of every place (L, R, S, B), one where it is empty."""
    stretches, unary = block.in_stretches, np.ascontiguousarray(unary)
    kinds = block.kinds.numpy()[stretches.columns]
    placed = np.empty((len(kinds), *unary.shape[:2], kinds.shape[1]))
    for here, kind in zip(placed, kinds, strict=True):
        np.take(unary, kind, axis=2, out=here, mode="clip")
    for at, which in stretches.begins:
        placed[:at, :, :, which] = 1.0
    return placed


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
