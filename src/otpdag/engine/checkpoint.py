"""A journal of a search: what its runs reached, so that a fit that was stopped goes on where it was.

A search is a fixed sequence of runs, each a function of where the ones before ended. The journal keeps those ends and,
of the run that is under way, the optimiser's last snapshot. A run that is resumed reads the runs that are done instead
of running them, and comes to the same end, bit for bit. After somebody has asked for the end, runs are cut short; what
they reach is therefore never written.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from otpdag.engine.monitor import Monitor, Stage
from otpdag.engine.optimiser import Memory, Outcome, Progress, Run, as_memory, from_memory
from otpdag.errors import DataError
from otpdag.numerics import under
from otpdag.safe_archive import read_bundle, refusing, write_bundle

WHAT = "otpdag checkpoint"
FORMAT = f"{WHAT} 5"


@dataclass
class Journal:
    """What the runs of a search reached, in a file.

    Args:
        path: The file; if it exists, the search goes on from there, and the monitor has what was recorded before.
        seconds: How often the run under way is written, at most.
        about: What the search is of, as words: a file of another one is refused.
        monitor: Has the records that are written along.
    """

    path: Path
    seconds: float
    about: Mapping[str, str]
    monitor: Monitor
    _done: list[Outcome] = field(default_factory=list)
    _under_way: Memory | None = None
    _run: int = 0
    _written: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Go on with a file that is there."""
        if self.path.exists():
            self._read()

    def next_run(self, run: Run) -> tuple[Outcome | None, Memory | None]:
        """Where the next run of the search ended, or how far it had come when the journal was written, if known."""
        number, self._run = self._run, self._run + 1
        outcome = self._done[number] if number < len(self._done) else None
        resume = None
        if outcome is None:
            resume, self._under_way = self._under_way, None
        parameters = held = run.points.shape[-1]
        if outcome is not None:
            held = outcome.point.shape[-1]
        elif resume is not None:
            held = int(resume["parameters"])
        if held != parameters:
            raise DataError(
                f"the checkpoint {str(self.path)!r} has {held} parameters, this model {parameters}: it belongs to "
                "another model; choose another file"
            )
        return outcome, resume

    def keep(self, progress: Progress, *, now: bool) -> None:
        """Write how far the run under way has come, now or if the file is old enough."""
        if now or time.monotonic() - self._written > self.seconds:
            self._under_way = {**progress.snapshot(), "parameters": torch.tensor(progress.points.shape[-1])}
            self._write()

    def end(self, outcome: Outcome) -> None:
        """Write where a run ended."""
        self._done.append(outcome)
        self._under_way = None
        self._write()

    # -- file ---------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        tensors: dict[str, Tensor] = {}
        for number, outcome in enumerate(self._done):
            held = as_memory(outcome) | {f"memory.{key}": value for key, value in outcome.memory.items()}
            tensors |= {f"done.{number:03d}.{key}": value for key, value in held.items()}
        tensors |= {f"now.{key}": value for key, value in (self._under_way or {}).items()}
        history, stages = self.monitor.history, self.monitor.stages
        tensors["history"] = torch.tensor([list(record.values()) for record in history], dtype=torch.float64)
        tensors |= {f"losses.{n}": torch.tensor(one.losses, dtype=torch.float64) for n, one in enumerate(stages)}
        state = {
            "format": FORMAT,
            "about": dict(self.about),
            "history": list(history[0]) if history else [],
            "stages": [[stage.name, stage.starts, stage.objective] for stage in stages],
        }
        try:
            write_bundle(self.path, "checkpoint.json", state, tensors)
        except DataError as error:  # the work goes on, and may still end well
            warnings.warn(f"the checkpoint {error}", UserWarning, stacklevel=2)
        self._written = time.monotonic()

    def _read(self) -> None:
        state, tensors = read_bundle(self.path, "checkpoint.json", WHAT, sealed=True)
        with refusing(self.path, WHAT):
            if state["format"] != FORMAT:
                raise ValueError("it is of another version")
            about = dict(state["about"])
            records = [dict(zip(state["history"], row, strict=True)) for row in tensors["history"].tolist()]
            stages = [
                Stage(str(name), tuple(starts), [tuple(row) for row in tensors[f"losses.{number}"].tolist()], objective)
                for number, (name, starts, objective) in enumerate(state["stages"])
            ]
            numbers = sorted({key.split(".")[1] for key in tensors if key.startswith("done.")})
            self._done = [_outcome(under(tensors, f"done.{number}.")) for number in numbers]
            self._under_way = under(tensors, "now.") or None
        if about != dict(self.about):
            other = next(key for key in {**self.about, **about} if about.get(key) != self.about.get(key))
            raise DataError(
                f"the checkpoint {str(self.path)!r} belongs to another run: its {other} is {about.get(other)}, not "
                f"{self.about.get(other)}; choose another file, or remove it"
            )
        self.monitor.history[:], self.monitor.stages[:] = records, stages


def _outcome(tensors: Mapping[str, Tensor]) -> Outcome:
    outcome = from_memory(Outcome, tensors, memory=under(tensors, "memory."))
    each = (len(outcome.point),)
    flags_fit = all(flag.shape == each and flag.dtype == torch.bool for flag in (outcome.converged, outcome.failed))
    if outcome.point.ndim != 2 or outcome.loss.shape != each or not flags_fit:
        raise ValueError("where a run ended does not fit together")
    return outcome
