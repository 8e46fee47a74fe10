"""``otpdag fit``: its arguments. The work is in :mod:`otpdag.cli.fitting`, imported when it is wanted."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from otpdag.cli.console import LONGEST_SEED, RowsFile

MOST_STARTS, MOST_STEPS = 10_000, 100_000_000  # beyond any use: such a number is a slip of the keyboard


class Robust(StrEnum):
    """Against what an estimate shall be robust."""

    outliers = "outliers"
    misfit = "misfit"


class MethodName(StrEnum):
    """The methods by name."""

    auto = "auto"
    entropic = "entropic"
    transport = "transport"
    paper = "paper"


def fit(
    model_file: Annotated[Path, typer.Argument(metavar="MODEL.YAML", help="Graph and mechanisms.")],
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A .csv, .tsv or .parquet table, or - for CSV from standard input.")
    ],
    out_folder: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where results go.")],
    method: Annotated[MethodName, typer.Option(help="How to estimate.")] = MethodName.auto,
    seed: Annotated[int, typer.Option(min=0, max=LONGEST_SEED, help="Determines the run.")] = 0,
    restarts: Annotated[
        int | None, typer.Option(min=1, max=MOST_STARTS, help="Number of starts; the best is continued.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, max=MOST_STEPS, help="Most steps of the optimiser.")] = None,
    weights: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column with a weight for each row.")] = None,
    robust: Annotated[
        Robust | None, typer.Option(help="Leave out rows that do not fit, or bear a model that is wrong.")
    ] = None,
    intervals: Annotated[
        int | None,
        typer.Option(min=10, max=MOST_STARTS, metavar="DRAWS", help="Bootstrap intervals from so many resampled fits."),
    ] = None,
    sequence: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Lagged edges: column that tells sequences apart.")
    ] = None,
    time: Annotated[str | None, typer.Option(metavar="COLUMN", help="Lagged edges: column that orders steps.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", metavar="SECONDS", help="End with the best so far after so many seconds."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a fit that was stopped, from FOLDER.checkpoint.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
) -> None:
    """Estimate the parameters of a model from a table.

    Writes model.otp, params.json, summary.json, history.csv, restarts.csv, graph.png and learning.png; where asked for,
    intervals.csv and weights.csv, the share of each row that a robust fit used. A fit that is stopped leaves
    FOLDER.checkpoint, from which --resume goes on to the same end.
    """
    from otpdag.cli.fitting import fit_to_folder

    fit_to_folder(
        model_file,
        RowsFile(data, sequence, time),
        out_folder,
        method=method.value,
        seed=seed,
        restarts=restarts,
        steps=steps,
        weights=weights,
        robust=None if robust is None else robust.value,
        intervals=intervals,
        device=device,
        time_limit=time_limit,
        resume=resume,
        quiet=quiet,
        force=force,
    )
