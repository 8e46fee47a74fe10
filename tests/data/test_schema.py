"""The schema: column names and the labels of categories."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

from otpdag.data import Schema, decode, encode
from otpdag.data.table import read_cells
from otpdag.errors import DataError
from otpdag.graph import Graph
from otpdag.spaces import Count, Discrete, Image, Positive, Real, Simplex, Space, Unit


def schema_of(data: Any = None, **spaces: Space) -> Schema:
    return Schema.of(spaces, Graph([], nodes=list(spaces)), data)


@pytest.mark.parametrize(
    ("column", "labels", "codes"),
    [
        (pd.Series(["b", "a", "b"]), ("a", "b"), [1, 0, 1]),
        (pd.Categorical(["lo", "hi", "lo"], categories=["lo", "hi"]), ("lo", "hi"), [0, 1, 0]),
        (pd.Categorical([2, 1, 2]), (1, 2), [1, 0, 1]),
        (pd.Series([True, True, False]), (False, True), [1, 1, 0]),
        (pd.Series([True, True, True]), (False, True), [1, 1, 1]),
        (pd.array([True, True, False], dtype="boolean"), (False, True), [1, 1, 0]),
        (pd.Series(["x", 3, "x"], dtype=object), (3, "x"), [1, 0, 1]),
        (pd.Series([1, 0, 1]), None, [1, 0, 1]),
        (pd.Series([1.0, 0.0, 1.0]), None, [1, 0, 1]),
        (pd.Series([1, 0, 1], dtype=object), None, [1, 0, 1]),
    ],
)
def test_labels(column: Any, labels: tuple | None, codes: list[int]) -> None:
    table = pd.DataFrame({"c": column})
    schema = schema_of(table, c=Discrete(2))
    assert schema["c"].labels == labels
    batch = encode(table, schema, hidden=())
    assert batch.values["c"].argmax(-1).tolist() == [codes]
    assert decode(batch.values, schema)["c"].tolist() == table["c"].tolist()
    assert json.loads(json.dumps(schema.to_dict())) == schema.to_dict()


def test_unused_categories_are_dropped_where_there_are_too_many() -> None:
    table = pd.DataFrame({"c": pd.Categorical(["d", "a", "d"], categories=["d", "c", "b", "a"])})
    assert schema_of(table, c=Discrete(2))["c"].labels == ("d", "a")
    assert schema_of(table, c=Discrete(4))["c"].labels == ("d", "c", "b", "a")


def test_intervals_become_text() -> None:
    table = pd.DataFrame({"c": pd.cut(pd.Series([1.0, 5.0, 9.0, np.nan]), [0, 4, 10])})
    schema = schema_of(table, c=Discrete(2))
    assert schema["c"].labels == ("(0, 4]", "(4, 10]")
    assert encode(table, schema, hidden=()).values["c"].sum(-1).tolist() == [[1, 1, 1, 0]]


def test_labels_are_kept_for_later_tables() -> None:
    schema = schema_of(pd.DataFrame({"c": ["a", "b", "c"]}), c=Discrete(3))
    later = encode(pd.DataFrame({"c": ["c", "c"]}), schema, hidden=())
    assert later.values["c"].argmax(-1).tolist() == [[2, 2]]


def test_schema_without_data_holds_codes() -> None:
    assert schema_of(c=Discrete(3))["c"].labels is None


@pytest.mark.parametrize("space", [Real(2), Positive(), Unit(), Simplex(3), Count(2), Discrete(4), Image(1, 2, 2)])
def test_schema_to_json(space: Space) -> None:
    schema = schema_of(x=space, y=Real())
    assert json.loads(json.dumps(schema.to_dict())) == schema.to_dict()
    assert schema.nodes == ("x", "y")


def test_bad_schemas() -> None:
    graph = Graph([("x", "x.0")])
    with pytest.raises(DataError, match=r"spaces must have an entry for every node; node 'x.0' has none"):
        Schema.of({"x": Real()}, graph)
    with pytest.raises(DataError, match=r"nodes 'x' and 'x.0' both claim column 'x.0'; rename one"):
        Schema.of({"x": Real(2), "x.0": Real()}, graph)
    with pytest.raises(DataError, match=r"node 'y' is not in the schema, which holds 'x'"):
        schema_of(x=Real())["y"]


@pytest.mark.parametrize("dtype", ["str", "float", "object"])
def test_labels_of_a_long_column_are_found_wherever_they_stand(dtype):
    """Long columns are looked through part by part."""
    values = [30.0, 10.0, None] * 30_000 + [20.0] if dtype == "float" else ["b", "a", None] * 30_000 + ["c"]
    frame = pd.DataFrame({"a": pd.Series(values, dtype=dtype)})
    schema = Schema.of({"a": Discrete(3)}, Graph([], nodes=["a"]), frame)
    assert schema["a"].labels == ((10, 20, 30) if dtype == "float" else ("a", "b", "c"))
    codes = read_cells(frame, schema, hidden=()).numbers["a"][:, 0]
    expected = [np.nan if value is None else float(schema["a"].labels.index(value)) for value in values]
    np.testing.assert_array_equal(codes, expected)
    frame.iloc[80_006, 0] = 70.0 if dtype == "float" else "elsewhere"
    with pytest.raises(DataError, match=r"found (70.0|'elsewhere') in row 80006"):
        read_cells(frame, schema, hidden=())
