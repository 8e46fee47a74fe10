r"""Points for unknown numbers and counts, in each row where the posterior is.

A number is summed on a grid over the real line (its logarithm if it is positive, its logit if it lies between zero and
one), which is even near the posterior's mean and opens towards its tails, so that few points serve skewed and heavy
ones too: :math:`x = c + s \sinh(\kappa t) / \kappa` for even t. Such sums of smooth densities are exact to many digits
once neighbours are less than a standard deviation apart: the error is of the order :math:`e^{-2 \pi^2 / h^2}` for a
distance h.

A count is summed over a window of whole numbers, and where that is wide over groups of them: by the middle of equal
groups, or, in a window that begins at zero, where counts may pile up, over groups that grow with the distance from
zero, by three points each that are exact for polynomials up to the fifth degree.

Centre and spread follow the model's own posterior at the parameters at hand, never the largest value that was seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from otpdag.spaces import Space

__all__ = ["Placement", "Points"]

Floats = npt.NDArray[np.float64]

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
