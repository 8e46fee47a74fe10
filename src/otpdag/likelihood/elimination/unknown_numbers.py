r"""Unknown numbers and counts: on points that lie where the posterior is, or integrated out exactly.

**Points.** A number is summed on a grid over the real line (its logarithm if it is positive, its logit if it lies
between zero and one), which is even near the posterior's mean and opens towards its tails, so that few points serve
skewed and heavy ones too: :math:`x = c + s \sinh(\kappa t) / \kappa` for even t. Such sums of smooth densities are
exact to many digits once neighbours are less than a standard deviation apart: at a distance of h standard deviations
the error is of the order :math:`e^{-2 \pi^2 / h^2}`. A count is summed over a window of whole numbers, and where that
is wide over groups of them: by the middle of equal groups, or, in a window that begins at zero, where counts may pile
up, over groups that grow with the distance from zero, by three points each that are exact for polynomials up to the
fifth degree. A vector has the points of one fixed set b, moved to the posterior's mean and stretched to its covariance,
:math:`x = c + L b`: a grid over two or three coordinates, quasi-random normal points with their importance weights over
more. Its coordinates are one variable of the sums.

Centre and spread follow the model's own posterior at the parameters at hand, never the largest value that was seen.
Numbers that meet are summed on products of their points, so each should have no more of them than its posterior asks
for: a count one for each whole number that is likely, a number twelve, which are 1.1 standard deviations apart.
Correlated ones need more, which a comparison with finer points tells.

**Linear normal numbers.** A linear normal family is an equation: its noise :math:`u = a^\top q + u_0` is standard
normal, where q are the unknown numbers that it reads and :math:`u_0` comes from what is seen. A cluster of unknown
numbers has precision :math:`J = \sum a a^\top` and potential :math:`h = -\sum a u_0`, and

.. math:: \log \int \prod_v p_v \, dq = \tfrac{d}{2} \log 2\pi - \tfrac12 \log |J| + \tfrac12 h^\top J^{-1} h
          + \sum_v (\log c_v - \tfrac12 u_{0v}^2).

Clusters of the same number of unknowns are computed together, whatever nodes they are of. J depends on the kind of
piece and the categories alone, so it is computed once for all rows that share them. Unknown categories multiply the
integrals; unknown numbers or counts that are placed on points (y) stay, as the quadratic form that remains of them.

**Lines** :math:`\ell = W^\top q`, through which a generalised linear child reads the numbers, stay as well. They are
normal with mean :math:`W^\top m` and covariance :math:`S = W^\top C W`, where m and C are those of q, and given them

.. math:: E[q \mid \ell] = m + K (\ell - W^\top m), \qquad \mathrm{Cov}[q \mid \ell] = C - K S K^\top,
          \qquad K = C W S^{-1}.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from otpdag.likelihood.elimination.families import TableView, name_of
from otpdag.numerics import Array, Ints, cholesky
from otpdag.spaces import Real, Space

COARSE_POINTS = 12  # points of each number and count that meets others, until it is known where its posterior is
# points of numbers that meet, over what the posterior asks for: to compare, and where that makes a difference
FINER, FINEST = 1.4, 2.0
SHARE_OF_SMALLER = 0.9  # share of the rows that the smaller of two sizes is for
SIZES = np.array([6, 9, 12, 18, 24, 36, 48, 72, 96])  # that points are rounded up to, so that pieces share their sums
TAIL, TAIL_COUNTS = 4.8, 3  # half a window of counts: standard deviations, and more for skewed tails
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
GRID_DIMENSIONS = 3  # up to which a grid has enough points along each axis
DISTANCE = 1.0  # of grid points, in posterior standard deviations
CLOUD_EDGE = 0.02  # probability of all outermost points beyond that of a normal posterior on the smallest grid
CLOUD_WIDEN = 2.0  # times a spread whose outermost points count: posteriors far out are reached in a few rounds
LEAST_CHANGE, MOST_CHANGE = 0.3, 3.0  # of a spread in one round: what lies between points shows itself only later
CLOSE = 0.3  # change of mean or covariance, in units of the spread, below which points stay
HIDDEN_SPREAD = 2.0  # of a hidden number before the model says where it is
COUNT_CENTRE, COUNT_SPREAD = 5.0, 10.0  # of a hidden count
LINE_NOISE = 1e-10  # of a line's variance, so that lines that nearly coincide stay apart
GATHERED = 32  # dimension up to which every row gets its own copy of a covariance: one call for all of them


@dataclass(frozen=True)
class Points:
    """Values (R, n, P, 1) with the logarithms of the lengths that they stand for (R, n, P)."""

    values: Tensor
    log_length: Tensor


@dataclass(frozen=True)
class Placed(ABC):
    """Where the points of one node lie, in each row in which it is unknown.

    Attributes:
        node: The node.
        space: What its values may be.
        rows: The rows (n,).
        size: Number of points P.
        centre: Their middle on the line (1 or R, n), of a vector coordinate by coordinate (1 or R, n, dim).
        spread: A standard deviation on the line (1 or R, n), or what points are stretched by (1 or R, n, dim, dim).
        free: Coordinates of a vector that are not seen (n, dim), if some rows show some: there the points have what is
            seen, and the axis that this leaves over is integrated out as noise.
    """

    node: str
    space: Space
    rows: Tensor
    size: int
    centre: Tensor
    spread: Tensor
    free: Tensor | None = None

    @abstractmethod
    def points(self) -> Points:
        """The points in every row."""

    @abstractmethod
    def moved(self, belief: Tensor, widened: Tensor | None = None) -> tuple[Self, Tensor, bool]:
        """Place the points around the mean of a belief.

        A window that the posterior reaches beyond is widened, one that is too wide is tightened.

        Args:
            belief: Probabilities of the points (R, n, P).
            widened: Rows whose window was widened a little before (R, n): they are not tightened, or would go back and
                forth.

        Returns:
            The placement, the rows whose window was ever widened, and whether no window was changed.
        """

    @abstractmethod
    def jittered(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Values (n, draws, width) of drawn points, each anywhere in the stretch that it stands for."""

    def at(self, rows: Tensor, places: Tensor, size: int) -> Self:
        """The same for some of the rows, with so many points."""
        free = None if self.free is None else self.free[places]
        centre, spread = self.centre[:, places], self.spread[:, places]
        return replace(self, rows=rows, size=size, centre=centre, spread=spread, free=free)


