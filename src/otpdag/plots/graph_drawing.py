"""Draw a graph: shaded nodes, arrows between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Polygon
from matplotlib.path import Path

from otpdag.errors import GraphError
from otpdag.graph import Graph
from otpdag.model import Model
from otpdag.plots.graph_layout import CORNER_RADIUS, FONT, LABEL_FONT, LINE_HEIGHT, LOOP_WIDTH, PAGE_WIDTH, Layout
from otpdag.plots.graph_routes import (
    CURVE_TO,
    HALF_HEAD_WIDTH,
    HEAD_LENGTH,
    MOVE_TO,
    Floats,
    Point,
    label_places,
    routes,
)
from otpdag.plots.style import INK, Picture, figure_of, place_axes, text_width

__all__ = ["draw_graph"]

_SHADE = "#d5e0ee"
_DASHES = (0, (4, 2.5))
_QUARTER_CIRCLE = 0.5523  # where a Bezier curve that is nearly a quarter circle has its inner points, in radii


def draw_graph(graph: Graph | Model, *, ax: Axes | None = None) -> Figure:
    """Draw a graph, parents above their children.

    Observed nodes are shaded, hidden ones are open with a dashed border. Lagged edges are dashed and say how
    many steps they span.

    Args:
        graph: The graph, or a model; made for up to about 40 nodes.
        ax: Where to draw; if left out, a figure of fitting size is made.

    Returns:
        The figure.

    >>> figure = draw_graph(Graph([("season", "load"), ("load", "price")], hidden=["load"]))
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['season', 'load', 'price']
    """
    if isinstance(graph, Model):
        graph = graph.graph
    if not isinstance(graph, Graph):
        raise GraphError(f"graph must be an otp.Graph or an otp.Model; got {type(graph).__name__}")
    layout = Layout(graph, text_width)
    left, right, bottom, top = layout.bounds
    if ax is None:
        inches = min(1.0, PAGE_WIDTH / max(right - left, top - bottom)) / 72
        figure = Picture(figsize=((right - left) * inches, (top - bottom) * inches))
        ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    ax.set_axis_off()
    wide, high = place_axes(ax)
    _Pen(ax, min(wide / (right - left), high / (top - bottom))).draw(layout)
    return figure_of(ax)


@dataclass(frozen=True)
class _Pen:
    """Draws on axes; ``scale`` turns lengths of the drawing into points on paper."""

    ax: Axes
    scale: float

    def draw(self, layout: Layout) -> None:
        lines = routes(layout)
        for link, points, codes in lines:
            self._arrow(points, codes, dashed=bool(link.label))
        for label, place in label_places(lines, text_width):
            self._label(label, place, align="center")
        for node, label in layout.loops.items():
            x, y, (width, _) = layout.x[node], layout.y[node], layout.size[node]
            side = x + width / 2 - CORNER_RADIUS + float(np.sqrt(CORNER_RADIUS**2 - 36))
            bulge = [(side, y + 6), (side + 20, y + 17), (side + 20, y - 17), (side, y - 6)]
            self._arrow(np.array(bulge), (MOVE_TO, *3 * [CURVE_TO]), dashed=True)
            self._label(label, (x + width / 2 + LOOP_WIDTH, y), align="left")
        for node in layout.graph.nodes:
            self._node(layout, node)

    def _node(self, layout: Layout, node: str) -> None:
        x, y, text = layout.x[node], layout.y[node], layout.text[node]
        hidden = node in layout.graph.hidden
        patch = PathPatch(_border(x, y, *layout.size[node]), edgecolor=INK, zorder=3, gid=node)
        patch.set(facecolor="white" if hidden else _SHADE, linewidth=1.1 * self.scale)
        patch.set(linestyle=_DASHES if hidden else "-")
        self.ax.add_patch(patch)
        lines = text.count("\n") + 1
        base = y - 0.36 * FONT + LINE_HEIGHT * (lines - 1) / 2
        for number, line in enumerate(text.split("\n")):
            level = base - LINE_HEIGHT * number
            self.ax.text(x, level, line, size=FONT * self.scale, ha="center", zorder=4, parse_math=False)

    def _arrow(self, points: Floats, codes: tuple[int, ...], *, dashed: bool) -> None:
        points = points.copy()
        tip, direction = points[-1].copy(), points[-1] - points[-2]
        direction /= np.hypot(*direction)
        base = tip - HEAD_LENGTH * direction
        points[-1] = base + 0.2 * HEAD_LENGTH * direction
        across = HALF_HEAD_WIDTH * np.array([-direction[1], direction[0]])
        line = PathPatch(Path(points, codes), facecolor="none", edgecolor=INK, zorder=1)
        line.set(linewidth=1.1 * self.scale, linestyle=_DASHES if dashed else "-", capstyle="butt")
        self.ax.add_patch(line)
        head = np.stack([tip, base + across, base - across])
        self.ax.add_patch(Polygon(head, color=INK, linewidth=0, zorder=2))

    def _label(self, label: str, place: Point, *, align: str) -> None:
        frame = {"facecolor": "white", "edgecolor": "none", "pad": 1.2 * self.scale}
        text = self.ax.text(*place, label, size=LABEL_FONT * self.scale, color=INK, bbox=frame, zorder=2.5)
        text.set(horizontalalignment=align, verticalalignment="center_baseline")


def _border(x: float, y: float, width: float, height: float) -> Path:
    """A box with round corners; a circle if it is as small as that."""
    a, b, k = width / 2, height / 2, _QUARTER_CIRCLE * CORNER_RADIUS
    points: list[Point] = []
    codes: list[Any] = []
    for sx, sy in ((1, 1), (-1, 1), (-1, -1), (1, -1)):
        side, level = (x + sx * a, y + sy * (b - CORNER_RADIUS)), (x + sx * (a - CORNER_RADIUS), y + sy * b)
        corner = [side, (side[0], side[1] + sy * k), (level[0] + sx * k, level[1]), level]
        points += corner if sx == sy else corner[::-1]
        codes += [Path.LINETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    return Path([*points, points[0]], [Path.MOVETO, *codes[1:], Path.CLOSEPOLY])
