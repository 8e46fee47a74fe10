"""Draw a graph: shaded nodes, arrows between them that run around other nodes, labels where they cover least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Polygon
from matplotlib.path import Path

from otpdag.errors import GraphError
from otpdag.graph import Graph
from otpdag.model import Model
from otpdag.plots.graph_layout import POINTS, Item, Layout, Link, TextWidth
from otpdag.plots.style import INK, Picture, figure_of, place_axes, text_width

Point: TypeAlias = tuple[float, float]
Floats: TypeAlias = npt.NDArray[np.float64]

_DASHES = (0, (4, 2.5))


class Route(NamedTuple):
    """A line from parent to child.

    Attributes:
        link: The edge.
        points: The points (n, 2).
        codes: What leads to each point: a code of matplotlib's ``Path``; a cubic curve takes three points.
    """

    link: Link
    points: Floats
    codes: tuple[Any, ...]

    def backwards(self) -> Route:
        """The same line from its end."""
        return Route(self.link, self.points[::-1], (Path.MOVETO, *self.codes[:0:-1]))


def routes(layout: Layout) -> list[Route]:
    """Each edge with its line from parent to child: straight lines if that is clear, else curves."""
    lines = {link: _straight(layout, link) for link in layout.links}
    crowded = any(link.label or _meets_node(layout, link, line) for link, line in lines.items())
    if not crowded and not _heads_overlap([end for _, end in lines.values()]):
        return [Route(link, np.array(line), (Path.MOVETO, Path.LINETO)) for link, line in lines.items()]
    ports = _ports(layout)
    curves = (
        _curved(layout, link, chain, *ports[link]) for chain, link in zip(layout.chains, layout.links, strict=True)
    )
    return [route.backwards() if route.link.upward else route for route in curves]


def _straight(layout: Layout, link: Link) -> tuple[Point, Point]:
    """The line between two centres, cut at the borders."""
    a, b = layout.centre(link.upper), layout.centre(link.lower)
    start, end = a + _to_border(layout, link.upper, b - a), b + _to_border(layout, link.lower, a - b)
    return (float(start[0]), float(start[1])), (float(end[0]), float(end[1]))


def _to_border(layout: Layout, node: str, direction: Floats) -> Floats:
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        inside = layout.distance(node, middle * direction) < 0
        low, high = (middle, high) if inside else (low, middle)
    return high * direction


def _meets_node(layout: Layout, link: Link, line: tuple[Point, Point], clear: float = 4.0) -> bool:
    """Whether a straight line comes nearer than so many points to a node that it does not join."""
    points = np.linspace(*line, 80)
    others = (node for node in layout.graph.nodes if node not in link[:2])
    return any((layout.distance(node, points - layout.centre(node)) < clear).any() for node in others)


def _heads_overlap(tips: Sequence[Point]) -> bool:
    return any(np.hypot(a[0] - b[0], a[1] - b[1]) < 1.5 * POINTS.arrow[1] for a, b in combinations(tips, 2))


def _ports(layout: Layout) -> dict[Link, tuple[Point, Point]]:
    """Where each edge leaves its upper node and meets its lower one."""
    below: dict[Item, list[tuple[float, int]]] = {}
    above: dict[Item, list[tuple[float, int]]] = {}
    for number, chain in enumerate(layout.chains):
        bow = layout.bows[layout.links[number]]
        below.setdefault(chain[0], []).append((layout.x[chain[1]] + bow, number))
        above.setdefault(chain[-1], []).append((layout.x[chain[-2]] + bow, number))
    start, end = _spread(layout, below, -1), _spread(layout, above, 1)
    return {link: (start[number], end[number]) for number, link in enumerate(layout.links)}


def _spread(layout: Layout, ends: Mapping[Item, list[tuple[float, int]]], side: int) -> dict[int, Point]:
    ports = {}
    for node, numbered in ends.items():
        width, height = layout.size[str(node)]
        reach = min(0.5 * width - 7, 5.0 * (len(numbered) - 1))
        for (_, number), dx in zip(sorted(numbered), np.linspace(-reach, reach, len(numbered)), strict=True):
            offset = 0.0 if len(numbered) == 1 else float(dx)
            inward = max(abs(offset) - width / 2 + POINTS.corner, 0)
            dy = height / 2 - POINTS.corner + float(np.sqrt(POINTS.corner**2 - inward**2))
            ports[number] = (layout.x[node] + offset, layout.y[node] + side * dy)
    return ports


def _curved(layout: Layout, link: Link, chain: Sequence[Item], start: Point, end: Point) -> Route:
    """Vertical through every layer, so that it meets no node there; bent only between layers."""
    bow = layout.bows[link] if len(chain) == 2 else 0.0
    half = {item: layout.height(row) / 2 for row in layout.rows for item in row}
    top, bottom = chain[0], chain[-1]
    stops = [start, (start[0], layout.y[top] - half[top])]
    for bend in chain[1:-1]:
        x, y = layout.x[bend], layout.y[bend]
        stops += [(x, y + half[bend]), (x, y - half[bend])]
    stops += [(end[0], layout.y[bottom] + half[bottom]), end]
    points, codes = [start], [Path.MOVETO]
    for number, ((x0, y0), (x1, y1)) in enumerate(pairwise(stops)):
        middle = (y0 + y1) / 2
        if number % 2:
            points += [(x0 + bow, middle), (x1 + bow, middle), (x1, y1)]
            codes += [Path.CURVE4] * 3
        elif y0 - y1 > 3.0:  # points
            points.append((x1, y1))
            codes.append(Path.LINETO)
        else:  # next to nothing: begin or end the curve here instead
            points[-1] = (x1, y0) if number == 0 else (x1, y1)
    return Route(link, np.array(points), tuple(codes))


def label_places(lines: Sequence[Route], text_width: TextWidth) -> Iterator[tuple[str, Point]]:
    """For each label the place on its own line that covers least of other labels and lines."""
    if not any(route.link.label for route in lines):
        return
    shares = np.linspace(0, 1, 25)[:, None]
    last = [_last_curve(route) for route in lines]
    drawn = [_bezier(corners, shares) for corners in last]
    placed: list[tuple[Floats, Floats]] = []
    for number, (link, _, _) in enumerate(lines):
        if link.label:
            half = np.array([text_width(link.label, POINTS.label_font) / 2 + 3, POINTS.label_font / 2 + 3])
            foreign = np.concatenate([line for other, line in enumerate(drawn) if other != number] or [drawn[0][:0]])
            spots = [_bezier(last[number], np.array([[share]]))[0] for share in (0.5, 0.4, 0.6, 0.32, 0.68, 0.25)]
            cover = [_covered(spot, half, foreign, placed) for spot in spots]
            best = spots[int(np.argmin(cover))]
            placed.append((best, half))
            yield link.label, (float(best[0]), float(best[1]))


def _last_curve(route: Route) -> Floats:
    end = int(np.flatnonzero(np.array(route.codes) == Path.CURVE4)[-1])
    return route.points[end - 3 : end + 1]


def _covered(spot: Floats, half: Floats, lines: Floats, labels: Sequence[tuple[Floats, Floats]]) -> float:
    overlaps = sum(bool((np.abs(spot - other) < half + size).all()) for other, size in labels)
    return 100.0 * overlaps + float((np.abs(lines - spot) < half).all(1).sum())


def _bezier(corners: Floats, share: Floats) -> Floats:
    a, b, c, d = corners
    rest = 1 - share
    return rest**3 * a + 3 * rest**2 * share * b + 3 * rest * share**2 * c + share**3 * d


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
        inches = min(1.0, POINTS.page / max(right - left, top - bottom)) / 72
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
            side = x + width / 2 - POINTS.corner + float(np.sqrt(POINTS.corner**2 - 36))
            bulge = [(side, y + 6), (side + 20, y + 17), (side + 20, y - 17), (side, y - 6)]
            self._arrow(np.array(bulge), (Path.MOVETO, *3 * [Path.CURVE4]), dashed=True)
            self._label(label, (x + width / 2 + POINTS.loop, y), align="left")
        for node in layout.graph.nodes:
            self._node(layout, node)

    def _node(self, layout: Layout, node: str) -> None:
        x, y, text = layout.x[node], layout.y[node], layout.text[node]
        hidden = node in layout.graph.hidden
        patch = PathPatch(_border(x, y, *layout.size[node]), edgecolor=INK, zorder=3, gid=node)
        patch.set(facecolor="white" if hidden else "#d5e0ee", linewidth=1.1 * self.scale)
        patch.set(linestyle=_DASHES if hidden else "-")
        self.ax.add_patch(patch)
        lines = text.count("\n") + 1
        base = y - 0.36 * POINTS.font + POINTS.line * (lines - 1) / 2
        for number, line in enumerate(text.split("\n")):
            level = base - POINTS.line * number
            self.ax.text(x, level, line, size=POINTS.font * self.scale, ha="center", zorder=4, parse_math=False)

    def _arrow(self, points: Floats, codes: tuple[Any, ...], *, dashed: bool) -> None:
        points = points.copy()
        tip, direction = points[-1].copy(), points[-1] - points[-2]
        direction /= np.hypot(*direction)
        base = tip - POINTS.arrow[0] * direction
        points[-1] = base + 0.2 * POINTS.arrow[0] * direction
        across = POINTS.arrow[1] * np.array([-direction[1], direction[0]])
        line = PathPatch(Path(points, codes), facecolor="none", edgecolor=INK, zorder=1)
        line.set(linewidth=1.1 * self.scale, linestyle=_DASHES if dashed else "-", capstyle="butt")
        self.ax.add_patch(line)
        head = np.stack([tip, base + across, base - across])
        self.ax.add_patch(Polygon(head, color=INK, linewidth=0, zorder=2))

    def _label(self, label: str, place: Point, *, align: str) -> None:
        frame = {"facecolor": "white", "edgecolor": "none", "pad": 1.2 * self.scale}
        text = self.ax.text(*place, label, size=POINTS.label_font * self.scale, color=INK, bbox=frame, zorder=2.5)
        text.set(horizontalalignment=align, verticalalignment="center_baseline")


def _border(x: float, y: float, width: float, height: float) -> Path:
    """A box with round corners; a circle if it is as small as that.

    A Bezier curve that is nearly a quarter circle has its inner points 0.5523 radii from its ends.
    """
    a, b, k = width / 2, height / 2, 0.5523 * POINTS.corner
    points: list[Point] = []
    codes: list[Any] = []
    for sx, sy in ((1, 1), (-1, 1), (-1, -1), (1, -1)):
        side, level = (x + sx * a, y + sy * (b - POINTS.corner)), (x + sx * (a - POINTS.corner), y + sy * b)
        corner = [side, (side[0], side[1] + sy * k), (level[0] + sx * k, level[1]), level]
        points += corner if sx == sy else corner[::-1]
        codes += [Path.LINETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    return Path([*points, points[0]], [Path.MOVETO, *codes[1:], Path.CLOSEPOLY])
