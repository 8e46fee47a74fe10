"""What problems that read rows through sums share: the rows themselves, for whoever asks about single ones."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from otpdag.data import Batch, random_part
from otpdag.objective.problem import Problem

__all__ = ["LayOut", "SummedRows"]

LayOut = Callable[..., Problem]
"""Lays a ``batch`` out for the same objective, by a ``seed``."""


class SummedRows(Problem):
    """Rows whose likelihood is read from sums over them."""

    batch: Batch
    """The rows."""
    in_rows: LayOut
    """Makes the problem of the same objective that looks at every row."""
    seed: int

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.batch.rows

    @property
    def is_likelihood(self) -> bool:
        """Always: other objectives are not laid out so."""
        return True

    @property
    def weight(self) -> Tensor:
        """Weights of the rows (1, N)."""
        return self.batch.weight

    def row_by_row(self, rows: int) -> Problem:
        """So many of the rows, looked at one by one."""
        part = random_part(self.rows, rows, self.seed)
        return self.in_rows(batch=self.batch if part is None else self.batch.take(part), seed=self.seed)

    def unit_losses(self, points: Tensor) -> Tensor:
        """The loss of every row (R, N)."""
        return self.row_by_row(self.rows).unit_losses(points)
