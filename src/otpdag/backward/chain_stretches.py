"""Forward-backward for few long sequences: stretches of each run side by side and are joined by transfer matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Block
from otpdag.backward.chain_potentials import Linear
from otpdag.backward.chain_recursion import Marginals

__all__ = ["marginals_by_stretches"]


def marginals_by_stretches(block: Block, potential: Linear, weight: Tensor | None = None) -> Marginals:
    """Marginals of a block whose pair potentials are the same at every step but the first."""
    parts = [_one_long(block.kinds[columns], potential) for columns in block.columns]
    state = torch.empty_like(
        potential.unary[:, :, :1].expand(-1, -1, len(block.kinds)), memory_format=torch.contiguous_format
    )
    log_scale = state.new_empty(state.shape[0], len(block.kinds))
    pair = torch.zeros_like(potential.pair)
    for number, (columns, part) in enumerate(zip(block.columns, parts, strict=True)):
        state[:, :, columns], log_scale[:, columns] = part.state, part.log_scale
        pair += part.pair if weight is None else part.pair * weight[:, number, None, None, None]
    return Marginals(state, log_scale, pair)


def _one_long(kinds: Tensor, potential: Linear) -> Marginals:
    """One sequence, cut in about sqrt(T) stretches of equal length (the last may be shorter)."""
    total = len(kinds)
    length = math.isqrt(total - 1) + 1
    many = -(-total // length)
    filled = torch.cat([kinds, kinds.new_zeros(many * length - total)]).reshape(many, length)
    emission = potential.unary[:, :, filled]  # (R, S, stretches, length)
    matrix = potential.pair[:, -1]
    used = [many if step < total - (many - 1) * length else many - 1 for step in range(length)]
    transfer, log_weight = _transfers(emission, matrix, used)
    entry = _entries(transfer, log_weight)
    # forward inside the stretches
    alpha, scale = torch.empty_like(emission), torch.ones_like(emission[:, 0])
    for step, size in enumerate(used):
        before = entry[:, :, :size] if step == 0 else alpha[:, :, :size, step - 1]
        message = torch.bmm(matrix.transpose(1, 2), before)
        if step == 0:
            message[:, :, 0] = 1.0  # the sequence begins here: its first step's potentials say all
        message *= emission[:, :, :size, step]
        scale[:, :size, step] = message.sum(1)
        alpha[:, :, :size, step] = message / scale[:, :size, step].unsqueeze(1)
    # backward inside the stretches
    ends = torch.stack([alpha[:, :, g, (length if g < many - 1 else total - g * length) - 1] for g in range(many)], -1)
    exits = _exits(transfer, log_weight, ends)
    state = torch.empty_like(emission)
    pair = torch.zeros_like(potential.pair)
    later = emission.new_zeros(*emission.shape[:2], 0)
    for step in range(length - 1, -1, -1):
        size = used[step]
        message = exits[:, :, :size].clone()
        if later.shape[2]:
            pair[:, -1] += torch.bmm(alpha[:, :, : later.shape[2], step], later.transpose(1, 2)) * matrix
            message[:, :, : later.shape[2]] = torch.bmm(matrix, later)
        state[:, :, :size, step] = alpha[:, :, :size, step] * message
        later = emission[:, :, :size, step] * message / scale[:, :size, step].unsqueeze(1)
    pair[:, -1] += torch.bmm(ends[:, :, :-1], later[:, :, 1:].transpose(1, 2)) * matrix
    log_scale = torch.log(scale).flatten(1)[:, :total] + potential.log_unit[:, kinds]
    return Marginals(state.flatten(2)[:, :, :total], log_scale, pair)


def _transfers(emission: Tensor, matrix: Tensor, used: Sequence[int]) -> tuple[Tensor, Tensor]:
    """How a stretch turns the state before it into that at its end: (R, S end, stretches, S before), with log-weights.

    Normalised for each state before; the first stretch has none before, and all its columns agree.
    """
    replicas, size, many, _ = emission.shape
    message = torch.eye(size, dtype=emission.dtype).reshape(1, size, 1, size).repeat(replicas, 1, many, 1)
    log_weight = emission.new_zeros(replicas, many, size)
    for step, count in enumerate(used):
        moved = torch.bmm(matrix.transpose(1, 2), message[:, :, :count].flatten(2)).unflatten(2, (count, size))
        if step == 0:
            moved[:, :, 0] = 1.0
        moved = moved * emission[:, :, :count, step].unsqueeze(-1)
        total = moved.sum(1).clamp(min=1e-300)
        message[:, :, :count] = moved / total.unsqueeze(1)
        log_weight[:, :count] += torch.log(total)
    return message, log_weight


def _entries(transfer: Tensor, log_weight: Tensor) -> Tensor:
    """Filtered probabilities of the state before each stretch (R, S, stretches); the first column is unused."""
    replicas, size, many, _ = transfer.shape
    entry = transfer.new_full((replicas, size, many), 1.0 / size)
    weight = torch.exp(log_weight - log_weight.amax(-1, keepdim=True))
    for g in range(many - 1):
        left = transfer[:, :, g] @ (entry[:, :, g] * weight[:, g]).unsqueeze(-1)
        entry[:, :, g + 1] = (left / left.sum(1, keepdim=True)).squeeze(-1)
    return entry


def _exits(transfer: Tensor, log_weight: Tensor, ends: Tensor) -> Tensor:
    """Backward messages at the end of each stretch (R, S, stretches), scaled so that they meet ``ends`` in one."""
    exits = torch.ones_like(ends)
    weight = torch.exp(log_weight - log_weight.amax(-1, keepdim=True))
    for g in range(ends.shape[2] - 1, 0, -1):
        message = (transfer[:, :, g] * exits[:, :, g].unsqueeze(-1)).sum(1) * weight[:, g]
        exits[:, :, g - 1] = message / (message * ends[:, :, g - 1]).sum(1, keepdim=True)
    return exits
