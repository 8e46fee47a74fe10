"""Problems of a search that are small enough to know what must happen."""

from dataclasses import dataclass, field, replace

import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import Deterministic, Monitor, Searcher, SearchSchedule
from otpdag.problem import LossTerms, Problem

STRUCTURE = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()}).structure
SHAPES = {"x.loc": (1,), "x.scale": (1,)}
ALL = SearchSchedule(short_steps=0, moves=0)


@dataclass(frozen=True)
class Bowls(Problem):
    """One bowl for each replica, whose floor depends on the side of the first coordinate from which it is entered.

    The lowest point is at ``centre``; ``floors`` are added where the first coordinate is negative, and positive.
    """

    centre: torch.Tensor
    floors: tuple[float, float] = (0.0, 0.0)
    rows_seen: int = 1000
    asked: list = field(default_factory=list)
    structure = STRUCTURE
    shapes = SHAPES

    @property
    def rows(self):
        return self.rows_seen

    def loss(self, point):
        gap = ((point.abs() - self.centre).square() * at(1.0, 20.0)).sum(-1)
        floor = torch.where(point[:, 0] < 0, *self.floors).to(point)
        return LossTerms.of(gap, reconstruction=gap + floor)

    def subset(self, rows, *, coarse=False):
        self.asked.append((rows, coarse))
        return replace(self, rows_seen=min(rows, self.rows_seen))


def at(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def quiet(optimiser=None, **options):
    return Searcher(optimiser or Deterministic(steps=60), monitor=Monitor(show=False), **options)
