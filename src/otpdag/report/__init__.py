"""One page that shows a fit: graph, estimates, data against model, what is missing, how it ended.

It is a single file: it opens from disk, on a phone and on paper, and no request leaves it. Here the folder of a fit is
read back, and HTML is put around the sections that hold charts.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd

from otpdag.answers.summary import explained
from otpdag.errors import DataError, ModelError, printable
from otpdag.graph import Graph
from otpdag.model import Model, load
from otpdag.plots.graph import draw_graph
from otpdag.plots.pictures import observed_columns
from otpdag.progress import shown_while_running
from otpdag.report import sections as s
from otpdag.report.sections import SVG, html_table, note, soft, svg_of, text
from otpdag.tables import estimates, interval_ends, number

__all__ = ["Run", "read_run", "report_page"]

TITLES = {
    "short": "In short",
    "graph": "Graph",
    "estimates": "Estimates",
    "checks": "Checks",
    "data": "Data and model",
    "distance": "Distance from the data",
    "hidden": "Hidden nodes",
    "gaps": "Missing cells",
    "search": "Search",
    "again": "Run it again",
}
TEXTS = ("method", "reason", "advice", "data", "data_sha256", "command", "sequence", "time")  # in summary.json
NUMBERS = {"step", "loss", "std_error", "lower", "upper"}  # columns of tables beside it
LOOK: Any = {"text.parse_math": False, "axes.formatter.useoffset": False, "font.size": 9.0}
LOOK |= {"xtick.labelsize": "small", "ytick.labelsize": "small"}


# --- the folder of a fit ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A fitted model and how it came about.

    Attributes:
        model: The fitted model.
        summary: What ``summary.json`` says: method, status, loss, rows, seed, version, notes, the table's name.
        history: Loss and its terms at each step of the start that was kept.
        restarts: Every start with its loss.
        intervals: Ends of intervals by node, parameter and index, where they were asked for.
        errors: Standard errors, intervals and notes of all estimates, in their order, where there are any.
    """

    model: Model
    summary: dict[str, Any] = field(default_factory=dict)
    history: pd.DataFrame = field(default_factory=pd.DataFrame)
    restarts: pd.DataFrame = field(default_factory=pd.DataFrame)
    intervals: pd.DataFrame | None = None
    errors: pd.DataFrame | None = None


def read_run(folder: str | Path) -> Run:
    """Read the folder that ``otpdag fit`` wrote.

    Raises:
        ModelError: There is no such folder, or it holds no fit.
        DataError: One of its files cannot be read; the message names it.
    """
    folder = Path(folder)
    if not (folder / "model.otp").is_file():
        raise ModelError(f"{str(folder)!r} must be the folder of a fit; it has no model.otp")
    tables = {name: _table(folder / f"{name}.csv") for name in ("history", "restarts", "intervals", "errors")}
    there: dict[str, Any] = {name: table for name, table in tables.items() if table is not None}
    return Run(load(folder / "model.otp"), _summary(folder / "summary.json"), **there)


def _summary(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: must hold an object; got {type(content).__name__}")
    for name, kind in {**dict.fromkeys(TEXTS, str), "rows": int, "converged": bool, "notes": list}.items():
        if not isinstance(content.get(name), kind | None):
            raise DataError(f"{path}: {name!r} must be {kind.__name__}; got {content[name]!r:.60}")
    return content


def _table(path: Path) -> pd.DataFrame | None:
    try:
        if not path.is_file():
            return None
        table = pd.read_csv(path)
        for name in NUMBERS.intersection(table.columns):
            pd.to_numeric(table[name])
    except pd.errors.EmptyDataError:
        return pd.DataFrame()
    except (ValueError, TypeError, OverflowError) as error:  # pandas' parser errors are ValueErrors
        raise DataError(f"{path}: cannot be read as a table: {error}") from None
    return table


# --- the page ---------------------------------------------------------------------------------------------------------


def report_page(run: Run, table: pd.DataFrame | None = None, *, seed: int = 0, command: str = "") -> str:
    """A page about a fit, as HTML that needs nothing else.

    Args:
        run: The fit.
        table: The rows it was fitted to; without them there are no pictures of data.
        seed: Determines the model's rows that data are compared with.
        command: How the fit was run, to be shown.

    Returns:
        The page.
    """
    with mpl.rc_context(LOOK), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has fonts of its own
        parts = shown_while_running(_sections(run, table, seed, command), "report", len(TITLES))
        sections = {name: body for name, body in parts if body}
    links = "".join(f'<li><a href="#{name}">{TITLES[name]}</a></li>' for name in sections)
    body = "".join(f'<section id="{name}"><h2>{TITLES[name]}</h2>{body}</section>' for name, body in sections.items())
    title = "otpdag: " + ", ".join(run.model.graph.nodes[:4]) + (", …" if len(run.model.graph.nodes) > 4 else "")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{_file('page.css')}</style></head><body>"
        f"<nav aria-label='Sections'><ul>{links}</ul></nav><main>{_head(run)}{body}</main>"
        f"<script>{_file('page.js')}</script></body></html>\n"
    )


