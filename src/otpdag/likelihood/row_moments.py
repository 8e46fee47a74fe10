r"""Rows of a linear normal model, as moments: what is unknown is integrated out of them, not out of rows.

Given its categories c, the log-density of all numbers q (seen x and unseen u) is a quadratic form of (q, 1) with matrix
:math:`K_c = \sum_v A_v^\top A_v`, where :math:`A_v` are the coefficients of a family's noise. With the unseen ones
integrated out, rows that show the same numbers and categories add up to

.. math:: n \left(k_c + \tfrac{d_u}{2} \log 2\pi - \tfrac12 \log |K_{uu}|\right)
          - \tfrac12 \mathrm{tr}\left\{(K_{ss} - K_{su} K_{uu}^{-1} K_{us}) M\right\},

so rows are read once, for their second moments M; tables of categories read counts.

A first guess of hidden numbers needs no rows either. Principal components, residuals and regressions, as
:mod:`otpdag.likelihood.starts` makes them, are functions of second moments: a guessed number is a sum of the columns
around it; in a restart that sum is a rougher one, with noise of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.batch import distinct_rows
from otpdag.graph import Graph
from otpdag.likelihood.elimination.families import FamilyView, describe_families
from otpdag.likelihood.m_step import Twins, find_twins
from otpdag.likelihood.starts import NOISE, RESCALED
from otpdag.likelihood.structural_equations import LinearFamilies, StructuralEquations, structural_equations
from otpdag.mechanisms import Normal
from otpdag.numerics import order_free_products
from otpdag.structure import Structure, pack

Array = NDArray[np.float64]


def can_be_guessed(families: Sequence[FamilyView]) -> bool:
    """Whether all are normal nodes without categories among their parents, and no user says where they start."""

    def is_plain(family: FamilyView) -> bool:
        settings = [p.setting for p in family.mechanism.declared().values() if p.learned]
        return type(family.mechanism) is Normal and not family.selectors and all(one is None for one in settings)

    return all(is_plain(family) for family in families)


def completed_moments(
    graph: Graph, cells: Sequence[tuple[str, int]], second: Array, generator: np.random.Generator, *, first: bool
) -> tuple[Array, Array]:
    """Mean (D,) and covariance (D, D) of all numbers less their shift, hidden ones guessed, with mean zero.

    Args:
        graph: The graph, whose hidden nodes are numbers.
        cells: The node and coordinate of each number.
        second: Second moments of the numbers and a one (D + 1, D + 1), zero where they are hidden.
        generator: Where restarts differ.
        first: Whether this is the first start, which is the plain one.
    """
    average = second / second[-1, -1]
    mean = average[:-1, -1]
    seen = average[:-1, :-1] - np.outer(mean, mean)
    places: dict[str, list[int]] = {}
    for number, (node, _) in enumerate(cells):
        places.setdefault(node, []).append(number)
    sums: dict[str, Array] = {}
    complete, noise = np.diag([float(node not in graph.hidden) for node, _ in cells]), np.zeros(len(cells))
    # nodes near the leaves first: they explain the columns, and are explained by what lies above
    for node in [name for name in reversed(graph.order) if name in graph.hidden]:
        columns = _columns_around(graph, node, places, sums, seen)
        if not first:
            columns *= np.exp(generator.normal(0.0, RESCALED, (len(columns), 1)))
        sums[node] = _components(columns, len(places[node]), seen, None if first else generator)
        complete[places[node]] = sums[node]
        noise[places[node]] = 0.0 if first else NOISE**2
    return mean, complete @ seen @ complete.T + np.diag(noise)


def _columns_around(
    graph: Graph, node: str, places: Mapping[str, list[int]], sums: Mapping[str, Array], seen: Array
) -> Array:
    """The columns that tell of a hidden node, each of spread one, as sums (m, D) of all numbers."""
    near = [name for name in graph.markov_blanket(node) if name in places and name not in graph.hidden]
    children = [sums[name] for name in graph.children(node) if name in sums]
    if not near and not children:
        near = [name for name in graph.observed_descendants(node) if name in places]
    columns = _of_spread_one(np.eye(len(seen))[[place for name in near for place in places[name]]], seen)
    others = [name for name in sums if name not in graph.children(node)]
    explained = [sums[name] for name in others if set(graph.children(name)) & set(near)]
    if explained and len(columns):
        by = np.concatenate(explained)
        slopes = np.linalg.lstsq(by @ seen @ by.T, by @ seen @ columns.T, rcond=None)[0]
        columns = _of_spread_one(columns - slopes.T @ by, seen)
    return np.concatenate([columns, *children])


def _of_spread_one(sums: Array, seen: Array, little: float = 1e-9) -> Array:
    """Sums divided by their spread, but for those with ``little`` of the columns': what is left then is rounding."""
    spread = np.sqrt(np.maximum(((sums @ seen) * sums).sum(-1, keepdims=True), 0.0))
    size = np.sqrt(np.maximum(seen.diagonal(), 0.0)).max(initial=0.0)
    return sums / np.where(spread > little * size, spread, max(size, 1e-300))


