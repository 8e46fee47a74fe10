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

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.divergences.whitened import FittedFeatures
from otpdag.matching.completion import CompletedRows, can_be_completed, complete_rows
from otpdag.matching.mean_features import (
    FINE_POINTS,
    MOST_POINTS,
    MOST_STATES,
    THINNED_POINTS,
    Measure,
    drawn_at,
    feature_columns,
    lay_out,
    mean_features,
    mean_over_many,
    thinned,
)
from otpdag.problem import LossTerms
from otpdag.settings import Direct
from otpdag.simulation import ancestral, complete_batch
from otpdag.structure import Naturals, Structure

WHITENING_ROWS = 16_000
"""Rows drawn from the model for the covariance of its features: thirty times as many as there are features by default.
Chance in the weights adds features over rows to the variance of estimates, and more where gaps leave less to know."""

FEWEST_EFFECTIVE = 0.9
"""Share of the draws that must still count; below, rows are drawn anew. A mean over few draws that are weighed falls
short of the change that the weights stand for, by about the change over their number, and what is missing of the
information multiplies that: with half of the draws of 16 it was as large as the standard errors."""


@dataclass(frozen=True)
class DirectComparison:
    """The data's mean features, and the points at which the model's are evaluated."""

    direct: Direct
    batch: Batch
    features: FittedFeatures
    measure: Measure
    many: Measure
    """More points than the model's mean features are taken over in every step: those that tell what few lack."""
    completed: CompletedRows | None = None
    """Rows with their gaps filled in, once there is a first estimate."""
    lacking: Tensor | None = None
    """What the model's mean features (R or 1, J) lack over these points, as told by many at an estimate."""

    @property
    def size(self) -> Tensor:
        """Total weight of the rows (R or 1,), in whose root the distances of estimates by chance fall."""
        return self.batch.weight.sum(-1)

    def terms(self, structure: Structure, naturals: Naturals) -> LossTerms:
        """The squared distance of mean features, weighted."""
        mean = mean_features(structure, naturals, self.measure, self.features)
        mean = mean if self.lacking is None else mean + self.lacking.to(mean)
        distance = self.features.distance(mean)
        return LossTerms.of(distance, direct=self.direct.kappa * distance)

    @property
    def approximation(self) -> str | None:
        """What cannot be listed, and what is done instead; None if all joint states are."""
        if not self.many.joint_states:
            return None
        names = ", ".join(map(repr, self.many.supports))
        return (
            f"the inner categories {names} have {self.many.joint_states} joint states, and at most {MOST_STATES} are "
            f"listed: {self.measure.size} are drawn and weighed, so that estimates have noise; method='entropic' sums "
            "along the graph"
        )

    @property
    def has_gaps(self) -> bool:
        """Whether some cell is missing."""
        return not all(bool(mask.all()) for mask in self.batch.mask.values())

    def can_complete(self, structure: Structure) -> bool:
        """Whether rows have gaps, and the backward map is known."""
        return self.has_gaps and can_be_completed(structure, self.batch)

    def completed_at(self, structure: Structure, naturals: Naturals, seed: int) -> DirectComparison:
        """The same with gaps filled in by the backward map at these parameters, on features placed for that at first.

        Draws are weighed anew as long as most of them count, and drawn anew otherwise; what few points lack
        is told anew in any case, since it holds near an estimate only.
        """
        if self.completed is not None:
            weighed = self.completed.weighed_for(structure, naturals)
            if weighed.effective >= FEWEST_EFFECTIVE:
                return self._with_rows(structure, weighed, self.features)._corrected_at(structure, naturals)
            return self.told_anew(structure, naturals, seed)
        rows = complete_rows(structure, naturals, self.batch, count_ranges(structure, self.batch), seed)
        generator = torch.Generator().manual_seed(seed)
        placed = compare_directly(structure, rows.one_each(structure), self.direct, generator)
        rows = rows.keeping(structure, placed.features)
        own = replace(self, measure=placed.measure, many=placed.many)._with_rows(structure, rows, placed.features)
        return own._precise_at(structure, naturals, generator)

    def told_anew(self, structure: Structure, naturals: Naturals, seed: int) -> DirectComparison:
        """The same with what depends on an estimate made at this one: draws in gaps, and what few points lack."""
        own, generator = self, torch.Generator().manual_seed(seed)
        if self.completed is not None:  # counts that are filled in may reach further than before
            rows = complete_rows(structure, naturals, self.batch, count_ranges(structure, self.batch), seed)
            measure, many = _points(structure, rows.one_each(structure), generator)
            own = replace(self, measure=measure, many=many)
            own = own._with_rows(structure, rows.keeping(structure, self.features), self.features)
        return own._precise_at(structure, naturals, generator)

    def _precise_at(self, structure: Structure, naturals: Naturals, generator: torch.Generator) -> DirectComparison:
        """The same with the model's mean features those over many points, at these parameters and nearby."""
        if self.many.joint_states:
            few, many = (drawn_at(structure, naturals, self.many, n, generator) for n in (MOST_POINTS, FINE_POINTS))
            return replace(self, measure=few, many=many)._corrected_at(structure, naturals)
        few = thinned(structure, naturals, self.many, generator, THINNED_POINTS)
        few = self.measure if few is self.many else few
        return replace(self, measure=few)._corrected_at(structure, naturals)

    def _corrected_at(self, structure: Structure, naturals: Naturals) -> DirectComparison:
        """The same points, with what they lack at these parameters."""
        if self.measure is self.many:
            return replace(self, lacking=None)
        precise = mean_over_many(structure, naturals, self.many, self.features)
        with torch.no_grad():
            lacking = precise - mean_features(structure, naturals, self.measure, self.features)
        return replace(self, lacking=lacking)

    def change(self, structure: Structure, before: Naturals, after: Naturals) -> Tensor:
        """How far parameters moved, in standard errors of what the features know of complete rows, squared (R,)."""
        with torch.no_grad():
            old, new = (mean_features(structure, one, self.measure, self.features) for one in (before, after))
            return replace(self.features, mean=old).distance(new) * self.size

    def _with_rows(self, structure: Structure, rows: CompletedRows, features: FittedFeatures) -> DirectComparison:
        mean = rows.mean_features(structure, features)
        return replace(self, completed=rows, features=replace(features, mean=mean))

    def whitened_by_model(self, structure: Structure, naturals: Naturals, seed: int) -> DirectComparison:
        """The same with features whitened by their covariance under the model, which is less noisy than the data's."""
        generator = torch.Generator().manual_seed(seed)
        given = {node: _recycled(self.batch.values[node][:1], WHITENING_ROWS) for node in structure.given}
        sample = complete_batch(structure, ancestral(structure, naturals, WHITENING_ROWS, generator, do=given))
        columns = feature_columns(structure, sample)
        features = self.features.rewhitened(columns, sample.weight, self.direct.features.model_ridge)
        return replace(self, features=features)

    def reweighted(self, structure: Structure, factors: Tensor) -> DirectComparison:
        """The same with the data's mean features over rows whose weights are multiplied by ``factors`` (R, N)."""
        batch = replace(self.batch, weight=self.batch.weight * factors)
        if self.completed is not None:
            rows = self.completed.with_weights(batch)
            return replace(self, batch=batch)._with_rows(structure, rows, self.features)
        mean = self.features.mean_of(feature_columns(structure, batch), batch.weight)
        return replace(self, batch=batch, features=replace(self.features, mean=mean))


def compare_directly(
    structure: Structure, batch: Batch, direct: Direct, generator: torch.Generator
) -> DirectComparison:
    """Place features on the data, and points for the model's inner nodes."""
    features = direct.features.fit(feature_columns(structure, batch), batch.weight, generator)
    measure, many = _points(structure, batch, generator)
    return DirectComparison(direct, batch, features, measure, many)


def _points(structure: Structure, batch: Batch, generator: torch.Generator) -> tuple[Measure, Measure]:
    """Few points of the model's inner nodes, for every step, and many."""
    points = partial(lay_out, structure, batch, count_ranges(structure, batch), generator=generator)
    few = points()
    return few, few if few.is_exact else points(points=FINE_POINTS, most=FINE_POINTS)


def count_ranges(structure: Structure, batch: Batch) -> dict[str, float]:
    """How far the support of each count must reach: somewhat beyond the largest that is seen."""
    reaches = {n: structure.mechanisms[n].space.reach(batch.values[n]) for n in structure.graph.observed}
    return {node: reach for node, reach in reaches.items() if reach is not None}


def _recycled(values: Tensor, rows: int) -> Tensor:
    return values[:, torch.arange(rows) % values.shape[1]]
