"""``otpdag fit``: from a model file and a table to a folder of results, by way of a checkpoint beside it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from otpdag.cli.console import (
    INTERRUPTED,
    DataPath,
    FolderForce,
    Interrupted,
    ModelFilePath,
    Quiet,
    RunSeed,
    SequenceColumn,
    TimeColumn,
    check_folder,
    log_lines,
    note_written,
    say,
    warn,
)
from otpdag.errors import ApproximationWarning, ColumnTypeWarning, ConvergenceWarning, DataError, ModelError
from otpdag.files import check_writable, make_folder

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from otpdag.data import Sequences
    from otpdag.model import Model

MOST_STARTS, MOST_STEPS = 10_000, 100_000_000  # beyond any use: such a number is a slip of the keyboard


def fit(
    model_file: ModelFilePath,
    data: DataPath,
    out_folder: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where results go.")],
    method: Annotated[
        Literal["auto", "likelihood", "transport", "paper", "entropic"], typer.Option(help="How to estimate.")
    ] = "auto",
    seed: RunSeed = 0,
    restarts: Annotated[
        int | None, typer.Option(min=1, max=MOST_STARTS, help="Number of starts; the best is continued.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, max=MOST_STEPS, help="Most steps of the optimiser.")] = None,
    weights: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column with a weight for each row.")] = None,
    robust: Annotated[
        Literal["outliers", "misfit"] | None,
        typer.Option(help="Leave out rows that do not fit, or bear a model that is wrong."),
    ] = None,
    intervals: Annotated[
        int | None,
        typer.Option(min=10, max=MOST_STARTS, metavar="DRAWS", help="Bootstrap intervals from so many resampled fits."),
    ] = None,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", metavar="SECONDS", help="End with the best so far after so many seconds."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a fit that was stopped, from FOLDER.checkpoint.")
    ] = False,
    quiet: Quiet = False,
    force: FolderForce = False,
) -> None:
    """Estimate the parameters of a model from a table.

    Writes model.otp, params.json, summary.json, history.csv, restarts.csv, graph.png and learning.png; where asked for,
    intervals.csv and weights.csv, the share of each row that a robust fit used. A fit that is stopped leaves
    FOLDER.checkpoint, from which --resume goes on to the same end.
    """
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device):
        raise ModelError(f"--device must be cpu, cuda or cuda:N; got {device!r}")
    check_folder(out_folder, force=force)
    asked = _Asked.of(model_file, data, weights, sequence, time)
    check_writable(out_folder)  # before the work: a folder that cannot be made fails at once
    options: dict[str, Any] = {"method": method, "seed": seed, "steps": steps, "restarts": restarts, "device": device}
    options |= {"robust": robust or False, "progress": False if quiet else None, "time_limit": time_limit}
    with log_lines(quiet=quiet), kept_checkpoint(out_folder, resume=resume) as checkpoint:
        asked.fit_into(out_folder, checkpoint, options, draws=intervals, quiet=quiet)


@dataclass(frozen=True)
class _Asked:
    """What is fitted: the model of a file, rows or sequences, their weights, and what was doubtful about columns."""

    model: Model
    rows: pd.DataFrame | Sequences
    weights: NDArray[np.float64] | str | None
    doubts: tuple[str, ...]
    source: dict[str, str]

    @classmethod
    def of(cls, model_file: Path, data: Path, weights: str | None, sequence: str | None, time: str | None) -> _Asked:
        from otpdag.cli.command_files import as_steps, table_at
        from otpdag.cli.model_file import read_model_file

        specification, table = read_model_file(model_file), table_at(data)
        with warnings.catch_warnings(record=True) as doubts:
            warnings.simplefilter("always", ColumnTypeWarning)
            model = specification.build(table)
        told = tuple(str(doubt.message) for doubt in doubts)
        rows = as_steps(table, sequence, time)
        return cls(model, rows, _weights(table, weights, model), told, _source(data, sequence=sequence, time=time))

    def fit_into(
        self, folder: Path, checkpoint: Path | None, options: dict[str, Any], *, draws: int | None, quiet: bool
    ) -> None:
        from otpdag import engine
        from otpdag.cli import run_folder

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            warnings.simplefilter("ignore", ApproximationWarning)  # a note says the same
            result = engine.fit(self.model, self.rows, weights=self.weights, checkpoint=checkpoint, **options)
            if result.status.interrupted:
                raise Interrupted
            bounds = None if draws is None else result.intervals(draws=draws, seed=options["seed"])
            written = run_folder.write_run(result, folder, bounds, source=self.source)
            note_written(folder)
            ended = result.status.converged or result.status.failed
            _close_checkpoint(checkpoint, could_go_on=options["time_limit"] is not None and not ended)
        for doubt in (*self.doubts, *(str(message.message) for message in caught)):
            warn(doubt)
        if not quiet:
            run_folder.print_fit(result, bounds)
            say(f"wrote {', '.join(written)} to {folder}")


def _weights(frame: pd.DataFrame, column: str | None, model: Model) -> NDArray[np.float64] | str | None:
    """Of a table the weights; of sequences the column's name, for a weight of each of them is read off its steps."""
    if column is None:
        return None
    if column not in frame.columns:
        names = ", ".join(map(str, frame.columns))
        raise DataError(f"--weights names column {column!r}, which the table does not have; it has {names}")
    if column in model.graph.nodes:
        raise ModelError(f"--weights names column {column!r}, which is a node of the model; weights need their own")
    try:
        each = frame[column].to_numpy(dtype=float)
    except (TypeError, ValueError):
        raise DataError(f"--weights column {column!r} must hold numbers") from None
    return column if model.graph.is_dynamic else each


