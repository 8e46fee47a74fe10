"""What a fit shows while it runs: a progress bar, a history, and the user's callbacks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["Callback", "Monitor"]

Callback = Callable[[dict[str, float]], bool | None]
"""Receives the latest record of the history; returning True stops the fit."""


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
                console=Console(stderr=True),
            )
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def stage(self, name: str, steps: int) -> None:
        """Begin a stage of the fit."""
        if self._progress is not None:
            self._finish_bar()
            self._task = self._progress.add_task(name, total=steps, loss="")

    def _finish_bar(self) -> None:
        if self._progress is not None and self._task is not None:
            done = self._progress.tasks[self._task].completed
            self._progress.update(self._task, total=done)

    def record(self, stage: str, step: int, terms: dict[str, float], *, keep: bool) -> bool:
        """Take note of a step; True asks the optimiser to stop."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step + 1, loss=f"{terms['loss']:.6g}")
        if not keep:
            return False
        entry = {"step": float(len(self.history)), **terms, "seconds": time.perf_counter() - self.began}
        self.history.append(entry)
        answers = [callback(entry) for callback in self.callbacks]  # every callback sees every record
        return any(bool(answer) for answer in answers)
