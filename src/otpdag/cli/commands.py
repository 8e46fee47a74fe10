"""All commands but ``fit``: first model files, uses of a saved model, questions to models.

Nothing here imports torch or pandas before a command runs.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from otpdag.cli import console as c
from otpdag.cli.command_files import as_steps, model_and_rows, model_at, put_table, table_at, with_cells
from otpdag.cli.fit_command import kept_words, print_words, words_of
from otpdag.errors import ModelError, printable
from otpdag.files import finish_transaction, make_folder

if TYPE_CHECKING:
    import pandas as pd

    from otpdag.model import Model
    from otpdag.report import Run

MOST_ROWS, MOST_DRAWS = 10_000_000, 100_000  # what one machine can hold
ErrorsOf = Literal["information", "sandwich", "bootstrap"]
Criterion = Literal["bic", "aic", "cv"]


# --- model files ------------------------------------------------------------------------------------------------------


def init(
    data: c.DataPath,
    out_file: Annotated[
        Path | None, c.out_option("Model file; by default DATA with the ending .yaml; - for standard output.")
    ] = None,
    separator: c.Separator = None,
    decimal: c.Decimal = None,
    quiet: c.Quiet = False,
    force: c.Force = False,
) -> None:
    """Write a model file for a table: what each column is taken for and why, and edges to fill in.

    Columns that can be no node, or that a model is better off without, stand in it as comments.
    """
    from otpdag.cli.model_file import first_model
    from otpdag.data import column_types

    piped = data == c.STANDARD_INPUT
    beside = None if piped else data.with_suffix(".yaml")
    target = {None: beside, c.STANDARD_INPUT: None}.get(out_file, out_file)
    c.check_file(target, force=force)
    table = table_at(data, separator, decimal)
    c.put_text(first_model(table, "data.csv" if piped else data.name, target), target)
    if target is not None and not quiet:
        doubtful = sum(bool(one.doubt) for one in column_types(table))
        more = f" (columns marked as doubtful: {doubtful})" if doubtful else ""
        c.say(f"wrote {target}{more}; fill in its edges, then: otpdag fit {target} {data} --out run")


# --- a saved model ----------------------------------------------------------------------------------------------------


def show(model_path: c.ModelPath, as_json: c.AsJson = False) -> None:
    """Print a model's graph, mechanisms and parameters."""
    words = kept_words(model_path)
    if words is None:
        words = words_of(model_at(model_path))
    print_words(words, as_json=as_json)


def sample(
    model_path: c.ModelPath,
    rows: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Number of rows, or of sequences.")] = 1000,
    seed: c.Seed = 0,
    do: Annotated[
        list[str] | None, typer.Option(metavar="NODE=VALUE", help="Intervene: set a node. May be repeated.")
    ] = None,
    given: Annotated[Path | None, typer.Option(metavar="DATA", help="Table with the nodes that are Given.")] = None,
    length: Annotated[
        int | None, typer.Option(min=1, max=MOST_ROWS, help="Lagged edges: steps of each sequence.")
    ] = None,
    out_file: c.OutFile = None,
    force: c.Force = False,
) -> None:
    """Draw rows from a model, hidden nodes too; --do sets nodes, whatever their parents say."""
    c.check_file(out_file, force=force)
    model = model_at(model_path)
    if model.graph.is_dynamic and length is None:
        raise ModelError("the graph has lagged edges: say how long the sequences are with --length")
    settings = dict(setting(model, text) for text in do or [])
    table = None if given is None else table_at(given)
    put_table(model.sample(rows, seed=seed, do=settings, given=table, length=length), out_file)


def posterior(
    model_path: c.ModelPath,
    data: c.DataPath,
    draws: Annotated[int, typer.Option(min=1, max=MOST_DRAWS, help="Draws for each row.")] = 200,
    seed: c.Seed = 0,
    all_draws: Annotated[bool, typer.Option("--all-draws", help="Write every draw, not a summary by row.")] = False,
    sequence: c.SequenceColumn = None,
    time: c.TimeColumn = None,
    out_file: c.OutFile = None,
    force: c.Force = False,
) -> None:
    """Tell what each row says about the hidden nodes.

    One line for each row: mean, standard deviation and the central 90 % of numbers, probabilities of categories.
    """
    c.check_file(out_file, force=force)
    model, rows = model_and_rows(model_path, data, sequence, time)
    if not model.graph.hidden:
        raise ModelError("the model has no hidden nodes; `otpdag impute` fills missing cells")
    drawn = model.posterior(rows, draws=draws, seed=seed)
    put_table(drawn.reset_index() if all_draws else _by_row(model, drawn), out_file)


