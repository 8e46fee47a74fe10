"""``otpdag fit``: from a model file and a table to a folder of results, by way of a checkpoint beside it.

The folder is written as a whole, and told to a reader without any of the heavy libraries.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.table import Table
from rich.text import Text

from otpdag.cli import console as c
from otpdag.errors import ApproximationWarning, ColumnTypeWarning, DataError, printable
from otpdag.files import check_writable, finish_transaction, folder_transaction, make_folder, only_writer, write_bytes

if TYPE_CHECKING:
    import pandas as pd

    from otpdag.answers.summary import Summary
    from otpdag.engine import FitResult
    from otpdag.model import Model

MOST_STARTS, MOST_STEPS = 10_000, 100_000_000  # beyond any use: such a number is a slip of the keyboard


def fit(
    model_file: c.ModelFilePath,
    data: c.DataPath,
    out_folder: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where results go.")],
    method: Annotated[
        Literal["auto", "likelihood", "transport", "paper", "entropic"], typer.Option(help="How to estimate.")
    ] = "auto",
    seed: c.RunSeed = 0,
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
    sequence: c.SequenceColumn = None,
    time: c.TimeColumn = None,
    separator: c.Separator = None,
    decimal: c.Decimal = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End with the best so far after so many seconds.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a fit that was stopped, from FOLDER.checkpoint.")
    ] = False,
    quiet: c.Quiet = False,
    force: c.FolderForce = False,
) -> None:
    """Estimate the parameters of a model from a table.

    Writes model.otp, params.json, summary.json, errors.csv, history.csv and restarts.csv; where asked for,
    intervals.csv and weights.csv, the share of each row that a robust fit used. `otpdag report` draws it. A fit that is
    stopped leaves FOLDER.checkpoint, from which --resume goes on to the same end.
    """
    from otpdag.cli.command_files import as_steps, table_at
    from otpdag.cli.model_file import read_model_file

    with make_folder(out_folder.absolute().parent), only_writer(out_folder):
        c.check_folder(out_folder, force=force)
        specification, table = read_model_file(model_file), table_at(data, separator, decimal)
        with warnings.catch_warnings(record=True) as doubts:
            warnings.simplefilter("always", ColumnTypeWarning)
            model = specification.build(table)
        options: dict[str, Any] = {"method": method, "seed": seed, "steps": steps, "restarts": restarts}
        options |= {"device": device, "robust": robust or False, "progress": not quiet, "time_limit": time_limit}
        options |= {"weights": weights, "source": _source(data, sequence=sequence, time=time)}
        check_writable(out_folder)  # before the work: a folder that cannot be made fails at once
        with kept_checkpoint(out_folder, resume=resume) as checkpoint:
            rows = as_steps(table, sequence, time)
            _fit_into(out_folder, model, rows, checkpoint, draws=intervals, quiet=quiet, doubts=doubts, **options)


def _fit_into(
    folder: Path,
    model: Model,
    rows: Any,
    checkpoint: Path | None,
    *,
    source: Mapping[str, str],
    draws: int | None,
    quiet: bool,
    doubts: Sequence[warnings.WarningMessage],
    **options: Any,
) -> None:
    from otpdag import engine

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("ignore", ApproximationWarning)  # a note says the same
        result = engine.fit(model, rows, checkpoint=checkpoint, **options)
        if result.status.interrupted:
            raise c.Interrupted
        bounds = None if draws is None else result.intervals(draws=draws, seed=options["seed"])
        written = write_run(result, folder, bounds, source=source)
        c.note_written(folder)
        ended = result.status.converged or result.status.failed
        _close_checkpoint(checkpoint, could_go_on=options["time_limit"] is not None and not ended)
    for message in dict.fromkeys(str(one.message) for one in (*doubts, *caught)):
        c.warn(message)
    if not quiet:
        print_fit(result, bounds)
        c.say(f"wrote {', '.join(written)} to {folder}; a page about it: otpdag report {folder}")


def _source(data: Path, **order: str | None) -> dict[str, str]:
    """What a report needs to find the table again, and to tell how the fit was run."""
    words = ["otpdag", *sys.argv[1:]] if Path(sys.argv[0]).stem == "otpdag" else []
    place = {} if data == c.STANDARD_INPUT else {"data": str(data), "data_sha256": c.file_hash(data)}
    named = {key: name for key, name in order.items() if name is not None}
    return place | named | ({"command": shlex.join(words)} if words else {})


# --- the checkpoint ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def kept_checkpoint(folder: Path, *, resume: bool) -> Iterator[Path | None]:
    """The checkpoint of a fit that writes to ``folder``, beside which it stands.

    It goes when the run has been written, unless that was not the end of the fit, and stays whatever else happens. A
    fit that begins anew sets an earlier one aside, and puts it back if it ends before it has one of its own. Where
    nothing can be written beside the folder there is none.

    Args:
        folder: The folder of the run.
        resume: Whether to go on from a checkpoint that is there.
    """
    path = folder.resolve().with_name(f"{folder.resolve().name}.checkpoint")
    if path.parent.is_dir() and not os.access(path.parent, os.W_OK):
        if resume:
            raise DataError(f"--resume needs {str(path)!r}, and that folder cannot be written")
        yield None
        return
    earlier = path.with_name(f"{path.name}.earlier")
    if earlier.exists() and not path.exists():  # that a killed fit had set aside
        earlier.replace(path)
    if resume and not path.exists():
        c.say(f"there is no {path}: the fit begins anew")
    if path.exists() and not resume:
        path.replace(earlier)
    with _terminations_raise():
        try:
            yield path
        except KeyboardInterrupt as stop:
            if not path.exists():
                raise
            code = stop.code if isinstance(stop, c.Interrupted) else c.INTERRUPTED
            raise c.Interrupted(f"{path} keeps how far it came; the same command with --resume goes on", code) from None
        finally:
            if earlier.exists() and not path.exists():
                earlier.replace(path)


def _close_checkpoint(path: Path | None, *, could_go_on: bool) -> None:
    """Remove the checkpoint of a run that was written; one of a fit that could go on stays."""
    if path is None:
        return
    path.with_name(f"{path.name}.earlier").unlink(missing_ok=True)
    if not could_go_on:
        path.unlink(missing_ok=True)
    elif path.exists():
        c.say(f"{path} keeps how far the fit came; --resume --force goes on from there")


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
    raise c.Interrupted(code=128 + number)


# --- a model in words -------------------------------------------------------------------------------------


def estimate_lines(model: Model, intervals: pd.DataFrame | None = None) -> list[list[str]]:
    """For each number of a fitted model: node, parameter, place, value, interval if there is one, whether fixed."""
    from otpdag.tables import estimates, interval_ends, number

    table, lines = estimates(model), []
    for row, ends in zip(table.itertuples(index=False), interval_ends(table, intervals), strict=True):
        numbers = [float(str(row.value)), *(() if intervals is None else ends)]
        places = (str(row.node), str(row.parameter), str(row.at))
        lines.append([*places, *map(number, numbers), "fixed" if row.fixed else ""])
    return lines


def lines_table(lines: Sequence[Sequence[str]], most: int = 200) -> Table:
    """So many estimates, a name where it changes."""
    table = c.plain_table("node", "parameter", "at", right=("estimate", "lower", "upper")[: len(lines[0]) - 4])
    table.add_column("", no_wrap=True)
    for before, line in pairwise([[""] * 2, *lines[:most]]):
        node, parameter, *rest = (Text(printable(cell, keep="")) for cell in line)
        same = line[0] == before[0]
        table.add_row("" if same else node, "" if same and line[1] == before[1] else parameter, *rest)
    if len(lines) > most:
        table.add_row("...", "", f"and {len(lines) - most} more, in params.json")
    return table


def words_of(model: Model) -> dict[str, Any]:
    """A model as ``otpdag show`` prints it."""
    graph = model.graph
    described = {
        "edges": [*map(list, graph.edges), *([edge.parent, edge.child, edge.by] for edge in graph.lags)],
        "hidden": list(graph.hidden),
        "nodes": {node: type(mechanism).__name__ for node, mechanism in model.mechanisms.items()},
        "params": model.params() if model.is_fitted else None,
    }
    return {"text": str(model), "described": described, "lines": estimate_lines(model) if model.is_fitted else []}


def kept_words(path: Path) -> dict[str, Any] | None:
    """The words that are kept beside a saved model, for it takes seconds to load one.

    None where there are none, or they are another model's: the model itself says what is wrong, or all that there is.
    """
    if path.is_dir():
        finish_transaction(path, c.RUN_FILES)
    archive = path / "model.otp" if path.is_dir() else path
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads((archive.parent / "shown.json").read_bytes())
        whole = all(len(line) == 5 and all(isinstance(cell, str) for cell in line) for line in kept["lines"])
        if whole and isinstance(kept["text"], str) and kept["model_sha256"] == c.file_hash(archive):
            return {key: kept[key] for key in ("text", "described", "lines")}
    return None


def print_words(words: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what :func:`words_of` tells."""
    if as_json:
        c.write_out(c.json_text(words["described"]))
        return
    console = c.out()
    console.print(words["text"], markup=False)
    if words["lines"]:
        console.print()
        console.print(lines_table(words["lines"]))


