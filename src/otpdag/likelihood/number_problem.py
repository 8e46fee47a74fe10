r"""Sequences laid out for draws of hidden numbers, and for the hidden categories beside them.

Given a draw of the numbers the categories are a chain: every draw is a set of sequences of its own.

The objective of sequences with hidden numbers, which a learned Gaussian chain draws with noise that stays fixed.

Hidden categories beside them are summed over exactly, given each draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch, part_of
from otpdag.likelihood.chain_layout import Block, Chain, joint_states, one_block
from otpdag.likelihood.chain_messages import Marginals, marginals
from otpdag.likelihood.chain_potentials import Linear, Potentials, potentials
from otpdag.likelihood.chain_problem import expected_log_potential
from otpdag.likelihood.smoother import SequenceDraw, SequenceMap
from otpdag.problem import LossTerms, Pace, Problem, Refinement, split_point
from otpdag.structure import Naturals, Structure, Theta, lag_name


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
    block = one_block(batch)
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


DRAWN = 8000
"""Draws of hidden numbers in all, each with its mirror image, where the steps are fewer."""

MOST_DRAWS, MOST_SWITCHING_DRAWS = 8, 4
"""Draws of a step; of models with categories, each of which is a chain of its own, half as many."""

READINGS = 8
"""Times that the map reads the categories anew, at most."""

READING_STEPS = 100
"""Steps before it reads them again: the last of many steps on an old reading are lost."""

SMALL_FALL = 1e-4
"""A fall of the loss since the last reading that ends them."""


@dataclass(frozen=True)
class NumberProblem(Problem):
    """Sequences with hidden numbers, whose backward map is learned along with the model."""

    structure: Structure
    batch: SequenceBatch
    backward: SequenceMap
    shapes: Mapping[str, tuple[int, ...]]
    eps: float
    seed: int
    steps: Steps
    chain: Chain | None
    """The hidden categories, if there are any."""
    readings: int
    last_loss: float = float("inf")
    """The loss when the categories were read last."""

    @property
    def rows(self) -> int:
        """Steps of all sequences."""
        return self.batch.rows

    @property
    def pace(self) -> Pace:
        """With categories, few steps at a time: they are read anew."""
        return Pace(steps=None if self.chain is None else READING_STEPS)

    def loss(self, point: Tensor) -> LossTerms:
        """Reconstruction and entropic terms of a step."""
        theta, phi = split_point(point, self.shapes)
        naturals = self.structure.naturals(theta)
        if self.chain is not None:
            return switching_terms(naturals, phi, self.backward, self.steps, self.chain)
        return smoother_terms(naturals, phi, self.backward, self.steps, eps=self.eps)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> NumberProblem:
        """About so many steps, or these sequences."""
        part = part_of(self.batch, rows, self.seed)
        if part is self.batch:
            return self
        return number_problem(part, self.backward, self.shapes, self.eps, self.seed)

    def refine(self, point: Tensor) -> Refinement | None:
        """The map reads the probabilities that the categories have now, until that lowers the loss no more."""
        if self.chain is None or self.readings == 0:
            return None
        with torch.no_grad():
            loss = float(self.loss(point).total[0])
        if self.last_loss - loss < SMALL_FALL:
            return None
        theta, phi = split_point(point.detach(), self.shapes)
        naturals = self.structure.naturals(theta)
        steps = read_states(naturals, phi, self.backward, self.steps, self.chain)
        read = replace(self, steps=steps, readings=self.readings - 1, last_loss=loss)
        return Refinement(read, point, f"categories read {READINGS - self.readings + 1}")


def number_problem(
    batch: SequenceBatch, backward: SequenceMap, shapes: Mapping[str, tuple[int, ...]], eps: float, seed: int
) -> NumberProblem:
    """Draw the noise once, each with its mirror image, and lay out the hidden categories beside the numbers."""
    structure, generator = backward.structure, torch.Generator().manual_seed(seed)
    mixed = bool(structure.hidden_categories)
    draws = min(MOST_SWITCHING_DRAWS if mixed else MOST_DRAWS, max(1, DRAWN // batch.rows))
    noise = torch.randn(1, draws, batch.rows, sum(backward.widths), generator=generator, dtype=torch.float64)
    steps = lay_out_steps(batch, backward, torch.cat([noise, -noise], 1))
    chain = lay_out_switching(structure, steps) if mixed else None
    readings = READINGS if mixed else 0
    return NumberProblem(structure, batch, backward, shapes, eps, seed, steps, chain, readings)


def smoother_terms(
    naturals: Naturals, phi: Theta, backward: SequenceMap, steps: Steps, *, eps: float = 1.0
) -> LossTerms:
    """Reconstruction and entropic terms of a step, with hidden numbers drawn from their backward map."""
    structure = backward.structure
    drawn = backward.draw(phi, steps.block, steps.features, steps.noise)
    values = {**steps.values, **with_earlier(structure, drawn.values, steps)}
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


def switching_terms(naturals: Naturals, phi: Theta, backward: SequenceMap, steps: Steps, chain: Chain) -> LossTerms:
    r"""Terms of a step with hidden categories s and numbers z.

    .. math:: E_{\phi(z \mid x)} [\log \phi(z \mid x) - \log \textstyle\sum_s P(x, z, s)]

    The numbers are drawn; given a draw the categories are summed over exactly, so that nothing of theirs is relaxed.
    The gradient, in the parameters as in the draws, is that of the expected complete-data cost.
    """
    drawn = backward.draw(phi, steps.block, steps.features, steps.noise)
    given, part, state = given_numbers(backward.structure, naturals, drawn, steps, chain)
    expected = expected_log_potential(state.transpose(1, 2), given.observed + given.hidden)
    expected = expected + expected_log_potential(part.pair, given.pair)
    surrogate = -expected / chain.steps
    cost = surrogate + (-part.log_scale.sum(-1) / chain.steps - surrogate).detach()
    entropic = drawn.log_prob.mean((1, 2))
    return LossTerms.of(cost, reconstruction=cost, entropic=entropic)
