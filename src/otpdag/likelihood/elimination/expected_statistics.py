"""Gather the statistics of every family from the beliefs of all pieces."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from otpdag.likelihood.elimination.batched_densities import LinearRows, PlainRows
from otpdag.likelihood.elimination.blocks import Block, Complete
from otpdag.likelihood.elimination.families import FamilyView, WeighedRows
from otpdag.likelihood.elimination.family_statistics import (
    Counts,
    Moments,
    Rows,
    Statistics,
    complete_rows,
    joined,
)
from otpdag.likelihood.elimination.row_layout import Layout
from otpdag.likelihood.elimination.sum_product import Banks, taken
from otpdag.likelihood.elimination.sums import Evaluated, Factors, Tempering, piece_weights, row_beliefs
from otpdag.structure import Naturals

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
"""Share of a stretch by which places in it go round: of all, the one whose multiples are spread most evenly."""


class Slopes:
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
        with torch.enable_grad():
            seeded = _Seeded.apply([weight for _, weight in attached], *(output for output, _ in attached))
        parts = torch.autograd.grad(seeded, [self.leaves[key] for key in keys], allow_unused=True)
        for key, part in zip(keys, parts, strict=True):
            if part is not None:
                self.total[key] += part

    @cached_property
    def _by_node(self) -> dict[str, list[tuple[str, str]]]:
        grouped: dict[str, list[tuple[str, str]]] = {}
        for key in self.leaves:
            grouped.setdefault(key[0], []).append(key)
        return grouped


class _Seeded(torch.autograd.Function):
    """A number whose gradient in some outputs is given: ``grad_outputs=`` would import a second's worth of modules."""

    @staticmethod
    def forward(ctx: Any, weights: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return outputs[0].new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.saved_tensors)


