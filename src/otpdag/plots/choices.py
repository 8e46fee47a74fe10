"""The criterion of a selection over what was tried, and forecasts with their intervals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from otpdag.choice import COLUMNS, Selection
from otpdag.errors import DataError
from otpdag.plots.style import COLOURS, INK, Picture, figure_of, tidy_steps

__all__ = ["plot_forecast", "plot_selection"]


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
