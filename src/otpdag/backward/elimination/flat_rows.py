"""Tables of families that read numbers, side by side: one call for a family, however many tables its rows need.

What a family's members are in each entry of each table depends on data and points alone. It is written down once for a
placement of points; then every evaluation is one log-density of many rows. A linear normal family is written as
columns, sorted by the configuration of its categories: its log-densities are products of matrices, and so are second
moments under beliefs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from otpdag.backward.elimination.blocks import Block, PointsKey, RowSource
from otpdag.backward.elimination.families import FamilyView
from otpdag.backward.elimination.points import Points

if TYPE_CHECKING:
    from otpdag.backward.elimination.row_layout import Layout

REMEMBERED = 2
"""Bytes of a layout, over those of a block, up to which what no parameter changes is kept."""

__all__ = ["FlatRows", "LinearRows", "Prepared", "prepare"]


@dataclass(frozen=True, eq=False)
class _Tables:
    """Tables of one family, one after the other, and their entries."""

    family: FamilyView
    sources: tuple[RowSource, ...]

    @property
    def entries(self) -> int:
        """Entries of all tables."""
        return sum(len(source.rows) * math.prod(source.sizes) for source in self.sources)

    def split(self, flat: Tensor) -> Iterator[tuple[RowSource, Tensor]]:
        """Entries (R, E) as tables (R, n, *sizes)."""
        at = 0
        for source in self.sources:
            size = len(source.rows) * math.prod(source.sizes)
            yield source, flat[:, at : at + size].reshape(len(flat), len(source.rows), *source.sizes)
            at += size


@dataclass(frozen=True, eq=False)
class FlatRows(_Tables):
    """Entries as rows of a family without a summary.

    Attributes:
        values: Values of its members (1 or R, E, width).
        mask: Which cells of the node are seen, where that is not all of them (1, E, width).
    """

    values: Mapping[str, Tensor]
    mask: Tensor | None


@dataclass(frozen=True, eq=False)
class LinearRows(_Tables):
    """Entries as rows of a linear normal family, sorted by the configuration of its categories.

    Attributes:
        columns: Own coordinates, numeric parents and one, less their shift (1 or R, E, W).
        order: Which entry each row is (E,); None if they are in order already.
        ends: Where each configuration's rows begin and end.
        shift: What was subtracted from the columns (W,).
    """

    columns: Tensor
    order: Tensor | None
    ends: tuple[int, ...]
    shift: Tensor

    def log_prob(self, coefficients: Tensor, constants: Tensor) -> Tensor:
        """Log-densities of all entries (R, E), by the family's equations (R, C, dim, W) and (R, C)."""
        moved = (coefficients * self.shift).sum(-1, keepdim=True)
        coefficients = torch.cat([coefficients[..., :-1], coefficients[..., -1:] + moved], -1)
        parts = [
            constants[:, c, None] - 0.5 * (self.columns[:, begin:end] @ coefficients[:, c].mT).square().sum(-1)
            for c, (begin, end) in enumerate(self._spans)
        ]
        by_code = torch.cat(parts, 1)
        if self.order is None:
            return by_code
        unsorted = torch.empty_like(by_code)
        unsorted[:, self.order] = by_code
        return unsorted

    def moments(self, weight: Tensor) -> Tensor:
        """Second moments of the columns under weights (R, E), by configuration: (R, C, W, W)."""
        weight = weight if self.order is None else weight[:, self.order]
        parts = []
        for begin, end in self._spans:
            some = self.columns[:, begin:end]
            parts.append((some * weight[:, begin:end, None]).mT @ some)
        return torch.stack(parts, 1)

    @property
    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self.ends[:-1], self.ends[1:], strict=True))


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a block needs that no parameter changes: points, and rows of families on them."""

    points: Mapping[PointsKey, Points]
    rows: tuple[FlatRows | LinearRows, ...]


def prepare(layout: Layout, block: Block) -> Prepared:
    """Write the points and rows of a block down; of a layout that fits into memory only once."""
    known: Prepared | None = block.__dict__.get("_prepared")
    if known is not None:
        return known
    points = {key: placement.points() for key, placement in block.placements.items()}
    by_family: dict[tuple[int, bool], list[RowSource]] = {}
    for source in block.row_tables:
        by_family.setdefault((source.family, source.has_moments), []).append(source)
    made = Prepared(points, tuple(_flat(layout, sources, points) for sources in by_family.values()))
    if 8 * layout.elements <= REMEMBERED * layout.options.memory:
        block.__dict__["_prepared"] = made
    return made


def _flat(layout: Layout, sources: Sequence[RowSource], points: Mapping[PointsKey, Points]) -> FlatRows | LinearRows:
    family = layout.families[sources[0].family]
    parts = [_values(layout, source, points) for source in sources]
    replicas = max(len(value) for part in parts for value in part.values())
    values = {
        name: torch.cat([part[name].expand(replicas, -1, -1) for part in parts], 1)
        if any(len(part[name]) > 1 for part in parts)
        else torch.cat([part[name] for part in parts], 1)
        for name in family.names
    }
    if sources[0].has_moments:
        return _sorted(layout, family, tuple(sources), values)
    masks = [_mask(layout, source) for source in sources]
    mask = None if all(bool(one.all()) for one in masks) else torch.cat(masks, 1)
    return FlatRows(family, tuple(sources), values, mask)


def _sorted(
    layout: Layout, family: FamilyView, sources: tuple[RowSource, ...], values: Mapping[str, Tensor]
) -> LinearRows:
    replicas = max(len(value) for value in values.values())
    names = dict(zip(family.members, family.names, strict=True))
    columns = [values[names[place]][..., cell].expand(replicas, -1) for place, cell in family.columns]
    stacked = torch.stack([*columns, torch.ones_like(columns[0])], -1) - layout.shifts[family.place]
    if family.configurations == 1:
        return LinearRows(family, sources, stacked, None, (0, stacked.shape[1]), layout.shifts[family.place])
    code = torch.zeros(stacked.shape[1], dtype=torch.long)
    for place, size in family.selectors:
        code = code * size + values[names[place]][0].argmax(-1)
    order = torch.argsort(code, stable=True)
    ends = torch.cumsum(torch.bincount(code, minlength=family.configurations), 0).tolist()
    return LinearRows(family, sources, stacked[:, order], order, (0, *ends), layout.shifts[family.place])


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
