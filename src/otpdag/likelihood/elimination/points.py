r"""How many points unknown numbers and counts need where they meet.

Numbers that meet are summed on products of their points, so each should have no more of them than its posterior asks
for. A count has one point for each whole number that is likely, a number a few, evenly spread over its posterior: at a
distance of h standard deviations the sum over a normal posterior errs by :math:`e^{-2 \pi^2 / h^2}`, and twelve points
are 1.1 apart. Correlated ones need more, which a comparison with finer points tells.

Points for unknown numbers and counts, in each row where the posterior is.

A number is summed on a grid over the real line (its logarithm if it is positive, its logit if it lies between zero and
one), which is even near the posterior's mean and opens towards its tails, so that few points serve skewed and heavy
ones too: :math:`x = c + s \sinh(\kappa t) / \kappa` for even t. Such sums of smooth densities are exact to many digits
once neighbours are less than a standard deviation apart: the error is of the order :math:`e^{-2 \pi^2 / h^2}` for a
distance h.

A count is summed over a window of whole numbers, and where that is wide over groups of them: by the middle of equal
groups, or, in a window that begins at zero, where counts may pile up, over groups that grow with the distance from
zero, by three points each that are exact for polynomials up to the fifth degree.

Centre and spread follow the model's own posterior at the parameters at hand, never the largest value that was seen.

Points for an unknown vector that is not linear and normal with all that depends on it.

In each row the points are those of one fixed set b, moved to the posterior's mean and stretched to its covariance,
:math:`x = c + L b`: a grid over two or three coordinates, quasi-random normal points with their importance weights over
more. Where the posterior is normal both are exact to many digits; the coordinates of a vector are one variable of the
sums, so that what is seen of other nodes costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from otpdag.likelihood.elimination.families import Ints
from otpdag.spaces import Real, Space

COARSE_POINTS = 12
"""Points of each number and count that meets others, until it is known where its posterior is."""
FINER, FINEST = 1.4, 2.0
"""Points of numbers that meet, over what the posterior asks for: to compare, and where that makes a difference."""
SHARE_OF_SMALLER = 0.9  # share of the rows that the smaller of two sizes is for
SIZES = np.array([6, 9, 12, 18, 24, 36, 48, 72, 96])  # that points are rounded up to, so that pieces share their sums
TAIL, TAIL_COUNTS = 4.8, 3  # half a window of counts: standard deviations, and more for skewed tails

Floats = npt.NDArray[np.float64]


def needed_points(placement: Placement | Cloud, by: float, most: int) -> Ints:
    """Number of points of each row (n,): what the posterior asks for, times ``by`` where it is a matter of distance.

    Args:
        placement: Where the posteriors are.
        by: Over twelve points of a number, or the most of a count with a wide posterior.
        most: Points of a count that has more likely values than these.

    >>> from otpdag.spaces import Count
    >>> one = torch.ones(1, 2, dtype=torch.float64)
    >>> rows, means = torch.arange(2), torch.tensor([[2.0, 90.0]]).double()
    >>> needed_points(Placement("x", Count(), rows, 12, means, means.sqrt()), 1.0, 48).tolist()
    [12, 48]
    """
    rows = len(placement.rows)
    if isinstance(placement, Cloud):
        return np.full(rows, placement.size)
    if not placement.space.is_countable:
        return _rounded(np.full(rows, COARSE_POINTS * by))
    reach = TAIL * placement.spread + TAIL_COUNTS
    width = torch.minimum(2 * reach, placement.centre + reach).amax(0).numpy()
    return _rounded(np.where(width <= most, width, most * by))


def _rounded(wanted: Floats) -> Ints:
    at = np.searchsorted(SIZES, wanted - 1e-6).clip(max=len(SIZES) - 1)
    return np.asarray(SIZES[at], dtype=np.int64)


def two_sizes(needed: Ints) -> Ints:
    """Numbers of points, each raised to one of two, that of most rows or the largest: so that sums are shared.

    >>> two_sizes(np.array([9, 12] * 9 + [18, 36])).tolist() == [12] * 18 + [36, 36]
    True
    """
    usual = np.quantile(needed, SHARE_OF_SMALLER, method="inverted_cdf")
    return np.where(needed <= usual, usual, needed.max()).astype(np.int64)


def with_points(placement: Placement | Cloud, rows: Ints, places: Ints, size: int) -> Placement | Cloud:
    """Some rows of a placement with another number of points."""
    some = placement.at(torch.from_numpy(rows), torch.from_numpy(places))
    return some if isinstance(some, Cloud) else replace(some, size=size)


def joined(parts: Sequence[Placement | Cloud]) -> Placement | Cloud:
    """Placements of one node side by side."""
    first, rows = parts[0], torch.cat([part.rows for part in parts])
    centre = torch.cat([part.centre for part in parts], 1)
    if isinstance(first, Cloud):
        factors = [part.factor for part in parts if isinstance(part, Cloud)]
        known = [part.free for part in parts if isinstance(part, Cloud) and part.free is not None]
        free = torch.cat(known) if known else None
        return replace(first, rows=rows, centre=centre, factor=torch.cat(factors, 1), free=free)
    spreads = [part.spread for part in parts if isinstance(part, Placement)]
    return replace(first, rows=rows, centre=centre, spread=torch.cat(spreads, 1))


GRID_REACH = 6.3  # if it were even, in posterior standard deviations: 24 points are 0.55 apart near the mean
OPENING = 0.35  # kappa: the outermost points lie 13 standard deviations from the mean
COUNT_REACH = 5.0  # half the window of a count, in posterior standard deviations
EDGE = 1e-5  # probability of an outermost point that says that the window is too narrow
OUTSIDE = 1e-2  # the same, where the posterior must lie elsewhere
WIDEN, JUMP = 1.4, 4.0  # by how much it is widened then
TIGHT = 0.75  # a posterior narrower than this share of the spread deserves points that are closer
SMALLEST_SPREAD = 1e-9  # of points, so that rounding keeps them apart
POINTS_OF_A_GROUP = 3  # Gauss's rule: three points have the moments of all counts of a group up to the fifth
HALVINGS = 40  # of the interval in which the growth of groups is sought


@dataclass(frozen=True)
class Points:
    """Values (R, n, P, 1) with the logarithms of the lengths that they stand for (R, n, P)."""

    values: Tensor
    log_length: Tensor


@dataclass(frozen=True)
class Placement:
    """Where the points of one node lie, in each row in which it is unknown.

    Attributes:
        node: The node.
        space: What its values may be.
        rows: The rows (n,).
        size: Number of points P.
        centre: Their middle on the line (1 or R, n).
        spread: A standard deviation on the line (1 or R, n).

    >>> from otpdag.spaces import Real
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> placed = Placement("x", Real(), torch.zeros(1, dtype=torch.long), 24, 3 * one, 0.5 * one).points()
    >>> density = torch.distributions.Normal(3.0, 0.5).log_prob(placed.values[..., 0])
    >>> round(float((density + placed.log_length).exp().sum()), 9)
    1.0
    """

    node: str
    space: Space
    rows: Tensor
    size: int
    centre: Tensor
    spread: Tensor

    def points(self) -> Points:
        """The points in every row."""
        if self.space.is_countable:
            return self._counts
        line, log_stretch = self._opened(self._even())
        values, log_slope = self.space.constrain(line)
        return Points(values.unsqueeze(-1), (math.log(self._distance) + log_stretch + log_slope).expand_as(values))

    def _even(self) -> Tensor:
        """Even points around zero (P,)."""
        return self._distance * (torch.arange(self.size).to(self.centre) - (self.size - 1) / 2)

    @property
    def _distance(self) -> float:
        return 2 * GRID_REACH / (self.size - 1)

    def _opened(self, even: Tensor) -> tuple[Tensor, Tensor]:
        """Even points on the line, and the logarithm of how far they are stretched: (R, n, ...)."""
        spread = self.spread.unsqueeze(-1)
        line = self.centre.unsqueeze(-1) + spread * torch.sinh(OPENING * even) / OPENING
        return line, torch.log(spread * torch.cosh(OPENING * even))

    @cached_property
    def _counts(self) -> Points:
        """Whole numbers, or points that stand for groups of them."""
        first, stride = self._window()
        even = first + stride * torch.arange(self.size).to(first) + (stride - 1) / 2
        if self.size % POINTS_OF_A_GROUP:
            return Points(even.unsqueeze(-1), torch.log(stride).expand_as(even))
        at_zero = ((first == 0) & (stride > 1)).squeeze(-1)
        values, length = even, stride.expand_as(even)
        if bool(at_zero.any()):
            windows, which = torch.unique(self.size * stride.squeeze(-1)[at_zero], return_inverse=True)
            made = _growing_groups(windows.cpu().numpy(), self.size // POINTS_OF_A_GROUP)
            grouped, lengths = (torch.from_numpy(one).to(even) for one in made)
            values, length = values.clone(), length.clone()
            values[at_zero], length[at_zero] = grouped[which], lengths[which]
        return Points(values.unsqueeze(-1), torch.log(length))

    def at(self, rows: Tensor, places: Tensor) -> Placement:
        """The same for some of the rows."""
        return replace(self, rows=rows, centre=self.centre[:, places], spread=self.spread[:, places])

    def line(self) -> Tensor:
        """The points on the line (R, n, P)."""
        return self._counts.values[..., 0] if self.space.is_countable else self._opened(self._even())[0]

    def moved(self, belief: Tensor, widened: Tensor | None = None) -> tuple[Placement, Tensor, bool]:
        """Place the points around the mean of a belief.

        A window that the posterior reaches beyond is widened, one that is too wide is tightened.

        Args:
            belief: Probabilities of the points (R, n, P).
            widened: Rows whose window was widened a little before (R, n): they are not tightened, or would go back and
                forth.

        Returns:
            The placement, the rows whose window was ever widened, and whether no window was changed.
        """
        line = self.line()
        mean = (belief * line).sum(-1)
        spread = (belief * (line - mean.unsqueeze(-1)) ** 2).sum(-1).sqrt()
        known = belief.sum(-1) > 0.5  # a row that the model rules out has no belief
        old = self.spread.expand_as(spread)
        # a posterior that falls between two points shows no spread: approach it step by step
        gap = line[..., 1] - line[..., 0] if self.space.is_countable else self._distance * old
        narrow = torch.maximum(spread, 0.5 * gap)
        at_edge, outside = known & self._at_edge(belief, EDGE), known & self._at_edge(belief, OUTSIDE)
        light = at_edge & ~outside
        widened = light if widened is None else widened | light
        tight = known & ~widened & ~at_edge & (narrow < TIGHT * old)
        if self.space.is_countable:
            tight = tight & (self._window()[1][..., 0] > 1)  # one by one is close enough
        wider = torch.where(outside, JUMP, WIDEN) * old
        new = torch.where(at_edge, torch.maximum(spread, wider), torch.where(known & ~widened, narrow, old))
        centre = torch.where(known, mean, self.centre.expand_as(mean))
        settled = not bool((at_edge | tight).any())
        return replace(self, centre=centre, spread=new.clamp(min=SMALLEST_SPREAD)), widened, settled

    def _at_edge(self, belief: Tensor, mass: float) -> Tensor:
        """Rows whose posterior reaches beyond the points; a count cannot fall below zero."""
        low, high = belief[..., 0] > mass, belief[..., -1] > mass
        if self.space.is_countable:
            low = low & (self._window()[0][..., 0] > 0)
        return low | high

    @property
    def grouped(self) -> float:
        """The share of rows whose points stand for several counts each."""
        return float((self._window()[1] > 1).double().mean()) if self.space.is_countable else 0.0

    def _window(self) -> tuple[Tensor, Tensor]:
        """The smallest count of the window and the number of counts that each point stands for (R, n, 1)."""
        reach = torch.ceil(COUNT_REACH * self.spread).unsqueeze(-1)
        middle = torch.round(self.centre).unsqueeze(-1)
        stride = torch.ceil((middle + reach + 1 - (middle - reach).clamp(min=0)) / self.size)
        return (middle - torch.floor(stride * self.size / 2)).clamp(min=0), stride

    def jittered(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Values (n, draws, 1) of drawn points, each anywhere in the stretch that it stands for."""
        uniform = torch.rand(states.shape, generator=generator, dtype=self.centre.dtype) - 0.5
        if self.space.is_countable:
            values = self._counts
            value = values.values[0, :, :, 0].gather(1, states)
            length = values.log_length[0].exp().gather(1, states)
            return torch.round(value + uniform * (length - 1)).clamp(min=0).unsqueeze(-1)
        line, _ = self._opened(self._even()[states] + self._distance * uniform)
        return self.space.constrain(line[0])[0].unsqueeze(-1)


