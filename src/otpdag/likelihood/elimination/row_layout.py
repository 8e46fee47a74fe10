r"""Lay a table out for the closed-form backward map: once, before any parameter is known.

Unknowns are cut into pieces (:mod:`~otpdag.likelihood.elimination.families`), pieces of one kind share a plan, plans of
one shape share the sums. Pieces of categories alone that show the same are one piece with a weight. What a row knows
completely is read once for all rows. The largest table and the cost of an evaluation are known from here on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.errors import DataError, ModelError
from otpdag.likelihood.elimination.block_builder import BlockBuilder
from otpdag.likelihood.elimination.blocks import Block, Complete, TableView
from otpdag.likelihood.elimination.families import FamilyView, Flags, Ints, Pieces, cut, describe_families, needs
from otpdag.likelihood.elimination.plans import Kind, Plan, plan, split_plan
from otpdag.likelihood.elimination.points import (
    COARSE_POINTS,
    FINEST,
    Cloud,
    Placement,
    cloud_size,
    needed_points,
    two_sizes,
    with_points,
)
from otpdag.structure import Structure

Hashes = npt.NDArray[np.uint64]

OUTGROWN = 0.05  # share of the rows whose counts no longer have a point each, at which points are counted anew
MATRIX_CELLS = 5_000_000  # cells of the tables of flags that are held at a time


@dataclass(frozen=True)
class EliminationOptions:
    """Sizes of the sums.

    Args:
        grid: Points of an unknown number that is not linear and normal.
        count_points: Most points of an unknown count.
        vector_points: Points of an unknown vector that is not linear and normal.
        largest_table: Most entries of one table of one row; a piece that needs more is approximated, or refused.
        split_table: Most entries of a table of a piece that is approximated, but for tables of single families; if
            zero, such pieces are refused.
        largest_family: Most entries of the table of a single family (or of linear normal numbers that meet) there.
        memory: Bytes that the tables of one block of rows may take, for all replicas together.
        replicas: How many parameter vectors will be evaluated at a time.
        merged: Whether pieces that show the same are one piece with a weight.
        fine_table: Entries of one table of one row up to which unknown numbers and counts have all their points.
            Where larger tables are needed they begin with a few, and get as many as their posteriors ask for. Numbers
            have half the grid where several unknowns of a piece are on points.
        integrate: Whether linear normal numbers are integrated exactly; otherwise they stand on points like others.
    """

    grid: int = 24
    count_points: int = 48
    vector_points: int = 512
    largest_table: int = 2**20
    split_table: int = 0
    largest_family: int = 2**20
    memory: int = 2**27
    replicas: int = 1
    merged: bool = True
    fine_table: int | None = None
    integrate: bool = True


@dataclass(frozen=True)
class Beyond:
    """What exact sums over some rows would take.

    Attributes:
        rows: Rows with a piece that is approximated.
        table: Entries of the largest table that an exact sum over one of them needs.
        nodes: The nodes of that table.
        entries: Entries of all tables of exact sums over all of them.
    """

    rows: int
    table: int
    nodes: tuple[str, ...]
    entries: int


@dataclass(frozen=True, eq=False)
class _Alike:
    """Pieces of one kind that need equally many points: their rows, numbers, and where the points lie, if known."""

    plan: Plan
    rows: Ints
    pieces: Ints
    places: Mapping[int, tuple[Placement | Cloud, Ints]] | None = None

    def split(self, rows: int) -> Iterator[_Alike]:
        """Not more than so many rows at a time."""
        for at in range(0, len(self.rows), rows):
            some = slice(at, at + rows)
            places = None
            if self.places is not None:
                places = {node: (placement, where[some]) for node, (placement, where) in self.places.items()}
            yield _Alike(self.plan, self.rows[some], self.pieces[some], places)

    def placed(self) -> dict[int, Placement | Cloud] | None:
        """The points, as many as the plan says; None if the model has not said where they are."""
        if self.places is None:
            return None
        return {
            node: with_points(placement, self.rows, where, self.plan.sizes[node][0])
            for node, (placement, where) in self.places.items()
        }


class Resizer:
    """Plans of kinds of pieces, and blocks of pieces whose points are as many as they need."""

    def __init__(self, table: TableView, options: EliminationOptions) -> None:
        self.table, self.options = table, options
        self.plans: dict[Kind, Plan] = {}
        self.refused = ""

    def first_plan(self, kind: Kind) -> Plan:
        """How a kind of piece is integrated out, before its posteriors are known: coarsely where that is much work."""
        if kind not in self.plans:
            made = self._plan(kind)
            if self.options.fine_table is not None and len(made.placed) > 1:
                made = plan(kind, self.table.families, self._points_of_several, integrate=self.options.integrate)
            if self.options.fine_table is not None and made.largest[0] > self.options.fine_table:
                few = tuple((n, min(COARSE_POINTS, made.sizes[n][0])) for n in made.placed if self._is_single(n))
                made = self._plan(replace(kind, points=few))
            if made.largest[0] > self.options.largest_table and self.options.split_table:
                made = self._split(made)
            self._check(made)
            self.plans[kind] = made
        return self.plans[kind]

    def _plan(self, kind: Kind) -> Plan:
        return plan(kind, self.table.families, self._points, integrate=self.options.integrate)

    def _split(self, exact: Plan) -> Plan:
        """Give nodes copies; where linear normal numbers meet too many categories to be integrated, points as well."""
        most = min(self.options.split_table, self.options.largest_table)
        made = split_plan(exact, most)
        if made.largest[0] <= self.options.largest_family or not exact.clusters:
            return made
        return split_plan(plan(exact.kind, self.table.families, self._points, integrate=False), most)

    def _is_single(self, node: int) -> bool:
        return self.table.families[node].widths[-1] == 1

    def resized(self, coarse: Block, by: float, unsure: Flags | None = None) -> list[Block]:
        """The pieces of a coarse block, with as many points as they need, in blocks that fit into memory."""
        return [self._finished(parts) for parts in self.fitting(self._resized_parts(coarse, by, unsure))]

    def fitting(self, parts: Iterable[_Alike]) -> Iterator[list[_Alike]]:
        """Parts one after another, as many at a time as fit into memory.

        Neighbours in the graph stay together: every call for a family costs the same, however few rows it has, and a
        cut by rows would ask all families of a large graph in every block.
        """
        budget = max(1, self.options.memory // (8 * self.options.replicas))
        waiting: list[_Alike] = []
        taken = 0
        for one in sorted(parts, key=lambda part: part.plan.kind.families):
            own = one.plan.entries(self.table.families)
            for some in one.split(max(1, budget // own)):
                if waiting and taken + own * len(some.rows) > budget:
                    yield waiting
                    waiting, taken = [], 0
                waiting.append(some)
                taken += own * len(some.rows)
        if waiting:
            yield waiting

    def _resized_parts(self, coarse: Block, by: float, unsure: Flags | None) -> Iterator[_Alike]:
        """Parts of a coarse block by the points that their pieces need, with where these lie."""
        most = self.options.count_points
        needed = {key: two_sizes(needed_points(placement, by, most)) for key, placement in coarse.placements.items()}
        finest = {key: two_sizes(needed_points(p, FINEST, most)) for key, p in coarse.placements.items()}
        for part in coarse.parts:
            made = self.plans[replace(part.kind, points=())]
            keys = {n: (n, made.sizes[n][0]) for n in made.placed}
            wanted = np.stack([needed[key][part.positions[n]] for n, key in keys.items()], 1)
            if unsure is not None:
                finer = np.stack([finest[key][part.positions[n]] for n, key in keys.items()], 1)
                wanted = np.where(unsure[part.pieces, None], finer, wanted)
            for sizes, here in _groups(wanted):
                plan = self._within_limits(replace(part.kind, points=tuple(zip(keys, sizes, strict=True))))
                places = {n: (coarse.placements[key], part.positions[n][here]) for n, key in keys.items()}
                yield _Alike(plan, part.rows[here], part.pieces[here], places)

    def _within_limits(self, kind: Kind) -> Plan:
        """A plan with these points, or with fewer where its largest table would be too large."""
        if kind not in self.plans:
            self.plans[kind] = self._plan_within_limits(kind)
        return self.plans[kind]

    def _plan_within_limits(self, kind: Kind) -> Plan:
        made = self._plan(kind)
        while made.largest[0] > self.options.largest_table and max(size for _, size in kind.points) > COARSE_POINTS:
            most = max(size for _, size in kind.points)
            kind = replace(
                kind,
                points=tuple((n, max(COARSE_POINTS, size // 2) if size == most else size) for n, size in kind.points),
            )
            made = self._plan(kind)
        return made

    def _finished(self, parts: Sequence[_Alike]) -> Block:
        """One block of parts, whose pieces are numbered anew."""
        total = sum(len(part.rows) for part in parts)
        builder, first = BlockBuilder(self.table, total), 0
        for part in parts:
            builder.add(part.plan, part.rows, first + np.arange(len(part.rows)), part.placed())
            first += len(part.rows)
        block = builder.block(np.concatenate([part.rows for part in parts]), np.arange(total))
        return replace(block, origin=torch.from_numpy(np.concatenate([part.pieces for part in parts])))

    def _points(self, family: FamilyView) -> int:
        if family.mechanism.space.is_countable:
            return self.table.count_points(family, self.options.count_points)
        width = family.mechanism.space.free_width
        return self.options.grid if width == 1 else cloud_size(width, self.options.vector_points)

    def _points_of_several(self, family: FamilyView) -> int:
        """The same where others are on points, too: half the grid of a number."""
        space, many = family.mechanism.space, self._points(family)
        return many // 2 if space.free_width == 1 and not space.is_countable else many

    def _check(self, made: Plan) -> None:
        entries, clique = made.largest
        most = self.options.largest_family if self.options.split_table else self.options.largest_table
        if entries > max(most, self.options.largest_table):
            families = self.table.families
            names = ", ".join(f"{families[made.copies.get(n, n)].node!r} ({made.sizes[n][0]})" for n in clique)
            self.refused = (
                f"unknown nodes {names} meet, whose joint states are a table of {entries} entries for one row; at most "
                f"{self.options.largest_table} are summed: raise `largest_table`, or use method='paper'"
            )


_FINE, _COARSE, _SPLIT = range(3)  # rooms of a piece: without points, on points, with copies


def _room_of(made: Plan) -> int:
    """Pieces whose points are counted later, and those with copies, have blocks of their own."""
    if not made.is_exact:
        return _SPLIT
    return _COARSE if made.kind.points else _FINE


def _groups(wanted: Ints) -> Iterator[tuple[tuple[int, ...], Ints]]:
    """Rows of a table (n, k) that are equal, with their places."""
    distinct, which = np.unique(wanted, axis=0, return_inverse=True)
    for number, sizes in enumerate(distinct.tolist()):
        yield tuple(sizes), np.flatnonzero(which.reshape(-1) == number)


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
        beyond: What exact sums would take, where some are approximate.
        refused: Why the rows cannot be laid out by these options, and no block is; empty if they can.
    """

    structure: Structure
    batch: Batch
    options: EliminationOptions
    families: tuple[FamilyView, ...]
    blocks: tuple[Block, ...]
    complete: tuple[Complete, ...]
    offsets: Mapping[int, int]
    shifts: Mapping[int, Tensor] = field(repr=False)
    resizer: Resizer = field(repr=False)
    beyond: Beyond | None = None
    refused: str = ""

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

    @cached_property
    def entries_on_points(self) -> Mapping[int, int]:
        """Of each family without a summary the entries of the tables that rows have of it."""
        entries = dict.fromkeys(range(len(self.families)), 0)
        for block in self.blocks:
            for source in block.row_tables:
                entries[source.family] += 0 if source.has_moments else len(source.rows) * math.prod(source.sizes)
        return entries

    @cached_property
    def alike(self) -> Mapping[int, tuple[int, ...]]:
        """For each family all that are of its kind."""
        kinds: dict[tuple[str, bool], list[int]] = {}
        for family in self.families:
            kinds.setdefault((family.kind, family.is_table), []).append(family.place)
        return {place: tuple(places) for places in kinds.values() for place in places}

    @property
    def codes(self) -> Ints:
        """States of categories, zero where they are not seen (N, V)."""
        return self.resizer.table.codes

    @cached_property
    def numbers(self) -> Tensor:
        """All coordinates of numbers, node by node and row by row (1, many)."""
        values = [self.batch.values[self.families[place].node] for place in self.number_offsets]
        return torch.cat([value.reshape(1, -1) for value in values] or [torch.zeros(1, 0)], 1).to(self.batch.weight)

    @cached_property
    def number_offsets(self) -> Mapping[int, int]:
        """Where the coordinates of each node begin among them."""
        offsets, at = {}, 0
        for family in self.families:
            if not family.categories[-1] and family.node in self.batch.values:
                offsets[family.place] = at
                at += self.batch.values[family.node].numel()
        return offsets

    def resized(self, coarse: Block, by: float = 1.0, unsure: Flags | None = None) -> list[Block]:
        """The pieces of a coarse block with as many points as their posteriors ask for, times ``by``.

        Pieces that are ``unsure`` (D,) have twice as many.
        """
        return self.resizer.resized(coarse, by, unsure)

    @property
    def is_outgrown(self) -> bool:
        """Whether posteriors have become too wide for the number of points that was chosen for them."""
        return any(
            size < self.options.count_points and isinstance(placement, Placement) and placement.grouped > OUTGROWN
            for block in self.blocks
            if block.origin is not None
            for (_, size), placement in block.placements.items()
        )

    def serves(self, replicas: int) -> bool:
        """Whether points were placed for this many replicas, or for all alike."""
        placed = (placement for block in self.blocks for placement in block.placements.values())
        return all(len(placement.centre) in (1, replicas) for placement in placed)


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
    >>> lay_out(structure, batch)
    Layout(4 rows; 4 pieces, 2 distinct; 1 steps, largest table 2, ... entries in all)
    """
    layout = try_layout(structure, batch, EliminationOptions() if options is None else options, keep=keep)
    if layout.refused:
        raise ModelError(layout.refused)
    return layout


def try_layout(
    structure: Structure, batch: Batch, options: EliminationOptions, *, keep: Collection[str] = ()
) -> Layout:
    """The same, which says why where the options do not serve."""
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
    """What all blocks of one layout share: the table, and plans that were made already."""

    def __init__(self, structure: Structure, batch: Batch, options: EliminationOptions, keep: frozenset[str]) -> None:
        self.structure, self.options, self.keep = structure, options, keep
        self.families = describe_families(structure)
        self.table = TableView(self.families, batch)
        self.resizer = Resizer(self.table, options)
        self.hashes = np.random.default_rng(0).integers(2**63, size=(2, len(self.families)), dtype=np.uint64)

    def layout(self) -> Layout:
        """Cut the pieces of all rows into blocks that fit into memory."""
        rows, blocks = self.table.batch.rows, []
        complete: list[tuple[Ints, Flags]] = []
        most = max(1, MATRIX_CELLS // len(self.families))
        for at in range(0, rows, most):
            chosen = np.arange(at, min(at + most, rows))
            made, flags = self.blocks(chosen)
            blocks += made
            complete.append((chosen, flags))
        return Layout(
            self.structure,
            self.table.batch,
            self.options,
            self.families,
            tuple(blocks),
            self.table.complete(complete),
            self.table.offsets,
            self.table.shifts,
            self.resizer,
            self._beyond(blocks),
            self.resizer.refused,
        )

    def _beyond(self, blocks: Sequence[Block]) -> Beyond | None:
        plans = [made for made in self.resizer.plans.values() if made.exact is not None]
        split_rows = [block.piece_row for block in blocks if not block.is_exact]
        if not split_rows:
            return None
        entries, nodes = max(made.exact.largest for made in plans if made.exact is not None)
        names = tuple(self.families[n].node for n in nodes)
        cost = sum(block.exact_entries for block in blocks if not block.is_exact)
        return Beyond(len(set(torch.cat(split_rows).tolist())), entries, names, cost)

    # -- pieces ----------------------------------------------------------------------------------------------------

    def blocks(self, rows: Ints) -> tuple[list[Block], Flags]:
        """Lay some rows out, coarse and approximate pieces apart; also which families are complete in which of them."""
        seen, partly = self.table.seen[rows], self.table.partly[rows]
        need = needs(self.families, seen, partly, self.keep)
        pieces = cut(self.families, need)
        kind_hash, piece_hash = self._hash(rows, pieces)
        chosen = which = np.arange(len(piece_hash))
        if self.options.merged:
            _, chosen, which = np.unique(piece_hash, return_index=True, return_inverse=True)
        order = np.argsort(kind_hash[chosen], kind="stable")
        bounds = np.flatnonzero(np.diff(kind_hash[chosen][order])) + 1
        which = which.reshape(-1)
        kinds = np.split(order, bounds) if len(order) else ()
        plans = [self.resizer.first_plan(self._kind(rows, pieces, chosen[part[0]])) for part in kinds]
        if self.resizer.refused:
            return [], pieces.complete
        data_row = rows[pieces.row[chosen]]
        alike = [_Alike(made, data_row[part], part) for made, part in zip(plans, kinds, strict=True)]
        rooms = [[one for one in alike if _room_of(one.plan) == room] for room in (_FINE, _COARSE, _SPLIT)]
        together = [parts for room in rooms for parts in self.resizer.fitting(room)]
        block_of = np.zeros(len(chosen), dtype=np.int64)
        for number, parts in enumerate(together):
            for part in parts:
                block_of[part.pieces] = number
        by_block = np.argsort(block_of[which], kind="stable")
        ends = np.searchsorted(block_of[which][by_block], np.arange(len(together) + 1))
        blocks = []
        for number, parts in enumerate(together):
            here = by_block[ends[number] : ends[number + 1]]
            blocks.append(self._block(parts, rows[pieces.row[here]], which[here]))
        return blocks, pieces.complete

    def _block(self, parts: Sequence[_Alike], piece_row: Ints, piece: Ints) -> Block:
        """One block of distinct pieces, which are numbered anew; ``piece`` are the old numbers of those in each row."""
        old = np.concatenate([part.pieces for part in parts])
        number = np.zeros(int(old.max()) + 1, dtype=np.int64)
        number[old] = np.arange(len(old))
        builder = BlockBuilder(self.table, len(old))
        added = [builder.add(part.plan, part.rows, number[part.pieces]) for part in parts]
        is_coarse = _room_of(parts[0].plan) == _COARSE
        return builder.block(piece_row, number[piece], added if is_coarse else ())

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
                shown = self.table.code(data_row[here], members)
            else:
                shown = data_row[here]
            evidence[here] = _mixed(shown.astype(np.uint64) + self.hashes[1][family.place])
        piece = kind.copy()
        np.add.at(piece, pieces.touch_piece, _mixed(evidence))
        return kind, piece

    def _hash_partly(self, rows: Ints, pieces: Pieces, kind: Hashes) -> None:
        """Vectors that miss different coordinates are of different kinds."""
        data_row = rows[pieces.row[pieces.cell_piece]]
        for node in np.flatnonzero(self.table.partly.any(0)):
            here = np.flatnonzero((pieces.cell_node == node) & self.table.partly[data_row, node])
            missing = ~self.table.batch.mask[self.families[node].node][0].cpu().numpy()[data_row[here]]
            names = _mixed(self.hashes[0][node] + np.arange(1, missing.shape[1] + 1, dtype=np.uint64))
            np.add.at(kind, pieces.cell_piece[here], _mixed(np.where(missing, names, np.uint64(0)).sum(1)))

    def _kind(self, rows: Ints, pieces: Pieces, piece: int) -> Kind:
        cells = slice(*np.searchsorted(pieces.cell_piece, [piece, piece + 1]))
        touches = slice(*np.searchsorted(pieces.touch_piece, [piece, piece + 1]))
        nodes = tuple(pieces.cell_node[cells].tolist())
        row = int(rows[pieces.row[piece]])
        missing = tuple((node, self.table.missing(row, node)) for node in nodes if self.table.partly[row, node])
        return Kind(nodes, tuple(pieces.touch_node[touches].tolist()), missing)


def _mixed(values: Hashes) -> Hashes:
    """Spread the bits of numbers over all 64 (the finaliser of splitmix64)."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
