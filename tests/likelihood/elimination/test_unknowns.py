"""Pieces of rows, against networkx on the moral graph of each row."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.likelihood.elimination.families import cut, describe_families, needs
from otpdag.structure import Structure
from tests.likelihood.elimination.worlds import random_edges


def expected(graph, seen, keep=()):
    """What must be filled in, which families count, and the pieces of one row."""
    whole = nx.DiGraph(list(graph.edges))
    whole.add_nodes_from(graph.nodes)
    shown = {node for node, flag in zip(graph.order, seen, strict=True) if flag}
    wanted = shown | set(keep)
    active = wanted.union(*(nx.ancestors(whole, node) for node in wanted)) if wanted else set()
    unknown = active - shown
    links = nx.Graph()
    links.add_nodes_from(unknown)
    complete = set()
    for node in active:
        members = [one for one in (node, *whole.predecessors(node)) if one in unknown]
        links.add_edges_from(itertools.pairwise(members))
        if not members:
            complete.add(node)
    return unknown, active, complete, {frozenset(piece) for piece in nx.connected_components(links)}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kept", [0, 2])
def test_pieces_are_components_of_the_moral_graph(seed, kept):
    rng = np.random.default_rng(7300 + seed)
    names = [f"n{i}" for i in range(9)]
    graph = otp.Graph(random_edges(rng, names, 0.35), nodes=names)
    structure = Structure.bind(graph, {node: m.Categorical(2) for node in names})
    keep = tuple(rng.permutation(names)[:kept].tolist())
    seen = rng.random((15, 9)) < 0.5
    need = needs(describe_families(structure), seen, np.zeros_like(seen), keep)
    pieces = cut(describe_families(structure), need)
    for row in range(15):
        unknown, active, complete, components = expected(graph, seen[row], keep)
        flagged = lambda flags, row=row: {n for n, flag in zip(graph.order, flags[row], strict=True) if flag}  # noqa: E731
        assert flagged(need.unknown) == unknown
        assert flagged(need.active) == active
        assert flagged(pieces.complete) == complete
        own = np.flatnonzero(pieces.row == row)
        cells = {frozenset(graph.order[n] for n in pieces.cell_node[pieces.cell_piece == piece]) for piece in own}
        assert cells == components
        touched = sorted(graph.order[n] for piece in own for n in pieces.touch_node[pieces.touch_piece == piece])
        assert touched == sorted(active - complete)


def test_given_nodes_have_no_density():
    graph = otp.Graph([("x", "y")])
    structure = Structure.bind(graph, {"x": m.Given(), "y": m.Normal()})
    seen = np.ones((2, 2), dtype=bool)
    assert needs(describe_families(structure), seen, ~seen).active.tolist() == [[False, True], [False, True]]
