r"""Fits that survive outliers: starts that do not see them, and how much of each row counts.

A compact group of outliers and a small component of the model look alike to a likelihood: it rewards whoever explains
a tight group. A transport cost does not. So starts from several guesses of the clean rows are compared by partial
transport between rows and model: by the least share of the rows that must be left out until chance may explain the
cost of the others (:meth:`~otpdag.matching.transport_rows.TransportRows.left_out`).

From the best of them on, fits and weights alternate. The data's mass in a region of low model density may not exceed a
little more than the model's own mass there; what exceeds it is left untransported. Regions are cut by the row's loss
:math:`-\log p_\theta(x)`, whose distribution under the model is known from samples, so this works for rows of any
types and dimension, and for sequences (:func:`tail_weights`).

On clean data the weights stay near one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.clustering import k_means, squared_distances
from otpdag.data import Batch, random_part
from otpdag.divergences import SlicedWasserstein
from otpdag.engine.data_kind import DataKind, Layout, TableData
from otpdag.engine.method import likelihood
from otpdag.engine.monitor import Monitor
from otpdag.engine.optimiser import Deterministic
from otpdag.engine.search import Searcher, SearchResult, SearchSchedule, search
from otpdag.errors import ModelError, check_number, check_numbers, check_share
from otpdag.matching.transport_cost import Columns
from otpdag.matching.transport_rows import TransportRows, transport_rows
from otpdag.numerics import Array
from otpdag.problem import LossTerms, Problem, Refinement, Units, WrappedProblem, units_of
from otpdag.settings import Direct
from otpdag.structure import Structure

Rows = NDArray[np.int64]

JUDGED_ROWS, JUDGED_POINTS, JUDGED_DIRECTIONS = 2000, 1024, 24  # of the transport that starts are compared by
FINALISTS = 6  # starts on all rows: after short runs on trimmed rows, costs tell little differences not yet
MOST_SAMPLED = 1500  # rows among which neighbours and centres are looked for: more change little and take long


@dataclass(frozen=True)
class RobustOptions:
    """How much a fit may leave out: ``otp.fit(..., robust=otp.RobustOptions(most_dropped=0.4))``.

    Args:
        most_dropped: Largest share of rows that may be left out; beyond it the most likely rows are kept.
        slack: How far the data's mass in a region may exceed the model's.
        chance: The same in standard errors, which count where rows are few.
        tails: Upper tail probabilities of the loss under the model that cut the regions.
        cap: Tail probability whose loss caps a row's loss when starts are compared.
        rounds: How often fit and weights alternate at most.
        round_steps: Steps of the fit in each of these rounds.
        same_weights: Mean change of a row's weight below which they stop.
        concentration: Rounds of the short runs on what each start explains, and as many with capped weights.
        sample: Model rows that the loss's distribution is taken from.
    """

    most_dropped: float = 0.25
    slack: float = 1.25
    chance: float = 2.0
    tails: tuple[float, ...] = (0.1, 0.05, 0.02, 0.01, 0.004, 0.001)
    cap: float = 0.004
    rounds: int = 8
    round_steps: int = 15
    same_weights: float = 5e-4
    concentration: int = 3
    sample: int = 4000

    def __post_init__(self) -> None:
        """Refuse shares that are none, and limits below what they limit."""
        for name in ("most_dropped", "cap"):
            check_share(name, getattr(self, name))
        for name, least in (("slack", 1.0), ("chance", 0.0), ("same_weights", 0.0)):
            check_number(name, getattr(self, name), least)
        check_numbers("tails", self.tails)
        falling = all(0 < later < earlier < 1 for earlier, later in zip(self.tails, self.tails[1:], strict=False))
        if not self.tails or not falling or not 0 < self.tails[0] < 1:
            raise ModelError(f"tails must be probabilities that fall; got {self.tails!r}")


@dataclass(frozen=True)
class CappedProblem(WrappedProblem):
    """A problem that leaves out units: weights follow from the point, and are found anew whenever the problem is moved.

    Starts are compared by what leaving units out costs, on those that lie together.

    Attributes:
        judge: What starts are compared by; None for their losses, each cut at the model's own tail.
        trimmings: How often only rows that are explained count, or the likeliest units where nothing tells, before
            weights are capped: a start must not follow outliers.
        untrimmed: Starts that are never trimmed (R,): those that look at all rows.
        guessed: Units (R, N) that a start was made of, with which it begins.
        explained: Units (R, N) that take part at all.
    """

    base: Units
    judge: TransportJudge | None
    options: RobustOptions
    seed: int
    weights: Tensor | None = None
    weighted: Units | None = None
    trimmings: int = 0
    untrimmed: Tensor | None = None
    guessed: Tensor | None = None
    explained: Tensor | None = None

    def metric(self, points: Tensor) -> Tensor | None:
        """Of the problem with its present weights."""
        return (self.weighted or self.base).metric(points)

    def loss(self, point: Tensor) -> LossTerms:
        """Terms with the present weights."""
        return (self.weighted or self.base).loss(point)

    def judged(self, points: Tensor) -> Tensor:
        """How much worse each explains (R,) what others explain as well, and the share that it leaves out."""
        if self.judge is not None and self.weights is not None and len(points) > 1:
            losses, near = self.base.unit_losses(points), self.judge.nearest(points, self.options.sample)
            return self.judge.left_out(points) + beaten_by(losses, self.weights, near, points.shape[-1])
        caps = [losses.quantile(1 - self.options.cap) for losses in self._model_losses(self.base, points)]
        return torch.minimum(self.base.unit_losses(points), torch.stack(caps).unsqueeze(-1)).mean(-1)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> CappedProblem:
        """Some of the units, trimmed first, with rougher distributions of the loss."""
        options = replace(self.options, sample=self.options.sample // 3)
        own = replace(self, options=options, trimmings=options.concentration)
        part = None if self.judge is None else random_part(self.rows, rows, self.seed)
        if self.judge is None or part is None:
            return replace(own, base=self.base.subset(rows))
        guessed = None if self.guessed is None else self.guessed[:, part]
        return replace(own, base=self.base.subset(part), judge=self.judge.subset(part), guessed=guessed)

    def laid_out_for(self, points: Tensor) -> Self:
        """Points of unknown numbers where they are needed, and weights at these points, unless they are known."""
        base = self.base.laid_out_for(points)
        if self.weights is None or len(self.weights) != len(points):
            explained = self.guessed if self.trimmings else self._explained_at(points)
            return replace(self, base=base, explained=explained)._with_weights(points)
        return self if base is self.base else replace(self, base=base, weighted=base.reweighted(self.weights))

    def refine(self, point: Tensor) -> Refinement | None:
        """Weights anew, until they hardly change."""
        was_trimmed = self.trimmings > 0
        explained = self._explained_at(point) if was_trimmed else self.explained
        after = replace(self, trimmings=max(0, self.trimmings - 1), explained=explained)._with_weights(point)
        if not was_trimmed and self.weights is not None and after.weights is not None:
            change = (after.weights - self.weights).abs().mean(-1)
            if bool((change < self.options.same_weights).all()):
                return None
        return Refinement(after, point, "leave out outliers")

    def _explained_at(self, points: Tensor) -> Tensor | None:
        return None if self.judge is None else self.judge.explained(points)

    def _with_weights(self, points: Tensor) -> Self:
        losses = self.base.unit_losses(points)
        explained = torch.ones_like(losses, dtype=torch.bool) if self.explained is None else self.explained
        weights = explained.to(points)
        if self.trimmings and self.explained is None:
            weights = self._trimmed(losses)
        elif not self.trimmings:
            of_model = self._model_losses(self.base, points)
            for weight, kept, own, model in zip(weights, explained, losses, of_model, strict=True):
                # what takes no part at all counts as left out, too
                least = 1 - self.options.most_dropped
                most = max(1e-9, 1 - least / max(least, float(kept.double().mean())))
                weight[kept] = tail_weights(own[kept], model, replace(self.options, most_dropped=most))
        return replace(self, weights=weights, weighted=self.base.reweighted(weights))

    def _model_losses(self, units: Units, points: Tensor) -> list[Tensor]:
        """For each point the losses (sample,) of units that the model itself makes, with the data's missing cells."""
        samples = [(units.simulated(point, self.options.sample, self.seed), point) for point in points.split(1)]
        return [sample.unit_losses(point)[0] for sample, point in samples]

    def _trimmed(self, losses: Tensor) -> Tensor:
        """One for the likeliest units by their losses (R, N); the others are left out."""
        kept = likeliest(losses, self.options.most_dropped)
        if self.untrimmed is not None and len(self.untrimmed) == len(losses):
            kept[self.untrimmed.to(kept.device)] = 1.0
        return kept


