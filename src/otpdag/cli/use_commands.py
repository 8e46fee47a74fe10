"""Commands that use a saved model: what it is, what it makes, what it says of a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from otpdag.cli.console import (
    RUN_FILES,
    AsJson,
    DataPath,
    Force,
    ModelPath,
    OutFile,
    Quiet,
    Seed,
    SequenceColumn,
    TimeColumn,
    check_file,
    json_text,
    note_written,
    out,
    plain_table,
    put_text,
    say,
    warn,
    write_file,
    write_out,
)
from otpdag.errors import ModelError, printable
from otpdag.files import finish_transaction, make_folder

if TYPE_CHECKING:
    import pandas as pd

    from otpdag.model import Model
    from otpdag.report import Run

MOST_ROWS, MOST_DRAWS = 10_000_000, 100_000  # what one machine can hold


def show(model_path: ModelPath, as_json: AsJson = False) -> None:
    """Print a model's graph, mechanisms and parameters."""
    from otpdag.cli.run_folder import Shown

    shown = Shown.kept(model_path)
    if shown is None:
        from otpdag.cli.command_files import model_at

        shown = Shown.of(model_at(model_path))
    shown.put(as_json=as_json)


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
    from otpdag.cli.command_files import model_at, put_table, table_for

    check_file(out_file, force=force)
    model = model_at(model_path)
    if model.graph.is_dynamic and length is None:
        raise ModelError("the graph has lagged edges: say how long the sequences are with --length")
    settings = dict(setting(model, text) for text in do or [])
    table = None if given is None else table_for(model, given)
    put_table(model.sample(rows, seed=seed, do=settings, given=table, length=length), out_file)


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
    from otpdag.cli.command_files import model_at, put_table, rows_for

    check_file(out_file, force=force)
    model = model_at(model_path)
    if not model.graph.hidden:
        raise ModelError("the model has no hidden nodes; `otpdag impute` fills missing cells")
    drawn = model.posterior(rows_for(model, data, sequence, time), draws=draws, seed=seed)
    put_table(drawn.reset_index() if all_draws else _by_row(model, drawn), out_file)


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
    from otpdag.cli.command_files import as_steps, model_at, put_table, read_csv_text, table_for

    check_file(out_file, force=force)
    model = model_at(model_path)
    to_parquet = out_file is not None and out_file.suffix == ".parquet"
    if out_file is not None and to_parquet and data.suffix == ".parquet" and not model.graph.is_dynamic:
        _impute_blocks(model, data, out_file, draws=draws, seed=seed, random=random)
        return
    table = table_for(model, data)
    filled = model.impute(as_steps(table, sequence, time), draws=draws, seed=seed, random=random)
    merged = table.assign(**{column: filled[column].reindex(table.index) for column in filled.columns})
    fresh = (table.isna() & merged.notna()).to_numpy()
    say(f"filled {int(fresh.sum()):,} cells")
    if data.suffix != ".csv" or to_parquet:
        put_table(merged, out_file)
        return
    cells = {(int(row), int(column)): merged.iat[row, column] for row, column in zip(*fresh.nonzero(), strict=True)}
    put_text(read_csv_text(data, table).with_cells(cells), out_file)
    if out_file is not None:
        say(f"wrote {len(table):,} rows to {out_file}")


def _impute_blocks(model: Model, data: Path, out_file: Path, *, draws: int, seed: int, random: bool) -> None:
    """Fill a Parquet file block by block into another: it need not fit into memory."""
    from otpdag.model.streaming import impute_to

    with make_folder(out_file.parent):
        count = impute_to(model, data, out_file, draws=draws, seed=seed, random=random)
    note_written(out_file)
    say(f"filled {count:,} cells")
    say(f"wrote {out_file}")


def score(
    model_path: ModelPath,
    data: DataPath,
    kind: Annotated[Literal["transport", "likelihood"], typer.Option(help="What to measure.")] = "transport",
    seed: Seed = 0,
    sequence: SequenceColumn = None,
    time: TimeColumn = None,
    as_json: AsJson = False,
) -> None:
    """Measure how far rows are from a model: a transport distance (small is good) or the mean log-likelihood."""
    from otpdag.cli.command_files import model_at, rows_for

    model = model_at(model_path)
    rows = rows_for(model, data, sequence, time)
    value = model.distance(rows, seed=seed) if kind == "transport" else model.score(rows, kind=kind, seed=seed)
    if as_json:
        write_out(json_text({"kind": kind, "score": value}))
        return
    say(
        "energy distance between the rows and as many model samples; smaller is better"
        if kind == "transport"
        else "mean log-likelihood of a row; larger is better"
    )
    typer.echo(f"{value:.6g}")


def check(model_path: ModelPath, data: DataPath, seed: Seed = 0, as_json: AsJson = False) -> None:
    """Tell which node fits badly: distances between its recovered noise and fresh noise, the worst node first."""
    from otpdag.cli.command_files import model_at, table_for

    model = model_at(model_path)
    residuals = model.check(table_for(model, data), seed=seed)
    if as_json:
        write_out(json_text([{"node": str(node), **row.to_dict()} for node, row in residuals.iterrows()]))
        return
    table = plain_table("node")
    for title in residuals.columns:
        table.add_column(str(title), justify="right")
    for node, row in residuals.iterrows():
        table.add_row(Text(printable(str(node), keep="")), *(f"{value:.4f}" for value in row))
    out().print(table)
    say("excess: standard deviations above what chance gives; above about 3 the node is misspecified")


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
    from otpdag.report import read_run, report_page

    finish_transaction(run_folder, RUN_FILES)
    run = read_run(run_folder)
    target = out_file or run_folder / "report.html"
    check_file(target, force=force or out_file is None)
    table = _fitted_table(run, data)
    write_file(target, report_page(run, table, seed=seed, command=str(run.summary.get("command", ""))))
    if not quiet:
        say(f"wrote {target}")


def _fitted_table(run: Run, path: Path | None) -> pd.DataFrame | None:
    """The table of a fit: the one that is named, or the one that its summary names, if that has not changed."""
    from otpdag.cli.command_files import file_hash, table_for

    if path is None:
        recorded = run.summary.get("data")
        if not recorded or not Path(recorded).is_file():
            say("without the table there are no pictures of data: name it after the folder")
            return None
        path = Path(recorded)
        if file_hash(path) != run.summary.get("data_sha256"):
            warn(f"{recorded} is not the file that was fitted: it has changed since")
    return table_for(run.model, path)


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


def _by_row(model: Model, drawn: pd.DataFrame) -> pd.DataFrame:
    """Draws of hidden nodes as one line for each row of data."""
    from pandas import DataFrame

    by_row = drawn.groupby(level="row", sort=False)
    columns: dict[str, pd.Series[Any]] = {}
    for node in model.graph.hidden:
        if model.spaces[node].is_discrete:
            for label in model.labels(node):
                columns[f"{node}={label}"] = (drawn[node] == label).groupby(level="row", sort=False).mean()
            continue
        for name in [column for column in drawn.columns if column == node or column.startswith(f"{node}.")]:
            own = by_row[name]
            columns |= {f"{name}.mean": own.mean(), f"{name}.sd": own.std(ddof=0)}
            columns |= {f"{name}.low": own.quantile(0.05), f"{name}.high": own.quantile(0.95)}
    return DataFrame(columns).round(6).reset_index()
