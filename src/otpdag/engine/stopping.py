"""Reasons to end a fit before its end: Ctrl-C, a request to terminate, a budget of seconds that is used up.

A signal is only noted; the fit looks after every step, keeps what it has, and ends in order. Whoever asks a second time
gets what Python does by itself: ``KeyboardInterrupt``, or the end of the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from enum import Enum
from types import FrameType
from typing import Any

__all__ = ["Cause", "Stopping"]


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
