"""A journal of a search: what its runs reached, so that a fit that was stopped goes on where it was.

A search is a fixed sequence of runs, each a function of where the ones before ended. The journal keeps those ends and,
of the run that is under way, the optimiser's last snapshot. A run that is resumed reads the runs that are done instead
of running them, and comes to the same end, bit for bit. After somebody has asked for the end, runs are cut short; what
they reach is therefore never written. Data are recognised by a fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from otpdag.data.partitioned import Parts
from otpdag.engine.monitor import Monitor, Stage
from otpdag.engine.optimiser import Memory, Optimiser, Outcome, Progress, Run, Watch, as_memory, from_memory, under
from otpdag.errors import DataError
from otpdag.files import as_path, write_bytes
from otpdag.model import Model


def fingerprint(value: Any) -> str:
    """Twelve letters of a hash of everything that a value holds: arrays, tensors, and what is nested in dataclasses.

    Tables in parts are read through once. Models are left out, and so is everything else that has no content of its
    own, as functions have none.

    >>> one, other = np.arange(3.0), np.array([0.0, 1.0, 2.5])
    >>> fingerprint({"x": one}) == fingerprint({"x": one.copy()}), fingerprint({"x": one}) == fingerprint({"x": other})
    (True, False)
    """
    digest = hashlib.sha256()
    for piece in _pieces(value):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()[:12]


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield repr(value.tolist()).encode() if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Parts):
        yield from value.each(_digest)
    elif isinstance(value, str | bytes | int | float | None):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _pieces(item)
    elif isinstance(value, frozenset | set):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _pieces(item)
    elif is_dataclass(value) and not isinstance(value, type | Model):
        for field in fields(value):
            yield field.name.encode()
            yield from _pieces(getattr(value, field.name))
    elif not isinstance(value, Model):
        yield type(value).__name__.encode()


def _digest(part: pd.DataFrame, number: int) -> bytes:
    """A hash of a part's cells, in their order."""
    return hashlib.sha256(pd.util.hash_pandas_object(part, index=False).to_numpy().tobytes()).digest()


FORMAT = "otpdag checkpoint 2"


