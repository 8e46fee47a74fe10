"""Rows of a linear normal table as a problem that reads them once: a step costs the same whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.data import Batch
from otpdag.likelihood.row_moments import Moments
from otpdag.likelihood.rows import LayOut, SummedRows
from otpdag.problem import LossTerms, Units, Updates
from otpdag.structure import Structure


@dataclass(frozen=True)
class MomentProblem(SummedRows):
    """Moments of rows, and the rows themselves for whoever asks about single ones."""

    route: ClassVar[str] = "moments"

    structure: Structure
    shapes: Mapping[str, tuple[int, ...]]
    moments: Moments
    in_rows: LayOut
    """Makes the problem of the same objective that looks at every row."""
    anew: LayOut
    """Makes the problem that is best for other rows."""
    seed: int
    in_order: Callable[[], Batch] | None = None
    """Makes the rows, complete and of equal weights, as they are told by number; None if the moments' own stand so."""

    @property
    def batch(self) -> Batch:  # type: ignore[override]  # all fields are frozen, this one is derived
        """The rows."""
        return self._told_by_number.batch

    @cached_property
    def _told_by_number(self) -> Moments:
        """The same moments, of rows in the order in which they are told by number."""
        return self.moments if self.in_order is None else replace(self.moments, batch=self.in_order())

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.moments.batch.rows

    @property
    def weight(self) -> Tensor:
        """Weights of the rows (1, N): they are equal where rows are not in order yet."""
        return self.moments.batch.weight

    @cached_property
    def _second(self) -> NDArray[np.float64]:
        """Second moments as an array, always the same one."""
        return self.moments.second.numpy()

    def loss(self, point: Tensor) -> LossTerms:
        """The loss of a row: reported as reconstruction, since its parts are not told apart."""
        loss = -self.moments.log_likelihood(point) / self.weight.sum(-1)
        return LossTerms.of(loss, reconstruction=loss)

    @property
    def updates(self) -> Updates | None:
        """Scoring, which moves every parameter."""
        return None if self.moments.structural is None else Updates()

    def update(self, point: Tensor) -> tuple[Tensor, LossTerms]:
        """A step of Fisher's scoring, as long as it lowers the loss, and the terms at ``point``."""
        equations = self.moments.structural
        if equations is None:
            return super().update(point)
        at, second = point.detach().numpy(), self._second
        with np.errstate(all="ignore"):  # a loss that is not finite is refused by whoever asked for the update
            scored = equations.scored(at, second)
            moved = equations.improved(scored, second)
        loss = torch.from_numpy(scored.loss)
        return torch.from_numpy(moved), LossTerms.of(loss, reconstruction=loss)

    def guessed(self, seed: int, *, first: bool) -> Tensor | None:
        """From the moments of complete rows."""
        return self.moments.guessed(self.structure.graph, seed, first=first)

    def curvature(self, point: Tensor, step: float = 1e-4, most: int = 1_000_000) -> Tensor | None:
        """Differences of the gradients of structural equations, where the model is written so.

        By a ``step`` in units of the data, with so many entries of moments at a time.
        """
        equations, second = self.moments.structural, self._second
        if equations is None:
            return None
        steps = step * np.eye(point.shape[1])
        tried = point.detach().numpy() + np.concatenate([steps, -steps])
        at_once = max(1, most // second[0].size)
        with np.errstate(all="ignore"):
            few = np.split(tried, range(at_once, len(tried), at_once))
            ahead, behind = np.split(np.concatenate([equations.gradient(one, second) for one in few]), 2)
        curvature = torch.from_numpy((ahead - behind) / (2 * step))
        return 0.5 * (curvature + curvature.T)

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> Units:
        """These rows; or all of them instead of fewer, since more do not cost more."""
        return self.anew(batch=self.batch.take(rows), seed=self.seed) if isinstance(rows, Tensor) else self

    def reweighted(self, factors: Tensor) -> MomentProblem:
        """Moments of the same rows with other weights."""
        return replace(self, moments=self._told_by_number.reweighted(factors), in_order=None)

    def simulated(self, point: Tensor, size: int, seed: int) -> Units:
        """Rows that the model makes, each with the gaps and covariates of a random row."""
        return self.anew(batch=self.drawn(point, size, seed), seed=seed)
