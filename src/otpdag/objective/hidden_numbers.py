r"""The objective of sequences with hidden numbers, which a learned Gaussian chain draws with noise that stays fixed.

Hidden categories beside them are summed over exactly, given each draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Chain
from otpdag.backward.number_steps import (
    Steps,
    given_numbers,
    lay_out_steps,
    lay_out_switching,
    read_states,
    with_earlier,
)
from otpdag.backward.smoother import SequenceMap
from otpdag.data.sequence_parts import part_of
from otpdag.data.sequences import SequenceBatch
from otpdag.objective.chain import expected_log_potential
from otpdag.objective.problem import Moved, Problem
from otpdag.objective.terms import LossTerms
from otpdag.structure import Naturals, Structure, Theta

__all__ = ["NumberProblem", "number_problem", "smoother_terms", "switching_terms"]

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
    def steps_before_move(self) -> int | None:
        """With categories, few: they are read anew."""
        return None if self.chain is None else READING_STEPS

    def terms(self, point: Tensor) -> LossTerms:
        """Reconstruction and entropic terms of a step."""
        theta, phi = self.parts(point)
        naturals = self.structure.naturals(theta)
        if self.chain is not None:
            return switching_terms(naturals, phi, self.backward, self.steps, self.chain)
        return smoother_terms(naturals, phi, self.backward, self.steps, eps=self.eps)

    def on_part(self, rows: int | Tensor, *, coarse: bool = False) -> NumberProblem:
        """About so many steps, or these sequences."""
        part = part_of(self.batch, rows, self.seed)
        if part is self.batch:
            return self
        return number_problem(part, self.backward, self.shapes, self.eps, self.seed)

    def moved(self, point: Tensor) -> Moved | None:
        """The map reads the probabilities that the categories have now, until that lowers the loss no more."""
        if self.chain is None or self.readings == 0:
            return None
        with torch.no_grad():
            loss = float(self.loss(point)[0])
        if self.last_loss - loss < SMALL_FALL:
            return None
        theta, phi = self.parts(point.detach())
        naturals = self.structure.naturals(theta)
        steps = read_states(naturals, phi, self.backward, self.steps, self.chain)
        read = replace(self, steps=steps, readings=self.readings - 1, last_loss=loss)
        return Moved(read, point, f"categories read {READINGS - self.readings + 1}")


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
