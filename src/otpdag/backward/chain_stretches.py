r"""Forward-backward for few or long sequences: short stretches of all run side by side and are joined by products.

A stretch turns the state before it into that at its end by a transfer matrix, the product of :math:`A_t(i, j) = P(i, j)
U_t(j)`. Products of two stretches, of four, and so on up to the whole sequence tell, on the way back down, the filtered
probabilities before each stretch and the backward messages after it (Blelloch 1990; Särkkä and García-Fernández 2021).
So all that is done step by step is as many steps as a stretch has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Block
from otpdag.backward.chain_potentials import Linear
from otpdag.backward.chain_recursion import Marginals

__all__ = ["marginals_by_stretches"]

SMALLEST = 1e-280
"""A sum of probabilities below which digits are lost in products of many matrices."""


def marginals_by_stretches(block: Block, potential: Linear, weight: Tensor | None = None) -> Marginals | None:
    """Marginals of a block whose pair potentials are the same at every step but the first.

    None where a product has lost a state that the data later ask for.
    """
    columns, inside, place = block.in_stretches
    many, replicas, size = block.sizes[0], *potential.unary.shape[:2]
    kinds = block.kinds[columns]
    emission = potential.unary.index_select(2, kinds.flatten()).unflatten(2, kinds.shape)  # (R, S, L, B)
    matrix = potential.pair[:, -1]
    begins = slice(0, None, columns.shape[1] // many)  # the first stretch of each sequence
    transfer = _transfers(emission, matrix, inside, begins).unflatten(-1, (many, -1)).permute(0, 3, 4, 1, 2)
    levels = _products(transfer)
    count = transfer.shape[2]
    entry = _before(levels, emission.new_full((replicas, many, size), 1 / size))[:, :, :count]
    exits = _after(levels, emission.new_ones(replicas, many, size))[:, :, :count]
    entry, exits = (one.flatten(1, 2).transpose(1, 2) for one in (entry, exits))  # (R, S, B)
    alpha, scale = _forward(emission, matrix, inside, begins, entry)
    beta = _backward(emission, matrix, inside, scale, exits)
    state = alpha * beta
    total = state.sum(1, keepdim=True)
    if not bool((total > SMALLEST).all()) or not bool(torch.isfinite(total).all()):
        return None
    by_column = (state / total).flatten(2).index_select(2, place)
    log_scale = scale.flatten(1).index_select(1, place).log()
    pair = torch.zeros_like(potential.pair)
    before = torch.cat([entry.unsqueeze(2), alpha[:, :, :-1]], 2)
    pair[:, -1] = _pairs(before, emission * beta, matrix, _shares(inside, begins, many, weight))
    return Marginals(by_column, log_scale + potential.log_unit[:, block.kinds], pair)


def _transfers(emission: Tensor, matrix: Tensor, inside: Tensor, begins: slice) -> Tensor:
    """From the state before each stretch to that at its end: (R, S before, S end, B), each up to a factor."""
    replicas, size, length, many = emission.shape
    back = matrix.mT.unsqueeze(1)
    message = torch.eye(size).to(emission).reshape(1, size, size, 1).repeat(replicas, 1, 1, many)
    for step in range(length):
        moved = back @ message
        if step == 0:
            moved[..., begins] = 1.0  # a sequence begins here: its first step's potentials say all
        moved *= emission[:, None, :, step]
        message = moved if bool(inside[step].all()) else torch.where(inside[step], moved, message)
        if step % 4 == 3:
            message = message / message.amax((1, 2), keepdim=True)
    return message


def _forward(emission: Tensor, matrix: Tensor, inside: Tensor, begins: slice, entry: Tensor) -> tuple[Tensor, Tensor]:
    """Filtered probabilities (R, S, L, B) and normalisers (R, L, B)."""
    alpha, scale, back = torch.empty_like(emission), torch.ones_like(emission[:, 0]), matrix.mT
    last = entry
    for step in range(emission.shape[2]):
        moved = back @ last
        if step == 0:
            moved[..., begins] = 1.0
        moved *= emission[:, :, step]
        total = moved.sum(1)
        moved /= total.unsqueeze(1)
        last = moved if bool(inside[step].all()) else torch.where(inside[step], moved, last)
        alpha[:, :, step], scale[:, step] = last, total
    return alpha, scale


def _backward(emission: Tensor, matrix: Tensor, inside: Tensor, scale: Tensor, exits: Tensor) -> Tensor:
    """Backward messages (R, S, L, B), each up to a factor."""
    beta, last = torch.empty_like(emission), exits
    for step in range(emission.shape[2] - 1, -1, -1):
        beta[:, :, step] = last
        before = matrix @ (emission[:, :, step] * last / scale[:, None, step])
        last = before if bool(inside[step].all()) else torch.where(inside[step], before, last)
    return beta


def _shares(inside: Tensor, begins: slice, many: int, weight: Tensor | None) -> Tensor:
    """By how much each step's pair of states counts (R or 1, L, B): not the first of a sequence, which has no pair."""
    counted = inside.clone()
    counted[0, begins] = False
    share = counted.to(torch.float64).unsqueeze(0)
    return share if weight is None else share * weight.repeat_interleave(inside.shape[1] // many, 1).unsqueeze(1)


def _pairs(before: Tensor, later: Tensor, matrix: Tensor, share: Tensor) -> Tensor:
    """Sums of the probabilities of pairs of states (R, S, S)."""
    before, later, share = before.flatten(2), later.flatten(2), share.flatten(1)
    meet = (before * (matrix @ later)).sum(1)
    later = later * torch.where(share > 0, share / meet, 0.0).unsqueeze(1)
    return (before @ later.mT) * matrix


def _products(matrices: Tensor) -> list[Tensor]:
    """The matrices (..., N, S, S), products of two, of four, and so on; each scaled by its largest entry."""
    levels = [matrices]
    while levels[-1].shape[-3] > 1:
        last = levels[-1]
        if last.shape[-3] % 2:
            last = torch.cat([last, torch.eye(last.shape[-1]).to(last).expand_as(last[..., :1, :, :])], -3)
            levels[-1] = last
        product = last[..., 0::2, :, :] @ last[..., 1::2, :, :]
        levels.append(product / product.amax((-1, -2), keepdim=True))
    return levels


def _before(levels: list[Tensor], first: Tensor) -> Tensor:
    """Probabilities of the state before each matrix (..., N, S)."""
    values = first.unsqueeze(-2)
    for level in reversed(levels[:-1]):
        values = values[..., : level.shape[-3] // 2, :]
        second = (values.unsqueeze(-2) @ level[..., 0::2, :, :]).squeeze(-2)
        values = torch.stack([values, second / second.sum(-1, keepdim=True)], -2).flatten(-3, -2)
    return values


def _after(levels: list[Tensor], last: Tensor) -> Tensor:
    """Backward messages after each matrix (..., N, S), up to a factor."""
    values = last.unsqueeze(-2)
    for level in reversed(levels[:-1]):
        values = values[..., : level.shape[-3] // 2, :]
        first = (level[..., 1::2, :, :] @ values.unsqueeze(-1)).squeeze(-1)
        values = torch.stack([first / first.amax(-1, keepdim=True), values], -2).flatten(-3, -2)
    return values
