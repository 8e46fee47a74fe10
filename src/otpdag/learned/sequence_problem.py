r"""Sequences with hidden numbers: the evidence lower bound, with noise that stays fixed.

Hidden numbers are drawn from the map's Gaussian chain, so that L-BFGS applies. Hidden categories s beside numbers z are
summed over exactly given each draw,

.. math:: E_{\phi(z \mid x)} [\log \phi(z \mid x) - \log \textstyle\sum_s P(x, z, s)],

so that nothing of theirs is relaxed; the gradient, in the parameters as in the draws, is that of the expected
complete-data cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch
from otpdag.learned.sequence_map import SequenceDraw, SequenceMap
from otpdag.likelihood.chain_layout import Block, Chain, Linear, joint_states, one_block, potentials, with_earlier
from otpdag.likelihood.chain_messages import marginals
from otpdag.likelihood.chain_problem import expected_log_potential
from otpdag.problem import Batched, LossTerms, Pace, Refinement, split_point
from otpdag.structure import Naturals, Shapes, Structure, lag_name


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps (M,) in the order of a block's columns.

    Attributes:
        structure: Graph and mechanisms.
        values: What is seen (1, M, width), earlier values included.
        mask: Which cells are seen.
        times: How many steps of the sequence came before (M,).
        features: What a map reads (1, M, F).
        block: The order.
    """

    structure: Structure
    values: Mapping[str, Tensor]
    mask: Mapping[str, Tensor]
    times: Tensor
    features: Tensor
    block: Block

    @classmethod
    def of(cls, structure: Structure, batch: SequenceBatch, block: Block, features: Tensor) -> Steps:
        """All steps of a batch in a block's order."""
        rows, held = block.rows, with_earlier(structure, batch)
        values, mask = ({name: one[:, rows] for name, one in own.items()} for own in held)
        return cls(structure, values, mask, batch.times[rows], features[:, rows], block)

    def lagged(self, tensor: Tensor, by: int) -> Tensor:
        """Each step's value (..., M, width) ``by`` steps ago; first ones keep that of the first."""
        return tensor.index_select(-2, self.block.back(by))

    def with_earlier(self, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Drawn values (..., M, width), and their earlier values under their own names."""
        lags = [edge for edge in self.structure.graph.lags if edge.parent in drawn]
        return {**drawn, **{lag_name(e.parent, e.by): self.lagged(drawn[e.parent], e.by) for e in lags}}

    def chain(self, categories: tuple[str, ...], copies: int = 1) -> Chain:
        """Several copies of all steps, each a set of sequences of its own on which hidden categories are a chain.

        Hidden numbers, which differ between copies, are known.
        """
        structure, mask, every = self.structure, dict(self.mask), torch.ones_like(self.times, dtype=torch.bool)
        for node in structure.hidden_numbers:
            mask[node] = every[None, :, None].expand(-1, -1, structure.mechanisms[node].space.cells)
            for edge in structure.graph.lags:
                if edge.parent == node:
                    mask[lag_name(node, edge.by)] = (self.times >= edge.by)[None, :, None]
        values, mask = (
            {name: one.expand(copies, -1, -1).reshape(1, -1, one.shape[-1]) for name, one in held.items()}
            for held in (self.values, mask)
        )
        shift = len(self.times) * torch.arange(copies).unsqueeze(1)
        kinds = torch.cat([(shift + torch.arange(at, at + size)).flatten() for at, size in self.block.spans])
        sizes = tuple(copies * size for size in self.block.sizes)
        block = Block(kinds, kinds, sizes, torch.arange(sizes[0]))
        states = joint_states(structure, categories)
        return Chain.of(structure, states, values, mask, self.times.repeat(copies), (block,))


@dataclass(frozen=True)
class NumberProblem(Batched):
    """Sequences with hidden numbers, whose backward map is learned along with the model.

    Attributes:
        noise: The map's noise (1, D, M, d), the same in every evaluation.
        chain: The hidden categories given each draw, if there are any.
        readings: Times that the map has read what it drew.
        last_loss: The loss when that was read last.
        small_fall: A fall of the loss since then that ends readings.
    """

    batch: SequenceBatch
    backward: SequenceMap
    eps: float
    seed: int
    steps: Steps
    noise: Tensor
    chain: Chain | None
    readings: int = 0
    most_readings: int = 8
    last_loss: float = float("inf")
    small_fall: float = 1e-4

    @property
    def pace(self) -> Pace:
        """Few steps before draws are read anew: the last of many steps on an old reading are lost."""
        return Pace(steps=100 if self.backward.read_later else None)

    def loss(self, point: Tensor) -> LossTerms:
        """Reconstruction and entropic terms of a step."""
        theta, phi = split_point(point, self.shapes)
        drawn = self.backward.draw(phi, self.steps.block, self.steps.features, self.noise)
        cost, kl = given_draws(self.structure.naturals(theta), self.steps, drawn, self.chain)
        return LossTerms.of(cost, reconstruction=cost / self.rows, entropic=self.eps * kl / self.rows)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> NumberProblem:
        """About so many steps, or these sequences."""
        part = self.batch.part(rows, self.seed)
        if part is self.batch:
            return self
        return number_problem(part, self.backward, self.shapes, self.eps, self.seed)

    def refine(self, point: Tensor) -> Refinement | None:
        """The map reads what it draws now, until that lowers the loss no more."""
        if not self.backward.read_later or self.readings == self.most_readings:
            return None
        with torch.no_grad():
            loss = float(self.loss(point).total[0])
            if self.last_loss - loss < self.small_fall:
                return None
            read = self._reading(point)
        refined = replace(self, steps=read, readings=self.readings + 1, last_loss=loss)
        return Refinement(refined, point, f"map reads {refined.readings}")

    def _reading(self, point: Tensor) -> Steps:
        """The same steps, whose features end with what is known of hidden values by now.

        Of categories: their probabilities at the step and one later, in which the potentials of linear Gaussian numbers
        are linear. Of numbers: means and their squares.
        """
        theta, phi = split_point(point, self.shapes)
        steps = self.steps
        drawn = self.backward.draw(phi, steps.block, steps.features, self.noise)
        mean = drawn.free[:1].mean(1)
        known = [mean, mean.square()] if self.backward.curved else []
        if self.chain is not None:
            state = _summed(self.structure.naturals(theta), steps, drawn, self.chain)[1]
            now = state[:1].unflatten(1, (-1, self.rows)).mean(1)
            later, follows = torch.zeros_like(now), steps.times > 0
            later[:, steps.block.back(1)[follows]] = now[:, follows]
            known = [now, later, *known]
        return replace(steps, features=torch.cat([steps.features[..., : -self.backward.read_later], *known], -1))


def number_problem(
    batch: SequenceBatch,
    backward: SequenceMap,
    shapes: Shapes,
    eps: float,
    seed: int,
    *,
    most: int = 8,
    in_all: int = 8000,
) -> NumberProblem:
    """Draw the noise once, each with its mirror image, and lay out the hidden categories beside the numbers.

    A step is drawn ``most`` times, beside categories, of which each draw is a chain of its own, half as often; fewer
    times where there would be more than ``in_all`` draws.
    """
    structure, generator = backward.structure, torch.Generator().manual_seed(seed)
    mixed = bool(structure.hidden_categories)
    draws = min(most // 2 if mixed else most, max(1, in_all // batch.rows))
    noise = torch.randn(1, draws, batch.rows, sum(backward.widths), generator=generator, dtype=torch.float64)
    block = one_block(batch)
    noise = torch.cat([noise, -noise], 1)[:, :, block.rows]
    steps = Steps.of(structure, batch, block, backward.features(batch))
    chain = steps.chain(structure.hidden_categories, noise.shape[1]) if mixed else None
    return NumberProblem(structure, batch, shapes, backward, eps, seed, steps, noise, chain)


def given_draws(naturals: Naturals, steps: Steps, drawn: SequenceDraw, chain: Chain | None) -> tuple[Tensor, Tensor]:
    """Cost of what is seen and the entropic term of drawn numbers (R,), means over draws.

    Hidden categories of a ``chain`` are summed over: minus the log-density of all else is the cost.
    """
    own = drawn.log_prob.sum(-1).mean(1)
    if chain is not None:
        return _summed(naturals, steps, drawn, chain)[0] / drawn.log_prob.shape[1], own
    values = {name: value.unsqueeze(1) for name, value in steps.values.items()} | steps.with_earlier(drawn.values)
    cost = -_log_density(naturals, steps, values, steps.structure.graph.observed).mean(1)
    return cost, own - _log_density(naturals, steps, values, tuple(drawn.values)).mean(1)


def _log_density(naturals: Naturals, steps: Steps, values: Mapping[str, Tensor], nodes: tuple[str, ...]) -> Tensor:
    """Log-density of some nodes, of what is seen of them, at values (R, ..., M, width): (R, ...)."""
    structure, total = steps.structure, torch.zeros(1, *next(iter(values.values())).shape[1:-2]).to(steps.features)
    for name, mechanism in structure.mechanisms.items():
        base = structure.base(name)
        if base not in nodes or mechanism.is_given:
            continue
        seen = steps.mask[base].unsqueeze(1) if base in steps.mask else None
        log_p = mechanism.log_prob(naturals[name], values[base], structure.parents(name, values), seen)
        total = total + torch.where(structure.explains(name, steps.times, steps.mask), log_p, 0.0).sum(-1)
    return total


def _summed(naturals: Naturals, steps: Steps, drawn: SequenceDraw, chain: Chain) -> tuple[Tensor, Tensor]:
    """Minus the log-density of what is seen and drawn, categories summed over, added up over all draws.

    Also the probabilities of states (R, D M, S).
    """
    (block,) = chain.blocks
    numbers = {name: value.flatten(1, 2) for name, value in steps.with_earlier(drawn.values).items()}
    laid = replace(chain, values={**chain.values, **numbers})
    given = potentials(steps.structure, naturals, laid)
    part = marginals(block, Linear.of(given), laid)
    state = torch.empty_like(part.state).index_copy_(2, block.kinds, part.state).transpose(1, 2)
    expected = expected_log_potential(state, given.observed + given.hidden)
    expected = expected + expected_log_potential(part.pair, given.pair)
    return -expected + (expected - part.log_scale.sum(-1)).detach(), state
