"""Known verdicts of the literature: back-door, front-door, bow, M-bias, napkin, instruments, proxies."""

import pytest

from otpdag import Graph, Model
from otpdag import mechanisms as m
from otpdag.errors import GraphError


def identify(graph, treatment, outcome):
    return Model(graph, {node: m.Normal() for node in graph.nodes}).identified(treatment, outcome)


@pytest.mark.parametrize(
    ("edges", "hidden", "by", "nodes"),
    [
        ([("t", "y")], [], "back-door", ()),
        ([("z", "t"), ("z", "y"), ("t", "y")], [], "back-door", ("z",)),
        # M-bias: nothing must be adjusted for
        ([("u", "z"), ("v", "z"), ("u", "t"), ("v", "y"), ("t", "y")], ["u", "v"], "back-door", ()),
        ([("u", "t"), ("u", "y"), ("t", "m"), ("m", "y")], ["u"], "front-door", ("m",)),
        # the napkin (Pearl and Mackenzie, 2018): neither door
        (
            [("w", "z"), ("z", "t"), ("t", "y"), ("u", "w"), ("u", "t"), ("v", "w"), ("v", "y")],
            ["u", "v"],
            "do-calculus",
            (),
        ),
        ([("y", "t")], [], "no effect", ()),
    ],
)
def test_identified(edges, hidden, by, nodes):
    found = identify(Graph(edges, hidden=hidden), "t", "y")
    assert (bool(found), found.by, found.nodes) == (True, by, nodes)
    assert str(found).startswith("identified")


@pytest.mark.parametrize(
    "edges",
    [
        [("u", "t"), ("u", "y"), ("t", "y")],  # the bow
        [("u", "t"), ("u", "y"), ("t", "y"), ("i", "t")],  # an instrument needs more than the graph
        [("u", "t"), ("u", "y"), ("t", "y"), ("u", "w1"), ("u", "w2")],  # proxies as well
        [("u", "t"), ("u", "m"), ("t", "m"), ("m", "y")],  # confounded with what lies between
    ],
)
def test_not_identified_names_the_common_cause(edges):
    found = identify(Graph(edges, hidden=["u"]), "t", "y")
    assert not found
    assert "u is an unseen common cause" in str(found)


def test_an_unknown_node_is_refused():
    with pytest.raises(GraphError, match="node 'q' is not in the graph"):
        identify(Graph([("t", "y")]), "t", "q")