def _components(columns: Array, dim: int, seen: Array, generator: np.random.Generator | None) -> Array:
    """The leading principal components as sums (dim, D), of spread one; turned where there is a generator."""
    _, vectors = np.linalg.eigh(columns @ seen @ columns.T)
    leading = np.zeros((dim, len(seen)))
    own = vectors[:, ::-1][:, :dim].T @ columns
    leading[: len(own)] = _of_spread_one(own, seen)
    if generator is not None and dim > 1:
        turn, _ = np.linalg.qr(generator.standard_normal((dim, dim)))
        leading = turn.T @ leading
    return leading


@dataclass(frozen=True, eq=False)
class _Tables:
    """Families of categories of a kind, and how often each joint state occurs (1 or R, n, states)."""

    twins: Twins
    codes: Tensor
    seen: Tensor
    counts: Tensor

    def log_likelihood(self, point: Tensor) -> Tensor:
        """Sum over all rows (R,)."""
        log_table = self.twins.families[0].log_table(self.twins.naturals(point)).flatten(1)
        log_table = log_table.unflatten(0, (-1, len(self.twins.families)))
        return (self.counts * torch.where(self.counts > 0, log_table, 0.0)).flatten(1).sum(-1)

    def counted(self, weight: Tensor) -> _Tables:
        """The same with the counts of rows of these weights (1 or R, N)."""
        states = math.prod(self.twins.families[0].widths)
        counts = [
            [
                torch.bincount(code[seen], own[seen], minlength=states)
                for code, seen in zip(self.codes, self.seen, strict=True)
            ]
            for own in weight
        ]
        return replace(self, counts=torch.stack([torch.stack(own) for own in counts]))


