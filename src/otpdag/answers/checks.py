r"""How well a fitted model describes rows: their likelihood, a distance between them and samples, residuals by node.

Residuals tell which node is wrong. Hidden and missing values are drawn from their posterior, then every node's noise is
recovered, :math:`u = \psi^{-1}(x; \mathrm{pa})`. If the model is right, the noise follows its prior and is independent
of the parents; the residual is the energy distance between :math:`(u, \mathrm{pa})` and :math:`(u', \mathrm{pa})` with
fresh :math:`u'`, and the excess says by how many standard deviations it exceeds what chance alone gives.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch
from torch import Tensor

from otpdag.answers.notes import noise_scores
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.divergences import Energy
from otpdag.likelihood import row_posterior, sequence_posterior
from otpdag.likelihood.row_posterior import Fitted, posterior_draws
from otpdag.mechanisms import Mechanism
from otpdag.mechanisms.base import can_abduct
from otpdag.noise import draw_noise
from otpdag.simulation import ancestral, sequences_like

CONSTANT = 1e-12  # a spread that is none


def log_likelihoods(fitted: Fitted, batch: Batch | SequenceBatch, seed: int = 0) -> Tensor:
    """Log-likelihoods of rows, or of sequences (N,), hidden and missing values integrated out."""
    if isinstance(batch, SequenceBatch):
        return sequence_posterior.log_likelihood(fitted.structure, fitted.naturals, batch, seed)
    return row_posterior.log_likelihood(fitted, batch)


# -- distance ----------------------------------------------------------------------------------------------------------


def transport_score(fitted: Fitted, batch: Batch | SequenceBatch, seed: int, most: int = 4000) -> float:
    """Energy distance between standardised rows and as many samples, at most so many; smaller is better.

    Of sequences, between pairs of neighbouring steps.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(batch, SequenceBatch):
        left, right, chosen = _compared_steps(fitted, batch, generator, most)
    else:
        left, right, chosen = _compared_rows(fitted, batch, generator, most)
    return float(Energy()(torch.cat(left, -1)[:, chosen], torch.cat(right, -1)[:, chosen])[0])


