"""Figures: the graph of a model, and the course of a fit.

Every function returns a :class:`matplotlib.figure.Figure`, shows nothing, and leaves pyplot alone.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import PathPatch, Polygon
from matplotlib.path import Path
from matplotlib.textpath import TextToPath
from matplotlib.ticker import MaxNLocator
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import isotonic_regression, nnls

from otpdag.engine.monitor import Stage
from otpdag.errors import DataError
from otpdag.graph import Graph

__all__ = ["draw_graph", "learning_curve", "plot_segments", "search_curve"]

# All lengths of a drawn graph are in points at its natural size.
_FONT, _SMALL_FONT = 10.0, 8.0
_LINE_HEIGHT, _PADDING = 12.0, 7.0
_RADIUS = 13.0
_NODE_GAP, _BEND_GAP = 18.0, 12.0
_LAYER_GAP, _MOST_LAYER_GAP = 40.0, 84.0
_MOST_WIDTH = 860.0  # wider layers are broken
_MOST_INCHES = 15.0
_MARGIN = 10.0
_HEAD, _HALF_HEAD = 8.0, 3.2
_LOOP = 15.0
_BOW = 28.0  # between edges that join the same two nodes
_TOUCH = 3.0  # shorter lines are not drawn on their own
_KAPPA = 0.5523  # a quarter circle as a Bezier curve

_INK, _SHADE = "#2b3a55", "#d5e0ee"
_DASHES = (0, (4, 2.5))
_COLOURS = ("#2f5d9b", "#d1762b", "#3d8b5a", "#a8434b", "#7a5aa6", "#6f6f6f", "#c2599b", "#8a7a2b")


# --- the graph --------------------------------------------------------------------------------------------


def draw_graph(graph: Graph, *, ax: Axes | None = None) -> Figure:
    """Draw a graph, parents above their children.

    Observed nodes are shaded, hidden ones are open with a dashed border. Lagged edges are dashed and say how
    many steps they span.

    Args:
        graph: The graph; made for up to about 40 nodes.
        ax: Where to draw; if left out, a figure of fitting size is made.

    Returns:
        The figure.

    >>> figure = draw_graph(Graph([("season", "load"), ("load", "price")], hidden=["load"]))
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['season', 'load', 'price']
    """
    drawing = _Drawing(graph)
    left, right, bottom, top = drawing.bounds
    if ax is None:
        inches = min(1.0, _MOST_INCHES * 72 / max(right - left, top - bottom)) / 72
        figure = Figure(figsize=((right - left) * inches, (top - bottom) * inches))
        ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    ax.set_axis_off()
    _Pen(ax, _scale(ax, right - left, top - bottom)).draw(drawing)
    return _figure_of(ax)


def _scale(ax: Axes, width: float, height: float) -> float:
    """Points on paper for one unit of the drawing."""
    figure = _figure_of(ax)
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)  # axes have their final place only after that
    box, (wide, high) = ax.get_position(), figure.get_size_inches() * 72
    return float(min(box.width * wide / width, box.height * high / height))


def _figure_of(ax: Axes) -> Figure:
    figure: Any = ax.figure
    while not isinstance(figure, Figure):
        figure = figure.figure  # a figure inside a figure
    return figure


Item: TypeAlias = str | int  # a node, or a bend of an edge that crosses a layer
Point: TypeAlias = tuple[float, float]
Floats: TypeAlias = npt.NDArray[np.float64]


class _Link(NamedTuple):
    """An edge as it lies in the layers."""

    upper: str
    lower: str
    label: str = ""
    upward: bool = False


class _Drawing:
    """A layered layout: layers, then the order in each, then coordinates (Sugiyama, Tagawa and Toda 1981)."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.text = {node: _wrapped(node) for node in graph.nodes}
        self.size = {node: _size(text) for node, text in self.text.items()}
        self.loops = _loop_labels(graph)
        self.links = _links(graph)
        self.bows = _bows(self.links)
        layer = _layers(graph, self.links, {node: width + _NODE_GAP for node, (width, _) in self.size.items()})
        self.chains, rows = _with_bends(graph, self.links, layer)
        neighbours = _neighbours(self.chains)
        self.rows = _ordered(rows, neighbours)
        self.x = _horizontal(self.rows, self.chains, self._extent)
        self.y = self._vertical()

    def _extent(self, item: Item) -> tuple[float, float]:
        """How far an item reaches to the left and right of its centre, half the gap to the next included."""
        if isinstance(item, int):
            return _BEND_GAP / 2, _BEND_GAP / 2
        half = self.size[item][0] / 2 + _NODE_GAP / 2
        return half, half + (_LOOP + _text_width(self.loops[item], _SMALL_FONT) if item in self.loops else 0)

    def _height(self, row: Sequence[Item]) -> float:
        return max((self.size[item][1] for item in row if isinstance(item, str)), default=0.0)

    def _vertical(self) -> dict[Item, float]:
        """Layers further apart where edges between them run far to the side."""
        run = [0.0] * len(self.rows)
        place = {item: number for number, row in enumerate(self.rows) for item in row}
        for chain in self.chains:
            for a, b in pairwise(chain):
                run[place[a]] = max(run[place[a]], abs(self.x[a] - self.x[b]))
        y, level = {}, 0.0
        for number, row in enumerate(self.rows):
            level -= self._height(row) / 2
            y.update(dict.fromkeys(row, level))
            gap = _LAYER_GAP + 0.1 * run[number] + (8.0 if any(link.label for link in self.links) else 0.0)
            level -= self._height(row) / 2 + min(gap, _MOST_LAYER_GAP)
        return y

    @cached_property
    def bounds(self) -> tuple[float, float, float, float]:
        """Left, right, bottom, top."""
        gap = _NODE_GAP / 2 - _MARGIN - 0.6 * max(map(abs, self.bows.values()), default=0.0)
        left = min(self.x[item] - self._extent(item)[0] for item in self.x)
        right = max(self.x[item] + self._extent(item)[1] for item in self.x)
        nodes = [(self.y[node], self.size[node][1] / 2) for node in self.graph.nodes]
        bottom, top = min(y - half for y, half in nodes), max(y + half for y, half in nodes)
        return left + gap, right - gap, bottom - _MARGIN, top + _MARGIN

    def routes(self) -> Iterator[tuple[_Link, Path]]:
        """Each edge with its line from parent to child: straight lines if that is clear, else curves."""
        lines = {link: self._straight(link) for link in self.links}
        crowded = any(link.label or self._meets_node(link, line) for link, line in lines.items())
        if crowded or _heads_overlap([end for _, end in lines.values()]):
            ports = self._ports()
            for chain, link in zip(self.chains, self.links, strict=True):
                path = self._curved(chain, *ports[link], bow=self.bows[link] if len(chain) == 2 else 0.0)
                yield link, _reversed(path) if link.upward else path
        else:
            for link, (start, end) in lines.items():
                yield link, Path([start, end])

    def _straight(self, link: _Link) -> tuple[Point, Point]:
        """The line between two centres, cut at the borders."""
        a, b = self._centre(link.upper), self._centre(link.lower)
        start, end = a + self._to_border(link.upper, b - a), b + self._to_border(link.lower, a - b)
        return (float(start[0]), float(start[1])), (float(end[0]), float(end[1]))

    def _to_border(self, node: str, direction: Floats) -> Floats:
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            inside = self._distance(node, middle * direction) < 0
            low, high = (middle, high) if inside else (low, middle)
        return high * direction

    def _distance(self, node: str, offset: Floats) -> Floats:
        """Distance of points, relative to the centre, from the border of a node; negative inside."""
        q = np.abs(offset) - np.array(self.size[node]) / 2 + _RADIUS
        return np.hypot(*np.maximum(q, 0).T) + np.minimum(q.max(-1), 0) - _RADIUS

    def _meets_node(self, link: _Link, line: tuple[Point, Point]) -> bool:
        points = np.linspace(*line, 80)
        others = (node for node in self.graph.nodes if node not in link[:2])
        return any((self._distance(node, points - self._centre(node)) < 4).any() for node in others)

    def _centre(self, node: str) -> Floats:
        return np.array([self.x[node], self.y[node]])

    def _ports(self) -> dict[_Link, tuple[Point, Point]]:
        """Where each edge leaves its upper node and meets its lower one."""
        below: dict[Item, list[tuple[float, int]]] = {}
        above: dict[Item, list[tuple[float, int]]] = {}
        for number, chain in enumerate(self.chains):
            bow = self.bows[self.links[number]]
            below.setdefault(chain[0], []).append((self.x[chain[1]] + bow, number))
            above.setdefault(chain[-1], []).append((self.x[chain[-2]] + bow, number))
        start, end = self._spread(below, -1), self._spread(above, 1)
        return {link: (start[number], end[number]) for number, link in enumerate(self.links)}

    def _spread(self, ends: Mapping[Item, list[tuple[float, int]]], side: int) -> dict[int, Point]:
        ports = {}
        for node, numbered in ends.items():
            width, height = self.size[str(node)]
            reach = min(0.5 * width - 7, 5.0 * (len(numbered) - 1))
            for (_, number), dx in zip(sorted(numbered), np.linspace(-reach, reach, len(numbered)), strict=True):
                offset = 0.0 if len(numbered) == 1 else float(dx)
                inward = max(abs(offset) - width / 2 + _RADIUS, 0)
                dy = height / 2 - _RADIUS + float(np.sqrt(_RADIUS**2 - inward**2))
                ports[number] = (self.x[node] + offset, self.y[node] + side * dy)
        return ports

    def _curved(self, chain: Sequence[Item], start: Point, end: Point, bow: float) -> Path:
        """Vertical through every layer, so that it meets no node there; bent only between layers."""
        half = {item: self._height(row) / 2 for row in self.rows for item in row}
        top, bottom = chain[0], chain[-1]
        stops = [start, (start[0], self.y[top] - half[top])]
        for bend in chain[1:-1]:
            stops += [(self.x[bend], self.y[bend] + half[bend]), (self.x[bend], self.y[bend] - half[bend])]
        stops += [(end[0], self.y[bottom] + half[bottom]), end]
        points, codes = [start], [Path.MOVETO]
        for number, ((x0, y0), (x1, y1)) in enumerate(pairwise(stops)):
            middle = (y0 + y1) / 2
            if number % 2:
                points += [(x0 + bow, middle), (x1 + bow, middle), (x1, y1)]
                codes += [Path.CURVE4] * 3
            elif y0 - y1 > _TOUCH:
                points.append((x1, y1))
                codes.append(Path.LINETO)
            else:  # next to nothing: begin or end the curve here instead
                points[-1] = (x1, y0) if number == 0 else (x1, y1)
        return Path(points, codes)