@dataclass(frozen=True, eq=False)
class Moments:
    """All that a linear normal model reads of a table.

    Attributes:
        second: Second moments of the columns (numbers less their shift, 1) in each group (1 or R, G, D + 1, D + 1).
        unseen: Which numbers each group misses (G, D).
    """

    batch: Batch
    cells: tuple[tuple[str, int], ...]
    shift: Tensor
    group: Tensor
    unseen: Tensor
    linear: LinearFamilies
    tables: tuple[_Tables, ...]
    second: Tensor
    structural: StructuralEquations | None
    """The same as structural equations, where all families are normal nodes."""

    def guessed(self, graph: Graph, seed: int, *, first: bool) -> Tensor | None:
        """A start (1, P) with hidden numbers guessed; None where rows have other gaps, or parameters given starts."""
        alike = len(self.unseen) == len(self.second) == 1
        hidden = [node in graph.hidden for node, _ in self.cells]
        plain = alike and self.unseen[0].tolist() == hidden and can_be_guessed(self.linear.all)
        if self.structural is None or not plain:
            return None
        second, generator = self.second[0, 0].numpy(), np.random.default_rng(seed)
        mean, covariance = completed_moments(graph, self.cells, second, generator, first=first)
        return self._regressed(torch.from_numpy(mean) + self.shift, torch.from_numpy(covariance))

    def _regressed(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """The point (1, P) at which every node is regressed on its parents, by mean (D,) and covariance (D, D)."""
        linear, size = self.linear, len(mean)
        around = torch.block_diag(covariance, torch.ones(1, 1).double())
        none = {key: torch.zeros(1, *shape, dtype=torch.float64) for key, shape in linear.shapes.items()}
        naturals = linear.structure.naturals(none)
        for family in linear.all:
            own, dim = linear.columns[family.node], family.widths[-1]
            at = torch.tensor([[own[cell], *own[dim:], size] for cell in range(dim)])
            moments = around[at.unsqueeze(-1), at.unsqueeze(-2)][None, None]
            mechanism, unit = family.mechanism, torch.ones(dim).double()
            assert isinstance(mechanism, Normal), "checked before"
            least = mechanism.smallest_at_start
            naturals[family.node] = mechanism.regressed(
                naturals[family.node], moments, mean[at[:, :-1]], unit, least=least
            )
        return pack(none | linear.structure.raw(naturals))

    def reweighted(self, factors: Tensor) -> Moments:
        """Moments and counts of the same rows with other weights."""
        batch = replace(self.batch, weight=self.batch.weight * factors)
        return replace(self, batch=batch)._summed()

    def _summed(self) -> Moments:
        tables = tuple(one.counted(self.batch.weight) for one in self.tables)
        return replace(self, tables=tables, second=self._second())

    @property
    def can_be_squared(self) -> bool:
        """Whether no digit is lost in fourth powers of columns' deviations, which gradients of moments hold."""
        count, squares = self.second[..., -1, -1].sum(), self.second.diagonal(dim1=-2, dim2=-1)[..., :-1].sum((0, 1))
        deviation = torch.sqrt(squares / count)
        ordinary = (deviation > 1e-60) & (deviation < 1e60)
        return all(bool(ordinary[at]) or self._is_constant(*cell) for at, cell in enumerate(self.cells))

    def _is_constant(self, node: str, cell: int) -> bool:
        """Whether a column has no deviations at all, or is never seen."""
        if node not in self.batch.values:
            return True
        seen = self.batch.values[node][0, :, cell][_seen(self.batch, node, cell)]
        return not seen.numel() or bool((seen == seen[0]).all())

    def _second(self) -> Tensor:
        weight, many, size = self.batch.weight, len(self.unseen), len(self.cells) + 1
        total = torch.zeros(len(weight), many, size, size, dtype=torch.float64)
        members: Sequence[Tensor | slice] = [slice(None)] if many == 1 else _split_by(self.group, many)
        alike = bool((weight == weight[:, :1]).all())
        for number, (rows, unseen) in enumerate(zip(members, self.unseen, strict=True)):
            seen = torch.nonzero(~unseen)[:, 0]
            at = torch.cat([seen, torch.tensor([size - 1])])
            place = (at.unsqueeze(-1), at)
            if alike:
                count = len(rows) if isinstance(rows, Tensor) else self.batch.rows
                columns, centres = self._columns(rows, seen.tolist()), self.shift[seen].tolist()
                products = order_free_products(columns, centres, count)
                total[:, number][:, *place] += weight[:, :1, None] * torch.from_numpy(products)
                continue
            for part, own in self._blocks(rows, seen.tolist()):
                for replica, each in enumerate(own.numpy()):
                    total[replica, number][place] += torch.from_numpy((part * each) @ part.T)
        return total

    def _columns(self, rows: Tensor | slice, seen: Sequence[int]) -> list[NDArray[np.float64]]:
        """The cells (n,) of these rows, column by column."""
        columns = [self.batch.values[node][0, :, cell].numpy() for node, cell in (self.cells[at] for at in seen)]
        return [column[rows.numpy()] for column in columns] if isinstance(rows, Tensor) else columns

    block_entries: ClassVar[int] = 2**16
    """Of rows whose columns are held at a time: few enough for a processor's cache."""

    def _blocks(self, rows: Tensor | slice, seen: Sequence[int]) -> Iterator[tuple[NDArray[np.float64], Tensor]]:
        """Cells less their shift and a one below them (d + 1, n), and rows' weights (1 or R, n), block by block."""
        columns, shift, weight = self._columns(rows, seen), self.shift.tolist(), self.batch.weight
        if isinstance(rows, Tensor):
            weight = weight[:, rows]
        held = np.ones((len(columns) + 1, min(weight.shape[1], max(1, self.block_entries // (len(columns) + 1)))))
        for begin in range(0, weight.shape[1], held.shape[1]):
            part = weight[:, begin : begin + held.shape[1]]
            block = held[:, : part.shape[1]]
            for line, at, column in zip(block, seen, columns, strict=False):
                np.subtract(column[begin : begin + len(line)], shift[at], out=line)
            yield block, part

    def log_likelihood(self, point: Tensor) -> Tensor:
        """Sum over all rows (R,) at ``point`` (R, P)."""
        total = torch.zeros((), dtype=torch.float64)
        for tables in self.tables:
            total = total + tables.log_likelihood(point)
        return total + self._of_numbers(point) if self.cells else total

    def _of_numbers(self, point: Tensor) -> Tensor:
        precision, constant = self._precision(point)
        count = self.second[..., -1, -1]
        squares = (precision * self.second).flatten(2).sum(-1)
        maybe = torch.nonzero(self.unseen.any(0))[:, 0]
        if len(maybe):
            unseen = self.unseen[:, maybe].to(precision)
            among = precision[..., maybe, :][..., maybe] * (unseen.unsqueeze(-1) * unseen.unsqueeze(-2))
            factor, failed = torch.linalg.cholesky_ex(among + torch.diag_embed(1 - unseen))
            factor = torch.where((failed > 0)[..., None, None], torch.nan, factor)
            shown = 1 - torch.nn.functional.pad(self.unseen.to(precision), (0, 1))
            pull = precision[..., maybe, :] * unseen.unsqueeze(-1) * shown.unsqueeze(-2)
            half = torch.linalg.solve_triangular(factor, pull, upper=False)
            squares = squares - ((half @ self.second) * half).flatten(2).sum(-1)
            log_determinant = 2 * torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1)
            constant = constant - 0.5 * log_determinant + 0.5 * math.log(2 * math.pi) * unseen.sum(-1)
        return (count * constant - 0.5 * squares).sum(-1)

    def _precision(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """K (R, G, D + 1, D + 1) and the constants of the densities (R, G)."""
        many, size = self.unseen.shape[0], len(self.cells) + 1
        precision = torch.zeros(len(point), many, size * size, dtype=torch.float64)
        constant = torch.zeros(len(point), many, dtype=torch.float64)
        for one in self.linear.kinds:
            products, constants = one.evaluated(point)
            products = products.transpose(1, 2).flatten(2).expand(len(point), -1, -1)
            precision = precision.index_add(2, one.entries, products)
            constant = constant + constants.sum(1)
        return precision.unflatten(-1, (size, size)), constant


def moments_of(
    structure: Structure,
    batch: Batch,
    shapes: Mapping[str, tuple[int, ...]],
    most_groups: int = 512,
    columns_for_each_row: int = 4,
) -> Moments | None:
    """Sum rows up; None where the model or its gaps do not allow it, or where there would be too many groups.

    A group of rows that show the same cells and categories costs about as much as ``columns_for_each_row`` columns'
    worth of rows: with more groups than that, rows are faster.
    """
    if not batch.shares_rows or batch.weight.device.type != "cpu":
        return None
    families = describe_families(structure)
    given = set(structure.given)
    modelled = [family for family in families if family.node not in given]
    if not all(_is_summed_up(structure, batch, family) for family in modelled):
        return None
    linear = [family for family in modelled if not family.is_table]
    read = {place for family in linear for place, _ in family.columns}
    cells = [(f.node, c) for f in families if f.place in read for c in range(f.widths[-1])]
    selectors = {place for family in linear for place, _ in family.selectors}
    group, first = _groups(batch, [families[place].node for place in sorted(selectors)], [node for node, _ in cells])
    if len(first) > min(most_groups, max(1, columns_for_each_row * batch.rows // (len(cells) + 1))):
        return None
    unseen = [~_seen(batch, node, cell)[first] for node, cell in cells]
    stacked = torch.stack(unseen, -1) if unseen else torch.zeros(1, 0, dtype=torch.bool)
    shift = (
        torch.stack([_centre(structure, batch, node, cell) for node, cell in cells])
        if cells
        else torch.zeros(0).double()
    )
    number = {cell: at for at, cell in enumerate(cells)}
    columns = {f.node: [number[families[place].node, cell] for place, cell in f.columns] for f in linear}
    codes = {family.node: _configuration(batch, family, families, first) for family in linear}
    numbers = LinearFamilies(structure, tuple(linear), shapes, columns, codes, shift)
    tables = [family for family in modelled if family.is_table]
    counted = [_tables(batch, twins) for twins in find_twins(structure, tables, shapes)]
    structural = structural_equations(numbers, ~stacked) if linear and not given and not tables else None
    summed = Moments(batch, tuple(cells), shift, group, stacked, numbers, tuple(counted), torch.zeros(0), structural)
    summed = summed._summed()
    return summed if summed.can_be_squared else None


def _split_by(group: Tensor, many: int) -> tuple[Tensor, ...]:
    """The rows of each group, in their order."""
    return torch.argsort(group, stable=True).split(torch.bincount(group, minlength=many).tolist())


def _is_summed_up(structure: Structure, batch: Batch, family: FamilyView) -> bool:
    """Whether a family is linear, or a table, and all categories that it needs are seen."""
    graph = structure.graph
    numbers = not family.categories[-1]
    if not (family.is_linear if numbers else family.is_table):
        return False
    names = family.names[:-1] if numbers or not graph.children(family.node) else family.names
    categories = [name for name in names if structure.mechanisms[name].space.is_discrete]
    if any(name in graph.hidden or not bool(batch.mask[name].all()) for name in categories):
        return False
    return numbers or family.node not in graph.hidden


def _groups(batch: Batch, categories: Sequence[str], numbers: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The group of each row, and a row of each group."""
    masks = {id(batch.mask[node]): batch.mask[node] for node in numbers if node in batch.mask}  # some are shared
    gaps = [mask for mask in masks.values() if not bool(mask.all())]
    tensors = [*(batch.values[node] for node in categories), *gaps]
    if not tensors:
        return torch.zeros(batch.rows, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    code, many = distinct_rows(tensors)
    group = torch.from_numpy(code)
    first = torch.empty(many, dtype=torch.long)
    first[group.flip(0)] = torch.arange(batch.rows).flip(0)
    return group, first


def _seen(batch: Batch, node: str, cell: int) -> Tensor:
    """In which rows a cell is seen (N,)."""
    if node not in batch.mask:
        return torch.zeros(batch.rows, dtype=torch.bool)
    return batch.mask[node][0, :, min(cell, batch.mask[node].shape[-1] - 1)]


def _centre(structure: Structure, batch: Batch, node: str, cell: int, most: int = 1000) -> Tensor:
    """About the mean of what is seen of a column, zero of one that never is: moments about it lose no digits.

    That of ``most`` rows is close enough, evenly spaced as rows may be sorted. It is the centre of the column's units
    where there are some, which do not depend on the order of rows.
    """
    if node not in batch.values:
        return torch.zeros((), dtype=torch.float64)
    mechanism = structure.mechanisms[node]
    if type(mechanism) is Normal and mechanism.predictor.units is not None:
        return mechanism.predictor.units.out_shift[cell].double()
    value, seen = batch.values[node][0, :, cell], _seen(batch, node, cell)
    for rows in (slice(0, None, max(1, len(value) // most)), slice(None)):
        if bool(seen[rows].any()):
            return value[rows][seen[rows]].double().mean()
    return torch.zeros((), dtype=torch.float64)


def _configuration(batch: Batch, family: FamilyView, families: Sequence[FamilyView], first: Tensor) -> Tensor:
    """That of a family's categories in each group (G,)."""
    code = torch.zeros(len(first), dtype=torch.long)
    for place, size in family.selectors:
        code = code * size + batch.values[families[place].node][0].index_select(0, first).argmax(-1)
    return code


def _tables(batch: Batch, twins: Twins) -> _Tables:
    codes, seen = [], []
    for family in twins.families:
        code = torch.zeros(batch.rows, dtype=torch.long)
        for name, size in zip(family.names, family.widths, strict=True):
            code = code * size + batch.values[name][0].argmax(-1)
        codes.append(code)
        seen.append(batch.mask[family.node][0].all(-1))
    return _Tables(twins, torch.stack(codes), torch.stack(seen), torch.zeros(0))
