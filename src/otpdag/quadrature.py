"""Points and weights that stand for noise in a mean over it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["quadrature"]

_REACH = 5.5  # standard deviations; beyond them lies less than 4e-8 of the normal


def quadrature(kind: str, points: int) -> tuple[Tensor, Tensor]:
    """Points and log-weights of a rule for E f(u): trapezoids over the normal, midpoints over the uniform.

    Args:
        kind: ``"normal"`` for standard normal noise u, anything else for uniform noise from 0 to 1.
        points: How many points.

    Returns:
        The points and the logarithms of their weights, which sum to one.

    >>> u, log_w = quadrature("normal", 48)
    >>> round(float((log_w.exp() * u**2).sum()), 6)
    1.0
    """
    if kind == "normal":
        nodes = torch.linspace(-_REACH, _REACH, points, dtype=torch.float64)
        log_weight = -0.5 * nodes**2
        return nodes, log_weight - torch.logsumexp(log_weight, 0)
    nodes = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    return nodes, torch.full((points,), -math.log(points), dtype=torch.float64)