def _growing_groups(window: Floats, groups: int) -> tuple[Floats, Floats]:
    """Three points in each of several groups of whole numbers from zero up, and how many numbers each stands for.

    The first group has three numbers, the others grow by a common ratio until the ``window`` (n,) is full. The points
    of a group of s numbers have their moments up to the fifth: for s = 3 they are the numbers themselves.
    """
    number = np.arange(groups + 1, dtype=np.float64)

    def ends(ratio: Floats, number: Floats | float) -> Floats:
        """Where groups end if they grow by this ratio: sums of a geometric series."""
        grown: Floats = np.power(ratio, number)
        return POINTS_OF_A_GROUP * (grown - 1) / (ratio - 1)

    low, high = np.full_like(window, 1 + 1e-9), 2.0 + window ** (1 / max(groups - 1, 1))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        short = ends(middle, groups) < window
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    bounds = np.round(ends(high[:, None], number))
    size = np.maximum(bounds[:, 1:] - bounds[:, :-1], POINTS_OF_A_GROUP)
    away = np.sqrt((3 * size**2 - 7) / 20)
    share = (size**2 - 1) / (24 * away**2)
    centre = bounds[:, :-1] + (size - 1) / 2
    values = np.stack([centre - away, centre, centre + away], -1)
    length = np.stack([share * size, (1 - 2 * share) * size, share * size], -1)
    return values.reshape(len(window), -1), length.reshape(len(window), -1)


