"""Rows of a linear normal table as a problem that reads them once: a step costs the same whatever their number.

Rows that show the same cells are told by their second moments about a centre, which digits of the sum do not depend on
the order of rows. What the model says of them is written in :mod:`~otpdag.likelihood.structural_equations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.batch import distinct_rows
from otpdag.likelihood.graph_problem import rows_along_graph
from otpdag.likelihood.rows import RowObjective, SummedRows
from otpdag.likelihood.structural_equations import StructuralEquations, structural_equations
from otpdag.mechanisms import Normal
from otpdag.numerics import order_free_products
from otpdag.problem import LossTerms, Units, Updates, curvature, with_gradient
from otpdag.structure import Structure

Array: TypeAlias = NDArray[np.float64]

MOST_SCORED = 4_000_000
"""Entries of the information of all groups of rows, beyond which steps by gradients alone cost less."""

AT_ONCE = 1_000_000
"""Entries of moments that are held at a time where gradients are differenced."""


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Rows that show the same numbers.

    Attributes:
        cells: Node and coordinate of each number.
        members: The rows of each group.
        shown: Which numbers each group shows (G, D).
    """

    cells: tuple[tuple[str, int], ...]
    members: tuple[slice | NDArray[np.int64], ...]
    shown: NDArray[np.bool_]

    @classmethod
    def of(cls, batch: Batch, widths: Mapping[str, int]) -> RowGroups:
        """Of nodes of so many coordinates each; hidden ones are never shown."""
        cells = tuple((node, cell) for node, width in widths.items() for cell in range(width))
        masks = {id(batch.mask[node]): batch.mask[node] for node in widths if node in batch.mask}  # some are shared
        gaps = [mask for mask in masks.values() if not bool(mask.all())]
        members: tuple[slice | NDArray[np.int64], ...] = (slice(None),)
        if gaps:
            code, many = distinct_rows(gaps)
            members = tuple(np.split(np.argsort(code, kind="stable"), np.bincount(code, minlength=many).cumsum()[:-1]))
        first = [0 if isinstance(rows, slice) else int(rows[0]) for rows in members]
        shown = [_seen(batch, node, cell)[first] for node, cell in cells]
        return cls(cells, members, np.stack(shown, -1))

    def second_moments(self, batch: Batch, shift: Array) -> Array:
        """Of the numbers less their shift (D,), zero where they are not shown, and of a one (1 or R, G, D + 1, D + 1).

        Where all rows weigh the same, the order of rows does not matter to the last digit.
        """
        weight, size = batch.weight.numpy(), len(self.cells) + 1
        total = np.zeros((len(weight), len(self.members), size, size))
        alike = bool((weight == weight[:, :1]).all())
        for number, (rows, shown) in enumerate(zip(self.members, self.shown, strict=True)):
            seen = np.flatnonzero(shown)
            columns = [batch.values[node][0, :, cell].numpy()[rows] for node, cell in (self.cells[at] for at in seen)]
            own, place = weight[:, rows], np.ix_([*seen, size - 1], [*seen, size - 1])
            if alike:
                products = order_free_products(columns, shift[seen].tolist(), own.shape[1])
                total[:, number][:, *place] = weight[:, :1, None] * products
                continue
            lifted = np.stack(
                [*(column - at for column, at in zip(columns, shift[seen], strict=True)), np.ones(own.shape[1])]
            )
            for replica, each in enumerate(own):
                total[replica, number][place] = (lifted * each) @ lifted.T
        return total


def _seen(batch: Batch, node: str, cell: int) -> NDArray[np.bool_]:
    """In which rows a cell is seen (N,)."""
    if node not in batch.mask:
        return np.zeros(batch.rows, dtype=bool)
    return batch.mask[node][0, :, min(cell, batch.mask[node].shape[-1] - 1)].numpy()


def centre_of(structure: Structure, batch: Batch, node: str, cell: int) -> float:
    """About the mean of what is seen of a column, zero of one that never is: moments about it lose no digits.

    It is the centre of the column's units where there are some, which do not depend on the order of rows.
    """
    mechanism = structure.mechanisms[node]
    if node not in batch.values:
        return 0.0
    if isinstance(mechanism, Normal) and mechanism.predictor.units is not None:
        return float(mechanism.predictor.units.out_shift[cell])
    seen = _seen(batch, node, cell)
    return float(batch.values[node][0, :, cell].numpy()[seen].mean()) if seen.any() else 0.0


