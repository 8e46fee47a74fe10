r"""The push-forward term of hidden categories: what rows say of them must look like the model's own.

.. math:: D\Bigl(\sum_i w_i\, \phi(z, pa(z) \mid x_i),\;
          \sum_i w_i\, \phi(pa(z) \mid x_i)\, P_\theta(z \mid pa(z))\Bigr)

for each family of categories whose node is hidden; the parents' weights are those of the posterior, pooled over rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from otpdag.divergences.base import AbstractDivergence
from otpdag.likelihood.elimination.evidence import family_beliefs, total_evidence
from otpdag.likelihood.elimination.families import FamilyView
from otpdag.likelihood.elimination.layout import Layout
from otpdag.likelihood.elimination.sums import Tempering
from otpdag.numerics import joint_one_hot
from otpdag.structure import Naturals, Structure


def pushed_nodes(structure: Structure) -> tuple[str, ...]:
    """Hidden categories whose parents are categories, and of which some observed node tells."""
    graph, mechanisms = structure.graph, structure.mechanisms
    return tuple(
        node
        for node in graph.nodes
        if node in graph.hidden
        and graph.observed_descendants(node)
        and all(mechanisms[member].space.is_discrete for member in (node, *graph.parents(node)))
    )


def push_forward(
    naturals: Naturals, layout: Layout, weight: Tensor, tempering: Tempering, divergence: AbstractDivergence
) -> Tensor:
    r"""The sum over all families (R,), with its gradient in the parameters.

    Expected counts n are the derivative of the evidence by a family's log-table T, so that along the slope v of the
    divergence in them

    .. math:: v^\top \frac{\partial n}{\partial \theta}
              = \frac{\partial}{\partial t} \frac{\partial \log Z(T + t v)}{\partial \theta} ,

    which two evaluations on both sides of zero tell. The cheapest states (eps = 0) do not change with parameters.

    Args:
        naturals: Parameters (R, ...).
        layout: Rows, laid out with ``keep`` of the :func:`pushed_nodes`.
        weight: Row weights (1 or R, N).
        tempering: How likelihood and prior are weighed against each other.
        divergence: What compares the two.
    """
    names = pushed_nodes(layout.structure)
    families = {family.place: family for family in layout.families if family.node in names}
    if not families:
        return weight.new_zeros(1)
    with torch.no_grad():
        counts = family_beliefs(naturals, layout, weight, tempering, tuple(families))
    value, slopes = _divergences(naturals, families, counts, _on_weights(divergence))
    steepest = max((float(slope.abs().max()) for slope in slopes.values()), default=0.0)
    if tempering.best or not torch.is_grad_enabled() or not steepest:
        return value
    step = 1e-4 / steepest  # by which log-tables are tilted at most: errors of step and rounding are 1e-8
    up, down = (
        total_evidence(naturals, layout, weight, replace(tempering, tilt={n: by * v for n, v in slopes.items()}))
        for by in (step, -step)
    )
    along = (up - down) / (2 * step)
    return value + along - along.detach()


def _divergences(
    naturals: Naturals, families: Mapping[int, FamilyView], counts: Mapping[int, Tensor], divergence: AbstractDivergence
) -> tuple[Tensor, dict[int, Tensor]]:
    """The sum of all families' divergences (R,), and its slopes in the counts (R, *parents, states)."""
    with torch.enable_grad():
        leaves = {place: count.requires_grad_() for place, count in counts.items()}
        value = next(iter(counts.values())).new_zeros(1)
        for place, pushed in leaves.items():
            family = families[place]
            points = torch.cat(joint_one_hot(family.widths), -1).unsqueeze(0).to(pushed)
            model = pushed.sum(-1, keepdim=True) * torch.exp(family.log_table(naturals[family.node]))
            value = value + divergence(points, points, pushed.flatten(1), model.flatten(1))
        slopes = torch.autograd.grad(value.sum(), list(leaves.values()), retain_graph=True)
    return value, dict(zip(leaves, slopes, strict=True))


def _on_weights(divergence: AbstractDivergence) -> AbstractDivergence:
    """The divergence between distributions whose weights are exact: a correction for samples would be wrong."""
    if getattr(divergence, "unbiased", False):
        return replace(divergence, unbiased=False)  # type: ignore[type-var]
    return divergence