def impute(
    model_path: c.ModelPath,
    data: c.DataPath,
    draws: Annotated[int, typer.Option(min=1, max=MOST_DRAWS, help="Draws that a filled cell summarises.")] = 100,
    seed: c.Seed = 0,
    random: Annotated[bool, typer.Option("--random", help="Fill with one draw, for multiple imputation.")] = False,
    sequence: c.SequenceColumn = None,
    time: c.TimeColumn = None,
    separator: c.Separator = None,
    decimal: c.Decimal = None,
    out_file: c.OutFile = None,
    force: c.Force = False,
) -> None:
    """Fill the missing cells of a table; whatever else stands in the file stays as it is written."""
    c.check_file(out_file, force=force)
    model = model_at(model_path)
    to_parquet = out_file is not None and out_file.suffix == ".parquet"
    if out_file is not None and to_parquet and data.suffix == ".parquet" and not model.graph.is_dynamic:
        from otpdag.model.streaming import impute_to

        with make_folder(out_file.parent):  # block by block: the table need not fit into memory
            count = impute_to(model, data, out_file, draws=draws, seed=seed, random=random)
        c.note_written(out_file)
        c.say(f"filled {count:,} cells")
        c.say(f"wrote {out_file}")
        return
    table = table_at(data, separator, decimal)
    filled = model.impute(as_steps(table, sequence, time), draws=draws, seed=seed, random=random)
    merged = table.assign(**{column: filled[column].reindex(table.index) for column in filled.columns})
    fresh = (table.isna() & merged.notna()).to_numpy()
    c.say(f"filled {int(fresh.sum()):,} cells")
    if data.suffix != ".csv" or to_parquet or not table.attrs["plain"]:
        put_table(merged, out_file)
        return
    cells = {(int(row), int(column)): merged.iat[row, column] for row, column in zip(*fresh.nonzero(), strict=True)}
    c.put_text(with_cells(data, table, cells), out_file)
    if out_file is not None:
        c.say(f"wrote {len(table):,} rows to {out_file}")


def score(
    model_path: c.ModelPath,
    data: c.DataPath,
    kind: Annotated[Literal["transport", "likelihood"], typer.Option(help="What to measure.")] = "transport",
    seed: c.Seed = 0,
    sequence: c.SequenceColumn = None,
    time: c.TimeColumn = None,
    as_json: c.AsJson = False,
) -> None:
    """Measure how far rows are from a model: a transport distance (small is good) or the mean log-likelihood."""
    from otpdag.answers.transport import Distance

    model, rows = model_and_rows(model_path, data, sequence, time)
    value = model.distance(rows, seed=seed) if kind == "transport" else model.score(rows, kind=kind, seed=seed)
    if as_json:
        c.write_out(c.json_text({"kind": kind, "score": float(value)}))
        return
    likelihood = "mean log-likelihood of a row; larger is better"
    c.say(f"{value.describe()}; smaller is better" if isinstance(value, Distance) else likelihood)
    typer.echo(f"{value:.6g}")


def check(
    model_path: c.ModelPath,
    data: c.DataPath,
    seed: c.Seed = 0,
    separator: c.Separator = None,
    decimal: c.Decimal = None,
    as_json: c.AsJson = False,
) -> None:
    """Tell what of a model rows contradict: a test of each node, and of each pair that the graph keeps apart."""
    model, rows = model_and_rows(model_path, data, separator=separator, decimal=decimal)
    checked = model.check(rows, seed=seed)
    if as_json:
        c.write_out(c.json_text([{"node": str(node), **row.to_dict()} for node, row in checked.iterrows()]))
        return
    shown = checked[(checked["other"] == "") | (checked["adjusted"] < 0.5)]
    table = c.plain_table("node", right=["p", "adjusted p"])
    table.add_column("finding")
    for node, row in shown.iterrows():
        numbers = (f"{row['p']:.2g}", f"{row['adjusted']:.2g}")
        table.add_row(Text(printable(str(node), keep="")), *numbers, Text(printable(row["finding"], keep="")))
    c.out().print(table)
    c.say(f"{len(checked)} tests; one right model of a hundred has any adjusted p below 0.01")


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a fit.")],
    data: Annotated[
        Path | None, typer.Argument(metavar="[DATA]", help="The table of the fit, if it is not where it was.")
    ] = None,
    out_file: Annotated[Path | None, c.out_option("HTML file; by default report.html in FOLDER.")] = None,
    seed: c.Seed = 0,
    separator: c.Separator = None,
    decimal: c.Decimal = None,
    quiet: c.Quiet = False,
    force: c.Force = False,
) -> None:
    """Write one HTML page about a fit: graph, estimates, data against model, checks, gaps, search.

    The page needs no network, opens from disk and prints.
    """
    from otpdag.report import read_run, report_page

    finish_transaction(run_folder, c.RUN_FILES)
    run = read_run(run_folder)
    target = out_file or run_folder / "report.html"
    c.check_file(target, force=force or out_file is None)
    table = _fitted_table(run, data, separator, decimal)
    c.write_file(target, report_page(run, table, seed=seed, command=str(run.summary.get("command", ""))))
    if not quiet:
        c.say(f"wrote {target}")