def _sections(run: Run, table: pd.DataFrame | None, seed: int, command: str) -> Iterator[tuple[str, str]]:
    """Names and bodies, in the order of the page."""
    model, told = run.model, _told(run)
    table = None if model.structure.shared else table  # its sections look at rows one by one
    check = None if table is None or model.graph.is_dynamic else s.claims(model, table, seed)
    yield "short", _short(run, told, check) + _facts(run, table)
    yield "graph", _graph(model, told)
    yield "estimates", f'{_about_errors(run)}<div class="scroll">{_estimates(told)}</div>{_explained(model, seed)}'
    if check is not None:
        yield "checks", s.checks(check)
    if table is not None:
        order = run.summary.get("sequence"), run.summary.get("time")
        steps = s.Steps.of(table, *order) if model.graph.is_dynamic else None
        yield "data", s.data_and_model(model, table, steps, seed)
        if steps is None:
            yield "distance", s.distance(model, table, seed)
        yield "hidden", s.hidden_nodes(model, table, steps, seed)
        yield "gaps", s.gaps(model, table)
    yield "search", s.search(run.history, run.restarts)
    yield "again", _again(run, command)


# --- the head -------------------------------------------------------------------------------------------------------


def _head(run: Run) -> str:
    data = run.summary.get("data")  # with its folders under "Run it again"
    title = text(Path(data).name if data else f"a model with {len(run.model.graph.nodes)} nodes")
    return f"<h1>Fit of {title}</h1>{_status(run.summary)}"


def _facts(run: Run, table: pd.DataFrame | None) -> str:
    summary, graph = run.summary, run.model.graph
    told = dict.fromkeys(("log-likelihood", "AIC", "BIC"), 1.0) | dict.fromkeys(("CFI", "RMSEA", "SRMR"), 0.01)
    told = {name: spread for name, spread in told.items() if isinstance(summary.get(name), int | float)}
    facts = {
        "rows": f"{int(summary['rows']):,}" if "rows" in summary else None,
        "nodes": f"{len(graph.nodes)}, {len(graph.hidden)} hidden" if graph.hidden else str(len(graph.nodes)),
        "empty cells": None if table is None else f"{_share_empty(run.model, table):.1%}",
        "method": summary.get("method"),
        "loss": number(summary.get("loss")) or None,
        **{name: number(summary[name], spread) for name, spread in told.items()},
        "starts": summary.get("starts"),
        "seconds": summary.get("seconds"),
        "seed": summary.get("seed"),
    }
    listed = "".join(f"<div><dt>{k}</dt><dd>{text(v)}</dd></div>" for k, v in facts.items() if v is not None)
    return f"<dl class='facts'>{listed}</dl>"


