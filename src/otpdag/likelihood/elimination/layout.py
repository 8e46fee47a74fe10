r"""Lay a table out for the closed-form backward map: once, before any parameter is known.

Unknowns are cut into pieces (:mod:`~otpdag.likelihood.elimination.families`), pieces of one kind share a plan, plans of
one shape share the sums. Pieces of categories alone that show the same are one piece with a weight. What a row knows
completely is read once for all rows. The largest table and the cost of an evaluation are known from here on.

Tables of one size stand in one bank. A table of categories has a row in its bank for each configuration of its seen
members, shared by all rows of data; any other has one for each row of data.

Where tables are too large with as many points as are usual, coarser points are tried.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.data import Batch
from otpdag.errors import DataError, ModelError
from otpdag.likelihood.elimination.families import (
    Complete,
    FamilyView,
    Pieces,
    TableView,
    cut,
    describe_families,
    needs,
    piece_hashes,
)
from otpdag.likelihood.elimination.plans import VALUES_OF_A_ROW, EliminationOptions, Factor, Kind, Plan, Planner
from otpdag.likelihood.elimination.unknown_numbers import (
    FINEST,
    Cluster,
    ClusterPart,
    LinearGroup,
    Placed,
    Placement,
    first_placement,
    joined,
    linear_group,
    needed_points,
    two_sizes,
)
from otpdag.numerics import Flags, Ints
from otpdag.structure import Structure

Sizes = tuple[int, ...]
Axes = tuple[int, ...]  # which axes of a step's product a table has

PointsKey = tuple[int, int]  # a node that is placed on points, and how many there are

OUTGROWN = 0.05  # share of the rows whose counts no longer have a point each, at which points are counted anew
MATRIX_CELLS = 5_000_000  # cells of the tables of flags that are held at a time
# bytes of a layout, over those of a block, up to which what no parameter changes is kept: a thousand mixed columns of
# 500 rows with 10 % gaps need two to three, and take twice as long where all is prepared anew in every evaluation
REMEMBERED = 4


class Source:
    """Tables of one origin, while rows are being added and once they have their places in a bank.

    Attributes:
        place: The family, or the node on points, that they come from.
        members: The unknown members in the order of the axes.
        sizes: The axes.
        count: Number of tables.
        first: The first of the family's lines among those that are a member.
        start: The first one's row in the bank of their size; the others follow.
        rows: The rows of data (n,).
        positions: For members that are placed on points, where the rows stand in their placement (n,).
    """

    rows: Tensor
    positions: Mapping[int, Tensor]

    def __init__(
        self, sizes: Sizes, place: int = -1, members: tuple[int, ...] = (), count: int = 0, first: int = 0
    ) -> None:
        self.sizes, self.place, self.members, self.count, self.first = sizes, place, members, count, first
        self.start = 0
        self._rows: list[Ints] = []
        self._positions: list[Mapping[int, Ints]] = []

    def extend(self, rows: Ints, positions: Mapping[int, Ints] | None = None) -> Ints:
        """Add a table for each row of data, and tell their places."""
        self._rows.append(rows)
        self._positions.append({n: at for n, at in (positions or {}).items() if n in self.members})
        self.count += len(rows)
        return np.arange(self.count - len(rows), self.count)

    def finish(self, start: int) -> None:
        """Give the tables their places in the bank, from this row on, once all are added."""
        placed = self._positions[0] if self._positions else ()
        self.start, self.rows = start, _joined(self._rows)
        self.positions = {node: _joined([part[node] for part in self._positions]) for node in placed}

    @property
    def entries(self) -> int:
        """Entries of all tables."""
        return self.count * math.prod(self.sizes)

    def points_of(self, node: int) -> PointsKey:
        """Which points a placed member is on."""
        return node, self.sizes[self.members.index(node)]


@dataclass(frozen=True, eq=False)
class Step:
    """Sums over one variable in each of n pieces.

    Attributes:
        sizes: Axes of the product: the separator, then the variable.
        inputs: Rows of the tables that are multiplied (n, F), by the axes that they have.
        output: Row of the first message in the bank of its size; the others follow.
        cell: Number of the variable among all unknown cells (n,).
        separator: Numbers of the separator's variables (n, axes - 1).
    """

    sizes: Sizes
    inputs: Mapping[Axes, Tensor]
    output: int
    cell: Tensor
    separator: Tensor

    def bank(self, axes: Axes) -> Sizes:
        """The sizes of tables with these axes."""
        return tuple(self.sizes[axis] for axis in axes)


@dataclass(frozen=True, eq=False)
class Part:
    """Pieces of one kind, each of one row.

    Attributes:
        plan: How they are integrated out.
        rows: The rows of data (n,).
        pieces: Numbers of the pieces in their block (n,).
        positions: For nodes that are placed on points, where the rows stand in their placement (n,).
        placements: Where the points lie, if the model has said it.
    """

    plan: Plan
    rows: Ints
    pieces: Ints
    positions: Mapping[int, Ints] = field(default_factory=dict)
    placements: Mapping[int, Placed] = field(default_factory=dict)

    def at(self, some: slice | Ints) -> Part:
        """Some of them."""
        positions = {node: at[some] for node, at in self.positions.items()}
        return replace(self, rows=self.rows[some], pieces=self.pieces[some], positions=positions)


@dataclass(frozen=True, eq=False)
class Block:
    """Pieces that are summed together.

    Attributes:
        steps: The sums, each after those whose messages it reads.
        tables: Sources of tables of categories.
        row_tables: Sources of tables that read numbers.
        lengths: Sources of the lengths that points stand for, in each row of their placement.
        linear: Linear normal numbers that are integrated out.
        banks: Number of rows of each bank.
        placements: Where the points of placed nodes lie, by node and number of points.
        result: Row of each distinct piece's evidence in the bank of single numbers (D,).
        piece_row: The row of data of each piece (P,).
        piece: The distinct piece that it is (P,).
        cell_node: The node of each variable of the distinct pieces (cells,).
        cell_piece: The distinct piece that it belongs to (cells,).
        parts: If numbers meet, so that each should have no more points than it needs: the pieces of each kind.
        origin: The number that each piece had in the block from which this one was made (D,).
        prepared: What is written down once for these placements, if there is room to keep it.
    """

    steps: tuple[Step, ...]
    tables: tuple[Source, ...]
    row_tables: tuple[Source, ...]
    lengths: tuple[Source, ...]
    linear: tuple[LinearGroup, ...]
    banks: Mapping[Sizes, int]
    placements: Mapping[PointsKey, Placed]
    result: Tensor
    piece_row: Tensor
    piece: Tensor
    cell_node: Tensor
    cell_piece: Tensor
    parts: tuple[Part, ...] = ()
    origin: Tensor | None = None
    prepared: list[Any] = field(default_factory=list, init=False, repr=False)

    @property
    def distinct(self) -> int:
        """Number of distinct pieces."""
        return len(self.result)

    def empty_banks(self, replicas: int, like: Tensor) -> dict[Sizes, Tensor]:
        """Zero for every entry of every bank (R, rows, entries)."""
        return {sizes: like.new_zeros(replicas, rows, math.prod(sizes)) for sizes, rows in self.banks.items()}

    @property
    def largest_table(self) -> int:
        """Entries of the largest table of one piece."""
        return max((math.prod(step.sizes) for step in self.steps), default=1)

    @cached_property
    def elements(self) -> int:
        """Entries of all tables, for one replica."""
        banks = sum(rows * math.prod(sizes) for sizes, rows in self.banks.items())
        steps = sum(len(step.cell) * math.prod(step.sizes) for step in self.steps)
        rows = VALUES_OF_A_ROW * sum(source.entries for source in self.row_tables)
        return banks + steps + rows + sum(group.elements for group in self.linear)


Input = tuple[Source, Ints]  # a source of tables, and which of them each piece reads
# by the variable that is summed out of them, the variables of tables, and the tables
Ready = dict[int, list[tuple[tuple[int, ...], Input]]]


class BlockBuilder:
    """Collects the tables and sums of many kinds of pieces, so that all of them are run together."""

    def __init__(self, table: TableView, pieces: int) -> None:
        self.table, self.pieces, self.cells = table, pieces, 0
        self.sources: dict[tuple[str, int, tuple[int, ...], Sizes, int], Source] = {}
        self.placed: dict[Source, list[Placed]] = {}
        self.groups: dict[tuple[object, ...], tuple[Source, list[ClusterPart]]] = {}
        self.steps: dict[tuple[int, Sizes], tuple[Source, list[tuple[Mapping[Axes, list[Input]], Ints, Ints]]]] = {}
        self.results: list[tuple[Ints, Input]] = []
        self.cell_nodes: list[Ints] = []
        self.cell_pieces: list[Ints] = []

    def add(self, part: Part) -> Part:
        """Add pieces of one kind, and tell where they stand in the placements of this block."""
        made, rows, pieces = part.plan, part.rows, part.pieces
        ready: Ready = {node: [] for node in made.order}
        positions: dict[int, Ints] = {}
        for node in made.placed:
            source = self._source("length", node, (node,), made.table_sizes((node,)))
            positions[node] = source.extend(rows)
            if part.placements:
                at = torch.from_numpy(part.positions[node])
                moved = part.placements[node].at(torch.from_numpy(rows), at, made.sizes[node])
                self.placed.setdefault(source, []).append(moved)
            ready[node].append(((node,), (source, positions[node])))
        for factor in made.factors:
            ready[factor.members[-1]].append((factor.members, self._family(made, factor, rows, positions)))
        for cluster in made.clusters:
            table = self._cluster(made, cluster, rows, positions)
            if cluster.members:
                ready[cluster.members[-1]].append((cluster.members, table))
            else:
                self.results.append((pieces, table))
        self._add_steps(made, rows, pieces, ready)
        return Part(made, rows, pieces, positions)

    def _source(
        self, role: str, place: int, members: tuple[int, ...], sizes: Sizes, count: int = 0, first: int = 0
    ) -> Source:
        made = Source(sizes, place, members, count, first)
        return self.sources.setdefault((role, place, members, sizes, first), made)

    def _family(self, made: Plan, factor: Factor, rows: Ints, positions: Mapping[int, Ints]) -> Input:
        family, members = self.table.families[factor.family], factor.members
        sizes = made.table_sizes(members)
        if not family.is_table:
            source = self._source("rows", family.place, members, sizes, first=factor.first)
            return source, source.extend(rows, positions)
        seen = [(n, size) for n, size in zip(family.members, family.widths, strict=True) if n not in members]
        source = self._source("table", family.place, members, sizes, math.prod(size for _, size in seen))
        return source, self.table.code(rows, seen)

    def _cluster(self, made: Plan, cluster: Cluster, rows: Ints, positions: Mapping[int, Ints]) -> Input:
        """Clusters of equal dimensions, about as many factors, and equal tables go together."""
        width = max(len(self.table.families[v].columns) for v in cluster.families)
        sizes = made.table_sizes(cluster.members)
        kinds = (cluster.axes, len(cluster.placed), tuple(self.table.families[v].lines for v in cluster.lines))
        key = (len(cluster.coordinates), _power(len(cluster.families)), _power(width), sizes, kinds)
        tables, parts = self.groups.setdefault(key, (Source(sizes), []))
        parts.append((cluster, rows, {node: positions[node] for node in cluster.placed}))
        return tables, tables.extend(rows)

    def _add_steps(self, made: Plan, rows: Ints, pieces: Ints, ready: Ready) -> None:
        many = len(made.order)
        cells = self.cells + np.arange(len(rows) * many).reshape(len(rows), many)
        column = {node: i for i, node in enumerate(made.order)}
        self.cells += cells.size
        self.cell_nodes.append(np.tile(np.array(made.order, dtype=np.int64), len(rows)))
        self.cell_pieces.append(np.repeat(pieces, many))
        for clique, level in zip(made.cliques, made.levels, strict=True):
            sizes, node = made.table_sizes(clique), clique[-1]
            messages, parts = self.steps.setdefault((level, sizes), (Source(sizes[:-1]), []))
            inputs: dict[Axes, list[Input]] = {}
            for members, table in ready[node]:
                inputs.setdefault(tuple(clique.index(n) for n in members), []).append(table)
            parts.append((inputs, cells[:, column[node]], cells[:, [column[n] for n in clique[:-1]]]))
            message = (messages, messages.extend(rows))
            if len(clique) > 1:
                ready[clique[-2]].append((clique[:-1], message))
            else:
                self.results.append((pieces, message))

    # -- finish ----------------------------------------------------------------------------------------------------

    def block(self, piece_row: Ints, piece: Ints) -> Block:
        """The finished block: every source has its place in the banks."""
        banks: dict[Sizes, int] = {(): 1}
        growing = [source for source, _ in (*self.groups.values(), *self.steps.values())]
        for source in (*self.sources.values(), *growing):
            source.finish(banks.get(source.sizes, 1))
            banks[source.sizes] = source.start + source.count
        by_role: dict[str, list[Source]] = {"table": [], "rows": [], "length": []}
        placements: dict[PointsKey, Placed] = {}
        for (role, place, _, sizes, _), source in self.sources.items():
            by_role[role].append(source)
            if role == "length":
                known = self.placed.get(source)
                made = joined(known) if known else first_placement(self.table, place, source.rows, sizes[0])
                placements[place, sizes[0]] = made
        result = np.zeros(self.pieces, dtype=np.int64)
        for pieces, (source, places) in self.results:
            result[pieces] = source.start + places
        steps = sorted(self.steps.items(), key=lambda item: item[0][0])
        return Block(
            tuple(_step(sizes, messages, parts) for (_, sizes), (messages, parts) in steps),
            tuple(by_role["table"]),
            tuple(by_role["rows"]),
            tuple(by_role["length"]),
            tuple(
                linear_group(self.table, parts, tables.sizes, tables.start) for tables, parts in self.groups.values()
            ),
            banks,
            placements,
            torch.from_numpy(result),
            torch.from_numpy(piece_row),
            torch.from_numpy(piece),
            _joined(self.cell_nodes),
            _joined(self.cell_pieces),
        )


def _step(sizes: Sizes, messages: Source, parts: Sequence[tuple[Mapping[Axes, list[Input]], Ints, Ints]]) -> Step:
    """Join the pieces of a step; those that lack a table which others have read the empty row."""
    every = dict.fromkeys((axes for inputs, _, _ in parts for axes in inputs), 0)
    for inputs, _, _ in parts:
        for axes, tables in inputs.items():
            every[axes] = max(every[axes], len(tables))
    rows = {}
    for axes, width in every.items():
        indices = []
        for inputs, cells, _ in parts:
            index = np.zeros((len(cells), width), dtype=np.int64)
            for column, (source, places) in enumerate(inputs.get(axes, ())):
                index[:, column] = source.start + places
            indices.append(index)
        rows[axes] = _joined(indices)
    _, variables, separators = zip(*parts, strict=True)
    return Step(sizes, rows, messages.start, _joined(variables), _joined(separators))


def _joined(parts: Sequence[NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64))


def _power(number: int) -> int:
    """The next power of two, so that groups of similar sizes share their arrays."""
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows laid out for the closed-form backward map.

    Attributes:
        structure: Graph and mechanisms.
        table: The rows by families.
        planner: Plans of the kinds of pieces that there are.
        blocks: Pieces of unknowns.
        complete: Of each family the rows that show all of it.
    """

    structure: Structure
    table: TableView = field(repr=False)
    planner: Planner = field(repr=False)
    blocks: tuple[Block, ...]
    complete: Mapping[int, Sequence[Complete]]

    @property
    def batch(self) -> Batch:
        """The rows."""
        return self.table.batch

    @property
    def families(self) -> Sequence[FamilyView]:
        """All families, in topological order."""
        return self.table.families

    @property
    def pieces(self) -> int:
        """Number of pieces in all rows."""
        return sum(len(block.piece) for block in self.blocks)

    @property
    def largest_table(self) -> int:
        """Entries of the largest table of one row."""
        return max((block.largest_table for block in self.blocks), default=1)

    @cached_property
    def elements(self) -> int:
        """Entries of all tables for one replica: the cost of an evaluation."""
        return sum(block.elements for block in self.blocks)

    @property
    def is_remembered(self) -> bool:
        """Whether there is room to keep what no parameter changes."""
        return 8 * self.elements <= REMEMBERED * self.planner.options.memory

    @property
    def has_points(self) -> bool:
        """Whether there are points that follow the posterior."""
        return any(block.placements for block in self.blocks)

    @cached_property
    def entries_on_points(self) -> Mapping[int, int]:
        """Of each family the entries of the tables that rows have of it."""
        entries = dict.fromkeys(range(len(self.families)), 0)
        for source in (source for block in self.blocks for source in block.row_tables):
            entries[source.place] += source.entries
        return entries

    @property
    def is_outgrown(self) -> bool:
        """Whether posteriors have become too wide for the number of points that was chosen for them."""
        counts = [
            placement
            for block in self.blocks
            if block.origin is not None
            for (_, size), placement in block.placements.items()
            if size < self.planner.options.count_points
            and isinstance(placement, Placement)
            and placement.space.is_countable
        ]
        # of all rows: of the few that share a number of points one may well be grouped where columns are many
        return sum(one.grouped * len(one.rows) for one in counts) > OUTGROWN * sum(len(one.rows) for one in counts)

    def serves(self, replicas: int) -> bool:
        """Whether points were placed for this many replicas, or for all alike."""
        placed = (placement for block in self.blocks for placement in block.placements.values())
        return all(len(placement.centre) in (1, replicas) for placement in placed)

    def resized(self, coarse: Block, by: float = 1.0, unsure: Flags | None = None) -> list[Block]:
        """The pieces of a coarse block with as many points as their posteriors ask for, times ``by``.

        Pieces that are ``unsure`` (D,) have twice as many.
        """
        blocks = []
        for parts in fitting(self.planner, self._resized_parts(coarse, by, unsure)):
            pieces = np.concatenate([part.pieces for part in parts])
            block, _ = _block(self.table, parts, np.concatenate([part.rows for part in parts]), pieces)
            blocks.append(replace(block, origin=torch.from_numpy(pieces)))
        return blocks

    def _resized_parts(self, coarse: Block, by: float, unsure: Flags | None) -> Iterator[Part]:
        """Parts of a coarse block by the points that their pieces need, with where these lie."""
        most = self.planner.options.count_points
        needed, finest = (
            {key: two_sizes(needed_points(placement, times, most)) for key, placement in coarse.placements.items()}
            for times in (by, FINEST)
        )
        for part in coarse.parts:
            keys = {n: (n, part.plan.sizes[n]) for n in part.plan.placed}
            wanted = np.stack([needed[key][part.positions[n]] for n, key in keys.items()], 1)
            if unsure is not None:
                finer = np.stack([finest[key][part.positions[n]] for n, key in keys.items()], 1)
                wanted = np.where(unsure[part.pieces, None], finer, wanted)
            placements = {n: coarse.placements[key] for n, key in keys.items()}
            distinct, which = np.unique(wanted, axis=0, return_inverse=True)
            for number, sizes in enumerate(distinct.tolist()):
                made = self.planner.with_points(replace(part.plan.kind, points=tuple(zip(keys, sizes, strict=True))))
                some = part.at(np.flatnonzero(which.reshape(-1) == number))
                yield replace(some, plan=made, placements=placements)


