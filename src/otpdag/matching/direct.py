r"""The direct term for rows: the left side of Theorem 1, :math:`\kappa\, D(P_{data}(X_O), P_\theta(X_O))`.

The data's side is laid out once, as mean features; the model's side has its leaves integrated out
(:mod:`~otpdag.matching.mean_features`), so that the distance is a smooth function of the parameters.

Where cells are missing, a first estimate compares each feature with the rows that show it. From then on the data's side
is that of rows completed by the backward map at the estimate so far (:mod:`~otpdag.matching.completion`), held fixed
while the model moves and completed anew until estimate and completion agree, as in expectation-maximisation: with
features whitened by their covariance in complete rows, the equations that are solved then are the likelihood's, seen
through the features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from otpdag.data import Batch, random_part
from otpdag.divergences.whitened import FittedFeatures
from otpdag.errors import ModelError
from otpdag.matching.completion import CompletedRows, can_be_completed, complete_rows
from otpdag.matching.mean_features import feature_columns, mean_features, mean_over_many
from otpdag.matching.model_points import ModelPoints, drawn_states, lay_out
from otpdag.noise import Streams
from otpdag.numerics import FixedPoint
from otpdag.problem import LossTerms, Minibatched, Pace, Refinement, TableRows, Units, WrappedProblem, units_of
from otpdag.settings import Direct
from otpdag.simulation import ancestral, batch_of
from otpdag.structure import Naturals, Structure


@dataclass(frozen=True)
class DirectProblem(TableRows):
    """Rows compared with the model: the data's mean features, and the points at which the model's are evaluated."""

    structure: Structure
    batch: Batch
    shapes: Mapping[str, tuple[int, ...]]
    direct: Direct
    seed: int
    features: FittedFeatures
    points: ModelPoints
    many: ModelPoints
    """More points than the model's mean features are taken over in every step: those that tell what few lack."""
    refinements: int
    """How often features are still whitened anew."""
    completed: CompletedRows | None = None
    """Rows with their gaps filled in, once there is a first estimate."""
    lacking: Tensor | None = None
    """What the model's mean features (R or 1, J) lack over these points, as told by many at an estimate."""
    completing: FixedPoint | None = None
    """Where gaps were completed, and what became of the estimates; None if they are not yet."""
    is_resampled: bool = False
    """Whether it is one of many, of which estimates and completed rows need not agree as well."""

    def loss(self, point: Tensor) -> LossTerms:
        """The squared distance of mean features, weighted."""
        mean = mean_features(self.points, self.naturals(point), self.features)
        mean = mean if self.lacking is None else mean + self.lacking.to(mean)
        distance = self.features.distance(mean)
        return LossTerms.of(distance, direct=self.direct.kappa * distance)

    @property
    def pace(self) -> Pace:
        """Many refinements where gaps are completed."""
        return Pace(refinements=self.direct.completion.most if self._can_complete else 0)

    def notes(self, point: Tensor | None = None) -> tuple[str, ...]:
        """Joint states that cannot be listed, and whether gaps were taken for completely random."""
        notes = []
        if self.many.joint_states:
            names = ", ".join(map(repr, self.many.undrawn))
            notes.append(
                f"the inner categories {names} have {self.many.joint_states} joint states, and at most "
                f"{self.direct.points.states} are listed: {self.points.size} are drawn and weighed, so that estimates "
                "have noise; method='likelihood' sums along the graph"
            )
        if point is not None and self.completed is None and self._has_gaps:
            notes.append(
                "rows with gaps could not be completed: features were compared over the rows that show them, which is "
                "right if gaps do not depend on any value; see docs/missing-data.md"
            )
        return tuple(notes)

    @property
    def _has_gaps(self) -> bool:
        return not all(bool(mask.all()) for mask in self.batch.mask.values())

    @property
    def _can_complete(self) -> bool:
        """Whether rows have gaps, and the backward map is known."""
        return self._has_gaps and can_be_completed(self.structure, self.batch)

    # -- other rows ---------------------------------------------------------------------------------------------------

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> DirectProblem:
        """Fewer rows."""
        part = random_part(self.rows, rows, self.seed)
        return self._of(self.batch if part is None else self.batch.take(part), self.seed)

    def simulated(self, point: Tensor, size: int, seed: int) -> DirectProblem:
        """Rows that the model makes, each with the gaps and covariates of a random row."""
        return self._of(self.drawn(point, size, seed), seed)

    def _of(self, batch: Batch, seed: int) -> DirectProblem:
        return direct_problem(self.structure, batch, self.shapes, self.direct, seed)

    def reweighted(self, factors: Tensor) -> DirectProblem:
        """The data's mean features over rows whose weights are multiplied by ``factors`` (R, N)."""
        batch = replace(self.batch, weight=self.batch.weight * factors)
        completing = None if self.completing is None else FixedPoint().at(self.completing.begin)
        own = replace(self, batch=batch, completing=completing, is_resampled=True)
        if self.completed is not None:
            return own._with_rows(replace(self.completed, batch=batch), self.features)
        mean = self.features.mean_of(feature_columns(self.structure, batch), batch.weight)
        return replace(own, features=replace(self.features, mean=mean))

    # -- what an estimate tells: rows completed, weights of features, and what few points lack ------------------------

    def refine(self, point: Tensor) -> Refinement | None:
        """Gaps filled in at the estimate until that settles; then features whitened anew by the model."""
        point = point.detach()
        completed = self._moved_by_completion(point)
        if completed is not None or not self.refinements:
            return completed
        naturals = self.naturals(point)
        whitened = self.whitened_by_model(naturals, self.seed + self.direct.refinements - self.refinements)
        again = None if self.completing is None else FixedPoint().at(point)
        refined = replace(whitened._told_anew(naturals), refinements=self.refinements - 1, completing=again)
        return Refinement(refined, point, "refined weights")

    def _moved_by_completion(self, point: Tensor) -> Refinement | None:
        """Gaps filled in at the estimate; None if there are none, or estimates have settled."""
        if not self._can_complete:
            return None
        course = FixedPoint()
        if self.completing is not None:
            change = self.change(self.naturals(self.completing.begin), self.naturals(point))
            if bool((change <= self._settled).all()):
                return None
            if self.refinements and len(self.completing.images) == self.direct.completion.first:
                return None
            course = self.completing.with_image(point)
            point = course.best()
        try:
            completed = replace(self._completed_at(self.naturals(point)), completing=course.at(point))
        except ModelError:  # what a row misses is beyond the budget of sums: its notes say so
            return None
        return Refinement(completed, point, "completed rows", curved_alike=self.completing is not None)

    @property
    def _settled(self) -> float:
        """The squared change at which estimates and completed rows agree."""
        sizes = self.direct.completion
        if self.refinements:
            return sizes.settled_roughly
        return sizes.settled_resample if self.is_resampled else sizes.settled

    def change(self, before: Naturals, after: Naturals) -> Tensor:
        """How far parameters moved, in standard errors of what the features know of complete rows, squared (R,)."""
        with torch.no_grad():
            old, new = (mean_features(self.points, one, self.features) for one in (before, after))
            return replace(self.features, mean=old).distance(new) * self.batch.weight.sum(-1)

    def whitened_by_model(self, naturals: Naturals, seed: int) -> DirectProblem:
        """The same with features whitened by their covariance under the model, which is less noisy than the data's."""
        structure, generator = self.structure, torch.Generator().manual_seed(seed)
        rows = self.direct.whitening_rows
        recycled = torch.arange(rows) % self.rows
        given = {node: self.batch.values[node][:1, recycled] for node in structure.given}
        sample = batch_of(structure, ancestral(structure, naturals, rows, generator, do=given))
        columns = feature_columns(structure, sample)
        features = self.features.rewhitened(columns, sample.weight, self.direct.features.model_ridge)
        return replace(self, features=features)

    def _completed_at(self, naturals: Naturals) -> DirectProblem:
        """The same with gaps filled in by the backward map at these parameters, on features placed for that at first.

        Draws are weighed anew as long as most of them count, and drawn anew otherwise; what few points lack
        is told anew in any case, since it holds near an estimate only.
        """
        if self.completed is not None:
            weighed = self.completed.weighed_for(naturals)
            if weighed.effective >= self.direct.completion.fewest_effective:
                return self._with_rows(weighed, self.features)._corrected_at(naturals)
            return self._told_anew(naturals)
        rows, generator = self._complete_rows(naturals), torch.Generator().manual_seed(self.seed)
        filled = rows.one_each()
        features = _features(self.structure, filled, self.direct, generator)
        own = self._on_points_of(filled, generator)._with_rows(rows.keeping(features), features)
        return own._precise_at(naturals, generator)

    def _told_anew(self, naturals: Naturals) -> DirectProblem:
        """The same with what depends on an estimate made at this one: draws in gaps, and what few points lack."""
        own, generator = self, torch.Generator().manual_seed(self.seed)
        if self.completed is not None:  # counts that are filled in may reach further than before
            rows = self._complete_rows(naturals)
            own = self._on_points_of(rows.one_each(), generator)
            own = own._with_rows(rows.keeping(self.features), self.features)
        return own._precise_at(naturals, generator)

    def _complete_rows(self, naturals: Naturals) -> CompletedRows:
        return complete_rows(self.structure, naturals, self.batch, self.seed, self.direct.completion)

    def _with_rows(self, rows: CompletedRows, features: FittedFeatures) -> DirectProblem:
        mean = rows.mean_features(features)
        return replace(self, completed=rows, features=replace(features, mean=mean))

    def _on_points_of(self, batch: Batch, generator: torch.Generator) -> DirectProblem:
        few, many = _points(self.structure, batch, self.direct, generator)
        return replace(self, points=few, many=many)

    def _precise_at(self, naturals: Naturals, generator: torch.Generator) -> DirectProblem:
        """The same with the model's mean features those over many points, at these parameters and nearby."""
        sizes, many = self.direct.points, self.many
        if many.joint_states:
            few, many = (
                drawn_states(self.structure, self.batch, many.undrawn, size, generator, naturals)
                for size in (sizes.few, sizes.many)
            )
        else:
            few = many.thinned(naturals, sizes.thinned, generator)
            few = self.points if few is many else few
        return replace(self, points=few, many=many)._corrected_at(naturals)

    def _corrected_at(self, naturals: Naturals) -> DirectProblem:
        """The same points, with what they lack at these parameters."""
        if self.points is self.many:
            return replace(self, lacking=None)
        precise = mean_over_many(self.many, naturals, self.features)
        with torch.no_grad():
            return replace(self, lacking=precise - mean_features(self.points, naturals, self.features))


