"""Sections of a page that hold charts: data and model, checks, hidden nodes, gaps, the search."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from otpdag.data import Sequences
from otpdag.errors import DataError, ModelError, label_text, printable
from otpdag.model import Model
from otpdag.numerics import Array
from otpdag.plots import learning_curve, style
from otpdag.plots.pictures import DATA, MADE_ROWS, MODEL, draw_distribution, observed_columns
from otpdag.spaces import Space

SVG = "http://www.w3.org/2000/svg"
WIDTH, HEIGHT = 3.7, 2.4  # of a chart in inches: as wide as a phone, so that text has its size there
MOST_CHARTS = 60  # nodes with a picture of their own; a page of more is not read


# --- parts ------------------------------------------------------------------------------------------------------------


def text(value: object) -> str:
    """Names and values come from files: no tag and no control character of theirs reaches the page."""
    return html.escape(printable(str(value), keep="\n"))


def note(words: str, kind: str = "") -> str:
    """A box of words: a warning, or what its kind says (``good``, ``bad``)."""
    return f'<div class="note {kind}">{text(words)}</div>'


def soft(words: str, boxes: Sequence[str] = ()) -> str:
    """A remark, and charts below it."""
    charts = f'<div class="charts">{"".join(boxes)}</div>' if boxes else ""
    return f'<p class="soft">{text(words)}</p>{charts}'


def html_table(shown: pd.DataFrame, numbers: Collection[str]) -> str:
    """A table; some of its columns are numbers, which stand to the right."""
    marks = ["number" if name in numbers else "" for name in shown.columns]

    def line(tag: str, cells: Iterable[object]) -> str:
        marked = zip(cells, marks, strict=True)
        return "<tr>" + "".join(f'<{tag} class="{mark}">{text(cell)}</{tag}>' for cell, mark in marked) + "</tr>"

    body = "".join(line("td", cells) for cells in shown.itertuples(index=False))
    return f"<table><thead>{line('th', shown.columns)}</thead><tbody>{body}</tbody></table>"


def svg_of(figure: Figure) -> ElementTree.Element:
    """A figure as an ``svg`` element, its words as text."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "otpdag"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})  # `savefig` draws twice
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(printable(buffer.getvalue()))
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    return root


def chart(figure: Figure, label: str) -> str:
    """The box of a figure, which a reader who sees no pictures knows by its label."""
    root = svg_of(figure)
    for element in root.iter(f"{{{SVG}}}g"):
        element.attrib.pop("id", None)  # which another chart has too
    for element in root.iter(f"{{{SVG}}}path"):
        element.attrib["d"] = re.sub(r"(\.\d\d)\d+", r"\1", element.attrib["d"])  # points: more digits show nothing
    picture = ElementTree.tostring(root, encoding="unicode")
    return f'<div class="chart" role="img" aria-label="{text(label)}">{picture}</div>'


def some_rows(table: pd.DataFrame, most: int, seed: int) -> tuple[pd.DataFrame, str]:
    """So many rows at most, drawn at random in their order, and words about them: the first may be of one kind."""
    if len(table) <= most:
        return table, f"all {len(table):,} rows"
    return table.sample(most, random_state=seed).sort_index(), f"{most:,} of {len(table):,} rows, drawn at random"


@dataclass(frozen=True)
class Steps:
    """A table whose rows are steps in their order.

    Attributes:
        table: All steps, sequence after sequence.
        shown: Those of the first sequence that charts show.
        x: Where these lie on the axis: the values of the column of times if they are numbers, else 0, 1, 2, ...
        axis: What that axis is called.
    """

    table: pd.DataFrame
    shown: pd.DataFrame
    x: Array
    axis: str

    @classmethod
    def of(cls, table: pd.DataFrame, sequence: str | None, time: str | None, most: int = 2_000) -> Steps:
        """The steps of a table whose columns tell sequences apart and order them; charts show no more than so many."""
        ordered = Sequences(table.reset_index(drop=True), sequence=sequence, time=time)
        rows = table.iloc[ordered.index.to_numpy()].reset_index(drop=True)
        shown = rows.head(min(int(ordered.lengths[0]), most))
        if time in rows.columns and pd.api.types.is_numeric_dtype(rows[time]):
            return cls(rows, shown, shown[time].to_numpy(dtype=float), str(time))
        return cls(rows, shown, np.arange(len(shown), dtype=float), "step")


