"""Draw a graph: nodes in rows with few crossings, arrows that run around other nodes.

A layered drawing (Sugiyama, Tagawa and Toda 1981): which row a node stands in, then the order of each row, then where
along it; last the lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple, TypeAlias

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Polygon
from matplotlib.path import Path

from otpdag.errors import GraphError
from otpdag.graph import Graph
from otpdag.model import Model
from otpdag.numerics import Array
from otpdag.plots.style import INK, Picture, figure_of, place_axes, text_width

Item: TypeAlias = str | int  # a node, or a bend of an edge that crosses a row
Rows: TypeAlias = list[list[Item]]


@dataclass(frozen=True)
class Lengths:
    """Lengths of a drawn graph in points, at its natural size.

    Attributes:
        font: Size of names.
        label_font: Size of labels at edges.
        line: Height of a line, where a name has several.
        padding: Between a name and its node's border.
        corner: Radius of a border's corners; a node as small as that is a circle.
        loop: Width of the arrow from a node to itself.
        arrow: Length and half the width of an arrow's head.
        node_gap: Between nodes of a row.
        bend_gap: Between bends of edges in a row.
        row_gap: Between rows, least and most: more where edges run far to the side.
        bow: Between edges that join the same two nodes.
        margin: Around the drawing.
        row: Where a row of more than ten nodes is broken.
        page: Fifteen inches; a larger drawing is scaled down.
    """

    font: float = 10.0
    label_font: float = 8.0
    line: float = 12.0
    padding: float = 7.0
    corner: float = 13.0
    loop: float = 15.0
    arrow: tuple[float, float] = (8.0, 3.2)
    node_gap: float = 18.0
    bend_gap: float = 12.0
    row_gap: tuple[float, float] = (40.0, 84.0)
    bow: float = 28.0
    margin: float = 10.0
    row: float = 860.0
    page: float = 1080.0


POINTS = Lengths()
_DASHES = (0, (4, 2.5))


def draw_graph(
    graph: Graph | Model, *, labels: Mapping[tuple[str, str], str] | None = None, ax: Axes | None = None
) -> Figure:
    """Draw a graph, parents above their children.

    Observed nodes are shaded, hidden ones are open with a dashed border. Lagged edges are dashed and say how
    many steps they span.

    Args:
        graph: The graph, or a model; made for up to about 40 nodes.
        labels: What is written at edges ``(parent, child)`` without lags, such as their coefficients.
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
    layout = Layout(graph)
    left, right, bottom, top = layout.bounds()
    if ax is None:
        inches = min(1.0, POINTS.page / max(right - left, top - bottom)) / 72
        figure = Picture(figsize=((right - left) * inches, (top - bottom) * inches))
        ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    ax.set_axis_off()
    wide, high = place_axes(ax)
    _Pen(ax, min(wide / (right - left), high / (top - bottom))).draw(layout, labels or {})
    return figure_of(ax)


# --- rows -------------------------------------------------------------------------------------------------------------


class Link(NamedTuple):
    """An edge as it lies in the rows."""

    upper: str
    lower: str
    label: str = ""
    upward: bool = False


def _links(graph: Graph) -> tuple[list[Link], dict[str, str], nx.DiGraph]:
    """Ordinary edges, then lagged ones, downwards where that closes no cycle; labels of own lags; all edges."""
    lagged: dict[tuple[str, str], list[int]] = {}
    for edge in graph.lags:
        lagged.setdefault((edge.parent, edge.child), []).append(edge.by)
    links, loops, below = [Link(*edge) for edge in graph.edges], {}, nx.DiGraph()
    below.add_nodes_from(graph.order)
    below.add_edges_from(graph.edges)
    for (parent, child), by in lagged.items():
        label = ", ".join(f"t\N{MINUS SIGN}{steps}" for steps in sorted(by))
        if parent == child:
            loops[child] = label
            continue
        upward = nx.has_path(below, child, parent)
        links.append(Link(child, parent, label, True) if upward else Link(parent, child, label))
        below.add_edge(*links[-1][:2])
    return links, loops, below


