"""The drawing of a graph as SVG inside a page, whose nodes can be pointed at.

The page: sections of HTML around charts, in one file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import pandas as pd

from otpdag.errors import DataError, ModelError
from otpdag.graph import Graph
from otpdag.model import Model
from otpdag.plots.graph_drawing import draw_graph
from otpdag.report.run_folder import Run
from otpdag.report.series import Charts, Steps, hidden_series, note, number, observed_columns, series, text
from otpdag.tables import estimates

SMALLEST_SCALE = 0.7  # of a wide graph, at which names can still be read
_SVG = "http://www.w3.org/2000/svg"


def graph_picture(graph: Graph) -> str:
    """The graph as an ``svg`` element: node number ``k`` has ``data-node="k"`` and can be reached by the tab key.

    >>> picture = graph_picture(Graph([("a", "b")]))
    >>> picture.startswith("<svg"), picture.count("data-node")
    (True, 2)
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "otpdag"}):
        draw_graph(graph).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(buffer.getvalue())
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    for element in root.iter(f"{{{_SVG}}}g"):
        number = numbers.get(element.attrib.get("id", ""))
        if number is not None:
            node = graph.nodes[number]
            del element.attrib["id"]
            element.attrib |= {"data-node": str(number), "tabindex": "0", "role": "button", "aria-label": node}
    for element in root.iter(f"{{{_SVG}}}text"):
        element.attrib["pointer-events"] = "none"
    width = float(root.attrib["width"].removesuffix("pt"))
    root.attrib["style"] = f"min-width: {SMALLEST_SCALE * width:.0f}pt"  # a phone scrolls rather than shrink further
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    return ElementTree.tostring(root, encoding="unicode")


SHOWN_ROWS = 5_000
"""Rows that charts are made of: more change no picture."""

POSTERIOR_ROWS, POSTERIOR_DRAWS = 1_000, 20
"""Rows and draws of the pictures of hidden nodes: a histogram of 20,000 values."""

MOST_CHARTS = 60
"""Nodes with a picture of their own; a page of more is not read."""

FACTS = ("log-likelihood", "AIC", "BIC", "CFI", "RMSEA")
"""Of the summary that stand in the head of the page."""

TITLES = {
    "graph": "Graph",
    "estimates": "Estimates",
    "data": "Data and model",
    "checks": "Checks",
    "hidden": "Hidden nodes",
    "gaps": "Missing cells",
    "search": "Search",
    "again": "Run it again",
}


@dataclass(frozen=True)
class _Section:
    name: str
    body: str


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
    sections = [section for section in _sections(run, table, seed, command) if section.body]
    links = "".join(f'<li><a href="#{s.name}">{TITLES[s.name]}</a></li>' for s in sections)
    body = "".join(f'<section id="{s.name}"><h2>{TITLES[s.name]}</h2>{s.body}</section>' for s in sections)
    title = "otpdag: " + ", ".join(run.model.graph.nodes[:4]) + (", …" if len(run.model.graph.nodes) > 4 else "")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{_file('page.css')}</style></head><body>"
        f"<nav aria-label='Sections'><ul>{links}</ul></nav><main>{_head(run, table)}{body}</main>"
        f"<script>{_plotly()}</script><script>{_file('page.js')}</script></body></html>\n"
    )


def _sections(run: Run, table: pd.DataFrame | None, seed: int, command: str) -> Iterator[_Section]:
    counter = Charts()
    yield _Section("graph", _graph(run))
    yield _Section("estimates", f'{_about_errors(run)}<div class="scroll">{_estimates(run)}</div>')
    if table is not None and run.model.graph.is_dynamic:
        steps = Steps.of(run, table)
        yield _Section("data", series(run.model, steps, seed, counter))
        yield _Section("hidden", hidden_series(run.model, steps, seed, counter))
    elif table is not None:
        shown = table.head(SHOWN_ROWS)
        yield _Section("data", _data(run.model, shown, seed, counter, len(table)))
        yield _Section("checks", _checks(run.model, shown, seed, counter))
        yield _Section("hidden", _hidden(run.model, table.head(POSTERIOR_ROWS), seed, counter))
    if table is not None:
        yield _Section("gaps", _gaps(run.model, table, counter))
    yield _Section("search", _search(run, counter))
    yield _Section("again", _again(run, command))


# --- the head -------------------------------------------------------------------------------------------------------


def _head(run: Run, table: pd.DataFrame | None) -> str:
    summary, graph = run.summary, run.model.graph
    facts = {
        "rows": f"{int(summary['rows']):,}" if "rows" in summary else None,
        "nodes": f"{len(graph.nodes)}, {len(graph.hidden)} hidden" if graph.hidden else str(len(graph.nodes)),
        "empty cells": None if table is None else f"{_share_empty(run.model, table):.1%}",
        "method": summary.get("method"),
        "loss": number(summary.get("loss")),
        **{name: number(summary[name]) for name in FACTS if isinstance(summary.get(name), int | float)},
        "starts": summary.get("starts"),
        "seconds": summary.get("seconds"),
        "seed": summary.get("seed"),
    }
    listed = "".join(f"<div><dt>{k}</dt><dd>{text(v)}</dd></div>" for k, v in facts.items() if v is not None)
    return f"<h1>{_title(run)}</h1><dl class='facts'>{listed}</dl>{_status(summary)}"


