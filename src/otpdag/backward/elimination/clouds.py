r"""Points for an unknown vector that is not linear and normal with all that depends on it.

In each row the points are those of one fixed set b, moved to the posterior's mean and stretched to its covariance,
:math:`x = c + L b`: a grid over two or three coordinates, quasi-random normal points with their importance weights over
more. Where the posterior is normal both are exact to many digits; the coordinates of a vector are one variable of the
sums, so that what is seen of other nodes costs nothing more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from otpdag.backward.elimination.points import Points

__all__ = ["Cloud", "cloud_size"]

GRID_DIMENSIONS = 3  # up to which a grid has enough points along each axis
DISTANCE = 1.0  # of grid points, in posterior standard deviations
EDGE = 0.02  # probability of all outermost points beyond that of a normal posterior on the smallest grid
WIDEN = 2.0  # times a spread whose outermost points count: posteriors far out are reached in a few rounds
LEAST_CHANGE, MOST_CHANGE = (
    0.3,
    3.0,
)  # change of a spread in one round: what lies between the points shows itself only later
CLOSE = 0.3  # change of mean or covariance, in units of the spread, below which points stay


def cloud_size(dim: int, points: int) -> int:
    """Number of points of a vector: a full grid, or all of them.

    >>> cloud_size(2, 512), cloud_size(3, 512), cloud_size(5, 512)
    (484, 512, 512)
    """
    return round(_along(dim, points) ** dim) if dim <= GRID_DIMENSIONS else points


def _along(dim: int, points: int) -> int:
    return int(points ** (1 / dim) + 1e-9)


@lru_cache(maxsize=32)
def _base(dim: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Points (P, dim), logarithms of the volumes that they stand for (P,), and which of them are outermost (P,)."""
    if dim > GRID_DIMENSIONS:
        uniform = torch.quasirandom.SobolEngine(dim).draw(size + 1, dtype=torch.float64)[1:]
        points = torch.special.ndtri(uniform)
        density = -0.5 * points.square().sum(-1) - 0.5 * dim * math.log(2 * math.pi)
        return points, -density - math.log(size), torch.zeros(size, dtype=torch.bool)
    many = round(size ** (1 / dim))
    line = DISTANCE * (torch.arange(many, dtype=torch.float64) - (many - 1) / 2)
    points = torch.cartesian_prod(*[line] * dim).reshape(-1, dim)
    volume = torch.full((len(points),), dim * math.log(DISTANCE), dtype=torch.float64)
    return points, volume, (points.abs() >= line[-1] - 1e-9).any(-1)


@dataclass(frozen=True)
class Cloud:
    """Where the points of one vector lie, in each row in which it is unknown.

    Attributes:
        node: The node.
        rows: The rows (n,).
        size: Number of points P.
        centre: Their middle (1 or R, n, dim).
        factor: What they are stretched by (1 or R, n, dim, dim).

    >>> one = torch.ones(1, 1, 2, dtype=torch.float64)
    >>> cloud = Cloud("x", torch.zeros(1, dtype=torch.long), 484, one, torch.diag_embed(0.5 * one))
    >>> density = torch.distributions.Normal(1.0, 0.5).log_prob(cloud.points().values).sum(-1)
    >>> round(float((density + cloud.points().log_length).exp().sum()), 6)
    1.0
    """

    node: str
    rows: Tensor
    size: int
    centre: Tensor
    factor: Tensor

    @property
    def dim(self) -> int:
        """Coordinates of the vector."""
        return self.centre.shape[-1]

    def at(self, rows: Tensor, places: Tensor) -> Cloud:
        """The same for some of the rows."""
        return replace(self, rows=rows, centre=self.centre[:, places], factor=self.factor[:, places])

    def points(self) -> Points:
        """The points in every row: values (R, n, P, dim)."""
        base, volume, _ = _base(self.dim, self.size)
        values = self.centre.unsqueeze(-2) + base @ self.factor.mT
        log_determinant = torch.log(self.factor.diagonal(dim1=-2, dim2=-1).abs()).sum(-1, keepdim=True)
        return Points(values, volume + log_determinant)

    def moved(self, belief: Tensor, widened: Tensor | None = None) -> tuple[Cloud, Tensor, bool]:
        """Move the points to the mean and covariance of a belief (R, n, P), as :meth:`Placement.moved` does."""
        base, _, outermost = _base(self.dim, self.size)
        known = belief.sum(-1) > 0.5
        mean = belief @ base
        gap = base - mean.unsqueeze(-2)
        values, vectors = torch.linalg.eigh((belief.unsqueeze(-1) * gap).mT @ gap)
        spread = values.clamp(min=0).sqrt().clamp(LEAST_CHANGE, MOST_CHANGE)
        at_edge = known & ((belief * outermost).sum(-1) > EDGE)
        widened = at_edge if widened is None else widened | at_edge
        spread = torch.where(widened.unsqueeze(-1), spread.clamp(min=1.0), spread)
        spread = torch.where(at_edge.unsqueeze(-1), WIDEN * spread, spread)
        close = (mean.abs().amax(-1) < CLOSE) & ((spread - 1).abs().amax(-1) < CLOSE)
        change = torch.linalg.cholesky((vectors * spread.square().unsqueeze(-2)) @ vectors.mT)
        eye = torch.eye(self.dim).to(change)
        factor = self.factor @ torch.where(known[..., None, None], change, eye)
        mean = mean * known.to(mean).unsqueeze(-1)
        centre = self.centre + (self.factor @ mean.unsqueeze(-1)).squeeze(-1)
        return replace(self, centre=centre, factor=factor), widened, bool((close | ~known).all())

    def jittered(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Values (n, draws, dim) of drawn points; of a grid, each anywhere in the stretch that it stands for."""
        base, _, _ = _base(self.dim, self.size)
        drawn = base[states]
        if self.dim <= GRID_DIMENSIONS:
            drawn = drawn + DISTANCE * (torch.rand(drawn.shape, generator=generator, dtype=drawn.dtype) - 0.5)
        return self.centre[0].unsqueeze(1) + drawn @ self.factor[0].mT
