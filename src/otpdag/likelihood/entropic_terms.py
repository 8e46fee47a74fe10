r"""The objective with the closed-form backward map and the noise integrated out.

It is deterministic: all points are fixed, so that a quasi-Newton method applies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from otpdag.divergences.base import AbstractDivergence
from otpdag.likelihood.enumeration import Evaluation, RowGroup, evaluate, integrated
from otpdag.numerics import joint_one_hot
from otpdag.problem import LossTerms
from otpdag.settings import Weights
from otpdag.structure import Naturals, Structure


def closed_terms(
    structure: Structure,
    naturals: Naturals,
    groups: Sequence[RowGroup],
    weights: Weights,
    *,
    divergence: AbstractDivergence | None = None,
    reference: str = "model",
    split: bool = True,
) -> LossTerms:
    r"""Reconstruction and entropic terms with the best backward map in closed form.

    For each row, :math:`-\epsilon \log \sum_s \pi_s \exp(w \log p(x \mid z_s)/\epsilon)` with the weight of the
    reconstruction as :math:`w`; with both one the negative log-likelihood, with eps = 0 the cheapest point.
    With ``reference="uniform"`` all states of hidden categories have equal :math:`\pi_s`. Without ``split``
    the whole is reported as reconstruction, which saves computing the posterior.
    """
    eps, eta = weights.eps, weights.eta
    zero = groups[0].weight.new_zeros(1)
    total, cost, weight, states = zero, zero, zero, []
    for group in groups:
        points = evaluate(structure, naturals, group, uniform=reference == "uniform")
        prior, likelihood = _by_state(group, points, weights.reconstruction, eps, split=split)
        row_loss = _soft_minimum(prior, likelihood, eps)
        total = total + (group.weight * row_loss).sum(-1)
        weight = weight + group.weight.sum(-1)
        if split:
            cost = cost + (group.weight * _expected_cost(prior, likelihood, eps)).sum(-1)
        if eta:
            states.append((group, _posterior(prior, likelihood, eps)))
    loss = total / weight
    mean_cost = cost / weight if split else loss
    terms = LossTerms.of(loss, reconstruction=mean_cost, entropic=loss - mean_cost)
    if eta and divergence is not None:
        pushed = eta * state_divergence(structure, naturals, states, divergence)
        terms = terms + LossTerms.of(loss, divergence=pushed)
    return terms


def row_losses(structure: Structure, naturals: Naturals, groups: Sequence[RowGroup], eps: float = 1.0) -> Tensor:
    """The loss of each row (R, N), in the order of the batch."""
    pieces, rows = [], []
    for group in groups:
        points = evaluate(structure, naturals, group)
        prior, likelihood = _by_state(group, points, 1.0, eps, split=False)
        loss = _soft_minimum(prior, likelihood, eps)
        pieces.append(loss.expand(-1, len(group.rows)))
        rows.append(group.rows)
    replicas = max(piece.shape[0] for piece in pieces)
    joined = torch.cat([piece.expand(replicas, -1) for piece in pieces], -1)
    return joined[:, torch.cat(rows).argsort()]


def _by_state(
    group: RowGroup, points: Evaluation, reconstruction: float, eps: float, *, split: bool
) -> tuple[Tensor, Tensor]:
    """Log-weights and log-likelihoods of a group's points, numbers that have a closed form integrated out."""
    prior, likelihood = torch.broadcast_tensors(points.log_prior, reconstruction * points.log_likelihood)
    if not group.quadratic:
        return prior, likelihood
    return integrated(prior, likelihood, eps, group.quadratic, split=split)


def _soft_minimum(prior: Tensor, likelihood: Tensor, eps: float) -> Tensor:
    """The loss of each row."""
    if eps == 0:
        return torch.where(torch.isneginf(prior), torch.inf, -likelihood).amin(-1)
    return -eps * torch.logsumexp(prior + likelihood / eps, -1)


def _posterior(prior: Tensor, likelihood: Tensor, eps: float) -> Tensor:
    """The weights of the points of each row."""
    if eps == 0:
        best = torch.where(torch.isneginf(prior), torch.inf, -likelihood).argmin(-1)
        return torch.nn.functional.one_hot(best, prior.shape[-1]).to(prior)
    return torch.softmax(prior + likelihood / eps, -1)


def _expected_cost(prior: Tensor, likelihood: Tensor, eps: float) -> Tensor:
    """The reconstruction cost of each row under its posterior, for the history."""
    with torch.no_grad():
        finite = torch.where(likelihood.isinf(), torch.zeros_like(likelihood), likelihood)
        return -(_posterior(prior, likelihood, eps) * finite).sum(-1)


def state_divergence(
    structure: Structure,
    naturals: Naturals,
    states: Sequence[tuple[RowGroup, Tensor]],
    divergence: AbstractDivergence,
) -> Tensor:
    """D between the posterior's and the model's weights of each family of categories (the push-forward term).

    The parents' weights under the model are those of the posterior, pooled over all rows.
    """
    total = torch.zeros(1).to(states[0][1])
    for node in structure.graph.hidden:
        family = (node, *structure.graph.parents(node))
        sizes = [structure.mechanisms[member].space.width for member in family]
        shown = all(member in group.states or member in group.values for group, _ in states for member in family)
        if not shown or not all(structure.mechanisms[member].space.is_discrete for member in family):
            continue
        pushed = torch.stack([_family_weights(group, posterior, family, sizes) for group, posterior in states]).sum(0)
        points = torch.cat(joint_one_hot(sizes), -1).unsqueeze(0).to(pushed)
        values = dict(zip(family, points.split(sizes, -1), strict=True))
        parents = {parent: values[parent] for parent in family[1:]}
        conditional = torch.exp(structure.mechanisms[node].log_prob(naturals[node], values[node], parents))
        by_parents = pushed.reshape(len(pushed), sizes[0], -1).sum(1, keepdim=True)
        model = (by_parents * conditional.reshape(len(conditional), sizes[0], -1)).flatten(1)
        total = total + _on_weights(divergence)(points, points, pushed, model)
    return total


def _family_weights(group: RowGroup, posterior: Tensor, family: Sequence[str], sizes: Sequence[int]) -> Tensor:
    """Total weight of each joint state of a family in a group's rows: (R, C)."""
    index = torch.zeros(1, 1, 1, dtype=torch.long, device=posterior.device)
    for member, size in zip(family, sizes, strict=True):
        one_hot = group.states[member] if member in group.states else group.values[member]
        index = index * size + one_hot.argmax(-1)
    weighted = group.weight.unsqueeze(-1) * posterior
    none = weighted.new_zeros(len(weighted), math.prod(sizes))
    return none.scatter_add(1, index.expand_as(weighted).flatten(1), weighted.flatten(1))


def _on_weights(divergence: AbstractDivergence) -> AbstractDivergence:
    """The divergence between distributions whose weights are exact: a correction for samples would be wrong."""
    if getattr(divergence, "unbiased", False):
        return replace(divergence, unbiased=False)  # type: ignore[type-var]
    return divergence
