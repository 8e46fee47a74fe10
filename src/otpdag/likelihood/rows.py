"""What the rows of a table are laid out for, whichever way.

What problems of a table's rows share: the rows themselves, and their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from otpdag.data import Batch, random_part
from otpdag.problem import Units
from otpdag.settings import ClosedForm, Objective
from otpdag.simulation import simulated_rows
from otpdag.structure import Structure


@dataclass(frozen=True)
class RowObjective:
    """A model's objective in closed form: the same for all rows, parts of them, and rows that the model makes.

    Attributes:
        structure: Graph and mechanisms, in the units of the data.
        shapes: Of all parameters of a flat point, in their order.
        weights: Of the terms of the objective.
        closed: How what rows miss is summed.
    """

    structure: Structure
    shapes: Mapping[str, tuple[int, ...]]
    weights: Objective
    closed: ClosedForm

    @property
    def is_plain_likelihood(self) -> bool:
        """Whether nothing is tempered, and no other term counts."""
        weights = self.weights.at(1.0)
        plain = weights.eps == weights.reconstruction == 1.0 and self.closed.reference == "model"
        return plain and self.weights.push_forward is None

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def count_ranges(structure: Structure, values: Mapping[str, Tensor]) -> dict[str, float]:
    """How far the support of each count must reach: somewhat beyond the largest of the values that are seen."""
    reaches = {n: structure.mechanisms[n].space.reach(values[n]) for n in structure.graph.observed}
    return {node: reach for node, reach in reaches.items() if reach is not None}


LayOut = Callable[..., Units]
"""Lays a ``batch`` out for the same objective, by a ``seed``."""


class TableRows(Units):
    """Rows of a table, whatever is done with them."""

    batch: Batch
    """The rows."""
    seed: int
    route: ClassVar[str] = ""
    """Which way they are summed; see :mod:`~otpdag.likelihood.route`."""

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.batch.rows

    @property
    def weight(self) -> Tensor:
        """Weights of the rows (1, N)."""
        return self.batch.weight

    def drawn(self, point: Tensor, size: int, seed: int) -> Batch:
        """Rows that the model at ``point`` (1, P) makes, each with the gaps and covariates of a random row."""
        return simulated_rows(self.structure, self.naturals(point.detach()), self.batch, size, seed)


class SummedRows(TableRows):
    """Rows whose likelihood is read from sums over them."""

    in_rows: LayOut
    """Makes the problem of the same objective that looks at every row."""

    is_likelihood = True
    """Other objectives are not laid out so."""

    def row_by_row(self, rows: int) -> Units:
        """So many of the rows, looked at one by one."""
        part = random_part(self.rows, rows, self.seed)
        return self.in_rows(batch=self.batch if part is None else self.batch.take(part), seed=self.seed)

    def unit_losses(self, points: Tensor) -> Tensor:
        """The loss of every row (R, N)."""
        return self.row_by_row(self.rows).unit_losses(points)
