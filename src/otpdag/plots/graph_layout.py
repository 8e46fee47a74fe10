"""Where the nodes of a drawn graph stand: sizes from names, rows from layers, places that keep edges short.

Nothing here draws: whoever does says how wide a text is. All lengths are in points at the drawing's natural size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import isotonic_regression, nnls

from otpdag.graph import Graph
from otpdag.plots.graph_layers import Item, Link, layers_of, links_of, loop_labels, neighbours_of, ordered, with_bends

__all__ = ["CORNER_RADIUS", "FONT", "LABEL_FONT", "LINE_HEIGHT", "LOOP_WIDTH", "PAGE_WIDTH", "Layout", "TextWidth"]

TextWidth: TypeAlias = Callable[[str, float], float]
"""The width of a text in a font of this size."""
Floats: TypeAlias = npt.NDArray[np.float64]

FONT, LABEL_FONT = 10.0, 8.0  # all lengths are in points
LINE_HEIGHT = 12.0  # of a name of several lines
CORNER_RADIUS = 13.0  # of a node's border; a node as small as that is a circle
LOOP_WIDTH = 15.0  # of the arrow from a node to itself
PAGE_WIDTH = 1080.0  # fifteen inches; a larger drawing is scaled down
_PADDING = 7.0  # between a name and its node's border
_NODE_GAP, _BEND_GAP = 18.0, 12.0  # between neighbours of a layer
_LAYER_GAP, _MOST_LAYER_GAP = 40.0, 84.0  # between layers; more where edges are many
_MARGIN = 10.0  # around the drawing
_BOW = 28.0  # between edges that join the same two nodes
_LINE_LENGTHS = (16, 11, 8)  # letters in a line of a name: the first with which all rows fit the page


class Layout:
    """A layered layout: layers, then the order in each, then coordinates (Sugiyama, Tagawa and Toda 1981).

    Attributes:
        graph: The graph.
        text: What is written into each node, perhaps on several lines.
        size: Width and height of each node.
        loops: For nodes with an arrow to themselves, its label.
        links: The other edges.
        bows: How far to the side each link swings, so that links between the same two nodes keep apart.
        chains: For each link its upper node, a bend in each layer that it crosses, its lower node.
        rows: The items of each layer, from left to right.
        x: Where each item stands.
        y: The height of each item's layer.

    >>> layout = Layout(Graph([("a", "b"), ("a", "c")]), lambda text, size: 0.6 * size * len(text))
    >>> layout.rows, layout.x["b"] < layout.x["a"] < layout.x["c"]
    ([['a'], ['b', 'c']], True)
    """

    def __init__(self, graph: Graph, text_width: TextWidth) -> None:
        self.graph = graph
        self.loops = loop_labels(graph)
        self.links = links_of(graph)
        self.bows = _bows(self.links)
        self._text_width = text_width
        for line_length in _LINE_LENGTHS:
            self.text = {node: _wrapped(node, line_length) for node in graph.nodes}
            self.size = {node: _size(text, text_width) for node, text in self.text.items()}
            reach = {node: sum(self.reach(node)) for node in graph.nodes}
            layer = layers_of(graph, self.links, {node: width + _NODE_GAP for node, (width, _) in self.size.items()})
            widest = max(sum(reach[node] for node in graph.nodes if layer[node] == level) for level in layer.values())
            if widest <= PAGE_WIDTH:
                break
        self.chains, rows = with_bends(graph, self.links, layer)
        self.rows = ordered(rows, neighbours_of(self.chains))
        self.x = _horizontal(self.rows, self.chains, self.reach)
        self.y = self._vertical()

    def reach(self, item: Item) -> tuple[float, float]:
        """How far an item reaches to the left and right of its centre, half the gap to the next included."""
        if isinstance(item, int):
            return _BEND_GAP / 2, _BEND_GAP / 2
        half = self.size[item][0] / 2 + _NODE_GAP / 2
        return half, half + (LOOP_WIDTH + self._text_width(self.loops[item], LABEL_FONT) if item in self.loops else 0)

    def height(self, row: Sequence[Item]) -> float:
        """Height of a layer."""
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
            level -= self.height(row) / 2
            y.update(dict.fromkeys(row, level))
            gap = _LAYER_GAP + 0.1 * run[number] + (8.0 if any(link.label for link in self.links) else 0.0)
            level -= self.height(row) / 2 + min(gap, _MOST_LAYER_GAP)
        return y

    @cached_property
    def bounds(self) -> tuple[float, float, float, float]:
        """Left, right, bottom, top."""
        gap = _NODE_GAP / 2 - _MARGIN - 0.6 * max(map(abs, self.bows.values()), default=0.0)
        left = min(self.x[item] - self.reach(item)[0] for item in self.x)
        right = max(self.x[item] + self.reach(item)[1] for item in self.x)
        nodes = [(self.y[node], self.size[node][1] / 2) for node in self.graph.nodes]
        bottom, top = min(y - half for y, half in nodes), max(y + half for y, half in nodes)
        return left + gap, right - gap, bottom - _MARGIN, top + _MARGIN

    def centre(self, node: str) -> Floats:
        """The middle of a node."""
        return np.array([self.x[node], self.y[node]])

    def distance(self, node: str, offset: Floats) -> Floats:
        """Distance of points, relative to the centre, from the border of a node; negative inside."""
        q = np.abs(offset) - np.array(self.size[node]) / 2 + CORNER_RADIUS
        return np.hypot(*np.maximum(q, 0).T) + np.minimum(q.max(-1), 0) - CORNER_RADIUS


def _bows(links: Sequence[Link]) -> dict[Link, float]:
    twins: dict[frozenset[str], list[Link]] = {}
    for link in links:
        twins.setdefault(frozenset(link[:2]), []).append(link)
    bows = {}
    for same in twins.values():
        first = 0 if not same[0].label else (len(same) - 1) / 2  # an edge without lag does not swing
        bows.update({link: _BOW * (number - first) for number, link in enumerate(same)})
    return bows


def _wrapped(name: str, most: int) -> str:
    """A long name on several lines, broken after a space, underscore, dot or hyphen."""
    lines = [""]
    for piece in re.findall(r"[^\s_.\-]*[\s_.\-]*", name):
        if lines[-1] and len(lines[-1]) + len(piece) > most:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.strip() for line in lines)


def _size(text: str, text_width: TextWidth) -> tuple[float, float]:
    width = text_width(text, FONT) + 2 * _PADDING
    height = LINE_HEIGHT * (text.count("\n") + 1) + 2 * _PADDING
    return max(width, height if "\n" not in text else width, 2 * CORNER_RADIUS), height


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
