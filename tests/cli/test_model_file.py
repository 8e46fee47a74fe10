"""Tests of model files: what they mean, and that every mistake is told by its place."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from otpdag.cli.model_file import parse_model_file, read_model_file
from otpdag.errors import GraphError, ModelError, OtpdagError
from otpdag.graph import Graph, lag
from otpdag.mechanisms.parameters import Fixed, Start, Tied

TABLE = pd.DataFrame(
    {
        "season": ["dry", "wet", "dry", "cold"],
        "price": [1.5, 2.5, None, 0.3],
        "outages": [3, 0, 12, 1],
        "kind": [0, 1, 2, 1],
        "x.0": [0.1, 0.2, 0.3, 0.4],
        "x.1": [0.1, 0.2, 0.3, 0.4],
    }
)
GRID = """
edges: [[season, load], [load, price], [load, outages]]
hidden: [load]
nodes:
  season: {type: Categorical, size: 3}
  load: {type: Normal}
  price: {type: Normal, scale: 0.5}
  outages: Poisson
"""


def kinds(text: str) -> dict[str, str]:
    model = parse_model_file(text).build(TABLE)
    return {node: type(mechanism).__name__ for node, mechanism in model.mechanisms.items()}


def test_a_file_becomes_a_model():
    model = parse_model_file(GRID).build(TABLE)
    assert model.graph.edges == (("season", "load"), ("load", "price"), ("load", "outages"))
    assert model.graph.hidden == ("load",)
    assert {node: type(mechanism).__name__ for node, mechanism in model.mechanisms.items()} == {
        "season": "Categorical", "load": "Normal", "price": "Normal", "outages": "Poisson",
    }  # fmt: skip
    assert not model.mechanisms["price"].declared()["scale"].learned


def test_nodes_that_are_not_listed_are_chosen_by_their_column():
    text = (
        "{edges: [[load, price], [load, outages], [load, season], [load, kind]], hidden: [load], nodes: {load: Normal}}"
    )
    assert kinds(text) == {
        "load": "Normal", "price": "Normal", "outages": "Poisson", "season": "Categorical", "kind": "Categorical",
    }  # fmt: skip


def test_the_number_of_categories_is_counted_where_it_is_not_given():
    model = parse_model_file("{edges: [[season, price]], nodes: {season: Categorical}}").build(TABLE)
    assert model.spaces["season"].width == 3


@pytest.mark.parametrize(
    ("written", "kind", "value"),
    [
        ("0.5", Fixed, 0.5),
        ("{fix: 0.5}", Fixed, 0.5),
        ("{start: 0.5}", Start, 0.5),
        ("{start: [0.5, 1, 2]}", Start, [0.5, 1.0, 2.0]),
        ("{tie: sigma}", Tied, "sigma"),
    ],
)
def test_parameters_are_fixed_started_or_tied(written, kind, value):
    text = f"{{edges: [[season, price]], nodes: {{price: {{type: Normal, scale: {written}}}}}}}"
    setting = parse_model_file(text).build(TABLE).mechanisms["price"].declared()["scale"].setting
    assert isinstance(setting, kind)
    if kind is Tied:
        assert setting.name == value
    else:
        np.testing.assert_allclose(setting.value, value)


def test_plain_arguments_and_spaces_are_passed_on():
    text = """
    edges: [[x, price], [kind, price]]
    nodes:
      x: {type: Normal, dim: 2}
      kind: {type: Given, space: {type: Discrete, size: 3}}
      price: {type: Normal, network: [8, 4]}
    """
    model = parse_model_file(text).build(TABLE)
    assert model.spaces["x"].width == 2
    assert model.mechanisms["kind"].is_given
    assert model.spaces["kind"].width == 3
    assert model.mechanisms["price"].network == (8, 4)


def test_a_third_entry_makes_an_edge_lagged():
    text = "{edges: [[z, z, 1], [z, price], [price, price, 2]], hidden: [z], nodes: {z: {type: Categorical, size: 2}}}"
    assert parse_model_file(text).graph() == Graph(
        [lag("z", "z"), ("z", "price"), lag("price", "price", by=2)], nodes=["z"], hidden=["z"]
    )


def test_a_node_without_edges_and_a_node_without_entry():
    assert kinds("{nodes: {price: , season: Categorical}}") == {"price": "Normal", "season": "Categorical"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping with edges, hidden and nodes; got nothing"),
        ("- a", r"must be a mapping with edges, hidden and nodes; got list \['a'\]"),
        ("edges: [[a, b", "line 1, column 14: expected ',' or ']'"),
        ("edges: [[a, b]]\nedges: [[a, c]]", "line 2, column 1: 'edges' appears twice"),
        ("{edges: [[a, b]], nods: {}}", "nods: is not known; a model file has edges, hidden and nodes"),
        ("edges: a", "edges: should be a valid list; got 'a'"),
        ("edges: [[a]]", r"edges.0: must be \[parent, child\] or \[parent, child, lag\]; got \['a'\]"),
        ("edges: [[a, b], [a, b, 1, 2]]", r"edges.1: must be \[parent, child\] or"),
        (
            "edges: [[yes, b]]",
            "edges.0: a node name must be text; got True: put a name that YAML reads as .* in quotes",
        ),
        ("edges: [[a, b, soon]]", "edges.0: a lag must be a whole number of at least 1; got 'soon'"),
        ("edges: [[a, b, 0]]", "edges.0: a lag must be a whole number of at least 1; got 0"),
        ("edges: [[a, b], [b, a]]", "edges must have no cycle; found a -> b -> a"),
        ("{edges: [[a, b]], hidden: b}", "hidden: should be a valid list; got 'b'"),
        ("{edges: [[a, b]], hidden: [c]}", "hidden names 'c', which is not a node"),
        ("{edges: [[a, b]], nodes: [a]}", "nodes: should be a valid mapping"),
        ("{edges: [[a, b]], nodes: {no: Normal}}", "nodes: must be text; got False"),
        ("{edges: [[a, b]], nodes: {a: {scale: 1}}}", "nodes.a.type: missing; write the name of a mechanism: Bern"),
        ("{edges: [[a, b]], nodes: {a: Norml}}", "nodes.a.type: there is no mechanism 'Norml'; known are Bernoulli"),
        ("{edges: [[a, b]], nodes: {a: {type: [1]}}}", "nodes.a.type: there is no mechanism"),
        (
            "{edges: [[a, b]], nodes: {a: {type: Normal, sclae: 2}}}",
            "nodes.a.sclae: is not known; Normal has dim, loc, weight, scale, network, shared_scale",
        ),
        (
            "{edges: [[a, b]], nodes: {a: {type: Normal, scale: big}}}",
            "nodes.a.scale: must be a number, a list of numbers, {start: value} or {tie: name}; got 'big'",
        ),
        ("{edges: [[a, b]], nodes: {a: {type: Normal, scale: {strat: 1}}}}", "nodes.a.scale: must be a number, a list"),
        ("{edges: [[a, b]], nodes: {a: {type: Normal, scale: {tie: 2}}}}", "nodes.a.scale.tie: must be text; got 2"),
        (
            "{edges: [[a, b]], nodes: {a: {type: Normal, dim: two}}}",
            "nodes.a.dim: should be a valid integer; got 'two'",
        ),
        ("{edges: [[a, b]], nodes: {a: {type: Given, space: Foo}}}", "nodes.a.space: must be one of Count, Discrete"),
        (
            "{edges: [[a, b]], nodes: {a: Deterministic}}",
            r"nodes.a.type: Deterministic needs code \('function'\), which",
        ),
    ],
)
def test_a_mistake_in_the_file_is_told_by_its_place(text, message):
    with pytest.raises(OtpdagError, match=f"^model.yaml: .*{message}"):
        parse_model_file(text, name="model.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{edges: [[load, price]], hidden: [load]}", "hidden: node 'load' has no column to choose a mechanism by"),
        ("{edges: [[z, price]], hidden: [z], nodes: {z: Categorical}}", "nodes.z.size: a hidden category needs its"),
        ("{edges: [[price, outages]], nodes: {price: Categorical}}", "nodes.price.size: column 'price' shows no categ"),
        ("{edges: [[season, price]], nodes: {prise: Normal}}", "nodes.prise: neither an edge nor a column has"),
        ("{edges: [[season, cost]]}", "observed node 'cost' has no column and no mechanism"),
        ("{edges: [[a, price]], nodes: {a: Categorical}}", "node 'a' has no column; columns are season, price"),
        ("{edges: [[season, price]], nodes: {price: {type: Normal, scale: -1}}}", "'scale' of node 'price' must be"),
        ("{edges: [[season, price]], nodes: {season: {type: Categorical, size: 1}}}", "nodes.season: size must be"),
    ],
)
def test_a_mistake_that_only_the_table_shows(text, message):
    with pytest.raises(OtpdagError, match=message):
        parse_model_file(text).build(TABLE)


def test_many_mistakes_are_counted():
    nodes = ", ".join(f"{name}: 3" for name in "abcde")
    with pytest.raises(ModelError, match=r"nodes.a: .*; nodes.b: .*; nodes.c: .*; and 2 more"):
        parse_model_file(f"{{edges: [[a, b]], nodes: {{{nodes}}}}}")


def test_files(tmp_path):
    path = tmp_path / "model.yaml"
    with pytest.raises(ModelError, match=r"no model file at .*model.yaml"):
        read_model_file(path)
    path.write_bytes(b"\xff\xfe\x00edges")
    with pytest.raises(ModelError, match=r"model.yaml: cannot be read as text"):
        read_model_file(path)
    path.write_text(GRID)
    assert read_model_file(path).graph().hidden == ("load",)
    path.write_text("edges: [[a, b], [b, a]]")
    with pytest.raises(GraphError, match=r"model.yaml: edges must have no cycle"):
        read_model_file(path)
