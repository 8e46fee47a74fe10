"""Partitions of a Dask frame: on the workers of the current client, or one after another where there is none.

What is made of a partition stays on a worker as a future. The scheduler knows how each came about, so that what a
worker takes with it when it dies is made again on another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from otpdag.data.parts import LocalParts, Parts, Work
from otpdag.errors import DataError, OtpdagError

if TYPE_CHECKING:
    from distributed import Client, Future

__all__ = ["DaskParts", "dask_parts"]


def dask_parts(frame: Any) -> Parts:
    """The partitions of a Dask frame, in their order."""
    client = _current_client()
    if client is None:
        return LocalParts(lambda: (one.compute(scheduler="synchronous") for one in frame.to_delayed()))
    futures = client.compute(frame.to_delayed())
    return DaskParts(client, list(futures))


def _current_client() -> Client | None:
    try:
        from distributed import default_client
    except ImportError:
        return None
    try:
        return default_client()
    except ValueError:  # there is none
        return None


class DaskParts(Parts):
    """Futures of parts; work is sent to where they are."""

    def __init__(self, client: Client, futures: Sequence[Future]) -> None:
        self.client, self.futures = client, list(futures)

    def each(self, work: Work, *arguments: Any) -> Iterator[Any]:
        """All at once; results come in the order of the parts."""
        results = self._sent(work, arguments)
        try:
            yield from self.client.gather(results)
        except OtpdagError:
            raise
        except Exception as error:
            raise DataError(f"a partition could not be worked on: {type(error).__name__}: {error}") from error

    def mapped(self, work: Work, *arguments: Any, keep: bool) -> DaskParts:
        """Kept by the workers, whatever ``keep`` says: only they know their memory."""
        return DaskParts(self.client, self._sent(work, arguments))

    def only(self, numbers: Sequence[int]) -> DaskParts:
        """The futures of these."""
        return DaskParts(self.client, [self.futures[number] for number in numbers])

    def _sent(self, work: Work, arguments: tuple[Any, ...]) -> list[Future]:
        return [
            self.client.submit(work, part, number, *arguments, pure=False) for number, part in enumerate(self.futures)
        ]
