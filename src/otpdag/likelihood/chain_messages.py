r"""Exact forward-backward over the joint states of the hidden categories, on lanes that run side by side.

Lanes are whole sequences or, where these are few and long, stretches of them, whose joints are made to agree. Filtered
probabilities forget where they began. So the message that enters a stretch is guessed by running over the stretch
before it from even probabilities; if the message that leaves each stretch is then the one that the next was entered
with, all of them obey the recursion, and are exact. Products of non-negative matrices never carry two messages further
apart in Hilbert's metric (the largest difference of log-ratios), in which agreement is measured: errors of joints add
up at most.

Where a chain does not forget so soon, a stretch turns the state before it into that at its end by a transfer matrix,
the product of :math:`A_t(i, j) = P(i, j) U_t(j)`. Products of two stretches, of four, and so on up to all of them tell,
on the way back down, the filtered probabilities before each stretch and the backward messages after it (Blelloch 1990;
Särkkä and García-Fernández 2021).

Either way, all that is done step by step is as many steps as a lane has. Arrays are numpy's, whose calls cost less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.likelihood.chain_layout import Block, Chain, Lanes
from otpdag.likelihood.chain_potentials import Linear

Array: TypeAlias = NDArray[np.float64]

SMALLEST_SUM = 1e-140
"""A sum of probabilities below which digits may have been lost since it was one."""

AGREED = 1e-12
"""A relative difference between two messages at a joint that is rounding."""


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


def marginals(block: Block, potential: Linear, chain: Chain, weight: Tensor | None = None) -> Marginals:
    """Run forward and backward over one block; pairs of states count by the ``weight`` (R or 1, n) of a sequence."""
    unary, pair = np.ascontiguousarray(potential.unary.numpy()), potential.pair.numpy()
    passed, lanes = None, block.lanes(len(unary)) if chain.is_uniform else block.whole
    while passed is None:
        kinds = block.kinds.numpy()[lanes.columns]
        moves = Moves(pair, lanes, kinds if chain.varying else None)
        passed = smoothed(partial(_placed, unary, kinds, lanes), moves, lanes)
        lanes = block.whole
    log_scale = passed.lanes.in_columns(np.log(passed.scale)) + potential.log_unit[:, block.kinds]
    return Marginals(passed.lanes.in_columns(passed.state), log_scale, torch.from_numpy(passed.pairs(weight)))


def filtered(block: Block, potential: Linear, chain: Chain) -> Array:
    """Probabilities of states given all up to each place of whole sequences (L, S, B), of the first replica."""
    lanes = block.whole
    kinds = block.kinds.numpy()[lanes.columns]
    moves = Moves(potential.pair[:1].numpy(), lanes, kinds if chain.varying else None)
    messages = _Passes(_placed(potential.unary[:1].numpy(), kinds, lanes), moves, lanes, 1).forward(None)
    if messages is None:
        raise RuntimeError("lanes of whole sequences have no joints that could disagree")
    return messages[1:, 0]


def _placed(unary: Array, kinds: NDArray[np.int64], lanes: Lanes) -> Array:
    """The potentials (R, S, U) of every place (L, R, S, B), one where it is empty."""
    placed = np.empty((len(kinds), *unary.shape[:2], kinds.shape[1]))
    for here, kind in zip(placed, kinds, strict=True):
        np.take(unary, kind, axis=2, out=here, mode="clip")
    for at, which in lanes.begins:
        placed[:at, :, :, which] = 1.0
    return placed


class Moves:
    """The pair potentials (R, rows, S, S) before each place.

    The last row is that of most places. Others are for the first steps of a sequence, by their number, or with
    ``kinds`` (L, B) each place of each lane has a row of its own.
    """

    def __init__(self, pair: Array, lanes: Lanes, kinds: NDArray[np.int64] | None = None) -> None:
        self.pair, self.lanes, self.kinds = pair, lanes, kinds
        self.matrix = np.ascontiguousarray(pair[:, -1])
        self.back = np.ascontiguousarray(self.matrix.swapaxes(-1, -2))
        self.begins = dict(lanes.begins)
        self.early: dict[int, list[tuple[NDArray[np.int64], int]]] = {}
        for at, which in lanes.begins if kinds is None else ():
            for row in range(1, min(pair.shape[1] - 1, len(lanes.inside) - at)):
                self.early.setdefault(at + row, []).append((which, row))
        # a single replica needs no stack of matrices, whose product takes twice as long
        self.is_single = len(pair) == 1
        self._multiply: Callable[..., Array] = np.dot if self.is_single else np.matmul
        self._single = (self.matrix[0], self.back[0]) if self.is_single else (self.matrix, self.back)

    def ahead(self, place: int, before: Array, out: Array) -> None:
        """States before a place (R, S, B) to states there; where sequences begin, their first step says all."""
        if self.kinds is None:
            self._multiply(self._single[1], before, out=out)
            for which, row in self.early.get(place, ()):
                out[..., which] = np.matmul(self._own(row).swapaxes(-1, -2), before[..., which])
        else:
            np.einsum("...ib,...bij->...jb", before, self._own(self.kinds[place]), out=out)
        if place in self.begins:
            out[..., self.begins[place]] = 1.0

    def behind(self, place: int, later: Array, out: Array) -> None:
        """What a place's states (R, S, B) say of those before it."""
        if self.kinds is not None:
            np.einsum("...bij,...jb->...ib", self._own(self.kinds[place]), later, out=out)
            return
        self._multiply(self._single[0], later, out=out)
        for which, row in self.early.get(place, ()):
            out[..., which] = np.matmul(self._own(row), later[..., which])

    def _own(self, rows: int | NDArray[np.int64]) -> Array:
        return self.pair[0, rows] if self.is_single else self.pair[:, rows]

    def pairs(self, before: Array, later: Array) -> Array:
        """Sums of the probabilities of pairs of states, by rows; ``later`` is overwritten."""
        total = np.zeros_like(self.pair)
        if self.kinds is not None:
            for number, kinds in enumerate(self.kinds):
                both = np.einsum("rib,rbij,rjb->rbij", before[number], self.pair[:, kinds], later[number])
                torch.from_numpy(total).index_add_(1, torch.from_numpy(kinds), torch.from_numpy(both))
            return total
        for place, early in self.early.items():
            for which, row in early:
                total[:, row] += before[place][..., which] @ later[place][..., which].swapaxes(-1, -2)
                later[place][..., which] = 0.0
        for at in range(0, len(before), 64):  # a few products are held at a time
            total[:, -1] += np.matmul(before[at : at + 64], later[at : at + 64].swapaxes(-1, -2)).sum(0)
        return total * self.pair