def _heads_overlap(tips: Sequence[Point]) -> bool:
    return any(np.hypot(a[0] - b[0], a[1] - b[1]) < 1.5 * _HALF_HEAD for a, b in combinations(tips, 2))


def _vertices(path: Path) -> Floats:
    return np.array(path.vertices, dtype=np.float64)


def _reversed(path: Path) -> Path:
    codes: Any = path.codes
    return Path(_vertices(path)[::-1], [Path.MOVETO, *codes[:0:-1]])


def _bows(links: Sequence[_Link]) -> dict[_Link, float]:
    """How far to the side each edge swings, so that edges between the same two nodes keep apart."""
    twins: dict[frozenset[str], list[_Link]] = {}
    for link in links:
        twins.setdefault(frozenset(link[:2]), []).append(link)
    bows = {}
    for same in twins.values():
        first = 0 if not same[0].label else (len(same) - 1) / 2  # an edge without lag does not swing
        bows.update({link: _BOW * (number - first) for number, link in enumerate(same)})
    return bows


def _wrapped(name: str, most: int = 16) -> str:
    """A long name on several lines, broken after a space, underscore, dot or hyphen."""
    lines = [""]
    for piece in re.findall(r"[^\s_.\-]*[\s_.\-]*", name):
        if lines[-1] and len(lines[-1]) + len(piece) > most:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.strip() for line in lines)


