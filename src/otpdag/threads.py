"""Bound the threads of a fit, or of inference, by the size of the work, and put them back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["bounded_threads"]

ELEMENTS_WORTH_A_THREAD = 5_000_000  # of a tensor: below, starting a thread costs more than it saves


@contextmanager
def bounded_threads(elements: int) -> Iterator[None]:
    """Use one thread for small tensors: waking a second one costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if elements >= ELEMENTS_WORTH_A_THREAD else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