def _levels(below: nx.DiGraph, width: Mapping[str, float]) -> dict[str, int]:
    """Each node below its parents; no row wider than a page; nodes with more children than parents low."""
    level: dict[str, int] = {}

    def fits(number: int, node: str) -> bool:
        row = [other for other, own in level.items() if own == number]
        return len(row) < 10 or sum(width[other] for other in row) + width[node] <= POINTS.row

    alone = list(nx.isolates(below))
    order = list(nx.topological_sort(below))
    for nodes in ([node for node in order if node not in alone], alone):
        lowest = max(level.values(), default=-1)
        for node in nodes:
            number = 1 + max((level[parent] for parent in below.pred[node]), default=lowest)
            while not fits(number, node):
                number += 1
            level[node] = number
    for node in reversed(order):
        low = min((level[child] for child in below.succ[node]), default=0) - 1
        if below.out_degree(node) > below.in_degree(node) and low > level[node] and fits(low, node):
            level[node] = low
    dense = {number: place for place, number in enumerate(sorted(set(level.values())))}
    return {node: dense[number] for node, number in level.items()}


def _with_bends(graph: Graph, links: Sequence[Link], level: Mapping[str, int]) -> tuple[list[list[Item]], Rows]:
    """Edges as chains with a bend in each row they cross; the rows, bends near where their edge ends."""
    rows: Rows = [[] for _ in range(max(level.values()) + 1)]
    for node in graph.order:
        rows[level[node]].append(node)
    share: dict[Item, float] = {item: (n + 0.5) / len(row) for row in rows for n, item in enumerate(row)}
    chains: list[list[Item]] = []
    for link in links:
        chains.append([link.upper])
        for number in range(level[link.upper] + 1, level[link.lower]):
            bend = len(share)
            rows[number].append(bend)
            chains[-1].append(bend)
            share[bend] = share[link.lower]
        chains[-1].append(link.lower)
    return chains, [sorted(row, key=lambda item: share[item]) for row in rows]


# --- the order of each row --------------------------------------------------------------------------------------------


def _ordered(rows: Rows, joined: nx.DiGraph, starts: int = 12, sweeps: int = 12) -> Rows:
    """Sort each row by the mean place of its neighbours, down and up in turn; keep the fewest crossings.

    All but the first of some starts begin with rows in random order.
    """
    rng, best, fewest = np.random.default_rng(0), rows, math.inf
    for start in range(starts):
        rows = [[row[place] for place in rng.permutation(len(row))] for row in rows] if start else rows
        for sweep in range(sweeps):
            side, step = (joined.succ, -1) if sweep % 2 else (joined.pred, 1)
            place, swept = _places(rows), []
            for row in rows[::step]:
                mean = {item: fmean([place[other] for other in side[item]] or [place[item]]) for item in row}
                swept.append(sorted(row, key=lambda item: mean[item]))
                place |= _places(swept[-1:])
            rows = swept[::step]
            crossings = _crossings(rows, joined)
            if crossings < fewest:
                best, fewest = rows, crossings
    return best


def _places(rows: Rows) -> dict[Item, float]:
    """The place of each item in its row, the middle of the row being zero."""
    return {item: number - (len(row) - 1) / 2 for row in rows for number, item in enumerate(row)}


def _crossings(rows: Rows, joined: nx.DiGraph) -> int:
    level, place = {item: number for number, row in enumerate(rows) for item in row}, _places(rows)
    ends = np.array([(level[a], place[a], place[b]) for a, b in joined.edges]).reshape(-1, 3)
    number, start, end = (column[:, None] for column in ends.T)
    return int(((number == number.T) & (start < start.T) & (end > end.T)).sum())


# --- where nodes stand ------------------------------------------------------------------------------------------------


def _increasing(wish: Array, weight: Array) -> Array:
    """Increasing numbers nearest to others, by pooling neighbours (Barlow et al. 1972): SciPy's take long to import.

    >>> _increasing(np.array([1.0, 3.0, 2.0]), np.ones(3)).tolist()
    [1.0, 2.5, 2.5]
    """
    pools: list[tuple[float, float, int]] = []
    for mean, total in zip(wish.tolist(), weight.tolist(), strict=True):
        many = 1
        while pools and pools[-1][0] >= mean:
            before, own, count = pools.pop()
            mean, total, many = (before * own + mean * total) / (own + total), own + total, count + many
        pools.append((mean, total, many))
    return np.repeat([mean for mean, _, _ in pools], [many for _, _, many in pools])