def _text_width(text: str, size: float) -> float:
    measure, font = TextToPath(), FontProperties(size=size)
    return max(float(measure.get_text_width_height_descent(line, font, ismath=False)[0]) for line in text.split("\n"))


def _size(text: str) -> tuple[float, float]:
    width = _text_width(text, _FONT) + 2 * _PADDING
    height = _LINE_HEIGHT * (text.count("\n") + 1) + 2 * _PADDING
    return max(width, height if "\n" not in text else width, 2 * _RADIUS), height


def _loop_labels(graph: Graph) -> dict[str, str]:
    loops = {node: [by for parent, by in graph.lagged_parents(node) if parent == node] for node in graph.nodes}
    return {node: _steps(by) for node, by in loops.items() if by}


def _steps(by: Sequence[int]) -> str:
    return ", ".join(f"t\N{MINUS SIGN}{steps}" for steps in sorted(by))


def _links(graph: Graph) -> list[_Link]:
    """Ordinary edges, then lagged ones: downwards where that closes no cycle, else upwards."""
    links = [_Link(*edge) for edge in graph.edges]
    lagged: dict[tuple[str, str], list[int]] = {}
    for edge in graph.lags:
        if edge.parent != edge.child:
            lagged.setdefault((edge.parent, edge.child), []).append(edge.by)
    for (parent, child), by in lagged.items():
        upward = parent in _below(links, child)
        upper, lower = (child, parent) if upward else (parent, child)
        links.append(_Link(upper, lower, _steps(by), upward))
    return links


def _below(links: Sequence[_Link], node: str) -> set[str]:
    reached, stack = {node}, [node]
    while stack:
        here = stack.pop()
        fresh = {link.lower for link in links if link.upper == here} - reached
        reached |= fresh
        stack.extend(fresh)
    return reached


