"""The parts of a layout: where the tables of factors come from, and which pieces sum which of them.

A table of categories has a row in its bank for each configuration of its seen members, shared by all rows of data; any
other has one for each row of data. Tables are stored with sizes that may be rounded up: what is beyond the true ones is
impossible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from otpdag.backward.elimination.clouds import Cloud
from otpdag.backward.elimination.linear_normal import LinearGroup
from otpdag.backward.elimination.piece_plans import VALUES_OF_A_ROW, Kind
from otpdag.backward.elimination.points import Placement
from otpdag.backward.elimination.sum_product import Sizes, Step
from otpdag.backward.elimination.unknowns import Ints

__all__ = [
    "NO_NODE",
    "Block",
    "Complete",
    "LengthSource",
    "LinearSource",
    "Part",
    "PointsKey",
    "RowSource",
    "SplitSource",
    "TableSource",
]

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