def _fitted_table(run: Run, path: Path | None, *form: str | None) -> pd.DataFrame | None:
    """The table of a fit: the one that is named, or the one that its summary names, if that has not changed."""
    if path is None:
        recorded = run.summary.get("data")
        if not recorded or not Path(recorded).is_file():
            c.say("without the table there are no pictures of data: name it after the folder")
            return None
        path = Path(recorded)
        if c.file_hash(path) != run.summary.get("data_sha256"):
            c.warn(f"{recorded} is not the file that was fitted: it has changed since")
    return table_at(path, *form)


def setting(model: Model, text: str, option: str = "--do") -> tuple[str, Any]:
    """Read ``node=value``: a label of a category, a number, or several numbers with commas between."""
    node, equals, value = text.partition("=")
    if not equals or not node or not value:
        raise ModelError(f"{option} must be NODE=VALUE; got {text!r}")
    if node not in model.graph.nodes:
        raise ModelError(f"{option} names {node!r}, which is not in the graph; it has {', '.join(model.graph.nodes)}")
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


# --- answers ----------------------------------------------------------------------------------------------------------


def summary(
    model_file: c.ModelFilePath,
    data: c.DataPath,
    errors: Annotated[ErrorsOf, typer.Option(help="Where standard errors come from.")] = "information",
    level: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.95,
    seed: c.Seed = 0,
    sequence: c.SequenceColumn = None,
    time: c.TimeColumn = None,
    as_json: c.AsJson = False,
) -> None:
    """Fit a model file to a table and print estimates with standard errors, likelihood, AIC, BIC and warnings."""
    from otpdag.cli.model_file import read_model_file
    from otpdag.engine import fit

    table = table_at(data)
    result = fit(read_model_file(model_file).build(table), as_steps(table, sequence, time), seed=seed)
    told = result.summary(errors=errors, level=level, seed=seed)
    if as_json:
        estimates = told.table.to_dict(orient="records")
        c.write_out(c.json_text({"facts": dict(told.facts), "warnings": told.warnings, "estimates": estimates}))
    else:
        c.out().print(str(told), markup=False)


def predict(
    model_path: c.ModelPath,
    data: c.DataPath,
    node: Annotated[str, typer.Argument(metavar="NODE", help="What to predict, hidden or observed.")],
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Of a category, the probability of each level.")
    ] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Take columns that are absent for missing.")] = False,
    sequence: c.SequenceColumn = None,
    time: c.TimeColumn = None,
    out_file: c.OutFile = None,
    force: c.Force = False,
) -> None:
    """Predict a node for each row, from all else that the row shows; its own cells are not looked at."""
    c.check_file(out_file, force=force)
    model, rows = model_and_rows(model_path, data, sequence, time)
    ask: Any = model.predict_proba if probabilities else model.predict
    told = ask(rows, node, partial=partial)
    put_table(told.to_frame() if told.ndim == 1 else told, out_file)


def forecast(
    model_path: c.ModelPath,
    data: c.DataPath,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="How many steps to look ahead.")] = 10,
    level: Annotated[float, typer.Option(help="Share of futures that an interval holds.")] = 0.95,
    seed: c.Seed = 0,
    sequence: c.SequenceColumn = None,
    time: c.TimeColumn = None,
    out_file: c.OutFile = None,
    force: c.Force = False,
) -> None:
    """Tell what comes after each sequence: means and intervals of numbers, likeliest categories."""
    c.check_file(out_file, force=force)
    model, rows = model_and_rows(model_path, data, sequence, time)
    told = model.forecast(rows, steps, level=level, seed=seed)
    put_table(told.reset_index() if told.index.names != [None] else told, out_file)