def _layers(graph: Graph, links: Sequence[_Link], width: Mapping[str, float]) -> dict[str, int]:
    """Each node below its parents; layers no wider than a page; nodes with more children than parents low."""
    layered = Graph(dict.fromkeys(link[:2] for link in links), nodes=graph.nodes)
    used: dict[int, float] = {}
    layer: dict[str, int] = {}

    def fits(level: int, node: str) -> bool:
        return used.get(level, 0.0) == 0 or used[level] + width[node] <= _MOST_WIDTH

    def put(node: str, level: int) -> None:
        layer[node] = level
        used[level] = used.get(level, 0.0) + width[node]

    alone = [node for node in layered.roots if node in layered.leaves]
    for node in [name for name in layered.order if name not in alone] + alone:
        level = 1 + max((layer[parent] for parent in layered.parents(node)), default=-1)
        if node in alone and len(alone) < len(graph):
            level = 1 + max(layer[name] for name in layer if name not in alone)
        while not fits(level, node):
            level += 1
        put(node, level)
    for node in reversed(layered.order):
        children = layered.children(node)
        low = min((layer[child] for child in children), default=0) - 1
        if len(children) > len(layered.parents(node)) and low > layer[node] and fits(low, node):
            used[layer[node]] -= width[node]
            put(node, low)
    dense = {level: number for number, level in enumerate(sorted(set(layer.values())))}
    return {node: dense[level] for node, level in layer.items()}


def _with_bends(
    graph: Graph, links: Sequence[_Link], layer: Mapping[str, int]
) -> tuple[list[list[Item]], list[list[Item]]]:
    """Edges as chains with a bend in each layer they cross; the layers, bends near where their edge ends."""
    rows: list[list[Item]] = [[] for _ in range(max(layer.values()) + 1)]
    for node in graph.order:
        rows[layer[node]].append(node)
    share: dict[Item, float] = {item: (n + 0.5) / len(row) for row in rows for n, item in enumerate(row)}
    chains: list[list[Item]] = []
    for link in links:
        crossed = range(layer[link.upper] + 1, layer[link.lower])
        bends = [len(share) + number for number in range(len(crossed))]
        for level, bend in zip(crossed, bends, strict=True):
            rows[level].append(bend)
            share[bend] = share[link.lower]
        chains.append([link.upper, *bends, link.lower])
    return chains, [sorted(row, key=lambda item: share[item]) for row in rows]


@dataclass(frozen=True)
class _Neighbours:
    up: dict[Item, list[Item]]
    down: dict[Item, list[Item]]


def _neighbours(chains: Sequence[Sequence[Item]]) -> _Neighbours:
    both = _Neighbours({}, {})
    for chain in chains:
        for a, b in pairwise(chain):
            both.down.setdefault(a, []).append(b)
            both.up.setdefault(b, []).append(a)
    return both


def _ordered(rows: list[list[Item]], neighbours: _Neighbours, sweeps: int = 24) -> list[list[Item]]:
    """Sort each layer by the mean place of its neighbours, down and up in turn; keep the fewest crossings."""
    best, fewest = rows, _crossings(rows, neighbours)
    for sweep in range(sweeps):
        rows = _sorted_by_neighbours(rows, neighbours.up if sweep % 2 == 0 else neighbours.down, sweep % 2 == 0)
        rows = _swapped(rows, neighbours)
        crossings = _crossings(rows, neighbours)
        if crossings < fewest:
            best, fewest = rows, crossings
    return best


def _sorted_by_neighbours(rows: list[list[Item]], side: Mapping[Item, list[Item]], downwards: bool) -> list[list[Item]]:
    place = _places(rows)
    result = list(rows)
    for number in range(len(rows)) if downwards else reversed(range(len(rows))):
        mean = {
            item: float(np.mean([place[other] for other in side[item]])) if item in side else place[item]
            for item in rows[number]
        }
        result[number] = sorted(rows[number], key=lambda item: mean[item])
        place.update(_places([result[number]]))
    return result


def _places(rows: Sequence[Sequence[Item]]) -> dict[Item, float]:
    """The place of each item in its layer, the middle of the layer being zero."""
    return {item: number - (len(row) - 1) / 2 for row in rows for number, item in enumerate(row)}


