r"""Fits that survive outliers: which rows lie apart, whether the model has room for them, and how much of each counts.

A compact group of outliers and a small component of the model look alike to a likelihood. What tells them apart is the
price that the other rows pay for it: a component explains its group at no cost to them, while a model that spends a
component on outliers has one less for the rest. So the model is fitted with and without the group, and the group counts
as the model's own if the other rows' loss, given that they are not of the group, hardly differs:

.. math:: \sum_{i \notin G} \{\ell_{\text{with}}(x_i) + \log P(\text{not } G)\}
          - \sum_{i \notin G} \ell_{\text{without}}(x_i) \le \text{number of parameters}.

This is partial transport, in which the model need not explain every row. The data's mass in a region of low model
density may not exceed a little more than the model's own mass there; what exceeds it is left untransported. Regions are
cut by the row's loss :math:`-\log p_\theta(x)`, whose distribution under the model is known from samples, so this works
for rows of any types and dimension:

.. math:: w_i = \min\{1, s \, P_\theta(\ell \in B_k) / P_w(\ell \in B_k)\}, \qquad \ell(x_i) \in B_k.

On clean data the weights stay near one. Fits and weights alternate; starts come from trimmed rows, because a start at
the maximum-likelihood estimate of contaminated data is already spoilt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

from otpdag.clustering import k_means, squared_distances
from otpdag.data import Batch
from otpdag.engine.data_kind import DataKind, Layout, TableData
from otpdag.engine.method import Method
from otpdag.engine.monitor import Monitor
from otpdag.engine.search import Searcher, SearchResult, SearchSchedule, search
from otpdag.errors import ModelError, check_number
from otpdag.matching.transport_cost import Columns
from otpdag.problem import LossTerms, Problem, Refinement, Units, WrappedProblem, units_of
from otpdag.structure import Structure

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Rows = NDArray[np.int64]

RowLosses = Callable[[Batch], tuple[Array, int]]
"""Fits the model to a batch; the loss of each row, and the number of parameters."""

MOST_SAMPLED = 1500  # rows among which neighbours and centres are looked for: more change little and take long


@dataclass(frozen=True)
class ApartOptions:
    """What counts as apart; lengths are in robust standard deviations of a column.

    Args:
        furthest: Distance from the median beyond which a value is apart in any case.
        gap: Length of an empty stretch beyond which values are apart,
        middle: which begins at least this far from the median
        most: and has no more than this share of the rows behind it.
        smallest_group: Share of rows from which on rows that are apart in the same columns are a group to be tested.
        rows: Most rows in a test.
    """

    furthest: float = 6.0
    gap: float = 0.5
    middle: float = 1.0
    most: float = 0.25
    smallest_group: float = 0.02
    rows: int = 2000


@dataclass(frozen=True)
class RobustOptions:
    """How much a fit may leave out: ``otp.fit(..., robust=otp.RobustOptions(most_dropped=0.4))``.

    Args:
        most_dropped: Largest share of rows that may be left out; beyond it the most likely rows are kept.
        slack: How far the data's mass in a region may exceed the model's.
        chance: The same in standard errors, which count where rows are few.
        apart: What counts as apart from the rest; rows apart take no part in the search for a start.
        tails: Upper tail probabilities of the loss under the model that cut the regions.
        cap: Tail probability whose loss caps a row's loss when starts are compared.
        rounds: How often fit and weights alternate at most.
        round_steps: Steps of the fit in each of these rounds.
        same_weights: Mean change of a row's weight below which they stop.
        concentration: Rounds of the short runs on the most likely rows alone, and as many with capped weights.
        sample: Model rows that the loss's distribution is taken from.
    """

    most_dropped: float = 0.25
    slack: float = 1.25
    chance: float = 2.0
    apart: ApartOptions = field(default_factory=ApartOptions)
    tails: tuple[float, ...] = (0.1, 0.05, 0.02, 0.01, 0.004, 0.001)
    cap: float = 0.004
    rounds: int = 8
    round_steps: int = 15
    same_weights: float = 5e-4
    concentration: int = 3
    sample: int = 4000

    def __post_init__(self) -> None:
        """Refuse shares that are none, and limits below what they limit."""
        for name in ("most_dropped", "slack", "chance", "cap", "same_weights"):
            check_number(name, getattr(self, name))
        if not 0 < self.most_dropped < 1:
            raise ModelError(f"most_dropped must be a share between 0 and 1; got {self.most_dropped!r}")
        if not self.slack >= 1:
            raise ModelError(f"slack must be at least 1, the model's own mass; got {self.slack!r}")
        falling = all(0 < later < earlier < 1 for earlier, later in zip(self.tails, self.tails[1:], strict=False))
        if not self.tails or not falling or not 0 < self.tails[0] < 1:
            raise ModelError(f"tails must be probabilities that fall; got {self.tails!r}")
        if not 0 < self.cap < 1:
            raise ModelError(f"cap must be a probability between 0 and 1; got {self.cap!r}")


# -- rows that lie apart -----------------------------------------------------------------------------------------------


def apart_sides(columns: Array, options: ApartOptions) -> Flags:
    """Whether each row lies apart, above and below in each column: (N, 2 * columns)."""
    sides = [side for column in columns.T for side in (column, -column)]
    return np.stack([(side > options.furthest) | _beyond_gap(side, options) for side in sides], 1)


def _beyond_gap(column: Array, options: ApartOptions) -> Flags:
    """Which values lie above an empty stretch outside the middle of a column: emptier than what lies above it is full.

    >>> _beyond_gap(np.array([*np.linspace(-2, 2, 96), 5.0, 5.1, 5.2, 5.3]), ApartOptions()).sum()
    np.int64(4)
    """
    ordered = np.sort(column)
    ends = np.searchsorted(ordered, ordered + options.gap, side="right")
    inside, above = ends - np.arange(1, len(ordered) + 1), len(ordered) - ends
    empty = (ordered >= options.middle) & (above > 0) & (inside <= 0.01 * above)
    empty &= above <= options.most * len(ordered)
    return column > ordered[empty.argmax()] if empty.any() else np.zeros(len(column), dtype=bool)


def apart_groups(apart: Flags, options: ApartOptions) -> list[Rows]:
    """Rows that are apart in the same columns, where they are many; the largest group first."""
    rows = np.flatnonzero(apart.any(1))
    if not len(rows):
        return []
    _, group, size = np.unique(apart[rows], axis=0, return_inverse=True, return_counts=True)
    large = [g for g in np.argsort(-size) if size[g] >= max(options.smallest_group * len(apart), 2)]
    return [rows[group.ravel() == g] for g in large]


def central_rows(columns: Array) -> Rows:
    """Three quarters of the rows, those whose furthest column is nearest to the middle."""
    norm = np.abs(columns).max(1)
    return np.argsort(norm)[: max(2, int(0.75 * len(norm)))]


def dense_rows(columns: Array, generator: np.random.Generator) -> Rows:
    """Rows whose tenth neighbour among a sample is near."""
    jittered = columns + 1e-6 * generator.standard_normal(columns.shape)
    sample = jittered[generator.choice(len(columns), min(len(columns), MOST_SAMPLED), replace=False)]
    neighbour = min(10, len(sample))
    distance = np.asarray(cKDTree(sample).query(jittered, k=[neighbour])[0])
    return np.argsort(distance[:, 0])[: max(2, int(0.8 * len(columns)))]


def joined_rows(columns: Array, generator: np.random.Generator, groups: int = 8) -> Rows:
    """Rows without the most isolated of a few groups, up to a quarter of all."""
    sample = columns[generator.choice(len(columns), min(len(columns), MOST_SAMPLED), replace=False)]
    centres, _ = k_means(sample, min(groups, len(sample)), generator)
    squared = squared_distances(columns, centres)
    group, distance = squared.argmin(1), np.sqrt(np.maximum(squared.min(1), 0.0))
    apart = np.sort(np.linalg.norm(centres[:, None] - centres[None], axis=-1), axis=1)[:, 1]
    radius = np.array([np.median(distance[group == g]) if (group == g).any() else 1.0 for g in range(len(centres))])
    kept = np.ones(len(columns), dtype=bool)
    for g in np.argsort(-apart / np.maximum(radius, 1e-9)):
        if (group[kept] == g).sum() + (~kept).sum() <= 0.25 * len(columns):
            kept[group == g] = False
            break
    return np.flatnonzero(kept)


def near_rows(
    structure: Structure, batch: Batch, options: ApartOptions, losses: RowLosses, generator: np.random.Generator
) -> Tensor:
    """Numbers of the rows that are not apart, or in a group that the model has room for; all, if too few would be."""
    apart = apart_sides(standard_columns(structure, batch), options)
    near: Flags = np.logical_not(apart.any(axis=1))
    for group in apart_groups(apart, options):
        if _has_room(batch, np.flatnonzero(near), group, options, losses, generator):
            near[group] = True
    if 1 - near.mean() > options.most:
        return torch.arange(batch.rows)
    return torch.as_tensor(np.flatnonzero(near))


def standard_columns(structure: Structure, batch: Batch) -> Array:
    """Columns in robust units, counts by their roots, missing cells in the middle."""
    spaces = {node: structure.mechanisms[node].space for node in batch.values}
    counts = {n: v.sqrt() for n, v in batch.values.items() if spaces[n].is_countable and not spaces[n].is_discrete}
    batch = replace(batch, values={**batch.values, **counts})
    columns = Columns.of(structure, batch)
    for node in (n for n in spaces if spaces[n].is_discrete):
        columns.spread[columns.places[node]] = 1.0
    masks = [batch.mask[node][0].expand(-1, place.stop - place.start) for node, place in columns.places.items()]
    return torch.where(torch.cat(masks, -1), columns.of_values(batch.values)[0], 0.0).double().numpy()


def _has_room(
    batch: Batch,
    near: NDArray[np.int64],
    group: NDArray[np.int64],
    options: ApartOptions,
    losses: RowLosses,
    generator: np.random.Generator,
) -> bool:
    """Whether the near rows are as well explained by a fit that has to explain the group, too."""
    kept = np.concatenate([near, group])
    if len(kept) > options.rows:
        kept = generator.choice(kept, options.rows, replace=False)
    kept = np.sort(kept)
    is_near = ~np.isin(kept, group)
    if is_near.all() or not is_near.any():
        return False
    together, _ = losses(batch.take(torch.as_tensor(kept)))
    alone, parameters = losses(batch.take(torch.as_tensor(kept[is_near])))
    price = (together[is_near] + np.log(is_near.mean())).sum() - alone.sum()
    return bool(price <= parameters)


GUESSES = 4
"""How many ways there are to guess the clean rows that a start is taken from."""


@dataclass(frozen=True)
class CappedProblem(WrappedProblem):
    """A problem that leaves out units: weights follow from the point, and are found anew whenever the problem is moved.

    Starts are compared by what leaving units out costs, on those that lie together.
    """

    base: Units
    judge: Units
    options: RobustOptions
    seed: int
    weights: Tensor | None = None
    weighted: Units | None = None
    trimmings: int = 0
    """How often only the likeliest units are kept, before weights are capped: a start must not follow outliers."""
    untrimmed: Tensor | None = None
    """Starts that are never trimmed (R,): those that look at all rows."""
    near: Tensor | None = None
    """Units that lie together; None if all do."""

    def metric(self, points: Tensor) -> Tensor | None:
        """Of the problem with its present weights."""
        return (self.weighted or self.base).metric(points)

    def loss(self, point: Tensor) -> LossTerms:
        """Terms with the present weights."""
        return (self.weighted or self.base).loss(point)

    def judged(self, points: Tensor) -> Tensor:
        """Mean loss (R,) with each unit's loss capped at the model's own tail: what leaving it out costs."""
        caps = [losses.quantile(1 - self.options.cap) for losses in self._model_losses(self.judge, points)]
        return torch.minimum(self.judge.unit_losses(points), torch.stack(caps).unsqueeze(-1)).mean(-1)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> CappedProblem:
        """Some of the units that lie together, hard trimming first, with rougher distributions of the loss."""
        near = self.base if self.near is None else self.base.subset(self.near)
        part = near.subset(rows)
        options = replace(self.options, sample=self.options.sample // 3)
        return replace(self, base=part, judge=part, options=options, trimmings=options.concentration, near=None)

    def laid_out_for(self, points: Tensor) -> Self:
        """Points of unknown numbers where they are needed, and weights at these points, unless they are known."""
        base = self.base.laid_out_for(points)
        if self.weights is None or len(self.weights) != len(points):
            return replace(self, base=base)._with_weights(points)
        return self if base is self.base else replace(self, base=base, weighted=base.reweighted(self.weights))

    def refine(self, point: Tensor) -> Refinement | None:
        """Weights anew, until they hardly change."""
        after = replace(self, trimmings=max(0, self.trimmings - 1))._with_weights(point)
        was_trimmed = self.trimmings > 0
        if not was_trimmed and self.weights is not None and after.weights is not None:
            change = (after.weights - self.weights).abs().mean(-1)
            if bool((change < self.options.same_weights).all()):
                return None
        return Refinement(after, point, "leave out outliers")

    def _with_weights(self, points: Tensor) -> Self:
        if self.trimmings:
            weights = self._trimmed(points)
        else:
            pairs = zip(self.base.unit_losses(points), self._model_losses(self.base, points), strict=True)
            weights = torch.stack([tail_weights(losses, model, self.options) for losses, model in pairs])
        return replace(self, weights=weights, weighted=self.base.reweighted(weights))

    def _model_losses(self, units: Units, points: Tensor) -> list[Tensor]:
        """For each point the losses (sample,) of units that the model itself makes, with the data's missing cells."""
        samples = [(units.simulated(point, self.options.sample, self.seed), point) for point in points.split(1)]
        return [sample.unit_losses(point)[0] for sample, point in samples]

    def _trimmed(self, points: Tensor) -> Tensor:
        """One for the likeliest units at present; the others are left out."""
        losses = self.base.unit_losses(points)
        likely = losses <= losses.quantile(1 - self.options.most_dropped, dim=-1, keepdim=True)
        if self.untrimmed is not None and len(self.untrimmed) == len(points):
            likely = likely | self.untrimmed.to(likely.device).unsqueeze(-1)
        return likely.to(losses)


