r"""Unknown numbers that enter linearly, with normal noise: integrated out exactly.

Where unknown numbers are normal and linear in one another, and all that depends on them is normal and linear too, the
log-density of a row is a quadratic function of their noise :math:`u`, whatever the graph. A quadratic is known from its
values at a few points, so the graph is walked at those only, and

.. math:: \log \int e^{q(u)} N(u; 0, I) \, du = q(0) - \tfrac12 \log |A| + \tfrac12 g^\top A^{-1} g,
          \qquad A = I - \nabla^2 q, \; g = \nabla q(0),

takes the place of a sum over a grid or over draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otpdag.structure import Structure

__all__ = ["integrated", "is_quadratic", "stencil"]

MOST_NUMBERS = 16  # integrated together: a stencil has a point for each pair of them
LARGEST = 1e13  # a log-density beyond which the integral, a difference of two such numbers, is lost in rounding


def is_quadratic(
    structure: Structure, evaluated: Sequence[str], unknown: Sequence[str], numeric: Sequence[str]
) -> bool:
    """Whether the log-density of the ``evaluated`` nodes is quadratic in the noise of the ``numeric`` unknown ones."""
    mechanisms = structure.mechanisms
    dim = sum(mechanisms[node].noise.dim for node in numeric)
    if not 0 < dim <= MOST_NUMBERS or not all(mechanisms[node].is_linear for node in numeric):
        return False
    below = {child for node in numeric for child in structure.graph.children(node)}
    return all(
        mechanisms[node].is_linear if node in unknown else mechanisms[node].is_quadratic
        for node in evaluated
        if node in below
    )


def stencil(dim: int) -> Tensor:
    """Points (D, dim) that determine a quadratic function: the origin, both ends of each axis, sums of two axes.

    >>> stencil(2).tolist()
    [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0], [1.0, 1.0]]
    """
    axes = torch.eye(dim, dtype=torch.float64)
    first, second = torch.triu_indices(dim, dim, offset=1)
    return torch.cat([torch.zeros(1, dim, dtype=torch.float64), axes, -axes, axes[first] + axes[second]])


def integrated(prior: Tensor, likelihood: Tensor, eps: float, dim: int, *, split: bool) -> tuple[Tensor, Tensor]:
    r"""Log-weight and log-likelihood of each enumerated state, the numbers integrated out: (R, n, T).

    Both come in at the points of the :func:`stencil`, (R, n, T * D), states slowest. The sum
    ``prior + likelihood / eps`` of what is returned is the logarithm of the integral; its second part is the expected
    log-likelihood under the posterior of the numbers (for the history only, without gradients), or zero without
    ``split``.

    >>> u = stencil(1)[:, 0]
    >>> found, _ = integrated(torch.zeros(1, 1, 3), (-0.5 * (2.0 - u) ** 2).reshape(1, 1, 3), 1.0, 1, split=False)
    >>> round(float(found), 6), round(-0.5 * 2.0**2 / 2 - 0.5 * float(torch.tensor(2.0).log()), 6)
    (-1.346574, -1.346574)
    """
    points = 1 + 2 * dim + dim * (dim - 1) // 2
    prior, likelihood = (part.unflatten(-1, (-1, points)) for part in (prior, likelihood))
    joint = prior + likelihood / eps
    # a state that a row rules out stays ruled out, and must not spoil the gradients of others
    possible = torch.isfinite(joint).all(-1, keepdim=True)
    origin, slope, curvature = _coefficients(torch.where(possible, joint, 0.0), dim)
    factor = _factor(curvature)
    half = _solve(factor, slope.unsqueeze(-1), upper=False)
    log_determinant = 2 * torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1)
    whole = origin + 0.5 * half.square().sum((-2, -1)) - 0.5 * log_determinant
    # far from all sense (scales near zero) rounding alone could make a density large: such a point is ruled out
    known = possible[..., 0] & (origin.detach().abs() < LARGEST)
    whole = torch.where(known, whole, -torch.inf)
    if not split:
        return whole, torch.zeros_like(whole)
    with torch.no_grad():
        cost = _expected(torch.where(possible, likelihood, 0.0), dim, factor, half)
    return whole - cost / eps, cost


def _coefficients(values: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Value (...), gradient (..., dim) and negative Hessian (..., dim, dim) at the origin."""
    origin, plus, minus, sums = values.split([1, dim, dim, dim * (dim - 1) // 2], -1)
    value, slope, bend = origin[..., 0], 0.5 * (plus - minus), 2 * origin - plus - minus
    if dim == 1:
        return value, slope, bend.unsqueeze(-1)
    first, second = torch.triu_indices(dim, dim, offset=1, device=values.device)
    crossed = plus[..., first] + plus[..., second] - origin - sums
    upper = torch.diag_embed(0.5 * bend)
    upper[..., first, second] = crossed
    return value, slope, upper + upper.mT


def _factor(curvature: Tensor) -> Tensor:
    """Cholesky factor of the posterior's precision; it is at least one in every direction but for rounding."""
    if curvature.shape[-1] == 1:
        return (1 + curvature.clamp(min=0)).sqrt()
    eye = torch.eye(curvature.shape[-1], dtype=curvature.dtype, device=curvature.device)
    factor, failed = torch.linalg.cholesky_ex(curvature + eye)
    return torch.where((failed > 0)[..., None, None], torch.nan, factor)


def _solve(factor: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    """Solve a triangular system; of single numbers by a division, which is many times faster."""
    return right / factor if factor.shape[-1] == 1 else torch.linalg.solve_triangular(factor, right, upper=upper)


def _expected(values: Tensor, dim: int, factor: Tensor, half: Tensor) -> Tensor:
    """Expectation of another quadratic under the posterior with this factor of its precision."""
    origin, slope, curvature = _coefficients(values, dim)
    mean = _solve(factor.mT, half, upper=True)
    covariance = torch.cholesky_inverse(factor) if dim > 1 else factor.square().reciprocal()
    second = covariance + mean @ mean.mT
    return origin + (slope * mean[..., 0]).sum(-1) - 0.5 * (curvature * second).sum((-2, -1))
