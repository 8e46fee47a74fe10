"""A clock of processor time that stops while a fit is looked at."""

import time

import numpy as np

from baselines.base import Array


class Course:
    """Topics and seconds after each iteration; the time between ``look`` and its end is not counted.

    Args:
        keep: Whether to keep the topics; without it only the clock runs.
    """

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._topics: list[Array] = []
        self._seconds: list[float] = []
        self._begin = time.process_time()
        self._idle = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the beginning, without those spent looking."""
        return time.process_time() - self._begin - self._idle

    def look(self, topics) -> None:
        """Keep what ``topics()`` returns."""
        if not self._keep:
            return
        stopped = time.process_time()
        self._seconds.append(stopped - self._begin - self._idle)
        self._topics.append(topics())
        self._idle += time.process_time() - stopped

    @property
    def history(self) -> dict[str, Array]:
        """``topics`` (iterations, K, words) and ``seconds`` (iterations,); empty if nothing was kept."""
        return {"topics": np.stack(self._topics), "seconds": np.array(self._seconds)} if self._topics else {}
