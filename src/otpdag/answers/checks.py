r"""How well a fitted model describes rows: their likelihood, and residuals by node.

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

CONSTANT = 1e-12  # a spread that is none


def log_likelihoods(fitted: Fitted, batch: Batch | SequenceBatch, seed: int = 0) -> Tensor:
    """Log-likelihoods of rows, or of sequences (N,), hidden and missing values integrated out."""
    if isinstance(batch, SequenceBatch):
        return sequence_posterior.log_likelihood(fitted.structure, fitted.naturals, batch, seed)
    return row_posterior.log_likelihood(fitted, batch)


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