def _short(run: Run, told: pd.DataFrame, check: s.Claims | None) -> str:
    """What was estimated, how sure it is, whether it fits, what to do next: four answers in words."""
    graph, summary = run.model.graph, run.summary
    rows = f" from {int(summary['rows']):,} rows" if "rows" in summary else ""
    never = f"; never observed: {', '.join(graph.hidden)}" * bool(graph.hidden)
    free = f"{run.model.n_parameters:,} free parameters of {len(graph.nodes)} nodes"
    answers = {"What was estimated": f"{free}{rows}{never}."}
    sure = "No intervals were made."
    if "std error" in told or run.intervals is not None:
        without = int((told["note"] == "not identified").sum()) if "note" in told else 0
        sure = f"The estimates have {_level(run):.0%} intervals"
        sure += f"; {without} parameters are not determined by the data." if without else "."
    answers["How sure"] = sure
    if isinstance(check, pd.DataFrame):
        bad = s.contradicted(check)
        worst = ", ".join(dict.fromkeys(bad["node"].astype(str)))
        answers["Does it fit"] = (
            f"Not everywhere: see {worst} below." if len(bad) else f"Yes, as far as {len(check)} tests can tell."
        )
    advice = "" if summary.get("converged", True) else summary.get("advice", "")
    lines = [f"<dt>{name}</dt><dd>{text(words)}</dd>" for name, words in answers.items()]
    lines.append("<dt>What next</dt>" + "".join(f"<dd>{text(words)}</dd>" for words in s.what_next(check, advice)))
    return f'<dl class="short">{"".join(lines)}</dl>'


def _explained(model: Model, seed: int) -> str:
    """R-squared of numbers."""
    shares = explained(model.fitted, seed=seed)
    if not shares:
        return ""
    shown = pd.DataFrame({"node": list(shares), "R\u00b2": [f"{share:.2f}" for share in shares.values()]})
    words = "The share of each number's variance that its parents explain, according to the model."
    return soft(words) + f'<div class="scroll">{html_table(shown, list(shown.columns[1:]))}</div>'


def _status(summary: dict[str, Any]) -> str:
    if "converged" not in summary:
        return ""
    good = bool(summary["converged"])
    words = "The fit converged" if good else "The fit did not converge: its estimates are not the end of the search"
    reason, advice = summary.get("reason", ""), summary.get("advice", "")
    lines = [note(f"{words}: {reason}." if good else f"{words} ({reason}).", "good" if good else "bad")]
    if advice:
        lines.append(note(f"What to do: {advice}."))
    return "".join(lines) + "".join(note(line) for line in summary.get("notes", ()))


def _again(run: Run, command: str) -> str:
    facts = ((key, run.summary.get(key)) for key in ("otpdag", "seed", "data", "data_sha256"))
    lines = [command] if command else []
    lines += [f"# {key}: {value}" for key, value in facts if value is not None]
    return f"<pre>{text(chr(10).join(lines))}</pre>" if lines else ""


# --- graph and estimates ----------------------------------------------------------------------------------------------


def _graph(model: Model, told: pd.DataFrame) -> str:
    graph = model.graph
    texts = "".join(
        f'<template id="estimates-{place}"><b>{text(node)}</b>{_estimates(told[told["node"] == node])}</template>'
        for place, node in enumerate(graph.nodes)
    )
    return (
        f'<div class="graph scroll">{graph_picture(graph, _coefficients(model))}</div>{texts}'
        '<div id="about-node" aria-live="polite"><span class="soft">Point at a node, tap it or reach it by the Tab '
        "key, and its estimates appear here. Shaded nodes are observed, dashed ones hidden; edges show slopes."
        "</span></div>"
    )


def _coefficients(model: Model) -> dict[tuple[str, str], str]:
    """The slope of each edge that has one."""
    table = estimates(model)
    slopes = table[table["parameter"] == "weight"].set_index(["at", "node"])["value"]
    return {edge: f"{slopes.loc[edge]:.3g}" for edge in model.graph.edges if list(slopes.index).count(edge) == 1}


