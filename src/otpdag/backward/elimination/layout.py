r"""Lay a table out for the closed-form backward map: once, before any parameter is known.

Unknowns are cut into pieces (:mod:`~otpdag.backward.elimination.unknowns`), pieces of one kind share a plan, plans of
one shape share the sums. Pieces of categories alone that show the same are one piece with a weight. What a row knows
completely is read once for all rows. The largest table and the cost of an evaluation are known from here on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from otpdag.backward.elimination.blocks import (
    Block,
    Complete,
    LengthSource,
    LinearSource,
    RowSource,
    TableSource,
)
from otpdag.backward.elimination.families import FamilyView, describe_families
from otpdag.backward.elimination.kinds import Cluster, Factor, Kind, Plan, plan
from otpdag.backward.elimination.linear_normal import LinearGroup
from otpdag.backward.elimination.points import Placement, to_line
from otpdag.backward.elimination.sum_product import Axes, Sizes, Step
from otpdag.backward.elimination.unknowns import Flags, Ints, Pieces, cut, needs
from otpdag.data import Batch
from otpdag.errors import DataError, ModelError
from otpdag.structure import Structure

__all__ = ["EliminationOptions", "Layout", "lay_out"]

Floats = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]

PROBED_ROWS = 1024  # rows that tell how many fit into a block
ROOM = 0.8  # share of the memory that a block is meant to take, as blocks of equal rows differ
MATRIX_CELLS = 20_000_000  # cells of the tables of flags that are held at a time
HIDDEN_SPREAD = 2.0  # of a hidden number before the model says where it is
COUNT_CENTRE, COUNT_SPREAD = 5.0, 10.0  # of a hidden count
SMALLEST_WINDOW = 8  # points of a count that was never seen above zero


@dataclass(frozen=True)
class EliminationOptions:
    """Sizes of the sums.

    Args:
        grid: Points of an unknown number that is not linear and normal.
        count_points: Most points of an unknown count.
        largest_table: Most entries of one table of one row; a graph that needs more is refused.
        memory: Bytes that the tables of one block of rows may take, for all replicas together.
        replicas: How many parameter vectors will be evaluated at a time.
    """

    grid: int = 20
    count_points: int = 48
    largest_table: int = 2**20
    memory: int = 2**27
    replicas: int = 1



@dataclass(frozen=True, eq=False)
class Layout:
    """Rows laid out for the closed-form backward map.

    Attributes:
        structure: Graph and mechanisms.
        batch: The rows.
        options: Sizes of the sums.
        families: All families, in topological order.
        blocks: Pieces of unknowns.
        complete: What is read without unknowns.
        offsets: First row of each linear family among the equations.
        shifts: What is subtracted from each column of each linear family.
    """

    structure: Structure
    batch: Batch
    options: EliminationOptions
    families: tuple[FamilyView, ...]
    blocks: tuple[Block, ...]
    complete: tuple[Complete, ...]
    offsets: Mapping[int, int]
    shifts: Mapping[int, Tensor] = field(repr=False)

    def __repr__(self) -> str:
        return (
            f"Layout({self.batch.rows} rows; {self.pieces} pieces, {self.distinct} distinct; {self.steps} steps, "
            f"largest table {self.largest_table}, {self.elements} entries in all)"
        )

    @property
    def pieces(self) -> int:
        """Number of pieces in all rows."""
        return sum(len(block.piece) for block in self.blocks)

    @property
    def distinct(self) -> int:
        """Number of pieces that differ in nodes or evidence."""
        return sum(block.distinct for block in self.blocks)

    @property
    def steps(self) -> int:
        """Number of sums that are run one after the other."""
        return sum(len(block.steps) for block in self.blocks)

    @property
    def largest_table(self) -> int:
        """Entries of the largest table of one row."""
        return max((block.largest_table for block in self.blocks), default=1)

    @property
    def elements(self) -> int:
        """Entries of all tables for one replica: the cost of an evaluation."""
        return sum(block.elements for block in self.blocks)

    @property
    def has_points(self) -> bool:
        """Whether there are points that follow the posterior."""
        return any(block.placements for block in self.blocks)


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

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> graph = otp.Graph([("z", "x"), ("z", "y")], hidden=["z"])
    >>> structure = Structure.bind(graph, {"z": m.Bernoulli(), "x": m.Bernoulli(), "y": m.Bernoulli()})
    >>> hot = torch.eye(2, dtype=torch.float64)[torch.tensor([0, 1, 1, 0])].unsqueeze(0)
    >>> mask = torch.ones(1, 4, 1, dtype=torch.bool)
    >>> batch = Batch({"x": hot, "y": hot}, {"x": mask, "y": mask}, torch.ones(1, 4, dtype=torch.float64))
    >>> lay_out(structure, batch)
    Layout(4 rows; 4 pieces, 2 distinct; 1 steps, largest table 2, ... entries in all)
    """
    options = EliminationOptions() if options is None else options
    _check_batch(structure, batch)
    return _Builder(structure, batch, options, frozenset(keep)).layout()