# --- sections ---------------------------------------------------------------------------------------------------------


def data_and_model(model: Model, table: pd.DataFrame, steps: Steps | None, seed: int, *, paths: int = 300) -> str:
    """Each observed column beside what the model makes.

    Of sequences also the first one over the central 90 % of what ``paths`` sequences of the model have at each step.
    """
    given = bool(model.structure.given)
    shown, which = some_rows(table, MADE_ROWS, seed) if steps is None else (steps.table, "")
    if steps is None:
        made = model.sample(len(shown) if given else MADE_ROWS, seed=seed, given=shown if given else None)
    elif given:
        return soft("No pictures: the model has given nodes, which it cannot make.")
    else:
        made = model.sample(paths, seed=seed, length=len(steps.shown))
    boxes = []
    for node, column in observed_columns(model, shown)[:MOST_CHARTS]:
        if column not in made.columns or not shown[column].notna().any():
            continue
        if steps is not None and not model.spaces[node].is_discrete:
            values = made[column].to_numpy(dtype=float).reshape(paths, -1)
            seen = steps.shown[column].to_numpy(dtype=float, na_value=np.nan)
            figure = along_time(column, steps.x, values, seen, axis=steps.axis)
            boxes.append(chart(figure, f"{column}: the series over the model's band"))
        figure = against_model(column, model.spaces[node], shown[column], made[column])
        boxes.append(chart(figure, f"{column}: data against model"))
    words = (
        f"Bars show the filled cells of {which}; orange is what the fitted model generates. Where other columns say "
        "which cells are missing, the two may differ although the model is right."
        if steps is None
        else "The first sequence over the central 90 % of what the fitted model makes at each step, without knowing "
        "the data; beside it the values of all steps, in orange those of the model."
    )
    return soft(words, boxes)


def hidden_nodes(model: Model, table: pd.DataFrame, steps: Steps | None, seed: int, *, rows: int = 1_000) -> str:
    """What some rows say about the hidden nodes: 20 draws of each, for a histogram; of sequences, step by step."""
    if not model.graph.hidden:
        return ""
    some, which = some_rows(table, rows, seed)
    asked: Any = some if steps is None else Sequences(steps.shown)
    try:
        drawn = model.posterior(asked, draws=20 if steps is None else 100, seed=seed)
    except (ModelError, DataError) as error:
        return soft(f"Not available here: {error}")
    boxes = []
    for node in model.graph.hidden:
        for column in [str(name) for name in drawn.columns if name == node or str(name).startswith(f"{node}.")]:
            if steps is None:
                figure = posteriors(column, model.spaces[node], drawn[column])
                boxes.append(chart(figure, f"{column}: posterior"))
                continue
            by_step = drawn[column].to_numpy().reshape(len(steps.shown), -1)
            if model.spaces[node].is_discrete:
                told = pd.DataFrame({label: (by_step == label).mean(1) for label in model.labels(node)})
                figure = states(column, steps.x, told, axis=steps.axis)
            else:
                figure = along_time(column, steps.x, by_step.astype(float).T, axis=steps.axis)
            boxes.append(chart(figure, f"{column}: posterior along the steps"))
    words = (
        f"Draws of the hidden nodes given each row ({which}), taken together."
        if steps is None
        else "What the whole of the first sequence says about the hidden nodes at each of its steps."
    )
    return soft(words, boxes[:MOST_CHARTS])


Claims: TypeAlias = "pd.DataFrame | str"  # what `model.check` says of the claims of a model, or why it says nothing

# what to try, by words of a finding
ADVICE = {
    "skewed": "m.LogNormal() or m.Gamma() where values are above zero, or a transformed column",
    "tails": "m.StudentT() for numbers, m.NegativeBinomial() for counts",
    "curved": "a bend in its terms, poly(x, 2) or spline(x, 5)",
    "differs along": "a category or a bend in its terms",
    "spread": "a scale that follows its parents, scale='~ x', or m.LogNormal() or m.Gamma()",
    "not separate": "an interaction in its terms: x * C(z)",
    "depends on": "an edge between the two, or a hidden parent of both",
    "elsewhere": "a fit to these rows: the parameters are of others",
}