class Layout:
    """Where the nodes of a graph stand, in points.

    Attributes:
        graph: The graph.
        text: What is written into each node, perhaps on several lines.
        size: Width and height of each node.
        loops: For nodes with an arrow to themselves, its label.
        links: The other edges.
        bows: How far to the side each link swings, so that links between the same two nodes keep apart.
        chains: For each link its upper node, a bend in each row that it crosses, its lower node.
        rows: The items of each row, from left to right.
        x: Where each item stands.
        y: The height of each item's row.
        half: Half the height of each item's row.

    >>> layout = Layout(Graph([("a", "b"), ("a", "c")]))
    >>> layout.rows, layout.x["b"] < layout.x["a"] < layout.x["c"]
    ([['a'], ['b', 'c']], True)
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.links, self.loops, below = _links(graph)
        self.bows = _bows(self.links)
        for line_length in (16, 11, 8):  # letters of a name: the first with which all rows fit the page
            self.text = {node: _wrapped(node, line_length) for node in graph.nodes}
            self.size = {node: _size(text) for node, text in self.text.items()}
            width = {node: sum(self.reach(node)) for node in graph.nodes}
            level = _levels(below, {node: self.size[node][0] + POINTS.node_gap for node in graph.nodes})
            if max(sum(width[node] for node in level if level[node] == n) for n in level.values()) <= POINTS.page:
                break
        self.chains, rows = _with_bends(graph, self.links, level)
        joined = nx.DiGraph(pair for chain in self.chains for pair in pairwise(chain))
        joined.add_nodes_from(item for row in rows for item in row)
        self.rows = _ordered(rows, joined)
        self.x = self._across(joined)
        self.y, self.half = self._down(joined)

    def reach(self, item: Item) -> tuple[float, float]:
        """How far an item reaches to the left and right of its centre, half the gap to the next included."""
        if isinstance(item, int):
            return POINTS.bend_gap / 2, POINTS.bend_gap / 2
        half = self.size[item][0] / 2 + POINTS.node_gap / 2
        loop = POINTS.loop + text_width(self.loops[item], POINTS.label_font) if item in self.loops else 0.0
        return half, half + loop

    def _across(self, joined: nx.DiGraph, sweeps: int = 200) -> dict[Item, float]:
        """Short edges: minimise the sum of squared sideways runs, subject to the order and sizes in each row.

        Given all other rows, the best places of one are an isotonic regression on the means of its neighbours; long
        edges weigh more, to be straight.
        """
        items = [item for row in self.rows for item in row]
        weight = [(1.0, 2.0, 8.0)[isinstance(a, int) + isinstance(b, int)] for a, b in joined.edges]
        nx.set_edge_attributes(joined, dict(zip(joined.edges, weight, strict=True)), "weight")
        pull = nx.to_numpy_array(joined.to_undirected(), items)
        total, x = pull.sum(1) + 1e-4, np.zeros(len(items))
        ends = np.cumsum([len(row) for row in self.rows])
        parts = [slice(end - len(row), end) for row, end in zip(self.rows, ends, strict=True)]
        gaps = [[self.reach(a)[1] + self.reach(b)[0] for a, b in pairwise(row)] for row in self.rows]
        starts = [np.cumsum([0.0, *own]) for own in gaps]
        for sweep in range(sweeps):
            for part, start in list(zip(parts, starts, strict=True))[:: 1 - 2 * (sweep % 2)]:
                wish = pull[part] @ x / total[part] - start
                x[part] = _increasing(wish, total[part]) + start
        return dict(zip(items, x.tolist(), strict=True))

    def _down(self, joined: nx.DiGraph) -> tuple[dict[Item, float], dict[Item, float]]:
        """Rows further apart where edges between them run far to the side; half the height of each item's row."""
        y: dict[Item, float] = {}
        half: dict[Item, float] = {}
        level = 0.0
        lagged = 8.0 if any(link.label for link in self.links) else 0.0
        for row in self.rows:
            high = max((self.size[item][1] / 2 for item in row if isinstance(item, str)), default=0.0)
            y |= dict.fromkeys(row, level - high)
            half |= dict.fromkeys(row, high)
            run = max((abs(self.x[item] - self.x[end]) for item in row for end in joined.succ[item]), default=0.0)
            level -= 2 * high + min(POINTS.row_gap[0] + 0.1 * run + lagged, POINTS.row_gap[1])
        return y, half

    def bounds(self) -> tuple[float, float, float, float]:
        """Left, right, bottom, top."""
        gap = POINTS.node_gap / 2 - POINTS.margin - 0.6 * max(map(abs, self.bows.values()), default=0.0)
        left = min(self.x[item] - self.reach(item)[0] for item in self.x)
        right = max(self.x[item] + self.reach(item)[1] for item in self.x)
        first, last = self.rows[0][0], self.rows[-1][0]
        bottom, top = self.y[last] - self.half[last], self.y[first] + self.half[first]
        return left + gap, right - gap, bottom - POINTS.margin, top + POINTS.margin

    def centre(self, node: str) -> Array:
        """The middle of a node."""
        return np.array([self.x[node], self.y[node]])

    def border(self, node: str) -> Array:
        """The outline of a node: a box with round corners, a circle if it is as small as that."""
        angle = np.pi / 32 * (np.arange(64) + 0.5)
        circle = np.stack([np.cos(angle), np.sin(angle)], -1)
        return self.centre(node) + POINTS.corner * (circle - np.sign(circle)) + np.sign(circle) * self.size[node] / 2


