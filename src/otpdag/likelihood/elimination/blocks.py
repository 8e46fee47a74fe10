"""The parts of a layout: where the tables of factors come from, and which pieces sum which of them.

A table of categories has a row in its bank for each configuration of its seen members, shared by all rows of data; any
other has one for each row of data. Tables are stored with sizes that may be rounded up: what is beyond the true ones is
impossible.

A table as the backward map reads it: what is seen, states of categories, and columns of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.likelihood.elimination.families import FamilyView, Flags, Ints
from otpdag.likelihood.elimination.linear_normal import LinearGroup
from otpdag.likelihood.elimination.plans import VALUES_OF_A_ROW, Kind
from otpdag.likelihood.elimination.points import Cloud, Placement
from otpdag.likelihood.elimination.sum_product import Banks, Sizes, Step, taken

NO_NODE = -1
"""What stands for the node of a copy, which is no cell of the data."""

PointsKey = tuple[int, int]
"""A node that is placed on points, and how many there are."""


@dataclass(frozen=True, eq=False)
class TableSource:
    """Tables of a family of categories, one for each configuration of its seen members.

    Attributes:
        family: Which family.
        members: Its unknown members in the order of the axes.
        sizes: The axes.
        stored: The axes as they are stored.
        count: Number of tables.
        start: The first one's row in the bank.
    """

    family: int
    members: tuple[int, ...]
    sizes: Sizes
    stored: Sizes
    count: int
    start: int

    def by_member(self, family: FamilyView, beliefs: Banks) -> Tensor:
        """Beliefs of all its tables as one table over all members of the family (R, *parents, states)."""
        belief = taken(beliefs, self.stored, self.start, self.count, self.sizes)
        order = [*(n for n in family.members if n not in self.members), *self.members]
        sizes = dict(zip(family.members, family.widths, strict=True))
        table = belief.reshape(len(belief), *(sizes[n] for n in order))
        return table.permute(0, *(1 + order.index(n) for n in family.members))


@dataclass(frozen=True, eq=False)
class RowSource:
    """Tables of a family that reads numbers, one for each of some rows of data.

    Attributes:
        family: Which family.
        members: Its unknown members in the order of the axes.
        sizes: The axes.
        stored: The axes as they are stored.
        rows: The rows of data (n,).
        positions: For members that are placed on points, where the rows stand in their placement (n,).
        start: The first one's row in the bank.
        has_moments: Whether second moments say all of these rows: the family is linear and normal, no vector among its
            members is on points, and its node is not a vector that is seen in part.
    """

    family: int
    members: tuple[int, ...]
    sizes: Sizes
    stored: Sizes
    rows: Tensor
    positions: Mapping[int, Tensor]
    start: int
    has_moments: bool

    def points_of(self, node: int) -> PointsKey:
        """Which points a placed member is on."""
        return node, self.sizes[self.members.index(node)]


@dataclass(frozen=True, eq=False)
class LengthSource:
    """The lengths that the points of a placed node stand for, in each row of its placement."""

    node: int
    sizes: Sizes
    count: int
    start: int

    @property
    def key(self) -> PointsKey:
        """Which points they are."""
        return self.node, self.sizes[0]


@dataclass(frozen=True, eq=False)
class LinearSource:
    """Integrals of linear normal numbers."""

    group: LinearGroup
    stored: Sizes
    start: int


@dataclass(frozen=True, eq=False)
class SplitSource:
    """Messages of one size between copies of variables and their originals.

    Attributes:
        sizes: The states of the variables.
        original: Row of the first message to an original in the bank; the others follow.
        copy: The same of the messages to copies.
        piece: The distinct piece of each pair (n,).
        rank: The number of each pair's variable among those of its piece that have copies (n,).
    """

    sizes: Sizes
    original: int
    copy: int
    piece: Tensor
    rank: Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """Pieces of one kind, each of one row.

    Attributes:
        kind: The kind.
        rows: The rows of data (n,).
        pieces: Numbers of the pieces in their block (n,).
        positions: For nodes that are placed on points, where the rows stand in their placement (n,).
    """

    kind: Kind
    rows: Ints
    pieces: Ints
    positions: Mapping[int, Ints]


@dataclass(frozen=True, eq=False)
class Block:
    """Pieces that are summed together.

    Attributes:
        steps: The sums, each after those whose messages it reads.
        tables: Sources of tables of categories.
        row_tables: Sources of tables that read numbers.
        lengths: Sources of the lengths of points.
        linear: Sources of integrals over linear normal numbers.
        banks: Number of rows of each bank.
        placements: Where the points of placed nodes lie, by node and number of points.
        result: Row of each distinct piece's evidence in the bank of single numbers (D,).
        piece_row: The row of data of each piece (P,).
        piece: The distinct piece that it is (P,).
        cell_node: The node of each variable of the distinct pieces (cells,).
        cell_piece: The distinct piece that it belongs to (cells,).
        cell_row: A row of data in which that occurs (cells,).
        parts: If numbers meet, so that each should have no more points than it needs: the pieces of each kind.
        origin: The number that each piece had in the block from which this one was made (D,).
        splits: Messages between copies of variables, where the sums are approximate.
        exact_entries: Entries of the tables of exact sums over the distinct pieces.
        shared: What is written down once, whatever the placements.
    """

    steps: tuple[Step, ...]
    tables: tuple[TableSource, ...]
    row_tables: tuple[RowSource, ...]
    lengths: tuple[LengthSource, ...]
    linear: tuple[LinearSource, ...]
    banks: Mapping[Sizes, int]
    placements: Mapping[PointsKey, Placement | Cloud]
    result: Tensor
    piece_row: Tensor
    piece: Tensor
    cell_node: Tensor
    cell_piece: Tensor
    cell_row: Tensor
    parts: tuple[Part, ...] = ()
    origin: Tensor | None = None
    splits: tuple[SplitSource, ...] = ()
    exact_entries: int = 0
    shared: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_exact(self) -> bool:
        """Whether no variable has copies."""
        return not self.splits

    @property
    def distinct(self) -> int:
        """Number of distinct pieces."""
        return len(self.result)

    @property
    def is_coarse(self) -> bool:
        """Whether its points only serve to find out how many are needed."""
        return bool(self.parts)

    @property
    def largest_table(self) -> int:
        """Entries of the largest table of one piece."""
        return max((math.prod(step.sizes) for step in self.steps), default=1)

    @property
    def elements(self) -> int:
        """Entries of all tables, for one replica."""
        banks = sum(rows * math.prod(sizes) for sizes, rows in self.banks.items())
        linear = sum(source.group.elements for source in self.linear)
        rows = sum(len(source.rows) * math.prod(source.sizes) for source in self.row_tables)
        return banks + linear + sum(step.elements for step in self.steps) + VALUES_OF_A_ROW * rows


@dataclass(frozen=True, eq=False)
class Complete:
    """Rows of data in which a family has no unknown member.

    Attributes:
        family: Which family.
        rows: The rows (n,).
        code: The joint state of a family of categories, or the configuration of the categories among the parents of a
            linear normal one (n,); none for other families.
        columns: The columns of a linear normal family, less their shift (n, W).
    """

    family: int
    rows: Tensor
    code: Tensor | None = field(default=None)
    columns: Tensor | None = field(default=None)


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
        return torch.tensor([*means, 0.0], dtype=torch.float64).to(self.like)

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