def claims(model: Model, table: pd.DataFrame, seed: int) -> Claims:
    """What rows contradict, or why that is not known."""
    try:
        return model.check(table, seed=seed).reset_index()
    except (ModelError, DataError) as error:
        return f"Not available here: {error}"


def contradicted(check: pd.DataFrame) -> pd.DataFrame:
    """The claims that do not hold."""
    return check[check["adjusted"] < 0.01]


def checks(check: Claims) -> str:
    """What of the model the rows contradict."""
    if isinstance(check, str):
        return soft(check)
    bad = contradicted(check)
    words = (
        f"{len(bad)} of the model's {len(check)} testable claims do not hold."
        if len(bad)
        else f"None of the model's {len(check)} testable claims is contradicted beyond chance."
    )
    how = (
        "Each node against its distribution given its parents, and each pair that the graph keeps apart; p-values "
        "allow for estimated parameters, and adjusted ones for the number of tests: one right model in a hundred "
        "has any below 0.01."
    )
    shown = check[(check["other"] == "") | (check["adjusted"] < 0.5)].head(MOST_CHARTS)
    shown = shown.drop(columns="other").assign(p=shown["p"].map("{:.2g}".format))
    shown["adjusted"] = shown["adjusted"].map("{:.2g}".format)
    listed = html_table(shown[["node", "p", "adjusted", "finding"]], ["p", "adjusted"])
    return note(words, "bad" if len(bad) else "good") + soft(how) + f'<div class="scroll">{listed}</div>'


def what_next(check: Claims | None, advice: str) -> list[str]:
    """What to do about a fit: its own advice, then what may mend the worst findings."""
    said = [f"{advice[0].upper()}{advice[1:]}."] if advice else []
    if isinstance(check, pd.DataFrame):
        for one in contradicted(check).head(3).itertuples():
            finding = str(one.finding)
            cure = next(cure for words, cure in ADVICE.items() if words in finding)
            said.append(f"{one.node}: {finding}. Try {cure}.")
    return said or ["Nothing needs to change: ask the model for effects, predictions and samples."]


def distance(model: Model, table: pd.DataFrame | Sequences, seed: int) -> str:
    """How far the model is from the data, in standard deviations and in each column's units."""
    try:
        told = model.distance(table, seed=seed)
    except (ModelError, DataError) as error:
        return soft(f"Not available here: {error}")
    sentence = told.describe()
    verdict = note(f"{sentence[0].upper()}{sentence[1:]}.", "bad" if float(told) > told.upper else "good")
    how = (
        "The optimal transport distance of the data from rows of the model, in the column's own units and in standard "
    )
    how += "deviations; chance and upper: the mean and the 95 % limit of data that the model made."
    shown = told.nodes.map("{:.3g}".format).reset_index()
    return verdict + soft(how) + f'<div class="scroll">{html_table(shown, list(shown.columns[1:]))}</div>'


def gaps(model: Model, table: pd.DataFrame, most: int = 12) -> str:
    """How much of each column is empty, and which are empty together: the commonest patterns."""
    holes = table[[column for _, column in observed_columns(model, table)]].isna()
    if not holes.to_numpy().any():
        return "<p>No cell of the model's columns is empty.</p>"
    words = (
        f"{int(holes.to_numpy().sum()):,} of {holes.size:,} cells are empty. The estimates use every row as it is; "
        "they are valid if cells are missing at random, given what is observed."
    )
    shares = chart(bars(holes.mean(), "share of cells that are empty"), "share of empty cells by column")
    patterns: Any = holes.value_counts().head(most)
    empty = [", ".join(holes.columns[list(pattern)]) or "none" for pattern in patterns.index]
    listed = pd.DataFrame({"rows": patterns.map("{:,}".format).to_numpy(), "empty together": empty})
    together = html_table(listed, ["rows"])
    return f'<p>{words}</p><div class="charts">{shares}<div class="scroll">{together}</div></div>'


