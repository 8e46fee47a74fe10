"""Commands that ask a model or a model file something: estimates with errors, predictions, effects, comparisons."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from otpdag.cli.console import (
    AsJson,
    DataPath,
    Force,
    ModelFilePath,
    ModelPath,
    OutFile,
    Seed,
    SequenceColumn,
    TimeColumn,
    check_file,
    json_text,
    out,
    say,
    write_out,
)
from otpdag.cli.use_commands import setting
from otpdag.errors import ModelError

if TYPE_CHECKING:
    import pandas as pd

    from otpdag.model import Model

ErrorsOf = Literal["information", "sandwich", "bootstrap"]
Criterion = Literal["bic", "aic", "cv"]


def summary(
    model_file: ModelFilePath,
    data: DataPath,
    errors: Annotated[ErrorsOf, typer.Option(help="Where standard errors come from.")] = "information",
    level: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.95,
    seed: Seed = 0,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    as_json: AsJson = False,
) -> None:
    """Fit a model file to a table and print estimates with standard errors, likelihood, AIC, BIC and warnings."""
    from otpdag.cli.command_files import as_steps, table_at
    from otpdag.cli.model_file import read_model_file
    from otpdag.engine import fit

    table = table_at(data)
    model = read_model_file(model_file).build(table)
    told = fit(model, as_steps(table, sequence, time), seed=seed).summary(errors=errors, level=level, seed=seed)
    if as_json:
        estimates = told.table.to_dict(orient="records")
        write_out(json_text({"facts": dict(told.facts), "warnings": told.warnings, "estimates": estimates}))
    else:
        out().print(str(told), markup=False)


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
    from otpdag.cli.command_files import model_at, put_table, rows_for

    check_file(out_file, force=force)
    model = model_at(model_path)
    ask: Any = model.predict_proba if probabilities else model.predict
    told = ask(rows_for(model, data, sequence, time), node, partial=partial)
    put_table(told.to_frame() if told.ndim == 1 else told, out_file)


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
    from otpdag.cli.command_files import model_at, put_table, rows_for

    check_file(out_file, force=force)
    model = model_at(model_path)
    told = model.forecast(rows_for(model, data, sequence, time), steps, level=level, seed=seed)
    put_table(told.reset_index() if told.index.names != [None] else told, out_file)


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
    from otpdag.cli.command_files import model_at, table_for

    model = model_at(model_path)
    wanted = [setting(model, f"{treatment}={value.strip()}", "--values")[1] for value in values.split(",")]
    table = None if data is None else table_for(model, data)
    told = model.effect(treatment, outcome, values=wanted, data=table, level=level)
    if as_json:
        effects = told.table.reset_index().to_dict(orient="records")
        write_out(json_text({"effects": effects, "identified": str(told.identification)}))
        return
    _put(told.table, as_json)
    say(str(told.identification))


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
    from otpdag.choice import compare as compare_models
    from otpdag.cli.command_files import as_steps, table_at
    from otpdag.cli.model_file import read_model_file

    table = table_at(data)
    models = {str(path): read_model_file(path).build(table) for path in model_files}
    _put(compare_models(models, as_steps(table, sequence, time), folds=folds, seed=seed), as_json)


def select(
    model_file: ModelFilePath,
    data: DataPath,
    node: Annotated[str, typer.Argument(metavar="NODE", help="A hidden category.")],
    sizes: Annotated[str, typer.Option(metavar="LOW-HIGH", help="Numbers of categories to try.")] = "1-6",
    criterion: Annotated[Criterion, typer.Option(help="By what to choose.")] = "bic",
    seed: Seed = 0,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    as_json: AsJson = False,
) -> None:
    """Choose how many categories a hidden node has: fit the model with each number of them."""
    from otpdag.choice import select as select_model
    from otpdag.cli.command_files import as_steps, table_at
    from otpdag.cli.model_file import read_model_file

    file, table = read_model_file(model_file), table_at(data)
    if node not in file.hidden or (file.nodes.get(node) or {}).get("type") != "Categorical":
        raise ModelError(
            f"NODE must be a hidden Categorical of the model file, whose hidden nodes are {file.hidden}; got {node!r}"
        )

    def builder(size: int) -> Model:
        nodes = {**file.nodes, node: {**(file.nodes[node] or {}), "size": size}}
        return file.model_copy(update={"nodes": nodes}).build(table)

    chosen = select_model(builder, _sizes(sizes), as_steps(table, sequence, time), criterion=criterion, seed=seed)
    _put(chosen.table.rename_axis("size"), as_json)
    say(f"{chosen.best} categories of {node} are best by {criterion}")


def _sizes(text: str, most: int = 50) -> range:
    """Read ``2-6``, or a single number; one command fits no more than ``most``."""
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high < low + most:
        raise ModelError(f"--sizes must be LOW-HIGH, at most {most} numbers from 1 on; got {text!r}")
    return range(low, high + 1)


def _put(table: pd.DataFrame, as_json: bool) -> None:
    lines = table.reset_index()
    write_out(json_text(lines.to_dict(orient="records")) if as_json else lines.to_csv(index=False, lineterminator="\n"))
