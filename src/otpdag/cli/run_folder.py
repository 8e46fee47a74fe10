"""The folder of a fit: written as a whole, and told to a reader without any of the heavy libraries."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from otpdag.cli.console import RUN_FILES, json_text, out, plain_table, write_out
from otpdag.errors import printable
from otpdag.files import finish_transaction, folder_transaction, write_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from otpdag.engine import FitResult
    from otpdag.model import Model
    from otpdag.uncertainty import Summary


# --- estimates in words -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EstimateLine:
    """One number of a model: whose it is, what it is called, and the ends of its interval where they are known."""

    node: str
    kind: str
    parameter: str
    at: str
    value: str
    fixed: bool
    ends: Sequence[str] = ()


def number(value: float) -> str:
    """Five significant digits.

    >>> number(0.123456), number(123456.7), number(-2.0)
    ('0.12346', '1.2346e+05', '-2')
    """
    return f"{value + 0.0:.5g}"


def estimate_lines(model: Model, intervals: pd.DataFrame | None = None) -> list[EstimateLine]:
    """One line for each number of a fitted model."""
    from otpdag.tables import estimates, interval_ends

    table = estimates(model)
    lines = []
    for row, ends in zip(table.itertuples(index=False), interval_ends(table, intervals), strict=True):
        node = str(row.node)
        hidden = ", hidden" if model.structure.base(node) in model.graph.hidden else ""
        kind = f"{type(model.mechanisms[node]).__name__}{hidden}"
        own = [] if intervals is None else ["" if math.isnan(end) else number(end) for end in ends]
        value = number(float(str(row.value)))
        lines.append(EstimateLine(node, kind, str(row.parameter), str(row.at), value, bool(row.fixed), own))
    return lines


def lines_table(lines: Sequence[EstimateLine], most: int = 40) -> RenderableType:
    """Every estimate, grouped by node; of one parameter no more than a screen holds."""
    table = plain_table("node", "parameter", "at")
    for title in ("estimate", "lower", "upper")[: 3 if any(line.ends for line in lines) else 1]:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    last, cut = "", False
    for (node, parameter), group in groupby(lines, key=lambda line: (line.node, line.parameter)):
        own = list(group)
        for position, line in enumerate(own[:most]):
            whose = _whose(line) if node != last else Text("")
            which = Text("" if position else printable(parameter, keep=""))
            fixed = "fixed" if line.fixed else ""
            table.add_row(whose, which, Text(printable(line.at, keep="")), line.value, *line.ends, fixed)
            last = node
        if len(own) > most:
            table.add_row("", "", f"... and {len(own) - most} more")
            cut = True
    note = [Text("The rest of the long tables is in params.json.", style="dim")] if cut else []
    return Group(table, *note)


def _whose(line: EstimateLine) -> Text:
    return Text(printable(line.node, keep=""), style="bold") + Text(f" ({line.kind})", style="not bold dim")


@dataclass(frozen=True)
class Shown:
    """A model in words, as ``otpdag show`` prints it: kept beside a saved model, for it takes seconds to load one."""

    text: str
    described: dict[str, Any]
    lines: Sequence[EstimateLine]

    @classmethod
    def of(cls, model: Model) -> Shown:
        """The words of a model that is there."""
        graph = model.graph
        described = {
            "edges": [*map(list, graph.edges), *([edge.parent, edge.child, edge.by] for edge in graph.lags)],
            "hidden": list(graph.hidden),
            "nodes": {node: type(mechanism).__name__ for node, mechanism in model.mechanisms.items()},
            "params": model.params() if model.is_fitted else None,
        }
        return cls(str(model), described, estimate_lines(model) if model.is_fitted else [])

    @classmethod
    def kept(cls, path: Path) -> Shown | None:
        """The words that are kept of a saved model or run folder; None where none are, or they are another model's."""
        if path.is_dir():
            finish_transaction(path, RUN_FILES)
        archive = path / "model.otp" if path.is_dir() else path
        try:
            content = json.loads((archive.parent / "shown.json").read_bytes())
            if content["model_sha256"] != hashlib.sha256(archive.read_bytes()).hexdigest():
                return None
            lines = [EstimateLine(**line) for line in content["lines"]]
            return cls(str(content["text"]), dict(content["described"]), lines)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None  # the model itself says what is wrong, or all that there is

    def to_bytes(self, archive: bytes) -> bytes:
        """What is kept, with the hash of the archive that it belongs to."""
        return json_text({"model_sha256": hashlib.sha256(archive).hexdigest()} | asdict(self)).encode("utf-8")

    def put(self, *, as_json: bool) -> None:
        """Print."""
        if as_json:
            write_out(json_text(self.described))
            return
        console = out()
        console.print(self.text, markup=False)
        if self.lines:
            console.print()
            console.print(lines_table(self.lines))


