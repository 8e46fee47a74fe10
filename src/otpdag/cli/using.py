"""What the commands that use a saved model do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import typer
from rich.table import Table
from rich.text import Text

from otpdag.cli.command_files import as_steps, check_cells, file_hash, model_at, put_table, read_csv_text, table_at
from otpdag.cli.console import (
    RUN_FILES,
    RowsFile,
    TableOutput,
    check_file,
    note_written,
    out,
    say,
    warn,
    write_file,
    write_out,
)
from otpdag.cli.printing import described, estimates_table
from otpdag.errors import ModelError, printable
from otpdag.files import finish_transaction, make_folder
from otpdag.model import Model

if TYPE_CHECKING:
    from otpdag.report import Run


def show(model_path: Path, *, as_json: bool) -> None:
    """Print a model's graph, mechanisms and parameters."""
    model = model_at(model_path)
    if as_json:
        _put_json(described(model))
        return
    console = out()
    console.print(str(model), markup=False)
    if model.is_fitted:
        console.print()
        console.print(estimates_table(model))


def sample(
    model_path: Path,
    to: TableOutput,
    *,
    rows: int,
    seed: int,
    do: list[str] | None,
    given: Path | None,
    length: int | None,
) -> None:
    """Draw rows from a model, hidden nodes too; --do sets nodes, whatever their parents say."""
    check_file(to.path, force=to.force)
    model = model_at(model_path)
    if model.graph.is_dynamic and length is None:
        raise ModelError("the graph has lagged edges: say how long the sequences are with --length")
    settings = dict(setting(model, text) for text in do or [])
    table = None if given is None else table_for(model, given)
    put_table(model.sample(rows, seed=seed, do=settings, given=table, length=length), to.path)


def posterior(
    model_path: Path,
    data: RowsFile,
    to: TableOutput,
    *,
    draws: int,
    seed: int,
    all_draws: bool,
) -> None:
    """Tell what each row says about the hidden nodes."""
    check_file(to.path, force=to.force)
    model = model_at(model_path)
    if not model.graph.hidden:
        raise ModelError("the model has no hidden nodes; `otpdag impute` fills missing cells")
    drawn = model.posterior(as_steps(table_for(model, data.path), data), draws=draws, seed=seed)
    put_table(drawn.reset_index() if all_draws else _summary(model, drawn), to.path)


def impute(
    model_path: Path,
    data: RowsFile,
    to: TableOutput,
    *,
    draws: int,
    seed: int,
    random: bool,
) -> None:
    """Fill the missing cells of a table; whatever else stands in the file stays as it is written."""
    check_file(to.path, force=to.force)
    model = model_at(model_path)
    if to.path is not None and data.path.suffix == to.path.suffix == ".parquet" and not model.graph.is_dynamic:
        _impute_blocks(model, data.path, to.path, draws=draws, seed=seed, random=random)
        return
    table = table_for(model, data.path)
    filled = model.impute(as_steps(table, data), draws=draws, seed=seed, random=random)
    merged = _merged(table, filled)
    count = int((table.isna() & merged.notna()).to_numpy().sum())
    say(f"filled {count:,} cells")
    if data.path.suffix != ".csv" or (to.path is not None and to.path.suffix == ".parquet"):
        put_table(merged, to.path)
        return
    text = read_csv_text(data.path, table).with_cells(_new_cells(table, merged))
    if to.path is None:
        write_out(text)
        return
    write_file(to.path, text)
    say(f"wrote {len(table):,} rows to {to.path}")


def _impute_blocks(model: Model, data: Path, out_file: Path, *, draws: int, seed: int, random: bool) -> None:
    """Fill a Parquet file block by block into another: it need not fit into memory."""
    from otpdag.model.streaming import impute_to

    with make_folder(out_file.parent):
        count = impute_to(model, data, out_file, draws=draws, seed=seed, random=random)
    note_written(out_file)
    say(f"filled {count:,} cells")
    say(f"wrote {out_file}")


def score(
    model_path: Path,
    data: RowsFile,
    *,
    kind: Literal["transport", "likelihood"],
    seed: int,
    as_json: bool,
) -> None:
    """Measure how far rows are from a model: a transport distance (small is good) or the mean log-likelihood."""
    model = model_at(model_path)
    value = model.score(as_steps(table_for(model, data.path), data), kind=kind, seed=seed)
    if as_json:
        _put_json({"kind": kind, "score": value})
        return
    say(
        "energy distance between the rows and as many model samples; smaller is better"
        if kind == "transport"
        else "mean log-likelihood of a row; larger is better"
    )
    typer.echo(f"{value:.6g}")


