r"""Exact forward-backward over the joint states of the hidden categories, on lanes that run side by side.

Lanes are whole sequences or, where these are few and long, stretches of them. A stretch turns the state before it into
that at its end by a transfer matrix, the product of :math:`A_t(i, j) = P(i, j) U_t(j)`. Products of two stretches, of
four, and so on up to all of them tell, on the way back down, the filtered probabilities before each stretch and the
backward messages after it (Blelloch 1990; Särkkä and García-Fernández 2021).

All that is done step by step is as many steps as a lane has. Arrays are numpy's, whose calls cost less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from otpdag.likelihood.chain_layout import Block, Chain, Lanes, Linear
from otpdag.numerics import Array, Ints

SMALLEST_SUM = 1e-140  # a sum of probabilities below which digits may have been lost since it was one


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
    passed, lanes = None, block.lanes(*potential.unary.shape[:2]) if chain.is_uniform else block.whole
    while passed is None:
        passed = smoothed(*_placed(block, potential, chain, lanes), lanes)
        lanes = block.whole
    log_scale = passed.lanes.in_columns(np.log(passed.scale)) + potential.log_unit[:, block.kinds]
    return Marginals(passed.lanes.in_columns(passed.state), log_scale, torch.from_numpy(passed.pairs(weight)))


def filtered(block: Block, potential: Linear, chain: Chain) -> Array:
    """Probabilities of states given all up to each place of whole sequences (L, R, S, B)."""
    return _Passes(*_placed(block, potential, chain, block.whole), block.whole, 1).forward(None)[1:]


def _placed(block: Block, potential: Linear, chain: Chain, lanes: Lanes) -> tuple[Array, Moves]:
    """The potentials of every place (L, R, S, B), one where it is empty, and of pairs of states before it."""
    unary, kinds = np.ascontiguousarray(potential.unary.numpy()), block.kinds.numpy()[lanes.columns]
    placed = np.empty((len(kinds), *unary.shape[:2], kinds.shape[1]))
    for here, kind in zip(placed, kinds, strict=True):
        np.take(unary, kind, axis=2, out=here, mode="clip")
    for at, which in lanes.begins:
        placed[:at, :, :, which] = 1.0
    return placed, Moves(potential.pair.numpy(), lanes, None if chain.is_uniform else chain.pair_rows.numpy()[kinds])


class Moves:
    """The pair potentials (R, rows, S, S) before each place.

    The last row is that of most places, and of all where ``rows`` (L, B) are left out.
    """

    def __init__(self, pair: Array, lanes: Lanes, rows: Ints | None = None) -> None:
        self.pair, self.begins = pair, dict(lanes.begins)
        self.matrix = np.ascontiguousarray(pair[:, -1])
        self.back = np.ascontiguousarray(self.matrix.swapaxes(-1, -2))
        self.others: dict[int, tuple[Ints, Ints]] = {}
        for place, own in enumerate(() if rows is None else rows):
            which = np.flatnonzero(own != pair.shape[1] - 1)
            if len(which):
                self.others[place] = which, own[which]

    def ahead(self, place: int, before: Array, out: Array) -> None:
        """States before a place (R, S, B) to states there; where sequences begin, their first step says all."""
        np.matmul(self.back, before, out=out)
        if place in self.others:
            which, rows = self.others[place]
            out[..., which] = np.einsum("rib,rbij->rjb", before[..., which], self.pair[:, rows])
        if place in self.begins:
            out[..., self.begins[place]] = 1.0

    def behind(self, place: int, later: Array, out: Array) -> None:
        """What a place's states (R, S, B) say of those before it."""
        np.matmul(self.matrix, later, out=out)
        if place in self.others:
            which, rows = self.others[place]
            out[..., which] = np.einsum("rbij,rjb->rib", self.pair[:, rows], later[..., which])

    def pairs(self, before: Array, later: Array) -> Array:
        """Sums of the probabilities of pairs of states, by rows; ``later`` is overwritten."""
        total = np.zeros_like(self.pair)
        for place, (which, rows) in self.others.items():
            both = np.einsum("rib,rjb->rbij", before[place][..., which], later[place][..., which])
            torch.from_numpy(total).index_add_(1, torch.from_numpy(rows), torch.from_numpy(both))
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


def smoothed(emission: Array, moves: Moves, lanes: Lanes, every: int = 1) -> Smoothed | None:
    """Run forward and backward over emissions (L, R, S, B), messages normalised at ``every`` so many steps.

    None where a message has become too small. Emissions are overwritten: fresh memory is what a pass would cost most.
    """
    with np.errstate(all="ignore"):
        passes = _Passes(emission, moves, lanes, every)
        entering, leaving = passes.joints() if lanes.are_cut else (None, None)
        messages = passes.forward(entering)
        beta = passes.backward(messages[-1], leaving)
        for at, which in lanes.begins:
            emission[: at + 1, :, :, which] = 0.0
        state = np.multiply(messages[1:], beta, out=beta)
        scale = np.where(lanes.inside[passes.normalised, None], passes.scale[:, :, 0], 1.0)
    if lanes.are_cut or len(scale) < len(state):
        fine = (scale > SMALLEST_SUM).all() and np.isfinite(scale).all() and np.isfinite(state).all()
        if not fine:
            return None
    return Smoothed(lanes, moves, messages[:-1], state, emission, scale)


