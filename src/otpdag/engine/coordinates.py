r"""Coordinates in which a loss is round, near a point.

A step of steepest descent in them is close to one of Newton's method or, where a problem's gradient holds what is
unknown fixed, to one of expectation-maximisation; L-BFGS has only to learn what that misses (Jamshidian and Jennrich,
1997). Directions in which the loss bends down count by the size of their curvature.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from otpdag.objective import Problem
from otpdag.threads import in_order

__all__ = ["Coordinates"]

MOST_CURVED = 200
"""Parameters up to which the curvature, one backward pass for each, costs less than it saves."""

FLATTEST = 1e-7
"""The smallest curvature, relative to the largest: flatter directions are as good as unknown."""


@dataclass(frozen=True)
class Coordinates:
    """``point = origin + matrix @ y``, or ``origin + scale * y``, or ``origin + y``."""

    origin: Tensor
    matrix: Tensor | None = None
    scale: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, points: Tensor) -> Coordinates:
        """Take the curvature at ``points`` (R, P), where the problem says that it pays."""
        size = points.shape[1]
        curved = problem.for_curvature(points) if 0 < size <= MOST_CURVED else None
        if curved is None:
            information = problem.information(points)
            return cls(points, scale=None if information is None else information.rsqrt())
        with torch.enable_grad():
            leaf = points.detach().clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(curved.loss(leaf).sum(), leaf, create_graph=True)
            second = partial(torch.autograd.grad, inputs=leaf, retain_graph=True)
            rows = [row for (row,) in in_order(partial(second, column.sum()) for column in gradient.unbind(-1))]
        curvature = torch.stack(rows, 1).detach()
        finite = curvature.isfinite().flatten(1).all(-1)[:, None, None]
        curvature = torch.where(finite, curvature, torch.eye(size).to(curvature))
        values, vectors = torch.linalg.eigh(0.5 * (curvature + curvature.transpose(1, 2)))
        level = values.abs().maximum(FLATTEST * values.abs().amax(-1, keepdim=True)).clamp(min=1e-30)
        # laid out like a matrix that was read from a file, so that a resumed run multiplies alike
        return cls(points, (vectors * level.rsqrt().unsqueeze(1)).contiguous())

    def point(self, y: Tensor) -> Tensor:
        """From these coordinates to parameters."""
        if self.matrix is None:
            return self.origin + (y if self.scale is None else self.scale * y)
        return self.origin + (self.matrix @ y.unsqueeze(-1)).squeeze(-1)