def _title(run: Run) -> str:
    source = run.summary.get("data")
    return f"Fit of {text(source)}" if source else f"Fit of a model with {len(run.model.graph.nodes)} nodes"


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


# --- graph and estimates --------------------------------------------------------------------------------------------


def _graph(run: Run) -> str:
    graph = run.model.graph
    texts = "".join(
        f'<template id="estimates-{place}"><b>{text(node)}</b>{_estimates(run, node)}</template>'
        for place, node in enumerate(graph.nodes)
    )
    return (
        f'<div class="graph">{graph_picture(graph)}</div>{texts}'
        '<div id="about-node" aria-live="polite"><span class="soft">Point at a node, tap it or go to it by the tab '
        "key: its estimates stand here. Shaded nodes are observed, dashed ones hidden.</span></div>"
    )


def _estimates(run: Run, node: str | None = None) -> str:
    """A table of estimates, of all nodes or one; with ends of intervals where there are any."""
    table = estimates(run.model)
    ends, errors = _ends(run, table), _errors(run, table)
    columns = ["node", "parameter", "at", "estimate"] + ([] if errors is None else ["std error"])
    columns += [] if ends is None else ["lower", "upper"]
    columns += [] if errors is None else ["note"]
    head = "".join(f'<th class="{_align(name)}">{name}</th>' for name in columns)
    rows, last = [], ("", "")
    for place, row in enumerate(table.itertuples(index=False)):
        if node is not None and row.node != node:
            continue
        owner = (str(row.node), str(row.parameter))
        cells = [
            "" if owner[0] == last[0] else text(owner[0]),
            "" if owner == last else text(owner[1]),
            text(row.at),
            number(row.value) + (" (fixed)" if row.fixed and errors is None else ""),
        ]
        cells += [] if errors is None else [number(errors["std_error"].iloc[place])]
        cells += [] if ends is None else [number(ends[0][place]), number(ends[1][place])]
        cells += [] if errors is None else [text(errors["note"].iloc[place])]
        marks = zip(columns, cells, strict=True)
        rows.append("<tr>" + "".join(f'<td class="{_align(name)}">{cell}</td>' for name, cell in marks) + "</tr>")
        last = owner
    if not rows:
        return "<p class='soft'>No single numbers to show.</p>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _about_errors(run: Run) -> str:
    """What the intervals are."""
    if run.intervals is not None:
        return '<p class="soft">Lower and upper are the ends of bootstrap intervals.</p>'
    if run.errors is None:
        return ""
    return (
        '<p class="soft">Standard errors come from the curvature of the likelihood; lower and upper are the ends of '
        "95 % intervals. They hold where the model is right and rows are many.</p>"
    )


def _align(name: str) -> str:
    return "number" if name in ("estimate", "std error", "lower", "upper") else ""


def _errors(run: Run, table: pd.DataFrame) -> pd.DataFrame | None:
    """Standard errors of the same estimates; None where there are none."""
    columns = ["node", "parameter", "std_error", "lower", "upper", "note"]
    if run.errors is None or not set(columns) <= set(run.errors.columns) or len(run.errors) != len(table):
        return None
    if not (run.errors[["node", "parameter"]].astype(str).to_numpy() == table[["node", "parameter"]].to_numpy()).all():
        return None
    notes = ["" if pd.isna(said) else str(said) for said in run.errors["note"]]
    return run.errors[columns].assign(note=notes)


def _ends(run: Run, table: pd.DataFrame) -> tuple[list[Any], list[Any]] | None:
    """Lower and upper ends beside the estimates; None where a parameter has none."""
    if run.intervals is None or not {"node", "parameter", "lower", "upper"} <= set(run.intervals.columns):
        errors = _errors(run, table)
        return None if errors is None else (list(errors["lower"]), list(errors["upper"]))
    lower: list[Any] = [None] * len(table)
    upper: list[Any] = [None] * len(table)
    for (node, parameter), group in table.groupby(["node", "parameter"], sort=False):
        own = run.intervals[(run.intervals["node"] == node) & (run.intervals["parameter"] == parameter)]
        if len(own) != len(group):
            continue
        for place, low, high in zip(group.index, own["lower"], own["upper"], strict=True):
            lower[int(place)], upper[int(place)] = low, high
    return lower, upper


# --- data -----------------------------------------------------------------------------------------------------------