@dataclass(frozen=True, eq=False)
class Smoothed:
    """What a pass forward and one backward say of lanes (places, replicas, states, lanes).

    Attributes:
        lanes: The lanes.
        moves: Their pair potentials.
        before: Filtered probabilities before each step, up to a factor.
        state: Probabilities of states; meaningless where a place is empty.
        later: What steps say from each one on, given its state: with ``before`` and the matrix the probabilities of
            pairs; zero where a step has none before it.
        scale: Normalisers (N, R, B), whose logarithms add up to the likelihood.
    """

    lanes: Lanes
    moves: Moves
    before: Array
    state: Array
    later: Array
    scale: Array

    def pairs(self, weight: Tensor | None) -> Array:
        """Sums of the probabilities of pairs of states, by the weights (R or 1, n) of their sequences."""
        if weight is not None:
            np.multiply(self.later, weight.numpy()[:, None, self.lanes.owners], out=self.later)
        return self.moves.pairs(self.before, self.later)


def smoothed(
    emission: Callable[[], Array], moves: Moves, lanes: Lanes, every: int = 1, few_states: int = 12
) -> Smoothed | None:
    """Run forward and backward over what ``emission`` makes (L, R, S, B).

    Messages are normalised at ``every`` so many steps. Joints of stretches are guessed, or known from products of
    transfer matrices, which cost their cube: with more than ``few_states`` none are made. None where neither agrees, or
    a message has become too small. Emissions are overwritten: fresh memory is what a pass would cost most.
    """
    passed = None
    for products in (False, True) if lanes.are_cut and moves.pair.shape[-1] <= few_states else (False,):
        with np.errstate(all="ignore"):
            passed = passed or _both_ways(_Passes(emission(), moves, lanes, every), products=products)
    return passed


