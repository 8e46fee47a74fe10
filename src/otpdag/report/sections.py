"""Sections of a page that hold charts, drawn by Plotly: data and model, checks, hidden nodes, gaps, the search."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from otpdag.data import Sequences
from otpdag.errors import DataError, ModelError, label_text
from otpdag.mechanisms import Given
from otpdag.model import Model
from otpdag.plots.pictures import MADE_ROWS, compared_shares, observed_columns
from otpdag.plots.style import COLOURS
from otpdag.report import note, soft, text
from otpdag.spaces import Space

Floats: TypeAlias = NDArray[np.float64]

DATA, MODEL, ALARM = "#4c78a8", "#e08214", "#c0392b"
_FOREIGN_TAG = re.compile(r"<(?!br>|extra>|/extra>)")  # Plotly draws some tags: those of names are none of ours
MOST_CHARTS = 60  # nodes with a picture of their own; a page of more is not read


# --- parts ------------------------------------------------------------------------------------------------------------


class Charts:
    """Puts figures into the page: their numbers as JSON, their place as a box."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, figure: Any, label: str) -> str:
        """The box of a figure, which a reader who sees no pictures knows by its label."""
        self._count += 1
        content = _FOREIGN_TAG.sub("&lt;", figure.to_json()).replace("<", "\\u003c")
        return (
            f'<script type="application/json" id="figure-{self._count}">{content}</script>'
            f'<div class="chart" role="img" aria-label="{text(label)}" data-figure="figure-{self._count}" '
            f'style="height:{int(figure.layout.height or 300)}px"></div>'
        )


@dataclass(frozen=True)
class Steps:
    """A table whose rows are steps in their order.

    Attributes:
        table: All steps, sequence after sequence.
        first: How many of them the first sequence has, and charts show.
        x: Where these lie on the axis: the values of the column of times if they are numbers, else 0, 1, 2, ...
        axis: What that axis is called.
    """

    table: pd.DataFrame
    first: int
    x: Floats
    axis: str

    @classmethod
    def of(cls, table: pd.DataFrame, sequence: str | None, time: str | None, most: int = 2_000) -> Steps:
        """The steps of a table whose columns tell sequences apart and order them; charts show no more than so many."""
        ordered = Sequences(table.reset_index(drop=True), sequence=sequence, time=time)
        rows = table.iloc[ordered.index.to_numpy()].reset_index(drop=True)
        first = min(int(ordered.lengths[0]), most)
        if time in rows.columns and pd.api.types.is_numeric_dtype(rows[time]):
            return cls(rows, first, rows[time].to_numpy(dtype=float)[:first], str(time))
        return cls(rows, first, np.arange(first, dtype=float), "step")

    def shown(self) -> pd.DataFrame:
        """The steps that charts show."""
        return self.table.head(self.first)


# --- sections ---------------------------------------------------------------------------------------------------------


def data_and_model(
    model: Model, table: pd.DataFrame, steps: Steps | None, seed: int, charts: Charts, *, paths: int = 300
) -> str:
    """Each observed column beside what the model makes.

    Of sequences also the first one over the central 90 % of what ``paths`` sequences of the model have at each step.
    """
    given = any(isinstance(mechanism, Given) for mechanism in model.mechanisms.values())
    shown = table.head(MADE_ROWS) if steps is None else steps.table
    if steps is None:
        made = model.sample(len(shown) if given else MADE_ROWS, seed=seed, given=shown if given else None)
    elif given:
        return soft("No pictures: the model has given nodes, which it cannot make.")
    else:
        made = model.sample(paths, seed=seed, length=steps.first)
    boxes = []
    for node, column in observed_columns(model, shown)[:MOST_CHARTS]:
        if column not in made.columns or not shown[column].notna().any():
            continue
        if steps is not None and not model.spaces[node].is_discrete:
            values = made[column].to_numpy(dtype=float).reshape(paths, steps.first)
            seen = steps.shown()[column].to_numpy(dtype=float, na_value=np.nan)
            figure = along_time(column, steps.x, values, seen, axis=steps.axis)
            boxes.append(charts.add(figure, f"{column}: the series over the model's band"))
        figure = against_model(column, model.spaces[node], shown[column], made[column])
        boxes.append(charts.add(figure, f"{column}: data against model"))
    part = f" Shown are the first {len(shown):,} of {len(table):,} rows." if len(shown) < len(table) else ""
    words = (
        "Bars are the filled cells of the table, in orange is what the fitted model makes. Where cells are missing by "
        f"the values of other columns, the two may differ although the model is right.{part}"
        if steps is None
        else "The first sequence over the central 90 % of what the fitted model makes at each step, without knowing "
        "the data; beside it the values of all steps, in orange those of the model."
    )
    return soft(words, boxes)


