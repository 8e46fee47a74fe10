r"""Sums over all that rows do not show, at some parameters.

**Sum-product along elimination orders, for the pieces of all rows at once.** All tables of one size stand in one bank,
a row for each: factors, and the messages that steps leave. A step sums one variable out of the product of all tables
that mention it,

.. math:: m(s) = \log \sum_x \exp T(x, s), \qquad P(x \mid s) = \exp\{T(x, s) - m(s)\},

and writes the message over the separator s into the bank of its size, where a later step reads it. Steps of different
pieces, whatever their nodes, are run together if they have the same sizes and their inputs are ready at the same time:
the number of calls depends on the depth and width of pieces, not on how many kinds of them there are. Taken backwards,
the beliefs of a message's row are those of the step that read it, and times the conditional they give the beliefs of
everything that went into the product. All of it is in logarithms: no evidence, however unlikely, underflows.

**Tables of families that read numbers** stand side by side: one call for a kind of families, however many tables they
need. What a family's members are in each entry of each table depends on data and points alone. Where each value comes
from (a cell of the data, a point, a state) is written down once for a block, as numbers of a pool; values are read from
the pool once for a placement of points; then every evaluation is one log-density of many rows. Families of one kind
stand side by side on the replica axis, filled up to the longest. Linear normal families are written as columns by the
row of their equations: log-densities are products of matrices, and so are second moments under beliefs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.likelihood.elimination.families import (
    FamilyView,
    Flags,
    Ints,
    TableView,
    WeighedRows,
    stacked_replicas,
)
from otpdag.likelihood.elimination.layout import Block, Layout, PointsKey, Sizes, Source, Step
from otpdag.likelihood.elimination.unknown_numbers import Equations, Integrals, LinearGroup, Points
from otpdag.structure import Naturals

Banks = dict[Sizes, Tensor]
"""Log-tables, or their beliefs, by size: (R, rows, entries). The first row is the empty product."""

FILLED = 1.5
"""How many times as many entries as it has an array may get, to stand beside the longest of its kind."""
ENTRIES_OF_A_CALL = 4096
"""Entries that take about as long as one more call."""


def tables_of(banks: Banks, source: Source | LinearGroup) -> Tensor:
    """The rows of a bank that hold the tables of a source (R, count, entries), as a view."""
    return banks[source.sizes][:, source.start : source.start + source.count]


def beliefs_of(banks: Banks, source: Source | LinearGroup) -> Tensor:
    """Beliefs of the tables of a source (R, count, *sizes)."""
    table = tables_of(banks, source)
    return table.reshape(*table.shape[:2], *source.sizes)


def eliminate(steps: Sequence[Step], banks: Banks, *, best: bool = False) -> list[Tensor]:
    """Run all steps, and return the conditional probabilities of each (R, n, *sizes); messages go into the banks.

    Args:
        steps: Each after those whose messages it reads.
        banks: Tables of factors, and room for messages.
        best: Take the largest entry instead of the sum.

    >>> table = torch.tensor([[[0.0, 0.0], [0.2, 0.8]]]).double().log()
    >>> banks = {(2,): table, (): torch.zeros(1, 2, 1).double()}
    >>> step = Step((2,), {(0,): torch.tensor([[1]])}, 1, torch.tensor([0]), torch.zeros(1, 0).long())
    >>> eliminate([step], banks)[0]
    tensor([[[0.2000, 0.8000]]], dtype=torch.float64)
    >>> round(float(banks[()][0, 1]), 9)
    0.0
    """
    conditionals = []
    for step in steps:
        message, conditional = (_best if best else _sum)(_product(step, banks))
        above = banks[step.sizes[:-1]][:, step.output : step.output + len(step.cell)]
        above.copy_(message.reshape(above.shape))
        conditionals.append(conditional)
    return conditionals


def _product(step: Step, banks: Banks) -> Tensor:
    """The sum of log-tables over all axes of a step: (R, n, *sizes)."""
    joined: Tensor | None = None
    for axes in sorted(step.inputs, key=len, reverse=True):
        rows = step.inputs[axes]
        bank = banks[step.bank(axes)]
        table = bank.index_select(1, rows[:, 0])
        for column in rows.unbind(1)[1:]:
            table += bank.index_select(1, column)
        shape = (size if axis in axes else 1 for axis, size in enumerate(step.sizes))
        table = table.view(*table.shape[:2], *shape)
        if joined is None:
            joined = table if len(axes) == len(step.sizes) else table.expand(*table.shape[:2], *step.sizes).clone()
        else:
            joined += table
    if joined is None:
        raise RuntimeError("a step needs at least one table")
    return joined


def _sum(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum over the last axis, and the shares of its entries; ``joined`` is overwritten."""
    limits = torch.finfo(joined.dtype)
    top = joined.amax(-1, keepdim=True).clamp_(min=limits.min)  # nothing possible: not NaN
    shares = joined.sub_(top).exp_()
    total = shares.sum(-1, keepdim=True)
    message = top.add_(total.log()).squeeze(-1)
    return message, shares.div_(total.clamp_(min=limits.tiny))