def _both_ways(passes: _Passes, *, products: bool) -> Smoothed | None:
    lanes, levels = passes.lanes, passes.products() if products else None
    messages = passes.forward(levels)
    behind = None if messages is None else passes.backward(messages[-1], levels)
    if messages is None or behind is None:
        return None
    beta, later = behind
    for at, which in lanes.begins:
        later[: at + 1, :, :, which] = 0.0
    state = np.multiply(messages[1:], beta, out=beta)
    scale = np.where(lanes.inside[passes.normalised, None], passes.scale[:, :, 0], 1.0)
    if lanes.are_cut or len(scale) < len(state):
        fine = (scale > SMALLEST_SUM).all() and np.isfinite(scale).all() and np.isfinite(state).all()
        if not fine:
            return None
    return Smoothed(lanes, passes.moves, messages[:-1], state, later, scale)


class _Passes:
    """Both directions over all lanes, and how stretches are joined."""

    def __init__(self, emission: Array, moves: Moves, lanes: Lanes, every: int) -> None:
        self.emission, self.moves, self.lanes = emission, moves, lanes
        self.length, replicas, self.size, self.many = emission.shape
        self.emission_at = self._places(emission)
        places = np.arange(self.length)
        self.normalised = np.flatnonzero((places % every == every - 1) | (places == self.length - 1))
        self.scale = np.ones((len(self.normalised), replicas, 1, self.many))
        self.scale_at: list[Array | None] = [None] * self.length
        for place, scale in zip(self.normalised, self._places(self.scale), strict=True):
            self.scale_at[place] = scale
        self.firsts = np.concatenate([which for _, which in lanes.begins])
        self.tries = 1
        """Stretches that it took the filtered probabilities to forget what came before."""

    def _places(self, values: Array) -> list[Array]:
        """What stands at each place (R, S, B), or (S, B) of a single replica: looked up once for all passes."""
        return list(values[:, 0] if self.moves.is_single else values)

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
        if levels is not None or not self.lanes.are_cut:
            messages[0] = 1 / self.size if levels is None else _before(levels)[..., : self.many]
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
            if not gap <= AGREED**0.5:  # else twice as many steps leave no difference
                break
        return None

    def _run_forward(self, messages: list[Array]) -> None:
        """From ``messages[0]`` on."""
        before = messages[0]
        for place, (moved, emission, scale) in enumerate(
            zip(messages[1:], self.emission_at, self.scale_at, strict=True)
        ):
            self.moves.ahead(place, before, moved)
            np.multiply(moved, emission, out=moved)
            if scale is not None:
                np.add.reduce(moved, axis=-2, keepdims=True, out=scale)
                np.divide(moved, scale, out=moved)
            before = moved

    def _entering(self, leaving: Array) -> Array:
        """What enters each lane: what leaves the one before it."""
        entry = np.empty_like(leaving)
        entry[..., 1:] = leaving[..., :-1]
        entry[..., self.firsts] = 1 / self.size
        return entry

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, last: Array, levels: list[Array] | None) -> tuple[Array, Array] | None:
        """Backward messages after each step, and those before it without the matrix (L, R, S, B)."""
        beta = np.empty_like(self.emission)
        after = self._places(beta)
        is_guessed = levels is None and self.lanes.are_cut
        exits = np.ones_like(beta[-1])
        if is_guessed:
            guessed, turns = self._scratch(self.length)
            _, unread = self._scratch(self.length)
            for _ in range(self.tries):
                guessed[(self.length - 1) % 2] = exits
                exits = self._leaving(self._run_backward(turns, unread), last)
        else:
            exits = _normalised(exits if levels is None else _after(levels)[..., : self.many], last)
        beta[-1] = exits
        message = self._run_backward(after, self.emission_at)
        agreed = not is_guessed or _gap(self._leaving(message, last), exits) <= AGREED
        return (beta, self.emission) if agreed else None

    def _run_backward(self, beta: list[Array], later: list[Array]) -> Array:
        """From ``beta[-1]`` back, with what steps say put into ``later``; what comes out before the first place."""
        message = np.empty_like(self.emission[0])
        behind = [self._places(message[None])[0], *beta[:-1]]
        for place in range(self.length - 1, -1, -1):
            ahead, scale = later[place], self.scale_at[place]
            np.multiply(self.emission_at[place], beta[place], out=ahead)
            if scale is not None:
                np.divide(ahead, scale, out=ahead)
            self.moves.behind(place, ahead, behind[place])
        return message

    def _leaving(self, message: Array, last: Array) -> Array:
        """What comes after each lane: what the next one says, and nothing after the last of a sequence."""
        exits = np.empty_like(message)
        exits[..., :-1] = message[..., 1:]
        exits[..., self.lanes.ends] = 1.0
        return _normalised(exits, last)

    # -- transfer matrices --------------------------------------------------------------------------------------------

    def products(self) -> list[Array]:
        """Transfer matrices of stretches, of two, of four, and so on, of all: (R, N, S, S), each up to a factor.

        A sequence's first stretch forgets all before it, so that sequences may follow one another.
        """
        _, replicas, size, many = self.emission.shape
        message = np.tile(np.eye(size)[None, :, :, None], (replicas, 1, 1, many))
        for place in range(self.length):
            moved = np.matmul(self.moves.back[:, None], message)
            if place in self.moves.begins:
                moved[..., self.moves.begins[place]] = 1.0
            moved *= self.emission[place][:, None]
            message = moved / moved.max((1, 2), keepdims=True) if self.scale_at[place] is not None else moved
        return _products(np.moveaxis(message, -1, 1))