def _swapped(rows: list[list[Item]], neighbours: _Neighbours, rounds: int = 6) -> list[list[Item]]:
    """Exchange next neighbours as long as that saves crossings."""
    rows = [list(row) for row in rows]
    place = _places(rows)
    for _ in range(rounds):
        changed = False
        for row in rows:
            for left in range(len(row) - 1):
                a, b = row[left], row[left + 1]
                if _crossed(a, b, neighbours, place) > _crossed(b, a, neighbours, place):
                    row[left], row[left + 1] = b, a
                    place[a], place[b] = place[b], place[a]
                    changed = True
        if not changed:
            break
    return rows


def _crossed(a: Item, b: Item, neighbours: _Neighbours, place: Mapping[Item, float]) -> int:
    """Crossings of the edges of ``a`` with those of ``b`` if ``a`` stands left of ``b``."""
    return sum(
        place[one] > place[other]
        for side in (neighbours.up, neighbours.down)
        for one in side.get(a, ())
        for other in side.get(b, ())
    )


def _crossings(rows: Sequence[Sequence[Item]], neighbours: _Neighbours) -> int:
    place = _places(rows)
    total = 0
    for row in rows:
        seen: list[float] = []
        for item in row:
            ends = sorted(place[other] for other in neighbours.down.get(item, ()))
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _horizontal(
    rows: Sequence[Sequence[Item]],
    chains: Sequence[Sequence[Item]],
    extent: Callable[[Item], tuple[float, float]],
) -> dict[Item, float]:
    """Short edges: minimise the sum of squared sideways runs, subject to the order and sizes in each layer.

    The quadratic programme min |x'Qx| subject to Gx >= h is solved by non-negative least squares (Lawson and
    Hanson 1974, chapter 23.4); long edges weigh more, to be straight.
    """
    number = {item: place for place, item in enumerate(item for row in rows for item in row)}
    q = 1e-4 * np.eye(len(number))
    for a, b in (pair for chain in chains for pair in pairwise(chain)):
        pull = (1.0, 2.0, 8.0)[isinstance(a, int) + isinstance(b, int)]
        i, j = number[a], number[b]
        q[[i, j, i, j], [i, j, j, i]] += pull * np.array([1, 1, -1, -1])
    pairs = [pair for row in rows for pair in pairwise(row)]
    g, h = np.zeros((len(pairs), len(number))), np.zeros(len(pairs))
    for place, (a, b) in enumerate(pairs):
        g[place, number[b]], g[place, number[a]] = 1.0, -1.0
        h[place] = extent(a)[1] + extent(b)[0]
    x = _least_distance(q, g, h)
    placed = {item: float(x[place]) for item, place in number.items()}
    for row in rows:  # remove what rounding left of an overlap
        start = np.concatenate([[0.0], np.cumsum([extent(a)[1] + extent(b)[0] for a, b in pairwise(row)])])
        wish = np.array([placed[item] for item in row])
        placed.update(zip(row, (isotonic_regression(wish - start).x + start).tolist(), strict=True))
    return placed


def _least_distance(q: Floats, g: Floats, h: Floats) -> Floats:
    """Minimise x'Qx subject to Gx >= h."""
    if not len(h):
        return np.zeros(len(q))
    root = cholesky(q, lower=True)
    scale = np.abs(h).max()
    system = np.vstack([solve_triangular(root, g.T, lower=True), h / scale])
    target = np.append(np.zeros(len(q)), 1.0)
    residual = system @ nnls(system, target)[0] - target
    return scale * solve_triangular(root.T, -residual[:-1] / residual[-1], lower=False)


