r"""Which node is wrong: transport residuals, node by node.

Hidden and missing values are drawn from their posterior, then every node's noise is recovered, :math:`u = \psi^{-1}(x;
\mathrm{pa})`. If the model is right, the noise follows its prior and is independent of the parents; the residual is
the energy distance between :math:`(u, \mathrm{pa})` and :math:`(u', \mathrm{pa})` with fresh :math:`u'`, and the excess
says by how many standard deviations it exceeds what chance alone gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.divergences import Energy
from otpdag.inference.row_posterior import Fitted, posterior_draws
from otpdag.mechanisms import Mechanism
from otpdag.noise import draw_noise

__all__ = ["node_residuals"]

COMPARED_ROWS = 1200  # an energy distance takes time with their square
NULL_REPEATS = 8  # samples of the model against each other, from which "excess" takes its unit


@dataclass(frozen=True)
class _Residual:
    node: str
    residual: float
    expected: float
    excess: float


def node_residuals(fitted: Fitted, batch: Batch, *, seed: int) -> pd.DataFrame:
    """One row for each observed node, the worst first."""
    generator = torch.Generator().manual_seed(seed)
    if batch.rows > COMPARED_ROWS:
        batch = batch.take(torch.randperm(batch.rows, generator=generator)[:COMPARED_ROWS])
    values = {node: value.permute(1, 0, 2) for node, value in posterior_draws(fitted, batch, 1, seed).items()}
    rows = [
        _residual(fitted, batch, node, values, generator)
        for node in fitted.structure.graph.observed
        if not fitted.structure.mechanisms[node].is_given
    ]
    table = pd.DataFrame(rows).set_index("node")
    return table.sort_values("excess", ascending=False)


def _residual(
    fitted: Fitted, batch: Batch, node: str, values: dict[str, Tensor], generator: torch.Generator
) -> _Residual:
    mechanism = fitted.structure.mechanisms[node]
    seen = batch.mask[node][0].all(-1)
    parents = {p: values[p][:, seen] for p in fitted.structure.graph.parents(node)}
    value = values[node][:, seen]
    context = [_standardised(fitted.structure.mechanisms[p], v) for p, v in parents.items()]
    own = _own(fitted, mechanism, node, value, parents, generator)
    fresh = [_fresh(fitted, mechanism, node, value, parents, generator) for _ in range(NULL_REPEATS + 1)]
    scale = _scale(mechanism, fresh[-1])
    distance = Energy()

    def compare(left: Tensor, right: Tensor) -> float:
        return float(distance(torch.cat([left / scale, *context], -1), torch.cat([right / scale, *context], -1))[0])

    residual = sum(compare(own, other) for other in fresh[:-1]) / NULL_REPEATS
    null = torch.tensor([compare(fresh[i], fresh[i + 1]) for i in range(NULL_REPEATS)])
    spread = float(null.std().clamp(min=1e-12))
    return _Residual(node, residual, float(null.mean()), (residual - float(null.mean())) / spread)


def _own(
    fitted: Fitted,
    mechanism: Mechanism,
    node: str,
    value: Tensor,
    parents: dict[str, Tensor],
    generator: torch.Generator,
) -> Tensor:
    """The node's noise as normal scores; its value where the noise cannot be recovered."""
    if not mechanism.can_abduct:
        return value
    uniform = torch.rand(*value.shape[:-1], mechanism.noise.dim, generator=generator, dtype=value.dtype)
    noise = mechanism.abduct(fitted.naturals[node], value, parents, uniform).detach()
    return noise if mechanism.noise.kind == "normal" else torch.special.ndtri(noise.clamp(1e-6, 1 - 1e-6))


def _fresh(
    fitted: Fitted,
    mechanism: Mechanism,
    node: str,
    value: Tensor,
    parents: dict[str, Tensor],
    generator: torch.Generator,
) -> Tensor:
    if mechanism.can_abduct:
        return torch.randn(*value.shape[:-1], mechanism.noise.dim, generator=generator, dtype=value.dtype)
    noise = draw_noise(mechanism.noise, tuple(value.shape[:-1]), generator)
    return mechanism.forward(fitted.naturals[node], parents, noise).detach().expand_as(value)


def _scale(mechanism: Mechanism, fresh: Tensor) -> Tensor:
    if mechanism.can_abduct or mechanism.space.is_discrete:
        return torch.ones(1, dtype=fresh.dtype)
    return fresh.std(1, keepdim=True).clamp(min=1e-12)


def _standardised(mechanism: Mechanism, value: Tensor) -> Tensor:
    if mechanism.space.is_discrete:
        return value
    return (value - value.mean(1, keepdim=True)) / value.std(1, keepdim=True).clamp(min=1e-12)