def _normalised(exits: Array, last: Array) -> Array:
    """Backward messages that meet filtered probabilities with probability one."""
    return exits / (exits * last).sum(1, keepdims=True)


def _gap(left: Array, used: Array) -> float:
    """How far messages are apart at joints, relative to each of their entries."""
    return float((np.abs(left - used) / np.maximum(used, np.finfo(float).tiny)).max())


def _products(matrices: Array) -> list[Array]:
    """The matrices (R, N, S, S), filled up to a power of two by identities, products of two, of four, and so on.

    Each is scaled by its largest entry.
    """
    replicas, many, size, _ = matrices.shape
    rest = 2 ** (many - 1).bit_length() - many
    levels = [np.concatenate([matrices, np.broadcast_to(np.eye(size), (replicas, rest, size, size))], 1)]
    while levels[-1].shape[1] > 1:
        product = levels[-1][:, 0::2] @ levels[-1][:, 1::2]
        levels.append(product / product.max((-1, -2), keepdims=True))
    return levels


def _before(levels: list[Array]) -> Array:
    """Probabilities of the state before each matrix (R, S, N)."""
    replicas, _, size, _ = levels[0].shape
    values = np.full((replicas, 1, size), 1 / size)
    for level in reversed(levels[:-1]):
        second = (values[:, :, None] @ level[:, 0::2])[:, :, 0]
        both = np.stack([values, second / second.sum(-1, keepdims=True)], 2)
        values = both.reshape(replicas, -1, size)
    return values.swapaxes(1, 2)


def _after(levels: list[Array]) -> Array:
    """Backward messages after each matrix (R, S, N), up to a factor: from the end they run as others from the start."""
    return _before([level[:, ::-1].swapaxes(-1, -2) for level in levels])[..., ::-1]
