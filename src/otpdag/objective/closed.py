r"""The objective with the closed-form backward map and the noise integrated out, and the direct term.

Both are deterministic: all points are fixed, so that a quasi-Newton method applies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otpdag.backward.gibbs import RowGroup, evaluate
from otpdag.divergences.base import AbstractDivergence
from otpdag.divergences.whitened import FittedFeatures
from otpdag.measure import Measure, mean_features
from otpdag.objective.terms import LossTerms
from otpdag.structure import Naturals, Structure, Theta

__all__ = ["direct_term", "gibbs_terms", "state_divergence"]


def gibbs_terms(
    structure: Structure,
    naturals: Naturals,
    groups: Sequence[RowGroup],
    phi: Theta,
    *,
    eps: float = 1.0,
    eta: float = 0.0,
    divergence: AbstractDivergence | None = None,
) -> LossTerms:
    r"""Reconstruction and entropic terms with the best backward map in closed form.

    For each row, :math:`-\epsilon \log \sum_s \pi_s \exp(\log p(x \mid z_s)/\epsilon)`; with eps = 1 the negative
    log-likelihood, with eps = 0 the cheapest point.
    """
    zero = groups[0].weight.new_zeros(1)
    total, cost, weight, states = zero, zero, zero, []
    for group in groups:
        found = evaluate(structure, naturals, group, phi)
        prior, likelihood = torch.broadcast_tensors(found.log_prior, found.log_likelihood)
        row_loss, posterior = _soft_minimum(prior, likelihood, eps)
        finite = torch.where(likelihood.isinf(), torch.zeros_like(likelihood), likelihood)
        row_cost = -(posterior.detach() * finite.detach()).sum(-1)
        total = total + (group.weight * row_loss).sum(-1)
        cost = cost + (group.weight * row_cost).sum(-1)
        weight = weight + group.weight.sum(-1)
        if eta:
            states.append((group, posterior))
    loss, reconstruction = total / weight, cost / weight
    terms = LossTerms.of(loss, reconstruction=reconstruction, entropic=loss - reconstruction)
    if eta and divergence is not None:
        pushed = eta * state_divergence(structure, naturals, states, divergence)
        terms = terms + LossTerms.of(loss, divergence=pushed)
    return terms


def _soft_minimum(prior: Tensor, likelihood: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The row's loss and its posterior weights over points."""
    if eps == 0:
        cost = torch.where(torch.isneginf(prior), torch.full_like(prior, torch.inf), -likelihood)
        best = cost.min(-1)
        return best.values, torch.nn.functional.one_hot(best.indices, prior.shape[-1]).to(prior)
    joint = prior + likelihood / eps
    row = torch.logsumexp(joint, -1)
    return -eps * row, torch.exp(joint - row.unsqueeze(-1))


def state_divergence(
    structure: Structure,
    naturals: Naturals,
    states: Sequence[tuple[RowGroup, Tensor]],
    divergence: AbstractDivergence,
) -> Tensor:
    """D between the posterior's and the model's weights of each enumerated hidden family (the push-forward term)."""
    found: Tensor | None = None
    for node in structure.graph.hidden:
        parents = structure.graph.parents(node)
        usable = [(g, q) for g, q in states if node in g.states and all(p in g.states for p in parents)]
        for group, posterior in usable:
            mechanism = structure.mechanisms[node]
            points = torch.cat([group.states[n][0] for n in (node, *parents)], -1)  # (1, S, width)
            share = (group.weight / group.weight.sum(-1, keepdim=True)).unsqueeze(-1)
            pushed = (share * posterior).sum(-2)
            parent_values = {p: group.states[p][:, 0] for p in parents}
            log_prior = mechanism.log_prob(naturals[node], group.states[node][:, 0], parent_values)
            model = _model_weights(points, pushed, torch.exp(log_prior), mechanism.space.width)
            term = divergence(points, points, pushed, model)
            found = term if found is None else found + term
    return found if found is not None else torch.zeros(1)


def _model_weights(points: Tensor, pushed: Tensor, conditional: Tensor, width: int) -> Tensor:
    """Weights of the family under the model, with its parents' weights taken from the posterior."""
    conditional = conditional.expand_as(pushed)
    parents = points[0, :, width:]
    if parents.shape[-1] == 0:
        copies = pushed.shape[-1] / width
        return conditional / copies
    same = (parents.unsqueeze(0) == parents.unsqueeze(1)).all(-1).to(pushed)  # (S, S)
    parent_mass = pushed @ same
    inside = conditional @ same
    return parent_mass * conditional / inside


def direct_term(
    structure: Structure, naturals: Naturals, measure: Measure, features: FittedFeatures, kappa: float
) -> LossTerms:
    """The left side of Theorem 1: data against the model in observed space."""
    distance = kappa * features.distance(mean_features(structure, naturals, measure, features))
    return LossTerms.of(distance, direct=distance)