def check(model_path: Path, data: Path, *, seed: int, as_json: bool) -> None:
    """Tell which node fits badly: distances between its recovered noise and fresh noise, the worst node first."""
    model = model_at(model_path)
    residuals = model.check(table_for(model, data), seed=seed)
    if as_json:
        _put_json([{"node": str(node), **row.to_dict()} for node, row in residuals.iterrows()])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node")
    for title in residuals.columns:
        table.add_column(str(title), justify="right")
    for node, row in residuals.iterrows():
        table.add_row(Text(printable(str(node), keep="")), *(f"{value:.4f}" for value in row))
    out().print(table)
    say("excess: standard deviations above what chance gives; above about 3 the node is misspecified")


def report(run_folder: Path, data: Path | None, *, out_file: Path | None, seed: int, quiet: bool, force: bool) -> None:
    """Write one HTML page about a fit."""
    from otpdag.report import read_run, report_page

    finish_transaction(run_folder, RUN_FILES)
    run = read_run(run_folder)
    target = out_file or run_folder / "report.html"
    check_file(target, force=force or out_file is None)
    table = _fitted_table(run, data)
    write_file(target, report_page(run, table, seed=seed, command=str(run.summary.get("command", ""))))
    if not quiet:
        say(f"wrote {target}")


def _put_json(content: Any) -> None:
    write_out(json.dumps(content, indent=1) + "\n")


def _fitted_table(run: Run, path: Path | None) -> pd.DataFrame | None:
    """The table of a fit: the one that is named, or the one that its summary names, if that has not changed."""
    if path is not None:
        return table_for(run.model, path)
    recorded = run.summary.get("data")
    if not recorded or not Path(recorded).is_file():
        say("without the table there are no pictures of data: name it after the folder")
        return None
    if file_hash(Path(recorded)) != run.summary.get("data_sha256"):
        warn(f"{recorded} is not the file that was fitted: it has changed since")
    return table_for(run.model, Path(recorded))


def table_for(model: Model, path: Path) -> pd.DataFrame:
    """A table whose numbers are numbers."""
    table = table_at(path)
    check_cells(table, model)
    return table


def setting(model: Model, text: str, option: str = "--do") -> tuple[str, Any]:
    """Read ``node=value``: a label of a category, a number, or several numbers with commas between."""
    node, equals, value = text.partition("=")
    if not equals or not node or not value:
        raise ModelError(f"{option} must be NODE=VALUE; got {text!r}")
    if node not in model.graph.nodes:
        raise ModelError(
            f"{option} names node {node!r}, which is not in the graph; it has {', '.join(model.graph.nodes)}"
        )
    if model.spaces[node].is_discrete:
        labels = {str(label): label for label in model.labels(node)}
        if value not in labels:
            raise ModelError(f"{option} {text}: node {node!r} takes {', '.join(labels)}; got {value!r}")
        return node, labels[value]
    try:
        numbers = [float(part) for part in value.split(",")]
    except ValueError:
        raise ModelError(f"{option} {text}: node {node!r} takes numbers; got {value!r}") from None
    width = model.spaces[node].width
    if len(numbers) != width:
        raise ModelError(f"{option} {text}: node {node!r} takes {width} number(s); got {len(numbers)}")
    return node, numbers[0] if width == 1 else numbers


def _summary(model: Model, drawn: pd.DataFrame) -> pd.DataFrame:
    """One line for each row of data."""
    by_row = drawn.groupby(level="row", sort=False)
    columns: dict[str, pd.Series[Any]] = {}
    for node in model.graph.hidden:
        if model.spaces[node].is_discrete:
            for label in model.labels(node):
                columns[f"{node}={label}"] = (drawn[node] == label).groupby(level="row", sort=False).mean()
            continue
        for name in [column for column in drawn.columns if column == node or column.startswith(f"{node}.")]:
            columns[f"{name}.mean"] = by_row[name].mean()
            columns[f"{name}.sd"] = by_row[name].std(ddof=0)
            columns[f"{name}.low"] = by_row[name].quantile(0.05)
            columns[f"{name}.high"] = by_row[name].quantile(0.95)
    return pd.DataFrame(columns).round(6).reset_index()


def _merged(table: pd.DataFrame, filled: pd.DataFrame) -> pd.DataFrame:
    """The user's table with its own columns in their order; only missing cells change."""
    merged = table.copy()
    for column in filled.columns:
        merged[column] = filled[column].reindex(merged.index)
    return merged


def _new_cells(table: pd.DataFrame, merged: pd.DataFrame) -> dict[tuple[int, int], Any]:
    """What was filled in, by row and column."""
    fresh = (table.isna() & merged.notna()).to_numpy()
    return {(int(row), int(column)): merged.iat[row, column] for row, column in zip(*fresh.nonzero(), strict=True)}
