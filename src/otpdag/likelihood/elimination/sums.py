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

**Tables of families that read numbers** are log-densities of rows: one call for a family, however many tables it has.
What its members are in each entry of each table depends on data and points alone, and is written down once for a
placement of points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from otpdag.errors import ModelError, check_time
from otpdag.likelihood.elimination.families import FamilyView, TableView
from otpdag.likelihood.elimination.layout import Block, Layout, PointsKey, Sizes, Source, Step
from otpdag.likelihood.elimination.unknown_numbers import Equations, Integrals, LinearGroup, Points
from otpdag.mechanisms.base import LINE
from otpdag.structure import Naturals

# Log-tables, or their beliefs, by size: (R, rows, entries). The first row is the empty product.
Banks = dict[Sizes, Tensor]


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
        check_time()
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
        check_time()
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
class FamilyRows:
    """The entries of all tables of one family as rows, table by table.

    Attributes:
        family: The family.
        sources: Its tables.
        seen: Whether the node is seen (E,).
        values: Values of the members (1 or R, E, width).
        mask: Which cells of the node are seen, where that is not all of them (1, E, width).
    """

    family: FamilyView
    sources: Sequence[Source]
    seen: Tensor
    values: Mapping[str, Tensor]
    mask: Tensor | None

    @classmethod
    def of(cls, table: TableView, sources: Sequence[Source], points: Mapping[PointsKey, Points]) -> FamilyRows:
        """Read what the members are: cells of the data, points, or states."""
        family = table.families[sources[0].place]
        values = {}
        for name, place in zip(family.names, family.members, strict=True):
            parts = [_member(table, source, place, points) for source in sources]
            replicas = max(map(len, parts))
            values[name] = torch.cat([part.expand(replicas, -1, -1) for part in parts], 1)
        if any(max(source.members, default=0) >= len(table.families) for source in sources):
            parts = [_line(table, source, points) for source in sources]
            values[LINE] = torch.cat([part.expand(max(map(len, parts)), -1, -1) for part in parts], 1)
        seen = torch.cat([torch.full((one.entries,), family.place not in one.members) for one in sources])
        mask = None
        if table.partly[:, family.place].any():
            masks = [_seen_cells(table, source) for source in sources]
            mask = None if all(bool(one.all()) for one in masks) else torch.cat(masks, 1)
        return cls(family, sources, seen, values, mask)

    @property
    def have_moments(self) -> bool:
        """Whether second moments say all of these rows: the family is linear and normal, no vector seen in part."""
        return self.family.is_linear and self.mask is None

    def log_prob(self, naturals: Naturals, replicas: int) -> Tensor:
        """Log-densities of all entries (R, E)."""
        return self.family.log_prob(naturals[self.family.node], self.values, self.mask).expand(replicas, -1)

    def put(self, banks: Banks, log_prob: Tensor) -> None:
        """Write the tables of log-densities (R, E)."""
        parts = log_prob.split([source.entries for source in self.sources], 1)
        for source, part in zip(self.sources, parts, strict=True):
            room = tables_of(banks, source)
            room.copy_(part.reshape(room.shape))

    def beliefs(self, banks: Banks) -> Tensor:
        """Beliefs of all entries (R, E)."""
        return torch.cat([tables_of(banks, source).flatten(1) for source in self.sources], 1)


def _member(table: TableView, source: Source, place: int, points: Mapping[PointsKey, Points]) -> Tensor:
    """The value of one member of a family in each entry of its tables (1 or R, E, width)."""
    family, axes = table.families[place], [1] * len(source.members)
    width, is_state = family.widths[-1], family.categories[-1]
    states = torch.eye(width).to(table.like)
    if place in source.members:
        axis = source.members.index(place)
        axes[axis] = source.sizes[axis]
        value = states if is_state else points[source.points_of(place)].values[:, source.positions[place]]
    elif is_state:
        value = states[torch.from_numpy(table.codes[source.rows.numpy(), place])]
    else:
        first = table.column_of[place, 0]
        value = torch.from_numpy(table.numbers[source.rows.numpy(), first : first + width]).to(table.like)
    replicas = len(value) if value.ndim > 3 else 1
    value = value.reshape(replicas, -1, *axes, width)
    return value.expand(-1, source.count, *source.sizes, -1).flatten(1, -2)