def fitting(planner: Planner, parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts one after another, as many at a time as fit into memory.

    Neighbours in the graph stay together: every call for a family costs the same, however few rows it has, and a
    cut by rows would ask all families of a large graph in every block.
    """
    budget = max(1, planner.options.memory // 8)
    waiting: list[Part] = []
    taken = 0
    for one in sorted(parts, key=lambda part: part.plan.kind.families):
        own = one.plan.entries(planner.families)
        step = max(1, budget // own)
        for at in range(0, len(one.rows), step):
            some = one.at(slice(at, at + step))
            if waiting and taken + own * len(some.rows) > budget:
                yield waiting
                waiting, taken = [], 0
            waiting.append(some)
            taken += own * len(some.rows)
    if waiting:
        yield waiting


def _block(table: TableView, parts: Sequence[Part], piece_row: Ints, piece: Ints) -> tuple[Block, tuple[Part, ...]]:
    """One block of distinct pieces, which are numbered anew; ``piece`` are the old numbers of those in each row."""
    old = np.concatenate([part.pieces for part in parts])
    number = np.zeros(int(old.max()) + 1, dtype=np.int64)
    number[old] = np.arange(len(old))
    builder = BlockBuilder(table, len(old))
    added = tuple(builder.add(replace(part, pieces=number[part.pieces])) for part in parts)
    return builder.block(piece_row, number[piece]), added


def lay_out(
    structure: Structure, batch: Batch, options: EliminationOptions | None = None, *, keep: Collection[str] = ()
) -> Layout:
    """Lay the rows of a batch out.

    Args:
        structure: Graph and mechanisms.
        batch: Rows whose values and masks all replicas share.
        options: Sizes of the sums.
        keep: Nodes to fill in even in rows where nothing seen depends on them, so that their beliefs can be read.

    Raises:
        ModelError: Some piece needs a larger table than the options allow, or has an unknown that has no density.
        DataError: Replicas differ in their values.

    >>> import torch
    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> graph = otp.Graph([("z", "x"), ("z", "y")], hidden=["z"])
    >>> structure = Structure.bind(graph, {"z": m.Bernoulli(), "x": m.Bernoulli(), "y": m.Bernoulli()})
    >>> hot = torch.eye(2, dtype=torch.float64)[torch.tensor([0, 1, 1, 0])].unsqueeze(0)
    >>> mask = torch.ones(1, 4, 1, dtype=torch.bool)
    >>> batch = Batch({"x": hot, "y": hot}, {"x": mask, "y": mask}, torch.ones(1, 4, dtype=torch.float64))
    >>> layout = lay_out(structure, batch)  # rows that show the same are one piece
    >>> layout.pieces, layout.blocks[0].distinct, layout.largest_table
    (4, 2, 2)
    """
    layout = try_layout(structure, batch, EliminationOptions() if options is None else options, keep)
    if layout.planner.refused:
        raise ModelError(layout.planner.refused)
    return layout


def try_layout(structure: Structure, batch: Batch, options: EliminationOptions, keep: Collection[str]) -> Layout:
    """The same, which says why where the options do not serve."""
    structure.check_given(batch.mask)
    structure.check_limits(batch.values, batch.mask)
    for node, value in batch.values.items():
        if len(value) > 1 or len(batch.mask[node]) > 1:
            raise DataError(
                f"node {node!r} has {max(len(value), len(batch.mask[node]))} different tables, one for each replica; "
                "pieces of rows need one table that all replicas share"
            )
    table = TableView(describe_families(structure), batch)
    planner = Planner(table, options)
    blocks: list[Block] = []
    complete: list[tuple[Ints, Flags]] = []
    most = max(1, MATRIX_CELLS // len(table.families))
    for at in range(0, batch.rows, most):
        rows = np.arange(at, min(at + most, batch.rows))
        pieces = cut(table.families, needs(table.families, table.seen[rows], table.partly[rows], keep))
        complete.append((rows, pieces.complete))
        blocks += [] if planner.refused else _blocks(planner, rows, pieces)
    return Layout(structure, table, planner, tuple(blocks), table.complete(complete))


def _blocks(planner: Planner, rows: Ints, pieces: Pieces) -> list[Block]:
    """Lay the pieces of some rows out in blocks that fit into memory, coarse ones apart."""
    table = planner.table
    kind_hash, piece_hash = piece_hashes(table, rows, pieces)
    chosen = which = np.arange(len(piece_hash))
    if planner.options.merged:
        _, chosen, which = np.unique(piece_hash, return_index=True, return_inverse=True)
    which = which.reshape(-1)
    order = np.argsort(kind_hash[chosen], kind="stable")
    bounds = np.flatnonzero(np.diff(kind_hash[chosen][order])) + 1
    kinds = np.split(order, bounds) if len(order) else ()
    plans = []
    for part in kinds:
        plans.append(planner.first(_kind(table, rows, pieces, chosen[part[0]])))
        if planner.refused:
            return []
    data_row = rows[pieces.row[chosen]]
    parts = [Part(made, data_row[part], part) for made, part in zip(plans, kinds, strict=True)]
    blocks = []
    for is_coarse in (False, True):
        for together in fitting(planner, [part for part in parts if bool(part.plan.kind.points) == is_coarse]):
            inside = np.zeros(len(chosen), dtype=bool)
            inside[np.concatenate([part.pieces for part in together])] = True
            here = np.flatnonzero(inside[which])
            block, added = _block(table, together, rows[pieces.row[here]], which[here])
            blocks.append(replace(block, parts=added) if is_coarse else block)
    return blocks


def _kind(table: TableView, rows: Ints, pieces: Pieces, piece: int) -> Kind:
    cells = slice(*np.searchsorted(pieces.cell_piece, [piece, piece + 1]))
    touches = slice(*np.searchsorted(pieces.touch_piece, [piece, piece + 1]))
    nodes = tuple(pieces.cell_node[cells].tolist())
    row = int(rows[pieces.row[piece]])
    missing = tuple((node, table.missing(row, node)) for node in nodes if table.partly[row, node])
    return Kind(nodes, tuple(pieces.touch_node[touches].tolist()), missing)


USUAL_TABLE = 2**20  # entries of a table, before coarser points are tried
USUAL, COARSE, COARSEST = (24, 48), (16, 32), (9, 18)  # points of a number and of a count; fewer where many meet


def lay_out_within(
    structure: Structure, batch: Batch, budget: EliminationOptions, *, keep: Collection[str] = ()
) -> Layout:
    """Lay rows out by the first sizes within a budget that serve: coarser points cost far less than larger tables.

    A few rows in which several numbers meet may need coarser points, or larger tables, than all others.

    Raises:
        ModelError: None serves.
    """
    choices = [replace(budget, largest_table=min(USUAL_TABLE, budget.largest_table))]
    for grid, counts in (USUAL, COARSE) if budget.fine_table is None else (USUAL,):
        last = choices[-1]
        choices.append(replace(last, grid=min(grid, last.grid), count_points=min(counts, last.count_points)))
    choices.append(replace(choices[-1], largest_table=budget.largest_table))
    choices.append(replace(choices[-1], grid=COARSEST[0], count_points=COARSEST[1]))
    for options in dict.fromkeys(choices):
        layout = try_layout(structure, batch, options, keep)
        if not layout.planner.refused:
            return layout
    raise ModelError(layout.planner.refused)
