"""What a fit shows while it runs (a progress bar or lines, a history, callbacks), and what ends it before its end.

That may be Ctrl-C, a request to terminate, or a budget of seconds that is used up. A signal is only noted; the fit
looks after every step, keeps what it has, and ends in order. Whoever asks a second time gets what Python does by
itself: ``KeyboardInterrupt``, or the end of the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from otpdag.errors import ModelError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Cause(Enum):
    """What ended a fit early."""

    CALLBACK = "a callback stopped the fit"
    INTERRUPT = "the fit was interrupted"
    TIME = "the time was up"


class Stopping:
    """Says whether a fit shall end now.

    Args:
        seconds: The budget, from now on; None for no limit.

    >>> Stopping().cause is None, Stopping(seconds=0.0).cause
    (True, <Cause.TIME: 'the time was up'>)
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._cause: Cause | None = None
        self._received: int | None = None
        self._before: Mapping[int, Any] = {}

    @property
    def cause(self) -> Cause | None:
        """Why to end; None to go on. A cause stays."""
        if self._cause is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self._cause = Cause.TIME
        return self._cause

    def is_late(self, share: float, least: float = 0.0) -> bool:
        """Whether more than this share of the budget, and so many seconds, have gone by since it was used up."""
        if self._deadline is None or self.seconds is None:
            return False
        return time.monotonic() >= self._deadline + max(share * self.seconds, least)

    def stop(self, cause: Cause) -> None:
        """Ask for the end; the first cause counts."""
        self._cause = self._cause or cause

    @contextlib.contextmanager
    def listening(self, *, to_terminate: bool) -> Iterator[None]:
        """Take note of Ctrl-C and, where asked to, of SIGTERM, which is sent again when the fit has ended.

        Signals reach the main thread only, and handlers that are not Python's own are somebody else's business.

        Args:
            to_terminate: Whether SIGTERM lets the fit end in order first: it has something to write.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        replaced: dict[int, Any] = {}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            replaced[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)
        if to_terminate and signal.getsignal(signal.SIGTERM) is not None:
            replaced[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        self._before = replaced
        try:
            yield
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)
            if self._received == signal.SIGTERM:
                os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
            return
        self._received = number
        self.stop(Cause.INTERRUPT)


# receives the latest record of the history; returning True stops the fit
Callback = Callable[[dict[str, float]], bool | None]

LINE_SECONDS = 10.0  # how often there is a line where there is no terminal

log = logging.getLogger("otpdag")


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

    Where there is no terminal, the logger ``otpdag`` gets a line every ten seconds that tells how far the fit is; if
    ``show`` is True, standard error gets it as well, and one for every stage.

    Args:
        show: True or False, or None for "only if standard error is a terminal".
        callbacks: Called with every record.
        stopping: Says whether the fit shall end now.
    """

    def __init__(
        self, *, show: bool | None = None, callbacks: Sequence[Callback] = (), stopping: Stopping | None = None
    ) -> None:
        terminal = sys.stderr.isatty()
        self.show = terminal and show is not False
        self.lines = bool(show) and not terminal
        self.callbacks = tuple(callbacks) if isinstance(callbacks, Iterable) else (callbacks,)
        if not all(map(callable, self.callbacks)):
            raise ModelError(f"callbacks must be functions of a record; got {callbacks!r:.100}")
        self.stopping = stopping or Stopping()
        self.history: list[dict[str, float]] = []
        self.stages: list[Stage] = []
        self._objectives: list[object] = []
        self.began = time.perf_counter()
        self._said = self.began
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self.show:
            from rich.console import Console  # only a terminal needs it
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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

    def __exit__(self, *raised: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    @property
    def stopped(self) -> bool:
        """Whether the fit shall end now."""
        return self.stopping.cause is not None

    def stage(self, name: str, steps: int, starts: Iterable[int] = (0,), objective: object = None) -> None:
        """Begin a stage of the fit, in which these starts take part; stages that share an objective compare."""
        known = next((number for number, other in enumerate(self._objectives) if other is objective), None)
        if known is None or objective is None:
            known = len(self._objectives)
            self._objectives.append(objective)
        self.stages.append(Stage(name, tuple(starts), objective=known))
        if self.lines:
            print(f"{name}: at most {steps} steps", file=sys.stderr, flush=True)
        if self._progress is not None:
            if self._task is not None:  # its bar is full, however few steps it took
                self._progress.update(self._task, total=self._progress.tasks[self._task].completed)
            self._task = self._progress.add_task(name, total=steps, loss="")

    def record(
        self, stage: str, step: int, terms: dict[str, float], *, keep: bool, losses: Sequence[float] = ()
    ) -> bool:
        """Take note of a step, with the losses of all starts of its stage; True asks the optimiser to stop."""
        if losses and self.stages:
            self.stages[-1].losses.append(tuple(losses))
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step + 1, loss=f"{terms['loss']:.6g}")
        self._tell(stage, step, terms["loss"])
        if keep:
            entry = {"step": float(len(self.history)), **terms, "seconds": time.perf_counter() - self.began}
            self.history.append(entry)
            answers = [callback(entry) for callback in self.callbacks]  # every callback sees every record
            if any(bool(answer) for answer in answers):
                self.stopping.stop(Cause.CALLBACK)
        return self.stopped

    def _tell(self, stage: str, step: int, loss: float) -> None:
        """A line, if the last one was a while ago."""
        now = time.perf_counter()
        if self.show or now - self._said < LINE_SECONDS:
            return
        self._said = now
        line = f"{stage}: step {step + 1}, loss {loss:.6g}, {now - self.began:.0f} s"
        log.info(line)
        if self.lines:
            print(line, file=sys.stderr, flush=True)