def search(history: pd.DataFrame, restarts: pd.DataFrame) -> str:
    """The course of the loss, and how many starts came to the same end."""
    parts = []
    if len(history) > 1 and "loss" in history:
        words = "The loss of the start that was kept, by step."
        ax = _axes()
        learning_curve({"loss": history["loss"].tolist()}, ax=ax)
        parts.append(soft(words, [chart(_finished(ax, "step", "loss"), "loss by step")]))
    if len(restarts) > 1 and "loss" in restarts:
        losses = restarts["loss"].dropna()
        best = losses.min()
        near = int((losses <= best + 1e-3 * (1 + abs(best))).sum())
        many = f"of the {len(losses)} that were continued, {near} ended within a thousandth of the best loss"
        parts.append(f"<p>{len(restarts)} starts; {many if len(losses) > 1 else 'the best was continued'}.</p>")
    return "".join(parts)


# --- charts -----------------------------------------------------------------------------------------------------------


def against_model(node: str, space: Space, data: pd.Series[Any], made: pd.Series[Any]) -> Figure:
    """Shares of a column's values beside those of values that the model makes."""
    ax = _axes()
    draw_distribution(ax, space, data, made)
    upright = max((len(name.get_text()) for name in ax.get_xticklabels() if name.get_rotation()), default=0)
    style.figure_of(ax).set_figheight(HEIGHT + 0.06 * upright)
    return _finished(ax, node, "share of rows")


def posteriors(node: str, space: Space, drawn: pd.Series[Any]) -> Figure:
    """A hidden node as rows tell it: how often each category, or the spread of a number."""
    if space.is_discrete:
        shares = drawn.map(label_text).value_counts(normalize=True).sort_index()
        return bars(shares, f"share of draws of {node} (hidden)", MODEL)
    ax = _axes()
    ax.hist(drawn.to_numpy(dtype=float), 40, weights=np.full(len(drawn), 1 / len(drawn)), color=MODEL)
    return _finished(ax, f"{node} (hidden)", "share of draws")


def along_time(name: str, x: Array, values: Array, seen: Array | None = None, *, axis: str = "step") -> Figure:
    """The central 90 % of the model's values along the steps of a sequence, and the series itself where it is seen.

    Args:
        name: What the axis is called.
        x: Where the steps lie.
        values: Draws of each step (draws, steps).
        seen: The data, NaN where they are missing.
        axis: What the steps are called.
    """
    ax = _axes()
    ax.fill_between(x, *np.quantile(values, [0.05, 0.95], axis=0), color=MODEL, alpha=0.2, lw=0, label="central 90 %")
    ax.plot(x, values.mean(0), color=MODEL, linewidth=1.4, label="model")
    if seen is not None:
        ax.plot(x, seen, "o-" if len(x) <= 200 else "-", color=DATA, linewidth=0.8, markersize=2.2, label="data")
    return _finished(ax, axis, name)


def states(node: str, x: Array, shares: pd.DataFrame, *, axis: str = "step") -> Figure:
    """How probable each category of a hidden node is along the steps of a sequence, stacked to one."""
    ax = _axes()
    colours = [style.colour(number) for number in range(shares.shape[1])]
    ax.stackplot(x, shares.to_numpy().T, labels=list(map(str, shares.columns)), colors=colours, alpha=0.6)
    ax.set(xlim=(x.min(), x.max()), ylim=(0, 1))
    return _finished(ax, axis, f"probability of {node}")


def bars(values: pd.Series[Any], axis: str, colour: str = DATA) -> Figure:
    """A bar for each share, one below the other, between its name and what it is."""
    ax = _axes(0.21 * len(values) + 0.6)
    marks = ax.barh(range(len(values)), values, color=colour)
    ax.bar_label(marks, fmt="{:.1%}", padding=3, fontsize=style.SMALL_FONT)
    ax.set_yticks(range(len(values)), [style.shortened(str(name)) for name in values.index])
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.margins(x=0.25)
    return _finished(ax, axis, "")


def _axes(height: float = HEIGHT) -> Axes:
    return style.open_axes(style.axes_of(None, WIDTH, height))


def _finished(ax: Axes, x: str, y: str) -> Figure:
    """The figure, its axes named, with a legend where there are several things to tell apart."""
    ax.set(xlabel=x, ylabel=y)
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, fontsize=style.SMALL_FONT)
    return style.figure_of(ax)
