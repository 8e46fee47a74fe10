"""Tables of families that read numbers, side by side: one call for a kind of families, however many tables they need.

What a family's members are in each entry of each table depends on data and points alone. Where each value comes from (a
cell of the data, a point, a state) is written down once for a block, as numbers of a pool; values are read from the
pool once for a placement of points; then every evaluation is one log-density of many rows. Families of one kind stand
side by side on the replica axis, filled up to the longest. Linear normal families are written as columns by the row of
their equations: log-densities are products of matrices, and so are second moments under beliefs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from otpdag.likelihood.elimination.blocks import Block, PointsKey, RowSource
from otpdag.likelihood.elimination.families import FamilyView, Flags, Ints, WeighedRows
from otpdag.likelihood.elimination.linear_normal import Equations
from otpdag.likelihood.elimination.points import Points
from otpdag.likelihood.elimination.sum_product import Banks, Sizes, put, taken
from otpdag.structure import Naturals

if TYPE_CHECKING:
    from otpdag.likelihood.elimination.row_layout import Layout


REMEMBERED = 4
"""Bytes of a layout, over those of a block, up to which what no parameter changes is kept: a thousand mixed columns of
500 rows with 10 % gaps need two to three, and take twice as long where all is prepared anew in every evaluation."""

FILLED = 1.5
"""How many times as many entries as it has an array may get, to stand beside the longest of its kind."""

ENTRIES_OF_A_CALL = 4096
"""Entries that take about as long as one more call."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where the entries of all arrays of a block, one after the other, stand in the banks.

    Attributes:
        banks: By size of the tables the rows of the bank (n,), and the entry of each of their cells (n * cells,). Cells
            beyond the true sizes have the entry after the last.
        cell: Of each entry its cell among those of all banks, one after the other; of one that only fills an array up
            the cell after the last.
    """

    banks: Mapping[Sizes, tuple[Tensor, Tensor]]
    cell: Tensor

    def put(self, banks: Banks, log_probs: Sequence[Tensor]) -> None:
        """Write the log-densities of all arrays (R, entries) into the banks; what is beyond a table is impossible."""
        if not log_probs:
            return
        flat = torch.cat([*log_probs, log_probs[0].new_full((len(log_probs[0]), 1), -torch.inf)], 1)
        for sizes, (rows, entries) in self.banks.items():
            banks[sizes].index_copy_(1, rows, flat.index_select(1, entries).reshape(len(flat), len(rows), -1))

    def taken(self, banks: Banks, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Read beliefs of all arrays (R, entries)."""
        if not lengths:
            return ()
        pool = [banks[sizes].index_select(1, rows).flatten(1) for sizes, (rows, _) in self.banks.items()]
        flat = torch.cat([*pool, pool[0].new_zeros(len(pool[0]), 1)], 1).index_select(1, self.cell)
        return flat.split(list(lengths), 1)