def _compared_rows(
    fitted: Fitted, batch: Batch, generator: torch.Generator, most: int
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Rows and samples (1, N, width) by node, and which of them are compared."""
    structure = fitted.structure
    given = {node: batch.values[node] for node in structure.given}
    drawn = ancestral(structure, fitted.naturals, batch.rows, generator, do=given)
    shuffled = torch.randperm(batch.rows, generator=generator)
    completed = _completed(fitted, batch, generator.initial_seed())
    left, right = [], []
    for node in structure.graph.observed:
        seen = _by_cell(completed, node)
        is_discrete = structure.mechanisms[node].space.is_discrete
        centre, spread = (0.0, 1.0) if is_discrete else _moments(batch.values[node][0], batch.mask[node][0])
        left.append((completed.values[node] - centre) / spread * seen)
        right.append((drawn[node] - centre) / spread * seen[:, shuffled])
    return left, right, torch.arange(min(most, batch.rows))


def _compared_steps(
    fitted: Fitted, batch: SequenceBatch, generator: torch.Generator, most: int
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Steps and those before them, of some sequences and of the model; a sequence of one step is a pair with itself.

    Missing cells are missing in the model's pairs as well.
    """
    some = torch.randperm(len(batch.lengths), generator=generator)[: max(1, -(-most // int(batch.lengths.max())))]
    part = batch.take(some.sort().values)
    drawn = sequences_like(fitted.structure, fitted.naturals, part, generator)
    left, right = [], []
    for node in fitted.structure.graph.observed:
        value, seen = part.steps.values[node], _by_cell(part.steps, node)
        centre, spread = _moments(value[0], seen[0])
        ours, theirs = (value - centre) / spread * seen, (drawn.steps.values[node] - centre) / spread * seen
        left += [ours, part.lagged(ours, 1)]
        right += [theirs, part.lagged(theirs, 1)]
    return left, right, torch.randperm(part.rows, generator=generator)[:most]


def _by_cell(batch: Batch, node: str) -> Tensor:
    """Which numbers of a node are seen (1, N, width or 1)."""
    seen = batch.mask[node].to(torch.float64)
    return seen if seen.shape[-1] == batch.values[node].shape[-1] else seen[..., :1]


def _completed(fitted: Fitted, batch: Batch, seed: int) -> Batch:
    """Rows with their gaps drawn from the model, which may depend on what is seen; columns without a value stay so.

    Where a node has no density, rows stay as they are.
    """
    observed = [fitted.structure.mechanisms[node] for node in fitted.structure.graph.observed]
    complete = all(bool(mask.all()) for mask in batch.mask.values())
    if complete or not all(one.has_density or one.is_given for one in observed):
        return batch
    drawn = posterior_draws(fitted, batch, 1, seed)
    values = {node: drawn[node].permute(1, 0, 2) for node in batch.values}
    mask = {node: seen.any(1, keepdim=True).expand_as(seen) for node, seen in batch.mask.items()}
    return Batch(values, mask, batch.weight)


def _moments(value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread of a column's seen cells; a constant has a spread of one."""
    count = seen.sum(0).clamp(min=1)
    mean = (value * seen).sum(0) / count
    spread = (((value - mean) * seen) ** 2).sum(0).div(count).sqrt()
    return mean, torch.where(spread > CONSTANT, spread, torch.ones_like(spread))


# -- residuals ---------------------------------------------------------------------------------------------------------


def node_residuals(fitted: Fitted, batch: Batch, *, seed: int, most: int = 1200) -> pd.DataFrame:
    """One row for each observed node, the worst first: ``residual``, what chance gives, ``expected``, and ``excess``.

    Args:
        fitted: The model.
        batch: Rows.
        seed: Determines draws.
        most: Rows that are compared at most: an energy distance takes time with their square.
    """
    generator = torch.Generator().manual_seed(seed)
    if batch.rows > most:
        batch = batch.take(torch.randperm(batch.rows, generator=generator)[:most])
    values = {node: value.permute(1, 0, 2) for node, value in posterior_draws(fitted, batch, 1, seed).items()}
    rows = {}
    for node in fitted.structure.graph.observed:
        if not fitted.structure.mechanisms[node].is_given:
            seen = batch.mask[node][0].all(-1)
            rows[node] = _residual(fitted, node, {name: value[:, seen] for name, value in values.items()}, generator)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["residual", "expected", "excess"])
    return table.rename_axis("node").sort_values("excess", ascending=False)


def _residual(
    fitted: Fitted, node: str, values: Mapping[str, Tensor], generator: torch.Generator, repeats: int = 8
) -> tuple[float, float, float]:
    """Residual, expectation and excess; samples are compared with each other so often to tell what chance gives."""
    mechanism, value = fitted.structure.mechanisms[node], values[node]
    parents = {parent: values[parent] for parent in fitted.structure.graph.parents(node)}
    context = [_standardised(fitted.structure.mechanisms[p], v) for p, v in parents.items()]
    own = noise_scores(fitted, node, value, parents, generator) if can_abduct(mechanism) else value
    fresh = [_fresh(fitted, node, value, parents, generator) for _ in range(repeats + 1)]
    scale = torch.ones(1, dtype=value.dtype)
    if not (can_abduct(mechanism) or mechanism.space.is_discrete):
        scale = fresh[-1].std(1, keepdim=True).clamp(min=CONSTANT)
    distance = Energy()

    def compare(left: Tensor, right: Tensor) -> float:
        return float(distance(torch.cat([left / scale, *context], -1), torch.cat([right / scale, *context], -1))[0])

    residual = sum(compare(own, other) for other in fresh[:-1]) / repeats
    null = torch.tensor([compare(fresh[i], fresh[i + 1]) for i in range(repeats)])
    expected = float(null.mean())
    return residual, expected, (residual - expected) / float(null.std().clamp(min=CONSTANT))


def _fresh(
    fitted: Fitted, node: str, value: Tensor, parents: Mapping[str, Tensor], generator: torch.Generator
) -> Tensor:
    """Noise as the model draws it; values where it cannot be recovered from them."""
    mechanism = fitted.structure.mechanisms[node]
    if can_abduct(mechanism):
        return torch.randn(*value.shape[:-1], mechanism.noise.dim, generator=generator, dtype=value.dtype)
    noise = draw_noise(mechanism.noise, tuple(value.shape[:-1]), generator)
    return mechanism.forward(fitted.naturals[node], parents, noise).detach().expand_as(value)


def _standardised(mechanism: Mechanism, value: Tensor) -> Tensor:
    if mechanism.space.is_discrete:
        return value
    return (value - value.mean(1, keepdim=True)) / value.std(1, keepdim=True).clamp(min=CONSTANT)
