"""Rows of a linear normal table as a problem that reads them once: a step costs the same whatever their number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from otpdag.backward.row_moments import Moments
from otpdag.data import Batch
from otpdag.objective.problem import Problem
from otpdag.objective.table_rows import LayOut, SummedRows
from otpdag.objective.terms import LossTerms
from otpdag.structure import Structure

__all__ = ["MomentProblem"]

CURVATURE_STEP = 1e-4  # of differences of gradients, in units of the data
AT_ONCE = 1_000_000  # entries of moments that are compared at a time


@dataclass(frozen=True)
class MomentProblem(SummedRows):
    """Moments of rows, and the rows themselves for whoever asks about single ones."""

    structure: Structure
    shapes: Mapping[str, tuple[int, ...]]
    moments: Moments
    in_rows: LayOut
    """Makes the problem of the same objective that looks at every row."""
    anew: LayOut
    """Makes the problem that is best for other rows."""
    seed: int

    @property
    def batch(self) -> Batch:  # type: ignore[override]  # all fields are frozen, this one is derived
        """The rows."""
        return self.moments.batch

    def terms(self, point: Tensor) -> LossTerms:
        """The loss of a row: reported as reconstruction, since its parts are not told apart."""
        loss = -self.moments.log_likelihood(point) / self.weight.sum(-1)
        return LossTerms.of(loss, reconstruction=loss)

    @property
    def updates_suffice(self) -> bool:
        """Whether scoring moves every parameter."""
        return self.moments.structural is not None

    def updated(self, point: Tensor) -> tuple[Tensor, LossTerms]:
        """A step of Fisher's scoring, as long as it lowers the loss, and the terms at ``point``."""
        equations = self.moments.structural
        if equations is None:
            return super().updated(point)
        at, second = point.detach().numpy(), self.moments.second.numpy()
        with np.errstate(all="ignore"):  # a loss that is not finite is refused by whoever asked for the update
            scored = equations.scored(at, second)
            moved = equations.improved(scored, second)
        loss = torch.from_numpy(scored.loss)
        return torch.from_numpy(moved), LossTerms.of(loss, reconstruction=loss)

    def guessed(self, seed: int, *, first: bool) -> Tensor | None:
        """From the moments of complete rows."""
        return self.moments.guessed(self.structure.graph, seed, first=first)

    def curvature(self, point: Tensor) -> Tensor | None:
        """Differences of the gradients of structural equations, where the model is written so."""
        equations, second = self.moments.structural, self.moments.second.numpy()
        if equations is None:
            return None
        at, moves = point.detach().numpy(), CURVATURE_STEP * np.eye(point.shape[1])
        at_once = max(1, AT_ONCE // second[0].size)
        with np.errstate(all="ignore"):
            slopes = [
                equations.gradient(at + move, second) - equations.gradient(at - move, second)
                for move in np.split(moves, range(at_once, len(moves), at_once))
            ]
        curvature = torch.from_numpy(np.concatenate(slopes) / (2 * CURVATURE_STEP))
        return 0.5 * (curvature + curvature.T)

    def on_part(self, rows: int | Tensor, *, coarse: bool = False) -> Problem:
        """These rows; or all of them instead of fewer, since more do not cost more."""
        return self.anew(batch=self.batch.take(rows), seed=self.seed) if isinstance(rows, Tensor) else self

    def reweighted(self, factors: Tensor) -> MomentProblem:
        """Moments of the same rows with other weights."""
        return replace(self, moments=self.moments.reweighted(factors))

    def simulated(self, point: Tensor, size: int, seed: int) -> Problem:
        """Rows that the model makes, each with the gaps and covariates of a random row."""
        return self.anew(batch=self.drawn(point, size, seed), seed=seed)
