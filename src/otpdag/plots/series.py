"""The criterion of a selection over what was tried, and forecasts with their intervals.

A series over its segmentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from otpdag.choice import COLUMNS, Selection
from otpdag.errors import DataError
from otpdag.plots.style import COLOURS, INK, Picture, figure_of, tidy_steps


def plot_selection(selection: Selection, *, ax: Axes | None = None) -> Figure:
    """Draw the criterion for each value that was tried, the best one marked.

    Args:
        selection: What :func:`otpdag.select` returned.
        ax: Where to draw; if left out, a figure is made.

    Returns:
        The figure.
    """
    if ax is None:
        ax = Picture(figsize=(6.4, 3.8), layout="constrained").add_subplot()
    values = list(selection.table.index)
    places = np.arange(len(values))
    shown = [COLUMNS[selection.criterion]] if selection.criterion == "cv" else ["BIC", "AIC"]
    for number, name in enumerate(shown):
        spread = selection.table["cv_std_error"] if name == "cv_log_likelihood" else None
        ax.errorbar(
            places,
            selection.table[name],
            yerr=spread,
            marker="o",
            markersize=4,
            linewidth=1.4,
            capsize=3,
            color=COLOURS[number],
            label=name.replace("_", " "),
        )
    at = values.index(selection.best)
    height = float(selection.table[COLUMNS[selection.criterion]].iloc[at])
    ax.plot([at], [height], "o", markersize=11, markerfacecolor="none", markeredgecolor=INK, label="chosen")
    tidy_steps(ax)
    ax.set_xticks(places, [str(value) for value in values])
    ax.set_xlabel("value")
    ax.legend(frameon=False)
    return figure_of(ax)


def plot_forecast(
    forecast: pd.DataFrame,
    node: str,
    *,
    history: npt.ArrayLike | None = None,
    sequence: int = 0,
    ax: Axes | None = None,
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
    if ax is None:
        ax = Picture(figsize=(6.4, 3.8), layout="constrained").add_subplot()
    own = forecast.xs(sequence, level="sequence")
    past = np.zeros(0) if history is None else np.asarray(history, dtype=float).ravel()
    ahead = len(past) + np.asarray(own.index, dtype=float) - 1
    if len(past):
        ax.plot(np.arange(len(past)), past, color=INK, linewidth=1.0, label="seen")
    ax.fill_between(ahead, own[f"{node}.lower"], own[f"{node}.upper"], color=COLOURS[0], alpha=0.2, linewidth=0)
    ax.plot(ahead, own[node], color=COLOURS[0], linewidth=1.4, label="forecast")
    tidy_steps(ax)
    ax.set_ylabel(node)
    ax.legend(frameon=False)
    return figure_of(ax)


def plot_segments(
    values: npt.ArrayLike,
    states: npt.ArrayLike,
    *,
    times: npt.ArrayLike | None = None,
    levels: npt.ArrayLike | None = None,
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
        raise DataError(
            f"values, states and times must be of one length; got {len(series)}, {len(codes)} and {len(where)}"
        )
    if not len(series) or codes.dtype.kind not in "iu" or (codes < 0).any():
        raise DataError("states must be whole numbers of at least 0, one for each step")
    if ax is None:
        ax = Picture(figsize=(8.0, 3.2), layout="constrained").add_subplot()
    bands: dict[int, Artist] = {}
    half = np.diff(where) / 2 if len(where) > 1 else np.array([0.5])
    left = where - np.concatenate([half[:1], half])
    right = where + np.concatenate([half, half[-1:]]) if len(where) > 1 else where + 0.5
    for start, stop in _stretches(codes):
        colour = COLOURS[int(codes[start]) % len(COLOURS)]
        band = ax.axvspan(left[start], right[stop - 1], color=colour, alpha=0.16, linewidth=0)
        bands.setdefault(int(codes[start]), band)
        if levels is not None:
            level = float(np.asarray(levels, dtype=np.float64).ravel()[codes[start]])
            ax.plot([left[start], right[stop - 1]], [level, level], color=colour, linewidth=1.6)
    ax.plot(where, series, color=INK, linewidth=0.8, marker="o", markersize=2.2)
    ax.set_xlim(left[0], right[-1])
    ax.set_xlabel(_name_of(times, "step" if times is None else "time"))
    ax.set_ylabel(_name_of(values, "value"))
    ax.spines[["top", "right"]].set_visible(False)
    labels = [names[state] if names is not None else f"state {state}" for state in sorted(bands)]
    ax.legend(
        [bands[state] for state in sorted(bands)], labels, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
    return figure_of(ax)


def _name_of(column: Any, otherwise: str) -> str:
    name = getattr(column, "name", None)
    return otherwise if name is None else str(name)


def _stretches(codes: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """First and past-the-last step of each run of one state."""
    cuts = np.flatnonzero(np.diff(codes)) + 1
    yield from pairwise([0, *cuts.tolist(), len(codes)])
