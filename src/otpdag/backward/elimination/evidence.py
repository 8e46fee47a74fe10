r"""The evidence of rows under the model, its gradient, and the expected statistics of every family.

The evidence of a row is the log-density of what it shows, everything unknown integrated out. Its sum over rows has an
exact gradient without differentiating through the sums (see :mod:`~otpdag.backward.elimination.statistics`): one pass
without gradients gives beliefs, then each family's expected log-density is differentiated alone, chunk by chunk. The
memory that this takes does not grow with rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from otpdag.backward.elimination.blocks import Block, Complete, RowSource
from otpdag.backward.elimination.families import FamilyView
from otpdag.backward.elimination.layout import Layout
from otpdag.backward.elimination.linear_normal import point_moments
from otpdag.backward.elimination.points import Points
from otpdag.backward.elimination.statistics import Counts, Moments, Rows, Statistics
from otpdag.backward.elimination.sum_product import Banks
from otpdag.backward.elimination.sums import Evaluated, Factors, Tempering, piece_weights, taken
from otpdag.structure import Naturals

__all__ = ["Expectations", "expectations", "log_evidence", "moved", "total_evidence"]

LIKELIHOOD = Tempering()
MOST_ROUNDS = 12  # of placing points: a window doubles where it is too narrow


@dataclass(frozen=True, eq=False)
class Expectations:
    """What rows say of a model under the backward map.

    Attributes:
        pieces: Weighed sum of the log-sums of all pieces (R,).
        families: The statistics of each node's family.
        power: Power of the densities of complete families.
    """

    pieces: Tensor
    families: Mapping[str, tuple[Statistics, ...]]
    power: float = 1.0


def log_evidence(naturals: Naturals, layout: Layout, tempering: Tempering = LIKELIHOOD) -> Tensor:
    """Log-density of what each row shows (R, N), without gradients.

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> from otpdag.backward.elimination import lay_out
    >>> from otpdag.data import Batch
    >>> from otpdag.structure import Structure
    >>> graph = otp.Graph([("f", "x")], hidden=["f"])
    >>> structure = Structure.bind(graph, {"f": m.Normal(), "x": m.Normal(loc=0.0, weight=1.0, scale=1.0)})
    >>> x = torch.zeros(1, 1, 1, dtype=torch.float64)
    >>> batch = Batch({"x": x}, {"x": x == 0}, torch.ones(1, 1, dtype=torch.float64))
    >>> found = log_evidence(structure.naturals({}), lay_out(structure, batch))
    >>> torch.allclose(found, torch.distributions.Normal(x, 2**0.5).log_prob(x))
    True
    """
    with torch.no_grad():
        factors = Factors(layout, naturals, tempering)
        total = torch.zeros(factors.replicas, layout.batch.rows).to(layout.batch.weight)
        for complete in layout.complete:
            total[:, complete.rows] += tempering.power * _complete_log_prob(factors, complete)
        for block in layout.blocks:
            total.index_add_(1, block.piece_row, factors.evaluate(block).log_z[:, block.piece])
        return total


def _complete_log_prob(factors: Factors, complete: Complete) -> Tensor:
    layout, family = factors.layout, factors.layout.families[complete.family]
    if family.is_table and complete.code is not None:
        return factors.log_table(complete.family).flatten(1).index_select(1, complete.code)
    batch = layout.batch
    values = {name: batch.values[name].index_select(1, complete.rows) for name in family.names}
    mask = batch.mask[family.node].index_select(1, complete.rows)
    return family.log_prob(factors.naturals[family.node], values, None if bool(mask.all()) else mask)


def expectations(
    naturals: Naturals, layout: Layout, weight: Tensor | None = None, tempering: Tempering = LIKELIHOOD
) -> Expectations:
    """Sum the pieces, and summarise the rows for each family.

    Args:
        naturals: Parameters (R, ...).
        layout: The rows.
        weight: Row weights (1 or R, N); by default those of the batch.
        tempering: How likelihood and prior are weighed against each other.
    """
    with torch.no_grad():
        return _Summary(naturals, layout, layout.batch.weight if weight is None else weight, tempering).expectations()


def total_evidence(
    naturals: Naturals, layout: Layout, weight: Tensor | None = None, tempering: Tempering = LIKELIHOOD
) -> Tensor:
    """Weighed sum of the rows' evidence (R,), with an exact gradient in the parameters (of first order only).

    Args:
        naturals: Parameters (R, ...).
        layout: The rows.
        weight: Row weights (1 or R, N); by default those of the batch.
        tempering: How likelihood and prior are weighed against each other.
    """
    weight = layout.batch.weight if weight is None else weight
    replicas = max(Factors(layout, naturals, tempering).replicas, len(weight))
    wanted = {
        (node, name): value.expand(replicas, *value.shape[1:])
        for node, params in naturals.items()
        for name, value in params.items()
        if value.requires_grad and torch.is_grad_enabled()
    }
    slopes = _Slopes({key: value.detach().requires_grad_() for key, value in wanted.items()})
    leaves = {
        node: {name: slopes.leaves.get((node, name), value.detach()) for name, value in params.items()}
        for node, params in naturals.items()
    }
    with torch.no_grad():
        summary = _Summary(leaves, layout, weight, tempering, slopes).expectations()
    value = summary.pieces.clone()
    for node, statistics in summary.families.items():
        with torch.set_grad_enabled(bool(wanted)):
            for complete, expected in (part for one in statistics for part in one.parts(leaves[node])):
                value += tempering.power * complete.detach()
                slopes.add([node], [tempering.power * complete + expected], [torch.ones_like(expected)])
    return _WithGradient.apply(value, list(slopes.total.values()), *wanted.values())


class _Slopes:
    """Gradients in some parameters while parts of a sum are being added."""

    def __init__(self, leaves: Mapping[tuple[str, str], Tensor]) -> None:
        self.leaves = leaves
        self.total = {key: torch.zeros_like(leaf) for key, leaf in leaves.items()}

    def add(self, nodes: Collection[str], outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Add the gradient, in the parameters of some nodes, of the weighed sum of outputs."""
        keys = [key for node in nodes for key in self._by_node.get(node, ())]
        attached = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if output.requires_grad]
        if not attached or not keys:
            return
        parts = torch.autograd.grad(
            [output for output, _ in attached], [self.leaves[key] for key in keys],
            [weight for _, weight in attached], allow_unused=True,
        )  # fmt: skip
        for key, part in zip(keys, parts, strict=True):
            if part is not None:
                self.total[key] += part

    @cached_property
    def _by_node(self) -> dict[str, list[tuple[str, str]]]:
        grouped: dict[str, list[tuple[str, str]]] = {}
        for key in self.leaves:
            grouped.setdefault(key[0], []).append(key)
        return grouped


