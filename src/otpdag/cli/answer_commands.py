"""Commands that ask a model or a model file something: their arguments. The work is in :mod:`otpdag.cli.asking`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from otpdag.cli.console import RowsFile, TableOutput
from otpdag.cli.use_commands import AsJson, DataPath, Force, ModelPath, OutFile, Seed, SequenceColumn, TimeColumn

ModelFilePath = Annotated[Path, typer.Argument(metavar="MODEL.YAML", help="Graph and mechanisms.")]


class ErrorsOf(StrEnum):
    """Where standard errors come from."""

    information = "information"
    sandwich = "sandwich"
    bootstrap = "bootstrap"


class Criterion(StrEnum):
    """By what a model is chosen."""

    bic = "bic"
    aic = "aic"
    cv = "cv"


def summary(
    model_file: ModelFilePath,
    data: DataPath,
    errors: Annotated[ErrorsOf, typer.Option(help="Where standard errors come from.")] = ErrorsOf.information,
    level: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.95,
    seed: Seed = 0,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    as_json: AsJson = False,
) -> None:
    """Fit a model file to a table and print estimates with standard errors, likelihood, AIC, BIC and warnings."""
    from otpdag.cli import asking

    asking.summary(
        model_file, RowsFile(data, sequence, time), errors=errors.value, level=level, seed=seed, as_json=as_json
    )


def predict(
    model_path: ModelPath,
    data: DataPath,
    node: Annotated[str, typer.Argument(metavar="NODE", help="What to predict, hidden or observed.")],
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Of a category, the probability of each level.")
    ] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Take columns that are absent for missing.")] = False,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    out_file: OutFile = None,
    force: Force = False,
) -> None:
    """Predict a node for each row, from all else that the row shows; its own cells are not looked at."""
    from otpdag.cli import asking

    asking.predict(
        model_path,
        RowsFile(data, sequence, time),
        node,
        TableOutput(out_file, force),
        probabilities=probabilities,
        partial=partial,
    )


def forecast(
    model_path: ModelPath,
    data: DataPath,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="How many steps to look ahead.")] = 10,
    level: Annotated[float, typer.Option(help="Share of futures that an interval holds.")] = 0.9,
    seed: Seed = 0,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    out_file: OutFile = None,
    force: Force = False,
) -> None:
    """Tell what comes after each sequence: means and intervals of numbers, likeliest categories."""
    from otpdag.cli import asking

    asking.forecast(
        model_path, RowsFile(data, sequence, time), TableOutput(out_file, force), steps=steps, level=level, seed=seed
    )


def effect(
    model_path: ModelPath,
    treatment: Annotated[str, typer.Argument(metavar="TREATMENT", help="The node that is set.")],
    outcome: Annotated[str, typer.Argument(metavar="OUTCOME", help="The node that is looked at.")],
    values: Annotated[
        str, typer.Option(metavar="A,B,...", help="Values of the treatment; effects are differences to the first.")
    ] = "0,1",
    data: Annotated[
        Path | None, typer.Option(metavar="DATA", help="The table of the fit, for standard errors and intervals.")
    ] = None,
    level: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.9,
    as_json: AsJson = False,
) -> None:
    """Tell what setting one node does to another, and whether the graph allows to know it."""
    from otpdag.cli import asking

    asking.effect(model_path, treatment, outcome, values=values, data=data, level=level, as_json=as_json)


def compare(
    data: DataPath,
    model_files: Annotated[
        list[Path], typer.Argument(metavar="MODEL.YAML...", help="Model files of the same columns.")
    ],
    folds: Annotated[int, typer.Option(min=0, max=1000, help="Parts of a cross-validation; none by default.")] = 0,
    seed: Seed = 0,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    as_json: AsJson = False,
) -> None:
    """Fit several model files to one table and compare likelihood, AIC, BIC and held-out rows."""
    from otpdag.cli import asking

    asking.compare(RowsFile(data, sequence, time), model_files, folds=folds, seed=seed, as_json=as_json)


def select(
    model_file: ModelFilePath,
    data: DataPath,
    node: Annotated[str, typer.Argument(metavar="NODE", help="A hidden category.")],
    sizes: Annotated[str, typer.Option(metavar="LOW-HIGH", help="Numbers of categories to try.")] = "1-6",
    criterion: Annotated[Criterion, typer.Option(help="By what to choose.")] = Criterion.bic,
    seed: Seed = 0,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    as_json: AsJson = False,
) -> None:
    """Choose how many categories a hidden node has: fit the model with each number of them."""
    from otpdag.cli import asking

    asking.select(
        model_file,
        RowsFile(data, sequence, time),
        node,
        sizes=sizes,
        criterion=criterion.value,
        seed=seed,
        as_json=as_json,
    )
