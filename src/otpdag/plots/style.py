"""What all figures share: colours, sizes of text, tidy axes."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from matplotlib.ticker import MaxNLocator

INK, PALE_INK = "#2b3a55", "#9aa5b4"
COLOURS = ("#2f5d9b", "#d1762b", "#3d8b5a", "#a8434b", "#7a5aa6", "#6f6f6f", "#c2599b", "#8a7a2b")
SMALL_FONT = 8.0  # of ticks and legends, in points


class Picture(Figure):
    """A figure that a notebook shows though pyplot, which would tell it how, was never imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def axes_of(ax: Axes | None, width: float, height: float) -> Axes:
    """The axes to draw on: those that are given, or those of a new figure of this size in inches."""
    return Picture(figsize=(width, height), layout="constrained").add_subplot() if ax is None else ax


def open_axes(ax: Axes) -> Axes:
    """No lines above and to the right of what is drawn."""
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def legend_beside(ax: Axes, *marks: Any, **look: Any) -> None:
    """A legend to the right of the axes."""
    ax.legend(*marks, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), **look)


def shortened(name: str, most: int = 24) -> str:
    """A name that leaves room for what it names."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def colour(number: int) -> str:
    """The colour of the n-th thing of a picture."""
    return COLOURS[number % len(COLOURS)]


def band(ax: Axes, start: float, stop: float, number: int) -> Artist:
    """A stretch of the axis behind what is drawn, in the colour of the n-th thing."""
    return ax.axvspan(start, stop, color=colour(number), alpha=0.16, linewidth=0, zorder=0)


def figure_of(ax: Axes) -> Figure:
    """The figure that holds some axes, also where they lie in a figure inside a figure."""
    return ax.figure.figure


def place_axes(ax: Axes) -> tuple[float, float]:
    """Give axes the place that the figure's layout wants; their width and height in points."""
    figure = figure_of(ax)
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)  # axes have their final place only after that
    box, (wide, high) = ax.get_position(), figure.get_size_inches() * 72
    return float(box.width * wide), float(box.height * high)


def text_width(text: str, size: float) -> float:
    """Width of the widest line in points."""
    measure, font = TextToPath(), FontProperties(size=size)
    return max(float(measure.get_text_width_height_descent(line, font, ismath=False)[0]) for line in text.split("\n"))


def tidy_steps(ax: Axes) -> None:
    """Whole steps along the axis, and lines across only."""
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    open_axes(ax)
    ax.grid(axis="y", color="#e4e7ec", linewidth=0.8)
    ax.set_axisbelow(True)