@dataclass(frozen=True)
class _Pen:
    """Draws on axes; ``scale`` turns lengths of the drawing into points on paper."""

    ax: Axes
    scale: float

    def draw(self, drawing: _Drawing) -> None:
        routes = list(drawing.routes())
        for link, path in routes:
            self._arrow(path, dashed=bool(link.label))
        for label, place in _label_places(routes):
            self._label(label, place, align="center")
        for node, label in drawing.loops.items():
            x, y, (width, _) = drawing.x[node], drawing.y[node], drawing.size[node]
            side = x + width / 2 - _RADIUS + float(np.sqrt(_RADIUS**2 - 36))
            bulge = [(side, y + 6), (side + 20, y + 17), (side + 20, y - 17), (side, y - 6)]
            self._arrow(Path(bulge, [Path.MOVETO] + [Path.CURVE4] * 3), dashed=True)
            self._label(label, (x + width / 2 + _LOOP, y), align="left")
        for node in drawing.graph.nodes:
            self._node(drawing, node)

    def _node(self, drawing: _Drawing, node: str) -> None:
        x, y, text = drawing.x[node], drawing.y[node], drawing.text[node]
        hidden = node in drawing.graph.hidden
        patch = PathPatch(_border(x, y, *drawing.size[node]), edgecolor=_INK, zorder=3, gid=node)
        patch.set(facecolor="white" if hidden else _SHADE, linewidth=1.1 * self.scale)
        patch.set(linestyle=_DASHES if hidden else "-")
        self.ax.add_patch(patch)
        lines = text.count("\n") + 1
        base = y - 0.36 * _FONT + _LINE_HEIGHT * (lines - 1) / 2
        for number, line in enumerate(text.split("\n")):
            level = base - _LINE_HEIGHT * number
            self.ax.text(x, level, line, size=_FONT * self.scale, ha="center", zorder=4, parse_math=False)

    def _arrow(self, path: Path, *, dashed: bool) -> None:
        points = _vertices(path)
        tip, direction = points[-1].copy(), points[-1] - points[-2]
        direction /= np.hypot(*direction)
        base = tip - _HEAD * direction
        points[-1] = base + 0.2 * _HEAD * direction
        across = _HALF_HEAD * np.array([-direction[1], direction[0]])
        line = PathPatch(Path(points, path.codes), facecolor="none", edgecolor=_INK, zorder=1)
        line.set(linewidth=1.1 * self.scale, linestyle=_DASHES if dashed else "-", capstyle="butt")
        self.ax.add_patch(line)
        head = np.stack([tip, base + across, base - across])
        self.ax.add_patch(Polygon(head, color=_INK, linewidth=0, zorder=2))

    def _label(self, label: str, place: Point, *, align: str) -> None:
        frame = {"facecolor": "white", "edgecolor": "none", "pad": 1.2 * self.scale}
        text = self.ax.text(*place, label, size=_SMALL_FONT * self.scale, color=_INK, bbox=frame, zorder=2.5)
        text.set(horizontalalignment=align, verticalalignment="center_baseline")


