"""Curves along steps: the course of a fit, the choice of a model, forecasts, a series over its segmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from otpdag.choice import COLUMNS, Selection
from otpdag.engine.monitor import Stage
from otpdag.engine.result import FitResult
from otpdag.errors import DataError
from otpdag.numerics import Array, Ints
from otpdag.plots import style

History: TypeAlias = Mapping[str, Sequence[float]] | Sequence[Mapping[str, float]] | FitResult


def learning_curve(history: History, *, ax: Axes | None = None) -> Figure:
    """Draw every term of a loss over the steps of a fit.

    The scale is logarithmic if all values are positive and the largest is more than a hundred times the
    smallest.

    Args:
        history: The result of a fit, its ``history``, or for each term its values, one for each step, in the order of
            the steps; NaN is left out. An entry ``step`` gives the numbers of the steps; without it they are 1, 2, and
            so on.
        ax: Where to draw; if left out, a figure is made.

    Returns:
        The figure.

    Raises:
        DataError: There is no term, or a term is not a list of numbers.

    >>> figure = learning_curve({"cost": [9.0, 4.0, 2.0], "divergence": [1.0, 0.5, 0.1]})
    >>> figure.axes[0].get_xlabel()
    'step'
    """
    table = _terms(history.history if isinstance(history, FitResult) else history)
    steps = table.pop("step") if "step" in table else pd.Series(np.arange(1, len(table) + 1))
    if table.empty:
        raise DataError("history must hold at least one term; got none")
    if steps[table.notna().any(axis=1)].isna().any():
        raise DataError(f"history['step'] must number all {len(table)} steps; got {steps.notna().sum()}")
    ax = style.axes_of(ax, 6.4, 3.8)
    for number, (name, values) in enumerate(table.items()):
        seen = values.dropna()
        marker, dashes = "o" if len(seen) == 1 else None, "-" if number < len(style.COLOURS) else "--"
        look: dict[str, Any] = {"marker": marker, "color": style.colour(number), "linewidth": 1.4}
        ax.plot(steps[seen.index], seen, dashes, label=name, **look)
    finite = table.to_numpy()[table.notna()]
    if len(finite) and finite.min() > 0 and finite.max() > 100 * finite.min():
        ax.set_yscale("log")
    style.tidy_steps(ax)
    ax.margins(x=0.01)
    ax.set_ylabel("value" if table.shape[1] > 1 else str(table.columns[0]))
    if table.shape[1] > 1:
        style.legend_beside(ax, handlelength=1.4)
    return style.figure_of(ax)


def _terms(records: Any) -> pd.DataFrame:
    """A column of numbers for each term, NaN where they are not finite, and where one has fewer than others."""
    if not isinstance(records, Mapping) and all(isinstance(record, Mapping) for record in records):
        records = pd.DataFrame(list(records)).to_dict(orient="list")
    try:
        table = pd.DataFrame({name: pd.Series(np.asarray(values, dtype=float)) for name, values in records.items()})
    except (AttributeError, TypeError, ValueError):
        raise DataError(
            "history must be a result of otp.fit, its history, or a dictionary of terms with lists of numbers; "
            f"got {records!r:.60}"
        ) from None
    return table.where(np.isfinite(table))


def search_curve(stages: Sequence[Stage] | FitResult, *, kept: int | None = None, ax: Axes | None = None) -> Figure:
    """Draw the losses of all starts along the stages of a search, which are bands; the kept start is on top.

    Where losses only fall, as those of a quasi-Newton method do, the height of a line is how far it lies above the
    lowest loss of the stages that compare with it, on a logarithmic scale: starts that are stuck stay high. Noisy
    losses are drawn as they are, with a running mean.

    Args:
        stages: The result of a fit, or its ``stages``.
        kept: Number of the start that was kept; if left out, the first of the last stage.
        ax: Where to draw; if left out, a figure is made.

    Returns:
        The figure.

    Raises:
        DataError: No stage has a step.

    >>> figure = search_curve(
    ...     [Stage("2 short starts", (0, 1), [(3.0, 4.0), (1.5, 2.0)]), Stage("best", (0,), [(1.2,)])]
    ... )
    >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    ['2 short starts', 'best', 'kept start', 'other starts']
    """
    stages = stages.stages if isinstance(stages, FitResult) else stages
    tables = [(stage, np.array(stage.losses, dtype=np.float64)) for stage in stages if stage.losses]
    if not tables:
        raise DataError("stages must hold at least one step; got none")
    ax = style.axes_of(ax, 7.4, 3.8)
    falling = all(_only_falls(losses) for _, losses in tables)
    kept = tables[-1][0].starts[0] if kept is None else kept
    begin = 0
    for number, (stage, losses) in enumerate(tables):
        comparable = [table for other, table in tables if other.objective == stage.objective]
        heights = _above_lowest(losses, comparable) if falling else losses
        steps = np.arange(begin + 1, begin + len(losses) + 1)
        for place, start in enumerate(stage.starts):
            _draw_start(ax, steps, heights[:, place], is_kept=start == kept, smooth=not falling)
        band = style.band(ax, begin + 0.5, begin + len(losses) + 0.5, number)
        band.set_label(stage.name)
        begin += len(losses)
    if falling:
        ax.set_yscale("log")
    ax.set_ylabel("loss above the lowest" if falling else "loss")
    ax.set_xlim(0.5, begin + 0.5)
    style.tidy_steps(ax)
    if len(tables[0][0].starts) > 1:
        ax.plot([], [], color=style.INK, linewidth=1.8, label="kept start")
        ax.plot([], [], color=style.PALE_INK, linewidth=0.9, label="other starts")
    style.legend_beside(ax, handlelength=1.4, fontsize=style.SMALL_FONT)
    return style.figure_of(ax)


def _only_falls(losses: Array) -> bool:
    before, after = losses[:-1], losses[1:]
    return not bool((np.isfinite(before) & (after > before + 1e-9 * (1 + np.abs(before)))).any())


def _above_lowest(losses: Array, tables: Sequence[Array]) -> Array:
    """Distance to the lowest loss of some tables, NaN where rounding would show."""
    finite = np.concatenate([table[np.isfinite(table)] for table in tables])
    lowest = float(finite.min()) if len(finite) else 0.0
    above = losses - lowest
    return np.where(np.isfinite(above) & (above > 1e-10 * (1 + abs(lowest))), above, np.nan)


def _draw_start(ax: Axes, steps: Array | Ints, heights: Array, *, is_kept: bool, smooth: bool) -> None:
    paint, width, front = (style.INK, 1.8, 3) if is_kept else (style.PALE_INK, 0.9, 2)
    marker = "o" if np.isfinite(heights).sum() == 1 else None
    if smooth and len(heights) > 20:  # steps; the noise of fewer is as plain without a mean
        ax.plot(steps, heights, color=paint, linewidth=0.5, alpha=0.25, zorder=front)
        window = max(3, len(heights) // 25)
        heights = pd.Series(heights).rolling(window, center=True, min_periods=1).mean().to_numpy()
    ax.plot(steps, heights, color=paint, linewidth=width, marker=marker, markersize=3, zorder=front)


# --- the choice of a model, and series --------------------------------------------------------------------------------


def plot_selection(selection: Selection, *, ax: Axes | None = None) -> Figure:
    """Draw the criterion for each value that was tried, the best one marked.

    Args:
        selection: What :func:`otpdag.select` returned.
        ax: Where to draw; if left out, a figure is made.

    Returns:
        The figure.
    """
    ax = style.axes_of(ax, 6.4, 3.8)
    values = list(selection.table.index)
    places = np.arange(len(values))
    shown = [COLUMNS[selection.criterion]] if selection.criterion == "cv" else ["BIC", "AIC"]
    for number, name in enumerate(shown):
        spread = selection.table["cv_std_error"] if name == "cv_log_likelihood" else None
        look: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.4, "capsize": 3}
        look |= {"color": style.colour(number), "label": name.replace("_", " ")}
        ax.errorbar(places, selection.table[name], yerr=spread, **look)
    at = values.index(selection.best)
    height = float(selection.table[COLUMNS[selection.criterion]].iloc[at])
    ax.plot([at], [height], "o", markersize=11, markerfacecolor="none", markeredgecolor=style.INK, label="chosen")
    style.tidy_steps(ax)
    ax.set_xticks(places, [str(value) for value in values])
    ax.set_xlabel("value")
    ax.legend(frameon=False)
    return style.figure_of(ax)


def plot_forecast(
    forecast: pd.DataFrame, node: str, *, history: ArrayLike | None = None, sequence: int = 0, ax: Axes | None = None
) -> Figure:
    """Draw the forecast of one number with its interval, after what was seen of it.

    Args:
        forecast: What :meth:`otpdag.Model.forecast` returned.
        node: The column to draw.
        history: What was seen of it, step by step.
        sequence: Which sequence.
        ax: Where to draw; if left out, a figure is made.

    Returns:
        The figure.

    Raises:
        DataError: The forecast has no interval of such a number.
    """
    if node not in forecast or f"{node}.lower" not in forecast:
        raise DataError(f"forecast must hold the number {node!r} with its interval; it has {list(forecast.columns)}")
    ax = style.axes_of(ax, 6.4, 3.8)
    own = forecast.xs(sequence, level="sequence")
    past = np.zeros(0) if history is None else np.asarray(history, dtype=float).ravel()
    ahead = len(past) + np.asarray(own.index, dtype=float) - 1
    if len(past):
        ax.plot(np.arange(len(past)), past, color=style.INK, linewidth=1.0, label="seen")
    ax.fill_between(ahead, own[f"{node}.lower"], own[f"{node}.upper"], color=style.COLOURS[0], alpha=0.2, linewidth=0)
    ax.plot(ahead, own[node], color=style.COLOURS[0], linewidth=1.4, label="forecast")
    style.tidy_steps(ax)
    ax.set_ylabel(node)
    ax.legend(frameon=False)
    return style.figure_of(ax)


def plot_segments(
    values: ArrayLike,
    states: ArrayLike,
    *,
    times: ArrayLike | None = None,
    levels: ArrayLike | None = None,
    names: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw a series over its segmentation: a band for each stretch in one state.

    The axes are called like the columns of pandas that ``values`` and ``times`` are; without such names, "value" and
    "time" (or "step").

    Args:
        values: The series (steps,); NaN is a gap.
        states: The state of each step (steps,), numbered from 0, for instance from ``HiddenMarkovModel.predict``.
        times: Where the steps lie on the axis; 0, 1, 2, ... if left out.
        levels: A number for each state, for instance its rate, drawn as a line through its stretches.
        names: What the states are called in the legend.
        ax: Where to draw; if left out, a figure is made.

    Returns:
        The figure.

    Raises:
        DataError: Lengths do not agree, or a state is not a whole number of at least 0.

    >>> figure = plot_segments([3, 4, 11, 12], [0, 0, 1, 1], levels=[3.5, 11.5])
    >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    ['state 0', 'state 1']
    """
    series = np.asarray(values, dtype=np.float64).ravel()
    codes = np.asarray(states).ravel()
    where = np.arange(len(series), dtype=np.float64) if times is None else np.asarray(times, dtype=np.float64).ravel()
    if not len(series) == len(codes) == len(where):
        raise DataError(f"values, states and times must be as many; got {len(series)}, {len(codes)} and {len(where)}")
    if not len(series) or codes.dtype.kind not in "iu" or (codes < 0).any():
        raise DataError("states must be whole numbers of at least 0, one for each step")
    ax = style.axes_of(ax, 8.0, 3.2)
    bands: dict[int, Artist] = {}
    gaps = np.diff(where) if len(where) > 1 else np.ones(1)
    edges = np.concatenate([where[:1] - gaps[0] / 2, (where[1:] + where[:-1]) / 2, where[-1:] + gaps[-1] / 2])
    for start, stop in pairwise([0, *np.flatnonzero(np.diff(codes)) + 1, len(codes)]):  # in one state each
        state = int(codes[start])
        bands.setdefault(state, style.band(ax, edges[start], edges[stop], state))
        if levels is not None:
            level = float(np.asarray(levels, dtype=np.float64).ravel()[state])
            ax.plot(edges[[start, stop]], [level, level], color=style.colour(state), linewidth=1.6)
    ax.plot(where, series, color=style.INK, linewidth=0.8, marker="o", markersize=2.2)
    ax.set_xlim(edges[0], edges[-1])
    ax.set_xlabel(_name_of(times, "step" if times is None else "time"))
    ax.set_ylabel(_name_of(values, "value"))
    labels = [names[state] if names is not None else f"state {state}" for state in sorted(bands)]
    style.legend_beside(style.open_axes(ax), [bands[state] for state in sorted(bands)], labels)
    return style.figure_of(ax)


def _name_of(column: Any, otherwise: str) -> str:
    name = getattr(column, "name", None)
    return otherwise if name is None else str(name)
