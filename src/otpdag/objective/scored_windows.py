r"""Windows compared along the scores of their steps, once there is an estimate.

The data's mean scores :math:`\bar\psi` at an estimate :math:`\vartheta` are what is compared
(:mod:`~otpdag.objective.window_scores`). How the model's own mean moves with parameters is told by the features
:math:`f` of windows, whose means are exact:

.. math:: E_\theta \psi - E_\vartheta \psi \approx B' (E_\theta f - E_\vartheta f),

with slopes :math:`B` by regression over a sample of the model, scaled to be right to first order. So features decide
how quickly an estimate is found and not which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch
from otpdag.divergences.whitened import whitening_of
from otpdag.inference.window_features import (
    Stratum,
    Windows,
    block_means,
    block_rows,
    long_run_covariance,
    state_laws,
    stratum_mean,
)
from otpdag.objective.score_regression import ScoreRegression, inverse_root
from otpdag.objective.window_scores import WindowScores
from otpdag.structure import Naturals, Structure

__all__ = ["RIDGE", "along_scores", "change"]

LEAST_TOLD = 0.2
"""Share of a score's variance that features must tell: below, they do not say how its mean moves with parameters, and
what they said of the parameter before stands. Of 500 features over 5,000 blocks a tenth may be chance."""

RIDGE = 1e-9
"""Of the covariance of features in a sample of the model: what data would blur, draws know, and only rounding is left
to guard against (decision 0033)."""


def along_scores(reader: WindowScores, windows: Windows, batch: SequenceBatch, sample: SequenceBatch) -> Windows:
    """The same windows, those of later steps compared along scores.

    Args:
        reader: Reads scores at the estimate.
        windows: The data's windows, whose features were whitened.
        batch: The data.
        sample: Sequences of the model at the estimate, complete and of one length.
    """
    rows = block_rows(sample, windows.length)
    if rows is None:
        return windows
    gap, of_sample = _gap(reader, batch, sample)
    of_blocks = of_sample[rows + windows.length // 2].mean(1)
    is_later = (batch.times > 0) | (len(windows.strata) == 1)
    strata = []
    for stratum in windows.strata:
        if not stratum.is_first:
            means = block_means(reader.structure, stratum.features, sample, windows.length, rows)
            along = _Along.of(means, of_blocks, rows.shape[1])
            stratum = along.compared(reader, windows, stratum, gap[is_later].mean(0))
        strata.append(stratum)
    return replace(windows, strata=tuple(strata))


def _gap(reader: WindowScores, batch: SequenceBatch, sample: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Bounded scores of the data's steps (N, K), less their mean under the model; and those of a sample's steps.

    Without bounds the mean is zero, so that a sample tells the little that these change of it almost without chance.
    """
    bounded, sample = reader.with_floors(sample), _with_gaps(sample, batch)
    of_sample = bounded.of(sample)
    by_bounds = (of_sample - reader.of(sample)).mean(0)
    return bounded.of(batch) - by_bounds, of_sample


def change(structure: Structure, windows: Windows, before: Naturals, after: Naturals) -> float:
    """How far parameters (1, ...) moved, in standard errors of what one step knows along scores, squared."""
    total = 0.0
    with torch.no_grad():
        for stratum in windows.strata:
            if not stratum.is_first:
                old, new = (
                    stratum_mean(structure, one, windows, stratum, state_laws(structure, one, windows.states))
                    for one in (before, after)
                )
                total += float(replace(stratum.features, mean=old).distance(new))
    return total


@dataclass(frozen=True, eq=False)
class _Along:
    """Directions that scores vary in, and how features tell of them.

    Attributes:
        directions: Combinations of scores (K, rank) whose long-run covariance is one.
        slopes: Of these on features (J, rank), scaled so that the mean moves with parameters as they do.
    """

    directions: Tensor
    slopes: Tensor

    @classmethod
    def of(cls, features: Tensor, scores: Tensor, block: int) -> _Along:
        """From means (blocks, J) and (blocks, K) over blocks of windows of the model."""
        features, scores = (values * block**0.5 for values in (features, scores))
        whitening = whitening_of(long_run_covariance(features, 1).unsqueeze(0), RIDGE)[0]
        regression = ScoreRegression.of(features, scores, whitening)
        directions = inverse_root(regression.information)
        told = (regression.features @ regression.slopes) @ directions
        shares, axes = torch.linalg.eigh(told.T @ told / len(told))
        kept = shares > LEAST_TOLD
        directions = directions @ axes[:, kept]
        return cls(directions, regression.slopes @ directions / shares[kept])

    def compared(self, reader: WindowScores, windows: Windows, stratum: Stratum, gap: Tensor) -> Stratum:
        """A stratum whose scores are by ``gap`` (K,) above the model's, compared along these directions alone."""
        laws = state_laws(reader.structure, reader.naturals, windows.states)
        mean = stratum_mean(reader.structure, reader.naturals, windows, stratum, laws)
        before = float(stratum.features.distance(mean)) + stratum.rest
        moved = (gap @ self.directions) @ torch.linalg.pinv(self.slopes)
        features = replace(stratum.features, mean=mean + moved, whitening=self.slopes.unsqueeze(0))
        rest = before - float(features.distance(mean))
        return replace(stratum, features=features, rest=max(rest, 0.0))


def _with_gaps(sample: SequenceBatch, batch: SequenceBatch) -> SequenceBatch:
    """A sample with the gaps of the data, one row after another from the first, again from there after the last."""
    if all(bool(mask.all()) for mask in batch.steps.mask.values()):
        return sample
    rows = torch.arange(sample.rows) % batch.rows
    mask = {node: seen[:1, rows] for node, seen in batch.steps.mask.items()}
    return replace(sample, steps=replace(sample.steps, mask=mask))
