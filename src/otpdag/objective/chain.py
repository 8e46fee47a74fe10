r"""The objective of sequences, with the chain-structured backward map in closed form.

The gradient is not taken through the recursion over time: by Fisher's identity it is that of the expected
complete-data cost under the backward map, held fixed,

.. math:: \nabla_\theta \log P_\theta(x) = E_{\phi(s \mid x)} \nabla_\theta \log P_\theta(x, s),

so that one pass without gradients and sums over distinct steps are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Block, Chain, one_block, pairs_vary
from otpdag.backward.chain_marginals import Marginals, marginals
from otpdag.backward.chain_potentials import Linear, Potentials, potentials
from otpdag.backward.chain_states import joint_states
from otpdag.backward.smoother import SequenceDraw, SequenceMap
from otpdag.data.sequences import SequenceBatch
from otpdag.objective.terms import LossTerms
from otpdag.structure import Naturals, Structure, Theta, lag_name

__all__ = [
    "Steps",
    "chain_terms",
    "lay_out_steps",
    "lay_out_switching",
    "read_states",
    "smoother_terms",
    "switching_terms",
]


def chain_terms(structure: Structure, naturals: Naturals, chain: Chain, *, eps: float = 1.0) -> LossTerms:
    r"""Reconstruction and entropic terms of a step, :math:`-\epsilon \log P(x) / \text{steps}` with eps = 1."""
    found = potentials(structure, naturals, chain)
    linear = Linear.of(found, eps)
    replicas, size, kinds = linear.unary.shape
    state = linear.unary.new_zeros(replicas, kinds, size)
    pair = torch.zeros_like(linear.pair)
    log_likelihood = linear.unary.new_zeros(replicas)
    for block in chain.blocks:
        part = marginals(block, linear, chain)
        log_likelihood += part.log_scale.sum(-1)
        pair += part.pair
        state += _by_kind(part.state, block.kinds, kinds)
    cost = -_expected(state, found.observed) / chain.steps
    surrogate = cost - eps * (_expected(state, found.hidden) + _expected(pair, found.pair)) / chain.steps
    loss = surrogate + (-eps * log_likelihood / chain.steps - surrogate).detach()
    return LossTerms.of(loss, reconstruction=cost.detach(), entropic=loss - cost.detach())


def _by_kind(state: Tensor, kinds: Tensor, many: int) -> Tensor:
    """Sum the probabilities of states (R, S, m) over columns of the same kind: (R, many, S)."""
    replicas, size, columns = state.shape
    if many > columns:  # hardly any two are alike
        found = state.new_zeros(replicas, many, size)
        return found.index_add_(1, kinds, state.transpose(1, 2))
    sums = [torch.bincount(kinds, row, minlength=many) for row in state.reshape(-1, columns)]
    return torch.stack(sums).reshape(replicas, size, many).transpose(1, 2)


def _expected(weight: Tensor, log_potential: Tensor) -> Tensor:
    """Sum of weight times log-potential; what has no weight counts as zero even at minus infinity."""
    log_potential = log_potential.expand(weight.shape[0], *log_potential.shape[1:])
    known = torch.where(weight > 0, log_potential, torch.zeros_like(log_potential))
    return (weight * known).flatten(1).sum(-1)


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


def lay_out_steps(structure: Structure, batch: SequenceBatch, backward: SequenceMap, noise: Tensor) -> Steps:
    """Put everything in the order of time once."""
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
    return Steps(values, mask, times[rows], back, block, backward.features(batch)[:, rows], noise[:, :, rows])


def smoother_terms(
    structure: Structure, naturals: Naturals, phi: Theta, backward: SequenceMap, steps: Steps, *, eps: float = 1.0
) -> LossTerms:
    """Reconstruction and entropic terms of a step, with hidden numbers drawn from their backward map."""
    drawn = backward.draw(phi, steps.block, steps.features, steps.noise)
    values = {**steps.values, **_with_earlier(structure, drawn.values, steps)}
    cost, prior = torch.zeros_like(drawn.log_prob), torch.zeros_like(drawn.log_prob)
    for name, mechanism in structure.mechanisms.items():
        if mechanism.is_given:
            continue
        base = structure.base(name)
        lag = structure.longest_lag(base)
        active = steps.times < lag if name != base else steps.times >= lag
        for parent, _ in mechanism.family.parents:
            if parent in steps.mask:
                active = active & steps.mask[parent][0, 0].all(-1)
        log_prob = mechanism.log_prob(
            naturals[name], values[base], structure.parents(name, values), steps.mask.get(base)
        )
        log_prob = torch.where(active, log_prob, 0.0)
        cost, prior = (cost - log_prob, prior) if base in steps.mask else (cost, prior + log_prob)
    reconstruction = cost.mean((1, 2))
    entropic = eps * (drawn.log_prob - prior).mean((1, 2))
    return LossTerms.of(reconstruction, reconstruction=reconstruction, entropic=entropic)


def _with_earlier(structure: Structure, drawn: Mapping[str, Tensor], steps: Steps) -> dict[str, Tensor]:
    """Drawn numbers (R, D, M, width), and their earlier values under their own names."""
    found = dict(drawn)
    for edge in structure.graph.lags:
        if edge.parent in drawn:
            found[lag_name(edge.parent, edge.by)] = drawn[edge.parent][:, :, steps.back[edge.by]]
    return found


# --- categories and numbers together ---------------------------------------------------------------------------------


def lay_out_switching(structure: Structure, steps: Steps, numbers: tuple[str, ...]) -> Chain:
    """Every draw of the numbers as a set of sequences of its own, on which the categories are a chain."""
    draws, total = steps.noise.shape[1], len(steps.times)
    hidden = structure.graph.hidden
    states = joint_states(structure, [n for n in structure.graph.order if n in hidden and n not in numbers])
    longest = max((edge.by for edge in structure.graph.lags), default=0)
    values = {name: value.expand(1, draws, -1, -1).flatten(1, 2) for name, value in steps.values.items()}
    mask = {name: seen.expand(1, draws, -1, -1).flatten(1, 2) for name, seen in steps.mask.items()}
    for node in numbers:
        cells = structure.mechanisms[node].space.cells
        lagged = [lag_name(edge.parent, edge.by) for edge in structure.graph.lags if edge.parent == node]
        mask |= {name: torch.ones(1, draws * total, cells, dtype=torch.bool) for name in (node, *lagged)}
    shift = total * torch.arange(draws).unsqueeze(1)
    kinds = torch.cat([(shift + torch.arange(at, at + size)).flatten() for at, size in steps.block.spans])
    sizes = tuple(draws * size for size in steps.block.sizes)
    block = Block(kinds, kinds, sizes, torch.arange(sizes[0]))
    phase = steps.times.clamp(max=longest).repeat(draws)
    return Chain(
        states, values, mask, phase, torch.ones(draws * total).to(steps.features), (block,), longest,
        pairs_vary(structure, states), draws * total, sizes[0],
    )  # fmt: skip


def switching_terms(
    structure: Structure, naturals: Naturals, phi: Theta, backward: SequenceMap, steps: Steps, chain: Chain
) -> LossTerms:
    r"""Terms of a step with hidden categories s and numbers z.

    .. math:: E_{\phi(z \mid x)} [\log \phi(z \mid x) - \log \textstyle\sum_s P(x, z, s)]

    The numbers are drawn; given a draw the categories are summed over exactly, so that nothing of theirs is relaxed.
    The gradient, in the parameters as in the draws, is that of the expected complete-data cost.
    """
    drawn = backward.draw(phi, steps.block, steps.features, steps.noise)
    found, part, state = _given_numbers(structure, naturals, drawn, steps, chain)
    expected = _expected(state.transpose(1, 2), found.observed + found.hidden) + _expected(part.pair, found.pair)
    surrogate = -expected / chain.steps
    cost = surrogate + (-part.log_scale.sum(-1) / chain.steps - surrogate).detach()
    entropic = drawn.log_prob.mean((1, 2))
    return LossTerms.of(cost, reconstruction=cost, entropic=entropic)


def _given_numbers(
    structure: Structure, naturals: Naturals, drawn: SequenceDraw, steps: Steps, chain: Chain
) -> tuple[Potentials, Marginals, Tensor]:
    """Potentials and marginals of the categories given each draw; also the states in the order of the draws."""
    numbers = {name: value.flatten(1, 2) for name, value in _with_earlier(structure, drawn.values, steps).items()}
    laid = replace(chain, values={**chain.values, **numbers})
    found = potentials(structure, naturals, laid)
    (block,) = chain.blocks
    part = marginals(block, Linear.of(found), laid)
    state = torch.empty_like(part.state)
    state[:, :, block.kinds] = part.state
    return found, part, state


def read_states(
    structure: Structure, naturals: Naturals, phi: Theta, backward: SequenceMap, steps: Steps, chain: Chain
) -> Steps:
    """The same steps, whose features end with the probabilities of the categories now and one step later.

    Given the categories, the potentials of linear Gaussian numbers are linear in them: what the map reads of them it
    need not guess from what is seen.
    """
    with torch.no_grad():
        drawn = backward.draw(phi, steps.block, steps.features, steps.noise)
        _, _, state = _given_numbers(structure, naturals, drawn, steps, chain)
    size, total = chain.states.size, len(steps.times)
    now = state[:1].reshape(1, size, -1, total).mean(2).transpose(1, 2)
    later = torch.zeros_like(now)
    for (at, _), (after, many) in pairwise(steps.block.spans):
        later[:, at : at + many] = now[:, after : after + many]
    return replace(steps, features=torch.cat([steps.features[..., : -2 * size], now, later], -1))