def graph_picture(
    graph: Graph, labels: Mapping[tuple[str, str], str] | None = None, smallest_scale: float = 0.7
) -> str:
    """The graph as an ``svg`` element: node number ``k`` has ``data-node="k"`` and can be reached by the tab key.

    A wide graph is not shrunk below ``smallest_scale``, at which names can still be read.

    >>> picture = graph_picture(Graph([("a", "b")]))
    >>> picture.startswith("<svg"), picture.count("data-node")
    (True, 2)
    """
    root = svg_of(draw_graph(graph, labels=labels))
    numbers = {printable(node): str(number) for number, node in enumerate(graph.nodes)}
    for element in root.iter(f"{{{SVG}}}g"):
        name = element.attrib.pop("id", "")
        if name in numbers:
            element.attrib |= {"data-node": numbers[name], "tabindex": "0", "role": "button", "aria-label": name}
    for element in root.iter(f"{{{SVG}}}text"):
        element.attrib["pointer-events"] = "none"
    width = float(root.attrib["width"].removesuffix("pt"))
    root.attrib["style"] = f"min-width: {smallest_scale * width:.0f}pt"  # a phone scrolls rather than shrink further
    return ElementTree.tostring(root, encoding="unicode")


def _told(run: Run) -> pd.DataFrame:
    """What the table of estimates says, in words; ends of intervals and standard errors where there are any."""
    table = estimates(run.model)
    errors = _errors(run, table)
    fixed = np.where(table["fixed"] & (errors is None), " (fixed)", "")
    spreads = np.full(len(table), np.nan) if errors is None else errors["std_error"]
    told = table[["node", "parameter", "at"]].astype(str)
    told["estimate"] = [*map(number, table["value"], spreads)]
    told["estimate"] += fixed
    if errors is not None:
        told["std error"] = [*map(number, spreads, spreads)]
    ends = None if errors is None else errors[["lower", "upper"]]
    if run.intervals is not None and {"node", "parameter", "lower", "upper"} <= set(run.intervals.columns):
        ends = pd.DataFrame(interval_ends(table, run.intervals))
    if ends is not None:
        told[f"{_level(run):.0%} from"], told["to"] = ([*map(number, end, spreads)] for _, end in ends.items())
    return told if errors is None else told.assign(note=errors["note"])


def _level(run: Run) -> float:
    """Of the intervals that are shown."""
    known = run.summary.get("level" if run.intervals is None else "interval_level")
    return float(known) if known else 0.95 if run.intervals is None else 0.9


def _estimates(told: pd.DataFrame) -> str:
    """Lines of the table of estimates; what is said in the line above is not said again."""
    if told.empty:
        return soft("No single numbers to show.")
    owners = told[["node", "parameter"]]
    said = owners == owners.shift()
    shown = told.assign(node=owners["node"].mask(said["node"], ""))
    shown["parameter"] = owners["parameter"].mask(said.all(axis=1), "")
    return html_table(shown, [str(name) for name in shown.columns.difference(["node", "parameter", "at", "note"])])


def _about_errors(run: Run) -> str:
    """What the intervals are; where there are none, why the head of the page says."""
    if run.intervals is not None:
        return soft(f"{_level(run):.0%} intervals come from fits to resampled rows.")
    if run.errors is None:
        return soft("There are no standard errors and no intervals: `otpdag fit --intervals 200` resamples rows.")
    return soft(
        f"Standard errors come from the curvature of the likelihood, and {_level(run):.0%} intervals from them. "
        "They are valid if the model is right and rows are many."
    )


def _errors(run: Run, table: pd.DataFrame) -> pd.DataFrame | None:
    """Standard errors of the same estimates; None where there are none."""
    columns = ["node", "parameter", "std_error", "lower", "upper", "note"]
    if run.errors is None or not set(columns) <= set(run.errors.columns):
        return None
    known, told = (owner[["node", "parameter"]].astype(str).to_numpy() for owner in (run.errors, table))
    notes = ["" if pd.isna(said) else str(said) for said in run.errors["note"]]
    return run.errors[columns].assign(note=notes) if np.array_equal(known, told) else None


# --- small things -----------------------------------------------------------------------------------------------------


def _share_empty(model: Model, table: pd.DataFrame) -> float:
    own = table[[column for _, column in observed_columns(model, table)]]
    return float(own.isna().to_numpy().mean()) if own.size else 0.0


def _file(name: str) -> str:
    return files("otpdag.report").joinpath(name).read_text(encoding="utf-8")