def joined(parts: Sequence[Placed]) -> Placed:
    """Placements of one node side by side."""
    known = [part.free for part in parts if part.free is not None]
    return replace(
        parts[0],
        rows=torch.cat([part.rows for part in parts]),
        centre=torch.cat([part.centre for part in parts], 1),
        spread=torch.cat([part.spread for part in parts], 1),
        free=torch.cat(known) if known else None,
    )


def first_placement(table: TableView, place: int, rows: Tensor, size: int) -> Placed:
    """Points around a column's own mean, until the model says where they are; what is seen of a row stays."""
    if place >= len(table.families):
        name, width = name_of(place, table.families), place // len(table.families)
        zero, eye = torch.zeros(1, len(rows), width), torch.eye(width).expand(1, len(rows), -1, -1)
        return placed_lines(name, rows, size, zero.to(table.like), eye.to(table.like))
    family, seen = table.families[place], torch.from_numpy(table.seen[:, place])
    node, space = family.node, family.mechanism.space
    usual = (COUNT_CENTRE, COUNT_SPREAD) if space.is_countable else (0.0, HIDDEN_SPREAD)
    mean, spread = (torch.full((space.free_width,), one).to(table.like) for one in usual)
    if bool(seen.any()):
        column = _to_line(table.batch.values[node][0, seen], space)
        mean, spread = column.mean(0), column.std(0, correction=0).clamp(min=1e-6)
    if family.widths[-1] == 1:
        blank = torch.ones(1, len(rows)).to(table.like)
        return Placement(node, space, rows, size, mean * blank, spread * blank)
    centre, factor, free = mean.expand(1, len(rows), -1), torch.diag(spread).expand(1, len(rows), -1, -1), None
    if table.partly[:, place].any():
        free = ~table.batch.mask[node][0, rows]
        centre = torch.where(free, centre, space.unconstrain(table.batch.values[node][:, rows]))
        factor = factor * free.unsqueeze(-1)
    return Cloud(node, space, rows, size, centre, factor, free)


def placed_lines(name: str, rows: Tensor, size: int, centre: Tensor, covariance: Tensor) -> Placed:
    """Lines on points by means (1 or R, n, L) and covariances (1 or R, n, L, L)."""
    factor = torch.linalg.cholesky(covariance)
    if centre.shape[-1] == 1:
        return Placement(name, Real(), rows, size, centre[..., 0], factor[..., 0, 0])
    return Cloud(name, Real(), rows, size, centre, factor)


def _to_line(value: Tensor, space: Space) -> Tensor:
    """Values on the line on which points are placed: counts as they are, others without constraints."""
    return value if space.is_countable else space.unconstrain(value)


def needed_points(placement: Placed, by: float, most: int) -> Ints:
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


def _rounded(wanted: Array) -> Ints:
    at = np.searchsorted(SIZES, wanted - 1e-6).clip(max=len(SIZES) - 1)
    return np.asarray(SIZES[at], dtype=np.int64)


