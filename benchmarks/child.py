"""Work in a process of its own: one thread, a limit of time, and its peak memory."""

import multiprocessing
import resource
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

KILOBYTE = 1024


@dataclass(frozen=True)
class Done(Generic[T]):
    """What a child returned.

    Attributes:
        value: Its result.
        peak: Most bytes that the process held at a time.
        base: Bytes that it held when everything was imported and its input was read.
    """

    value: T
    peak: int
    base: int


class ChildError(Exception):
    """Work in a child failed, or did not end in time."""


def in_child(work: Callable[[], T], *, seconds: float) -> Done[T]:
    """Run picklable work in a new process by one thread; end it after so many seconds of wall clock.

    Raises:
        ChildError: The work failed, or did not end.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(work, there))
    child.start()
    there.close()
    try:
        if not here.poll(seconds):
            raise ChildError(f"no end within {seconds:.0f} s")
        kind, *told = here.recv()
    except EOFError as error:
        raise ChildError("the process died") from error
    finally:
        child.kill()
        child.join()
    if kind == "failed":
        raise ChildError(told[0])
    return Done(*told)


def _run(work: Callable[[], T], answer: Connection) -> None:
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    base = memory("VmRSS")
    try:
        with threadpool_limits(1):
            value = work()
    except Exception as error:  # everything is reported to the parent
        traceback.print_exc()
        answer.send(("failed", f"{type(error).__name__}: {error}"))
        return
    answer.send(("done", value, memory("VmHWM"), base))


def memory(field: str) -> int:
    """Bytes that this process holds (``VmRSS``), or held at most (``VmHWM``).

    Where there is no /proc, both are the peak that the system reports, which may begin with the parent's.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) * KILOBYTE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KILOBYTE