def _line(table: TableView, source: Source, points: Mapping[PointsKey, Points]) -> Tensor:
    """What the lines of a family add to its prediction in each entry of its tables (1 or R, E, width)."""
    family, line = table.families[source.place], max(source.members, default=0)
    width = family.widths[-1]
    if line < len(table.families):
        return torch.zeros(1, source.entries, width).to(table.like)
    axes = [1] * len(source.members)
    axes[source.members.index(line)] = -1
    own = slice(source.first, source.first + family.lines)
    value = points[source.points_of(line)].values[:, source.positions[line], :, own]
    value = value.reshape(len(value), source.count, *axes, family.lines)
    value = value.expand(-1, -1, *source.sizes, -1).flatten(1, -2)
    return pad(value, (width - family.lines, 0))  # of categories lines are differences from the first


def _seen_cells(table: TableView, source: Source) -> Tensor:
    """Which cells of the node are seen in each entry (1, E, width); all of one that is summed over."""
    family = table.families[source.place]
    if family.place in source.members:
        return torch.ones(1, source.entries, family.widths[-1], dtype=torch.bool)
    return table.batch.mask[family.node][:, source.rows].repeat_interleave(math.prod(source.sizes), 1)


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a block needs that no parameter changes: points of placed nodes, and rows of families on them."""

    points: Mapping[PointsKey, Points]
    rows: tuple[FamilyRows, ...]


def prepare(layout: Layout, block: Block) -> Prepared:
    """Write the points and rows of a block down; of a layout that fits into memory only once."""
    if block.prepared:
        known: Prepared = block.prepared[0]
        return known
    points = {key: placement.points() for key, placement in block.placements.items()}
    by_family: dict[int, list[Source]] = {}
    for source in block.row_tables:
        by_family.setdefault(source.place, []).append(source)
    rows = (FamilyRows.of(layout.table, sources, points) for sources in by_family.values())
    prepared = Prepared(points, tuple(rows))
    if layout.is_remembered:
        block.prepared.append(prepared)
    return prepared


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
        self, layout: Layout, naturals: Naturals, tempering: Tempering, *, attached: bool = False, largest: bool = False
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
        self._slopes: dict[int, Tensor] = {}

    def evaluated(self, place: int) -> tuple[Tensor, ...]:
        """Log-probabilities of all joint states of a family (R, *parents, states), or equations of a linear one."""
        if place not in self._known:
            family = self.layout.families[place]
            with torch.set_grad_enabled(self.attached):
                self._known[place] = family.evaluated(self.naturals[family.node])
        return self._known[place]

    def slopes(self, place: int) -> Tensor:
        """Those of the lines of a family (R, C, lines, columns)."""
        if place not in self._slopes:
            family = self.layout.families[place]
            with torch.no_grad():
                self._slopes[place] = family.slopes(self.naturals[family.node])
        return self._slopes[place]

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
        banks = block.empty_banks(self.replicas, self.layout.batch.weight)

        for source in block.tables:
            self._put(banks, source, self._of_states(source))
        log_probs = [self._of_rows(rows) for rows in prepared.rows]
        for rows, log_prob in zip(prepared.rows, log_probs, strict=True):
            rows.put(banks, self._tempered(rows, log_prob))
        for source in block.lengths:
            self._put(banks, source, points[source.points_of(source.place)].log_length)
        integrals = []
        for group in block.linear:
            met = [torch.cat([points[key].values[:, at] for key, at in parts], 1) for parts in group.placed]
            slopes = {one.place: self.slopes(one.place) for one in group.lines} or None
            integrals.append(group.integrate(self.equations, met, self.tempering.power, slopes))
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

    def _of_rows(self, rows: FamilyRows) -> Tensor:
        """(R, entries)."""
        with torch.set_grad_enabled(self.attached and not rows.have_moments):
            return rows.log_prob(self.naturals, self.replicas)

    def _tempered(self, rows: FamilyRows, log_prob: Tensor) -> Tensor:
        """Log-densities (R, entries) as they enter the sums."""
        log_prob = log_prob.detach()
        if self.tempering == Tempering():
            return log_prob
        seen, unseen = (self.tempering.of(rows.family, log_prob, seen=seen) for seen in (True, False))
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
        banks = self.block.empty_banks(replicas, self.log_z)
        banks[()][:, self.block.result, 0] = weight
        return banks, beliefs(self.block.steps, self.conditionals, banks)

    def beliefs(self, weight: Tensor) -> Banks:
        """Weight times belief of every entry of every bank, summed over pieces: (R, rows, entries)."""
        banks, steps = self.steps(weight)
        for _ in steps:
            pass
        return banks


def piece_weights(block: Block, weight: Tensor) -> Tensor:
    """Sum row weights (1 or R, N) over the rows in which each distinct piece occurs: (1 or R, D)."""
    total = weight.new_zeros(len(weight), block.distinct)
    return total.index_add_(1, block.piece, weight.index_select(1, block.piece_row))