def two_sizes(needed: Ints) -> Ints:
    """Numbers of points, each raised to one of two, that of most rows or the largest: so that sums are shared.

    >>> two_sizes(np.array([9, 12] * 9 + [18, 36])).tolist() == [12] * 18 + [36, 36]
    True
    """
    usual = np.quantile(needed, SHARE_OF_SMALLER, method="inverted_cdf")
    return np.where(needed <= usual, usual, needed.max()).astype(np.int64)


@dataclass(frozen=True)
class Placement(Placed):
    """Points of a number on a grid, or of a count in a window of whole numbers.

    >>> from otpdag.spaces import Real
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> placed = Placement("x", Real(), torch.zeros(1, dtype=torch.long), 24, 3 * one, 0.5 * one).points()
    >>> density = torch.distributions.Normal(3.0, 0.5).log_prob(placed.values[..., 0])
    >>> round(float((density + placed.log_length).exp().sum()), 9)
    1.0
    """

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

    def line(self) -> Tensor:
        """The points on the line (R, n, P)."""
        return self._counts.values[..., 0] if self.space.is_countable else self._opened(self._even())[0]

    def moved(self, belief: Tensor, widened: Tensor | None = None) -> tuple[Placement, Tensor, bool]:
        """Place the points around the mean of a belief."""
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


