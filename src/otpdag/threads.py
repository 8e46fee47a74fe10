"""Bound the threads of a fit, or of inference, by the size of the work, and put them back afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

ELEMENTS_WORTH_A_THREAD = 5_000_000  # of a tensor: below, starting a thread costs more than it saves

T = TypeVar("T")

_allowed: ContextVar[int] = ContextVar("threads that torch had before they were bounded", default=1)


@contextmanager
def bounded_threads(elements: int) -> Iterator[None]:
    """Use one thread for small tensors: waking a second one costs more than it saves.

    What has several large pieces may still share them out, :func:`in_order`.
    """
    before = torch.get_num_threads()
    outer = _allowed.set(max(before, _allowed.get()))
    torch.set_num_threads(before if elements >= ELEMENTS_WORTH_A_THREAD else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _allowed.reset(outer)


def in_order(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Results of tasks in their order, each by one thread, as many at a time as torch had threads before a fit.

    Every result is the one that a single thread would find, to the last digit; at most one task more than there are
    threads is held. Elsewhere than within :func:`bounded_threads` one task follows another.

    >>> list(in_order([lambda: 1, lambda: 2, lambda: 3]))
    [1, 2, 3]
    """
    threads = _allowed.get()
    if threads < 2:
        yield from (task() for task in tasks)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that begin from here on have it, too
    try:
        with ThreadPoolExecutor(threads) as pool:
            waiting: deque[Future[T]] = deque()
            for task in tasks:
                waiting.append(pool.submit(task))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(before)