def _border(x: float, y: float, width: float, height: float) -> Path:
    """A box with round corners; a circle if it is as small as that."""
    a, b, k = width / 2, height / 2, _KAPPA * _RADIUS
    points: list[Point] = []
    codes: list[Any] = []
    for sx, sy in ((1, 1), (-1, 1), (-1, -1), (1, -1)):
        side, level = (x + sx * a, y + sy * (b - _RADIUS)), (x + sx * (a - _RADIUS), y + sy * b)
        corner = [side, (side[0], side[1] + sy * k), (level[0] + sx * k, level[1]), level]
        points += corner if sx == sy else corner[::-1]
        codes += [Path.LINETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    return Path([*points, points[0]], [Path.MOVETO, *codes[1:], Path.CLOSEPOLY])


def _label_places(routes: Sequence[tuple[_Link, Path]]) -> Iterator[tuple[str, Point]]:
    """For each label the place on its own line that covers least of other labels and lines."""
    shares = np.linspace(0, 1, 25)[:, None]
    last = [_last_curve(path) for _, path in routes if any(link.label for link, _ in routes)]
    lines = [_bezier(corners, shares) for corners in last]
    placed: list[tuple[Floats, Floats]] = []
    for number, (link, _) in enumerate(routes):
        if link.label:
            half = np.array([_text_width(link.label, _SMALL_FONT) / 2 + 3, _SMALL_FONT / 2 + 3])
            foreign = np.concatenate([line for other, line in enumerate(lines) if other != number] or [lines[0][:0]])
            spots = [_bezier(last[number], np.array([[share]]))[0] for share in (0.5, 0.4, 0.6, 0.32, 0.68, 0.25)]
            cover = [_covered(spot, half, foreign, placed) for spot in spots]
            best = spots[int(np.argmin(cover))]
            placed.append((best, half))
            yield link.label, (float(best[0]), float(best[1]))


def _last_curve(path: Path) -> Floats:
    end = int(np.flatnonzero(np.array(path.codes) == Path.CURVE4)[-1])
    return _vertices(path)[end - 3 : end + 1]


def _covered(spot: Floats, half: Floats, lines: Floats, labels: Sequence[tuple[Floats, Floats]]) -> float:
    overlaps = sum(bool((np.abs(spot - other) < half + size).all()) for other, size in labels)
    return 100.0 * overlaps + float((np.abs(lines - spot) < half).all(1).sum())


def _bezier(corners: Floats, share: Floats) -> Floats:
    a, b, c, d = corners
    rest = 1 - share
    return rest**3 * a + 3 * rest**2 * share * b + 3 * rest * share**2 * c + share**3 * d


# --- the fit ----------------------------------------------------------------------------------------------


def learning_curve(history: Mapping[str, Sequence[float]], *, ax: Axes | None = None) -> Figure:
    """Draw every term of a loss over the steps of a fit.

    The scale is logarithmic if all values are positive and the largest is more than a hundred times the
    smallest.

    Args:
        history: For each term its values, one for each step, in the order of the steps; NaN is left out. An
            entry ``step`` gives the numbers of the steps; without it they are 1, 2, and so on.
        ax: Where to draw; if left out, a figure is made.

    Returns:
        The figure.

    Raises:
        DataError: There is no term, or a term is not a list of numbers.

    >>> figure = learning_curve({"cost": [9.0, 4.0, 2.0], "divergence": [1.0, 0.5, 0.1]})
    >>> figure.axes[0].get_xlabel()
    'step'
    """
    terms = {name: _series(name, values) for name, values in history.items()}
    steps = terms.pop("step", None)
    if not terms:
        raise DataError("history must hold at least one term; got none")
    if ax is None:
        ax = Figure(figsize=(6.4, 3.8), layout="constrained").add_subplot()
    for number, (name, values) in enumerate(terms.items()):
        x = np.arange(1, len(values) + 1) if steps is None else steps[: len(values)]
        if len(x) != len(values):
            raise DataError(
                f"history[{name!r}] must have at most {len(x)} values, one for each step; got {len(values)}"
            )
        finite = ~np.isnan(values)
        marker = "o" if finite.sum() == 1 else None
        colour = _COLOURS[number % len(_COLOURS)]
        style = "-" if number < len(_COLOURS) else "--"
        ax.plot(x[finite], values[finite], label=name, color=colour, linestyle=style, linewidth=1.4, marker=marker)
    if _spans_decades(terms):
        ax.set_yscale("log")
    _tidy(ax, len(terms))
    return _figure_of(ax)


def search_curve(stages: Sequence[Stage], *, kept: int | None = None, ax: Axes | None = None) -> Figure:
    """Draw the losses of all starts along the stages of a search, the kept one on top.

    Where losses only fall, as those of a quasi-Newton method do, the height of a line is how far it lies above the
    lowest loss of the stages that compare with it, on a logarithmic scale: starts that are stuck stay high. Noisy
    losses are drawn as they are, with a running mean.

    Args:
        stages: The ``stages`` of a :class:`~otpdag.FitResult`.
        kept: Number of the start that was kept; if left out, the first of the last stage.
        ax: Where to draw; if left out, a figure is made.

    Returns:
        The figure.

    Raises:
        DataError: No stage has a step.

    >>> figure = search_curve(
    ...     [Stage("2 short starts", (0, 1), [(3.0, 4.0), (1.5, 2.0)]), Stage("best", (0,), [(1.2,)])]
    ... )
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['2 short starts', 'best']
    """
    tables = [(stage, np.array(stage.losses, dtype=np.float64)) for stage in stages if stage.losses]
    if not tables:
        raise DataError("stages must hold at least one step; got none")
    if ax is None:
        ax = Figure(figsize=(6.4, 3.8), layout="constrained").add_subplot()
    falling = all(_only_falls(losses) for _, losses in tables)
    kept = tables[-1][0].starts[0] if kept is None else kept
    begin = 0
    for stage, losses in tables:
        comparable = [table for other, table in tables if other.objective == stage.objective]
        heights = _above_lowest(losses, comparable) if falling else losses
        steps = np.arange(begin + 1, begin + len(losses) + 1)
        order = sorted(range(len(stage.starts)), key=lambda place: stage.starts[place] == kept)
        for place in order:
            _draw_start(ax, steps, heights[:, place], is_kept=stage.starts[place] == kept, smooth=not falling)
        begin += len(losses)
    if falling:
        ax.set_yscale("log")
    ax.set_ylabel("loss above the lowest" if falling else "loss")
    _tidy_steps(ax)
    _mark_stages(ax, [(stage.name, len(losses)) for stage, losses in tables])
    _mark_lines(ax, several=len(tables[0][0].starts) > 1)
    return _figure_of(ax)


def _only_falls(losses: Floats) -> bool:
    before, after = losses[:-1], losses[1:]
    return not bool((np.isfinite(before) & (after > before + 1e-9 * (1 + np.abs(before)))).any())


def _above_lowest(losses: Floats, tables: Sequence[Floats]) -> Floats:
    """Distance to the lowest loss of some tables, NaN where rounding would show."""
    finite = np.concatenate([table[np.isfinite(table)] for table in tables])
    lowest = float(finite.min()) if len(finite) else 0.0
    above = losses - lowest
    return np.where(np.isfinite(above) & (above > 1e-10 * (1 + abs(lowest))), above, np.nan)


def _draw_start(
    ax: Axes, steps: Floats | npt.NDArray[np.int64], heights: Floats, *, is_kept: bool, smooth: bool
) -> None:
    colour, width, front = (_COLOURS[0], 1.8, 3) if is_kept else ("#9aa5b4", 0.9, 2)
    marker = "o" if np.isfinite(heights).sum() == 1 else None
    if smooth and len(heights) > 20:
        ax.plot(steps, heights, color=colour, linewidth=0.5, alpha=0.25, zorder=front)
        window = max(3, len(heights) // 25)
        heights = np.convolve(np.pad(heights, window // 2, mode="edge"), np.ones(window) / window, "same")
        heights = heights[window // 2 : window // 2 + len(steps)]
    ax.plot(steps, heights, color=colour, linewidth=width, marker=marker, markersize=3, zorder=front)


def _mark_stages(ax: Axes, stages: Sequence[tuple[str, int]]) -> None:
    """A line where a stage ends, and the stages' names above, one level up where two would meet."""
    begin, total = 0, sum(length for _, length in stages)
    wide = ax.get_window_extent().width * 72 / _figure_of(ax).dpi
    ends = [0.0, 0.0]  # how far each level is taken
    for number, (name, length) in enumerate(stages):
        if number:
            ax.axvline(begin + 0.5, color="#c3cad4", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        half = 0.5 * (_text_width(name, _SMALL_FONT) + 6) / wide
        centre = min(max((begin + length / 2) / total, half), 1 - half)
        level = int(ends[0] > centre - half)
        ends[level] = centre + half
        ax.text(
            centre, 1.02 + 0.055 * level, name, transform=ax.transAxes, ha="center", va="bottom",
            fontsize=_SMALL_FONT, color=_INK,
        )  # fmt: skip
        begin += length
    ax.set_xlim(0.5, total + 0.5)


def _mark_lines(ax: Axes, *, several: bool) -> None:
    if several:
        ax.plot([], [], color=_COLOURS[0], linewidth=1.8, label="kept start")
        ax.plot([], [], color="#9aa5b4", linewidth=0.9, label="other starts")
        ax.legend(frameon=False, loc="best", handlelength=1.4, fontsize=_SMALL_FONT)


def _tidy_steps(ax: Axes) -> None:
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#e4e7ec", linewidth=0.8)
    ax.set_axisbelow(True)


def _series(name: str, values: Sequence[float]) -> Floats:
    """Numbers, NaN where they are not finite."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"history[{name!r}] must be a list of numbers; got {values!r:.60}") from error
    if array.ndim != 1 or not len(array):
        raise DataError(f"history[{name!r}] must be a list of at least one number; got shape {array.shape}")
    return np.where(np.isfinite(array), array, np.nan)


def _spans_decades(terms: Mapping[str, Floats]) -> bool:
    values = np.concatenate([array[~np.isnan(array)] for array in terms.values()])
    return bool(len(values) and values.min() > 0 and values.max() > 100 * values.min())


def _tidy(ax: Axes, terms: int) -> None:
    _tidy_steps(ax)
    ax.set_ylabel("value")
    ax.margins(x=0.01)
    if terms > 1:
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.4)
    else:
        ax.set_ylabel(str(ax.lines[-1].get_label()))


# --- sequences ----------------------------------------------------------------------------------------------


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
        ax = Figure(figsize=(8.0, 3.2), layout="constrained").add_subplot()
    bands: dict[int, Artist] = {}
    half = np.diff(where) / 2 if len(where) > 1 else np.array([0.5])
    left = where - np.concatenate([half[:1], half])
    right = where + np.concatenate([half, half[-1:]]) if len(where) > 1 else where + 0.5
    for start, stop in _stretches(codes):
        colour = _COLOURS[int(codes[start]) % len(_COLOURS)]
        band = ax.axvspan(left[start], right[stop - 1], color=colour, alpha=0.16, linewidth=0)
        bands.setdefault(int(codes[start]), band)
        if levels is not None:
            level = float(np.asarray(levels, dtype=np.float64).ravel()[codes[start]])
            ax.plot([left[start], right[stop - 1]], [level, level], color=colour, linewidth=1.6)
    ax.plot(where, series, color=_INK, linewidth=0.8, marker="o", markersize=2.2)
    ax.set_xlim(left[0], right[-1])
    ax.spines[["top", "right"]].set_visible(False)
    labels = [names[state] if names is not None else f"state {state}" for state in sorted(bands)]
    ax.legend(
        [bands[state] for state in sorted(bands)], labels, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
    return _figure_of(ax)


def _stretches(codes: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """First and past-the-last step of each run of one state."""
    cuts = np.flatnonzero(np.diff(codes)) + 1
    yield from pairwise([0, *cuts.tolist(), len(codes)])
