"""Pictures of a model beside its data: distributions, gaps, hidden nodes, classes, estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from otpdag.data.columns import cell_names
from otpdag.engine import FitResult
from otpdag.errors import DataError, ModelError, label_text
from otpdag.model import Model
from otpdag.plots import style
from otpdag.spaces import Space
from otpdag.tables import estimates, interval_ends

Fitted: TypeAlias = Model | FitResult

MOST_LEVELS = 30  # bars that can be told apart
MADE_ROWS = 5_000  # of the model, for a smooth picture: more change none
DATA, MODEL = style.COLOURS[0], style.COLOURS[1]  # in every picture


def plot_fit(fitted: Fitted, data: pd.DataFrame, *, nodes: Sequence[str] | None = None, seed: int = 0) -> Figure:
    """Data against model: for each observed column the shares of its values beside those that the model makes.

    Args:
        fitted: A fitted model, or the result of a fit.
        data: A table with the model's columns; empty cells are left out.
        nodes: Which columns; all observed ones by default.
        seed: Determines the model's rows.

    >>> from otpdag import Graph, fit
    >>> table = pd.DataFrame({"x": np.linspace(-1, 1, 50), "y": ["a", "b"] * 25})
    >>> result = fit(Model.from_frame(Graph([("y", "x")]), table), table, restarts=1)
    >>> [ax.get_title() for ax in plot_fit(result, table).axes]
    ['y', 'x']
    """
    model = _model(fitted, "plot_fit")
    given = data if model.structure.given else None
    made = model.sample(MADE_ROWS if given is None else len(data), seed=seed, given=given)
    known = [(node, name) for node, name in observed_columns(model, data) if name in made.columns]
    columns = [(node, name) for node, name in known if nodes is None or node in nodes or name in nodes]
    if not columns:
        raise DataError(f"nodes must name observed columns of the table; got {list(nodes or [])}")
    figure, axes = _grid(len(columns))
    for ax, (node, name) in zip(axes, columns, strict=True):
        draw_distribution(ax, model.spaces[node], data[name].dropna(), made[name])
        ax.set_title(name, fontsize=10)
    axes[0].legend(frameon=False, fontsize=style.SMALL_FONT)
    return figure


def plot_plan(fitted: Fitted, data: pd.DataFrame, *, rows: int = 12, seed: int = 0) -> Figure:
    """What would have to move for rows to be the model's: the cost of each column, and the rows most moved.

    Args:
        fitted: A fitted model, or the result of a fit.
        data: A table with the model's columns.
        rows: How many rows are shown by themselves.
        seed: Determines which rows are matched, and with what.

    >>> from otpdag import Graph, fit
    >>> table = pd.DataFrame({"x": np.linspace(-1, 1, 50), "y": ["a", "b"] * 25})
    >>> result = fit(Model.from_frame(Graph([("y", "x")]), table), table, restarts=1)
    >>> [ax.get_title() for ax in plot_plan(result, table).axes]
    ['cost by column', 'rows most moved']
    """
    plan = _model(fitted, "plot_plan").plan(data, seed=seed)
    figure, (left, right) = _grid(2)
    names = [style.shortened(str(node)) for node in plan.columns.index[::-1]]
    left.barh(names, plan.columns["cost"][::-1], color=DATA, label="data")
    left.plot(plan.columns["chance"][::-1], names, "|", color=MODEL, markersize=12, label="chance")
    left.set_title("cost by column", fontsize=10)
    left.legend(frameon=False, fontsize=style.SMALL_FONT)
    moved = plan.most_moved(rows).iloc[::-1]
    begin = np.zeros(len(moved))
    for number, node in enumerate(moved.columns):
        cost = moved[node].fillna(0.0).to_numpy()
        right.barh([str(row) for row in moved.index], cost, left=begin, color=style.colour(number), label=str(node))
        begin = begin + cost
    right.set_title("rows most moved", fontsize=10)
    right.legend(frameon=False, fontsize=style.SMALL_FONT)
    for ax in (left, right):
        ax.set_xlabel("standard deviations", fontsize=style.SMALL_FONT)
    return figure


def plot_missing(data: pd.DataFrame, *, most_rows: int = 500, ax: Axes | None = None) -> Figure:
    r"""Which cells are empty: a line for each row (the first ones), a column for each column, empty cells dark.

    >>> figure = plot_missing(pd.DataFrame({"x": [1.0, None], "y": [None, 2.0]}))
    >>> [text.get_text() for text in figure.axes[0].get_xticklabels()]
    ['x\n50 %', 'y\n50 %']
    """
    ax = style.axes_of(ax, max(4.0, min(0.95 * data.shape[1], 8.0) + 1.0), 3.6)
    holes = data.isna().head(most_rows).to_numpy()
    colours = ListedColormap(["#e8eef5", style.INK])
    ax.imshow(holes, aspect="auto", interpolation="nearest", cmap=colours, vmin=0, vmax=1)
    shares = data.isna().mean()
    turned = data.shape[1] > 10
    ax.set_xticks(
        range(data.shape[1]),
        [f"{name}\n{share:.0%}".replace("%", " %") for name, share in shares.items()],
        fontsize=style.SMALL_FONT,
        rotation=90 if turned else 0,
    )
    ax.set_ylabel("row")
    return style.figure_of(ax)


def plot_hidden(
    fitted: Fitted, data: pd.DataFrame, node: str | None = None, *, rows: int = 60, draws: int = 200, seed: int = 0
) -> Figure:
    """What rows say about a hidden node: for a number its mean and central 90 % by row, sorted; for a category shares.

    Args:
        fitted: A fitted model, or the result of a fit.
        data: A table.
        node: The hidden node; the first one by default.
        rows: How many rows are shown.
        draws: Draws of the posterior.
        seed: Determines them.
    """
    model = _model(fitted, "plot_hidden")
    if not model.graph.hidden or (node is not None and node not in model.graph.hidden):
        raise ModelError(f"node must be a hidden node, of {list(model.graph.hidden)}; got {node!r}")
    node = model.graph.hidden[0] if node is None else node
    drawn = model.posterior(data.head(rows), draws=draws, seed=seed)
    column = node if node in drawn.columns else f"{node}.0"
    ax = style.axes_of(None, 7.5, 3.2)
    _by_group(ax, model, node, drawn[column], drawn.index.get_level_values(0), ranked=True)
    ax.set_xlabel("row, by its most probable category" if model.spaces[node].is_discrete else "row, by its mean")
    return style.figure_of(ax)


def plot_classes(fitted: Fitted, data: pd.DataFrame, node: str | None = None, *, seed: int = 0) -> Figure:
    """Profiles of a hidden category: for each class the distribution of every observed column, as the model makes it.

    Numbers are shown by mean and central 80 %, categories by shares.

    Args:
        fitted: A fitted model, or the result of a fit.
        data: The table, which tells the columns.
        node: The hidden category; the first one by default.
        seed: Determines the model's rows.
    """
    model = _model(fitted, "plot_classes")
    classes = [name for name in model.graph.hidden if model.spaces[name].is_discrete]
    if not classes or (node is not None and node not in classes):
        raise ModelError(f"node must be a hidden category, of {classes}; got {node!r}")
    node = classes[0] if node is None else node
    made = model.sample(MADE_ROWS * 2, seed=seed, given=None)
    shares = made[node].value_counts(normalize=True).reindex(list(model.labels(node)), fill_value=0.0)
    columns = observed_columns(model, data)
    figure, axes = _grid(len(columns))
    for ax, (owner, name) in zip(axes, columns, strict=True):
        _by_group(ax, model, owner, made[name], made[node].astype(pd.CategoricalDtype(shares.index)), inside=0.8)
        ax.set_xticks(range(len(shares)), [f"{label}\n{share:.0%}" for label, share in shares.items()])
        ax.set_title(name, fontsize=10)
        ax.set_ylabel("")
    figure.supxlabel(f"class of {node}, and its share", fontsize=style.SMALL_FONT + 1)
    return figure


def plot_estimates(
    fitted: Fitted,
    *,
    intervals: pd.DataFrame | None = None,
    nodes: Sequence[str] | None = None,
    parameter: str | None = None,
) -> Figure:
    """A forest of estimates: one line for each number that was learned, with its interval where there is one.

    Args:
        fitted: A fitted model, or the result of a fit, which has intervals of its own.
        intervals: From :meth:`FitResult.intervals`.
        nodes: Whose parameters; all by default.
        parameter: Which parameter, for instance ``"weight"``; all by default.
    """
    model = _model(fitted)
    table = estimates(model)
    table = table[~table["fixed"]]
    if nodes is not None:
        table = table[table["node"].isin(list(nodes))]
    if parameter is not None:
        table = table[table["parameter"] == parameter]
    if table.empty:
        raise ModelError(f"nodes and parameter leave nothing to draw; nodes are {', '.join(model.graph.nodes)}")
    ends = interval_ends(table, intervals)
    if intervals is None and isinstance(fitted, FitResult):
        ends = fitted.standard_errors().loc[table.index, ["lower", "upper"]].to_numpy()
    low, high = np.where(np.isnan(ends), table[["value"]], ends).T
    places = np.arange(len(table))
    ax = style.axes_of(None, 7.0, 0.26 * len(table) + 1.1)
    ax.axvline(0.0, color=style.PALE_INK, linewidth=0.8, linestyle=":")
    ax.hlines(places, low, high, color=style.PALE_INK, linewidth=3)
    ax.plot(table["value"], places, "o", color=style.INK, markersize=4.5)
    rows = zip(table["node"], table["parameter"], table["at"], strict=True)
    names = [f"{node}: {name}" + (f" ({at})" if at else "") for node, name, at in rows]
    ax.set_yticks(places, names, fontsize=style.SMALL_FONT)
    ax.invert_yaxis()
    ax.set_xlabel("estimate and interval" if bool(np.any(high > low)) else "estimate")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return style.figure_of(ax)


def plot_effects(
    fitted: Fitted, treatment: str, outcome: str, values: Sequence[Any], *, rows: int = 20_000, seed: int = 0
) -> Figure:
    """The outcome as the treatment is set to each of some values, whatever its parents say.

    Args:
        fitted: A fitted model, or the result of a fit.
        treatment: The node that is set.
        outcome: The node that is watched.
        values: What the treatment is set to.
        rows: Draws for each value.
        seed: Determines them.
    """
    model = _model(fitted, "plot_effects")
    for name in (treatment, outcome):
        model.graph.parents(name)  # refuses what is no node
    made = [model.sample(rows, seed=seed, do={treatment: value})[outcome] for value in values]
    ax = style.axes_of(None, 5.5, 3.2)
    _by_group(ax, model, outcome, pd.concat(made, ignore_index=True), np.repeat(range(len(made)), rows))
    for line in ax.lines:
        line.set_linestyle("-")
    ax.set_xticks(range(len(made)), [str(value) for value in values])
    ax.set(xlabel=f"{treatment}, set to", xlim=(-0.5, len(made) - 0.5))
    return style.figure_of(ax)


def plot_term(
    result: FitResult, node: str, parent: str, *, level: float = 0.95, points: int = 100, ax: Axes | None = None
) -> Figure:
    """Draw what a numeric parent adds to a node's prediction, with its pointwise band (:meth:`otpdag.FitResult.term`).

    Args:
        result: The result of a fit.
        node: The node.
        parent: One of its numeric parents.
        level: Nominal coverage of the band at each point.
        points: Points of the curve.
        ax: Where to draw; if left out, a figure is made.

    >>> from otpdag import Graph, fit, mechanisms
    >>> table = pd.DataFrame({"x": np.linspace(-1, 1, 50), "y": np.linspace(-1, 1, 50) ** 2})
    >>> nodes = {"x": mechanisms.Normal(), "y": mechanisms.Normal(terms="spline(x, 5)")}
    >>> plot_term(fit(Model(Graph([("x", "y")]), nodes), table), "y", "x").axes[0].get_ylabel()
    'y: what x adds'
    """
    if not isinstance(result, FitResult):
        raise ModelError(f"result must be an otp.FitResult; got {type(result).__name__}")
    ax = style.axes_of(ax, 5.5, 3.2)
    for number, (_, own) in enumerate(result.term(node, parent, level=level, points=points).groupby("of")):
        ax.fill_between(own[parent], own["lower"], own["upper"], color=style.colour(number), alpha=0.2, linewidth=0)
        ax.plot(own[parent], own["term"], color=style.colour(number), linewidth=1.4)
    ax.set(xlabel=parent, ylabel=f"{node}: what {parent} adds")
    return style.figure_of(ax)


# --- parts ------------------------------------------------------------------------------------------------------------


def _model(fitted: Fitted, of_tables: str = "") -> Model:
    """The model, of a table if a function is named that draws only those."""
    model = fitted.model if isinstance(fitted, FitResult) else fitted
    if not isinstance(model, Model):
        raise ModelError(f"fitted must be an otp.Model or an otp.FitResult; got {type(fitted).__name__}")
    if of_tables and model.graph.is_dynamic:
        raise ModelError(f"{of_tables} draws tables; the graph has lagged edges: see plot_segments")
    if of_tables and model.structure.shared:
        raise ModelError(f"{of_tables} draws rows one by one; those of a {model.group} share hidden nodes")
    return model


def _grid(count: int, most_across: int = 3) -> tuple[Figure, list[Axes]]:
    across = min(count, most_across)
    down = -(-count // across)
    figure = style.Picture(figsize=(3.1 * across + 0.4, 2.4 * down), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def _by_group(
    ax: Axes, model: Model, node: str, values: pd.Series[Any], groups: Any, *, inside: float = 0.9, ranked: bool = False
) -> None:
    """A node's values in each group: shares of categories piled up, or mean and central part of numbers."""
    by_group = values.groupby(groups, observed=False)
    if model.spaces[node].is_discrete:
        shares = by_group.value_counts(normalize=True).unstack(fill_value=0)
        shares = shares.reindex(columns=list(model.labels(node))[:MOST_LEVELS], fill_value=0.0)
        shares = shares.loc[shares.idxmax(axis=1).sort_values(kind="stable").index] if ranked else shares
        tops = shares.cumsum(axis=1)
        for number, level in enumerate(shares.columns):
            look: dict[str, Any] = {"width": 1.0 if ranked else 0.7, "color": style.colour(number), "label": str(level)}
            ax.bar(range(len(shares)), shares[level], bottom=tops[level] - shares[level], **look)
        style.legend_beside(ax, fontsize=style.SMALL_FONT, title=node)
        ax.set(ylabel="probability", ylim=(0, 1))
    else:
        told = pd.DataFrame({"mean": by_group.mean(), "low": by_group.quantile(0.5 - inside / 2)})
        told = told.assign(high=by_group.quantile(0.5 + inside / 2))
        told = told.sort_values("mean") if ranked else told
        ax.vlines(range(len(told)), told["low"], told["high"], color=style.PALE_INK, linewidth=2 if ranked else 5)
        ax.plot(range(len(told)), told["mean"], "o", color=MODEL, markersize=3.5 if ranked else 6)
        ax.set(ylabel=f"{values.name} (mean, central {inside:.0%})".replace("%", " %"), xlim=(-0.6, len(told) - 0.4))
    style.open_axes(ax)