def to_line(value: Tensor, space: Space) -> Tensor:
    """Values on the line on which points are placed: counts as they are, others without constraints."""
    return value if space.is_countable else space.unconstrain(value)


GRID_DIMENSIONS = 3  # up to which a grid has enough points along each axis
DISTANCE = 1.0  # of grid points, in posterior standard deviations
CLOUD_EDGE = 0.02  # probability of all outermost points beyond that of a normal posterior on the smallest grid
CLOUD_WIDEN = 2.0  # times a spread whose outermost points count: posteriors far out are reached in a few rounds
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
        centre: Their middle on the line, coordinate by coordinate (1 or R, n, dim).
        factor: What they are stretched by (1 or R, n, dim, dim).
        space: What its values may be.
        free: Coordinates that are not seen (n, dim), if some rows show some: there the points have what is seen, and
            the axis that this leaves over is integrated out as noise.

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
    space: Space = Real()  # noqa: RUF009  (spaces are values)
    free: Tensor | None = None

    @property
    def dim(self) -> int:
        """Coordinates of the vector."""
        return self.centre.shape[-1]

    def at(self, rows: Tensor, places: Tensor) -> Cloud:
        """The same for some of the rows."""
        free = None if self.free is None else self.free[places]
        return replace(self, rows=rows, centre=self.centre[:, places], factor=self.factor[:, places], free=free)

    def points(self) -> Points:
        """The points in every row: values (R, n, P, width)."""
        base, volume, _ = _base(self.dim, self.size)
        values, log_slope = self.space.constrain(self.centre.unsqueeze(-2) + base @ self.factor.mT)
        log_stretch = torch.log(self.factor.diagonal(dim1=-2, dim2=-1).abs()).unsqueeze(-2) + log_slope
        if self.free is not None:
            log_normal = -0.5 * base.square() - 0.5 * math.log(2 * math.pi)
            log_stretch = torch.where(self.free.unsqueeze(-2), log_stretch, log_normal)
        return Points(values, volume + log_stretch.sum(-1))

    def moved(self, belief: Tensor, widened: Tensor | None = None) -> tuple[Cloud, Tensor, bool]:
        """Move the points to the mean and covariance of a belief (R, n, P), as :meth:`Placement.moved` does."""
        base, _, outermost = _base(self.dim, self.size)
        known = belief.sum(-1) > 0.5
        mean = belief @ base
        gap = base - mean.unsqueeze(-2)
        values, vectors = torch.linalg.eigh((belief.unsqueeze(-1) * gap).mT @ gap)
        spread = values.clamp(min=0).sqrt().clamp(LEAST_CHANGE, MOST_CHANGE)
        at_edge = known & ((belief * outermost).sum(-1) > CLOUD_EDGE)
        widened = at_edge if widened is None else widened | at_edge
        spread = torch.where(widened.unsqueeze(-1), spread.clamp(min=1.0), spread)
        spread = torch.where(at_edge.unsqueeze(-1), CLOUD_WIDEN * spread, spread)
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
        return self.space.constrain(self.centre[0].unsqueeze(1) + drawn @ self.factor[0].mT)[0]