def robust_search(
    kind: DataKind,
    layout: Layout,
    problem: Problem,
    searcher: Searcher,
    course: SearchSchedule,
    restarts: int,
    options: RobustOptions,
) -> tuple[SearchResult, Tensor]:
    """Search with outliers left out; also the final weight of each unit (N,)."""
    seed, units, judge = searcher.seed, units_of(problem), None
    guessed: Tensor | None = None
    if isinstance(kind, TableData):
        units = units.in_units()
        points, guessed = _starts(kind, layout, units, searcher, options, restarts)
        judge = TransportJudge.of(kind, layout, options, seed)
    else:
        points = kind.starts(layout, problem, seed, range(restarts))
    untrimmed = torch.arange(len(points)) == 0
    capped = CappedProblem(units, judge, options, seed, untrimmed=untrimmed, guessed=guessed)
    short = min(course.short_rows, units.rows)
    staged = replace(
        course,
        short_rows=short,
        short_elements=max(course.short_elements, short * len(points) * units.pace.points_per_row),
        short_steps=max(1, course.short_steps // 2),
        short_moves=2 * options.concentration - 1,
        halving=False,
        finalists=max(course.finalists, FINALISTS),
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
    if final.weights is None:  # time ran out before rows were weighed
        final = final._with_weights(ended.point)
    assert final.weighted is not None, "weighed"
    assert final.weights is not None, "weighed"
    return replace(ended, problem=final.weighted), final.weights[0]


def robust_start(kind: DataKind, layout: Layout, most: float, searcher: Searcher) -> Tensor:
    """Where a robust fit of maximum likelihood ends (P,): partial transport begins there."""
    method = likelihood()
    quiet = Searcher(method.optimiser, searcher.seed, Monitor(show=False, stopping=searcher.monitor.stopping))
    problem = kind.problem(layout, method, searcher.seed)
    course, options = kind.course(method), RobustOptions(most_dropped=most)
    ended, _ = robust_search(kind, layout, problem, quiet, course, kind.restarts(method), options)
    return ended.point[0]


@dataclass(frozen=True)
class TransportJudge:
    """Partial transport between a part of the rows and the model: what a likelihood does not tell of tight groups."""

    part: TransportRows
    whole: TransportRows

    @classmethod
    def of(cls, kind: TableData, layout: Layout, options: RobustOptions, seed: int) -> TransportJudge:
        """Of a table."""
        sliced = SlicedWasserstein(JUDGED_DIRECTIONS, p=1.0)
        direct = Direct(sliced, unmatched="auto", most_unmatched=options.most_dropped, points=JUDGED_POINTS)
        whole = transport_rows(layout.structure, kind.batch.widened(), layout.shapes, direct, seed)
        return cls(whole.subset(JUDGED_ROWS), whole)

    def subset(self, rows: Tensor) -> TransportJudge:
        """Of some of the rows."""
        whole = self.whole.subset(rows)
        return TransportJudge(whole, whole)

    def left_out(self, points: Tensor) -> Tensor:
        """The share of the rows (R,) that the model must leave out."""
        return _placed(self.part, points).left_out(points)[0]

    def nearest(self, points: Tensor, size: int) -> Tensor:
        """Of so many rows that the model itself makes, the rows of the data (R, size) that lie nearest to them."""
        from scipy.spatial import cKDTree  # slow to import

        whole = self.whole
        tree = cKDTree(_side_by_side(whole.columns, whole.batch))
        made = (whole.drawn(point, size, whole.seed) for point in points.split(1))
        return torch.stack([torch.as_tensor(tree.query(_side_by_side(whole.columns, one))[1]) for one in made])

    def explained(self, points: Tensor) -> Tensor:
        """Which rows (R, N) the model explains."""
        left_out = _placed(self.part, points).left_out(points)[1]
        return _placed(self.whole, points).explained(points, left_out)


def _side_by_side(columns: Columns, batch: Batch) -> Array:
    """Rows (N, d) in units of the columns, missing cells in the middle."""
    masks = [batch.mask[node][0].expand(-1, place.stop - place.start) for node, place in columns.places.items()]
    return torch.where(torch.cat(masks, -1), columns.of_values(batch.values)[0], 0.0).double().numpy()


def beaten_by(losses: Tensor, weights: Tensor, near: Tensor, parameters: int) -> Tensor:
    r"""By how many nats (R,) the best of the others explains the rows better that both keep, beyond what chance does.

    .. math:: D_{ab} = \sum_i 2 c_i \tanh(\tfrac12 \ell_i), \qquad
              \ell_i = \log \frac{p_a(x_i) / P_a(c)}{p_b(x_i) / P_b(c)}, \qquad c_i = \min(w_{ai}, w_{bi}),

    where P(c) is the model's own probability of rows that both keep: who keeps more has spread its probability over
    these, too. As 2 (r - 1) / (r + 1) is concave in the ratio r, its mean under b is at most zero: the true parameters
    lose no comparison by more than chance, a nat for each parameter and what the samples that tell P(c) leave open.
    Near models differ by their log-likelihoods; a component around a few equal rows gains two nats by each, not any.

    Args:
        losses: Of all rows (R, N), :math:`-\log p`.
        weights: How much of each counts (R, N).
        near: Of each model's own rows (R, S) the row of the data that lies nearest.
        parameters: Of the model.
    """
    worst, rows = losses.new_zeros(len(losses)), losses.shape[-1]
    own = torch.stack([torch.bincount(one, minlength=rows) for one in near]) / near.shape[-1]
    for loss, weight, mine in zip(losses, weights, own, strict=True):
        both = torch.minimum(weights, weight)
        mass, here, there = both.sum(-1), (both * mine).sum(-1), (both * own).sum(-1)
        here, there = here.clamp(1 / rows, 1), there.clamp(1 / rows, 1)
        ratio = losses - loss + (there / here).log().unsqueeze(-1)
        better = torch.where(both > 0, both * 2 * torch.tanh(ratio / 2), 0.0).sum(-1).nan_to_num(torch.inf)
        chance = parameters + 2 * mass * (((1 - here) / here + (1 - there) / there) / near.shape[-1]).sqrt()
        worst = torch.maximum(worst, better / rows + (better - chance).clamp(min=0))
    return worst


def _placed(problem: TransportRows, points: Tensor) -> TransportRows:
    return replace(problem, points=problem.points.placed_at(problem.naturals(points)))


def _judged(problem: Problem, points: Tensor, losses: Tensor) -> Tensor:
    assert isinstance(problem, CappedProblem), "what is searched, or a part of it"
    return problem.judged(points)


# -- starts -----------------------------------------------------------------------------------------------------------


def clean_guesses(columns: Array, generator: np.random.Generator, most: float, groups: int = 8) -> list[Rows]:
    """Guesses of the clean rows: all, central, dense and sparse ones, all but one of a few groups, isolated ones first.

    All rows, because a small component that belongs to the model looks like a group of outliers until it is fitted;
    sparse ones, because a tight group is denser than any component.
    """
    from scipy.spatial import cKDTree  # slow to import

    rows = np.arange(len(columns))
    sample = columns[generator.choice(rows, min(len(rows), MOST_SAMPLED), replace=False)]
    centres, _ = k_means(sample, min(groups, len(sample)), generator)
    squared = squared_distances(columns, centres)
    group, distance = squared.argmin(1), np.sqrt(np.maximum(squared.min(1), 0.0))
    apart = np.sort(np.linalg.norm(centres[:, None] - centres[None], axis=-1), axis=1)[:, 1]
    radius = np.array([np.median(distance[group == g]) if (group == g).any() else 1.0 for g in range(len(centres))])
    order = np.argsort(-apart / np.maximum(radius, 1e-9))
    others = [rows[group != g] for g in order if 0 < (group == g).mean() <= most]
    central = np.argsort(np.abs(columns).max(1))[: max(2, int((1 - most) * len(rows)))]
    jittered = columns + 1e-6 * generator.standard_normal(columns.shape)
    near = jittered[generator.choice(rows, min(len(rows), MOST_SAMPLED), replace=False)]
    tenth = np.asarray(cKDTree(near).query(jittered, k=[min(10, len(near))])[0])[:, 0]
    by_density = np.argsort(tenth)
    dense, sparse = by_density[: max(2, int(0.8 * len(rows)))], by_density[int(0.5 * most * len(rows)) :]
    return [rows, *others[:1], dense, central, sparse, *others[1:]]


def standard_columns(structure: Structure, batch: Batch) -> Array:
    """Columns in robust units, counts by their roots, missing cells in the middle."""
    spaces = {node: structure.mechanisms[node].space for node in batch.values}
    counts = {n: v.sqrt() for n, v in batch.values.items() if spaces[n].is_countable and not spaces[n].is_discrete}
    batch = replace(batch, values={**batch.values, **counts})
    columns = Columns.of(structure, batch)
    for node in (n for n in spaces if spaces[n].is_discrete):
        columns.spread[columns.places[node]] = 1.0
    return _side_by_side(columns, batch)


def _starts(
    kind: TableData,
    layout: Layout,
    problem: Units,
    searcher: Searcher,
    options: RobustOptions,
    restarts: int,
    rows: int = 600,
    steps: int = 30,
) -> tuple[Tensor, Tensor]:
    """Where maximum likelihood leads to (G, P) on guesses of the clean rows (G, N): the best of several starts each."""
    generator, seed = np.random.default_rng([searcher.seed, 7]), searcher.seed
    guesses = clean_guesses(standard_columns(layout.structure, kind.batch), generator, options.most_dropped)
    guessed = torch.zeros(len(guesses), kind.batch.rows, dtype=torch.bool)
    for mask, clean in zip(guessed, guesses, strict=True):
        mask[torch.as_tensor(clean)] = True
    owners = [number % len(guesses) for number in range(len(guesses) * max(1, restarts // 4))]
    begun = [kind.starts(layout, problem, seed, [n], guessed[g].nonzero()[:, 0]) for n, g in enumerate(owners)]
    part = random_part(problem.rows, rows, seed)
    few, seen = (problem, guessed) if part is None else (problem.subset(part), guessed[:, part])
    weighted = few.reweighted(seen[owners].to(begun[0]))
    quiet = Searcher(Deterministic(steps=steps), seed, Monitor(show=False, stopping=searcher.monitor.stopping))
    ended = search(weighted, torch.cat(begun), SearchSchedule(moves=0), quiet, owners)
    return ended.point, guessed


# -- weights ----------------------------------------------------------------------------------------------------------


def tail_weights(losses: Tensor, model: Tensor, options: RobustOptions) -> Tensor:
    r"""Weights (N,) of rows by their losses, which keep the mass in each tail of the model's losses near the model's.

    Of a share e beyond the model's mass that is more than what is spared, s, only :math:`s^2 / e` stays: the garrote of
    Breiman (1995), which takes nothing off where chance may explain the excess, and hardly leaves any of a large one.

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
        spare = max((options.slack - 1) * mass, options.chance * (mass * (1 - mass) / len(losses)) ** 0.5)
        if share > mass + spare:
            lowest = min(lowest, (mass + spare**2 / (share - mass)) / share)
        weights[inside] = lowest
    weights[losses > beyond] = 0.0
    return weights if float(1 - weights.mean()) <= most else likeliest(losses, most)


def likeliest(losses: Tensor, most: float) -> Tensor:
    """One for the units of the lowest losses (..., N), zero for at ``most`` such a share."""
    return (losses <= losses.quantile(1 - most, dim=-1, keepdim=True)).to(losses)
