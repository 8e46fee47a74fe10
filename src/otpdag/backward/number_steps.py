"""Sequences laid out for draws of hidden numbers, and for the hidden categories beside them.

Given a draw of the numbers the categories are a chain: every draw is a set of sequences of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Block, Chain, one_block
from otpdag.backward.chain_marginals import Marginals, marginals
from otpdag.backward.chain_potentials import Linear, Potentials, potentials
from otpdag.backward.chain_states import joint_states
from otpdag.backward.smoother import SequenceDraw, SequenceMap
from otpdag.data.sequences import SequenceBatch
from otpdag.structure import Naturals, Structure, Theta, lag_name

__all__ = [
    "Steps",
    "given_numbers",
    "lay_out_steps",
    "lay_out_switching",
    "padded_features",
    "read_states",
    "with_earlier",
]


@dataclass(frozen=True)
class Steps:
    """Sequences in the order of a block's columns, for draws of hidden numbers.

    Attributes:
        values: What is seen, with earlier values under their own names (1, 1, M, width).
        mask: Which cells are seen.
        times: How many steps came before (M,).
        back: For each lag the column that many steps before.
        block: The order.
        features: What the map reads (1, M, F).
        noise: The map's noise (1, D, M, d), the same in every evaluation.
    """

    values: Mapping[str, Tensor]
    mask: Mapping[str, Tensor]
    times: Tensor
    back: Mapping[int, Tensor]
    block: Block
    features: Tensor
    noise: Tensor


def lay_out_steps(batch: SequenceBatch, backward: SequenceMap, noise: Tensor) -> Steps:
    """Put everything in the order of time once."""
    structure = backward.structure
    (block,) = one_block(batch)
    rows = block.rows
    column = torch.empty_like(rows)
    column[rows] = torch.arange(len(rows))
    times = batch.times
    values = {node: value[:, None, rows] for node, value in batch.steps.values.items()}
    mask = {node: seen[:, None, rows] for node, seen in batch.steps.mask.items()}
    back = {}
    for edge in structure.graph.lags:
        back[edge.by] = column[(rows - times[rows].clamp(max=edge.by))]
        if edge.parent in values:
            name = lag_name(edge.parent, edge.by)
            values[name], mask[name] = values[edge.parent][:, :, back[edge.by]], mask[edge.parent][:, :, back[edge.by]]
    features = padded_features(structure, backward.features(batch)[:, rows])
    return Steps(values, mask, times[rows], back, block, features, noise[:, :, rows])


def padded_features(structure: Structure, features: Tensor) -> Tensor:
    """Features with room for the probabilities of hidden categories, now and one step later."""
    categories = structure.hidden_categories
    states = joint_states(structure, categories).size if categories else 0
    return torch.nn.functional.pad(features, (0, 2 * states))


def with_earlier(structure: Structure, drawn: Mapping[str, Tensor], steps: Steps) -> dict[str, Tensor]:
    """Drawn numbers (R, D, M, width), and their earlier values under their own names."""
    values = dict(drawn)
    for edge in structure.graph.lags:
        if edge.parent in drawn:
            values[lag_name(edge.parent, edge.by)] = drawn[edge.parent][:, :, steps.back[edge.by]]
    return values


def lay_out_switching(structure: Structure, steps: Steps) -> Chain:
    """Every draw of the numbers as a set of sequences of its own, on which the categories are a chain."""
    draws, total = steps.noise.shape[1], len(steps.times)
    states = joint_states(structure, structure.hidden_categories)
    values = {name: value.expand(1, draws, -1, -1).flatten(1, 2) for name, value in steps.values.items()}
    mask = {name: seen.expand(1, draws, -1, -1).flatten(1, 2) for name, seen in steps.mask.items()}
    for node in structure.hidden_numbers:
        cells = structure.mechanisms[node].space.cells
        lagged = [lag_name(edge.parent, edge.by) for edge in structure.graph.lags if edge.parent == node]
        mask |= {name: torch.ones(1, draws * total, cells, dtype=torch.bool) for name in (node, *lagged)}
    shift = total * torch.arange(draws).unsqueeze(1)
    kinds = torch.cat([(shift + torch.arange(at, at + size)).flatten() for at, size in steps.block.spans])
    sizes = tuple(draws * size for size in steps.block.sizes)
    block = Block(kinds, kinds, sizes, torch.arange(sizes[0]))
    return Chain.of(structure, states, values, mask, steps.times.repeat(draws), (block,))


def given_numbers(
    structure: Structure, naturals: Naturals, drawn: SequenceDraw, steps: Steps, chain: Chain
) -> tuple[Potentials, Marginals, Tensor]:
    """Potentials and marginals of the categories given each draw; also the states in the order of the draws."""
    numbers = {name: value.flatten(1, 2) for name, value in with_earlier(structure, drawn.values, steps).items()}
    laid = replace(chain, values={**chain.values, **numbers})
    log_potentials = potentials(structure, naturals, laid)
    (block,) = chain.blocks
    part = marginals(block, Linear.of(log_potentials), laid)
    state = torch.empty_like(part.state)
    state[:, :, block.kinds] = part.state
    return log_potentials, part, state


def read_states(naturals: Naturals, phi: Theta, backward: SequenceMap, steps: Steps, chain: Chain) -> Steps:
    """The same steps, whose features end with the probabilities of the categories now and one step later.

    Given the categories, the potentials of linear Gaussian numbers are linear in them: what the map reads of them it
    need not guess from what is seen.
    """
    with torch.no_grad():
        drawn = backward.draw(phi, steps.block, steps.features, steps.noise)
        _, _, state = given_numbers(backward.structure, naturals, drawn, steps, chain)
    size, total = chain.states.size, len(steps.times)
    now = state[:1].reshape(1, size, -1, total).mean(2).transpose(1, 2)
    later = torch.zeros_like(now)
    for (at, _), (after, many) in pairwise(steps.block.spans):
        later[:, at : at + many] = now[:, after : after + many]
    return replace(steps, features=torch.cat([steps.features[..., : -2 * size], now, later], -1))