def _check_batch(structure: Structure, batch: Batch) -> None:
    structure.check_given(batch.mask)
    for node, value in batch.values.items():
        if len(value) > 1 or len(batch.mask[node]) > 1:
            raise DataError(
                f"node {node!r} has {max(len(value), len(batch.mask[node]))} different tables, one for each replica; "
                "pieces of rows need one table that all replicas share"
            )


class _Builder:
    """What all blocks of one layout share: codes, columns, plans that were made already."""

    def __init__(self, structure: Structure, batch: Batch, options: EliminationOptions, keep: frozenset[str]) -> None:
        self.structure, self.batch, self.options, self.keep = structure, batch, options, keep
        self.families = describe_families(structure)
        self.like = next(iter(batch.values.values()))
        self.plans: dict[Kind, Plan] = {}
        self.hashes = np.random.default_rng(0).integers(2**63, size=(2, len(self.families)), dtype=np.uint64)
        self.offsets, rows = {}, 1
        for family in self.families:
            if family.is_linear:
                self.offsets[family.place] = rows
                rows += family.configurations
        self.seen, self.partly = self._seen()
        self.codes = self._codes()
        self.numbers, self.column_of = self._numbers()
        self.shifts = {f.place: self._shift(f) for f in self.families if f.is_linear}

    def layout(self) -> Layout:
        """Cut the rows into blocks that fit into memory."""
        rows, blocks = self.batch.rows, []
        complete: list[tuple[Ints, Flags]] = []
        most = max(1, MATRIX_CELLS // len(self.families))
        budget = max(1, self.options.memory // (8 * self.options.replicas))
        size = most if all(f.is_table for f in self.families) else PROBED_ROWS
        at, probing = 0, size < rows
        while at < rows:
            chosen = np.arange(at, min(at + size, at + most, rows))
            block, flags = self.block(chosen)
            fitting = max(1, int(ROOM * budget / max(block.elements, 1) * len(chosen)))
            too_large = block.elements > budget and len(chosen) > 1
            if too_large or (probing and fitting > len(chosen)):
                size, probing = min(fitting, len(chosen) // 2) if too_large else fitting, False
                continue
            at += len(chosen)
            if block.distinct:
                blocks.append(block)
            complete.append((chosen, flags))
        return Layout(
            self.structure, self.batch, self.options, self.families, tuple(blocks), self._complete(complete),
            self.offsets, self.shifts,
        )  # fmt: skip

    # -- what is seen ----------------------------------------------------------------------------------------------

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
        columns, places = [np.zeros((rows, 1)), np.ones((rows, 1))], {}
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

    def _complete(self, parts: Sequence[tuple[Ints, Flags]]) -> tuple[Complete, ...]:
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
            columns = torch.from_numpy(self.numbers[np.ix_(rows, [*at, 1])]).to(self.like)
            code = torch.from_numpy(self.code(rows, family.selectors))
            return Complete(family.place, index, code, columns - self.shifts[family.place])
        return Complete(family.place, index)

    def code(self, rows: Ints, members: Sequence[tuple[int, int]]) -> Ints:
        """Joint states of some categories, the last fastest."""
        code = np.zeros(len(rows), dtype=np.int64)
        for place, size in members:
            code = code * size + self.codes[rows, place]
        return code

    def points(self, family: FamilyView) -> int:
        """Number of points of a number or count; counts that are never large need few."""
        if family.mechanism.space.support != "count":
            return self.options.grid
        most = self.options.count_points
        if family.node not in self.batch.values:
            return most
        enough = 1.5 * float(self.batch.values[family.node].max()) + SMALLEST_WINDOW
        return most // 2 if enough <= most // 2 else most

    # -- pieces ----------------------------------------------------------------------------------------------------

    def block(self, rows: Ints) -> tuple[Block, Flags]:
        """Lay some rows out; also which families are complete in which of them."""
        seen, partly = self.seen[rows], self.partly[rows]
        need = needs(self.structure, seen, partly, self.keep)
        pieces = cut(self.structure, need)
        kind_hash, piece_hash = self._hash(rows, pieces)
        _, chosen, which = np.unique(piece_hash, return_index=True, return_inverse=True)
        made = _BlockBuilder(self, len(chosen))
        order = np.argsort(kind_hash[chosen], kind="stable")
        bounds = np.flatnonzero(np.diff(kind_hash[chosen][order])) + 1
        for part in np.split(order, bounds) if len(order) else ():
            kind = self._kind(rows, pieces, chosen[part[0]])
            made.add(self._plan(kind), rows[pieces.row[chosen[part]]], part)
        return made.block(rows[pieces.row], which.reshape(-1)), pieces.complete

    def _hash(self, rows: Ints, pieces: Pieces) -> tuple[Hashes, Hashes]:
        """Numbers that are equal for pieces of one kind, and for pieces that also show the same."""
        kind = np.zeros(len(pieces.row), dtype=np.uint64)
        np.add.at(kind, pieces.cell_piece, _mixed(self.hashes[0][pieces.cell_node]))
        np.add.at(kind, pieces.touch_piece, _mixed(self.hashes[1][pieces.touch_node]))
        self._hash_partly(rows, pieces, kind)
        evidence = np.zeros(len(pieces.touch_node), dtype=np.uint64)
        data_row = rows[pieces.row[pieces.touch_piece]]
        by_node = np.argsort(pieces.touch_node, kind="stable")
        ends = np.searchsorted(pieces.touch_node[by_node], np.arange(len(self.families) + 1))
        for family in self.families:
            here = by_node[ends[family.place] : ends[family.place + 1]]
            if family.is_table:
                members = list(zip(family.members, family.widths, strict=True))
                shown = self.code(data_row[here], members)
            else:
                shown = data_row[here]
            evidence[here] = _mixed(shown.astype(np.uint64) + self.hashes[1][family.place])
        piece = kind.copy()
        np.add.at(piece, pieces.touch_piece, _mixed(evidence))
        return kind, piece

    def _hash_partly(self, rows: Ints, pieces: Pieces, kind: Hashes) -> None:
        """Vectors that miss different coordinates are of different kinds."""
        data_row = rows[pieces.row[pieces.cell_piece]]
        for node in np.flatnonzero(self.partly.any(0)):
            here = np.flatnonzero((pieces.cell_node == node) & self.partly[data_row, node])
            missing = ~self.batch.mask[self.families[node].node][0].cpu().numpy()[data_row[here]]
            names = _mixed(self.hashes[0][node] + np.arange(1, missing.shape[1] + 1, dtype=np.uint64))
            np.add.at(kind, pieces.cell_piece[here], _mixed(np.where(missing, names, np.uint64(0)).sum(1)))

    def _missing(self, row: int, node: int) -> tuple[int, ...]:
        mask = self.batch.mask[self.families[node].node][0, row]
        return tuple(torch.nonzero(~mask)[:, 0].tolist())

    def _kind(self, rows: Ints, pieces: Pieces, piece: int) -> Kind:
        cells = slice(*np.searchsorted(pieces.cell_piece, [piece, piece + 1]))
        touches = slice(*np.searchsorted(pieces.touch_piece, [piece, piece + 1]))
        nodes = tuple(pieces.cell_node[cells].tolist())
        row = int(rows[pieces.row[piece]])
        missing = tuple((node, self._missing(row, node)) for node in nodes if self.partly[row, node])
        return Kind(nodes, tuple(pieces.touch_node[touches].tolist()), missing)

    def _plan(self, kind: Kind) -> Plan:
        made = self.plans.get(kind)
        if made is None:
            made = self.plans[kind] = plan(kind, self.families, self.points)
            self._check(made)
        return made

    def _check(self, made: Plan) -> None:
        entries, clique = made.largest
        if entries > self.options.largest_table:
            names = ", ".join(f"{self.families[n].node!r} ({made.sizes[n][0]})" for n in clique)
            raise ModelError(
                f"unknown nodes {names} meet, whose joint states are a table of {entries} entries for one row; at most "
                f"{self.options.largest_table} are summed: raise `largest_table`, or use method='paper'"
            )
        for node, _ in made.kind.missing:
            if node in made.placed:
                raise ModelError(
                    f"node {self.families[node].node!r} is a vector that is seen in part, and not linear and normal "
                    "with all that depends on it: it cannot be placed on points"
                )


class _Growing:
    """A source of tables while rows are being added to it."""

    def __init__(self, sizes: Sizes, stored: Sizes, count: int = 0) -> None:
        self.sizes, self.stored, self.count = sizes, stored, count
        self.rows: list[Ints] = []
        self.start = 0

    def extend(self, rows: Ints) -> Ints:
        """Add a table for each row of data, and tell their places."""
        self.rows.append(rows)
        self.count += len(rows)
        return np.arange(self.count - len(rows), self.count)


Input = tuple[_Growing, Ints]
"""A source of tables, and which of them each piece reads."""


@dataclass
class _GrowingStep:
    """Sums of one level and size while pieces are being added."""

    messages: _Growing
    inputs: list[dict[Axes, list[Input]]] = field(default_factory=list)
    cells: list[Ints] = field(default_factory=list)
    separators: list[Ints] = field(default_factory=list)


@dataclass
class _GrowingGroup:
    """Clusters of one number of unknowns while pieces are being added."""

    tables: _Growing
    cluster: Cluster
    parts: list[tuple[Cluster, Kind, Ints, Mapping[int, Ints]]] = field(default_factory=list)


class _BlockBuilder:
    """Collects the sources and steps of one block."""

    def __init__(self, builder: _Builder, pieces: int) -> None:
        self.builder = builder
        self.sources: dict[tuple[object, ...], _Growing] = {}
        self.positions: dict[_Growing, list[Mapping[int, Ints]]] = {}
        self.groups: dict[tuple[object, ...], _GrowingGroup] = {}
        self.steps: dict[tuple[int, Sizes], _GrowingStep] = {}
        self.results: list[tuple[Ints, Input]] = []
        self.pieces, self.cells = pieces, 0
        self.cell_nodes: list[Ints] = []
        self.cell_pieces: list[Ints] = []
        self.cell_rows: list[Ints] = []

    def add(self, made: Plan, rows: Ints, pieces: Ints) -> None:
        """Add pieces of one kind, with the row of data in which each occurs."""
        ready: dict[int, list[tuple[tuple[int, ...], Input]]] = {node: [] for node in made.order}
        positions: dict[int, Ints] = {}
        for node in made.placed:
            sizes = made.table_sizes((node,))
            source = self._source(("length", node), sizes, sizes)
            positions[node] = source.extend(rows)
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

    def _add_steps(
        self, made: Plan, rows: Ints, pieces: Ints, ready: Mapping[int, list[tuple[tuple[int, ...], Input]]]
    ) -> None:
        many = len(made.order)
        cells = self.cells + np.arange(len(rows) * many).reshape(len(rows), many)
        column = {node: i for i, node in enumerate(made.order)}
        self.cells += cells.size
        self.cell_nodes.append(np.tile(np.array(made.order, dtype=np.int64), len(rows)))
        self.cell_pieces.append(np.repeat(pieces, many))
        self.cell_rows.append(np.repeat(rows, many))
        for clique, level in zip(made.cliques, made.levels, strict=True):
            sizes, node = made.table_sizes(clique), clique[-1]
            step = self.steps.get((level, sizes))
            if step is None:
                step = self.steps[level, sizes] = _GrowingStep(_Growing(sizes[:-1], sizes[:-1]))
            inputs: dict[Axes, list[Input]] = {}
            for members, table in ready[node]:
                inputs.setdefault(tuple(clique.index(n) for n in members), []).append(table)
            step.inputs.append(inputs)
            step.cells.append(cells[:, column[node]])
            step.separators.append(cells[:, [column[n] for n in clique[:-1]]])
            message = (step.messages, step.messages.extend(rows))
            if len(clique) > 1:
                ready[clique[-2]].append((clique[:-1], message))
            else:
                self.results.append((pieces, message))

    def _source(self, key: tuple[object, ...], sizes: Sizes, stored: Sizes, count: int = 0) -> _Growing:
        key = (*key, stored)
        if key not in self.sources:
            self.sources[key] = _Growing(sizes, stored, count)
        return self.sources[key]

    def _family(self, made: Plan, factor: Factor, rows: Ints, positions: Mapping[int, Ints]) -> Input:
        family, members = self.builder.families[factor.family], factor.members
        sizes, stored = tuple(made.sizes[n][0] for n in members), made.table_sizes(members)
        if not family.is_table:
            source = self._source(("rows", family.place, members), sizes, stored)
            self.positions.setdefault(source, []).append({n: at for n, at in positions.items() if n in members})
            return source, source.extend(rows)
        seen = [(n, size) for n, size in zip(family.members, family.widths, strict=True) if n not in members]
        count = math.prod(size for _, size in seen)
        return self._source(("table", family.place, members), sizes, stored, count), self.builder.code(rows, seen)

    def _cluster(self, made: Plan, cluster: Cluster, rows: Ints, positions: Mapping[int, Ints]) -> Input:
        """Clusters of equal dimensions, about as many factors, and equal tables go together."""
        families = self.builder.families
        width = max(len(families[v].columns) for v in cluster.families)
        sizes, stored = tuple(made.sizes[n][0] for n in cluster.members), made.table_sizes(cluster.members)
        key = (
            len(cluster.coordinates), _power(len(cluster.families)), _power(width), sizes, stored,
            tuple(n in cluster.placed for n in cluster.members),
        )  # fmt: skip
        if key not in self.groups:
            self.groups[key] = _GrowingGroup(_Growing(sizes, stored), cluster)
        group = self.groups[key]
        group.parts.append((cluster, made.kind, rows, {node: positions[node] for node in cluster.placed}))
        return group.tables, group.tables.extend(rows)

    # -- finish ----------------------------------------------------------------------------------------------------

    def block(self, piece_row: Ints, piece: Ints) -> Block:
        """The finished block: every source has its place in the banks."""
        banks: dict[Sizes, int] = {(): 1}
        growing = [group.tables for group in self.groups.values()] + [step.messages for step in self.steps.values()]
        for source in (*self.sources.values(), *growing):
            source.start = banks.get(source.stored, 1)
            banks[source.stored] = source.start + source.count
        tables, row_tables, lengths = [], [], []
        placements: dict[int, Placement] = {}
        for (role, place, *members, _), source in self.sources.items():
            if role == "table":
                tables.append(TableSource(place, *members, source.sizes, source.stored, source.count, source.start))
            elif role == "rows":
                row_tables.append(self._row_source(place, *members, source))
            else:
                lengths.append(LengthSource(place, source.sizes, source.count, source.start))
                placements[place] = self._placement(place, source)
        linear = [LinearSource(self._group(g), g.tables.stored, g.tables.start) for g in self.groups.values()]
        result = np.zeros(self.pieces, dtype=np.int64)
        for pieces, (source, places) in self.results:
            result[pieces] = source.start + places
        steps = [_step(sizes, step) for (_, sizes), step in sorted(self.steps.items(), key=lambda item: item[0][0])]
        return Block(
            tuple(steps), tuple(tables), tuple(row_tables), tuple(lengths), tuple(linear), banks, placements,
            torch.from_numpy(result), torch.from_numpy(piece_row), torch.from_numpy(piece),
            _joined(self.cell_nodes), _joined(self.cell_pieces), _joined(self.cell_rows),
        )  # fmt: skip

    def _row_source(self, place: int, members: tuple[int, ...], source: _Growing) -> RowSource:
        parts = self.positions[source]
        positions = {node: _joined([part[node] for part in parts]) for node in parts[0]}
        return RowSource(place, members, source.sizes, source.stored, _joined(source.rows), positions, source.start)

    def _placement(self, place: int, source: _Growing) -> Placement:
        """Points around the column's own mean, until the model says where they are."""
        builder, family = self.builder, self.builder.families[place]
        support = family.mechanism.space.support
        rows = _joined(source.rows)
        seen = builder.seen[:, place]
        centre, spread = (COUNT_CENTRE, COUNT_SPREAD) if support == "count" else (0.0, HIDDEN_SPREAD)
        if seen.any():
            column = to_line(builder.batch.values[family.node][0, torch.from_numpy(seen), 0], support)
            centre, spread = float(column.mean()), max(float(column.std(correction=0)), 1e-6)
        size = source.sizes[0]
        blank = torch.ones(1, len(rows)).to(builder.like)
        return Placement(family.node, support, rows, size, centre * blank, spread * blank)

    def _group(self, group: _GrowingGroup) -> LinearGroup:
        builder, families = self.builder, self.builder.families
        cluster = group.cluster
        many = max(len(part.families) for part, _, _, _ in group.parts)
        width = max(len(families[v].columns) for part, _, _, _ in group.parts for v in part.families) + 1
        size = len(cluster.coordinates)
        state_sizes = tuple(families[n].mechanism.space.width for n in cluster.categories)
        axes = [(*cluster.categories, *cluster.placed).index(n) for n in cluster.members]
        config, unknown, seen, values, instance, cells, around, first = [], [], [], [], [], [], [], 0
        for part, kind, rows, _ in group.parts:
            own, which = self._configurations(part, kind, rows, state_sizes, many)
            config.append(own)
            instance.append(first + which)
            first += len(own)
            unknowns, columns = self._columns(part, many, width)
            unknown.append(np.broadcast_to(unknowns, (len(own), many, width)))
            flags = np.array([*(v not in kind.nodes for v in part.families), *[False] * (many - len(part.families))])
            seen.append(np.broadcast_to(flags, (len(own), many)))
            values.append(builder.numbers[rows[:, None, None], columns])
            cells.append(np.broadcast_to(np.array(part.coordinates), (len(own), size, 2)))
            around.append(np.broadcast_to(np.array((*part.categories, *part.placed), dtype=int), (len(own), len(axes))))
        placed = [[(c.placed[i], torch.from_numpy(at[c.placed[i]])) for c, _, _, at in group.parts]
                  for i in range(len(cluster.placed))]  # fmt: skip
        return LinearGroup(
            size, state_sizes, tuple(axes), tuple(map(tuple, placed)), group.tables.sizes, _joined(group.tables.rows),
            _joined(instance), _joined(config), _joined(unknown), _joined(seen), _joined(values).to(builder.like),
            _joined(cells), _joined(around),
        )  # fmt: skip

    def _configurations(
        self, cluster: Cluster, kind: Kind, rows: Ints, state_sizes: Sizes, many: int
    ) -> tuple[Ints, Ints]:
        """Rows of the equations for the distinct configurations of categories (m, T, F), and which one each row has."""
        builder = self.builder
        states = np.indices(state_sizes).reshape(len(state_sizes), -1) if state_sizes else np.zeros((0, 1), dtype=int)
        shown = np.zeros((len(rows), many), dtype=np.int64)
        moved = np.zeros((states.shape[1], many), dtype=np.int64)
        for column, v in enumerate(cluster.families):
            family = builder.families[v]
            shown[:, column] = builder.offsets[v] + builder.code(rows, family.selectors)
            stride = family.configurations
            for place, size in family.selectors:
                stride //= size
                if place in cluster.categories:
                    moved[:, column] += stride * states[cluster.categories.index(place)]
        varies = any(place not in kind.nodes for v in cluster.families for place, _ in builder.families[v].selectors)
        if varies:
            distinct, which = np.unique(shown, axis=0, return_inverse=True)
        else:
            distinct, which = shown[:1], np.zeros(len(rows), dtype=np.int64)
        return distinct[:, None] + moved, which.reshape(-1)

    def _columns(self, cluster: Cluster, many: int, width: int) -> tuple[Ints, Ints]:
        """For each column of each family which unknown it is, and where it stands among the numbers (F, W)."""
        builder = self.builder
        none = len(cluster.coordinates) + len(cluster.placed)
        of = {cell: i for i, cell in enumerate(cluster.coordinates)}
        of |= {(node, 0): len(cluster.coordinates) + i for i, node in enumerate(cluster.placed)}
        unknown = np.full((many, width), none, dtype=np.int64)
        columns = np.zeros((many, width), dtype=np.int64)
        for row, v in enumerate(cluster.families):
            cells = builder.families[v].columns
            for column, cell in enumerate(cells):
                if cell in of:
                    unknown[row, column] = of[cell]
                else:
                    columns[row, column] = builder.column_of[cell]
            columns[row, len(cells)] = 1
        return unknown, columns


def _step(sizes: Sizes, step: _GrowingStep) -> Step:
    """Join the pieces of a step; those that lack a table which others have read the empty row."""
    every = {axes: 0 for inputs in step.inputs for axes in inputs}
    for inputs in step.inputs:
        for axes, tables in inputs.items():
            every[axes] = max(every[axes], len(tables))
    rows = {}
    for axes, width in every.items():
        parts = []
        for inputs, cells in zip(step.inputs, step.cells, strict=True):
            index = np.zeros((len(cells), width), dtype=np.int64)
            for column, (source, places) in enumerate(inputs.get(axes, ())):
                index[:, column] = source.start + places
            parts.append(index)
        rows[axes] = _joined(parts)
    return Step(sizes, rows, step.messages.start, _joined(step.cells), _joined(step.separators))


def _joined(parts: Sequence[npt.NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64))


def _mixed(values: Hashes) -> Hashes:
    """Spread the bits of numbers over all 64 (the finaliser of splitmix64)."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def _power(number: int) -> int:
    """The next power of two, so that groups of similar sizes share their arrays."""
    return 1 << max(number - 1, 0).bit_length()
