r"""The evidence of rows under the model, its gradient, and the expected statistics of every family.

The evidence of a row is the log-density of what it shows, everything unknown integrated out. By Fisher's identity its
gradient is that of the expected complete-data log-density under the backward map held fixed,

.. math:: \nabla_\theta \log P_\theta(x)
          = \sum_v E_{\phi(\cdot \mid x)} \nabla_\theta \log P_\theta(x_v \mid x_{pa(v)}),

so each family needs only a summary of all rows: a table of categories its expected counts, a linear normal family its
expected second moments for each configuration of its categories. Any other needs the rows, weighed on their points. The
same summaries are what an EM step maximises. One pass without gradients gives beliefs; then expected log-densities
are differentiated, those of rows chunk by chunk. The memory that this takes does not grow with rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from otpdag.likelihood.elimination.families import Complete, FamilyView, WeighedRows
from otpdag.likelihood.elimination.layout import Block, Layout, PointsKey, Source, lay_out_within
from otpdag.likelihood.elimination.sums import (
    Banks,
    Evaluated,
    Factors,
    FamilyRows,
    Tempering,
    beliefs_of,
    piece_weights,
)
from otpdag.likelihood.elimination.unknown_numbers import (
    FINER,
    Integrals,
    LineColumns,
    Placed,
    line_covariance,
    placed_lines,
)
from otpdag.mechanisms.base import Params, configurations, numeric
from otpdag.numerics import side_by_side, sums_by_row
from otpdag.problem import KnownGradient
from otpdag.structure import Naturals

LIKELIHOOD = Tempering()
CLOSE_ENOUGH = 1e-4  # difference of a row's evidence between two numbers of points
MOST_ROUNDS = 12  # of placing points: a window doubles where it is too narrow
CHUNK = 2**21  # entries of a log-density with its gradient that are held at a time
# -- what rows say of a family -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Sums(ABC):
    """A summary of all rows.

    Attributes:
        family: Which family.
        complete: Sums over rows that show all of it (1 or R, ...).
        expected: Over all others, under the backward map (R, ...).
        known: What :meth:`FamilyView.evaluated` returns, if that is known already.
    """

    family: FamilyView
    complete: Tensor
    expected: Tensor
    known: tuple[Tensor, ...] | None = None

    @abstractmethod
    def total(self, sums: Tensor, evaluated: Sequence[Tensor]) -> Tensor:
        """The sum of log-densities (R,)."""

    def parts(self, params: Params) -> Iterator[tuple[Tensor, Tensor]]:
        """Sums of log-densities (R,) over complete and over expected rows."""
        evaluated = self.family.evaluated(params) if self.known is None else self.known
        yield self.total(self.complete, evaluated), self.total(self.expected, evaluated)

    def height(self, params: Params) -> Tensor:
        """The sum of all log-densities (R,)."""
        return _total(self.parts(params))


@dataclass(frozen=True, eq=False)
class Counts(_Sums):
    """How often each joint state of a family of categories occurs (R, states); known are their log-probabilities."""

    def total(self, sums: Tensor, evaluated: Sequence[Tensor]) -> Tensor:
        """Counts times log-probabilities."""
        return weighed(sums, evaluated[0].flatten(1))

    def table(self) -> Tensor:
        """All counts, by configuration of the parents (R, C, states)."""
        total = self.complete + self.expected
        return total.reshape(len(total), -1, self.family.widths[-1])


@dataclass(frozen=True, eq=False)
class Moments(_Sums):
    """Second moments of the columns (node, numeric parents, 1), by configuration of the categories (R, C, W, W).

    Known are the coefficients and constants of the family's equations; ``shift`` is what was subtracted from the
    columns (W,).
    """

    shift: Tensor = field(kw_only=True)

    def total(self, sums: Tensor, evaluated: Sequence[Tensor]) -> Tensor:
        r""":math:`\sum_c n_c \log c_c - \tfrac12 \mathrm{tr}(A_c M_c A_c^\top)`."""
        coefficients, constants = evaluated
        moved = (coefficients * self.shift).sum(-1, keepdim=True)
        coefficients = torch.cat([coefficients[..., :-1], coefficients[..., -1:] + moved], -1)
        squares = ((coefficients @ sums) * coefficients).flatten(2).sum(-1)
        return (sums[..., -1, -1] * constants - 0.5 * squares).sum(-1)

    def by_coordinate(self) -> Tensor:
        """All moments of each own coordinate with the numeric parents and one (R, C, dim, P + 2, P + 2)."""
        total, dim = self.complete + self.expected, self.family.widths[-1]
        others = list(range(dim, total.shape[-1]))
        return torch.stack([total[..., [cell, *others], :][..., [cell, *others]] for cell in range(dim)], 2)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows themselves, for families without a summary.

    Attributes:
        family: Which family.
        complete: Rows that show all of it, with their weights (1 or R, n).
        expected: All that others may be, with weights times beliefs (R, n).
        sample: If rows are too many to keep, some that stand for all, complete and expected.
        thinned: Whether the sample lacks some of them.
    """

    family: FamilyView
    complete: tuple[WeighedRows, ...]
    expected: tuple[WeighedRows, ...]
    sample: tuple[WeighedRows, ...] | None = None
    thinned: bool = False

    def height(self, params: Params) -> Tensor:
        """The sum of all log-densities (R,), or its estimate from the sample."""
        if self.sample is None:
            return _total(self.parts(params))
        return torch.stack(torch.broadcast_tensors(*(self._sum(params, one) for one in self.sample))).sum(0)

    def parts(self, params: Params) -> Iterator[tuple[Tensor, Tensor]]:
        """Sums of log-densities (R,) over complete and over expected rows, in chunks."""
        for chunk in self._chunks(self.complete):
            total = self._sum(params, chunk)
            yield total, torch.zeros_like(total)
        for chunk in self._chunks(self.expected):
            total = self._sum(params, chunk)
            yield torch.zeros_like(total), total

    def _sum(self, params: Params, rows: WeighedRows) -> Tensor:
        return weighed(rows.weight, self.family.log_prob(params, rows.values, rows.mask))

    @staticmethod
    def _chunks(parts: Sequence[WeighedRows]) -> Iterator[WeighedRows]:
        for rows in parts:
            many, step = rows.weight.shape[1], max(1, CHUNK // len(rows.weight))
            yield from [rows] if many <= step else (rows.at(slice(at, at + step)) for at in range(0, many, step))

    def by_coordinate(self, shift: Tensor) -> Tensor:
        """Moments about a shift (W,) as :meth:`Moments.by_coordinate` has them, of the coordinates that are seen."""
        family, dim = self.family.mechanism.family, self.family.widths[-1]
        total = torch.zeros((), dtype=torch.float64)
        for rows in self._chunks((*self.complete, *self.expected)):
            weight, value = rows.weight.unsqueeze(-1), rows.values[self.family.node]
            config, beside = configurations(family, rows.values), numeric(family, rows.values)
            share = weight if config is None else weight * config
            seen = torch.ones_like(value) if rows.mask is None else rows.mask.to(value)
            parts = [share, seen, value, *([] if beside is None else [beside]), torch.ones_like(weight)]
            widths = (share.shape[-1], dim, dim, shift.shape[-1] - dim)
            share, seen, own, others = side_by_side(parts).flatten(1, -2).split(widths, -1)
            own, others = own - shift[:dim], others - shift[dim:]
            columns = torch.stack([torch.cat([own[..., i : i + 1], others], -1) for i in range(dim)], -2)
            total = total + torch.einsum("rnc,rnd,rndi,rndj->rcdij", share, seen, columns, columns)
        return total


@dataclass(frozen=True, eq=False)
class LinePosterior:
    """What pieces say of the lines of a family: moments under the backward map, beside the numbers that make them.

    Attributes:
        columns: The lines among those of their group.
        slopes: Of all lines, by unknown (R, k, T, L, d).
        which: The system of each piece, among those that have these lines (n,).
        before: Mean (R, n, T, d) and covariance (R, k, T, d, d) of the unknowns where placed numbers are zero, and how
            the mean follows them (R, k, T, d, b); lines are not given.
        weight: Of each piece and state (R, n, T).
        centre: Posterior mean of placed numbers and lines (R, n, T, b + L).
        squares: Their weighed squares about it (R, n, T, b + L, b + L).
    """

    columns: LineColumns
    slopes: Tensor
    which: Tensor
    before: tuple[Tensor, Tensor, Tensor]
    weight: Tensor
    centre: Tensor
    squares: Tensor

    @classmethod
    def of(cls, integrals: Integrals, columns: LineColumns, slopes: Tensor, belief: Tensor) -> LinePosterior:
        """Read them off, for slopes (R, m, T, L, d) and the belief of each entry of the tables (R, n, *sizes)."""
        group, before, grid = integrals.group, integrals.before, integrals.grid
        assert before is not None, "there are lines"
        assert grid is not None, "lines are on points"
        place = torch.full((len(group.config),), -1)
        place[columns.instances] = torch.arange(len(columns.instances))
        here = torch.nonzero(place[group.instance] >= 0)[:, 0]
        each, grid = group.by_state(belief)[:, here], grid[:, here].unsqueeze(2)
        weight = each.sum(-1)
        centre = (each.unsqueeze(-1) * grid).sum(-2) / weight.clamp(min=torch.finfo(weight.dtype).tiny).unsqueeze(-1)
        gap = grid - centre.unsqueeze(-2)
        squares = (each.unsqueeze(-1) * gap).mT @ gap
        some = columns.instances
        known = (before.mean[:, here], before.covariance[:, some], before.gain[:, some])
        return cls(columns, slopes[:, some], place[group.instance[here]], known, weight, centre, squares)

    def height(self, own: Tensor) -> Tensor:
        """The expected log-density of all lines (R,), but for a constant, by slopes (R, C, lines, columns) of these."""
        mean, covariance, gain = self.before
        lines = self.slopes.expand(max(len(own), len(self.slopes)), *self.slopes.shape[1:]).clone()
        lines[..., self.columns.at, :] = self.columns.slopes(own, mean.shape[-1])
        spread = line_covariance(lines, covariance)
        follow = torch.cat([lines @ gain, torch.eye(lines.shape[-2]).to(lines).expand_as(spread)], -1)[:, self.which]
        middle = (lines[:, self.which] @ mean.unsqueeze(-1)).squeeze(-1)
        gap = (follow @ self.centre.unsqueeze(-1)).squeeze(-1) - middle
        squares = self.weight[..., None, None] * gap.unsqueeze(-1) * gap.unsqueeze(-2)
        squares = squares + follow @ self.squares @ follow.mT
        precision = torch.linalg.inv(spread)[:, self.which]
        log_size = torch.logdet(spread)[:, self.which]
        return -0.5 * (self.weight * log_size + (precision * squares).sum((-2, -1))).flatten(1).sum(-1)


@dataclass(frozen=True, eq=False)
class Lines:
    """What rows say of the lines of a family, given the numbers that make them.

    The density of a node at its line knows nothing of the slopes of unknown parents: they say how the line comes about.
    """

    family: FamilyView
    each: tuple[LinePosterior, ...]

    def height(self, params: Params) -> Tensor:
        """The expected log-density of the lines (R,)."""
        slopes = self.family.slopes(params)
        return torch.stack(torch.broadcast_tensors(*(one.height(slopes) for one in self.each))).sum(0)

    def parts(self, params: Params) -> Iterator[tuple[Tensor, Tensor]]:
        """Nothing of complete rows, and the same."""
        total = self.height(params)
        yield torch.zeros_like(total), total


Statistics = Counts | Moments | Rows | Lines


def _total(parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    sums = [complete + expected for complete, expected in parts]
    return torch.stack(torch.broadcast_tensors(*sums)).sum(0)


def weighed(weight: Tensor, log_prob: Tensor) -> Tensor:
    """Sum of weight times log-density (R,); what has no weight counts as zero even at minus infinity."""
    known = torch.where(weight != 0, log_prob, torch.zeros((), dtype=log_prob.dtype, device=log_prob.device))
    return (weight * known).flatten(1).sum(-1)


# -- gathered from the beliefs of all pieces ---------------------------------------------------------------------------


class Slopes:
    """Gradients in some parameters, by node and name, while parts of a sum are being added."""

    def __init__(self, leaves: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.leaves = leaves
        self.total = {node: {name: torch.zeros_like(one) for name, one in own.items()} for node, own in leaves.items()}

    def add(self, nodes: Iterable[str], value: Tensor) -> None:
        """Add the gradient of a number in the parameters of some nodes."""
        leaves = [(self.total[node][name], one) for node in nodes for name, one in self.leaves.get(node, {}).items()]
        if not leaves or not value.requires_grad:
            return
        parts = torch.autograd.grad(value, [one for _, one in leaves], allow_unused=True)
        for (total, _), part in zip(leaves, parts, strict=True):
            if part is not None:
                total += part


class Summary:
    """Statistics of all families while blocks are being added.

    Rows of families without a summary are kept with their beliefs, unless ``sampled`` says of a node how many entries
    of tables are: then some of its rows, evenly spread, stand for all. The gradients of all that do not show the family
    are added to ``slopes``. ``complete`` are the :func:`complete_sums` of the same rows and
    weights, where these are known.
    """

    def __init__(
        self,
        naturals: Naturals,
        layout: Layout,
        weight: Tensor,
        tempering: Tempering,
        *,
        slopes: Slopes,
        sampled: Mapping[str, int],
        complete: Mapping[int, Tensor] | None,
    ) -> None:
        self.layout, self.weight, self.tempering = layout, weight, tempering
        self.slopes, self.sampled = slopes, sampled
        self.complete = complete_sums(layout, weight) if complete is None else complete
        plain = {node: {name: one.detach() for name, one in params.items()} for node, params in naturals.items()}
        leaves = {node: {**params, **slopes.leaves.get(node, {})} for node, params in plain.items()}
        self.factors = Factors(layout, leaves, tempering, attached=True)
        self.replicas = max(self.factors.replicas, len(weight))
        self.pieces = torch.zeros(self.replicas).to(weight)
        self.counts: dict[int, Tensor] = {}
        self.rows: dict[int, list[WeighedRows]] = {}
        self.samples: dict[int, list[WeighedRows]] = {}
        self.lines: dict[int, list[LinePosterior]] = {}
        self.integrated: Tensor | None = None

    def families(self) -> dict[str, tuple[Statistics, ...]]:
        """Add all blocks, and return the statistics of each node's family."""
        for block in self.layout.blocks:
            self._add(block)
        return {family.node: self._statistics(family) for family in self.layout.families}

    def _statistics(self, family: FamilyView) -> tuple[Statistics, ...]:
        """A summary of the rows that have one, and the rest of the rows."""
        place, parts = family.place, self.layout.complete[family.place]
        statistics: list[Statistics] = []
        if family.is_table or family.is_linear:
            seen, expected = self.complete[place], self._expected(family)
            # what is known of a family holds at these parameters; one of which a sample is kept is tried at others
            known = None if self.sampled.get(family.node) else self.factors.evaluated(place)
            sums = (family, seen, torch.zeros_like(seen) if expected is None else expected, known)
            if family.is_table:
                return (Counts(*sums),)
            statistics.append(Moments(*sums, shift=self.layout.table.shifts[place]))
        plain = tuple(
            WeighedRows(part.values, self.weight[:, part.rows], part.mask)
            for part in parts
            if not (family.is_linear and part.mask is None)
        )
        rows = tuple(self.rows.get(place, ()))
        if plain or rows or place in self.samples:
            most = self.sampled.get(family.node)
            sample = None
            if most:
                shown = (_sample(part, part.weight.shape[1] // most) for part in plain)
                sample = (*self.samples.get(place, ()), *shown)
            many = max(self.layout.entries_on_points[place], *(part.weight.shape[1] for part in plain), 0)
            statistics.append(Rows(family, plain, rows, sample, most is not None and many > most))
        if place in self.lines:
            statistics.append(Lines(family, tuple(self.lines[place])))
        return tuple(statistics)

    def _expected(self, family: FamilyView) -> Tensor | None:
        """Counts or moments of rows that do not show the family."""
        if family.is_table or self.integrated is None:
            return self.counts.get(family.place)
        first, used = self.layout.table.offsets[family.place], len(family.columns) + 1
        return self.integrated[:, first : first + family.configurations, :used, :used]

    def _add(self, block: Block) -> None:
        evaluated = self.factors.evaluate(block)
        weight = piece_weights(block, self.weight)
        self.pieces += weighed(weight, evaluated.log_z)
        beliefs = evaluated.beliefs(weight)
        self._add_tables(block, beliefs)
        self._add_rows(evaluated, beliefs)
        self._add_linear(block, evaluated, beliefs)

    def _add_tables(self, block: Block, beliefs: Banks) -> None:
        for source in block.tables:
            family = self.layout.families[source.place]
            share = self.tempering.share(family, seen=source.place not in source.members)
            table = share * joint_belief(family, source, beliefs).flatten(1)
            self.counts[source.place] = self.counts.get(source.place, torch.zeros_like(table)) + table

    def _add_rows(self, evaluated: Evaluated, beliefs: Banks) -> None:
        for rows, log_prob in zip(evaluated.prepared.rows, evaluated.log_probs, strict=True):
            family, belief = rows.family, self._shared(rows, rows.beliefs(beliefs))
            weighed_rows = WeighedRows(rows.values, belief, rows.mask)
            if rows.have_moments:
                first = self.layout.table.offsets[family.place]
                config = torch.arange(first, first + family.configurations)
                moments = column_moments(family, weighed_rows, self.layout.table.shifts[family.place])
                self._add_integrals(config, moments)
                continue
            with torch.enable_grad():  # of a sum that may be no number, but has the belief as its gradient
                self.slopes.add((family.node,), (log_prob * belief).sum())
            if family.node not in self.sampled:
                self.rows.setdefault(family.place, []).append(weighed_rows)
            elif self.sampled[family.node]:
                step = self.layout.entries_on_points[family.place] // self.sampled[family.node]
                self.samples.setdefault(family.place, []).append(_sample(weighed_rows, step))

    def _shared(self, rows: FamilyRows, belief: Tensor) -> Tensor:
        """Beliefs (R, entries) times the power that the densities have."""
        if self.tempering == Tempering():
            return belief
        seen, unseen = (self.tempering.share(rows.family, seen=seen) for seen in (True, False))
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
        for group, integrals in zip(block.linear, evaluated.integrals, strict=True):
            belief = beliefs_of(beliefs, group)
            if group.lines:
                slopes = group.line_slopes({one.place: self.factors.slopes(one.place) for one in group.lines})
                for one in group.lines:
                    own = LinePosterior.of(integrals, one, slopes, belief)
                    self.lines.setdefault(one.place, []).append(own)
            config, moments = integrals.moments(belief, equations.shift)
            if self.tempering.power != 1.0:
                share = (1 + (self.tempering.power - 1) * group.seen.to(moments))[group.instance]
                moments = moments * share[None, :, None, :, None, None]
            self._add_integrals(config.flatten(), moments.flatten(1, 3))


def joint_belief(family: FamilyView, source: Source, banks: Banks) -> Tensor:
    """Beliefs of all tables of a family of categories as one over all its members (R, *parents, states)."""
    order = [*(n for n in family.members if n not in source.members), *source.members]
    sizes = dict(zip(family.members, family.widths, strict=True))
    belief = beliefs_of(banks, source)
    table = belief.reshape(len(belief), *(sizes[n] for n in order))
    return table.permute(0, *(1 + order.index(n) for n in family.members))


def _sample(rows: WeighedRows, step: int) -> WeighedRows:
    """One of so many entries, drawn at random but always the same ones, with larger weights."""
    if step <= 1:
        return rows
    size = rows.weight.shape[1]
    some = rows.at(torch.from_numpy(np.random.default_rng(0).permutation(size)[: -(-size // step)]))
    total, kept = rows.weight.sum(-1, keepdim=True), some.weight.sum(-1, keepdim=True)
    scale = total / kept.clamp(min=torch.finfo(kept.dtype).tiny)
    return replace(some, weight=scale * some.weight)


def complete_sums(layout: Layout, weight: Tensor) -> dict[int, Tensor]:
    """What rows that show all of a family add up to, for each family that has a summary: counts or moments.

    They depend on the rows and their weights (1 or R, N) alone, whatever the parameters.
    """
    sums = {}
    for family in layout.families:
        place, parts = family.place, layout.complete[family.place]
        if family.is_table:
            sums[place] = _state_counts(parts, weight, family)
        elif family.is_linear:
            width = len(family.columns) + 1
            total = weight.new_zeros(len(weight), family.configurations, width, width)
            rows = [WeighedRows(part.values, weight[:, part.rows]) for part in parts if part.mask is None]
            sums[place] = sum((column_moments(family, one, layout.table.shifts[place]) for one in rows), total)
    return sums


def _state_counts(parts: Sequence[Complete], weight: Tensor, family: FamilyView) -> Tensor:
    """Weighed counts of joint states (1 or R, states)."""
    size = math.prod(family.widths)
    counts = weight.new_zeros(len(weight), size)
    for part in parts:
        if part.code is not None:
            for replica in range(len(weight)):
                counts[replica] += torch.bincount(part.code, weight[replica, part.rows], minlength=size)
    return counts


def column_moments(family: FamilyView, rows: WeighedRows, shift: Tensor) -> Tensor:
    """Weighed second moments of a linear normal family's columns less their shift (W,), (R, configurations, W, W)."""
    config, beside = (read(family.mechanism.family, rows.values) for read in (configurations, numeric))
    value = rows.values[family.node]
    columns = side_by_side([value, *([] if beside is None else [beside]), torch.ones_like(value[..., :1])]) - shift
    by_column = columns.mT.contiguous()  # products of long rows take a fourth of the time of those of narrow columns
    weighted = by_column * rows.weight.unsqueeze(1)
    width = columns.shape[-1]
    if config is None:
        return (weighted @ columns).unsqueeze(1)
    if config.shape[-1] < width:
        by_config = config.mT.unsqueeze(2) * weighted.unsqueeze(1)
        return (by_config.flatten(1, 2) @ columns).unflatten(1, (-1, width))
    products = weighted.unsqueeze(2) * by_column.unsqueeze(1)
    return sums_by_row(config, products.flatten(1, 2).mT).unflatten(-1, (width, width))


# -- the evidence ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Expectations:
    """What rows say of a model under the backward map.

    Attributes:
        pieces: Weighed sum of the log-sums of all pieces (R,).
        families: The statistics of each node's family.
        slopes: Of the nodes that were sampled, the gradient of the expected log-density of all rows that do not show
            their family, in each natural parameter (R, ...).
    """

    pieces: Tensor
    families: Mapping[str, tuple[Statistics, ...]]
    slopes: Mapping[str, Mapping[str, Tensor]]


def log_evidence(naturals: Naturals, layout: Layout, tempering: Tempering = LIKELIHOOD) -> Tensor:
    """Log-density of what each row shows (R, N), without gradients.

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> from otpdag.likelihood.elimination.layout import lay_out
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
        for rows, log_prob in factors.complete_log_probs():
            total[:, rows] += tempering.power * log_prob
        for block in layout.blocks:
            total.index_add_(1, block.piece_row, factors.evaluate(block).log_z[:, block.piece])
        return total


def expectations(
    naturals: Naturals,
    layout: Layout,
    weight: Tensor | None = None,
    tempering: Tempering = LIKELIHOOD,
    *,
    sampled: Mapping[str, int] | None = None,
    complete: Mapping[int, Tensor] | None = None,
) -> Expectations:
    """Sum the pieces, and summarise the rows for each family.

    Args:
        naturals: Parameters (R, ...).
        layout: The rows.
        weight: Row weights (1 or R, N); by default those of the batch.
        tempering: How likelihood and prior are weighed against each other.
        sampled: Nodes of which a sample of so many entries stands for the tables of all rows; the gradient of those
            that do not show the family is still that of all.
        complete: The :func:`complete_sums` of the rows and weights, where they are known.
    """
    weight = layout.batch.weight if weight is None else weight
    sampled = {} if sampled is None else sampled
    with torch.no_grad():
        replicas = _replicas(naturals, weight)  # once: a search through the parameters of all nodes
        slopes = Slopes({node: _leaves(naturals[node], replicas) for node in sampled})
        summary = Summary(naturals, layout, weight, tempering, slopes=slopes, sampled=sampled, complete=complete)
        return Expectations(summary.pieces, summary.families(), slopes.total)


def _replicas(naturals: Naturals, weight: Tensor) -> int:
    return max(max((len(v) for params in naturals.values() for v in params.values()), default=1), len(weight))


def _leaves(params: Mapping[str, Tensor], replicas: int) -> dict[str, Tensor]:
    """Parameters as leaves of a gradient, in which every replica has its own."""
    return {n: v.detach().expand(replicas, *v.shape[1:]).clone().requires_grad_() for n, v in params.items()}


def total_evidence(
    naturals: Naturals,
    layout: Layout,
    weight: Tensor | None = None,
    tempering: Tempering = LIKELIHOOD,
    complete: Mapping[int, Tensor] | None = None,
) -> Tensor:
    """Weighed sum of the rows' evidence (R,), with an exact gradient in the parameters (of first order only).

    Args:
        naturals: Parameters (R, ...).
        layout: The rows.
        weight: Row weights (1 or R, N); by default those of the batch.
        tempering: How likelihood and prior are weighed against each other.
        complete: The :func:`complete_sums` of the rows and weights, where they are known.
    """
    weight = layout.batch.weight if weight is None else weight
    replicas, enabled = _replicas(naturals, weight), torch.is_grad_enabled()
    wanted = {
        node: {name: value for name, value in params.items() if value.requires_grad and enabled}
        for node, params in naturals.items()
    }
    slopes = Slopes({node: _leaves(params, replicas) for node, params in wanted.items() if params})
    with torch.no_grad():
        none = dict.fromkeys(naturals, 0)
        summary = Summary(naturals, layout, weight, tempering, slopes=slopes, sampled=none, complete=complete)
        families = summary.families()
    value, params = summary.pieces, summary.factors.naturals
    with torch.set_grad_enabled(bool(slopes.leaves)):
        together = []
        for node, one in ((node, one) for node, statistics in families.items() for one in statistics):
            for shown, expected in one.parts(params[node]):
                value += tempering.power * shown.detach()
                total = (tempering.power * shown + expected).sum()
                if isinstance(one, Rows):
                    slopes.add((node,), total)  # at once, or all rows would be held
                else:
                    together.append(total)
        slopes.add(slopes.leaves, sum(together, torch.zeros(())))
    inputs = [value.expand(replicas, *value.shape[1:]) for own in wanted.values() for value in own.values()]
    return KnownGradient.apply(value, [one for own in slopes.total.values() for one in own.values()], *inputs)


def family_beliefs(
    naturals: Naturals, layout: Layout, weight: Tensor, tempering: Tempering, places: Sequence[int]
) -> dict[int, Tensor]:
    """Weighed posterior probabilities of the joint states of families of categories: (R, *parents, states) each."""
    factors = Factors(layout, naturals, tempering)
    shape = (max(factors.replicas, len(weight)),)
    total = {n: weight.new_zeros(*shape, *layout.families[n].widths) for n in places}
    for block in layout.blocks:
        sources = [source for source in block.tables if source.place in total]
        beliefs = factors.evaluate(block).beliefs(piece_weights(block, weight)) if sources else {}
        for source in sources:
            total[source.place] += joint_belief(layout.families[source.place], source, beliefs)
    return total


def moved(naturals: Naturals, layout: Layout, tempering: Tempering = LIKELIHOOD) -> Layout:
    """The same layout with the points of numbers and counts where their posteriors at these parameters are.

    The points then serve as many replicas as the parameters have.
    """
    if not layout.has_points:
        return layout
    with torch.no_grad():
        factors = Factors(layout, naturals, tempering)
        blocks: list[Block] = []
        for block in layout.blocks:
            placed = _moved_block(factors, block)
            blocks += _resized(factors, placed) if placed.parts else [placed]
        return replace(layout, blocks=tuple(blocks))


def on_other_points(
    naturals: Naturals, layout: Layout, share: float, tempering: Tempering = LIKELIHOOD, *, keep: Collection[str] = ()
) -> Layout:
    """The same rows on a share of the points: what then moves has narrow ridges, or steps, between its points."""
    grid, counts = (round(share * one) for one in (layout.planner.options.grid, layout.planner.options.count_points))
    options = replace(layout.planner.options, grid=grid, count_points=counts, fine_table=None)
    return moved(naturals, lay_out_within(layout.structure, layout.batch, options, keep=keep), tempering)


def _resized(factors: Factors, coarse: Block) -> list[Block]:
    """Give every piece as many points as it needs: those of its posterior, and more where more would tell more."""
    layout = factors.layout
    blocks = layout.resized(coarse)
    finer = _log_z(factors, layout.resized(coarse, by=FINER), coarse)
    unsure = ((finer - _log_z(factors, blocks, coarse)).abs().amax(0) > CLOSE_ENOUGH).cpu().numpy()
    if unsure.any():
        blocks = layout.resized(coarse, unsure=unsure)
    return [_moved_block(factors, block) for block in blocks]


def _log_z(factors: Factors, blocks: Sequence[Block], coarse: Block) -> Tensor:
    """Log-sums of the pieces of a coarse block, each of one row and now in one of several blocks."""
    log_z = torch.zeros(factors.replicas, coarse.distinct).to(factors.layout.batch.weight)
    for block in blocks:
        assert block.origin is not None
        log_z[:, block.origin] = factors.evaluate(block).log_z
    return log_z


def _placed_lines(factors: Factors, block: Block) -> dict[PointsKey, Placed]:
    """All placements of a block, lines about their means where all else on points is in its middle."""
    placements = dict(block.placements)
    found: dict[PointsKey, tuple[Tensor, Tensor]] = {}
    for group, integrals in zip(block.linear, factors.evaluate(block).integrals, strict=True):
        before, grid = integrals.before, integrals.grid
        if before is None or grid is None:
            continue
        slopes = group.line_slopes({one.place: factors.slopes(one.place) for one in group.lines})
        others = len(group.placed) - 1
        aside = grid[:, :, None, :, :others].mean(-2).unsqueeze(-1)
        mean = before.mean - (before.gain[:, group.instance] @ aside).squeeze(-1)
        middle = (slopes[:, group.instance] @ mean.unsqueeze(-1)).squeeze(-1)  # (R, n, T, L)
        centre = middle.mean(2)
        apart = middle - centre.unsqueeze(2)
        spread = line_covariance(slopes, before.covariance).mean(2)[:, group.instance]
        spread = spread + (apart.unsqueeze(-1) * apart.unsqueeze(-2)).mean(2)
        pieces = torch.arange(group.count).split([len(at) for _, at in group.placed[-1]])
        for (key, at), some in zip(group.placed[-1], pieces, strict=True):
            shape = (factors.replicas, len(placements[key].rows), group.line_count)
            both = found.setdefault(key, (centre.new_zeros(shape), centre.new_zeros(*shape, shape[-1])))
            both[0][:, at], both[1][:, at] = centre[:, some], spread[:, some]
    for key, both in found.items():
        old = placements[key]
        placements[key] = placed_lines(old.node, old.rows, old.size, *both)
    return placements


def _moved_block(factors: Factors, block: Block) -> Block:
    """Place points until no window changes, those of lines first where these would be without their children."""
    widened: dict[PointsKey, Tensor] = {}
    if any(group.lines for group in block.linear):
        block = replace(block, placements=_placed_lines(factors, block))
    for _ in range(MOST_ROUNDS if block.placements else 0):
        evaluated = factors.evaluate(block)
        beliefs = evaluated.beliefs(torch.ones(1, block.distinct).to(evaluated.log_z))
        placements: dict[PointsKey, Placed] = {}
        settled = True
        for source in block.lengths:
            key = source.points_of(source.place)
            moved_one = block.placements[key].moved(beliefs_of(beliefs, source), widened.get(key))
            placements[key], widened[key], enough = moved_one
            settled = settled and enough
        block = replace(block, placements=placements)
        if settled:
            break
    return block
