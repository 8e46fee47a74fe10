"""Collect the tables and sums of many kinds of pieces, so that all of them are run together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from otpdag.likelihood.elimination.blocks import (
    NO_NODE,
    Block,
    LengthSource,
    LinearSource,
    Part,
    PointsKey,
    RowSource,
    SplitSource,
    TableSource,
    TableView,
)
from otpdag.likelihood.elimination.families import Ints
from otpdag.likelihood.elimination.linear_normal import LinearGroup
from otpdag.likelihood.elimination.plans import Cluster, Factor, Kind, Plan
from otpdag.likelihood.elimination.points import Cloud, Placement, joined, to_line
from otpdag.likelihood.elimination.sum_product import Axes, Sizes, Step

HIDDEN_SPREAD = 2.0  # of a hidden number before the model says where it is
COUNT_CENTRE, COUNT_SPREAD = 5.0, 10.0  # of a hidden count


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


class _Key(NamedTuple):
    """What tells sources of tables apart."""

    role: str
    place: int
    members: tuple[int, ...]
    stored: Sizes


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
class _GrowingSplits:
    """Messages of one size between originals and copies while pieces are being added."""

    originals: _Growing
    copies: _Growing
    pieces: list[Ints] = field(default_factory=list)
    ranks: list[Ints] = field(default_factory=list)


@dataclass
class _GrowingGroup:
    """Clusters of one number of unknowns while pieces are being added."""

    tables: _Growing
    cluster: Cluster
    parts: list[tuple[Cluster, Kind, Ints, Mapping[int, Ints]]] = field(default_factory=list)


class BlockBuilder:
    """Collects the sources and steps of one block."""

    def __init__(self, table: TableView, pieces: int) -> None:
        self.table = table
        self.sources: dict[_Key, _Growing] = {}
        self.positions: dict[_Growing, list[Mapping[int, Ints]]] = {}
        self.placed: dict[_Growing, list[Placement | Cloud]] = {}
        self.groups: dict[tuple[object, ...], _GrowingGroup] = {}
        self.steps: dict[tuple[int, Sizes], _GrowingStep] = {}
        self.splits: dict[Sizes, _GrowingSplits] = {}
        self.results: list[tuple[Ints, Input]] = []
        self.pieces, self.cells, self.exact_entries = pieces, 0, 0
        self.cell_nodes: list[Ints] = []
        self.cell_pieces: list[Ints] = []
        self.cell_rows: list[Ints] = []

    def add(self, made: Plan, rows: Ints, pieces: Ints, placed: Mapping[int, Placement | Cloud] | None = None) -> Part:
        """Add pieces of one kind, with the row of data in which each occurs.

        Args:
            made: How they are integrated out.
            rows: The rows.
            pieces: Numbers of the pieces.
            placed: Where the points of placed nodes lie, if the model has said it already.
        """
        self.exact_entries += len(rows) * (made if made.exact is None else made.exact).cost
        ready: dict[int, list[tuple[tuple[int, ...], Input]]] = {node: [] for node in made.order}
        positions: dict[int, Ints] = {}
        for node in made.placed:
            sizes = made.table_sizes((node,))
            source = self._source(_Key("length", node, (node,), sizes), sizes)
            positions[node] = source.extend(rows)
            if placed is not None:
                self.placed.setdefault(source, []).append(placed[node])
            ready[node].append(((node,), (source, positions[node])))
        for factor in made.factors:
            ready[factor.variables[-1]].append((factor.variables, self._family(made, factor, rows, positions)))
        for cluster in made.clusters:
            table = self._cluster(made, cluster, rows, positions)
            if cluster.members:
                ready[cluster.variables[-1]].append((cluster.variables, table))
            else:
                self.results.append((pieces, table))
        self._add_splits(made, rows, pieces, ready)
        self._add_steps(made, rows, pieces, ready)
        return Part(made.kind, rows, pieces, positions)

    def _add_splits(
        self, made: Plan, rows: Ints, pieces: Ints, ready: Mapping[int, list[tuple[tuple[int, ...], Input]]]
    ) -> None:
        """Room for the messages between each copy and its original."""
        rank = {node: i for i, node in enumerate(dict.fromkeys(made.copies.values()))}
        for copy, node in made.copies.items():
            sizes = made.table_sizes((node,))
            if sizes not in self.splits:
                self.splits[sizes] = _GrowingSplits(_Growing(sizes, sizes), _Growing(sizes, sizes))
            splits = self.splits[sizes]
            ready[node].append(((node,), (splits.originals, splits.originals.extend(rows))))
            ready[copy].append(((copy,), (splits.copies, splits.copies.extend(rows))))
            splits.pieces.append(pieces)
            splits.ranks.append(np.full(len(rows), rank[node]))

    def _add_steps(
        self, made: Plan, rows: Ints, pieces: Ints, ready: Mapping[int, list[tuple[tuple[int, ...], Input]]]
    ) -> None:
        many = len(made.order)
        cells = self.cells + np.arange(len(rows) * many).reshape(len(rows), many)
        column = {node: i for i, node in enumerate(made.order)}
        self.cells += cells.size
        # a copy is no cell of the data
        nodes = [NO_NODE if node in made.copies else node for node in made.order]
        self.cell_nodes.append(np.tile(np.array(nodes, dtype=np.int64), len(rows)))
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
            elif node in made.next_root:
                ready[made.next_root[node]].append(((), message))
            else:
                self.results.append((pieces, message))

    def _source(self, key: _Key, sizes: Sizes, count: int = 0) -> _Growing:
        if key not in self.sources:
            self.sources[key] = _Growing(sizes, key.stored, count)
        return self.sources[key]

    def _family(self, made: Plan, factor: Factor, rows: Ints, positions: Mapping[int, Ints]) -> Input:
        family, members = self.table.families[factor.family], factor.members
        sizes, stored = tuple(made.sizes[n][0] for n in members), made.table_sizes(members)
        if not family.is_table:
            source = self._source(_Key("rows", family.place, members, stored), sizes)
            self.positions.setdefault(source, []).append({n: at for n, at in positions.items() if n in members})
            return source, source.extend(rows)
        seen = [(n, size) for n, size in zip(family.members, family.widths, strict=True) if n not in members]
        count = math.prod(size for _, size in seen)
        source = self._source(_Key("table", family.place, members, stored), sizes, count)
        return source, self.table.code(rows, seen)

    def _cluster(self, made: Plan, cluster: Cluster, rows: Ints, positions: Mapping[int, Ints]) -> Input:
        """Clusters of equal dimensions, about as many factors, and equal tables go together."""
        families = self.table.families
        width = max(len(families[v].columns) for v in cluster.families)
        sizes, stored = tuple(made.sizes[n][0] for n in cluster.members), made.table_sizes(cluster.members)
        key = (
            len(cluster.coordinates),
            _power(len(cluster.families)),
            _power(width),
            sizes,
            stored,
            tuple(n in cluster.placed for n in cluster.members),
            _power(cluster.band) if cluster.band else 0,
        )
        if key not in self.groups:
            self.groups[key] = _GrowingGroup(_Growing(sizes, stored), cluster)
        group = self.groups[key]
        group.parts.append((cluster, made.kind, rows, {node: positions[node] for node in cluster.placed}))
        return group.tables, group.tables.extend(rows)

    # -- finish ----------------------------------------------------------------------------------------------------

    def block(self, piece_row: Ints, piece: Ints, parts: Sequence[Part] = ()) -> Block:
        """The finished block: every source has its place in the banks."""
        banks: dict[Sizes, int] = {(): 1}
        growing = [group.tables for group in self.groups.values()] + [step.messages for step in self.steps.values()]
        growing += [source for splits in self.splits.values() for source in (splits.originals, splits.copies)]
        for source in (*self.sources.values(), *growing):
            source.start = banks.get(source.stored, 1)
            banks[source.stored] = source.start + source.count
        tables, row_tables, lengths = [], [], []
        placements: dict[PointsKey, Placement | Cloud] = {}
        for (role, place, members, _), source in self.sources.items():
            if role == "table":
                tables.append(TableSource(place, members, source.sizes, source.stored, source.count, source.start))
            elif role == "rows":
                row_tables.append(self._row_source(place, members, source))
            else:
                lengths.append(LengthSource(place, source.sizes, source.count, source.start))
                known = self.placed.get(source)
                placements[place, source.sizes[0]] = joined(known) if known else self._placement(place, source)
        linear = [LinearSource(self._group(g), g.tables.stored, g.tables.start) for g in self.groups.values()]
        result = np.zeros(self.pieces, dtype=np.int64)
        for pieces, (source, places) in self.results:
            result[pieces] = source.start + places
        steps = [_step(sizes, step) for (_, sizes), step in sorted(self.steps.items(), key=lambda item: item[0][0])]
        return Block(
            tuple(steps),
            tuple(tables),
            tuple(row_tables),
            tuple(lengths),
            tuple(linear),
            banks,
            placements,
            torch.from_numpy(result),
            torch.from_numpy(piece_row),
            torch.from_numpy(piece),
            _joined(self.cell_nodes),
            _joined(self.cell_pieces),
            _joined(self.cell_rows),
            parts=tuple(parts),
            splits=tuple(
                SplitSource(
                    sizes, splits.originals.start, splits.copies.start, _joined(splits.pieces), _joined(splits.ranks)
                )
                for sizes, splits in self.splits.items()
            ),
            exact_entries=self.exact_entries,
        )

    def _row_source(self, place: int, members: tuple[int, ...], source: _Growing) -> RowSource:
        parts = self.positions[source]
        positions = {node: _joined([part[node] for part in parts]) for node in parts[0]}
        family, rows = self.table.families[place], _joined(source.rows)
        vectors = any(self.table.families[node].widths[-1] > 1 for node in positions)
        in_part = place not in members and bool(self.table.partly[rows.numpy(), place].any())
        has_moments = family.is_linear and not vectors and not in_part
        return RowSource(place, members, source.sizes, source.stored, rows, positions, source.start, has_moments)

    def _placement(self, place: int, source: _Growing) -> Placement | Cloud:
        """Points around the column's own mean, until the model says where they are."""
        table, family = self.table, self.table.families[place]
        space = family.mechanism.space
        rows = _joined(source.rows)
        if family.widths[-1] > 1:
            return self._cloud(place, rows, source.sizes[0])
        seen = table.seen[:, place]
        centre, spread = (COUNT_CENTRE, COUNT_SPREAD) if space.is_countable else (0.0, HIDDEN_SPREAD)
        if seen.any():
            column = to_line(table.batch.values[family.node][0, torch.from_numpy(seen), 0], space)
            centre, spread = float(column.mean()), max(float(column.std(correction=0)), 1e-6)
        size = source.sizes[0]
        blank = torch.ones(1, len(rows)).to(table.like)
        return Placement(family.node, space, rows, size, centre * blank, spread * blank)

    def _cloud(self, place: int, rows: Tensor, size: int) -> Cloud:
        """Points around the columns' own means, until the model says where they are; what is seen of a row stays."""
        table, family, seen = self.table, self.table.families[place], self.table.seen[:, place]
        space = family.mechanism.space
        mean = torch.zeros(space.free_width).to(table.like)
        spread = torch.full_like(mean, HIDDEN_SPREAD)
        if seen.any():
            column = space.unconstrain(table.batch.values[family.node][0, torch.from_numpy(seen)])
            mean, spread = column.mean(0), column.std(0, correction=0).clamp(min=1e-6)
        centre, factor, free = mean.expand(1, len(rows), -1), torch.diag(spread).expand(1, len(rows), -1, -1), None
        if table.partly[:, place].any():
            free = ~table.batch.mask[family.node][0, rows]
            centre = torch.where(free, centre, space.unconstrain(table.batch.values[family.node][:, rows]))
            factor = factor * free.unsqueeze(-1)
        return Cloud(family.node, rows, size, centre, factor, space, free)

    def _group(self, group: _GrowingGroup) -> LinearGroup:
        table, families = self.table, self.table.families
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
            values.append(table.numbers[rows[:, None, None], columns])
            cells.append(np.broadcast_to(np.array(part.coordinates), (len(own), size, 2)))
            around.append(np.broadcast_to(np.array((*part.categories, *part.placed), dtype=int), (len(own), len(axes))))
        points = [group.tables.sizes[cluster.members.index(n)] for n in cluster.placed]
        placed = [
            [((c.placed[i], size), torch.from_numpy(at[c.placed[i]])) for c, _, _, at in group.parts]
            for i, size in enumerate(points)
        ]
        return LinearGroup(
            size,
            state_sizes,
            tuple(axes),
            tuple(map(tuple, placed)),
            group.tables.sizes,
            _joined(group.tables.rows),
            _joined(instance),
            _joined(config),
            _joined(unknown),
            _joined(seen),
            _joined(values).to(table.like),
            _joined(cells),
            _joined(around),
            _power(cluster.band) if cluster.band else 0,
        )

    def _configurations(
        self, cluster: Cluster, kind: Kind, rows: Ints, state_sizes: Sizes, many: int
    ) -> tuple[Ints, Ints]:
        """Rows of the equations for the distinct configurations of categories (m, T, F), and which one each row has."""
        table = self.table
        states = np.indices(state_sizes).reshape(len(state_sizes), -1) if state_sizes else np.zeros((0, 1), dtype=int)
        shown = np.zeros((len(rows), many), dtype=np.int64)
        moved = np.zeros((states.shape[1], many), dtype=np.int64)
        for column, v in enumerate(cluster.families):
            family = table.families[v]
            shown[:, column] = table.offsets[v] + table.code(rows, family.selectors)
            stride = family.configurations
            for place, size in family.selectors:
                stride //= size
                if place in cluster.categories:
                    moved[:, column] += stride * states[cluster.categories.index(place)]
        varies = any(place not in kind.nodes for v in cluster.families for place, _ in table.families[v].selectors)
        if varies:
            distinct, which = np.unique(shown, axis=0, return_inverse=True)
        else:
            distinct, which = shown[:1], np.zeros(len(rows), dtype=np.int64)
        return distinct[:, None] + moved, which.reshape(-1)

    def _columns(self, cluster: Cluster, many: int, width: int) -> tuple[Ints, Ints]:
        """For each column of each family which unknown it is, and where it stands among the numbers (F, W)."""
        table = self.table
        none = len(cluster.coordinates) + len(cluster.placed)
        of = {cell: i for i, cell in enumerate(cluster.coordinates)}
        of |= {(node, 0): len(cluster.coordinates) + i for i, node in enumerate(cluster.placed)}
        unknown = np.full((many, width), none, dtype=np.int64)
        columns = np.zeros((many, width), dtype=np.int64)
        for row, v in enumerate(cluster.families):
            cells = table.families[v].columns
            for column, cell in enumerate(cells):
                if cell in of:
                    unknown[row, column] = of[cell]
                else:
                    columns[row, column] = table.column_of[cell]
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


def _power(number: int) -> int:
    """The next power of two, so that groups of similar sizes share their arrays."""
    return 1 << max(number - 1, 0).bit_length()