def print_fit(result: FitResult, bounds: pd.DataFrame | None) -> None:
    """How a fit ended, in a line or two, its notes, and the estimates."""
    console = out()
    kept = next((r.number + 1 for r in result.restarts if r.kept), 1)
    steps = sum(len(stage.losses) for stage in result.stages) or len(result.history)
    details = (
        f": {result.status.reason} (method {result.method.name}, loss {number(result.loss)}, {steps} steps, start "
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
    with folder_transaction(folder, RUN_FILES) as staged:
        errors = _standard_errors(result)
        for name, table in _tables(result, bounds, errors).items():
            text = table.to_csv(index=name == "intervals.csv", lineterminator="\n")
            write_bytes(staged / name, text.encode("utf-8"))
        summary = {**_summary(result, errors), **(source or {})}
        for name, content in (("params.json", result.model.params()), ("summary.json", summary)):
            write_bytes(staged / name, json_text(content).encode("utf-8"))
        for name, figure in _figures(result).items():
            write_bytes(staged / name, _png(figure))
        result.model.save(staged / "model.otp")
        archive = (staged / "model.otp").read_bytes()
        write_bytes(staged / "shown.json", Shown.of(result.model).to_bytes(archive))
        written = {path.name for path in staged.iterdir()}
    return [name for name in RUN_FILES if name in written]


def _tables(result: FitResult, bounds: pd.DataFrame | None, errors: Summary | None) -> dict[str, pd.DataFrame]:
    from pandas import DataFrame

    starts = [(r.number, r.seed, r.short_loss, r.loss, r.kept) for r in result.restarts]
    weights = result.row_weights
    tables = {
        "history.csv": DataFrame(list(result.history)),
        "restarts.csv": DataFrame(starts, columns=["number", "seed", "short_loss", "loss", "kept"]),
        "weights.csv": None if weights is None else DataFrame({"row": range(len(weights)), "weight": weights.round(6)}),
        "intervals.csv": bounds,
        "errors.csv": None if errors is None else errors.table,
    }
    return {name: table for name, table in tables.items() if table is not None}


def _figures(result: FitResult) -> dict[str, Figure]:
    """The graph, and the curve of a search; where nothing is to be learned there is none."""
    from otpdag import plots

    figures = {"graph.png": plots.draw_graph(result.model.graph)}
    if any(stage.losses for stage in result.stages):
        kept = next((r.number for r in result.restarts if r.kept), None)
        figures["learning.png"] = plots.search_curve(result.stages, kept=kept)
    return figures


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _standard_errors(result: FitResult, most_work: float = 2e7) -> Summary | None:
    """The summary with its standard errors; None where there are none, or they would take longer than a fit should.

    The work is rows times points times parameters: ``most_work`` is some ten seconds of it.
    """
    problem = result.problem
    if problem is None or result.status.failed:
        return None
    size = sum(math.prod(shape) for shape in problem.shapes.values())
    if problem.rows * problem.pace.points_per_row * size > most_work:
        return None
    summary = result.summary()
    return summary if summary.table["std_error"].notna().any() else None


def _summary(result: FitResult, errors: Summary | None) -> dict[str, Any]:
    from otpdag import __version__

    wanted = ("log-likelihood", "AIC", "BIC", "chi-square", "degrees of freedom", "p-value", "CFI", "TLI", "RMSEA")
    facts = {} if errors is None else {name: errors.all_facts().get(name) for name in wanted}
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
        "notes": [note for note in (result.notes if errors is None else errors.warnings) if note != str(status)],
        **{name: value for name, value in facts.items() if value is not None},
    }