def draw_distribution(ax: Axes, space: Space, data: pd.Series[Any], made: pd.Series[Any]) -> None:
    """Shares of a column's values beside those of values that a model makes: bars of levels, or bars under a line."""
    seen = data.dropna()
    if space.is_discrete or (space.is_countable and seen.max() - seen.min() <= MOST_LEVELS):
        _levels(ax, *(part.map(label_text if space.is_discrete else int) for part in (seen, made)))
    else:
        parts = [part.to_numpy(dtype=float) for part in (seen, made)]
        low, high = np.quantile(np.concatenate(parts), [0.002, 0.998])
        edges = np.linspace(low, high if high > low else low + 1.0, min(50, max(10, int(len(seen) ** 0.5))) + 1)
        bounded = (np.clip(part, edges[0], edges[-1]) for part in parts)
        shares, of_model = (np.histogram(part, edges)[0] / max(len(part), 1) for part in bounded)
        ax.bar(edges[:-1], shares, np.diff(edges), align="edge", color=DATA, alpha=0.6, label="data")
        ax.plot((edges[1:] + edges[:-1]) / 2, of_model, color=MODEL, linewidth=1.6, label="model")
    ax.set_ylabel("share", fontsize=style.SMALL_FONT)
    style.open_axes(ax).tick_params(labelsize=style.SMALL_FONT)


