"""Tests of the graph."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otpdag.errors import GraphError
from otpdag.graph import Graph, Lag, lag


@st.composite
def graphs(draw: st.DrawFn, most: int = 9) -> Graph:
    """Any graph: ordinary edges follow a hidden order that differs from the declared one."""
    names = [f"n{place}" for place in range(draw(st.integers(1, most)))]
    pairs = [(a, b) for place, a in enumerate(names) for b in names[place + 1 :]]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    lags = draw(st.sets(st.tuples(st.sampled_from(names), st.sampled_from(names), st.integers(1, 3)), max_size=4))
    hidden = draw(st.sets(st.sampled_from(names)))
    nodes = draw(st.permutations(names))
    return Graph([*edges, *(lag(*entry) for entry in sorted(lags))], nodes=nodes, hidden=hidden)


@pytest.fixture
def grid() -> Graph:
    return Graph([("season", "load"), ("load", "price"), ("load", "outages")], hidden=["load"])


def test_parts_are_in_declaration_order(grid: Graph) -> None:
    assert grid.nodes == ("season", "load", "price", "outages")
    assert grid.edges == (("season", "load"), ("load", "price"), ("load", "outages"))
    assert grid.hidden == ("load",)
    assert grid.observed == ("season", "price", "outages")
    assert grid.roots == ("season",)
    assert grid.leaves == ("price", "outages")
    assert grid.lags == ()
    assert not grid.is_dynamic
    assert len(grid) == 4
    assert "load" in grid
    assert "wind" not in grid


def test_nodes_argument_comes_first() -> None:
    graph = Graph([("a", "b")], nodes=["c", "b"])
    assert graph.nodes == ("c", "b", "a")
    assert graph.order == ("c", "a", "b")


def test_parents_are_in_edge_order() -> None:
    graph = Graph([("b", "c"), ("a", "c")], nodes=["a", "b", "c"])
    assert graph.parents("c") == ("b", "a")
    assert graph.children("a") == ("c",)


def test_order_is_stable() -> None:
    assert Graph([("d", "a"), ("c", "b")]).order == ("d", "a", "c", "b")
    assert Graph([("d", "a"), ("c", "a"), ("b", "d")]).order == ("c", "b", "d", "a")


def test_lagged_edges() -> None:
    graph = Graph([lag("z", "z"), ("z", "x"), lag("x", "z", by=2)], hidden=["z"])
    assert graph.is_dynamic
    assert graph.lags == (Lag("z", "z", 1), Lag("x", "z", 2))
    assert graph.edges == (("z", "x"),)
    assert graph.lagged_parents("z") == (("z", 1), ("x", 2))
    assert graph.lagged_parents("x") == ()
    assert graph.parents("z") == ()
    assert graph.descendants("z") == ("x",)
    assert graph.ancestors("z") == ("x",)


def test_same_edge_with_and_without_lag() -> None:
    graph = Graph([("a", "b"), lag("a", "b"), lag("a", "b", by=2)])
    assert graph.parents("b") == ("a",)
    assert graph.lagged_parents("b") == (("a", 1), ("a", 2))
    assert Graph.from_networkx(graph.to_networkx()) == graph


def test_markov_blanket() -> None:
    graph = Graph([("a", "c"), ("b", "c"), ("c", "d"), ("d", "e")])
    assert graph.markov_blanket("c") == ("a", "b", "d")
    assert graph.markov_blanket("b") == ("a", "c")
    assert Graph([lag("z", "z"), ("z", "x")]).markov_blanket("z") == ("x",)


@pytest.mark.parametrize(
    ("graph", "shown"),
    [
        (Graph([("a", "b")]), "Graph(a -> b)"),
        (Graph([("a", "b"), ("b", "c")], hidden=["b"]), "Graph(a -> b -> c; hidden: b)"),
        (Graph([("a", "c"), ("b", "c"), ("c", "d")]), "Graph(a -> c -> d; b -> c)"),
        (Graph([("a", "b")], nodes=["c", "d"]), "Graph(a -> b; c, d)"),
        (Graph([lag("z", "z", 2)]), "Graph(z[t-2] -> z)"),
        (
            Graph([("h", f"x{place}") for place in range(40)], hidden=["h"]),
            "Graph(41 nodes, 40 edges; hidden: h)",
        ),
        (
            Graph([(f"h{place}", "x") for place in range(20)], hidden=[f"h{place}" for place in range(8)]),
            "Graph(21 nodes, 20 edges; hidden: h0, h1, h2, h3, h4, h5 and 2 more)",
        ),
        (
            Graph([lag(f"n{place}", f"n{place}") for place in range(20)]),
            "Graph(20 nodes, 0 edges; 20 lagged edges)",
        ),
    ],
)
def test_repr(graph: Graph, shown: str) -> None:
    assert repr(graph) == shown


def test_equality_and_hash(grid: Graph) -> None:
    twin = Graph([["season", "load"], ["load", "price"], ["load", "outages"]], hidden={"load"})
    assert twin == grid
    assert hash(twin) == hash(grid)
    assert Graph(grid.edges) != grid
    assert grid != "grid"


def test_frozen(grid: Graph) -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        grid.nodes = ()  # type: ignore[misc]


@settings(deadline=None)
@given(graphs())
def test_order_puts_parents_first(graph: Graph) -> None:
    place = {node: index for index, node in enumerate(graph.order)}
    assert sorted(graph.order) == sorted(graph.nodes)
    assert all(place[parent] < place[child] for parent, child in graph.edges)


@settings(deadline=None)
@given(graphs())
def test_relations_agree_with_networkx(graph: Graph) -> None:
    peer = nx.DiGraph(graph.to_networkx())
    for node in graph.nodes:
        assert set(graph.descendants(node)) == nx.descendants(peer, node) - {node}
        assert set(graph.ancestors(node)) == nx.ancestors(peer, node) - {node}
        seen = set(graph.observed_descendants(node))
        assert seen == set(graph.descendants(node)) & set(graph.observed)
        assert all(node in graph.markov_blanket(other) for other in graph.markov_blanket(node))


@settings(deadline=None)
@given(graphs())
def test_round_trips(graph: Graph) -> None:
    assert Graph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph
    assert pickle.loads(pickle.dumps(graph)) == graph
    back = Graph.from_networkx(graph.to_networkx())
    assert back.nodes == graph.nodes
    assert back.hidden == graph.hidden
    assert set(back.edges) == set(graph.edges)
    assert set(back.lags) == set(graph.lags)


@settings(deadline=None)
@given(graphs(), st.data())
def test_closing_any_path_is_refused(graph: Graph, data: st.DataObject) -> None:
    pairs = [(end, start) for start in graph.nodes for end in _below(graph, start)]
    if pairs:
        back = data.draw(st.sampled_from(pairs))
        with pytest.raises(GraphError, match="no cycle; found") as refusal:
            Graph([*graph.edges, back], nodes=graph.nodes)
        cycle = str(refusal.value).split("found ")[1].split(" -> ")
        assert cycle[0] == cycle[-1]
        assert len(cycle) == len(set(cycle)) + 1
        assert set(pairwise(cycle)) <= {*graph.edges, back}


def _below(graph: Graph, node: str) -> set[str]:
    return nx.descendants(nx.DiGraph(graph.edges), node) if graph.children(node) else set()


def test_hidden_from_networkx_attribute() -> None:
    peer = nx.DiGraph([("a", "b")])
    peer.nodes["a"]["hidden"] = True
    assert Graph.from_networkx(peer).hidden == ("a",)
    assert Graph.from_networkx(peer, hidden=["b"]).hidden == ("b",)


@pytest.mark.parametrize(
    ("edges", "arguments", "message"),
    [
        ([("a", "b"), ("b", "a")], {}, r"^edges must have no cycle; found a -> b -> a$"),
        ([("x", "b"), ("c", "b"), ("b", "d"), ("d", "c")], {}, r"found b -> d -> c -> b$"),
        ([("a", "a")], {}, r"node 'a' must not be its own parent; .* lag\('a', 'a'\)"),
        ([("a", "b")], {"hidden": ["c"]}, r"hidden names 'c', which is not a node; the nodes are 'a', 'b'"),
        ([("a", "b")], {"hidden": "ab"}, r"hidden must be a list of names; got the string 'ab'"),
        ([("a", "b")], {"nodes": "ab"}, r"nodes must be a list of names; got the string 'ab'"),
        ([("a", "b")], {"hidden": ["a", "a"]}, r"hidden must name each node once; 'a' is repeated"),
        ([("a", "b")], {"nodes": ["c", "c"]}, r"nodes must name each node once; 'c' is repeated"),
        ([("a", "b")], {"nodes": [""]}, r"nodes: a node name must be a non-empty string; got ''"),
        ([("a", "b"), ("c", "b"), ("a", "b")], {}, r"edges must be distinct; a -> b is repeated"),
        ([lag("a", "b"), lag("a", "b", 1)], {}, r"edges must be distinct; a\[t-1\] -> b is repeated"),
        ([("a", 3)], {}, r"edge \('a', 3\): a node name must be a non-empty string; got 3"),
        ([(" ", "a")], {}, r"a node name must be a non-empty string; got ' '"),
        ([("a", "b", "c")], {}, r"an edge must be a pair \(parent, child\) or a lag; got \('a', 'b', 'c'\)"),
        (["ab"], {}, r"an edge must be a pair \(parent, child\) or a lag; got 'ab'"),
        ([5], {}, r"an edge must be a pair \(parent, child\) or a lag; got 5"),
        ("ab", {}, r"edges must be a list of pairs \(parent, child\); got the string 'ab'"),
        ([], {}, r"edges must name at least one node"),
    ],
)
def test_bad_graphs_are_refused(edges: object, arguments: dict, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Graph(edges, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", [0, -1, 1.5, True, "1"])
def test_bad_lag_is_refused(by: object) -> None:
    with pytest.raises(GraphError, match=r"lag\('a', 'b'\): by must be a whole number of at least 1; got"):
        lag("a", "b", by)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"lag\('a', None\): a node name must be a non-empty string; got"):
        lag("a", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "parents",
        "children",
        "lagged_parents",
        "ancestors",
        "descendants",
        "observed_descendants",
        "markov_blanket",
    ],
)
def test_unknown_node_is_refused(grid: Graph, name: str) -> None:
    with pytest.raises(GraphError, match=r"node 'wind' is not in the graph; the nodes are 'season', 'load'"):
        getattr(grid, name)("wind")


def test_bad_states_are_refused(grid: Graph) -> None:
    state = grid.to_dict()
    with pytest.raises(GraphError, match=r"an entry must be \[parent, child, by\]; got \['a', 'b'\]"):
        Graph.from_dict({**state, "lags": [["a", "b"]]})
    del state["hidden"]
    with pytest.raises(GraphError, match=r"nodes, edges, lags and hidden; 'hidden' is missing"):
        Graph.from_dict(state)


def test_undirected_graph_is_refused() -> None:
    with pytest.raises(GraphError, match="graph must be a directed networkx graph; got Graph"):
        Graph.from_networkx(nx.Graph([("a", "b")]))


def test_a_lag_without_its_child() -> None:
    with pytest.raises(GraphError, match=r"lag\('s', 1\): .*write lag\('s', 's', by=1\)"):
        lag("s", 1)  # type: ignore[arg-type]