def _bows(links: Sequence[Link]) -> dict[Link, float]:
    twins: dict[frozenset[str], list[Link]] = {}
    for link in links:
        twins.setdefault(frozenset(link[:2]), []).append(link)
    bows = {}
    for same in twins.values():
        first = 0 if not same[0].label else (len(same) - 1) / 2  # an edge without lag does not swing
        bows.update({link: POINTS.bow * (number - first) for number, link in enumerate(same)})
    return bows


def _wrapped(name: str, most: int) -> str:
    """A long name on several lines, broken after a space, underscore, dot or hyphen."""
    lines = [""]
    for piece in re.findall(r"[^\s_.\-]*[\s_.\-]*", name):
        if lines[-1] and len(lines[-1]) + len(piece) > most:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.strip() for line in lines)


def _size(text: str) -> Array:
    width = text_width(text, POINTS.font) + 2 * POINTS.padding
    height = POINTS.line * (text.count("\n") + 1) + 2 * POINTS.padding
    return np.array([max(width, height if "\n" not in text else width, 2 * POINTS.corner), height])


# --- lines ------------------------------------------------------------------------------------------------------------


def _ports(layout: Layout, end: int, inner: int, side: int) -> dict[int, tuple[float, float]]:
    """Where each edge leaves the node at one end of its chain, spread by where the next items of their chains stand."""
    at: dict[Item, list[tuple[float, int]]] = {}
    for number, (link, chain) in enumerate(zip(layout.links, layout.chains, strict=True)):
        at.setdefault(chain[end], []).append((layout.x[chain[inner]] + layout.bows[link], number))
    ports = {}
    for node, numbered in at.items():
        width, height = layout.size[str(node)]
        reach = min(0.5 * width - 7, 5.0 * (len(numbered) - 1))
        offsets = np.linspace(-reach, reach, len(numbered)) if len(numbered) > 1 else [0.0]
        for (_, number), offset in zip(sorted(numbered), offsets, strict=True):
            inward = max(abs(offset) - width / 2 + POINTS.corner, 0)
            dy = height / 2 - POINTS.corner + math.sqrt(POINTS.corner**2 - inward**2)
            ports[number] = (layout.x[node] + offset, layout.y[node] + side * dy)
    return ports