def _source(data: Path, **order: str | None) -> dict[str, str]:
    """What a report needs to find the table again, and to tell how the fit was run."""
    from otpdag.cli.command_files import STANDARD_INPUT, file_hash

    words = ["otpdag", *sys.argv[1:]] if Path(sys.argv[0]).stem == "otpdag" else []
    place = {} if data == STANDARD_INPUT else {"data": str(data), "data_sha256": file_hash(data)}
    named = {key: name for key, name in order.items() if name is not None}
    return place | named | ({"command": shlex.join(words)} if words else {})


# --- the checkpoint ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def kept_checkpoint(folder: Path, *, resume: bool) -> Iterator[Path | None]:
    """The checkpoint of a fit that writes to ``folder``, beside which it stands.

    It stays where the work was stopped, by Ctrl-C, SIGTERM or a kill. It goes after an error, and when the run has been
    written, unless that was not the end of the fit. Where nothing can be written beside the folder there is none.

    Args:
        folder: The folder of the run.
        resume: Whether to go on from a checkpoint that is there; otherwise it is removed.
    """
    path = folder.resolve().with_name(f"{folder.resolve().name}.checkpoint")
    if path.parent.is_dir() and not os.access(path.parent, os.W_OK):
        if resume:
            raise DataError(f"--resume needs {str(path)!r}, and that folder cannot be written")
        yield None
        return
    with make_folder(path.parent), _terminations_raise():
        if resume and not path.exists():
            say(f"there is no {path}: the fit begins anew")
        if not resume:
            path.unlink(missing_ok=True)
        try:
            yield path
        except KeyboardInterrupt as stop:
            if not path.exists():
                raise
            code = stop.code if isinstance(stop, Interrupted) else INTERRUPTED
            raise Interrupted(f"{path} keeps how far it came; the same command with --resume goes on", code) from None
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _close_checkpoint(path: Path | None, *, could_go_on: bool) -> None:
    """Remove the checkpoint of a run that was written; one of a fit that could go on stays."""
    if path is None:
        return
    if not could_go_on:
        path.unlink(missing_ok=True)
    elif path.exists():
        say(f"{path} keeps how far the fit came; --resume --force goes on from there")


@contextlib.contextmanager
def _terminations_raise() -> Iterator[None]:
    """Let SIGTERM end the command like Ctrl-C does, in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(code=128 + number)