def direct_problem(
    structure: Structure, batch: Batch, shapes: Mapping[str, tuple[int, ...]], direct: Direct, seed: int
) -> DirectProblem:
    """Place features on the data, and points for the model's inner nodes; the same seed places them alike."""
    generator = torch.Generator().manual_seed(seed)
    features = _features(structure, batch, direct, generator)
    points, many = _points(structure, batch, direct, generator)
    return DirectProblem(structure, batch, shapes, direct, seed, features, points, many, direct.refinements)


def _features(structure: Structure, batch: Batch, direct: Direct, generator: torch.Generator) -> FittedFeatures:
    return direct.features.fit(feature_columns(structure, batch), batch.weight, generator)


def _points(
    structure: Structure, batch: Batch, direct: Direct, generator: torch.Generator
) -> tuple[ModelPoints, ModelPoints]:
    """Few points of the model's inner nodes, for every step, and many."""
    few = lay_out(structure, batch, direct.points, generator)
    return few, few if few.is_exact else lay_out(structure, batch, direct.points, generator, finely=True)


@dataclass(frozen=True)
class WithDirect(WrappedProblem, Units):
    """Another problem of the same rows, with the direct term added."""

    base: Units
    direct: Units

    def loss(self, point: Tensor) -> LossTerms:
        """Those of both."""
        return self.base.loss(point) + self.direct.loss(point)

    @property
    def pace(self) -> Pace:
        """That of the other problem, with as many refinements as either needs."""
        own, other = self.base.pace, self.direct.pace
        return replace(own, refinements=max(own.refinements, other.refinements))

    def notes(self, point: Tensor | None = None) -> tuple[str, ...]:
        """Those of both."""
        return self.base.notes(point) + self.direct.notes(point)

    def laid_out_for(self, points: Tensor) -> Self:
        """The other problem, placed for these replicas."""
        return replace(self, base=self.base.laid_out_for(points))

    def refine(self, point: Tensor) -> Refinement | None:
        """The other problem as long as it moves, then the direct term."""
        moved = self.base.refine(point)
        if moved is None:
            moved = self.direct.refine(point)
            return None if moved is None else replace(moved, problem=replace(self, direct=units_of(moved.problem)))
        both = replace(self, base=units_of(moved.problem))
        with torch.no_grad():
            return replace(moved, problem=both, loss=None if moved.loss is None else both.loss(moved.point).total)

    @property
    def weight(self) -> Tensor:
        """Weights of the rows (1, N)."""
        return self.direct.weight

    def unit_losses(self, points: Tensor) -> Tensor:
        """The loss of every row (R, N) in the other problem, since none has a direct term of its own."""
        return self.base.unit_losses(points)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> WithDirect:
        """The same rows in both, since they have the same seed."""
        return self._each(lambda one: one.subset(rows, coarse=coarse))

    def reweighted(self, factors: Tensor) -> WithDirect:
        """Other weights of the rows in both."""
        return self._each(lambda one: one.reweighted(factors))

    def simulated(self, point: Tensor, size: int, seed: int) -> WithDirect:
        """The same rows that the model makes in both, since they have the same seed."""
        return self._each(lambda one: one.simulated(point, size, seed))

    def _each(self, change: Callable[[Units], Units]) -> WithDirect:
        return WithDirect(change(self.base), change(self.direct))


@dataclass(frozen=True)
class DrawnWithDirect(WrappedProblem):
    """A problem of the same rows that is drawn anew in every step, with the direct term over all rows added."""

    direct: Units

    def sampled(self, point: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Those of a minibatch, and the direct term."""
        assert isinstance(self.base, Minibatched), "others are not drawn"
        return self.base.sampled(point, streams, progress) + self.direct.loss(point)
