"""The charts of a report, as Plotly figures."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from otpdag.errors import label_text
from otpdag.plots.pictures import compared_shares
from otpdag.plots.style import COLOURS
from otpdag.spaces import Space

Floats: TypeAlias = NDArray[np.float64]

DATA, MODEL, ALARM = "#4c78a8", "#e08214", "#c0392b"


def against_model(node: str, space: Space, data: pd.Series[Any], made: pd.Series[Any]) -> go.Figure:
    """Shares of a column's values beside those of values that the model makes."""
    at, seen, model = compared_shares(space, data, made)
    figure = go.Figure()
    if isinstance(at, list):  # two bars for each level
        figure.add_bar(x=at, y=seen, name="data", marker_color=DATA)
        figure.add_bar(x=at, y=model, name="model", marker_color=MODEL)
        figure.update_layout(barmode="group")
        figure.update_xaxes(type="category")
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
        values = drawn.to_numpy(dtype=float)
        figure = go.Figure(go.Histogram(x=values, histnorm="probability", marker_color=MODEL, name="posterior"))
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
    figure.update_layout(showlegend=True)
    figure.update_yaxes(range=[0, 1])
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
    holes = np.array([list(map(int, key)) for key in patterns.index], dtype=int)
    names = [f"{count:,} rows" for count in patterns]
    figure = go.Figure(
        go.Heatmap(
            z=holes,
            x=[str(column) for column in table.columns],
            y=[f"{name} ({number + 1})" for number, name in enumerate(names)],
            colorscale=[[0, "#e8eef5"], [1, ALARM]],
            zmin=0,
            zmax=1,
            showscale=False,
            xgap=1,
            ygap=1,
            customdata=np.where(holes == 1, "empty", "filled"),
            hovertemplate="%{x}: %{customdata}<br>%{y}<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(type="category")
    return _dressed(figure, x="column", y="", height=max(220, 24 * len(names) + 120))


def residuals(check: pd.DataFrame) -> go.Figure:
    """How many standard deviations each node's recovered noise is from fresh noise, the worst first."""
    excess = check["excess"]
    colors = [ALARM if value > 3 else DATA for value in excess]
    bar = go.Bar(
        x=excess.to_numpy(),
        y=[str(node) for node in excess.index],
        orientation="h",
        marker_color=colors,
        hovertemplate="%{y}: %{x:.1f} standard deviations above chance<extra></extra>",
    )
    figure = go.Figure(bar)
    figure.update_yaxes(autorange="reversed", type="category")
    figure.add_vline(x=3, line_dash="dot", line_color=ALARM)
    height = max(220, 22 * len(excess) + 110)
    return _dressed(figure, x="standard deviations above chance", y="", height=height)


def learning(history: pd.DataFrame) -> go.Figure:
    """The loss of the start that was kept, and its terms."""
    figure = go.Figure()
    for column in [name for name in history.columns if name not in ("step", "seconds")]:
        values = history[column].to_numpy(dtype=float)
        if column != "loss" and (not np.isfinite(values).any() or np.allclose(values, 0) or _same(history, column)):
            continue
        figure.add_scatter(x=np.arange(len(values)), y=values, mode="lines", name=column)
    figure.update_layout(showlegend=len(figure.data) > 1)
    return _dressed(figure, x="step", y="loss")


def _same(history: pd.DataFrame, column: str) -> bool:
    return "loss" in history and bool(np.allclose(history[column], history["loss"], equal_nan=True))


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