def print_fit(result: FitResult, bounds: pd.DataFrame | None) -> None:
    """How a fit ended, in a line or two, its notes, and the estimates."""
    console = c.out()
    kept = next((r.number + 1 for r in result.restarts if r.kept), 1)
    steps = sum(len(stage.losses) for stage in result.stages) or len(result.history)
    details = (
        f": {result.status.reason} (method {result.method.name}, loss {result.loss:.5g}, {steps} steps, start "
        f"{kept} of {len(result.restarts)}, {result.rows_used:,} rows, {result.seconds:.1f} s)"
    )
    state = Text(result.status.name, style="bold green" if result.status else "bold yellow")
    console.print(state + Text(details, style="none"))
    for note in result.notes:
        console.print(printable(note), markup=False)
    console.print(lines_table(estimate_lines(result.model, bounds)))


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
    with folder_transaction(folder, c.RUN_FILES) as staged:
        errors = _standard_errors(result)
        for name, table in _tables(result, bounds, errors).items():
            text = table.to_csv(index=name == "intervals.csv", lineterminator="\n")
            write_bytes(staged / name, text.encode("utf-8"))
        summary = {**_summary(result, errors), **(source or {})}
        if bounds is not None:
            summary["interval_level"] = bounds.attrs.get("level")
        for name, content in (("params.json", result.model.params()), ("summary.json", summary)):
            write_bytes(staged / name, c.json_text(content).encode("utf-8"))
        result.model.save(staged / "model.otp")
        words = {"model_sha256": c.file_hash(staged / "model.otp")} | words_of(result.model)
        write_bytes(staged / "shown.json", c.json_text(words).encode("utf-8"))
        written = {path.name for path in staged.iterdir()}
    return [name for name in c.RUN_FILES if name in written]