def _best(joined: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of the last axis, and where it is."""
    message, at = joined.max(-1)
    return message, torch.nn.functional.one_hot(at, joined.shape[-1]).to(joined)


def beliefs(steps: Sequence[Step], conditionals: Sequence[Tensor], banks: Banks) -> Iterator[tuple[Step, Tensor]]:
    """Send beliefs from the evidence to all tables, and tell those of each step's product, last first (R, n, *sizes).

    Args:
        steps: The steps.
        conditionals: What :func:`eliminate` returned.
        banks: Zeros for every entry, and in the bank of single numbers the weight of each piece's evidence. Ends with
            weight times belief everywhere: the derivative of the weighed evidence by each entry (Fisher's identity).
    """
    for step, conditional in zip(reversed(steps), reversed(conditionals), strict=True):
        above = banks[step.sizes[:-1]][:, step.output : step.output + len(step.cell)]
        belief = conditional * above.view(*above.shape[:2], *step.sizes[:-1], 1)
        for axes, rows in step.inputs.items():
            away = [2 + axis for axis in range(len(step.sizes)) if axis not in axes]
            marginal = (belief.sum(away) if away else belief).reshape(*belief.shape[:2], -1)
            bank = banks[step.bank(axes)]
            for column in rows.unbind(1):
                for replica in range(len(bank)):
                    bank[replica].index_add_(0, column, marginal[replica])
        yield step, belief


# -- rows of families that read numbers --------------------------------------------------------------------------------


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
        params = {name: stacked_replicas([own[name] for own in each], replicas) for name in each[0]}
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
        families: The family of each row of the equations.
        rows: Rows of the equations (G,).
        seen: Whether the node is seen (G * E,).
        columns: Own coordinates, numeric parents and one, less their shift (1 or R, G, E, W).
    """

    families: tuple[FamilyView, ...]
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
    """What a block needs that no parameter changes.

    Attributes:
        points: Of placed nodes.
        rows: Arrays of rows of families on them.
        places: By size of the tables of these families their rows in the bank (n,), and where each of their entries
            stands in all arrays, one after the other (n * entries,).
    """

    points: Mapping[PointsKey, Points]
    rows: tuple[PlainRows | LinearRows, ...]
    places: Mapping[Sizes, tuple[Tensor, Tensor]]

    def put(self, banks: Banks, log_probs: Sequence[Tensor]) -> None:
        """Write the log-densities of all arrays (R, entries) into the banks."""
        if not log_probs:
            return
        flat = torch.cat(list(log_probs), 1)
        for sizes, (rows, entries) in self.places.items():
            banks[sizes].index_copy_(1, rows, _picked(flat, entries).reshape(len(flat), len(rows), -1))

    def taken(self, banks: Banks, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Read beliefs of all arrays (R, entries); what only fills them up has none."""
        flat = banks[()].new_zeros(len(banks[()]), sum(lengths))
        for sizes, (rows, entries) in self.places.items():
            flat.index_copy_(1, entries, banks[sizes].index_select(1, rows).flatten(1))
        return flat.split(list(lengths), 1)


def _picked(table: Tensor, index: Tensor) -> Tensor:
    """Columns of a table (R, n): gathering is several times as fast as selecting along the last axis."""
    return table.gather(1, index.long().expand(len(table), -1))


def prepare(layout: Layout, block: Block) -> Prepared:
    """Write the points and rows of a block down; of a layout that fits into memory only once."""
    if "prepared" in block.placed:
        known: Prepared = block.placed["prepared"]
        return known
    points = {key: placement.points() for key, placement in block.placements.items()}
    recipes, places = block.shared.get("recipes") or _recipes(layout.table, block)
    pool = torch.from_numpy(layout.table.numbers).reshape(1, -1)
    if points:  # all numbers: those of the data, then those of all points (1 or R, many)
        parts = [pool, *(one.values.flatten(1) for one in points.values())]
        replicas = max(map(len, parts))
        pool = torch.cat([one.expand(replicas, -1) for one in parts], 1)
    prepared = Prepared(points, tuple(recipe.rows(layout.table, pool) for recipe in recipes), places)
    if layout.is_remembered:
        block.placed["prepared"] = prepared
        block.shared["recipes"] = (recipes, places)
    return prepared


@dataclass(frozen=True, eq=False)
class _Recipe:
    """How the rows of one array are read from a pool of numbers.

    Attributes:
        families: The families, or of linear ones that of each row of the equations.
        lengths: Entries of each; others only fill up.
        seen: Whether the node is seen (K * E,).
        members: Of each member the number of each of its coordinates in the pool (K * E * width,), or, of a category,
            its states as one-hot vectors (1, K, E, width). Of linear families the numbers of all columns
            (K * E * W,).
        mask: Which cells of a single family's node are seen, where that is not all of them (1, E, width).
        equations: Rows of the equations of linear families (K,).
    """

    families: tuple[FamilyView, ...]
    lengths: tuple[int, ...]
    seen: Tensor
    members: tuple[Tensor, ...]
    mask: Tensor | None
    equations: Tensor | None

    def rows(self, table: TableView, pool: Tensor) -> PlainRows | LinearRows:
        """Read the values."""
        family, shape = self.families[0], (len(pool), len(self.lengths), -1)
        if self.equations is not None:
            columns = _picked(pool, self.members[0]).reshape(*shape, len(family.columns) + 1)
            shift = torch.stack([table.shifts[one.place] for one in self.families]).unsqueeze(1)
            return LinearRows(self.families, self.equations, self.seen, columns - shift)
        values = {}
        for name, at, width, is_state in zip(family.names, self.members, family.widths, family.categories, strict=True):
            values[name] = at if is_state else _picked(pool, at).reshape(*shape, width)
        return PlainRows(self.families, self.lengths, self.seen, values, self.mask)


@dataclass(frozen=True, eq=False)
class _Entries:
    """Entries of all tables of one family, or those that one row of its equations is for.

    Attributes:
        family: The family.
        number: The entries' numbers among those of all tables (E,).
        members: Of each member its state (E,), or the numbers of its coordinates in the pool (E, width); of a linear
            family the numbers of all columns (E, W).
        seen: Whether the node is seen (E,).
        mask: Which of the node's cells are seen (E, width), where that is not all of them.
        row: The row of the equations.
    """

    family: FamilyView
    number: Ints
    members: tuple[Ints, ...]
    seen: Flags
    mask: Flags | None = None
    row: int | None = None


def _recipes(table: TableView, block: Block) -> tuple[tuple[_Recipe, ...], Mapping[Sizes, tuple[Tensor, Tensor]]]:
    """Sort the tables of a block into arrays: one for each kind of families, or of rows of equations."""
    offsets: dict[PointsKey, int] = {}
    at = table.numbers.size
    for key, placement in block.placements.items():
        offsets[key] = at
        at += len(placement.rows) * key[1] * table.families[key[0]].widths[-1]
    by_family: dict[tuple[int, bool], list[Source]] = {}
    for source in block.row_tables:
        by_family.setdefault((source.place, source.has_moments), []).append(source)
    kinds: dict[object, list[_Entries]] = {}
    first = 0
    for (place, is_linear), sources in by_family.items():
        family = table.families[place]
        entries = _entries(table, family, sources, offsets, first)
        first += len(entries.number)
        if is_linear:
            kinds.setdefault(len(family.columns), []).extend(_by_equation(table, entries))
        else:
            kinds.setdefault(family.kind if entries.mask is None else (place,), []).append(entries)
    groups = [group for alike in kinds.values() for group in _of_like_lengths(alike)]
    position, end = np.zeros(first, dtype=np.int64), 0
    for group in groups:
        for one in group:
            position[one.number] = end + np.arange(len(one.number))
            end += len(group[0].number)
    ordered = [source for sources in by_family.values() for source in sources]
    return tuple(map(_recipe, groups)), _places(ordered, position)


def _places(sources: Sequence[Source], position: Ints) -> dict[Sizes, tuple[Tensor, Tensor]]:
    """Where the tables of all sources stand, whose entries are numbered in turn and have these positions."""
    ends = np.cumsum([0, *(source.entries for source in sources)])
    by_size: dict[Sizes, list[tuple[Ints, Ints]]] = {}
    for source, (begin, end) in zip(sources, pairwise(ends), strict=True):
        rows = np.arange(source.start, source.start + source.count)
        by_size.setdefault(source.sizes, []).append((rows, position[begin:end]))
    places = {}
    for sizes, parts in by_size.items():
        own, entries = (torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True))
        places[sizes] = (own, entries)
    return places


def _entries(
    table: TableView, family: FamilyView, sources: Sequence[Source], offsets: Mapping[PointsKey, int], first: int
) -> _Entries:
    """The entries of all tables of a family, table by table."""
    members: list[list[npt.NDArray[np.integer]]] = [[] for _ in family.members]
    seen, masks = [], []
    for source in sources:
        for role, (place, width) in enumerate(zip(family.members, family.widths, strict=True)):
            wide = () if family.categories[role] else (width,)
            value = _member(table, source, place, wide, offsets)
            members[role].append(np.broadcast_to(value, (source.count, *source.sizes, *wide)).reshape(-1, *wide))
        is_seen = family.place not in source.members
        seen.append(np.full(source.entries, is_seen))
        mask = np.ones((1, 1), dtype=bool)
        if is_seen and family.widths[-1] > 1 and not family.categories[-1]:
            mask = table.batch.mask[family.node][0].numpy()[source.rows.numpy()].repeat(math.prod(source.sizes), 0)
        masks.append(np.broadcast_to(mask, (source.entries, family.widths[-1])))
    together = tuple(np.concatenate(parts) for parts in members)
    number = first + np.arange(sum(map(len, seen)))
    shown = None if all(one.all() for one in masks) else np.concatenate(masks)
    return _Entries(family, number, together, np.concatenate(seen), shown)


def _member(
    table: TableView, source: Source, place: int, wide: Sizes, offsets: Mapping[PointsKey, int]
) -> npt.NDArray[np.integer]:
    """Where the values of one member of a family come from, broadcast over rows and axes of the tables."""
    shape = [1] * len(source.members)
    if place not in source.members:
        rows = source.rows.numpy()
        if not wide:
            return table.codes[rows, place].reshape(-1, *shape)
        first = table.numbers.shape[1] * rows + table.column_of[place, 0]
        return (first.reshape(-1, *shape, 1) + np.arange(*wide)).astype(np.int32)
    axis = source.members.index(place)
    size = shape[axis] = source.sizes[axis]
    if not wide:
        return np.arange(size).reshape(1, *shape)
    first = offsets[source.points_of(place)] + wide[0] * size * source.positions[place].numpy()
    points = first.reshape(-1, *[1] * len(shape)) + wide[0] * np.arange(size).reshape(1, *shape)
    return np.asarray(points[..., None] + np.arange(*wide), dtype=np.int32)


def _by_equation(table: TableView, entries: _Entries) -> Iterator[_Entries]:
    """Entries of a linear family by the row of its equations, with the numbers of all columns; the second is one."""
    family, first = entries.family, table.offsets[entries.family.place]
    role = {place: i for i, place in enumerate(family.members)}
    columns = [entries.members[role[place]][:, cell] for place, cell in family.columns]
    stacked = np.stack([*columns, np.ones_like(columns[0])], 1)
    if not family.selectors:
        yield _Entries(family, entries.number, (stacked,), entries.seen, row=first)
        return
    code = np.zeros(len(entries.number), dtype=np.int64)
    for place, size in family.selectors:
        code = code * size + entries.members[role[place]]
    order = np.argsort(code, kind="stable")
    ends = np.searchsorted(code[order], np.arange(family.configurations + 1))
    for row, (begin, end) in enumerate(pairwise(ends)):
        if end > begin:
            part = order[begin:end]
            yield _Entries(family, entries.number[part], (stacked[part],), entries.seen[part], row=first + row)


def _of_like_lengths(alike: Sequence[_Entries]) -> Iterator[list[_Entries]]:
    """Groups that may be filled up to the length of their first, which is the longest."""
    group: list[_Entries] = []
    for one in sorted(alike, key=lambda entries: -len(entries.number)):
        longest = len(group[0].number) if group else 0
        if group and longest > max(FILLED * len(one.number), len(one.number) + ENTRIES_OF_A_CALL):
            yield group
            group = []
        group.append(one)
    yield group


def _recipe(group: Sequence[_Entries]) -> _Recipe:
    """The entries of a group side by side, each filled up by its first."""
    first, longest = group[0], len(group[0].number)

    def side_by_side(arrays: Sequence[npt.NDArray[np.generic]]) -> Tensor:
        filled = [np.concatenate([one, one[:1].repeat(longest - len(one), 0)]) for one in arrays[1:]]
        return torch.from_numpy(np.stack([arrays[0], *filled]))

    members = [side_by_side([one.members[role] for one in group]) for role in range(len(first.members))]
    rows = [one.row for one in group if one.row is not None]
    if not rows:
        states = zip(members, first.family.widths, first.family.categories, strict=True)
        members = [torch.eye(n).double()[value].unsqueeze(0) if is_state else value for value, n, is_state in states]
    return _Recipe(
        tuple(one.family for one in group),
        tuple(len(one.number) for one in group),
        side_by_side([one.seen for one in group]).flatten(),
        tuple(value if value.is_floating_point() else value.flatten() for value in members),
        None if first.mask is None else torch.from_numpy(first.mask).unsqueeze(0),
        torch.tensor(rows) if rows else None,
    )


# -- at some parameters ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tempering:
    r"""How likelihood and prior are weighed against each other.

    The evidence of a row is :math:`\log \sum_z \pi(z) P(x \mid z)^{\text{power}}`.

    Args:
        power: Power of the densities of seen nodes, w / eps in the objective.
        uniform: Give all states of hidden categories the same prior.
        best: Take the largest of :math:`\log P(x \mid z)` with :math:`\pi(z) > 0` instead of the sum (eps = 0).
        tilt: By place of a family of categories, what is added to its log-table (R, *parents, states): the evidence
            changes with it by the expected counts of the family.
    """

    power: float = 1.0
    uniform: bool = False
    best: bool = False
    tilt: Mapping[int, Tensor] = field(default_factory=dict, compare=False)

    def share(self, family: FamilyView, *, seen: bool) -> float:
        """The power to which a family's density is taken where its node is seen or unknown."""
        if seen:
            return self.power
        replaced = self.best or (self.uniform and family.hidden and family.mechanism.space.is_discrete)
        return 0.0 if replaced else 1.0

    def of(self, family: FamilyView, log_prob: Tensor, *, seen: bool) -> Tensor:
        """A family's log-density as it enters the sums."""
        if seen:
            return log_prob if self.power == 1.0 else self.power * log_prob
        if self.best:
            return torch.where(torch.isneginf(log_prob), log_prob, 0.0)
        if self.uniform and family.hidden and family.mechanism.space.is_discrete:
            return torch.full_like(log_prob, -math.log(family.mechanism.space.width))
        return log_prob


class Factors:
    """All tables at some parameters: those that blocks share are computed once.

    With ``attached``, what the families say keeps its graph, so that beliefs can be sent on to the parameters; the sums
    themselves have none. With ``largest``, every sum is the largest of its entries.
    """

    def __init__(
        self,
        layout: Layout,
        naturals: Naturals,
        tempering: Tempering,
        *,
        attached: bool = False,
        largest: bool = False,
    ) -> None:
        self.layout, self.naturals, self.tempering, self.attached = layout, naturals, tempering, attached
        self.largest = largest or tempering.best
        self.replicas = max((len(value) for params in naturals.values() for value in params.values()), default=1)
        if not layout.serves(self.replicas):
            raise ModelError(
                f"the points of unknown numbers were placed for another number of replicas than {self.replicas}: place "
                "them anew by `moved`, from the layout that `lay_out` made"
            )
        self._known: dict[int, tuple[Tensor, ...]] = {}

    def evaluated(self, place: int) -> tuple[Tensor, ...]:
        """Log-probabilities of all joint states of a family (R, *parents, states), or equations of a linear one."""
        if place not in self._known:
            self._known |= self._asked(place)
        return self._known[place]

    def _asked(self, place: int) -> dict[int, tuple[Tensor, ...]]:
        """What a family answers at its parameters, and all that are alike, which stand on the replica axis together.

        Where gradients are taken each is asked alone: they are read family by family.
        """
        family = self.layout.families[place]
        if self.attached and any(value.requires_grad for value in self.naturals[family.node].values()):
            with torch.enable_grad():
                return {place: family.evaluated(self.naturals[family.node])}
        alike = self.layout.alike[place]
        each = [self.naturals[self.layout.families[one].node] for one in alike]
        if len(each) == 1:
            return {place: family.evaluated(each[0])}
        params = {name: stacked_replicas([own[name] for own in each], self.replicas) for name in each[0]}
        with torch.no_grad():
            answers = [one.unflatten(0, (-1, len(alike))).unbind(1) for one in family.evaluated(params)]
        return dict(zip(alike, zip(*answers, strict=True), strict=True))

    @cached_property
    def equations(self) -> Equations:
        """The equations of all linear families."""
        layout = self.layout
        linear = [layout.families[place] for place in layout.table.offsets]
        width = max(len(family.columns) for family in linear) + 1
        dim = max(family.widths[-1] for family in linear)
        rows = 1 + sum(family.configurations for family in linear)
        like = layout.batch.weight
        coefficients = torch.zeros(self.replicas, rows, dim, width).to(like)
        constants = torch.zeros(self.replicas, rows).to(like)
        shift = torch.zeros(rows, width).to(like)
        for family in linear:
            some, constant = self.evaluated(family.place)
            at = slice(layout.table.offsets[family.place], layout.table.offsets[family.place] + family.configurations)
            coefficients[:, at, : some.shape[2], : some.shape[3]] = some.detach()
            constants[:, at] = constant.detach()
            shift[at, : some.shape[3]] = layout.table.shifts[family.place]
        return Equations(coefficients, constants, shift)

    def complete_log_probs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each family the rows that show all of it (n,), and their log-densities (R, n)."""
        for family in self.layout.families:
            for complete in self.layout.complete[family.place]:
                if family.is_table and complete.code is not None:
                    yield complete.rows, self.evaluated(family.place)[0].flatten(1).index_select(1, complete.code)
                else:
                    values, mask = self.layout.table.shown(family, complete.rows)
                    yield complete.rows, family.log_prob(self.naturals[family.node], values, mask)

    # -- tables ----------------------------------------------------------------------------------------------------

    def evaluate(self, block: Block) -> Evaluated:
        """Fill the banks of a block, and sum its pieces."""
        prepared = prepare(self.layout, block)
        points = prepared.points
        like = self.layout.batch.weight
        banks = {
            sizes: torch.zeros(self.replicas, rows, math.prod(sizes)).to(like) for sizes, rows in block.banks.items()
        }

        for source in block.tables:
            self._put(banks, source, self._of_states(source))
        log_probs = [self._of_rows(rows) for rows in prepared.rows]
        prepared.put(banks, [self._tempered(*both) for both in zip(prepared.rows, log_probs, strict=True)])
        for source in block.lengths:
            self._put(banks, source, points[source.points_of(source.place)].log_length)
        integrals = []
        for group in block.linear:
            met = [torch.cat([points[key].values[:, at, :, 0] for key, at in parts], 1) for parts in group.placed]
            integrals.append(group.integrate(self.equations, met, self.tempering.power))
            self._put(banks, group, integrals[-1].table)
        conditionals = eliminate(block.steps, banks, best=self.largest)
        return Evaluated(block, banks[()][:, block.result, 0], conditionals, tuple(integrals), prepared, log_probs)

    @staticmethod
    def _put(banks: Banks, source: Source | LinearGroup, table: Tensor) -> None:
        """Write tables (R, n, *sizes) into their bank."""
        room = tables_of(banks, source)
        room.copy_(table.reshape(len(table), *room.shape[1:]))

    def _of_states(self, source: Source) -> Tensor:
        """(R, configurations of seen members, *sizes)."""
        family = self.layout.families[source.place]
        table = self.evaluated(source.place)[0].detach()
        table = self.tempering.of(family, table, seen=source.place not in source.members)
        table = table + self.tempering.tilt.get(source.place, 0.0)
        seen = [1 + axis for axis, n in enumerate(family.members) if n not in source.members]
        axes = [1 + family.members.index(n) for n in source.members]
        return table.permute(0, *seen, *axes).reshape(len(table), source.count, *source.sizes)

    def _of_rows(self, rows: PlainRows | LinearRows) -> Tensor:
        """(R, entries)."""
        if isinstance(rows, LinearRows):
            return rows.log_prob(self.equations).expand(self.replicas, -1)
        with torch.set_grad_enabled(self.attached):
            return rows.log_prob(self.naturals, self.replicas)

    def _tempered(self, rows: PlainRows | LinearRows, log_prob: Tensor) -> Tensor:
        """Log-densities (R, entries) as they enter the sums."""
        log_prob = log_prob.detach()
        if self.tempering == Tempering():
            return log_prob
        seen, unseen = (self.tempering.of(rows.families[0], log_prob, seen=seen) for seen in (True, False))
        return torch.where(rows.seen, seen, unseen)


@dataclass(frozen=True)
class Evaluated:
    """A block at some parameters.

    Attributes:
        block: The block.
        log_z: Log-sums of the distinct pieces (R, D).
        conditionals: Probabilities of each step's variable given its separator.
        integrals: What was integrated out, by linear source.
        prepared: Rows of the families that read numbers.
        log_probs: Their log-densities (R, entries).
    """

    block: Block
    log_z: Tensor
    conditionals: Sequence[Tensor]
    integrals: tuple[Integrals, ...]
    prepared: Prepared
    log_probs: Sequence[Tensor]

    def steps(self, weight: Tensor) -> tuple[Banks, Iterator[tuple[Step, Tensor]]]:
        """Banks of beliefs under weights (1 or R, D) of the pieces, and the :func:`beliefs` of steps that fill them."""
        replicas = max(len(self.log_z), len(weight))
        banks = {
            sizes: self.log_z.new_zeros(replicas, rows, math.prod(sizes)) for sizes, rows in self.block.banks.items()
        }
        banks[()][:, self.block.result, 0] = weight
        return banks, beliefs(self.block.steps, self.conditionals, banks)

    def beliefs(self, weight: Tensor) -> Banks:
        """Weight times belief of every entry of every bank, summed over pieces: (R, rows, entries)."""
        banks, steps = self.steps(weight)
        for _ in steps:
            pass
        return banks

    def row_beliefs(self, banks: Banks) -> tuple[Tensor, ...]:
        """Weight times belief of all entries of each array of rows (R, entries)."""
        return self.prepared.taken(banks, [log_prob.shape[1] for log_prob in self.log_probs])


def piece_weights(block: Block, weight: Tensor) -> Tensor:
    """Sum row weights (1 or R, N) over the rows in which each distinct piece occurs: (1 or R, D)."""
    total = weight.new_zeros(len(weight), block.distinct)
    return total.index_add_(1, block.piece, weight.index_select(1, block.piece_row))