class _WithGradient(torch.autograd.Function):
    """A value (R,) whose gradient in some inputs (R, ...) is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        saved = (outer.reshape(-1, *[1] * (gradient.ndim - 1)) * gradient for gradient in ctx.saved_tensors)
        return (None, None, *saved)


# -- statistics -------------------------------------------------------------------------------------------------------


class _Summary:
    """Statistics of all families while blocks are being added.

    With ``slopes``, rows of families without a summary are not kept: their gradients are added to these at once.
    """

    def __init__(
        self, naturals: Naturals, layout: Layout, weight: Tensor, tempering: Tempering, slopes: _Slopes | None = None
    ) -> None:
        self.layout, self.weight, self.tempering, self.slopes = layout, weight, tempering, slopes
        self.factors = Factors(layout, naturals, tempering, attached=slopes is not None)
        self.replicas = max(self.factors.replicas, len(weight))
        self.pieces = torch.zeros(self.replicas).to(weight)
        self.counts: dict[int, Tensor] = {}
        self.rows: dict[int, list[tuple[RowSource, Mapping[int, Points], Tensor]]] = {}
        self.moments: dict[int, Tensor] = {}

    def expectations(self) -> Expectations:
        for block in self.layout.blocks:
            self._add(block)
        complete: dict[int, list[Complete]] = {family.place: [] for family in self.layout.families}
        for part in self.layout.complete:
            complete[part.family].append(part)
        families = {f.node: self._statistics(f, complete[f.place]) for f in self.layout.families}
        return Expectations(self.pieces, families, self.tempering.power)

    def _statistics(self, family: FamilyView, parts: Sequence[Complete]) -> tuple[Statistics, ...]:
        """A summary of the rows that have one, and the rest of the rows."""
        place = family.place
        if family.is_table:
            seen = _state_counts(parts, self.weight, _size(family.widths))
            expected = self.counts.get(place)
            expected = torch.zeros_like(seen) if expected is None else expected
            return (Counts(family, seen, expected, self.factors.log_table(place) if self.slopes else None),)
        statistics: list[Statistics] = []
        if family.is_linear:
            seen = _column_moments(parts, self.weight, family)
            expected = self.moments.get(place)
            expected = torch.zeros_like(seen) if expected is None else expected
            equations = self.factors.family_equations(place) if self.slopes else None
            statistics.append(Moments(family, self.layout.shifts[place], seen, expected, equations))
        plain = tuple((part, self.weight[:, part.rows]) for part in parts if part.columns is None)
        rows = tuple(self.rows.get(place, ()))
        if plain or rows:
            statistics.append(Rows(self.layout, family, plain, rows))
        return tuple(statistics)

    def _add(self, block: Block) -> None:
        evaluated = self.factors.evaluate(block)
        weight = piece_weights(block, self.weight)
        log_z = evaluated.log_z
        counted = torch.where(weight != 0, log_z, 0.0)
        self.pieces += (weight * counted).sum(-1)
        beliefs = evaluated.beliefs(weight)
        self._add_tables(block, beliefs)
        self._add_rows(block, evaluated, beliefs)
        self._add_linear(block, evaluated, beliefs)

    def _add_tables(self, block: Block, beliefs: Banks) -> None:
        for source in block.tables:
            family = self.layout.families[source.family]
            share = self.tempering.share(family, seen=source.family not in source.members)
            belief = share * taken(beliefs, source.stored, source.start, source.count, source.sizes)
            seen = [n for n in family.members if n not in source.members]
            order = [*seen, *source.members]
            sizes = dict(zip(family.members, family.widths, strict=True))
            table = belief.reshape(len(belief), *(sizes[n] for n in order))
            table = table.permute(0, *(1 + order.index(n) for n in family.members)).flatten(1)
            self.counts[source.family] = self.counts.get(source.family, torch.zeros_like(table)) + table

    def _add_rows(self, block: Block, evaluated: Evaluated, beliefs: Banks) -> None:
        attached: list[tuple[Tensor, Tensor]] = []
        for source, log_prob in zip(block.row_tables, evaluated.log_probs, strict=True):
            family = self.layout.families[source.family]
            share = self.tempering.share(family, seen=source.family not in source.members)
            belief = share * taken(beliefs, source.stored, source.start, len(source.rows), source.sizes)
            if family.is_linear and not self._in_part(source, family):
                self._add_moments(family, *_row_moments(self.layout, source, family, evaluated.points, belief))
            elif self.slopes is None or family.is_linear:
                self.rows.setdefault(source.family, []).append((source, evaluated.points, belief))
            else:
                attached.append((log_prob, belief))
        if self.slopes is not None:
            nodes = {self.layout.families[source.family].node for source in block.row_tables}
            self.slopes.add(nodes, [log_prob for log_prob, _ in attached], [belief for _, belief in attached])

    def _in_part(self, source: RowSource, family: FamilyView) -> bool:
        if family.widths[-1] == 1 or source.family in source.members:
            return False
        return not bool(self.layout.batch.mask[family.node][:, source.rows].all())

    def _add_moments(self, family: FamilyView, config: Tensor, moments: Tensor) -> None:
        """Add second moments (R, n, W, W) to the configurations (n,) of a family."""
        width = len(family.columns) + 1
        total = self.moments.get(family.place)
        if total is None:
            total = torch.zeros(self.replicas, family.configurations, width, width).to(moments)
            self.moments[family.place] = total
        total.index_add_(1, config, moments.expand(self.replicas, -1, -1, -1))

    def _add_linear(self, block: Block, evaluated: Evaluated, beliefs: Banks) -> None:
        """Moments of all families together, by row of the equations; then to each family its own."""
        if not block.linear:
            return
        equations = self.factors.equations
        rows, width = equations.shift.shape
        total = torch.zeros(self.replicas, rows, width, width).to(equations.shift)
        for source, integrals in zip(block.linear, evaluated.integrals, strict=True):
            group = source.group
            belief = taken(beliefs, source.stored, source.start, len(group.rows), group.sizes)
            config, moments = integrals.moments(belief, equations.shift)
            if self.tempering.power != 1.0:
                share = torch.where(group.seen, self.tempering.power, 1.0).to(moments)[group.instance]
                moments = moments * share[None, :, None, :, None, None]
            used = moments.shape[-1]
            view = total[..., :used, :used]
            view += torch.zeros_like(view).index_add_(1, config.flatten(), moments.flatten(1, 3))
        for place, first in self.layout.offsets.items():
            family = self.layout.families[place]
            used = len(family.columns) + 1
            own = total[:, first : first + family.configurations, :used, :used]
            self._add_moments(family, torch.arange(family.configurations), own)


def _size(sizes: Sequence[int]) -> int:
    return int(torch.tensor(sizes).prod())


def _state_counts(parts: Sequence[Complete], weight: Tensor, size: int) -> Tensor:
    """Weighed counts of joint states (1 or R, size)."""
    counts = weight.new_zeros(len(weight), size)
    for part in parts:
        if part.code is not None:
            for replica in range(len(weight)):
                counts[replica] += torch.bincount(part.code, weight[replica, part.rows], minlength=size)
    return counts


def _column_moments(parts: Sequence[Complete], weight: Tensor, family: FamilyView) -> Tensor:
    """Weighed second moments of columns by configuration (1 or R, C, W, W)."""
    width, many = len(family.columns) + 1, family.configurations
    moments = weight.new_zeros(len(weight), many, width, width)
    for part in parts:
        if part.columns is not None and part.code is not None:
            moments += _moments_by_code(part.columns, part.code, weight[:, part.rows, None], many)[:, :, 0]
    return moments


def _moments_by_code(columns: Tensor, code: Tensor, weight: Tensor, configurations: int) -> Tensor:
    """Second moments of columns (n, W) under weights (R, n, T), by the code of each row: (R, C, T, W, W)."""
    width = columns.shape[-1]
    products = (columns.unsqueeze(-1) * columns.unsqueeze(-2)).flatten(1)
    moments = weight.new_zeros(len(weight), configurations, weight.shape[-1], width, width)
    for value in range(configurations):
        here = torch.nonzero(code == value)[:, 0] if configurations > 1 else slice(None)
        moments[:, value] = (weight[:, here].mT @ products[here]).unflatten(-1, (width, width))
    return moments


def _row_moments(
    layout: Layout, source: RowSource, family: FamilyView, points: Mapping[int, Points], belief: Tensor
) -> tuple[Tensor, Tensor]:
    """Configurations (K,) and second moments (R, K, W, W) of a linear family whose unknowns are states and points."""
    placed = [n for n in source.members if n in source.positions]
    states = [n for n in source.members if n not in source.positions]
    order = [source.members.index(n) for n in (*states, *placed)]
    belief = belief.permute(0, 1, *(2 + axis for axis in order))
    sizes = [source.sizes[source.members.index(n)] for n in states]
    belief = belief.reshape(*belief.shape[:2], _size(sizes), *belief.shape[2 + len(states) :])
    base, steps = _configurations(layout, source, family, states, sizes)
    columns = _seen_columns(layout, source, family)
    if not placed:
        distinct, code = torch.unique(base, return_inverse=True)
        moments = _moments_by_code(columns, code, belief, len(distinct))
        return (distinct.unsqueeze(-1) + steps).flatten(), moments.flatten(1, 2)
    at = [family.columns.index((n, 0)) for n in placed]
    values = [points[n].values[:, source.positions[n], :, 0] - layout.shifts[family.place][c] for n, c in
              zip(placed, at, strict=True)]  # fmt: skip
    columns[:, at] = 0.0
    _, one, two = point_moments(belief, values)
    total = belief.flatten(3).sum(-1)
    moments = total[..., None, None] * (columns.unsqueeze(-1) * columns.unsqueeze(-2)).unsqueeze(1)
    first = torch.zeros(*total.shape, len(family.columns) + 1).to(belief)
    first[..., at] = one
    cross = first.unsqueeze(-1) * columns[:, None, None]
    moments = moments + cross + cross.mT
    for i, row in enumerate(at):
        for j, column in enumerate(at):
            moments[..., row, column] += two[..., i, j]
    return (base.unsqueeze(-1) + steps).flatten(), moments.flatten(1, 2)


def _configurations(
    layout: Layout, source: RowSource, family: FamilyView, states: Sequence[int], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Configuration of the seen categories (n,), and what each joint state of the unknown ones adds to it (T,)."""
    base = torch.zeros(len(source.rows), dtype=torch.long)
    grid = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).reshape(_size(sizes), -1) if sizes else None
    steps = torch.zeros(_size(sizes), dtype=torch.long)
    stride = family.configurations
    for place, size in family.selectors:
        stride //= size
        if place in states and grid is not None:
            steps += stride * grid[:, states.index(place)]
        else:
            value = layout.batch.values[layout.families[place].node]
            base += stride * value[0].index_select(0, source.rows).argmax(-1)
    return base, steps


