r"""The fixed point of a map that is slow to evaluate, by Anderson's mixing.

Going from :math:`x` to :math:`g(x)` again and again converges as slowly as the map contracts: of completed data by the
share of information that is missing. Anderson's mixing combines the last few images so that what is left of
:math:`g(x) - x` becomes least, which a linear map of few slow directions makes zero (Walker and Ni, 2011, SIAM J.
Numer. Anal. 49).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.anderson import correction

__all__ = ["FixedPoint"]

DEPTH = 5  # images that are combined
FURTHEST = 50.0  # steps of the map that a combination may go beyond its image


@dataclass(frozen=True)
class FixedPoint:
    """Points (R, P) at which a map was or is being evaluated, and their images, the newest last.

    >>> slope = torch.tensor([[0.9, 0.2], [0.0, 0.5]], dtype=torch.float64)
    >>> known = FixedPoint().at(torch.ones(1, 2, dtype=torch.float64))
    >>> for _ in range(4):
    ...     known = known.with_image(known.begin @ slope.T + 1)
    ...     known = known.at(known.best())
    >>> torch.allclose(known.begin, torch.linalg.solve(torch.eye(2).double() - slope, torch.ones(2).double()))
    True
    """

    points: tuple[Tensor, ...] = ()
    images: tuple[Tensor, ...] = ()

    @property
    def begin(self) -> Tensor:
        """The point that the map is being evaluated at."""
        return self.points[-1]

    def at(self, point: Tensor) -> FixedPoint:
        """The map is evaluated at another point."""
        return FixedPoint((*self.points, point)[-DEPTH:], self.images[-DEPTH + 1 :])

    def with_image(self, image: Tensor) -> FixedPoint:
        """The image of the last point is known."""
        return FixedPoint(tuple(point.expand_as(image) for point in self.points), (*self.images, image))

    def best(self) -> Tensor:
        """Where to go next (R, P): the last image, corrected by the others; just the image where that goes too far."""
        images = torch.stack(self.images)
        left = images - torch.stack(self.points)
        if len(images) == 1:
            return images[-1]
        moves = torch.stack(self.points).diff(dim=0).transpose(0, 1)
        step = correction(left[-1], moves, left.diff(dim=0).transpose(0, 1))
        usable = torch.isfinite(step).all(-1) & (step.norm(dim=-1) <= FURTHEST * left[-1].norm(dim=-1))
        return torch.where(usable.unsqueeze(-1), images[-1] - step, images[-1])