@dataclass
class Journal:
    """Runs runs, and keeps what they reached in a file, if there is one.

    Args:
        path: The file; without one nothing is kept.
        seconds: How often the run under way is written, at most.
        about: What the run is of, as words: a file of another run is refused.
    """

    path: Path | None = None
    seconds: float = 20.0
    about: Mapping[str, str] = field(default_factory=dict)
    _done: list[Outcome] = field(default_factory=list)
    _under_way: Memory | None = None
    _run: int = 0
    _written: float = field(default_factory=time.monotonic)
    _history: list[dict[str, float]] = field(default_factory=list)
    _stages: list[Stage] = field(default_factory=list)

    @classmethod
    def open(cls, path: str | Path | None, about: Mapping[str, str], seconds: float = 20.0) -> Journal:
        """The journal at ``path``, which goes on if the file is there."""
        if path is None:
            return cls()
        journal = cls(as_path(path), seconds, about)
        if journal.path is not None and journal.path.exists():
            journal._read(journal.path)
        return journal

    def restore(self, monitor: Monitor) -> None:
        """Put what was recorded before into the monitor."""
        if self._stages:
            monitor.history[:], monitor.stages[:] = self._history, self._stages

    @property
    def goes_on(self) -> bool:
        """Whether the next run was under way when the journal was written."""
        return self._under_way is not None and self._run == len(self._done)

    def run(self, run: Run, optimiser: Optimiser, monitor: Monitor, watch: Watch) -> tuple[Outcome, bool]:
        """Run a run, go on with it, or read where it ended; also whether it was read."""
        number, self._run = self._run, self._run + 1
        if number < len(self._done):
            outcome = self._done[number]
            self._check_size(outcome.point.shape[-1], run)
            return outcome, True
        if monitor.stopped:
            return optimiser.run(replace(run, steps=min(1, run.steps)), watch), False
        resume, self._under_way = self._under_way, None
        if resume is not None:
            self._check_size(int(resume["parameters"]), run)
        hurried = False

        def is_over() -> bool:
            nonlocal hurried
            hurried = hurried or monitor.stopped
            return hurried

        def watched(progress: Progress) -> bool:
            stop = watch(progress)
            if self.path is not None and not hurried and (stop or self._is_due()):
                self._under_way = {**progress.snapshot(), "parameters": torch.tensor(run.points.shape[-1])}
                self._write(monitor)
            return stop

        outcome = optimiser.run(replace(run, is_over=is_over), watched, resume)
        if self.path is not None and not monitor.stopped:
            self._done.append(outcome)
            self._under_way = None
            self._write(monitor)
        return outcome, False

    def _is_due(self) -> bool:
        return time.monotonic() - self._written > self.seconds

    def _check_size(self, parameters: int, run: Run) -> None:
        if parameters != run.points.shape[-1]:
            raise DataError(
                f"the checkpoint {str(self.path)!r} has {parameters} parameters, this model {run.points.shape[-1]}: it "
                "belongs to another model; choose another file"
            )

    # -- file ---------------------------------------------------------------------------------------------------------

    def _write(self, monitor: Monitor) -> None:
        """Write beside, and replace: the file is always a whole one."""
        if self.path is None:
            return
        tensors: dict[str, Tensor] = {}
        for number, outcome in enumerate(self._done):
            tensors |= {f"done.{number:03d}.{key}": value for key, value in _as_tensors(outcome).items()}
        tensors |= {f"now.{key}": value for key, value in (self._under_way or {}).items()}
        stages = [vars(stage) for stage in monitor.stages]
        metadata = {
            "format": FORMAT,
            "about": json.dumps(dict(self.about)),
            "records": json.dumps({"history": monitor.history, "stages": stages}),
        }
        content = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        write_bytes(self.path, save(content, metadata=metadata))
        self._written = time.monotonic()

    def _read(self, path: Path) -> None:
        if not path.is_file():  # a pipe would be waited for
            raise DataError(f"{str(path)!r} is not the checkpoint of a run: it is no file")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if metadata.get("format") != FORMAT:
                raise ValueError("it says so nowhere")
            records, about = json.loads(metadata["records"]), dict(json.loads(metadata["about"]))
            self._history = [dict(record) for record in records["history"]]
            self._stages = [
                Stage(one["name"], tuple(one["starts"]), [tuple(row) for row in one["losses"]], one["objective"])
                for one in records["stages"]
            ]
            numbers = sorted({key.split(".")[1] for key in tensors if key.startswith("done.")})
            self._done = [_outcome(under(tensors, f"done.{number}.")) for number in numbers]
            self._under_way = under(tensors, "now.") or None
        except (SafetensorError, Exception, RecursionError, MemoryError) as error:
            raise DataError(f"{str(path)!r} is not the checkpoint of a run: {error}") from None
        if about != dict(self.about):
            other = next(key for key in {**self.about, **about} if about.get(key) != self.about.get(key))
            raise DataError(
                f"the checkpoint {str(path)!r} belongs to another run: its {other} is {about.get(other)}, not "
                f"{self.about.get(other)}; choose another file, or remove it"
            )


def _as_tensors(outcome: Outcome) -> dict[str, Tensor]:
    return {**as_memory(outcome), **{f"memory.{key}": value for key, value in outcome.memory.items()}}


def _outcome(tensors: Mapping[str, Tensor]) -> Outcome:
    outcome = from_memory(Outcome, tensors, memory=under(tensors, "memory."))
    each = (len(outcome.point),)
    flags_fit = all(flag.shape == each and flag.dtype == torch.bool for flag in (outcome.converged, outcome.failed))
    if outcome.point.ndim != 2 or outcome.loss.shape != each or not flags_fit:
        raise ValueError("where a run ended does not fit together")
    return outcome