def hidden_nodes(
    model: Model, table: pd.DataFrame, steps: Steps | None, seed: int, charts: Charts, *, rows: int = 1_000
) -> str:
    """What the first rows say about the hidden nodes: 20 draws of each, for a histogram; of sequences, step by step."""
    if not model.graph.hidden:
        return ""
    asked: Any = table.head(rows) if steps is None else Sequences(steps.shown())
    try:
        drawn = model.posterior(asked, draws=20 if steps is None else 100, seed=seed)
    except (ModelError, DataError) as error:
        return soft(f"Not available here: {error}")
    boxes = []
    for node in model.graph.hidden:
        for column in [str(name) for name in drawn.columns if name == node or str(name).startswith(f"{node}.")]:
            if steps is None:
                figure = posteriors(column, model.spaces[node], drawn[column])
                boxes.append(charts.add(figure, f"{column}: posterior"))
                continue
            by_step = drawn[column].to_numpy().reshape(steps.first, -1)
            if model.spaces[node].is_discrete:
                told = pd.DataFrame({label: (by_step == label).mean(1) for label in model.labels(node)})
                figure = states(column, steps.x, told, axis=steps.axis)
            else:
                figure = along_time(column, steps.x, by_step.astype(float).T, axis=steps.axis)
            boxes.append(charts.add(figure, f"{column}: posterior along the steps"))
    words = (
        f"What the first {len(table.head(rows)):,} rows say about the hidden nodes, all rows together."
        if steps is None
        else "What the whole of the first sequence says about the hidden nodes at each of its steps."
    )
    return soft(words, boxes[:MOST_CHARTS])


def checks(model: Model, table: pd.DataFrame, seed: int, charts: Charts) -> str:
    """Which nodes do not follow their mechanism."""
    try:
        check = model.check(table.head(MADE_ROWS), seed=seed)
    except (ModelError, DataError) as error:
        return soft(f"Not available here: {error}")
    bad = [str(node) for node, value in check["excess"].items() if value > 3]
    words = (
        f"These nodes do not follow their mechanism: {', '.join(bad)}. Another family, another parent or a "
        "hidden node may be missing."
        if bad
        else "No node's noise differs from what its mechanism assumes by more than chance."
    )
    verdict = note(words, "bad" if bad else "good")
    how = "The noise that each node's mechanism must have had, compared with fresh noise; the worst node first."
    return verdict + soft(how) + charts.add(residuals(check), "residual checks, worst first")


def gaps(model: Model, table: pd.DataFrame, charts: Charts) -> str:
    """Which cells are empty, and which together."""
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


def search(history: pd.DataFrame, restarts: pd.DataFrame, charts: Charts) -> str:
    """The course of the loss, and how many starts came to the same end."""
    parts = []
    if len(history) > 1:
        parts.append(charts.add(learning(history), "loss by step"))
    if len(restarts) > 1 and "loss" in restarts:
        losses = restarts["loss"].dropna()
        best = losses.min()
        near = int((losses <= best + 1e-3 * (1 + abs(best))).sum())
        parts.append(
            f"<p>{len(restarts)} starts; of the {len(losses)} that were continued, {near} ended within a "
            "thousandth of the best loss.</p>"
        )
    return "".join(parts)


# --- charts -----------------------------------------------------------------------------------------------------------


def against_model(node: str, space: Space, data: pd.Series[Any], made: pd.Series[Any]) -> go.Figure:
    """Shares of a column's values beside those of values that the model makes."""
    at, seen, model = compared_shares(space, data, made)
    figure = go.Figure()
    if isinstance(at, list):  # two bars for each level
        figure.add_bar(x=at, y=seen, name="data", marker_color=DATA)
        figure.add_bar(x=at, y=model, name="model", marker_color=MODEL)
        figure.update_layout(barmode="group", xaxis_type="category")
    else:  # bars of the data under a line of the model
        middles = (at[1:] + at[:-1]) / 2
        figure.add_bar(x=middles, y=seen, name="data", marker_color=DATA, opacity=0.75)
        figure.add_scatter(x=middles, y=model, name="model", mode="lines", line_color=MODEL)
        figure.update_layout(bargap=0.03)
    return _dressed(figure, x=node, y="share of rows")


def posteriors(node: str, space: Space, drawn: pd.Series[Any]) -> go.Figure:
    """A hidden node as rows tell it: how often each category, or the spread of a number."""
    if space.is_discrete:
        shares = drawn.map(label_text).value_counts(normalize=True).sort_index()
        figure = go.Figure(go.Bar(x=shares.index, y=shares.to_numpy(), marker_color=MODEL, name="posterior"))
        figure.update_xaxes(type="category")
    else:
        numbers = drawn.to_numpy(dtype=float)
        figure = go.Figure(go.Histogram(x=numbers, histnorm="probability", marker_color=MODEL, name="posterior"))
    return _dressed(figure, x=f"{node} (hidden)", y="share of draws")


