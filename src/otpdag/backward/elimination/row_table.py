"""A table as the backward map reads it: what is seen, states of categories, and columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from otpdag.backward.elimination.blocks import Complete
from otpdag.backward.elimination.families import FamilyView
from otpdag.backward.elimination.unknowns import Flags, Ints
from otpdag.data import Batch

__all__ = ["TableView"]

Floats = npt.NDArray[np.float64]
SMALLEST_WINDOW = 8  # points of a count that was never seen above zero


class TableView:
    """Rows by nodes in topological order.

    Attributes:
        families: All families.
        batch: The rows.
        seen: Nodes of which all cells are seen (N, V).
        partly: Nodes of which some are (N, V).
        codes: States of categories, zero where they are not seen (N, V).
        numbers: Coordinates of numbers side by side, after a column of zeros and one of ones.
        column_of: Where each coordinate of each node stands among them.
        offsets: First row of each linear family among the equations, of which row zero is empty.
        shifts: The mean of each column of each linear family.
    """

    def __init__(self, families: Sequence[FamilyView], batch: Batch) -> None:
        self.families, self.batch = families, batch
        self.like = batch.weight
        self.seen, self.partly = self._seen()
        self.codes = self._codes()
        self.numbers, self.column_of = self._numbers()
        self.offsets: dict[int, int] = {}
        rows = 1
        for family in families:
            if family.is_linear:
                self.offsets[family.place] = rows
                rows += family.configurations
        self.shifts = {f.place: self._shift(f) for f in families if f.is_linear}

    def missing(self, row: int, node: int) -> tuple[int, ...]:
        """Coordinates of a node that a row does not show."""
        mask = self.batch.mask[self.families[node].node][0, row]
        return tuple(torch.nonzero(~mask)[:, 0].tolist())

    def _seen(self) -> tuple[Flags, Flags]:
        """Nodes of which all cells, and of which some cells are seen (N, V)."""
        shape = (self.batch.rows, len(self.families))
        seen, partly = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        for family in self.families:
            mask = self.batch.mask.get(family.node)
            if mask is not None:
                cells = mask[0].cpu().numpy()
                seen[:, family.place] = cells.all(-1)
                partly[:, family.place] = cells.any(-1) & ~seen[:, family.place]
        return seen, partly

    def _codes(self) -> Ints:
        """States of categories; zero where they are not seen or no categories (N, V)."""
        codes = np.zeros((self.batch.rows, len(self.families)), dtype=np.int64)
        for family in self.families:
            if family.categories[-1] and family.node in self.batch.values:
                codes[:, family.place] = self.batch.values[family.node][0].cpu().numpy().argmax(-1)
        return codes * self.seen

    def _numbers(self) -> tuple[Floats, dict[tuple[int, int], int]]:
        """All coordinates of numbers side by side, after a column of zeros and one of ones; unknown ones are zero."""
        rows = self.batch.rows
        columns = [np.zeros((rows, 1)), np.ones((rows, 1))]
        places: dict[tuple[int, int], int] = {}
        read = {column for family in self.families if family.is_linear for column in family.columns}
        at = 2
        for family in self.families:
            if (family.place, 0) in read:
                width = family.widths[-1]
                places |= {(family.place, cell): at + cell for cell in range(width)}
                at += width
                value = self.batch.values.get(family.node)
                columns.append(np.zeros((rows, width)) if value is None else self._seen_numbers(family, value))
        return np.concatenate(columns, 1), places

    def _seen_numbers(self, family: FamilyView, value: Tensor) -> Floats:
        mask = self.batch.mask[family.node][0].cpu().numpy()
        return np.where(mask, value[0].cpu().numpy(), 0.0)

    def _shift(self, family: FamilyView) -> Tensor:
        """The mean of each column where it is seen, so that second moments lose no digits."""
        means = []
        for place, cell in family.columns:
            seen = self.seen[:, place]
            column = self.numbers[:, self.column_of[place, cell]]
            means.append(float(column[seen].mean()) if seen.any() else 0.0)
        return torch.tensor([*means, 0.0]).to(self.like)

    def complete(self, parts: Sequence[tuple[Ints, Flags]]) -> tuple[Complete, ...]:
        """Rows of complete families; linear ones that are seen in part go by themselves."""
        complete = []
        for family in self.families:
            rows = np.concatenate([chosen[flags[:, family.place]] for chosen, flags in parts])
            part = self.partly[rows, family.place]
            complete += [self._complete_rows(family, some) for some in (rows[~part], rows[part]) if len(some)]
        return tuple(complete)

    def _complete_rows(self, family: FamilyView, rows: Ints) -> Complete:
        index = torch.from_numpy(rows)
        if family.is_table:
            sizes = dict(zip(family.members, family.widths, strict=True))
            return Complete(family.place, index, torch.from_numpy(self.code(rows, list(sizes.items()))))
        if family.is_linear and not self.partly[rows, family.place].any():
            at = [self.column_of[column] for column in family.columns]
            columns = torch.from_numpy(self.numbers[np.ix_(rows, np.array([*at, 1]))]).to(self.like)
            code = torch.from_numpy(self.code(rows, family.selectors))
            return Complete(family.place, index, code, columns - self.shifts[family.place])
        return Complete(family.place, index)

    def code(self, rows: Ints, members: Sequence[tuple[int, int]]) -> Ints:
        """Joint states of some categories, the last fastest."""
        code = np.zeros(len(rows), dtype=np.int64)
        for place, size in members:
            code = code * size + self.codes[rows, place]
        return code

    def count_points(self, family: FamilyView, most: int) -> int:
        """Number of points of a count; those that are never large need fewer."""
        if family.node not in self.batch.values:
            return most
        enough = 1.5 * float(self.batch.values[family.node].max()) + SMALLEST_WINDOW
        return most // 2 if enough <= most // 2 else most