@dataclass(frozen=True, eq=False)
class TablePlaces:
    """The same where nothing is kept: tables go to the banks one after the other.

    Attributes:
        families: Of each family its tables, and which entry each entry of its arrays is, if they are not in order.
        arrays: How many arrays each family has.
    """

    families: tuple[tuple[tuple[RowSource, ...], Tensor | None], ...]
    arrays: tuple[int, ...]

    def put(self, banks: Banks, log_probs: Sequence[Tensor]) -> None:
        """Write the log-densities of all arrays (R, entries) into the banks."""
        waiting = iter(log_probs)
        for (sources, order), many in zip(self.families, self.arrays, strict=True):
            flat = torch.cat([next(waiting) for _ in range(many)], 1)
            if order is not None:
                flat = torch.empty_like(flat).index_copy_(1, order, flat)
            at = 0
            for source in sources:
                size = len(source.rows) * math.prod(source.sizes)
                table = flat[:, at : at + size].reshape(len(flat), len(source.rows), *source.sizes)
                put(banks, source.stored, source.start, table)
                at += size

    def taken(self, banks: Banks, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Read beliefs of all arrays (R, entries)."""
        beliefs: list[Tensor] = []
        for (sources, order), many in zip(self.families, self.arrays, strict=True):
            parts = [taken(banks, s.stored, s.start, len(s.rows), s.sizes).flatten(1) for s in sources]
            flat = torch.cat(parts, 1)
            flat = flat if order is None else flat.index_select(1, order)
            beliefs += flat.split(list(lengths[len(beliefs) : len(beliefs) + many]), 1)
        return tuple(beliefs)


@dataclass(frozen=True, eq=False)
class PlainRows:
    """Entries as rows of families of one kind, side by side.

    Attributes:
        families: The families; the first stands for all.
        lengths: Entries of each family; others only fill up.
        seen: Whether the node is seen (K * E,).
        values: Values of the members by the first family's names (1 or R, K, E, width).
        mask: Which cells of a single family's node are seen, where that is not all of them (1, E, width).
    """

    families: tuple[FamilyView, ...]
    lengths: tuple[int, ...]
    seen: Tensor
    values: Mapping[str, Tensor]
    mask: Tensor | None = None

    def log_prob(self, naturals: Naturals, replicas: int) -> Tensor:
        """Log-densities of all entries (R, K * E)."""
        family = self.families[0]
        if len(self.families) == 1:
            values = {name: value[:, 0] for name, value in self.values.items()}
            return family.log_prob(naturals[family.node], values, self.mask).expand(replicas, -1)
        each = [naturals[one.node] for one in self.families]
        params = {
            name: torch.stack([own[name].expand(replicas, *own[name].shape[1:]) for own in each], 1).flatten(0, 1)
            for name in each[0]
        }
        values = {name: v.expand(replicas, *v.shape[1:]).flatten(0, 1) for name, v in self.values.items()}
        return family.log_prob(params, values).reshape(replicas, -1)

    def each(self, belief: Tensor) -> Iterator[tuple[FamilyView, WeighedRows]]:
        """The rows of each family, with their share of the beliefs (R, K * E)."""
        by_family = belief.reshape(len(belief), len(self.families), -1)
        for number, (family, length) in enumerate(zip(self.families, self.lengths, strict=True)):
            roles = zip(family.names, self.families[0].names, strict=True)
            values = {name: self.values[role][:, number, :length] for name, role in roles}
            yield family, WeighedRows(values, by_family[:, number, :length], self.mask)


@dataclass(frozen=True, eq=False)
class LinearRows:
    """Entries as rows of linear normal families, by the row of their equations.

    Attributes:
        rows: Rows of the equations (G,).
        seen: Whether the node is seen (G * E,).
        columns: Own coordinates, numeric parents and one, less their shift (1 or R, G, E, W).
    """

    rows: Tensor
    seen: Tensor
    columns: Tensor

    def log_prob(self, equations: Equations) -> Tensor:
        """Log-densities of all entries (R, G * E)."""
        width = self.columns.shape[-1]
        own, shift = equations.coefficients[:, self.rows, :, :width], equations.shift[self.rows, None, :width]
        own = torch.cat([own[..., :-1], own[..., -1:] + (own * shift).sum(-1, keepdim=True)], -1)
        noise = self.columns @ own.mT
        return (equations.constants[:, self.rows, None] - 0.5 * noise.square().sum(-1)).flatten(1)

    def moments(self, weight: Tensor) -> Tensor:
        """Second moments of the columns under weights (R, G * E): (R, G, W, W)."""
        weight = weight.reshape(len(weight), len(self.rows), -1, 1)
        return (self.columns * weight).mT @ self.columns


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a block needs that no parameter changes: points, rows of families on them, and where these stand."""

    points: Mapping[PointsKey, Points]
    rows: tuple[PlainRows | LinearRows, ...]
    places: Places | TablePlaces


def prepare(layout: Layout, block: Block) -> Prepared:
    """Write the points and rows of a block down; of a layout that fits into memory only once."""
    known: Prepared | None = block.__dict__.get("_prepared")
    if known is not None:
        return known
    points = {key: placement.points() for key, placement in block.placements.items()}
    if 8 * layout.elements > REMEMBERED * layout.options.memory:
        return _prepared_once(layout, block, points)
    recipes: _Recipes | None = block.shared.get("recipes")
    recipes = _recipes(layout, block) if recipes is None else recipes
    pool = _pool(layout, points)
    prepared = Prepared(points, tuple(recipe.rows(layout, pool) for recipe in recipes.each), recipes.places)
    block.__dict__["_prepared"] = prepared
    block.shared["recipes"] = recipes
    return prepared


def _pool(layout: Layout, points: Mapping[PointsKey, Points]) -> Tensor:
    """All coordinates of numbers: those of the data, then those of all points (1 or R, many)."""
    on_points = [one.values.flatten(1) for one in points.values()]
    replicas = max((len(one) for one in on_points), default=1)
    return torch.cat([one.expand(replicas, -1) for one in (layout.numbers, *on_points)], 1)


# -- recipes: where each value comes from ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Recipe:
    """How the rows of one array are read from a pool of numbers.

    Attributes:
        families: The families, or of linear ones that of each row of the equations.
        lengths: Entries of each; others only fill up.
        seen: Whether the node is seen (K * E,).
        members: Of each member the number of each of its coordinates in the pool (K * E * width,), or, of a category,
            its states as one-hot vectors (1, K, E, width).
        mask: Which cells of a single family's node are seen, where that is not all of them (1, E, width).
        equations: Rows of the equations of linear families (K,).
    """

    families: tuple[FamilyView, ...]
    lengths: tuple[int, ...]
    seen: Tensor
    members: tuple[Tensor, ...]
    mask: Tensor | None
    equations: Tensor | None

    def rows(self, layout: Layout, pool: Tensor) -> PlainRows | LinearRows:
        """Read the values."""
        family, many = self.families[0], len(self.lengths)
        values = {}
        for name, at, width, is_state in zip(family.names, self.members, family.widths, family.categories, strict=True):
            values[name] = at if is_state else pool.index_select(1, at).reshape(len(pool), many, -1, width)
        if self.equations is None:
            return PlainRows(self.families, self.lengths, self.seen, values, self.mask)
        names = dict(zip(family.members, family.names, strict=True))
        columns = [values[names[place]][..., cell] for place, cell in family.columns]
        shift = torch.stack([layout.shifts[one.place] for one in self.families]).unsqueeze(1)
        return LinearRows(self.equations, self.seen, torch.stack([*columns, torch.ones_like(columns[0])], -1) - shift)


@dataclass(frozen=True, eq=False)
class _Recipes:
    each: tuple[_Recipe, ...]
    places: Places


@dataclass(frozen=True, eq=False)
class _Entries:
    """Entries of all tables of one family, or those that one row of its equations is for.

    Attributes:
        family: The family.
        number: The entries' numbers among those of all tables (E,).
        members: Of each member its state (E,), or the numbers of its coordinates in the pool (E, width).
        seen: Whether the node is seen (E,).
        mask: Which of the node's cells are seen (E, width).
        row: The row of the equations.
    """

    family: FamilyView
    number: Ints
    members: tuple[Ints, ...]
    seen: Flags
    mask: Flags
    row: int | None = None

    def at(self, which: Ints, row: int) -> _Entries:
        """Some entries, which a row of the equations is for."""
        members = tuple(member[which] for member in self.members)
        return _Entries(self.family, self.number[which], members, self.seen[which], self.mask[which], row)


def _recipes(layout: Layout, block: Block) -> _Recipes:
    """Sort the tables of a block into arrays: one for each kind of families, or of rows of equations."""
    offsets = _points_offsets(layout, block)
    by_family: dict[tuple[int, bool], list[RowSource]] = {}
    for source in block.row_tables:
        by_family.setdefault((source.family, source.has_moments), []).append(source)
    kinds: dict[object, list[_Entries]] = {}
    first, ordered = 0, []
    for (place, is_linear), sources in by_family.items():
        family = layout.families[place]
        entries = _entries(layout, family, sources, offsets, first)
        first += len(entries.number)
        ordered += sources
        if is_linear:
            kinds.setdefault((family.widths, family.categories), []).extend(_by_equation(layout, entries))
        else:
            kinds.setdefault(family.kind if entries.mask.all() else place, []).append(entries)
    groups = [group for alike in kinds.values() for group in _of_like_lengths(alike)]
    position, end = np.zeros(first + 1, dtype=np.int64), 0
    for group in groups:
        longest = max(len(one.number) for one in group)
        for one in group:
            position[one.number] = end + np.arange(len(one.number))
            end += longest
    position[-1] = end
    return _Recipes(tuple(_recipe(group, layout.numbers) for group in groups), _places(ordered, position))


def _points_offsets(layout: Layout, block: Block) -> dict[PointsKey, int]:
    """Where the points of each placement begin in the pool."""
    offsets, at = {}, layout.numbers.shape[1]
    for key, placement in block.placements.items():
        offsets[key] = at
        at += len(placement.rows) * key[1] * layout.families[key[0]].widths[-1]
    return offsets


def _entries(
    layout: Layout, family: FamilyView, sources: Sequence[RowSource], offsets: Mapping[PointsKey, int], first: int
) -> _Entries:
    """The entries of all tables of a family, table by table."""
    members: list[list[Ints]] = [[] for _ in family.members]
    seen, masks = [], []
    for source in sources:
        rows, shape = source.rows.numpy(), (len(source.rows), *source.sizes)
        for role, (place, width) in enumerate(zip(family.members, family.widths, strict=True)):
            value = _member(layout, source, place, width, offsets, is_state=family.categories[role])
            wide = () if family.categories[role] else (width,)
            members[role].append(np.broadcast_to(value, (*shape, *wide)).reshape(-1, *wide))
        is_seen = family.place not in source.members
        many = math.prod(shape)
        seen.append(np.full(many, is_seen))
        mask = np.ones((1, 1), dtype=bool)
        if is_seen and family.widths[-1] > 1 and not family.categories[-1]:
            mask = layout.batch.mask[family.node][0].numpy()[rows].repeat(math.prod(source.sizes), 0)
        masks.append(np.broadcast_to(mask, (many, family.widths[-1])))
    joined = tuple(np.concatenate(parts) for parts in members)
    total = len(joined[0])
    return _Entries(family, first + np.arange(total), joined, np.concatenate(seen), np.concatenate(masks))


def _member(
    layout: Layout, source: RowSource, place: int, width: int, offsets: Mapping[PointsKey, int], *, is_state: bool
) -> Ints:
    """Where the values of one member of a family come from, broadcast over rows and axes of the tables."""
    ones = [1] * len(source.members)
    if place not in source.members:
        rows = source.rows.numpy()
        if is_state:
            return layout.codes[rows, place].reshape(-1, *ones)
        return (layout.number_offsets[place] + width * rows).reshape(-1, *ones, 1) + np.arange(width)
    axis = source.members.index(place)
    size = source.sizes[axis]
    shape = list(ones)
    shape[axis] = size
    if is_state:
        return np.arange(size).reshape(1, *shape)
    first = offsets[source.points_of(place)] + width * size * source.positions[place].numpy()
    points = first.reshape(-1, *ones) + width * np.arange(size).reshape(1, *shape)
    return np.asarray(points[..., None] + np.arange(width))


def _by_equation(layout: Layout, entries: _Entries) -> list[_Entries]:
    """Entries of a linear family, apart by the row of its equations."""
    family, first = entries.family, layout.offsets[entries.family.place]
    code = np.zeros(len(entries.number), dtype=np.int64)
    for place, size in family.selectors:
        code = code * size + entries.members[family.members.index(place)]
    order = np.argsort(code, kind="stable")
    ends = np.searchsorted(code[order], np.arange(family.configurations + 1))
    parts = [order[begin:end] for begin, end in pairwise(ends)]
    return [entries.at(part, first + row) for row, part in enumerate(parts) if len(part)]


def _of_like_lengths(alike: Sequence[_Entries]) -> Iterator[list[_Entries]]:
    """Groups that may be filled up to the length of their longest."""
    group: list[_Entries] = []
    for one in sorted(alike, key=lambda entries: -len(entries.number)):
        longest = len(group[0].number) if group else 0
        if group and longest > max(FILLED * len(one.number), len(one.number) + ENTRIES_OF_A_CALL):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _recipe(group: Sequence[_Entries], like: Tensor) -> _Recipe:
    """The entries of a group side by side, each filled up by its first."""
    longest = max(len(one.number) for one in group)
    fill = [np.r_[0 : len(one.number), np.zeros(longest - len(one.number), dtype=np.int64)] for one in group]
    family = group[0].family
    members = []
    for role, (width, is_state) in enumerate(zip(family.widths, family.categories, strict=True)):
        value = torch.from_numpy(np.stack([one.members[role][at] for one, at in zip(group, fill, strict=True)]))
        members.append(one_hot(value, width).to(like).unsqueeze(0) if is_state else value.flatten().int())
    masked = not all(one.mask.all() for one in group)
    rows = [one.row for one in group if one.row is not None]
    return _Recipe(
        tuple(one.family for one in group),
        tuple(len(one.number) for one in group),
        torch.from_numpy(np.concatenate([one.seen[at] for one, at in zip(group, fill, strict=True)])),
        tuple(members),
        torch.from_numpy(group[0].mask).unsqueeze(0) if masked and not rows else None,
        torch.tensor(rows) if rows else None,
    )


def _places(sources: Sequence[RowSource], position: Ints) -> Places:
    """Where the tables of all sources stand, whose entries are numbered in turn and have these positions."""
    rows: dict[Sizes, list[Ints]] = {}
    cells: dict[Sizes, list[Ints]] = {}
    first = 0
    for source in sources:
        many = len(source.rows)
        size = many * math.prod(source.sizes)
        entry = np.arange(first, first + size).reshape(many, *source.sizes)
        if source.sizes != source.stored:
            beyond = [(0, whole - own) for own, whole in zip(source.sizes, source.stored, strict=True)]
            entry = np.pad(entry, [(0, 0), *beyond], constant_values=-1)
        first += size
        rows.setdefault(source.stored, []).append(np.arange(source.start, source.start + many))
        cells.setdefault(source.stored, []).append(entry.reshape(-1))
    end, at = int(position[-1]), 0
    cell = np.full(end + 1, sum(len(part) for parts in cells.values() for part in parts), dtype=np.int64)
    banks = {}
    for sizes, parts in cells.items():
        entries = position[np.concatenate(parts)]
        cell[entries] = np.arange(at, at + len(entries))
        at += len(entries)
        banks[sizes] = (torch.from_numpy(np.concatenate(rows[sizes])), torch.from_numpy(entries).int())
    return Places(banks, torch.from_numpy(cell[:-1]).int())


# -- large blocks, of which nothing is kept ----------------------------------------------------------------------------


def _prepared_once(layout: Layout, block: Block, points: Mapping[PointsKey, Points]) -> Prepared:
    """Rows family by family: with many rows one more call costs nothing, and numbers of a pool would cost memory."""
    by_family: dict[tuple[int, bool], list[RowSource]] = {}
    for source in block.row_tables:
        by_family.setdefault((source.family, source.has_moments), []).append(source)
    rows: list[PlainRows | LinearRows] = []
    families: list[tuple[tuple[RowSource, ...], Tensor | None]] = []
    arrays = []
    for (place, is_linear), sources in by_family.items():
        family = layout.families[place]
        made, order = _rows_of(layout, family, sources, points, is_linear=is_linear)
        rows += made
        families.append((tuple(sources), order))
        arrays.append(len(made))
    return Prepared(points, tuple(rows), TablePlaces(tuple(families), tuple(arrays)))


def _rows_of(
    layout: Layout,
    family: FamilyView,
    sources: Sequence[RowSource],
    points: Mapping[PointsKey, Points],
    *,
    is_linear: bool,
) -> tuple[list[PlainRows | LinearRows], Tensor | None]:
    """The rows of one family, of a linear one by the row of its equations; and which entry each is."""
    parts = [_values(layout, source, points) for source in sources]
    replicas = {name: max(len(part[name]) for part in parts) for name in family.names}
    values = {
        name: torch.cat([part[name].expand(replicas[name], -1, -1) for part in parts], 1) for name in family.names
    }
    seen = torch.cat([torch.full((len(s.rows) * math.prod(s.sizes),), family.place not in s.members) for s in sources])
    if not is_linear:
        masks = [_mask(layout, source) for source in sources]
        mask = None if all(bool(one.all()) for one in masks) else torch.cat(masks, 1)
        spread = {name: value.unsqueeze(1) for name, value in values.items()}
        return [PlainRows((family,), (len(seen),), seen, spread, mask)], None
    names = dict(zip(family.members, family.names, strict=True))
    most = max(replicas.values())
    columns = [values[names[place]][..., cell].expand(most, -1) for place, cell in family.columns]
    stacked = torch.stack([*columns, torch.ones_like(columns[0])], -1) - layout.shifts[family.place]
    code = torch.zeros(len(seen), dtype=torch.long)
    for place, size in family.selectors:
        code = code * size + values[names[place]][0].argmax(-1)
    order = torch.argsort(code, stable=True) if family.configurations > 1 else None
    if order is not None:
        stacked, seen = stacked[:, order], seen[order]
    first, made, at = layout.offsets[family.place], [], 0
    for row, many in enumerate(torch.bincount(code, minlength=family.configurations).tolist()):
        if many:
            own = slice(at, at + many)
            made.append(LinearRows(torch.tensor([first + row]), seen[own], stacked[:, None, own]))
        at += many
    return list(made), order


def _values(layout: Layout, source: RowSource, points: Mapping[PointsKey, Points]) -> dict[str, Tensor]:
    """Values of a family's members in each entry of a source's tables: (1 or R, n * entries, width)."""
    family, axes = layout.families[source.family], len(source.members)
    values: dict[str, Tensor] = {}
    for name, place, width in zip(family.names, family.members, family.widths, strict=True):
        if place not in source.members:
            value = layout.batch.values[name].index_select(1, source.rows)
            value = value.reshape(*value.shape[:2], *[1] * axes, width)
        else:
            shape = [1] * axes
            at = source.members.index(place)
            shape[at] = source.sizes[at]
            if place in source.positions:
                value = points[source.points_of(place)].values[:, source.positions[place]]
                value = value.reshape(*value.shape[:2], *shape, width)
            else:
                value = torch.eye(width).to(layout.batch.weight).reshape(1, 1, *shape, width)
        values[name] = value.expand(len(value), len(source.rows), *source.sizes, width).flatten(1, -2)
    return values


def _mask(layout: Layout, source: RowSource) -> Tensor:
    """Which cells of the node are seen, or stand for what is not (1, n * entries, width)."""
    family, many = layout.families[source.family], math.prod(source.sizes)
    if source.family in source.members or family.widths[-1] == 1:
        return torch.ones(1, len(source.rows) * many, family.widths[-1], dtype=torch.bool)
    mask = layout.batch.mask[family.node].index_select(1, source.rows)
    mask = mask.expand(1, len(source.rows), family.widths[-1])
    return mask.unsqueeze(2).expand(-1, -1, many, -1).flatten(1, 2)