def _curved(layout: Layout, number: int, start: tuple[float, float], end: tuple[float, float]) -> Path:
    """Vertical through every row, so that it meets no node there; bent only between rows."""
    link, (top, *bends, bottom) = layout.links[number], layout.chains[number]
    bow = 0.0 if bends else layout.bows[link]
    stops = [start, (start[0], layout.y[top] - layout.half[top])]
    for bend in bends:
        stops += [(layout.x[bend], layout.y[bend] + side * layout.half[bend]) for side in (1, -1)]
    stops += [(end[0], layout.y[bottom] + layout.half[bottom]), end]
    points, codes = [start], [Path.MOVETO]
    for place, ((x0, y0), (x1, y1)) in enumerate(pairwise(stops)):
        middle = (y0 + y1) / 2
        points += [(x0 + bow, middle), (x1 + bow, middle), (x1, y1)] if place % 2 else [(x1, y1)]
        codes += [Path.CURVE4] * 3 if place % 2 else [Path.LINETO]
    if link.upward:
        points, codes = points[::-1], [Path.MOVETO, *codes[:0:-1]]
    return Path(points, codes)


# --- drawing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pen:
    """Draws on axes; ``scale`` turns lengths of the drawing into points on paper."""

    ax: Axes
    scale: float

    def draw(self, layout: Layout, labels: Mapping[tuple[str, str], str]) -> None:
        starts, ends = _ports(layout, 0, 1, -1), _ports(layout, -1, -2, 1)
        for number, link in enumerate(layout.links):
            route = _curved(layout, number, starts[number], ends[number])
            self._arrow(route, dashed=bool(link.label))
            label = link.label or labels.get((link.upper, link.lower), "")
            if label:
                line = np.array(route.to_polygons(closed_only=False)[0])
                middle = line[len(line) // 2] if len(line) > 2 else line.mean(0)
                self._label(label, middle, align="center")
        for node, label in layout.loops.items():
            (x, y), width = layout.centre(node), layout.size[node][0]
            side = x + width / 2 - POINTS.corner + math.sqrt(POINTS.corner**2 - 36)
            bulge = [(side, y + 6), (side + 20, y + 17), (side + 20, y - 17), (side, y - 6)]
            self._arrow(Path(bulge, [Path.MOVETO, *3 * [Path.CURVE4]]), dashed=True)
            self._label(label, np.array([x + width / 2 + POINTS.loop, y]), align="left")
        for node in layout.graph.nodes:
            self._node(layout, node)

    def _node(self, layout: Layout, node: str) -> None:
        hidden = node in layout.graph.hidden
        border = Polygon(layout.border(node), edgecolor=INK, linewidth=1.1 * self.scale, zorder=3, gid=node)
        border.set(facecolor="white" if hidden else "#d5e0ee", linestyle=_DASHES if hidden else "-")
        self.ax.add_patch(border)
        lines = layout.text[node].split("\n")
        base = layout.y[node] - 0.36 * POINTS.font + POINTS.line * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            place = (layout.x[node], base - POINTS.line * number)
            self.ax.text(*place, line, size=POINTS.font * self.scale, ha="center", zorder=4, parse_math=False)

    def _arrow(self, route: Path, *, dashed: bool) -> None:
        points = np.array(route.vertices)
        tip = points[-1]
        back = tip - points[np.hypot(*(points - tip).T) > 1.0][-1]
        direction = back / np.hypot(*back)
        base = tip - POINTS.arrow[0] * direction
        across = POINTS.arrow[1] * np.array([-direction[1], direction[0]])
        path = Path([*points[:-1], base + 0.2 * POINTS.arrow[0] * direction], route.codes)
        line = PathPatch(path, facecolor="none", edgecolor=INK, zorder=1, capstyle="butt")
        line.set(linewidth=1.1 * self.scale, linestyle=_DASHES if dashed else "-")
        self.ax.add_patch(line)
        head = np.stack([tip, base + across, base - across])
        self.ax.add_patch(Polygon(head, color=INK, linewidth=0, zorder=2))

    def _label(self, label: str, place: Array, *, align: str) -> None:
        frame = {"facecolor": "white", "edgecolor": "none", "pad": 1.2 * self.scale}
        x, y = place
        text = self.ax.text(x, y, label, size=POINTS.label_font * self.scale, color=INK, bbox=frame, zorder=2.5)
        text.set(horizontalalignment=align, verticalalignment="center_baseline")
