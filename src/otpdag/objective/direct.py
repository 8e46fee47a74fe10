r"""The direct term for rows: the left side of Theorem 1, :math:`\kappa\, D(P_{data}(X_O), P_\theta(X_O))`.

The data's side is laid out once, as mean features; the model's side has its leaves integrated out
(:mod:`~otpdag.inference.mean_features`), so that the distance is a smooth function of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.divergences.whitened import FittedFeatures
from otpdag.inference.ancestral import ancestral
from otpdag.inference.mean_features import Measure, feature_columns, lay_out, mean_features
from otpdag.inference.simulated import complete_batch
from otpdag.objective.settings import Direct
from otpdag.objective.terms import LossTerms
from otpdag.structure import Naturals, Structure

__all__ = ["DirectComparison", "compare_directly", "count_ranges"]

WHITENING_ROWS = 8000
"""Rows drawn from the model for the covariance of its features: ten times as many as there are features by default."""


@dataclass(frozen=True)
class DirectComparison:
    """The data's mean features, and the points at which the model's are evaluated."""

    direct: Direct
    batch: Batch
    features: FittedFeatures
    measure: Measure

    def terms(self, structure: Structure, naturals: Naturals) -> LossTerms:
        """The squared distance of mean features, weighted."""
        distance = self.features.distance(mean_features(structure, naturals, self.measure, self.features))
        return LossTerms.of(distance, direct=self.direct.kappa * distance)

    def whitened_by_model(self, structure: Structure, naturals: Naturals, seed: int) -> DirectComparison:
        """The same with features whitened by their covariance under the model, which is less noisy than the data's."""
        generator = torch.Generator().manual_seed(seed)
        given = {node: _recycled(self.batch.values[node][:1], WHITENING_ROWS) for node in structure.given}
        values = ancestral(structure, naturals, WHITENING_ROWS, generator, do=given)
        sample = complete_batch(structure, values)
        columns = feature_columns(structure, sample)
        ridge = self.direct.features.model_ridge
        return replace(self, features=self.features.rewhitened(columns, sample.weight, ridge))

    def reweighted(self, structure: Structure, factors: Tensor) -> DirectComparison:
        """The same with the data's mean features over rows whose weights are multiplied by ``factors`` (R, N)."""
        batch = replace(self.batch, weight=self.batch.weight * factors)
        mean = self.features.mean_of(feature_columns(structure, batch), batch.weight)
        return replace(self, batch=batch, features=replace(self.features, mean=mean))


def compare_directly(
    structure: Structure, batch: Batch, direct: Direct, generator: torch.Generator
) -> DirectComparison:
    """Place features on the data, and points for the model's inner nodes."""
    features = direct.features.fit(feature_columns(structure, batch), batch.weight, generator)
    measure = lay_out(structure, batch, count_ranges(structure, batch), generator=generator)
    return DirectComparison(direct, batch, features, measure)


def count_ranges(structure: Structure, batch: Batch) -> dict[str, float]:
    """How far the support of each count must reach: somewhat beyond the largest that is seen."""
    reaches = {n: structure.mechanisms[n].space.reach(batch.values[n]) for n in structure.graph.observed}
    return {node: reach for node, reach in reaches.items() if reach is not None}


def _recycled(values: Tensor, rows: int) -> Tensor:
    return values[:, torch.arange(rows) % values.shape[1]]
