"""The result of a fit: how it ended, how it got there, and what each restart reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from otpdag.engine.bootstrap import BootstrapOptions, bootstrap_table
from otpdag.engine.method import Method
from otpdag.engine.monitor import Stage
from otpdag.engine.search import Restart
from otpdag.errors import ModelError
from otpdag.objective import Problem
from otpdag.structure import pack

if TYPE_CHECKING:
    from otpdag.model import Model

__all__ = ["FitResult", "Status"]


@dataclass(frozen=True)
class Status:
    """How a fit ended, and what to do about it.

    Attributes:
        converged: Whether the optimiser found an end.
        reason: Why it stopped.
        advice: What to do about it.
        approximate: Whether the loss is approximate where it could be exact, with a larger budget.
        failed: Whether there is no estimate: the loss or a parameter is not a finite number.
        interrupted: Whether Ctrl-C ended it; the model then holds the best so far.

    >>> str(Status(True, "the loss stopped changing"))
    'converged: the loss stopped changing'
    >>> str(Status(True, "the loss stopped changing", approximate=True))
    'converged, approximate: the loss stopped changing'
    """

    converged: bool
    reason: str
    advice: str = ""
    approximate: bool = False
    failed: bool = False
    interrupted: bool = False

    @property
    def name(self) -> str:
        """``"converged"``, ``"failed"``, ``"interrupted"`` or ``"not converged"``."""
        if self.converged or self.failed:
            return "converged" if self.converged else "failed"
        return "interrupted" if self.interrupted else "not converged"

    def __str__(self) -> str:
        head = self.name + (", approximate" if self.approximate else "")
        return f"{head}: {self.reason}" + (f" ({self.advice})" if self.advice else "")

    def __bool__(self) -> bool:
        return self.converged


@dataclass(frozen=True)
class FitResult:
    """What :func:`otpdag.fit` returns; the model it was given holds the estimates.

    Attributes:
        model: The fitted model.
        method: The method that ran, with all its settings.
        status: Whether it converged, why it stopped, and advice.
        loss: The objective at the end.
        history: One record for each step of the kept start: loss and its terms, and seconds.
        restarts: Every start with its loss; one is marked kept.
        rows_used: Rows of the table, none of which was dropped.
        seconds: Wall-clock time.
        seed: The seed that determines the run.
        stages: The stages of the search, each with the losses of all its starts step by step.
        row_weights: How much of each row a robust fit used; None if it was not robust.
        notes: What the user should know, for instance how many rows a robust fit left out, or what is approximate.
    """

    model: Model
    method: Method
    status: Status
    loss: float
    history: tuple[dict[str, float], ...]
    restarts: tuple[Restart, ...]
    rows_used: int
    seconds: float
    seed: int
    notes: tuple[str, ...] = field(default=())
    stages: tuple[Stage, ...] = field(default=(), repr=False)
    row_weights: NDArray[np.float64] | None = field(default=None, repr=False)
    problem: Problem | None = field(default=None, repr=False)

    @property
    def dropped(self) -> NDArray[np.int64]:
        """Numbers of the rows that a robust fit left out (weight below a half), counted from zero."""
        if self.row_weights is None:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self.row_weights < 0.5)

    def intervals(self, *, draws: int = 200, level: float = 0.9, seed: int = 0, jobs: int = 1) -> pd.DataFrame:
        """Bootstrap intervals of the parameters: the fit repeated on resampled rows, from the estimate on.

        Of sequences, whole ones are resampled; fewer than thirty are cut in pieces first.

        Args:
            draws: Number of resampled fits.
            level: Nominal coverage.
            seed: Determines the resamples.
            jobs: Processes that share the work; -1 takes all cores.

        Returns:
            A table indexed by node, parameter and index, with estimate, lower and upper end.
        """
        if self.problem is None or self.method.optimiser.is_stochastic:
            raise ModelError(f"intervals need a deterministic method; {self.method.name!r} draws noise at every step")
        raw = self.problem.structure.raw(self.model.fitted.naturals) | dict(self.model.fitted.phi)
        point = pack({key: raw[key] for key in self.problem.shapes})
        options = BootstrapOptions(draws=draws, level=level, seed=seed, jobs=jobs)
        return bootstrap_table(self.problem.in_units(), point, options)

    def __repr__(self) -> str:
        kept = next((r.number for r in self.restarts if r.kept), 0)
        return (
            f"FitResult({self.method.name}, {self.status}; loss {self.loss:.6g}, {len(self.history)} steps, "
            f"start {kept + 1} of {len(self.restarts)}, {self.rows_used} rows, {self.seconds:.1f} s)"
        )
