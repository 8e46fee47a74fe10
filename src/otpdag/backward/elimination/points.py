r"""Points for unknown numbers and counts, in each row where the posterior is.

A number is summed on an even grid over the real line (its logarithm if it is positive, its logit if it lies between
zero and one), a count over a window of whole numbers, or of the middles of equal groups of them where the window is
wide. Even sums of smooth densities are exact to many digits once neighbours are less than a standard deviation apart.
Centre and spread follow the model's own posterior at the parameters at hand, never the largest value that was seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Placement", "Points"]

SHARE_OF_SPREAD = 0.5  # distance of grid points in posterior standard deviations: errors of the sum are below 1e-16
COUNT_REACH = 8.0  # half the window of a count in posterior standard deviations, beyond which nothing is lost
EDGE = 1e-9  # probability of an outermost point that says that the window is too narrow
SMALLEST_SPREAD = 1e-9
WIDEN = 2.0


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
        support: What its values may be.
        rows: The rows (n,).
        size: Number of points P.
        centre: Their middle on the line (1 or R, n).
        spread: A standard deviation on the line (1 or R, n).

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> placed = Placement("x", "real", torch.zeros(1, dtype=torch.long), 32, 3 * one, 0.5 * one).points()
    >>> density = torch.distributions.Normal(3.0, 0.5).log_prob(placed.values[..., 0])
    >>> round(float((density + placed.log_length).exp().sum()), 9)
    1.0
    """

    node: str
    support: str
    rows: Tensor
    size: int
    centre: Tensor
    spread: Tensor

    def points(self) -> Points:
        """The points in every row."""
        if self.support == "count":
            first, stride = self._window()
            values = first + stride * torch.arange(self.size).to(first) + (stride - 1) / 2
            return Points(values.unsqueeze(-1), torch.log(stride).expand_as(values))
        step = SHARE_OF_SPREAD * self.spread.unsqueeze(-1)
        line = self.centre.unsqueeze(-1) + step * (torch.arange(self.size).to(step) - (self.size - 1) / 2)
        values, log_slope = _from_line(line, self.support)
        return Points(values.unsqueeze(-1), (torch.log(step) + log_slope).expand_as(values))

    def line(self) -> Tensor:
        """The points on the line (R, n, P)."""
        return to_line(self.points().values[..., 0], self.support)

    def moved(self, belief: Tensor) -> tuple[Placement, bool]:
        """The same rows with their points around the mean of a belief (R, n, P); and whether that suffices."""
        line = self.line()
        mean = (belief * line).sum(-1)
        spread = (belief * (line - mean.unsqueeze(-1)) ** 2).sum(-1).sqrt()
        known = belief.sum(-1) > 0.5  # a row that the model rules out has no belief
        at_edge = self._at_edge(belief)
        gap = line[..., 1] - line[..., 0]
        coarse = (spread < gap) & (gap > 1 if self.support == "count" else known)
        spread = torch.where(at_edge, WIDEN * self.spread.expand_as(spread), torch.maximum(spread, 0.5 * gap))
        spread = torch.where(known, spread, self.spread.expand_as(spread)).clamp(min=SMALLEST_SPREAD)
        centre = torch.where(known, mean, self.centre.expand_as(mean))
        settled = not bool((known & (at_edge | coarse)).any())
        return replace(self, centre=centre, spread=spread), settled

    def _at_edge(self, belief: Tensor) -> Tensor:
        """Rows whose posterior reaches beyond the points; a count cannot fall below zero."""
        low, high = belief[..., 0] > EDGE, belief[..., -1] > EDGE
        if self.support == "count":
            low = low & (self._window()[0][..., 0] > 0)
        return low | high

    def _window(self) -> tuple[Tensor, Tensor]:
        """The smallest count of the window and the number of counts that each point stands for (R, n, 1)."""
        reach = torch.ceil(COUNT_REACH * self.spread).unsqueeze(-1) + 1
        stride = torch.ceil((2 * reach + 1) / self.size)
        middle = torch.round(self.centre).unsqueeze(-1)
        return (middle - torch.floor(stride * self.size / 2)).clamp(min=0), stride

    def jittered(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Values (n, draws) of drawn points, each anywhere in the stretch that it stands for."""
        uniform = torch.rand(states.shape, generator=generator, dtype=self.centre.dtype) - 0.5
        if self.support == "count":
            value = self.points().values[0, :, :, 0].gather(1, states)
            return torch.round(value + uniform * (self._window()[1][0] - 1))
        line = self.line()[0]
        gap = line[:, 1:2] - line[:, :1]
        return _from_line(line.gather(1, states) + gap * uniform, self.support)[0]


def to_line(value: Tensor, support: str) -> Tensor:
    """A value on the real line."""
    if support == "positive":
        return torch.log(value)
    return torch.logit(value) if support == "unit" else value


def _from_line(line: Tensor, support: str) -> tuple[Tensor, Tensor | float]:
    """A value from the real line, and the logarithm of its slope there."""
    if support == "positive":
        return torch.exp(line), line
    if support == "unit":
        logistic = torch.nn.functional.logsigmoid
        return torch.sigmoid(line), logistic(line) + logistic(-line)
    return line, 0.0