def along_time(name: str, x: Floats, values: Floats, seen: Floats | None = None, *, axis: str = "step") -> go.Figure:
    """The central 90 % of the model's values along the steps of a sequence, and the series itself where it is seen.

    Args:
        name: What the axis is called.
        x: Where the steps lie.
        values: Draws of each step (draws, steps).
        seen: The data, NaN where they are missing.
        axis: What the steps are called.
    """
    middle, (low, high) = values.mean(0), np.quantile(values, [0.05, 0.95], axis=0)
    figure = go.Figure()
    figure.add_scatter(x=x, y=high, mode="lines", line_width=0, showlegend=False, hoverinfo="skip")
    figure.add_scatter(
        x=x, y=low, mode="lines", line_width=0, fill="tonexty", fillcolor="rgba(224, 130, 20, 0.2)", name="central 90 %"
    )
    figure.add_scatter(x=x, y=middle, mode="lines", line_color=MODEL, name="model")
    if seen is not None:
        figure.add_scatter(x=x, y=seen, mode="lines+markers", line_color=DATA, marker_size=4, line_width=1, name="data")
    return _dressed(figure, x=axis, y=name)


def states(node: str, x: Floats, shares: pd.DataFrame, *, axis: str = "step") -> go.Figure:
    """How probable each category of a hidden node is along the steps of a sequence, stacked to one."""
    figure = go.Figure()
    for label in shares.columns:
        figure.add_scatter(x=x, y=shares[label], mode="lines", stackgroup="all", line_width=0.5, name=str(label))
    figure.update_layout(showlegend=True, yaxis_range=[0, 1])
    return _dressed(figure, x=axis, y=f"probability of {node}")


def gaps_by_column(table: pd.DataFrame) -> go.Figure:
    """How much of each column is empty."""
    shares = table.isna().mean()
    hover = [f"{name}: {int(n):,} of {len(table):,} cells empty" for name, n in table.isna().sum().items()]
    bar = go.Bar(x=shares.index.astype(str), y=shares.to_numpy(), marker_color=DATA, hovertext=hover, hoverinfo="text")
    figure = go.Figure(bar)
    figure.update_xaxes(type="category")
    return _dressed(figure, x="column", y="share of cells that are empty")


def gaps_together(table: pd.DataFrame, most: int = 25) -> go.Figure:
    """Which columns are empty together: the commonest patterns, one a line, no more than a phone shows."""
    patterns = table.isna().value_counts().head(most)
    holes = np.array(patterns.index.to_list(), dtype=int)
    names = [f"{count:,} rows ({number})" for number, count in enumerate(patterns, start=1)]
    look = {"colorscale": [[0, "#e8eef5"], [1, ALARM]], "zmin": 0, "zmax": 1, "showscale": False, "xgap": 1, "ygap": 1}
    chart = go.Heatmap(z=holes, x=list(map(str, table.columns)), y=names, **look)
    chart.update(customdata=np.where(holes == 1, "empty", "filled"))
    chart.update(hovertemplate="%{x}: %{customdata}<br>%{y}<extra></extra>")
    figure = go.Figure(chart)
    figure.update_layout(xaxis_type="category", yaxis={"autorange": "reversed", "type": "category"})
    return _dressed(figure, x="column", y="", height=max(220, 24 * len(names) + 120))


def residuals(check: pd.DataFrame) -> go.Figure:
    """How many standard deviations each node's recovered noise is from fresh noise, the worst first."""
    excess = check["excess"]
    hover = "%{y}: %{x:.1f} standard deviations above chance<extra></extra>"
    bar = go.Bar(x=excess.to_numpy(), y=list(map(str, excess.index)), orientation="h", hovertemplate=hover)
    bar.update(marker_color=[ALARM if value > 3 else DATA for value in excess])
    figure = go.Figure(bar)
    figure.update_yaxes(autorange="reversed", type="category")
    figure.add_vline(x=3, line_dash="dot", line_color=ALARM)
    height = max(220, 22 * len(excess) + 110)
    return _dressed(figure, x="standard deviations above chance", y="", height=height)


def learning(history: pd.DataFrame) -> go.Figure:
    """The loss of the start that was kept, and its terms."""
    figure = go.Figure()
    loss = history.get("loss", np.nan)
    for column in [name for name in history.columns if name not in ("step", "seconds")]:
        values = history[column].to_numpy(dtype=float)
        told = (
            np.isfinite(values).any() and not np.allclose(values, 0) and not np.allclose(values, loss, equal_nan=True)
        )
        if column == "loss" or told:
            figure.add_scatter(x=np.arange(len(values)), y=values, mode="lines", name=column)
    figure.update_layout(showlegend=len(figure.data) > 1)
    return _dressed(figure, x="step", y="loss")


def _dressed(figure: go.Figure, *, x: str, y: str, height: int = 300) -> go.Figure:
    """The same look for all: no toolbar, room for names, colours that stand on white and on paper."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 14, "r": 18, "t": 34, "b": 14},
        colorway=[DATA, MODEL, *COLOURS[2:]],
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        xaxis={"title": {"text": x}, "automargin": True},
        yaxis={"title": {"text": y}, "automargin": True},
    )
    return figure
