"""Minibatches of a table in parts: the rows at hand are renewed while an optimiser goes on.

A stochastic optimiser sees ``steps`` times ``batch_size`` rows, however many there are. So random rows of the whole
table are held, as many as its reader allows; minibatches are drawn from them, and when each has been drawn about once
others take their place, by one pass over the parts. Every minibatch is a random one of the whole table, whatever the
order of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

from torch import Tensor

from otpdag.data import Batch, random_part
from otpdag.noise import Streams
from otpdag.objective.problem import WrappedProblem
from otpdag.objective.sampled import DrawnRows
from otpdag.objective.terms import LossTerms

__all__ = ["Pools", "StreamedRows", "pools_for"]


@dataclass(frozen=True)
class Pools:
    """Random rows of a table, others for each share of an optimiser's steps.

    Which they are depends on the share alone, so that a run that is resumed meets the same; only the last ones are
    kept.

    Args:
        first: Those that are at hand from the beginning.
        picked: Reads rows by their numbers (n,).
        total: Rows of the table.
        number: How many pools all steps take.
        seed: Determines which rows they are.
    """

    first: Batch
    picked: Callable[[Tensor], Batch]
    total: int
    number: int
    seed: int
    last: dict[int, Batch] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, progress: float) -> Batch:
        """The rows at a share of all steps."""
        which = min(int(progress * self.number), self.number - 1)
        if which == 0:
            return self.first
        if which not in self.last:
            rows = random_part(self.total, self.first.rows, self.seed + which)
            assert rows is not None, "the table has more rows than are held"
            self.last.clear()  # before others are read: both together would be twice the memory
            self.last[which] = self.picked(rows)
        return self.last[which]


def pools_for(steps: int, batch_size: int, held: int) -> int:
    """How many pools of so many rows a run takes, each row of one being drawn about once.

    >>> pools_for(1000, 128, 50_000)
    3
    """
    return max(1, math.ceil(steps * batch_size / held))


@dataclass(frozen=True)
class StreamedRows(WrappedProblem):
    """A table in parts whose unknown values a learned map draws; ``base`` is the problem of the rows at hand."""

    pools: Pools

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return self.pools.total

    def sampled(self, point: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Loss terms of every replica on a minibatch of the rows that are at hand by then."""
        rows = replace(cast(DrawnRows, self.base), batch=self.pools.at(progress))
        return rows.sampled(point, streams, progress)
