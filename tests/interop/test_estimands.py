"""Formulas of effects by y0, whose verdicts are ours."""

from __future__ import annotations

import sys
from itertools import combinations

import numpy as np
import pytest

from otpdag import Graph, Model
from otpdag import mechanisms as m
from otpdag.errors import GraphError, ModelError
from otpdag.interop import estimand, to_y0

FRONT_DOOR = [("u", "t"), ("u", "y"), ("t", "m"), ("m", "y")]


def test_the_front_door_has_its_formula():
    pytest.importorskip("y0")
    model = Model(Graph(FRONT_DOOR, hidden=["u"]), {node: m.Normal() for node in "utmy"})
    assert estimand(model, "t", "y") == "Sum[m](P(m | t) * Sum[t](P(t) * P(y | m, t)))"
    assert "\\sum" in str(estimand(model, "t", "y", latex=True))


def _random_graph(rng):
    """A graph of observed nodes, and of hidden ones above two of them."""
    nodes = [f"v{i}" for i in range(rng.integers(3, 7))]
    pairs = list(combinations(nodes, 2))
    edges = [pair for pair in pairs if rng.random() < 0.5]
    hidden = {f"u{i}": pair for i, pair in enumerate(pairs) if rng.random() < 0.3}
    edges += [(name, child) for name, pair in hidden.items() for child in pair]
    return Graph(edges, nodes=nodes, hidden=list(hidden))


def test_the_verdict_is_that_of_y0_on_random_graphs():
    pytest.importorskip("y0")
    from y0.algorithm.identify import identify_outcomes
    from y0.dsl import Variable

    rng = np.random.default_rng(0)
    verdicts = []
    while len(verdicts) < 150:
        graph = _random_graph(rng)
        first, *_, last = graph.observed
        if last in graph.descendants(first):
            model = Model(graph, {node: m.Normal() for node in graph.nodes})
            verdicts.append(bool(model.identified(first, last)))
            theirs = identify_outcomes(to_y0(graph), treatments=Variable(first), outcomes=Variable(last))
            assert verdicts[-1] == (theirs is not None), graph.edges
    assert 30 < sum(verdicts) < 120


def test_what_cannot_be_asked_is_refused(monkeypatch):
    graph = Graph(FRONT_DOOR, hidden=["u"])
    with pytest.raises(GraphError, match="'u' must be an observed node"):
        estimand(graph, "u", "y")
    monkeypatch.setitem(sys.modules, "y0.dsl", None)
    with pytest.raises(ModelError, match=r"otpdag\[causal\]"):
        estimand(graph, "t", "y")
