"""Commands that use a saved model: their arguments. The work is in :mod:`otpdag.cli.using`, imported when wanted."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from otpdag.cli.console import LONGEST_SEED, RowsFile, TableOutput

MOST_ROWS, MOST_DRAWS = 10_000_000, 100_000  # what one machine can hold

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL.OTP", help="A saved model, or the folder of a fit.")]
DataPath = Annotated[
    Path, typer.Argument(metavar="DATA", help="A .csv, .tsv or .parquet table, or - for CSV from standard input.")
]
OutFile = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="CSV file; standard output if left out.")
]
Seed = Annotated[int, typer.Option(min=0, max=LONGEST_SEED, help="Determines the draws.")]
SequenceColumn = Annotated[
    str | None, typer.Option("--sequence", metavar="COLUMN", help="Lagged edges: column that tells sequences apart.")
]
TimeColumn = Annotated[
    str | None, typer.Option("--time", metavar="COLUMN", help="Lagged edges: column that orders steps.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]


class ScoreKind(StrEnum):
    """What to measure."""

    transport = "transport"
    likelihood = "likelihood"


def show(model_path: ModelPath, as_json: AsJson = False) -> None:
    """Print a model's graph, mechanisms and parameters."""
    from otpdag.cli.showing import show_saved

    if show_saved(model_path, as_json=as_json):
        return
    from otpdag.cli import using

    using.show(model_path, as_json=as_json)


def sample(
    model_path: ModelPath,
    rows: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Number of rows, or of sequences.")] = 1000,
    seed: Seed = 0,
    do: Annotated[
        list[str] | None, typer.Option(metavar="NODE=VALUE", help="Intervene: set a node. May be repeated.")
    ] = None,
    given: Annotated[Path | None, typer.Option(metavar="DATA", help="Table with the nodes that are Given.")] = None,
    length: Annotated[
        int | None, typer.Option(min=1, max=MOST_ROWS, help="Lagged edges: steps of each sequence.")
    ] = None,
    out_file: OutFile = None,
    force: Force = False,
) -> None:
    """Draw rows from a model, hidden nodes too; --do sets nodes, whatever their parents say."""
    from otpdag.cli import using

    using.sample(model_path, TableOutput(out_file, force), rows=rows, seed=seed, do=do, given=given, length=length)


def posterior(
    model_path: ModelPath,
    data: DataPath,
    draws: Annotated[int, typer.Option(min=1, max=MOST_DRAWS, help="Draws for each row.")] = 200,
    seed: Seed = 0,
    all_draws: Annotated[bool, typer.Option("--all-draws", help="Write every draw, not a summary by row.")] = False,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    out_file: OutFile = None,
    force: Force = False,
) -> None:
    """Tell what each row says about the hidden nodes.

    One line for each row: mean, standard deviation and the central 90 % of numbers, probabilities of categories.
    """
    from otpdag.cli import using

    using.posterior(
        model_path,
        RowsFile(data, sequence, time),
        TableOutput(out_file, force),
        draws=draws,
        seed=seed,
        all_draws=all_draws,
    )


def impute(
    model_path: ModelPath,
    data: DataPath,
    draws: Annotated[int, typer.Option(min=1, max=MOST_DRAWS, help="Draws that a filled cell summarises.")] = 100,
    seed: Seed = 0,
    random: Annotated[bool, typer.Option("--random", help="Fill with one draw, for multiple imputation.")] = False,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    out_file: OutFile = None,
    force: Force = False,
) -> None:
    """Fill the missing cells of a table; whatever else stands in the file stays as it is written."""
    from otpdag.cli import using

    using.impute(
        model_path, RowsFile(data, sequence, time), TableOutput(out_file, force), draws=draws, seed=seed, random=random
    )


def score(
    model_path: ModelPath,
    data: DataPath,
    kind: Annotated[ScoreKind, typer.Option(help="What to measure.")] = ScoreKind.transport,
    seed: Seed = 0,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    as_json: AsJson = False,
) -> None:
    """Measure how far rows are from a model: a transport distance (small is good) or the mean log-likelihood."""
    from otpdag.cli import using

    using.score(
        model_path,
        RowsFile(data, sequence, time),
        kind="transport" if kind is ScoreKind.transport else "likelihood",
        seed=seed,
        as_json=as_json,
    )


def check(model_path: ModelPath, data: DataPath, seed: Seed = 0, as_json: AsJson = False) -> None:
    """Tell which node fits badly: distances between its recovered noise and fresh noise, the worst node first."""
    from otpdag.cli import using

    using.check(model_path, data, seed=seed, as_json=as_json)


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a fit.")],
    data: Annotated[
        Path | None, typer.Argument(metavar="[DATA]", help="The table of the fit, if it is not where it was.")
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="HTML file; by default report.html in FOLDER."),
    ] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Write one HTML page about a fit: graph, estimates, data against model, checks, gaps, search.

    The page needs no network, opens from disk and prints.
    """
    from otpdag.cli import using

    using.report(run_folder, data, out_file=out_file, seed=seed, quiet=quiet, force=force)
