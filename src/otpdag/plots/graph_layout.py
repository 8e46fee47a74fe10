"""Where the nodes of a drawn graph stand: in rows, in orders with few crossings, at places that keep edges short.

A layered drawing (Sugiyama, Tagawa and Toda 1981). Nothing here draws: whoever does says how wide a text is.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import networkx as nx
import numpy as np
import numpy.typing as npt
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import isotonic_regression, nnls

from otpdag.graph import Graph

Item: TypeAlias = str | int
"""A node, or a bend of an edge that crosses a layer."""
TextWidth: TypeAlias = Callable[[str, float], float]
"""The width of a text in a font of this size."""
Floats: TypeAlias = npt.NDArray[np.float64]


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
        node_gap: Between nodes of a layer.
        bend_gap: Between bends of edges in a layer.
        layer_gap: Between layers, least and most: more where edges run far to the side.
        bow: Between edges that join the same two nodes.
        margin: Around the drawing.
        row: Where a layer of more than ten nodes is broken.
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
    layer_gap: tuple[float, float] = (40.0, 84.0)
    bow: float = 28.0
    margin: float = 10.0
    row: float = 860.0
    page: float = 1080.0


POINTS = Lengths()


class Link(NamedTuple):
    """An edge as it lies in the layers."""

    upper: str
    lower: str
    label: str = ""
    upward: bool = False


def links_of(graph: Graph) -> list[Link]:
    """Ordinary edges, then lagged ones: downwards where that closes no cycle, else upwards."""
    links = [Link(*edge) for edge in graph.edges]
    lagged: dict[tuple[str, str], list[int]] = {}
    for edge in graph.lags:
        if edge.parent != edge.child:
            lagged.setdefault((edge.parent, edge.child), []).append(edge.by)
    below = nx.DiGraph(graph.edges)
    below.add_nodes_from(graph.nodes)
    for (parent, child), by in lagged.items():
        upward = nx.has_path(below, child, parent)
        upper, lower = (child, parent) if upward else (parent, child)
        links.append(Link(upper, lower, _steps_ago(by), upward))
        below.add_edge(upper, lower)
    return links


def _steps_ago(by: Sequence[int]) -> str:
    return ", ".join(f"t\N{MINUS SIGN}{steps}" for steps in sorted(by))


def loop_labels(graph: Graph) -> dict[str, str]:
    """For each node that depends on its own past, how many steps ago."""
    loops = {node: [by for parent, by in graph.lagged_parents(node) if parent == node] for node in graph.nodes}
    return {node: _steps_ago(by) for node, by in loops.items() if by}


def layers_of(graph: Graph, links: Sequence[Link], width: Mapping[str, float]) -> dict[str, int]:
    """Each node below its parents; long layers no wider than a page; nodes with more children than parents low."""
    layered = Graph(dict.fromkeys(link[:2] for link in links), nodes=graph.nodes)
    layer: dict[str, int] = {}

    def fits(level: int, node: str) -> bool:
        row = [other for other, own in layer.items() if own == level]
        return len(row) < 10 or sum(width[other] for other in row) + width[node] <= POINTS.row

    alone = [node for node in layered.roots if node in layered.leaves]
    for node in [name for name in layered.order if name not in alone] + alone:
        level = 1 + max((layer[parent] for parent in layered.parents(node)), default=-1)
        if node in alone and len(alone) < len(graph):
            level = 1 + max(layer[name] for name in layer if name not in alone)
        while not fits(level, node):
            level += 1
        layer[node] = level
    for node in reversed(layered.order):
        children = layered.children(node)
        low = min((layer[child] for child in children), default=0) - 1
        if len(children) > len(layered.parents(node)) and low > layer[node] and fits(low, node):
            layer[node] = low
    dense = {level: number for number, level in enumerate(sorted(set(layer.values())))}
    return {node: dense[level] for node, level in layer.items()}


def with_bends(
    graph: Graph, links: Sequence[Link], layer: Mapping[str, int]
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


Joined: TypeAlias = tuple[Mapping[Item, list[Item]], Mapping[Item, list[Item]]]
"""What each item is joined with in the layers above and below."""


def ordered(rows: list[list[Item]], chains: Sequence[Sequence[Item]], sweeps: int = 24) -> list[list[Item]]:
    """Sort each layer by the mean place of its neighbours, down and up in turn; keep the fewest crossings."""
    up: dict[Item, list[Item]] = {}
    down: dict[Item, list[Item]] = {}
    for a, b in (pair for chain in chains for pair in pairwise(chain)):
        down.setdefault(a, []).append(b)
        up.setdefault(b, []).append(a)
    best, fewest = rows, _crossings(rows, down)
    for sweep in range(sweeps):
        rows = _sorted_by_neighbours(rows, down if sweep % 2 else up, sweep % 2 == 0)
        rows = _swapped(rows, (up, down))
        crossings = _crossings(rows, down)
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


def _swapped(rows: list[list[Item]], joined: Joined, rounds: int = 6) -> list[list[Item]]:
    """Exchange next neighbours as long as that saves crossings."""
    rows = [list(row) for row in rows]
    place = _places(rows)
    for _ in range(rounds):
        changed = False
        for row in rows:
            for left in range(len(row) - 1):
                a, b = row[left], row[left + 1]
                if _crossed(a, b, joined, place) > _crossed(b, a, joined, place):
                    row[left], row[left + 1] = b, a
                    place[a], place[b] = place[b], place[a]
                    changed = True
        if not changed:
            break
    return rows


def _crossed(a: Item, b: Item, joined: Joined, place: Mapping[Item, float]) -> int:
    """Crossings of the edges of ``a`` with those of ``b`` if ``a`` stands left of ``b``."""
    return sum(place[one] > place[other] for side in joined for one in side.get(a, ()) for other in side.get(b, ()))


def _crossings(rows: Sequence[Sequence[Item]], down: Mapping[Item, list[Item]]) -> int:
    place = _places(rows)
    total = 0
    for row in rows:
        seen: list[float] = []
        for item in row:
            ends = sorted(place[other] for other in down.get(item, ()))
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


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
        for line_length in (16, 11, 8):  # letters of a name: the first with which all rows fit the page
            self.text = {node: _wrapped(node, line_length) for node in graph.nodes}
            self.size = {node: _size(text, text_width) for node, text in self.text.items()}
            reach = {node: sum(self.reach(node)) for node in graph.nodes}
            layer = layers_of(
                graph, self.links, {node: width + POINTS.node_gap for node, (width, _) in self.size.items()}
            )
            widest = max(sum(reach[node] for node in graph.nodes if layer[node] == level) for level in layer.values())
            if widest <= POINTS.page:
                break
        self.chains, rows = with_bends(graph, self.links, layer)
        self.rows = ordered(rows, self.chains)
        self.x = _horizontal(self.rows, self.chains, self.reach)
        self.y = self._vertical()

    def reach(self, item: Item) -> tuple[float, float]:
        """How far an item reaches to the left and right of its centre, half the gap to the next included."""
        if isinstance(item, int):
            return POINTS.bend_gap / 2, POINTS.bend_gap / 2
        half = self.size[item][0] / 2 + POINTS.node_gap / 2
        return half, half + (
            POINTS.loop + self._text_width(self.loops[item], POINTS.label_font) if item in self.loops else 0
        )

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
            gap = POINTS.layer_gap[0] + 0.1 * run[number] + (8.0 if any(link.label for link in self.links) else 0.0)
            level -= self.height(row) / 2 + min(gap, POINTS.layer_gap[1])
        return y

    @cached_property
    def bounds(self) -> tuple[float, float, float, float]:
        """Left, right, bottom, top."""
        gap = POINTS.node_gap / 2 - POINTS.margin - 0.6 * max(map(abs, self.bows.values()), default=0.0)
        left = min(self.x[item] - self.reach(item)[0] for item in self.x)
        right = max(self.x[item] + self.reach(item)[1] for item in self.x)
        nodes = [(self.y[node], self.size[node][1] / 2) for node in self.graph.nodes]
        bottom, top = min(y - half for y, half in nodes), max(y + half for y, half in nodes)
        return left + gap, right - gap, bottom - POINTS.margin, top + POINTS.margin

    def centre(self, node: str) -> Floats:
        """The middle of a node."""
        return np.array([self.x[node], self.y[node]])

    def distance(self, node: str, offset: Floats) -> Floats:
        """Distance of points, relative to the centre, from the border of a node; negative inside."""
        q = np.abs(offset) - np.array(self.size[node]) / 2 + POINTS.corner
        return np.hypot(*np.maximum(q, 0).T) + np.minimum(q.max(-1), 0) - POINTS.corner


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


def _size(text: str, text_width: TextWidth) -> tuple[float, float]:
    width = text_width(text, POINTS.font) + 2 * POINTS.padding
    height = POINTS.line * (text.count("\n") + 1) + 2 * POINTS.padding
    return max(width, height if "\n" not in text else width, 2 * POINTS.corner), height


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
