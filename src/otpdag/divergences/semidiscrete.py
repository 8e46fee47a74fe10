"""Transport between a sample and weighted atoms, by its semi-dual: for samples that come in small batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.layers import nearest

__all__ = ["SemiDual", "reverse_gradient", "semi_dual"]


@dataclass(frozen=True)
class SemiDual:
    """The semi-dual of transport problems at given potentials.

    Attributes:
        assignment: The atom that each point is sent to, (R, N).
        value: The dual's value without the transported costs, ``<b, g> - mean g[assignment]``, (R,); its gradient in
            the potentials is ``b`` minus the share of the points that each atom gets, and in ``b`` the potentials.
    """

    assignment: Tensor
    value: Tensor


def semi_dual(costs: Tensor, b: Tensor, g: Tensor) -> SemiDual:
    r"""Evaluate the semi-dual of optimal transport at potentials of the atoms.

    .. math:: W(P, \textstyle\sum_k b_k \delta_{y_k})
              = \max_g \; \langle b, g \rangle + E_{x \sim P} \min_k \{c(x, y_k) - g_k\}

    (Genevay et al. 2016, https://arxiv.org/abs/1605.08527). The expectation is over all data, so that potentials which
    are kept from batch to batch and ascend its stochastic gradient make the atoms' weights hold over the data set,
    where solving each batch on its own would hold them in every batch.

    Args:
        costs: Costs of all pairs (R, N, K); not differentiated.
        b: Weights of the atoms, (R, K) or (1, K), that sum to one.
        g: Potentials, the same.

    Returns:
        Assignment and value. Add the mean cost of the assigned pairs, evaluated differentiably, for the whole.

    Example:
        >>> costs = torch.tensor([[[0.0, 1.0], [0.2, 1.0]]])  # both points are nearer to the first atom
        >>> b = torch.tensor([[0.5, 0.5]])
        >>> semi_dual(costs, b, torch.tensor([[0.0, 0.9]])).assignment
        tensor([[0, 1]])
    """
    with torch.no_grad():
        assignment = nearest(costs - g.unsqueeze(-2))
        share = torch.zeros(assignment.shape[0], costs.shape[-1]).to(costs)
        share.scatter_add_(1, assignment, torch.full_like(assignment, 1, dtype=costs.dtype))
        share /= assignment.shape[-1]
    value = (b * g.detach()).sum(-1) + ((b.detach() - share) * g).sum(-1) - (b * g).sum(-1).detach()
    return SemiDual(assignment, value)


def reverse_gradient(value: Tensor) -> Tensor:
    """The same value with the opposite gradient: what it multiplies is ascended while the rest descends."""
    return 2.0 * value.detach() - value