def _tables(result: FitResult, bounds: pd.DataFrame | None, errors: Summary | None) -> dict[str, pd.DataFrame]:
    from pandas import DataFrame

    starts = [(r.number, r.seed, r.short_loss, r.loss, r.kept) for r in result.restarts]
    weights = result.row_weights
    tables = {
        "history.csv": DataFrame(list(result.history)),
        "restarts.csv": DataFrame(starts, columns=["number", "seed", "short_loss", "loss", "kept"]),
        "weights.csv": None if weights is None else DataFrame({"row": range(len(weights)), "weight": weights.round(6)}),
        "intervals.csv": bounds,
        "errors.csv": errors.table if errors is not None and errors.table["std_error"].notna().any() else None,
    }
    return {name: table for name, table in tables.items() if table is not None}


def _standard_errors(result: FitResult, most_work: float = 2e7) -> Summary | None:
    """The summary with its standard errors, without them where they would take longer than a fit should; it says so.

    The work is rows times points times parameters: ``most_work`` is some ten seconds of it. There is none of a fit that
    failed.
    """
    problem = result.problem
    if problem is None or result.status.failed:
        return None
    size = sum(math.prod(shape) for shape in problem.shapes.values())
    if problem.rows * problem.pace.points_per_row * size <= most_work:
        return result.summary()
    summary = result.summary(errors="none")
    why = "no standard errors: they would take long; `otpdag summary` computes them, `--intervals` resamples rows"
    return replace(summary, warnings=(*summary.warnings, why))


def _summary(result: FitResult, errors: Summary | None) -> dict[str, Any]:
    from otpdag import __version__

    facts: dict[str, Any] = {}
    if errors is not None:
        told = {name: errors.facts[name] for name in ("log-likelihood", "AIC", "BIC") if name in errors.facts}
        facts = told | ({} if errors.fit_indices is None else errors.fit_indices.facts())
    status = result.status
    return {
        "otpdag": __version__,
        "method": result.method.name,
        "converged": status.converged,
        "reason": status.reason,
        "advice": status.advice,
        "status": status.name,
        "approximate": status.approximate,
        "loss": result.loss,
        "rows": result.rows_used,
        "steps": len(result.history),
        "starts": len(result.restarts),
        "seed": result.seed,
        "seconds": round(result.seconds, 3),
        "hidden": list(result.model.graph.hidden),
        "level": None if errors is None else errors.level,
        "notes": [note for note in (result.notes if errors is None else errors.warnings) if note != str(status)],
        **facts,
    }