def effect(
    model_path: c.ModelPath,
    treatment: Annotated[str, typer.Argument(metavar="TREATMENT", help="The node that is set.")],
    outcome: Annotated[str, typer.Argument(metavar="OUTCOME", help="The node that is looked at.")],
    values: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Values of the treatment; effects are differences to the first. By default 0,1 or all levels.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DATA", help="The table of the fit, for standard errors and intervals.")
    ] = None,
    level: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.95,
    as_json: c.AsJson = False,
) -> None:
    """Tell what setting one node does to another, and whether the graph allows to know it."""
    model = model_at(model_path)
    asked = [] if values is None else values.split(",")
    wanted = [setting(model, f"{treatment}={value.strip()}", "--values")[1] for value in asked]
    table = None if data is None else table_at(data)
    told = model.effect(treatment, outcome, values=wanted or None, data=table, level=level)
    if as_json:
        effects = told.table.reset_index().to_dict(orient="records")
        c.write_out(c.json_text({"effects": effects, "identified": str(told.identification)}))
        return
    _put(told.table, as_json)
    c.say(f"{told.head}; {told.identification}")


def compare(
    data: c.DataPath,
    model_files: Annotated[
        list[Path], typer.Argument(metavar="MODEL.YAML...", help="Model files of the same columns.")
    ],
    folds: Annotated[int, typer.Option(min=0, max=1000, help="Parts of a cross-validation; none by default.")] = 0,
    seed: c.Seed = 0,
    sequence: c.SequenceColumn = None,
    time: c.TimeColumn = None,
    as_json: c.AsJson = False,
) -> None:
    """Fit several model files to one table and compare likelihood, AIC, BIC and held-out rows."""
    from otpdag.choice import compare as compare_models
    from otpdag.cli.model_file import read_model_file

    table = table_at(data)
    models = {str(path): read_model_file(path).build(table) for path in model_files}
    _put(compare_models(models, as_steps(table, sequence, time), folds=folds, seed=seed), as_json)


def select(
    model_file: c.ModelFilePath,
    data: c.DataPath,
    node: Annotated[str, typer.Argument(metavar="NODE", help="A hidden category.")],
    sizes: Annotated[str, typer.Option(metavar="LOW-HIGH", help="Numbers of categories to try.")] = "1-6",
    criterion: Annotated[Criterion, typer.Option(help="By what to choose.")] = "bic",
    seed: c.Seed = 0,
    sequence: c.SequenceColumn = None,
    time: c.TimeColumn = None,
    as_json: c.AsJson = False,
) -> None:
    """Choose how many categories a hidden node has: fit the model with each number of them."""
    from otpdag.choice import select as select_model
    from otpdag.cli.model_file import read_model_file

    file, table = read_model_file(model_file), table_at(data)
    if node not in file.hidden or (file.nodes.get(node) or {}).get("type") != "Categorical":
        raise ModelError(f"NODE must be a Categorical of the hidden nodes, {file.hidden}; got {node!r}")

    def builder(size: int) -> Model:
        nodes = {**file.nodes, node: {**(file.nodes[node] or {}), "size": size}}
        return file.model_copy(update={"nodes": nodes}).build(table)

    chosen = select_model(builder, _sizes(sizes), as_steps(table, sequence, time), criterion=criterion, seed=seed)
    _put(chosen.table.rename_axis("size"), as_json)
    c.say(f"{chosen.best} categories of {node} are best by {criterion}{chosen.hint}")


def _sizes(text: str, most: int = 50) -> range:
    """Read ``2-6``, or a single number; one command fits no more than ``most``."""
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high < low + most:
        raise ModelError(f"--sizes must be LOW-HIGH, at most {most} numbers from 1 on; got {text!r}")
    return range(low, high + 1)


def _put(table: pd.DataFrame, as_json: bool) -> None:
    told = table.reset_index()
    lines = told.to_dict(orient="records")
    c.write_out(c.json_text(lines) if as_json else told.to_csv(index=False, lineterminator="\n"))


# --- experiments ------------------------------------------------------------------------------------------------------


def reproduce(
    words: typer.Context,
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Checkout whose experiments are run; that of this package.")
    ] = None,
) -> None:
    """Reproduce a table or figure; without a name, list what there is.

    Experiments, their options among them, are no part of the package but of its repository.
    """
    experiments = _own_experiments() if folder is None else folder.resolve() / "experiments"
    if experiments is None:
        c.say("no experiments found: they are part of the repository; name a checkout with --folder")
        return
    if not (experiments / "registry.py").is_file():
        raise ModelError(f"--folder must be a checkout of otpdag with its experiments; got {str(folder)!r}")
    sys.path.insert(0, str(experiments.parent))
    c.look_for_garbage()
    command = typer.main.get_command(importlib.import_module("experiments.registry").app)
    with command.make_context("otpdag reproduce", [*words.args]) as context:  # main() would hide an interrupt
        command.invoke(context)


def _own_experiments() -> Path | None:
    """Those of the checkout that the package runs from; code of no other folder is run unasked."""
    source = Path(__file__).resolve().parents[2]
    is_checkout = source.name == "src" and (source.parent / "experiments" / "registry.py").is_file()
    return source.parent / "experiments" if is_checkout else None