class _Passes:
    """Both directions over all lanes, and what stands between stretches."""

    def __init__(self, emission: Array, moves: Moves, lanes: Lanes, every: int) -> None:
        self.emission, self.moves, self.lanes = emission, moves, lanes
        self.length, replicas, self.size, many = emission.shape
        places = np.arange(self.length)
        self.normalised = np.flatnonzero((places % every == every - 1) | (places == self.length - 1))
        self.scale = np.ones((len(self.normalised), replicas, 1, many))
        self.scale_at: list[Array | None] = [None] * self.length
        for place, scale in zip(self.normalised, self.scale, strict=True):
            self.scale_at[place] = scale

    def forward(self, entering: Array | None) -> Array:
        """Filtered probabilities before each step and after the last (L + 1, R, S, B), up to factors.

        What enters lanes (R, S, B) is of no matter where these are whole sequences.
        """
        messages = np.empty((self.length + 1, *self.emission.shape[1:]))
        messages[0] = 1 / self.size if entering is None else entering
        before, *after = messages
        for place, (moved, emission, scale) in enumerate(zip(after, self.emission, self.scale_at, strict=True)):
            self.moves.ahead(place, before, moved)
            np.multiply(moved, emission, out=moved)
            if scale is not None:
                np.add.reduce(moved, axis=-2, keepdims=True, out=scale)
                np.divide(moved, scale, out=moved)
            before = moved
        return messages

    def backward(self, last: Array, leaving: Array | None) -> Array:
        """Backward messages after each step (L, R, S, B), those after lanes up to a factor.

        What steps say from each one on, given its state, takes the place of emissions.
        """
        beta = np.empty_like(self.emission)
        beta[-1] = 1.0 if leaving is None else leaving
        beta[-1] /= (beta[-1] * last).sum(1, keepdims=True)  # they meet filtered probabilities with probability one
        for place in range(self.length - 1, -1, -1):
            ahead, scale = self.emission[place], self.scale_at[place]
            np.multiply(ahead, beta[place], out=ahead)
            if scale is not None:
                np.divide(ahead, scale, out=ahead)
            if place:
                self.moves.behind(place, ahead, beta[place - 1])
        return beta

    def joints(self) -> tuple[Array, Array]:
        """Filtered probabilities before each stretch, and backward messages after it (R, S, B).

        A sequence's first stretch forgets all before it, so that sequences may follow one another.
        """
        levels = _products(self._transfers())
        entering, leaving = (_around(levels, after=after)[..., : self.emission.shape[-1]] for after in (False, True))
        return entering / entering.sum(1, keepdims=True), leaving

    def _transfers(self) -> Array:
        """What each stretch turns the state before it into, (R, B, S, S) up to factors; its rows run side by side."""
        _, replicas, size, many = self.emission.shape
        message, moved = (np.empty((replicas, size, size, many)) for _ in range(2))
        rows, moved_rows = (one.reshape(replicas, size, -1) for one in (message, moved))
        moved[:] = self.moves.back[..., None]
        for place, emission in enumerate(self.emission[:, :, :, None]):
            if place:
                np.matmul(self.moves.back, rows, out=moved_rows)
            if place in self.moves.begins:
                moved[..., self.moves.begins[place]] = 1.0
            np.multiply(moved, emission, out=message)
            if self.scale_at[place] is not None:
                np.divide(message, message.max((1, 2), keepdims=True), out=message)
        return np.ascontiguousarray(np.moveaxis(message, (1, 2, 3), (3, 2, 1)))


def _products(matrices: Array) -> list[Array]:
    """The matrices (R, N, S, S), products of two, of four, and so on to the last two, each over the sum of its entries.

    An identity is put behind where their number is odd.
    """
    replicas, _, size, _ = matrices.shape
    levels = [_even(matrices)]
    while levels[-1].shape[1] > 2:
        product = levels[-1][:, 0::2] @ levels[-1][:, 1::2]
        product /= (product.reshape(replicas, -1, size**2) @ np.ones(size**2))[..., None, None]
        levels.append(_even(product))
    return levels


def _even(matrices: Array) -> Array:
    """Matrices (R, N, S, S) in even number."""
    if matrices.shape[1] % 2 == 0:
        return matrices
    last = np.broadcast_to(np.eye(matrices.shape[-1]), matrices[:, :1].shape)
    return np.concatenate([matrices, last], 1)


def _around(levels: list[Array], *, after: bool) -> Array:
    """Up to factors, probabilities of the state before each matrix (R, S, N), or what those behind it say of it.

    They are what is known around a pair; the other matrix of the pair tells what is known around one of the two.
    """
    replicas, _, size, _ = levels[0].shape
    values = np.full((replicas, 1, 1, size), 1 / size)
    for level in reversed(levels):
        values, both = values[:, : level.shape[1] // 2], np.empty((replicas, level.shape[1] // 2, 2, size))
        both[:, :, int(after)] = values[:, :, 0]
        other = level[:, 1::2].swapaxes(-1, -2) if after else level[:, 0::2]
        np.matmul(values, other, out=both[:, :, 1 - after : 2 - after])
        values = both.reshape(replicas, -1, 1, size)
    return np.ascontiguousarray(values[:, :, 0].swapaxes(1, 2))
