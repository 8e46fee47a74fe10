"""Layers of a graph: which row each node stands in, and in which order, so that few edges cross.

The first two steps of a layered drawing (Sugiyama, Tagawa and Toda 1981).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from otpdag.graph import Graph

__all__ = ["Item", "Link", "layers_of", "links_of", "loop_labels", "neighbours_of", "ordered", "with_bends"]


_MOST_WIDTH = 860.0  # points; a wider layer is broken, unless
_ALWAYS_IN_ONE_ROW = 10  # it has no more nodes than this: ten siblings are one row

Item: TypeAlias = str | int
"""A node, or a bend of an edge that crosses a layer."""


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
    for (parent, child), by in lagged.items():
        upward = parent in _below(links, child)
        upper, lower = (child, parent) if upward else (parent, child)
        links.append(Link(upper, lower, _steps_ago(by), upward))
    return links


def _steps_ago(by: Sequence[int]) -> str:
    return ", ".join(f"t\N{MINUS SIGN}{steps}" for steps in sorted(by))


def loop_labels(graph: Graph) -> dict[str, str]:
    """For each node that depends on its own past, how many steps ago."""
    loops = {node: [by for parent, by in graph.lagged_parents(node) if parent == node] for node in graph.nodes}
    return {node: _steps_ago(by) for node, by in loops.items() if by}


def _below(links: Sequence[Link], node: str) -> set[str]:
    reached, stack = {node}, [node]
    while stack:
        here = stack.pop()
        fresh = {link.lower for link in links if link.upper == here} - reached
        reached |= fresh
        stack.extend(fresh)
    return reached


def layers_of(graph: Graph, links: Sequence[Link], width: Mapping[str, float]) -> dict[str, int]:
    """Each node below its parents; long layers no wider than a page; nodes with more children than parents low."""
    layered = Graph(dict.fromkeys(link[:2] for link in links), nodes=graph.nodes)
    layer: dict[str, int] = {}

    def fits(level: int, node: str) -> bool:
        row = [other for other, own in layer.items() if own == level]
        return len(row) < _ALWAYS_IN_ONE_ROW or sum(width[other] for other in row) + width[node] <= _MOST_WIDTH

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


@dataclass(frozen=True)
class Neighbours:
    """What each item is joined with in the layers above and below."""

    up: dict[Item, list[Item]]
    down: dict[Item, list[Item]]


def neighbours_of(chains: Sequence[Sequence[Item]]) -> Neighbours:
    """What the edges join from one layer to the next."""
    both = Neighbours({}, {})
    for chain in chains:
        for a, b in pairwise(chain):
            both.down.setdefault(a, []).append(b)
            both.up.setdefault(b, []).append(a)
    return both


def ordered(rows: list[list[Item]], neighbours: Neighbours, sweeps: int = 24) -> list[list[Item]]:
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


def _swapped(rows: list[list[Item]], neighbours: Neighbours, rounds: int = 6) -> list[list[Item]]:
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


def _crossed(a: Item, b: Item, neighbours: Neighbours, place: Mapping[Item, float]) -> int:
    """Crossings of the edges of ``a`` with those of ``b`` if ``a`` stands left of ``b``."""
    return sum(
        place[one] > place[other]
        for side in (neighbours.up, neighbours.down)
        for one in side.get(a, ())
        for other in side.get(b, ())
    )


def _crossings(rows: Sequence[Sequence[Item]], neighbours: Neighbours) -> int:
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
