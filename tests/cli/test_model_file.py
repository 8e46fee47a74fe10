"""Tests of model files: what they mean, and that every mistake is told by its place."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from otpdag.cli.model_file import parse_model_file, read_model_file
from otpdag.errors import DataError, GraphError, ModelError, OtpdagError
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
        "season": "Categorical",
        "load": "Normal",
        "price": "Normal",
        "outages": "Poisson",
    }
    assert not model.mechanisms["price"].declared()["scale"].learned


def test_nodes_that_are_not_listed_are_chosen_by_their_column():
    text = (
        "{edges: [[load, price], [load, outages], [load, season], [load, kind]], hidden: [load], nodes: {load: Normal}}"
    )
    assert kinds(text) == {
        "load": "Normal",
        "price": "Normal",
        "outages": "Poisson",
        "season": "Categorical",
        "kind": "Categorical",
    }


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
            "nodes.a.sclae: is not known; Normal has dim, weight, network, network_prior, terms, loc, floor, scale, ",
        ),
        (
            "{edges: [[a, b]], nodes: {a: {type: Normal, scale: big}}}",
            r"nodes.a.scale: must be a number, a list of them, {start: value}, {tie: name}, {between: \[0, null\]}, "
            "{ridge: 1} or {pseudo_counts: 1}; got 'big'",
        ),
        ("{edges: [[a, b]], nodes: {a: {type: Normal, scale: {strat: 1}}}}", "nodes.a.scale: must be a number, a list"),
        ("{edges: [[a, b]], nodes: {a: {type: Normal, scale: {tie: 2}}}}", "nodes.a.scale: must be a number, a list"),
        (
            "{edges: [[a, b]], nodes: {a: {type: Normal, dim: two}}}",
            "nodes.a.dim: should be a valid integer; got 'two'",
        ),
        ("{edges: [[a, b]], nodes: {a: {type: Given, space: Foo}}}", "nodes.a.space: must be one of .*Count, Discrete"),
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
        ("{edges: [[season, cost]]}", "node 'cost' has no column and no mechanism"),
        ("{edges: [[a, price]], nodes: {a: Categorical}}", "node 'a' has no column; columns are season, price"),
        ("{edges: [[season, price]], nodes: {price: {type: Normal, scale: -1}}}", "'scale' of node 'price' must be"),
        ("{edges: [[season, price]], nodes: {season: {type: Categorical, size: 0}}}", "nodes.season: size must be"),
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


# --- hostile files ----------------------------------------------------------------------------------------


def laughs(levels, width=9):
    """Each level names the one before several times: few lines, many values."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (laughs(12), "line 6, column 50: holds more than 200,000 values, aliases written out"),
        ("edges: &e [*e]", r"line 1, column 12: the alias \*e stands for what it is a part of"),
        ("edges: *nowhere", "line 1, column 8: found undefined alias"),
        ("edges: " + "[" * 10_000, "line 1, column 30: is nested more than 24 levels deep"),
        ("edges: " + "{a: " * 10_000, "is nested more than 24 levels deep"),
        ("- " * 5_000 + "a", "is nested more than 24 levels deep"),
        ("x: 2001-99-99", "holds a value that cannot be read: month must be in 1..12"),
        (f"x: {'9' * 5000}", "holds a value that cannot be read"),
        ("x: !!timestamp soon", "holds a value that cannot be read"),
        ("x: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("{? [a, b] : c}", "line 1"),
        ("edges: [[a, b, 1000000000]]", "edges.0: a lag must be at most 10000; got 1000000000"),
        ("edges: [[a, b, -1]]", "edges.0: a lag must be a whole number of at least 1; got -1"),
        (
            "{edges: [[a, b]], nodes: {a: {type: Normal, dim: 1000000000}}}",
            "nodes.a.dim: should be less than or equal to",
        ),
        (
            "{edges: [[a, b]], nodes: {a: {type: Normal, network: [-3]}}}",
            "nodes.a.network.0: should be greater than or",
        ),
        ("{edges: [[a, b]], nodes: {a: {type: Normal, network: [1000000]}}}", "nodes.a.network.0: should be less than"),
        (f"{{edges: [[a, b]], nodes: {{a: {{type: Normal, network: {[2] * 99}}}}}}}", "nodes.a.network: .* at most 32"),
        ("{edges: [[a, b]], nodes: {a: {type: Normal, floor: big}}}", "nodes.a.floor: should be a valid number"),
        (f"{{edges: [[a, b]], nodes: {{a: {{type: Normal, loc: {10**400}}}}}}}", "nodes.a.loc: must be a number"),
        (
            "{edges: [[a, b]], nodes: {a: {type: Given, space: {type: Discrete, size: -2}}}}",
            "nodes.a.space: sizes must be whole numbers from 1 to 100000",
        ),
        (
            "{nodes: {a: {type: Given, space: {type: Image, channels: 3, height: 999, width_px: 999}}}}",
            "nodes.a.space: must have at most 100000 coordinates",
        ),
    ],
)
def test_a_hostile_file_is_refused_by_its_place(text, message):
    with pytest.raises(OtpdagError, match=f"^model.yaml: .*{message}"):
        parse_model_file(text, name="model.yaml")


def test_aliases_may_be_used():
    text = "{edges: [[k, a], [k, b]], nodes: {k: {type: Categorical, size: 2}, a: &n {type: Normal, scale: 1}, b: *n}}"
    assert {type(parse_model_file(text).nodes[node]) for node in "ab"} == {dict}


def test_a_file_that_is_too_long_is_not_read(tmp_path):
    (tmp_path / "model.yaml").write_text("#" * (5 << 20))
    with pytest.raises(ModelError, match="must have at most 4,194,304 bytes; it has 5,242,880"):
        read_model_file(tmp_path / "model.yaml")


# --- cells that are not numbers ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::otpdag.ColumnTypeWarning")
@pytest.mark.parametrize("cell", ["1,5", "5%", "2024-03-01", "n/k", "1.234,5", "$5"])
def test_one_bad_cell_in_a_column_of_numbers_is_told_by_its_place(cell):
    data = pd.DataFrame({"x": [str(0.5 + number) for number in range(40)], "y": range(40)})
    data.loc[17, "x"] = cell
    file = parse_model_file("edges: [[x, y]]")
    with pytest.raises(
        DataError, match=rf"column 'x' holds numbers, but {re.escape(repr(cell))} in row 17 \(line 19\)"
    ):
        file.build(data)
    listed = parse_model_file("{edges: [[x, y]], nodes: {x: Categorical}}")
    assert listed.build(data).spaces["x"].width == 40


def test_a_column_of_decimal_commas_is_refused_and_categories_are_not():
    commas = pd.DataFrame({"x": ["1,5", "2,5", "3,5"], "y": [1.5, 2.5, 3.5]})
    with pytest.raises(DataError, match="column 'x' holds numbers, but '1,5' in row 0"):
        parse_model_file("edges: [[x, y]]").build(commas)
    bands = pd.DataFrame({"x": ["10-20", "20-30", "30+"], "y": [1.5, 2.5, 3.5], "k": [True, None, False]})
    assert parse_model_file("edges: [[x, y], [k, y]]").build(bands).spaces["x"].width == 3


def test_a_bad_cell_is_told_among_numbers_that_were_read_as_such():
    data = pd.DataFrame({"x": [1.5, 2.5, "n/k", 3.5], "y": [1.5, 2.5, 3.5, 4.5]})
    with pytest.raises(DataError, match="column 'x' holds numbers, but 'n/k' in row 2"):
        parse_model_file("edges: [[x, y]]").build(data)
