"""The result of a fit: how it ended, how it got there, and what each restart reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from otpdag.engine.methods import Method
from otpdag.engine.monitor import Stage
from otpdag.engine.search import Restart

if TYPE_CHECKING:
    from otpdag.model import Model

__all__ = ["FitResult", "Status"]


@dataclass(frozen=True)
class Status:
    """How a fit ended, and what to do about it.

    >>> str(Status(True, "the loss stopped changing"))
    'converged: the loss stopped changing'
    """

    converged: bool
    reason: str
    advice: str = ""

    def __str__(self) -> str:
        head = "converged" if self.converged else "not converged"
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

    def __repr__(self) -> str:
        kept = next((r.number for r in self.restarts if r.kept), 0)
        return (
            f"FitResult({self.method.name}, {self.status}; loss {self.loss:.6g}, {len(self.history)} steps, "
            f"start {kept + 1} of {len(self.restarts)}, {self.rows_used} rows, {self.seconds:.1f} s)"
        )
