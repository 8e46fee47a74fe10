"""What a fit shows while it runs: a progress bar, a history, and the user's callbacks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["Callback", "Monitor", "Stage"]

Callback = Callable[[dict[str, float]], bool | None]
"""Receives the latest record of the history; returning True stops the fit."""


@dataclass(frozen=True)
class Stage:
    """One stage of the search: which starts took part, and their losses at each of its steps.

    Losses compare between stages with the same number ``objective`` only: short runs, for instance, may see a part of
    the rows.
    """

    name: str
    starts: tuple[int, ...]
    losses: list[tuple[float, ...]] = field(default_factory=list)
    objective: int = 0


class Monitor:
    """Collects records; shows a bar on a terminal unless told not to.

    Args:
        show: True or False, or None for "only if standard error is a terminal".
        callbacks: Called with every record.
    """

    def __init__(self, *, show: bool | None = None, callbacks: Sequence[Callback] = ()) -> None:
        self.show = sys.stderr.isatty() if show is None else show
        self.callbacks = tuple(callbacks)
        self.history: list[dict[str, float]] = []
        self.stages: list[Stage] = []
        self._objectives: list[object] = []
        self.stopped = False
        self.began = time.perf_counter()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self.show:
            self._progress = Progress(
                TextColumn("{task.description:<24}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TimeElapsedColumn(),
                # as text in notebooks too, where rich would ask for ipywidgets
                console=Console(stderr=True, force_jupyter=False),
            )
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def stage(self, name: str, steps: int, starts: Iterable[int] = (0,), objective: object = None) -> None:
        """Begin a stage of the fit, in which these starts take part; stages that share an objective compare."""
        known = next((number for number, other in enumerate(self._objectives) if other is objective), None)
        if known is None or objective is None:
            known = len(self._objectives)
            self._objectives.append(objective)
        self.stages.append(Stage(name, tuple(starts), objective=known))
        if self._progress is not None:
            self._finish_bar()
            self._task = self._progress.add_task(name, total=steps, loss="")

    def _finish_bar(self) -> None:
        if self._progress is not None and self._task is not None:
            done = self._progress.tasks[self._task].completed
            self._progress.update(self._task, total=done)

    def record(
        self, stage: str, step: int, terms: dict[str, float], *, keep: bool, losses: Sequence[float] = ()
    ) -> bool:
        """Take note of a step, with the losses of all starts of its stage; True asks the optimiser to stop."""
        if losses and self.stages:
            self.stages[-1].losses.append(tuple(losses))
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step + 1, loss=f"{terms['loss']:.6g}")
        if not keep:
            return False
        entry = {"step": float(len(self.history)), **terms, "seconds": time.perf_counter() - self.began}
        self.history.append(entry)
        answers = [callback(entry) for callback in self.callbacks]  # every callback sees every record
        self.stopped = any(bool(answer) for answer in answers)
        return self.stopped