def _levels(ax: Axes, seen: pd.Series[Any], made: pd.Series[Any]) -> None:
    """Two bars for each of the levels that are commonest in the data; where they are few, shares stand on them."""
    counted = [part.value_counts(normalize=True) for part in (seen, made)]
    levels = sorted(set(counted[0].index) | set(counted[1].index))
    levels = sorted(sorted(levels, key=lambda level: -float(counted[0].get(level, 0.0)))[:MOST_LEVELS])
    places = np.arange(len(levels))
    for part, side, paint, name in zip(counted, (-0.2, 0.2), (DATA, MODEL), ("data", "model"), strict=True):
        bars = ax.bar(places + side, part.reindex(levels, fill_value=0.0), width=0.4, color=paint, label=name)
        if len(levels) <= 4:
            ax.bar_label(bars, fmt="{:.0%}", fontsize=style.SMALL_FONT - 1)
    names = [style.shortened(str(level)) for level in levels]
    turned = len(names) > 12 or max(map(len, names)) * len(names) > 40  # letters that stand side by side
    ax.set_xticks(places, names, rotation=90 if turned else 0)


def observed_columns(model: Model, data: pd.DataFrame) -> list[tuple[str, str]]:
    """Observed nodes with the columns that show them, in the order of the graph."""
    named = [(node, name) for node in model.graph.observed for name in cell_names(node, model.spaces[node].cells)]
    return [(node, name) for node, name in named if name in data.columns]