@dataclass(frozen=True)
class MomentProblem(SummedRows):
    """Moments of rows, and the rows themselves for whoever asks about single ones."""

    route: ClassVar[str] = "moments"

    about: RowObjective
    read: Batch
    """The rows as their moments were taken."""
    groups: RowGroups
    equations: StructuralEquations
    seed: int
    in_order: Callable[[], Batch] | None = None
    """Makes the rows, complete and of equal weights, as they are told by number; None if those read stand so."""

    @property
    def structure(self) -> Structure:  # type: ignore[override]
        """Graph and mechanisms."""
        return self.about.structure

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:  # type: ignore[override]
        """Of all parameters."""
        return self.about.shapes

    @cached_property
    def batch(self) -> Batch:  # type: ignore[override]
        """The rows, in the order in which they are told by number."""
        return self.read if self.in_order is None else self.in_order()

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.read.rows

    @property
    def weight(self) -> Tensor:
        """Weights of the rows (1, N): they are equal where rows are not in order yet."""
        return self.read.weight

    def in_rows(self, batch: Batch, seed: int) -> Units:
        """The problem of the same objective that looks at every row."""
        return rows_along_graph(self.about, batch, seed)

    def loss(self, point: Tensor) -> LossTerms:
        """The loss of a row: reported as reconstruction, since its parts are not told apart."""

        def evaluated(at: Tensor, slope: bool) -> tuple[Tensor, Tensor]:
            with np.errstate(all="ignore"):  # a loss that is not finite is refused by whoever asked
                if not slope:
                    return torch.from_numpy(self.equations.loss(at.numpy())), at
                loss, gradient = self.equations.loss_and_gradient(at.numpy())
            return torch.from_numpy(loss), torch.from_numpy(gradient)

        loss = with_gradient(evaluated, point)
        return LossTerms.of(loss, reconstruction=loss)

    @property
    def updates(self) -> Updates | None:
        """Scoring, which moves every parameter."""
        entries, parameters = self.equations.by_parameter.shape
        return Updates() if max(len(self.equations.shown) * entries**2, parameters**2) <= MOST_SCORED else None

    def update(self, point: Tensor) -> tuple[Tensor, LossTerms]:
        """A step of Fisher's scoring, as long as it lowers the loss, and the terms at ``point``."""
        with np.errstate(all="ignore"):  # a loss that is not finite is refused by whoever asked for the update
            scored = self.equations.scored(point.detach().numpy())
            moved = self.equations.improved(scored)
        loss = torch.from_numpy(scored.loss)
        return torch.from_numpy(moved), LossTerms.of(loss, reconstruction=loss)

    def curvature(self, point: Tensor) -> Tensor:
        """Differences of gradients, so many at a time as moments have room."""
        return curvature(self.loss, point, at_once=max(1, AT_ONCE // self.equations.second[0].size))

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> MomentProblem:
        """These rows; or all of them instead of fewer, since more do not cost more."""
        return rows_as_moments(self.about, self.batch.take(rows), self.seed) if isinstance(rows, Tensor) else self

    def reweighted(self, factors: Tensor) -> MomentProblem:
        """Moments of the same rows with other weights."""
        batch = replace(self.batch, weight=self.batch.weight * factors)
        second = self.groups.second_moments(batch, self.equations.shift)
        return replace(self, read=batch, equations=replace(self.equations, second=second), in_order=None)

    def simulated(self, point: Tensor, size: int, seed: int) -> MomentProblem:
        """Rows that the model makes, each with the gaps and covariates of a random row."""
        return rows_as_moments(self.about, self.drawn(point, size, seed), seed)


def rows_as_moments(about: RowObjective, batch: Batch, seed: int) -> MomentProblem:
    """Sum rows up."""
    structure = about.structure
    groups = gap_groups(structure, batch)
    shift = np.array([centre_of(structure, batch, node, cell) for node, cell in groups.cells])
    second = groups.second_moments(batch, shift)
    equations = structural_equations(structure, about.shapes, groups.cells, shift, groups.shown, second)
    return MomentProblem(about, batch, groups, equations, seed)


def gap_groups(structure: Structure, batch: Batch) -> RowGroups:
    """Rows that show the same numbers of a model's nodes."""
    return RowGroups.of(batch, {node: structure.mechanisms[node].space.width for node in structure.graph.nodes})