def _data(model: Model, table: pd.DataFrame, seed: int, charts: Charts, rows: int) -> str:
    from otpdag.report.charts import against_model

    given = table if any(type(model.mechanisms[node]).__name__ == "Given" for node in model.graph.nodes) else None
    made = model.sample(SHOWN_ROWS if given is None else len(table), seed=seed, given=given)
    boxes = []
    for node, column in list(observed_columns(model, table))[:MOST_CHARTS]:
        if column in made.columns and table[column].notna().any():
            figure = against_model(column, model.spaces[node], table[column], made[column])
            boxes.append(charts.add(figure, f"{column}: data against model"))
    part = f" Shown are the first {len(table):,} of {rows:,} rows." if len(table) < rows else ""
    words = (
        "Bars are the filled cells of the table, in orange is what the fitted model makes. Where cells are missing by "
        f"the values of other columns, the two may differ although the model is right.{part}"
    )
    return f'<p class="soft">{words}</p><div class="charts">{"".join(boxes)}</div>'


def _checks(model: Model, table: pd.DataFrame, seed: int, charts: Charts) -> str:
    from otpdag.report.charts import residuals

    try:
        check = model.check(table, seed=seed)
    except (ModelError, DataError) as error:
        return f"<p class='soft'>Not available here: {text(error)}</p>"
    bad = [str(node) for node, value in check["excess"].items() if value > 3]
    words = (
        f"These nodes do not follow their mechanism: {', '.join(map(text, bad))}. Another family, another parent or a "
        "hidden node may be missing."
        if bad
        else "No node's noise differs from what its mechanism assumes by more than chance."
    )
    verdict = f'<div class="note {"bad" if bad else "good"}">{words}</div>'
    how = (
        '<p class="soft">The noise that each node\'s mechanism must have had, compared with fresh noise; the worst '
        "node first.</p>"
    )
    return verdict + how + charts.add(residuals(check), "residual checks, worst first")


def _hidden(model: Model, table: pd.DataFrame, seed: int, charts: Charts) -> str:
    from otpdag.report.charts import posteriors

    if not model.graph.hidden:
        return ""
    try:
        drawn = model.posterior(table, draws=POSTERIOR_DRAWS, seed=seed)
    except (ModelError, DataError) as error:
        return f"<p class='soft'>Not available here: {text(error)}</p>"
    boxes = []
    for node in model.graph.hidden:
        for column in [name for name in drawn.columns if name == node or str(name).startswith(f"{node}.")]:
            figure = posteriors(str(column), model.spaces[node], drawn[column], drawn)
            boxes.append(charts.add(figure, f"{column}: posterior"))
    words = f"What the first {len(table):,} rows say about the hidden nodes, all rows together."
    return f'<p class="soft">{words}</p><div class="charts">{"".join(boxes[:MOST_CHARTS])}</div>'


def _gaps(model: Model, table: pd.DataFrame, charts: Charts) -> str:
    from otpdag.report.charts import gaps_by_column, gaps_together

    own = table[[column for _, column in observed_columns(model, table)]]
    if not own.shape[1] or not own.isna().to_numpy().any():
        return "<p>No cell of the model's columns is empty.</p>"
    words = (
        f"{int(own.isna().to_numpy().sum()):,} of {own.size:,} cells are empty. The estimates use every row as it is; "
        "they are right where gaps are random given what is seen."
    )
    return (
        f"<p>{words}</p>"
        + charts.add(gaps_by_column(own), "share of empty cells by column")
        + charts.add(gaps_together(own), "which columns are empty together")
    )


def _share_empty(model: Model, table: pd.DataFrame) -> float:
    own = table[[column for _, column in observed_columns(model, table)]]
    return float(own.isna().to_numpy().mean()) if own.size else 0.0


# --- the search, and how to repeat it -------------------------------------------------------------------------------


def _search(run: Run, charts: Charts) -> str:
    from otpdag.report.charts import learning

    parts = []
    if len(run.history) > 1:
        parts.append(charts.add(learning(run.history), "loss by step"))
    if len(run.restarts) > 1 and "loss" in run.restarts:
        losses = run.restarts["loss"].dropna()
        best = losses.min()
        near = int((losses <= best + 1e-3 * (1 + abs(best))).sum())
        parts.append(
            f"<p>{len(run.restarts)} starts; of the {len(losses)} that were continued, {near} ended within a "
            "thousandth of the best loss.</p>"
        )
    return "".join(parts)


def _again(run: Run, command: str) -> str:
    known = {
        key: run.summary[key] for key in ("otpdag", "seed", "data", "data_sha256") if run.summary.get(key) is not None
    }
    lines = [command] if command else []
    lines += [f"# {key}: {value}" for key, value in known.items()]
    return f"<pre>{text(chr(10).join(lines))}</pre>" if lines else ""


# --- small things ---------------------------------------------------------------------------------------------------


def _file(name: str) -> str:
    return files("otpdag.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ModelError("reports need the package plotly: pip install 'otpdag[report]'") from None
    return str(get_plotlyjs())
