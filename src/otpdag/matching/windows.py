r"""The direct term of sequences: short windows of the data against the same windows of the model.

The left side of Theorem 1 for sequences compares what neighbouring steps show,

.. math:: D\big(P_{data}(x_t, \dots, x_{t+w-1}), P_\theta(x_t, \dots, x_{t+w-1})\big),

averaged over the times :math:`t` of all windows (:mod:`~otpdag.matching.window_features`). Two steps already tell
transitions and emissions apart; the first steps are compared by themselves, for they tell how a sequence begins.

What products of kernels on three steps leave unsaid of a parameter, its score says: at the estimate by features, the
scores of the data's steps, each given the few around it, are compared with the model's
(:mod:`~otpdag.matching.window_scores`). Scores are taken anew where that moved the estimate far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch, part_of
from otpdag.matching.window_features import Windows, lay_out_windows, refined_windows, window_distance
from otpdag.matching.window_scores import RIDGE, WindowScores, along_scores, can_be_scored, change, points_beside
from otpdag.problem import LossTerms, Moved, Problem
from otpdag.settings import Direct
from otpdag.simulation import ancestral_sequences, complete_batch
from otpdag.structure import Structure

COARSE_FEATURES = 200  # features while starts are compared
MODEL_STEPS = (50_000, 200_000)  # drawn for the covariance of the model's features: at least, at most (decision 0033)
DRAWN_OVER_DATA = 4  # steps drawn for each step of the data, so that draws add little to the data's own noise
LONGEST_DRAWN = 200  # steps of one drawn sequence
FAR_FROM_SCORES = 1.0  # squared standard errors in each direction beyond which scores are taken again
MOST_SCORED = 6  # times that scores are taken


@dataclass(frozen=True)
class WindowProblem(Problem):
    """Sequences as windows of a few steps, compared with the model's own windows."""

    structure: Structure
    batch: SequenceBatch
    shapes: Mapping[str, tuple[int, ...]]
    direct: Direct
    seed: int
    windows: Windows
    refinements: int
    scored: tuple[Tensor, ...] = ()
    """Points (1, P) at which windows were laid out to be compared along scores."""

    @property
    def rows(self) -> int:
        """Steps of all sequences."""
        return self.batch.rows

    def terms(self, point: Tensor) -> LossTerms:
        """The direct term."""
        distance = window_distance(self.structure, self.naturals(point), self.windows)
        return LossTerms.of(distance, direct=self.direct.kappa * distance)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> WindowProblem:
        """About so many steps, or these sequences; fewer features if ``coarse``."""
        features = self.direct.features
        if coarse:
            features = replace(features, features=min(COARSE_FEATURES, features.features))
        part = part_of(self.batch, rows, self.seed)
        return window_problem(self.structure, part, self.shapes, replace(self.direct, features=features), self.seed)

    def moved(self, point: Tensor) -> Moved | None:
        """Windows compared along scores at ``point`` (1, P); where nodes have none, by weights that it tells."""
        if not self.direct.refinements:
            return None
        point = point.detach()
        if can_be_scored(self.structure):
            return None if self._is_settled(point) else Moved(self._scored_at(point), point, "scores of windows")
        if not self.refinements:
            return None
        windows = refined_windows(self.structure, self.windows, self._drawn(point), RIDGE)
        return Moved(replace(self, windows=windows, refinements=self.refinements - 1), point, "refined weights")

    def _scored_at(self, point: Tensor) -> WindowProblem:
        """The same, with windows of later steps compared along scores at ``point`` (1, P)."""
        around = points_beside(self.naturals, point, torch.arange(point.shape[-1]))
        reader = WindowScores(self.structure, self.windows.states, self.naturals(point), around)
        windows = along_scores(reader, self.windows, self.batch, self._drawn(point))
        return replace(self, windows=windows, scored=(*self.scored, point))

    def _is_settled(self, point: Tensor) -> bool:
        """Whether scores were taken near ``point`` (1, P), or often enough."""
        if not self.scored:
            return False
        before, after = (self.naturals(one) for one in (self.scored[-1], point))
        far = change(self.structure, self.windows, before, after) * self.rows
        return len(self.scored) == MOST_SCORED or far < FAR_FROM_SCORES * point.shape[-1]

    def _drawn(self, point: Tensor) -> SequenceBatch:
        """Sequences of one length that the model makes at ``point`` (1, P)."""
        length = min(int(self.batch.lengths.max()), LONGEST_DRAWN)
        least, most = MODEL_STEPS
        many = -(-min(most, max(least, DRAWN_OVER_DATA * self.rows)) // length)
        number = self.direct.refinements - self.refinements + len(self.scored)
        generator = torch.Generator().manual_seed(self.seed + number)
        drawn = ancestral_sequences(self.structure, self.naturals(point), many, length, generator)
        steps = complete_batch(self.structure, {node: value.flatten(1, 2) for node, value in drawn.items()})
        return SequenceBatch(steps, torch.full((many,), length))


def window_problem(
    structure: Structure, batch: SequenceBatch, shapes: Mapping[str, tuple[int, ...]], direct: Direct, seed: int
) -> WindowProblem:
    """Place features once; the same seed places them alike.

    A state's own spread is narrower than that of all steps, by which kernels are measured: they have half the least
    bandwidth besides.
    """
    least = min(direct.features.bandwidths) / 2
    features = replace(direct.features, bandwidths=(least, *direct.features.bandwidths))
    windows = lay_out_windows(structure, batch, features, torch.Generator().manual_seed(seed), direct.window)
    return WindowProblem(structure, batch, shapes, direct, seed, windows, direct.refinements)