def _growing_groups(window: Array, groups: int) -> tuple[Array, Array]:
    """Three points in each of several groups of whole numbers from zero up, and how many numbers each stands for.

    The first group has three numbers, the others grow by a common ratio until the ``window`` (n,) is full. The points
    of a group of s numbers have their moments up to the fifth: for s = 3 they are the numbers themselves.
    """
    number = np.arange(groups + 1, dtype=np.float64)

    def ends(ratio: Array, number: Array | float) -> Array:
        """Where groups end if they grow by this ratio: sums of a geometric series."""
        grown: Array = np.power(ratio, number)
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
class Cloud(Placed):
    """Points of a vector.

    >>> from otpdag.spaces import Real
    >>> one = torch.ones(1, 1, 2, dtype=torch.float64)
    >>> cloud = Cloud("x", Real(), torch.zeros(1, dtype=torch.long), 484, one, torch.diag_embed(0.5 * one))
    >>> density = torch.distributions.Normal(1.0, 0.5).log_prob(cloud.points().values).sum(-1)
    >>> round(float((density + cloud.points().log_length).exp().sum()), 6)
    1.0
    """

    @property
    def dim(self) -> int:
        """Coordinates of the vector."""
        return self.centre.shape[-1]

    def points(self) -> Points:
        """The points in every row: values (R, n, P, width)."""
        base, volume, _ = _base(self.dim, self.size)
        values, log_slope = self.space.constrain(self.centre.unsqueeze(-2) + base @ self.spread.mT)
        log_stretch = torch.log(self.spread.diagonal(dim1=-2, dim2=-1).abs()).unsqueeze(-2) + log_slope
        if self.free is not None:
            log_normal = -0.5 * base.square() - 0.5 * math.log(2 * math.pi)
            log_stretch = torch.where(self.free.unsqueeze(-2), log_stretch, log_normal)
        return Points(values, volume + log_stretch.sum(-1))

    def moved(self, belief: Tensor, widened: Tensor | None = None) -> tuple[Cloud, Tensor, bool]:
        """Move the points to the mean and covariance of a belief (R, n, P), as those of a number are."""
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
        factor = self.spread @ torch.where(known[..., None, None], change, eye)
        mean = mean * known.to(mean).unsqueeze(-1)
        centre = self.centre + (self.spread @ mean.unsqueeze(-1)).squeeze(-1)
        return replace(self, centre=centre, spread=factor), widened, bool((close | ~known).all())

    def jittered(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Values (n, draws, dim) of drawn points; of a grid, each anywhere in the stretch that it stands for."""
        base, _, _ = _base(self.dim, self.size)
        drawn = base[states]
        if self.dim <= GRID_DIMENSIONS:
            drawn = drawn + DISTANCE * (torch.rand(drawn.shape, generator=generator, dtype=drawn.dtype) - 0.5)
        return self.space.constrain(self.centre[0].unsqueeze(1) + drawn @ self.spread[0].mT)[0]


# -- linear normal numbers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Linear normal numbers that meet, with all factors that read them.

    Attributes:
        coordinates: What is integrated out: (node, coordinate).
        families: The factors.
        nodes: The unknown nodes of the piece.
        on_points: Those that have points of their own.
        members: Unknown categories on which coefficients depend, and numbers and counts on points that enter the
            factors, in the order of the axes of the table that remains.
        lines: Families that read the numbers through lines; all their lines are one member on points.
    """

    coordinates: tuple[tuple[int, int], ...]
    families: tuple[int, ...]
    nodes: tuple[int, ...]
    on_points: frozenset[int]
    members: tuple[int, ...]
    lines: tuple[int, ...]

    @property
    def categories(self) -> tuple[int, ...]:
        """The members that are categories."""
        return tuple(n for n in self.members if n not in self.on_points)

    @property
    def placed(self) -> tuple[int, ...]:
        """The members on points, lines last: their number is larger than that of any node."""
        placed = [n for n in self.members if n in self.on_points]
        last = max(placed, default=0)
        return tuple(sorted(placed, key=lambda n: n == last)) if self.lines else tuple(placed)

    @property
    def axes(self) -> tuple[int, ...]:
        """Order of the axes (categories, then those on points) in the table."""
        return tuple((*self.categories, *self.placed).index(n) for n in self.members)


@dataclass(frozen=True)
class Equations:
    """Coefficients of all linear families by configuration of their categories; the first row is empty.

    Attributes:
        coefficients: Noise from (own coordinates, numeric parents, 1): (R, rows, dim, W).
        constants: Logarithms of the densities' constants (R, rows).
        shift: What is subtracted from the columns before moments are taken (rows, W).
    """

    coefficients: Tensor
    constants: Tensor
    shift: Tensor


@dataclass(frozen=True, eq=False)
class LineColumns:
    """The lines of one family in some of the systems of a group.

    Attributes:
        place: The family.
        at: Which of the group's lines these are.
        instances: The systems (k,).
        config: Configuration of the family's categories, for each state (k, T).
        unknown: For each column which unknown it is, d for none (k, columns).
    """

    place: int
    at: slice
    instances: Tensor
    config: Tensor
    unknown: Tensor

    def slopes(self, slopes: Tensor, dim: int) -> Tensor:
        """Slopes (R, C, lines, columns) of the family by unknown (R, k, T, lines, d)."""
        own = slopes[:, self.config]
        index = self.unknown[None, :, None, None].expand_as(own)
        return own.new_zeros(*own.shape[:-1], dim + 1).scatter_add(-1, index, own)[..., :-1]


@dataclass(frozen=True, eq=False)
class LinearGroup:
    """Clusters with d unknown numbers each, of n pieces.

    Attributes:
        dim: d, the numbers that are integrated out.
        states: Sizes of the unknown categories, T states in all.
        axes: Order of the axes (categories, then placed numbers) in the table that remains.
        placed: For each placed number which points it is on in turn, and where the rows stand in their placements.
        sizes: The axes of the table.
        start: The first table's row in the bank of their size; the others follow.
        rows: Number of the row of each piece (n,).
        instance: Which of m distinct systems of equations a piece has (n,).
        config: Row of the equations for each state and family (m, T, F).
        unknown: For each column which unknown it is, d + b for none (m, F, W).
        seen: Whether the family's node is seen (m, F).
        values: Columns that are seen, zero for unknown ones (n, F, W).
        cells: Node and coordinate of each unknown (m, d, 2).
        around: Nodes of the categories and placed numbers (m, axes).
        lines: The lines among the placed numbers, which are the last of them.
    """

    dim: int
    states: tuple[int, ...]
    axes: tuple[int, ...]
    placed: tuple[tuple[tuple[tuple[int, int], Tensor], ...], ...]
    sizes: tuple[int, ...]
    start: int
    rows: Tensor
    instance: Tensor
    config: Tensor
    unknown: Tensor
    seen: Tensor
    values: Tensor
    cells: Tensor
    around: Tensor
    lines: tuple[LineColumns, ...] = field(default=(), kw_only=True)

    @property
    def line_count(self) -> int:
        """Lines of each cluster."""
        return max((one.at.stop for one in self.lines), default=0)

    @property
    def count(self) -> int:
        """Number of tables."""
        return len(self.rows)

    @property
    def elements(self) -> int:
        """Entries of the largest arrays, for the budget."""
        rows, families, width = self.values.shape
        per_row = families * width * (width + 2)
        return math.prod(self.states) * (rows * per_row + len(self.config) * self.dim**2)

    def coordinates(self) -> Iterator[tuple[Tensor, int, int, int]]:
        """Of each unknown number of each node the pieces (n,) that have it, its node, its cell, and its place."""
        cells = self.cells[self.instance]
        for coordinate in range(self.dim):
            for place, cell in cells[:, coordinate].unique(dim=0).tolist():
                yield (cells[:, coordinate] == torch.tensor([place, cell])).all(-1), place, cell, coordinate

    def integrate(
        self,
        equations: Equations,
        points: Sequence[Tensor],
        power: float = 1.0,
        slopes: Mapping[int, Tensor] | None = None,
    ) -> Integrals:
        """Integrate the clusters out of the product of their families, those of seen nodes to a power.

        Args:
            equations: Of all families.
            points: Values of the placed numbers (R, n, P, 1), and of lines (R, n, P, L).
            power: The power.
            slopes: Of the families that have lines (R, C, lines, columns).
        """
        b = len(points) - bool(self.lines)
        before = self._integrated(equations, points[:b], power)
        grid = _grid(points) if points else None
        if slopes is None or grid is None:
            return self._arranged(replace(before, grid=grid))
        lines = self.line_slopes(slopes)  # (R, m, T, L, d)
        spread = line_covariance(lines, before.covariance)
        back = torch.linalg.solve(spread, lines @ before.covariance).mT  # K, (R, m, T, d, L)
        own, mean = lines[:, self.instance], before.mean
        middle = (own @ mean.unsqueeze(-1)).squeeze(-1)
        drift = lines @ before.gain  # (R, m, T, L, b)
        gap = grid[:, :, None, :, b:] - middle.unsqueeze(-2)
        gap = gap + grid[:, :, None, :, :b] @ drift.mT[:, self.instance]
        table = before.table.repeat_interleave(grid.shape[2] // before.table.shape[3], -1)
        factor = torch.linalg.cholesky(spread)[:, self.instance]
        white = torch.linalg.solve_triangular(factor, gap.mT, upper=False)
        log_size = torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1) + 0.5 * self.line_count * math.log(2 * math.pi)
        table = table - 0.5 * white.square().sum(-2) - log_size.unsqueeze(-1)
        covariance = before.covariance - back @ spread @ back.mT
        mean = mean - (back[:, self.instance] @ middle.unsqueeze(-1)).squeeze(-1)
        gain = torch.cat([before.gain - back @ drift, -back], -1)
        after = Integrals(self, table, grid, covariance, mean, gain, before)
        return self._arranged(after)

    def line_slopes(self, slopes: Mapping[int, Tensor]) -> Tensor:
        """Slopes of all lines by unknown (R, m, T, L, d)."""
        total = self.values.new_zeros(
            max(map(len, slopes.values())), len(self.config), math.prod(self.states), self.line_count, self.dim
        )
        for one in self.lines:
            total[:, one.instances, :, one.at] = one.slopes(slopes[one.place], self.dim)
        return total

    def _integrated(self, equations: Equations, points: Sequence[Tensor], power: float) -> Integrals:
        """The same but for lines, with the table by joint points of placed numbers (R, n, T, G)."""
        d, instance = self.dim, self.instance
        scale = 1 + (math.sqrt(power) - 1) * self.seen.to(self.values)
        coefficients = equations.coefficients[:, self.config, :, : self.values.shape[-1]]
        coefficients = coefficients * scale[:, None, :, None, None]
        constants = (equations.constants[:, self.config] * scale.square().unsqueeze(1)).sum(-1)
        precision = self._precision(coefficients.mT @ coefficients)
        own = coefficients[:, instance]
        noise = (own @ self.values[:, None, :, :, None]).squeeze(-1)  # (R, n, T, F, dim)
        covariance, log_determinant = _inverse(precision[..., :d, :d])
        mean = _times(covariance, self._pull(noise, own)[..., :d], instance)
        # completed around that mean the square keeps digits that are lost far out
        rest = noise + (own @ self.columns(pad(mean, (0, len(self.placed)))).unsqueeze(-1)).squeeze(-1)
        pull = self._pull(rest, own)
        step = _times(covariance, pull[..., :d], instance)
        table = constants[:, instance] - 0.5 * rest.square().sum((-1, -2)) + 0.5 * (pull[..., :d] * step).sum(-1)
        table = (table - 0.5 * log_determinant[:, instance] + 0.5 * d * math.log(2 * math.pi)).unsqueeze(-1)
        y = slice(d, d + len(points))  # lines are in no equation
        gain = covariance @ precision[..., :d, y]
        if points:
            grid = _grid(points)
            bend = (precision[..., y, y] - precision[..., y, :d] @ gain)[:, instance]
            slope = pull[..., y] - (precision[:, instance, :, y, :d] @ step.unsqueeze(-1)).squeeze(-1)
            each = grid.unsqueeze(2)
            table = table + slope @ grid.mT - 0.5 * ((each @ bend) * each).sum(-1)
        return Integrals(self, table, None, covariance, mean + step, gain)

    def _arranged(self, integrals: Integrals) -> Integrals:
        """The same with the table's axes in their order (R, n, *sizes)."""
        table = integrals.table
        table = table.reshape(*table.shape[:2], *(self.sizes[axis] for axis in self._back))
        return replace(integrals, table=table.permute(0, 1, *(2 + axis for axis in self.axes)))

    @cached_property
    def _back(self) -> list[int]:
        """Axes of the table in the order of categories and placed numbers."""
        return sorted(range(len(self.axes)), key=self.axes.__getitem__)

    def by_state(self, table: Tensor) -> Tensor:
        """A table (R, n, *sizes) by states, and by joint points G of the placed numbers: (R, n, T, G)."""
        ordered = table.permute(0, 1, *(2 + axis for axis in self._back))
        return ordered.reshape(*table.shape[:2], math.prod(self.states), -1)

    def _precision(self, products: Tensor) -> Tensor:
        """Sum products of coefficients (R, m, T, F, W, W) into precisions (R, m, T, d + b, d + b)."""
        size = self.dim + len(self.placed) + 1
        flat = products.flatten(3)
        index = self._pairs(self.unknown, size)[None, :, None].expand_as(flat)
        total = flat.new_zeros(*flat.shape[:3], size**2).scatter_add_(-1, index, flat)
        return total.unflatten(-1, (size, size))[..., :-1, :-1]

    @staticmethod
    def _pairs(unknown: Tensor, size: int) -> Tensor:
        """Where pairs of columns (m, F, W) stand in a matrix of their unknowns: (m, F * W * W)."""
        return (unknown.unsqueeze(-1) * size + unknown.unsqueeze(-2)).flatten(1)

    @cached_property
    def _index(self) -> Tensor:
        """The unknown of each column (1, n, 1, F * W)."""
        return self.unknown[self.instance].flatten(1)[None, :, None]

    def _pull(self, noise: Tensor, own: Tensor) -> Tensor:
        """How noise (R, n, T, F, dim) with these coefficients pulls unknowns and placed numbers (R, n, T, d + b)."""
        flat = -(noise.unsqueeze(-2) @ own).squeeze(-2).flatten(3)
        total = flat.new_zeros(*flat.shape[:3], self.dim + len(self.placed) + 1)
        return total.scatter_add_(-1, self._index.expand_as(flat), flat)[..., :-1]

    def columns(self, unknowns: Tensor) -> Tensor:
        """Unknowns (R, n, T, d + b) by column: (R, n, T, F, W), zero where a column is seen."""
        flat = pad(unknowns, (0, 1)).gather(-1, self._index.expand(*unknowns.shape[:3], -1))
        return flat.unflatten(-1, self.unknown.shape[1:])


@dataclass(frozen=True)
class Integrals:
    """What is left of a group's clusters, and the posterior of what was integrated out.

    Attributes:
        group: The clusters.
        table: Logarithms of the integrals (R, n, *sizes).
        grid: Joint values of the placed numbers (R, n, G, b), if there are some.
        covariance: Of the unknowns (R, m, T, d, d).
        mean: Of the unknowns, where the placed numbers are zero (R, n, T, d).
        gain: How the mean follows the placed numbers (R, m, T, d, b).
        before: What there was before lines were placed, if there are some.
    """

    group: LinearGroup
    table: Tensor
    grid: Tensor | None
    covariance: Tensor
    mean: Tensor
    gain: Tensor
    before: Integrals | None = None

    def moments(self, weight: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Second moments of every family's columns under the posterior, weighed.

        Args:
            weight: Belief of each entry of the table (R, n, *sizes).
            shift: What is subtracted from each column, by row of the equations (rows, W).

        Returns:
            Row of the equations (n, T, F), and the sums (R, n, T, F, W, W).
        """
        group, rows = self.group, self.group.config[self.group.instance]
        weight = group.by_state(weight)
        total = weight.sum(-1)
        shift = shift[rows][..., : group.values.shape[-1]]
        first = group.values[:, None] - shift + group.columns(pad(self.mean, (0, len(group.placed))))
        moments = (first * total[..., None, None]).unsqueeze(-1) * first.unsqueeze(-2)
        moments += total[..., None, None, None] * self._spread()[:, group.instance]
        if self.grid is None:
            return rows, moments
        # columns are first + A y in the placed numbers y
        one, two = self.point_moments(weight)
        eye = torch.eye(self.grid.shape[-1]).to(self.gain)[: len(group.placed)]  # no column is a line
        follow = torch.cat([-self.gain, eye.expand(*self.gain.shape[:3], -1, -1)], -2)[:, group.instance]
        by_column = torch.stack([group.columns(each) for each in follow.unbind(-1)], -1)
        cross = (by_column * one[..., None, None, :]).sum(-1).unsqueeze(-1) * first.unsqueeze(-2)
        return rows, moments + cross + cross.mT + by_column @ two.unsqueeze(3) @ by_column.mT

    def point_moments(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of placed numbers and of their products under weights (R, n, T, G): (R, n, T, b) and (R, n, T, b, b)."""
        assert self.grid is not None, "there are placed numbers"
        each = self.grid.unsqueeze(2)
        return weight @ self.grid, (weight.unsqueeze(-1) * each).mT @ each

    def _spread(self) -> Tensor:
        """The covariance by columns, of which placed numbers are no part: (R, m, T, F, W, W)."""
        size, unknown = self.group.dim + 1, self.group.unknown.clamp(max=self.group.dim)
        padded = pad(self.covariance, (0, 1, 0, 1)).flatten(3)
        flat = padded.gather(-1, self.group._pairs(unknown, size)[None, :, None].expand(*padded.shape[:3], -1))
        return flat.unflatten(-1, (*unknown.shape[1:], unknown.shape[-1]))

    def draws(self, states: Tensor, placed: Sequence[Tensor], normal: Callable[[Sequence[int]], Tensor]) -> Tensor:
        """Draw the unknowns of the first replica given states (n, draws), and numbers on points (n, draws, w)."""
        mean = self.mean[0].gather(1, states.unsqueeze(-1).expand(-1, -1, self.group.dim))
        instance = self.group.instance.unsqueeze(-1).expand_as(states)
        factor, _ = torch.linalg.cholesky_ex(self.covariance[0])
        drawn = mean + (factor[instance, states] @ normal(mean.shape).unsqueeze(-1)).squeeze(-1)
        if placed:
            y = torch.cat(list(placed), -1).unsqueeze(-1)
            drawn = drawn - (self.gain[0][instance, states] @ y).squeeze(-1)
        return drawn


def _grid(points: Sequence[Tensor]) -> Tensor:
    """All combinations of points (R, n, P, w) of several numbers, the last fastest: (R, n, G, b)."""
    grid = points[0]
    for one in points[1:]:
        shape = (max(len(grid), len(one)), grid.shape[1], grid.shape[2], one.shape[2])
        left = grid.unsqueeze(3).expand(*shape, -1)
        grid = torch.cat([left, one[:, :, None].expand(*shape, -1)], -1).flatten(2, 3)
    return grid


def line_covariance(lines: Tensor, covariance: Tensor) -> Tensor:
    """Covariance (..., L, L) of lines (..., L, d); those that hardly vary are given a spread that nothing notices."""
    spread = lines @ covariance @ lines.mT
    variance = spread.diagonal(dim1=-2, dim2=-1)
    return spread + torch.diag_embed(LINE_NOISE * variance.detach() + SMALLEST_SPREAD**2)


def _inverse(precision: Tensor) -> tuple[Tensor, Tensor]:
    """Covariance and log-determinant; of a single number by a division."""
    if precision.shape[-1] == 1:
        return precision.reciprocal(), torch.log(precision[..., 0, 0])
    factor = cholesky(precision)
    return torch.cholesky_inverse(factor), 2 * torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1)


def _times(matrix: Tensor, vector: Tensor, instance: Tensor) -> Tensor:
    """Multiply each piece's vector (R, n, T, d) by its instance's matrix (R, m, T, d, d)."""
    if matrix.shape[-1] <= GATHERED:
        return (matrix[:, instance] @ vector.unsqueeze(-1)).squeeze(-1)
    product = torch.empty_like(vector)
    for number in range(matrix.shape[1]):
        rows = torch.nonzero(instance == number)[:, 0]
        product[:, rows] = torch.einsum("rtij,rntj->rnti", matrix[:, number], vector[:, rows])
    return product


# a cluster of one kind of piece, its rows, and where these stand in the placements of numbers on points
ClusterPart = tuple[Cluster, Ints, Mapping[int, Ints]]


def linear_group(table: TableView, parts: Sequence[ClusterPart], sizes: tuple[int, ...], start: int) -> LinearGroup:
    """Clusters of equal dimensions side by side, whose tables of these sizes begin at a row of their bank."""
    families, cluster = table.families, parts[0][0]
    many = max(len(part.families) for part, *_ in parts)
    width = max(len(families[v].columns) for part, *_ in parts for v in part.families) + 1
    size = len(cluster.coordinates)
    state_sizes = tuple(families[n].mechanism.space.width for n in cluster.categories)
    axes = cluster.axes
    config, unknown, seen, values, instance, cells, around, first = [], [], [], [], [], [], [], 0
    lines: dict[tuple[int, int], LineParts] = {}
    for part, rows, _ in parts:
        own, which = _configurations(table, part, rows, state_sizes, many)
        _add_lines(lines, table, part, own, first)
        config.append(own[..., :many])
        instance.append(first + which)
        first += len(own)
        unknowns, columns = _columns(table, part, many, width)
        unknown.append(np.broadcast_to(unknowns, (len(own), many, width)))
        flags = np.array([*(v not in part.nodes for v in part.families), *[False] * (many - len(part.families))])
        seen.append(np.broadcast_to(flags, (len(own), many)))
        values.append(table.numbers[rows[:, None, None], columns])
        cells.append(np.broadcast_to(np.array(part.coordinates), (len(own), size, 2)))
        around.append(np.broadcast_to(np.array((*part.categories, *part.placed), dtype=int), (len(own), len(axes))))
    points = [sizes[cluster.members.index(n)] for n in cluster.placed]
    placed = [
        tuple(((c.placed[i], many), torch.from_numpy(at[c.placed[i]])) for c, _, at in parts)
        for i, many in enumerate(points)
    ]
    arrays = ([rows for _, rows, _ in parts], instance, config, unknown, seen, values, cells, around)
    joined = (torch.from_numpy(np.concatenate(one)) for one in arrays)
    made = LinearGroup(size, state_sizes, axes, tuple(placed), sizes, start, *joined)
    return replace(made, lines=tuple(_line_columns(families[v].lines, v, at, own) for (v, at), own in lines.items()))


# of some clusters the systems, configurations and unknowns of a family's lines
LineParts = list[tuple[Ints, Ints, Ints]]


def _line_columns(many: int, place: int, at: int, parts: LineParts) -> LineColumns:
    joined = (torch.from_numpy(np.concatenate(one)) for one in zip(*parts, strict=True))
    return LineColumns(place, slice(at, at + many), *joined)


def _add_lines(
    lines: dict[tuple[int, int], LineParts], table: TableView, part: Cluster, config: Ints, first: int
) -> None:
    """Note the lines of a cluster, whose systems are numbered from ``first`` on, by family and place among them."""
    of, at = {cell: i for i, cell in enumerate(part.coordinates)}, 0
    for column, v in enumerate(part.lines, config.shape[2] - len(part.lines)):
        unknown = np.array([of.get(cell, len(of)) for cell in table.families[v].columns])
        systems = np.arange(first, first + len(config))
        some = (systems, config[..., column], np.broadcast_to(unknown, (len(config), len(unknown))))
        lines.setdefault((v, at), []).append(some)
        at += table.families[v].lines


def _configurations(
    table: TableView, cluster: Cluster, rows: Ints, state_sizes: tuple[int, ...], many: int
) -> tuple[Ints, Ints]:
    """Rows of the equations for the distinct configurations of categories (m, T, F), and which one each row has.

    Configurations of families that have lines follow.
    """
    states = np.indices(state_sizes).reshape(len(state_sizes), -1) if state_sizes else np.zeros((0, 1), dtype=int)
    shown = np.zeros((len(rows), many + len(cluster.lines)), dtype=np.int64)
    moved = np.zeros((states.shape[1], shown.shape[1]), dtype=np.int64)
    read = (*enumerate(cluster.families), *enumerate(cluster.lines, many))
    for column, v in read:
        family = table.families[v]
        shown[:, column] = table.offsets.get(v, 0) + table.code(rows, family.selectors)
        stride = family.configurations
        for place, size in family.selectors:
            stride //= size
            if place in cluster.categories:
                moved[:, column] += stride * states[cluster.categories.index(place)]
    varies = any(place not in cluster.nodes for _, v in read for place, _ in table.families[v].selectors)
    if varies:
        distinct, which = np.unique(shown, axis=0, return_inverse=True)
    else:
        distinct, which = shown[:1], np.zeros(len(rows), dtype=np.int64)
    return distinct[:, None] + moved, which.reshape(-1)


def _columns(table: TableView, cluster: Cluster, many: int, width: int) -> tuple[Ints, Ints]:
    """For each column of each family which unknown it is, and where it stands among the numbers (F, W)."""
    of = {cell: i for i, cell in enumerate((*cluster.coordinates, *((node, 0) for node in cluster.placed)))}
    unknown = np.full((many, width), len(of), dtype=np.int64)
    columns = np.zeros((many, width), dtype=np.int64)
    for row, v in enumerate(cluster.families):
        cells = table.families[v].columns
        for column, cell in enumerate(cells):
            if cell in of:
                unknown[row, column] = of[cell]
            else:
                columns[row, column] = table.column_of[cell]
        columns[row, len(cells)] = 1
    return unknown, columns
