r"""Errors that are correlated, written with arrows alone.

The noise of node :math:`i` becomes :math:`e_i = l_{ii} h_i + \sum_{j \to i} l_{ij} h_j` with independent :math:`h`:
each pair of correlated errors is an arrow from the one that gives its noise to the one that takes part in it. Two nodes
that take part in the noise of the same third are correlated by it, so that they must be a pair themselves. Then there
are as many numbers as variances and covariances.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

import networkx as nx

from otpdag.errors import ModelError, listed

__all__ = ["givers_and_takers"]


def givers_and_takers(
    pairs: Collection[tuple[str, str]], willing: Collection[str] = ()
) -> tuple[list[tuple[str, str]], bool]:
    """Turn pairs of correlated errors into arrows, from the node that gives its noise to the one that takes part in it.

    Args:
        pairs: Nodes whose errors are correlated.
        willing: Nodes that should rather give than take.

    Returns:
        The arrows, and whether they run in a circle.

    Raises:
        ModelError: There is no such set of arrows.

    >>> givers_and_takers([("a", "b"), ("b", "c")])
    ([('a', 'b'), ('b', 'c')], False)
    """
    left = nx.Graph()
    left.add_edges_from(pairs)
    arrows: list[tuple[str, str]] = []
    while giver := next((node for node in _in_order(left, willing) if _neighbours_are_pairs(left, node)), None):
        arrows += [(giver, taker) for taker in left.neighbors(giver)]
        left.remove_node(giver)
    for circle in list(nx.connected_components(left)):
        part = left.subgraph(circle)
        if any(degree != 2 for _, degree in part.degree):
            raise ModelError(
                f"the correlated errors of {listed(sorted(circle))} run in several circles, which no set of hidden "
                "causes of two nodes each can express: leave a pair out, or add one that closes a triangle"
            )
        arrows += nx.find_cycle(part)
    return arrows, bool(left.nodes)


def _in_order(graph: nx.Graph, willing: Collection[str]) -> list[str]:
    return sorted(graph.nodes, key=lambda node: node not in willing)


def _neighbours_are_pairs(graph: nx.Graph, node: str) -> bool:
    return all(graph.has_edge(one, other) for one, other in combinations(graph.neighbors(node), 2))
