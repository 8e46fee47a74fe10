r"""Lengths of directions by what they tell about the parameters.

The cost along a direction is in proportion to its length. Near the truth, what minimises

.. math:: \sum_k w_k \int |F_k(t) - G_{k,\theta}(t)| \, dt

is much like the regression of the rows' distribution functions :math:`F_k` on the derivatives :math:`A_k` of the
model's, whose covariance is known from the model alone,

.. math:: \text{Var}(\hat\theta) = \frac1n H^{-1} \text{Var}(\psi) H^{-1}, \qquad
          H = \sum_k w_k \int A_k A_k^\top dt, \qquad
          \psi(x) = \sum_k w_k \int A_k(t) \, 1[x_k \le t] \, dt.

Lengths minimise its determinant, as designs of experiments do: other coordinates would have the same. How even they
are counts as much as one parameter's variance, or a few directions would stand for all.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from otpdag.numerics import Array


def informative_lengths(
    directions: Tensor, points: Tensor, weight: Tensor, moved: Tensor, log_moved: Tensor, few: int = 512
) -> Tensor:
    """Lengths (K,) of unit vectors (d, K), one on average; all are one where psi is not known.

    Args:
        directions: The vectors.
        points: Of the model (M, d), with weights (M,) that sum to one.
        weight: See ``points``.
        moved: How points move with the parameters (P, M, d).
        log_moved: How the logarithms of their weights do (P, M).
        few: Points at which psi is looked at; its variance is not known of more than a quarter as many parameters.
    """
    from scipy import optimize  # takes as long to import as pandas

    some = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:few]
    even = points.new_ones(directions.shape[1])
    if len(some) < 4 * len(moved) or not bool(moved.isfinite().all() & log_moved.isfinite().all()):
        return even
    bends, slopes = zip(*(_told(a, points, weight, moved, log_moved, some) for a in directions.mT), strict=True)
    values, vectors = torch.linalg.eigh(sum(bends))
    round_in = (vectors * values.rsqrt())[:, values > 1e-6 * values[-1]]
    bend = torch.einsum("pa,kpq,qb->kab", round_in, torch.stack(bends), round_in)
    slope = torch.stack(slopes) @ round_in * weight[some, None].sqrt()

    def loss(at: Array) -> tuple[float, Array]:
        logs = torch.as_tensor(at).requires_grad_()
        both = torch.einsum("k,kab->ab", logs.exp(), bend)
        psi = torch.einsum("k,kma->ma", logs.exp(), slope)
        own = torch.logdet(psi.mT @ psi) - 2 * torch.logdet(both) - logs.log_softmax(0).mean()
        return float(own.detach()), torch.autograd.grad(own, logs)[0].numpy()

    found = optimize.minimize(loss, np.zeros(len(even)), jac=True, method="L-BFGS-B", options={"maxiter": 20}).x
    lengths = len(even) * torch.as_tensor(found).to(even).softmax(0)
    return lengths if bool(lengths.isfinite().all()) else even


def _told(
    along: Tensor, points: Tensor, weight: Tensor, moved: Tensor, log_moved: Tensor, some: Tensor, cells: int = 24
) -> tuple[Tensor, Tensor]:
    """What one direction adds (P, P) to H, and to psi at some points (m, P); means over the cells between levels."""
    at = points @ along
    order = at.argsort()
    reached = torch.searchsorted(weight[order].cumsum(0), torch.linspace(0, 1, cells + 1).to(weight))
    lower, upper = at[order][reached.clamp(max=len(at) - 1)].unfold(0, 2, 1).unbind(1)
    width = upper - lower
    below = ((upper - at[:, None]) / width.clamp(min=1e-12)).clamp(0, 1)  # (M, cells), the mean of 1[x <= t]
    inside = ((at[:, None] > lower) & (at[:, None] < upper)) / width.clamp(min=1e-12)
    slope = (weight * log_moved) @ below - (weight * (moved @ along)) @ inside  # (P, cells)
    centred = below[some] - weight @ below
    return (slope * width) @ slope.mT, centred * width @ slope.mT