def _seen_columns(layout: Layout, source: RowSource, family: FamilyView) -> Tensor:
    """Columns less their shift (n, W); unknown ones are set later."""
    columns = []
    for place, cell in family.columns:
        if place in source.members:
            columns.append(torch.zeros(len(source.rows)).to(layout.batch.weight))
        else:
            value = layout.batch.values[layout.families[place].node]
            columns.append(value[0, :, cell].index_select(0, source.rows))
    stacked = torch.stack([*columns, torch.ones(len(source.rows)).to(layout.batch.weight)], -1)
    return stacked - layout.shifts[family.place]


# -- points -----------------------------------------------------------------------------------------------------------


def moved(naturals: Naturals, layout: Layout, tempering: Tempering = LIKELIHOOD) -> Layout:
    """The same layout with the points of numbers and counts where their posteriors at these parameters are.

    The points then serve as many replicas as the parameters have.
    """
    if not layout.has_points:
        return layout
    with torch.no_grad():
        factors = Factors(layout, naturals, tempering)
        return replace(layout, blocks=tuple(_moved_block(factors, block) for block in layout.blocks))


def _moved_block(factors: Factors, block: Block) -> Block:
    """Place points until no window changes."""
    widened: dict[int, Tensor] = {}
    for _ in range(MOST_ROUNDS if block.placements else 0):
        evaluated = factors.evaluate(block)
        beliefs = evaluated.beliefs(torch.ones(1, block.distinct).to(evaluated.log_z))
        placements, settled = {}, True
        for source in block.lengths:
            belief = taken(beliefs, source.sizes, source.start, source.count, source.sizes)
            moved_one = block.placements[source.node].moved(belief, widened.get(source.node))
            placements[source.node], widened[source.node], enough = moved_one
            settled = settled and enough
        block = replace(block, placements=placements)
        if settled:
            break
    return block