def robust_search(
    kind: DataKind,
    layout: Layout,
    problem: Problem,
    method: Method,
    searcher: Searcher,
    course: SearchSchedule,
    restarts: int,
    options: RobustOptions,
) -> tuple[SearchResult, Tensor]:
    """Search with outliers left out; also the final weight of each unit (N,)."""
    seed, units, near = searcher.seed, units_of(problem), None
    if isinstance(kind, TableData):
        units = units.in_units()
        near = _near_rows(kind, layout, method, restarts, options, searcher)
        points = _trimmed_starts(kind, layout, units, near, seed, restarts)
    else:
        points = kind.starts(layout, problem, seed, range(restarts))
    untrimmed = torch.arange(restarts) % GUESSES == 0
    judge = units if near is None else units.subset(near)
    capped = CappedProblem(units, judge, options, seed, untrimmed=untrimmed, near=near)
    short = min(course.short_rows, judge.rows)
    staged = replace(
        course,
        short_rows=short,
        short_elements=max(course.short_elements, short * restarts * units.pace.points_per_row),
        short_steps=max(1, course.short_steps // 2),
        short_moves=2 * options.concentration - 1,
        halving=False,
        finalist_gap=None,  # losses without rows that are left out are no log-likelihoods of all
        finalist_steps=options.round_steps,
        finalist_moves=options.rounds - 1,
        finalist_rows=None,
        part_rows=None,
        moves=0,
    )
    ended = search(capped, points, staged, replace(searcher, judge=_judged))
    final = ended.problem
    assert isinstance(final, CappedProblem), "what was searched"
    assert final.weighted is not None, "laid out before the last run"
    assert final.weights is not None, "laid out before the last run"
    return replace(ended, problem=final.weighted), final.weights[0]


def _judged(problem: Problem, points: Tensor, losses: Tensor) -> Tensor:
    assert isinstance(problem, CappedProblem), "what is searched, or a part of it"
    return problem.judged(points)


def _near_rows(
    kind: TableData, layout: Layout, method: Method, restarts: int, options: RobustOptions, searcher: Searcher
) -> Tensor:
    """Rows among which starts are looked for and judged."""

    def losses(batch: Batch) -> tuple[Array, int]:
        part = replace(kind, read=batch)
        scaled = part.lay_out(method, searcher.seed)
        problem = part.problem(scaled, method, searcher.seed)
        points = part.starts(scaled, problem, searcher.seed, range(restarts))
        with Monitor(show=False, stopping=searcher.monitor.stopping) as quiet:
            ended = search(problem, points, SearchSchedule(), Searcher(searcher.optimiser, searcher.seed, quiet))
        return units_of(ended.problem).unit_losses(ended.point)[0].cpu().numpy(), ended.point.shape[-1]

    limits = replace(options.apart, most=options.most_dropped)
    return near_rows(layout.structure, kind.batch, limits, losses, np.random.default_rng([searcher.seed, 11]))


# -- starts -----------------------------------------------------------------------------------------------------------


def _trimmed_starts(
    kind: TableData, layout: Layout, problem: Problem, near: Tensor, seed: int, restarts: int
) -> Tensor:
    """Starts from different guesses of the clean rows: all, without isolated groups, dense, central; parts of those.

    All rows, because a small component that belongs to the model looks like a group of outliers until it is fitted.
    """
    batch = kind.batch.take(near)
    columns = standard_columns(layout.structure, batch)
    generator = np.random.default_rng([seed, 7])
    everyone, joined = np.arange(batch.rows), joined_rows(columns, generator)
    guesses = (everyone, joined, dense_rows(columns, generator), central_rows(columns))
    points = []
    for number in range(restarts):
        rows = guesses[number % GUESSES]
        if number >= GUESSES:
            rows = generator.choice(rows, size=max(len(rows) // 2, 2), replace=False)
        points.append(kind.starts(layout, problem, seed, [number], near[torch.as_tensor(np.sort(rows))]))
    return torch.cat(points)


# -- weights ----------------------------------------------------------------------------------------------------------


def tail_weights(losses: Tensor, model: Tensor, options: RobustOptions) -> Tensor:
    """Weights (N,) of rows by their losses, which keep the mass in each tail of the model's losses near the model's.

    Args:
        losses: Of the rows (N,).
        model: Of rows that the model makes (sample,).
        options: Tails, how far the data's mass in one may exceed the model's, and how much may be left out at most.

    >>> normal = torch.linspace(0, 1, 1001)
    >>> tail_weights(torch.tensor([0.1, 0.5, 9.0]), normal, RobustOptions(most_dropped=0.5, tails=(0.1, 0.01)))
    tensor([1., 1., 0.])
    """
    tails, most = options.tails, options.most_dropped
    edges = torch.stack([model.quantile(1 - tail) for tail in tails])
    beyond = edges[-1] + 0.5 * (edges[-1] - edges[0])
    region = torch.bucketize(losses, edges)
    weights, lowest = torch.ones_like(losses), 1.0
    for k, (tail, further) in enumerate(pairwise((*tails, 0.0)), start=1):
        inside, mass = region == k, tail - further
        share = float(inside.to(losses).mean())
        allowed = max(options.slack * mass, mass + options.chance * (mass * (1 - mass) / len(losses)) ** 0.5)
        lowest = min(lowest, allowed / share) if share > 0 else lowest
        weights[inside] = lowest
    weights[losses > beyond] = 0.0
    likeliest = (losses <= losses.quantile(1 - most)).to(losses)
    return weights if float(1 - weights.mean()) <= most else likeliest
