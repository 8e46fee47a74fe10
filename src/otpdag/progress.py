"""A bar on a terminal beside what is done part by part and takes seconds; what fits show is in ``engine/monitor``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Part = TypeVar("Part")


def shown_while_running(parts: Iterable[Part], name: str, total: int | None = None) -> Iterator[Part]:
    """The same parts; on a terminal with a bar of those that are left after a second, of ``total`` if that is known."""
    left, done, began = iter(parts), 0, time.monotonic()
    shown = sys.stderr.isatty()
    for part in left:
        yield part
        done += 1
        if shown and time.monotonic() - began > 1:
            break
    else:
        return
    from rich.console import Console
    from rich.progress import track

    remaining = None if total is None else total - done
    yield from track(left, name, remaining, console=Console(stderr=True, force_jupyter=False), transient=True)
