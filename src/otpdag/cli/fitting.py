"""``otpdag fit``: from a model file and a table to a folder of results."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from otpdag import plots
from otpdag.cli.checkpoints import close_checkpoint, kept_checkpoint
from otpdag.cli.command_files import STANDARD_INPUT, as_steps, check_cells, csv_text, file_hash, table_at
from otpdag.cli.console import RUN_FILES, Interrupted, RowsFile, check_folder, log_lines, note_written, out, say, warn
from otpdag.cli.model_file import read_model_file
from otpdag.cli.printing import described, estimate_lines, estimates_table, headline
from otpdag.cli.showing import SHOWN, shown_bytes
from otpdag.data import Sequences
from otpdag.engine import FitResult
from otpdag.engine import fit as fit_model
from otpdag.errors import (
    ApproximationWarning,
    ColumnTypeWarning,
    ConvergenceWarning,
    DataError,
    ModelError,
    printable,
)
from otpdag.files import check_writable, folder_transaction, write_bytes
from otpdag.model import Model
from otpdag.uncertainty import Summary

MOST_WORK_FOR_ERRORS = 20_000_000
"""Rows times points times parameters beyond which a run has no standard errors: some ten seconds."""

FACTS = ("log-likelihood", "AIC", "BIC", "chi-square", "degrees of freedom", "p-value", "CFI", "TLI", "RMSEA")
"""Of the summary that are kept in ``summary.json``."""


def fit_to_folder(
    model_file: Path,
    data: RowsFile,
    out_folder: Path,
    *,
    method: str = "auto",
    seed: int = 0,
    restarts: int | None = None,
    steps: int | None = None,
    weights: str | None = None,
    robust: str | None = None,
    intervals: int | None = None,
    device: str = "cpu",
    time_limit: float | None = None,
    resume: bool = False,
    quiet: bool = False,
    force: bool = False,
) -> None:
    """Fit the model of a file to a table; print the estimates and write a folder of results."""
    _check_device(device)
    check_folder(out_folder, force=force)
    asked = _asked(model_file, data, weights)
    check_writable(out_folder)  # before the work: a folder that cannot be made fails at once
    with (
        log_lines(quiet=quiet),
        kept_checkpoint(out_folder, resume=resume) as checkpoint,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", ConvergenceWarning)
        warnings.simplefilter("ignore", ApproximationWarning)  # a note says the same
        result = fit_model(
            asked.model,
            asked.rows,
            method=method,
            seed=seed,
            steps=steps,
            restarts=restarts,
            weights=asked.weights,
            robust=False if robust is None else robust,
            device=device,
            progress=False if quiet else None,
            checkpoint=checkpoint,
            time_limit=time_limit,
        )
        if result.status.interrupted:
            raise Interrupted
        bounds = None if intervals is None else result.intervals(draws=intervals, seed=seed)
        written = write_run(result, out_folder, bounds, source=_source(data))
        note_written(out_folder)
        ended = result.status.converged or result.status.failed
        close_checkpoint(checkpoint, could_go_on=time_limit is not None and not ended)
    for doubt in (*asked.doubts, *(str(message.message) for message in caught)):
        warn(doubt)
    if not quiet:
        _print_estimates(result, bounds)
        say(f"wrote {', '.join(written)} to {out_folder}")


@dataclass(frozen=True)
class _Asked:
    """What is fitted: the model of a file, rows or sequences, their weights, and what was doubtful about columns."""

    model: Model
    rows: pd.DataFrame | Sequences
    weights: NDArray[np.float64] | str | None
    doubts: tuple[str, ...]


def _asked(model_file: Path, data: RowsFile, weights: str | None) -> _Asked:
    specification, table = read_model_file(model_file), table_at(data.path)
    with warnings.catch_warnings(record=True) as doubts:
        warnings.simplefilter("always", ColumnTypeWarning)
        model = specification.build(table)
    check_cells(table, model)
    told = tuple(str(doubt.message) for doubt in doubts)
    return _Asked(model, as_steps(table, data), _weights(table, weights, model), told)


def _print_estimates(result: FitResult, bounds: pd.DataFrame | None) -> None:
    console = out()
    console.print(headline(result))
    for note in result.notes:
        console.print(printable(note), markup=False)
    console.print(estimates_table(result.model, bounds))


def _check_device(device: str) -> None:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device):
        raise ModelError(f"--device must be cpu, cuda or cuda:N; got {device!r}")


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


# --- the folder -------------------------------------------------------------------------------------------


def write_run(
    result: FitResult, folder: Path, bounds: pd.DataFrame | None = None, *, source: Mapping[str, str] | None = None
) -> list[str]:
    """Write everything that a fit left behind, all of it or nothing; the names of the files.

    Args:
        result: The end of the fit.
        folder: Where to. An earlier run there is replaced as a whole, other files stay.
        bounds: Intervals, where they were asked for.
        source: Where the data came from and by which command, for the summary.
    """
    with folder_transaction(folder, RUN_FILES) as staged:
        for name, content in _run_files(result, bounds, source or {}).items():
            write_bytes(staged / name, content)
        result.model.save(staged / "model.otp")
        archive = (staged / "model.otp").read_bytes()
        lines = estimate_lines(result.model) if result.model.is_fitted else []
        write_bytes(staged / SHOWN, shown_bytes(archive, str(result.model), described(result.model), lines))
        written = {path.name for path in staged.iterdir()}
    return [name for name in RUN_FILES if name in written]


def _run_files(result: FitResult, bounds: pd.DataFrame | None, source: Mapping[str, str]) -> dict[str, bytes]:
    starts = [(r.number, r.seed, r.short_loss, r.loss, r.kept) for r in result.restarts]
    tables = {
        "history.csv": csv_text(pd.DataFrame(list(result.history))),
        "restarts.csv": csv_text(pd.DataFrame(starts, columns=["number", "seed", "short_loss", "loss", "kept"])),
    }
    if result.row_weights is not None:
        weights = pd.DataFrame({"row": range(len(result.row_weights)), "weight": result.row_weights.round(6)})
        tables["weights.csv"] = csv_text(weights)
    if bounds is not None:
        tables["intervals.csv"] = csv_text(bounds, index=True)
    errors = _standard_errors(result)
    if errors is not None:
        tables["errors.csv"] = csv_text(errors.table)
    kept = next((r.number for r in result.restarts if r.kept), None)
    return (
        {name: text.encode("utf-8") for name, text in tables.items()}
        | {
            "params.json": _json(_plain(result.model.params())),
            "summary.json": _json(_summary(result, errors) | dict(source)),
            "graph.png": _png(plots.draw_graph(result.model.graph)),
        }
        | _learning(result, kept)
    )


def _learning(result: FitResult, kept: int | None) -> dict[str, bytes]:
    """The curve of a search; where nothing is to be learned there is none."""
    if not any(stage.losses for stage in result.stages):
        return {}
    return {"learning.png": _png(plots.search_curve(result.stages, kept=kept))}


def _source(data: RowsFile) -> dict[str, str]:
    """What a report needs to find the table again, and to tell how the fit was run."""
    words = ["otpdag", *sys.argv[1:]] if Path(sys.argv[0]).stem == "otpdag" else []
    command = {"command": shlex.join(words)} if words else {}
    order = {key: name for key, name in (("sequence", data.sequence), ("time", data.time)) if name is not None}
    place = {} if data.path == STANDARD_INPUT else {"data": str(data.path), "data_sha256": file_hash(data.path)}
    return {**place, **order, **command}


def _standard_errors(result: FitResult) -> Summary | None:
    """The summary with its standard errors; None where they would take longer than a fit should, or there are none."""
    problem = result.problem
    if problem is None or result.status.failed:
        return None
    size = sum(math.prod(shape) for shape in problem.shapes.values())
    if problem.rows * problem.pace.points_per_row * size > MOST_WORK_FOR_ERRORS:
        return None
    summary = result.summary()
    return summary if summary.table["std_error"].notna().any() else None


def _summary(result: FitResult, errors: Summary | None) -> dict[str, Any]:
    from otpdag import __version__

    facts = {} if errors is None else {name: errors.all_facts().get(name) for name in FACTS}
    notes = [note for note in (result.notes if errors is None else errors.warnings) if note != str(result.status)]

    return {
        "otpdag": __version__,
        "method": result.method.name,
        "converged": result.status.converged,
        "reason": result.status.reason,
        "advice": result.status.advice,
        "status": result.status.name,
        "approximate": result.status.approximate,
        "loss": result.loss,
        "rows": result.rows_used,
        "steps": len(result.history),
        "starts": len(result.restarts),
        "seed": result.seed,
        "seconds": round(result.seconds, 3),
        "hidden": list(result.model.graph.hidden),
        "notes": notes,
        **{name: value for name, value in facts.items() if value is not None},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _known(value: Any) -> Any:
    """The same with null for what is not a finite number: JSON knows no other word for it."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_known(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(content: Any) -> bytes:
    return (json.dumps(_known(content), indent=1, allow_nan=False) + "\n").encode("utf-8")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