class Summary:
    """Statistics of all families while blocks are being added.

    Rows of families without a summary are kept with their beliefs, unless ``sampled`` says of a node how many entries
    of tables are: then some of its rows, evenly spread, stand for all. With ``slopes``, the gradients of all that do
    not show the family are added to these. ``complete`` are the :func:`complete_sums` of the same rows and
    weights, where these are known.
    """

    def __init__(
        self,
        naturals: Naturals,
        layout: Layout,
        weight: Tensor,
        tempering: Tempering,
        *,
        slopes: Slopes | None = None,
        sampled: Mapping[str, int] | None = None,
        complete: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.layout, self.weight, self.tempering, self.slopes = layout, weight, tempering, slopes
        self.sampled = {} if sampled is None else sampled
        self.complete = complete_sums(layout, weight) if complete is None else complete
        self.factors = Factors(layout, naturals, tempering, attached=slopes is not None)
        self.replicas = max(self.factors.replicas, len(weight))
        self.pieces = torch.zeros(self.replicas).to(weight)
        self.counts: dict[int, Tensor] = {}
        self.rows: dict[int, list[WeighedRows]] = {}
        self.samples: dict[int, list[WeighedRows]] = {}
        self.moments: dict[int, Tensor] = {}
        self.integrated: Tensor | None = None

    def families(self) -> dict[str, tuple[Statistics, ...]]:
        """Add all blocks, and return the statistics of each node's family."""
        for block in self.layout.blocks:
            self._add(block)
        self._add_integrated()
        complete = complete_parts(self.layout)
        return {f.node: self._statistics(f, complete[f.place]) for f in self.layout.families}

    def _statistics(self, family: FamilyView, parts: Sequence[Complete]) -> tuple[Statistics, ...]:
        """A summary of the rows that have one, and the rest of the rows."""
        place = family.place
        # what is known of a family holds at these parameters; one of which a sample is kept will be tried at others
        is_known = self.slopes is not None and not self.sampled.get(family.node)
        statistics: list[Statistics] = []
        if family.is_table or family.is_linear:
            seen = self.complete[place]
            expected = (self.counts if family.is_table else self.moments).get(place)
            sums = (family, seen, torch.zeros_like(seen) if expected is None else expected)
            if family.is_table:
                return (Counts(*sums, (self.factors.log_table(place),) if is_known else None),)
            equations = self.factors.family_equations(place) if is_known else None
            statistics.append(Moments(*sums, equations, shift=self.layout.shifts[place]))
        plain = tuple((part, self.weight[:, part.rows]) for part in parts if part.columns is None)
        rows = tuple(self.rows.get(place, ()))
        if plain or rows or place in self.samples:
            most = self.sampled.get(family.node)
            sample = self._joined_sample(family, plain) if most else None
            many = max(self.layout.entries_on_points[place], *(len(part.rows) for part, _ in plain), 0)
            statistics.append(Rows(self.layout, family, plain, rows, sample, most is not None and many > most))
        return tuple(statistics)

    def _joined_sample(self, family: FamilyView, plain: Sequence[tuple[Complete, Tensor]]) -> tuple[WeighedRows, ...]:
        """Rows that show the family, and rows on points, that stand for all of them; side by side where they can be."""
        parts = list(self.samples.get(family.place, ()))
        for complete, weight in plain:
            step = len(complete.rows) // self.sampled[family.node]
            if step <= 1:
                parts.append(complete_rows(self.layout, family, complete.rows, weight))
                continue
            at = spread_evenly(len(complete.rows), step).to(complete.rows.device)
            scale = len(complete.rows) / len(at)
            parts.append(complete_rows(self.layout, family, complete.rows[at], scale * weight[:, at]))
        return joined(parts)

    def _add(self, block: Block) -> None:
        evaluated = self.factors.evaluate(block)
        weight = piece_weights(block, self.weight)
        log_z = evaluated.log_z
        counted = torch.where(weight != 0, log_z, 0.0)
        self.pieces += (weight * counted).sum(-1)
        beliefs = evaluated.beliefs(weight)
        self._add_tables(block, beliefs)
        self._add_rows(evaluated, beliefs)
        self._add_linear(block, evaluated, beliefs)

    def _add_tables(self, block: Block, beliefs: Banks) -> None:
        for source in block.tables:
            family = self.layout.families[source.family]
            share = self.tempering.share(family, seen=source.family not in source.members)
            table = share * source.by_member(family, beliefs).flatten(1)
            self.counts[source.family] = self.counts.get(source.family, torch.zeros_like(table)) + table

    def _add_rows(self, evaluated: Evaluated, beliefs: Banks) -> None:
        attached: list[tuple[Tensor, Tensor]] = []
        nodes: set[str] = set()
        each = zip(evaluated.prepared.rows, evaluated.log_probs, row_beliefs(evaluated, beliefs), strict=True)
        for rows, log_prob, belief in each:
            if isinstance(rows, LinearRows):
                self._add_integrals(rows.rows, rows.moments(self._shared(rows, belief)))
                continue
            belief = self._shared(rows, belief)
            attached.append((log_prob, belief))
            nodes.update(family.node for family in rows.families)
            for family, weighed in rows.each(belief):
                if family.node not in self.sampled:
                    self.rows.setdefault(family.place, []).append(weighed)
                elif self.sampled[family.node]:
                    share = self.sampled[family.node] / max(1, self.layout.entries_on_points[family.place])
                    self.samples.setdefault(family.place, []).append(_sample(weighed, share))
        if self.slopes is not None:
            self.slopes.add(nodes, [log_prob for log_prob, _ in attached], [belief for _, belief in attached])

    def _shared(self, rows: PlainRows | LinearRows, belief: Tensor) -> Tensor:
        """Beliefs (R, entries) times the power that the densities have."""
        if self.tempering == Tempering():
            return belief
        linear = self.layout.families[next(iter(self.layout.offsets), 0)]
        family = linear if isinstance(rows, LinearRows) else rows.families[0]
        seen, unseen = (self.tempering.share(family, seen=seen) for seen in (True, False))
        return torch.where(rows.seen, seen, unseen) * belief

    def _add_integrals(self, config: Tensor, moments: Tensor) -> None:
        """Add second moments (R, n, W, W) to rows of the equations (n,)."""
        rows, width = self.factors.equations.shift.shape
        if self.integrated is None:
            self.integrated = torch.zeros(self.replicas, rows, width, width).to(moments)
        used = moments.shape[-1]
        moments = moments.expand(self.replicas, -1, -1, -1)
        self.integrated[..., :used, :used].index_add_(1, config, moments)

    def _add_linear(self, block: Block, evaluated: Evaluated, beliefs: Banks) -> None:
        """Add moments of all linear families together, by row of the equations."""
        if not block.linear:
            return
        equations = self.factors.equations
        for source, integrals in zip(block.linear, evaluated.integrals, strict=True):
            group = source.group
            belief = taken(beliefs, source.stored, source.start, len(group.rows), group.sizes)
            config, moments = integrals.moments(belief, equations.shift)
            if self.tempering.power != 1.0:
                share = (1 + (self.tempering.power - 1) * group.seen.to(moments))[group.instance]
                moments = moments * share[None, :, None, :, None, None]
            self._add_integrals(config.flatten(), moments.flatten(1, 3))

    def _add_integrated(self) -> None:
        """Give each linear family its own of these moments."""
        if self.integrated is None:
            return
        for place, first in self.layout.offsets.items():
            family = self.layout.families[place]
            used = len(family.columns) + 1
            self.moments[place] = self.integrated[:, first : first + family.configurations, :used, :used]


def _sample(rows: WeighedRows, share: float) -> WeighedRows:
    """Some entries, evenly spread, with larger weights."""
    step = int(1 / share)
    if step <= 1:
        return rows
    at = spread_evenly(rows.weight.shape[1], step).to(rows.weight.device)
    weight = rows.weight[:, at]
    values = {name: value[:, at] for name, value in rows.values.items()}
    total, kept = rows.weight.sum(-1, keepdim=True), weight.sum(-1, keepdim=True)
    scale = total / kept.clamp(min=torch.finfo(kept.dtype).tiny)
    return WeighedRows(values, scale * weight, None if rows.mask is None else rows.mask[:, at])


@lru_cache(maxsize=1024)
def spread_evenly(size: int, step: int) -> Tensor:
    """Numbers below ``size``, one of each ``step`` in a row, at places in them that go round by the golden section.

    Every ``step``-th would be of one and the same state where tables of rows have as many states, or a divisor or
    multiple of it: what all others say of a parameter would be missing.

    >>> spread_evenly(12, 3).tolist()
    [0, 4, 6, 11]
    """
    first = torch.arange(0, size, step)
    within = torch.arange(len(first), dtype=torch.float64) * GOLDEN % 1.0
    return first + (within * (size - first).clamp(max=step)).long()


def complete_sums(layout: Layout, weight: Tensor) -> dict[int, Tensor]:
    """What rows that show all of a family add up to, for each family that has a summary: counts or moments.

    They depend on the rows and their weights (1 or R, N) alone, whatever the parameters.
    """
    parts = complete_parts(layout)
    tables = {f.place: _state_counts(parts[f.place], weight, f) for f in layout.families if f.is_table}
    others = (family for family in layout.families if family.is_linear and not family.is_table)
    return tables | {family.place: _column_moments(parts[family.place], weight, family) for family in others}


def complete_parts(layout: Layout) -> dict[int, list[Complete]]:
    """The rows that show all of each family."""
    complete: dict[int, list[Complete]] = {family.place: [] for family in layout.families}
    for part in layout.complete:
        complete[part.family].append(part)
    return complete


def _state_counts(parts: Sequence[Complete], weight: Tensor, family: FamilyView) -> Tensor:
    """Weighed counts of joint states (1 or R, states)."""
    size = math.prod(family.widths)
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
