"""Tests of schema, batches, and the way from tables to tensors and back."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from otpdag.data import (
    Batch,
    Column,
    Schema,
    decode,
    encode,
    infer_space,
    read_table,
    unique_rows,
)
from otpdag.errors import DataError
from otpdag.graph import Graph
from otpdag.spaces import Count, Discrete, Image, Positive, Real, Simplex, Space, Unit


def schema_of(data: Any = None, **spaces: Space) -> Schema:
    return Schema.of(spaces, Graph([], nodes=list(spaces)), data)


def read(data: Any, partial: bool = False, **spaces: Space) -> Batch:
    return encode(data, schema_of(data, **spaces), hidden=(), partial=partial)


@pytest.fixture
def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "unused": list("pqrs"),
            "season": ["wet", "dry", None, "wet"],
            "v.1": [1.0, 2.0, np.nan, 4.0],
            "v.0": [5.0, 6.0, 7.0, 8.0],
            "outages": pd.array([3, None, 0, 1], dtype="Int64"),
            "grade": [2, 0, 1, 2],
        }
    )


SPACES = {"season": Discrete(3), "load": Real(), "v": Real(2), "outages": Count(), "grade": Discrete(3)}


@pytest.fixture
def grid() -> Graph:
    edges = [("season", "load"), ("load", "v"), ("load", "outages"), ("load", "grade")]
    return Graph(edges, hidden=["load"])


# --- encode and decode ------------------------------------------------------------------------------------


def test_frame_to_batch(frame: pd.DataFrame, grid: Graph) -> None:
    schema = Schema.of(SPACES, grid, frame)
    batch = encode(frame, schema, hidden=grid.hidden)
    assert batch.nodes == ("season", "v", "outages", "grade")
    assert (batch.rows, batch.replicas) == (4, 1)
    assert schema["season"].labels == ("dry", "wet", "(unseen 2)")
    assert schema["grade"] == Column(Discrete(3), None, ("grade",))
    assert schema["load"] == Column(Real(), None, ("load",))
    assert batch.values["season"].tolist() == [[[0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0]]]
    assert batch.mask["season"].tolist() == [[[True], [True], [False], [True]]]
    assert batch.values["v"].tolist() == [[[5, 1], [6, 2], [7, 0], [8, 4]]]
    assert batch.mask["v"].tolist() == [[[True, True], [True, True], [True, False], [True, True]]]
    assert batch.fully_observed("v").tolist() == [[True, True, False, True]]
    assert batch.values["outages"].tolist() == [[[3], [0], [0], [1]]]
    assert batch.weight.tolist() == [[1, 1, 1, 1]]
    assert batch.values["v"].dtype == torch.float64


def test_batch_to_frame(frame: pd.DataFrame, grid: Graph) -> None:
    schema = Schema.of(SPACES, grid, frame)
    batch = encode(frame, schema, hidden=grid.hidden)
    load = torch.arange(4.0)[:, None]
    table = decode({"load": load, **batch.values}, schema, mask=batch.mask)
    assert list(table) == ["season", "load", "v.0", "v.1", "outages", "grade"]
    assert table["season"].isna().tolist() == [False, False, True, False]
    assert table["season"].dropna().tolist() == ["wet", "dry", "wet"]
    assert table["load"].tolist() == [0, 1, 2, 3]
    assert str(table["outages"].dtype) == "Int64"
    assert table["outages"].dropna().tolist() == [3, 0, 1]
    assert table["grade"].dtype == np.int64
    again = encode(table.drop(columns="load"), schema, hidden=grid.hidden)
    for node in batch.nodes:
        assert torch.equal(again.values[node], batch.values[node])
        assert torch.equal(again.mask[node], batch.mask[node])


def test_input_is_not_changed(frame: pd.DataFrame, grid: Graph) -> None:
    before = frame.copy()
    batch = encode(frame, Schema.of(SPACES, grid, frame), hidden=grid.hidden)
    batch.values["v"][:] = 99.0
    pd.testing.assert_frame_equal(frame, before)


def test_frozen_arrays_can_be_read() -> None:
    array = np.ones((4, 2))
    array.flags.writeable = False
    assert read(array, x=Real(2)).rows == 4


def test_tables_of_all_kinds_agree() -> None:
    spaces = {"a": Discrete(2), "v": Real(2)}
    array = np.array([[0, 1.5, 2.5], [1, np.nan, 0.5], [np.nan, 1.0, 1.0]])
    tables = [
        array,
        torch.tensor(array, requires_grad=True),
        array.astype(object),
        pd.DataFrame(array, columns=["a", "v.0", "v.1"]),
        {"a": array[:, 0], "v": array[:, 1:]},
        {"a": torch.tensor(array[:, :1]), "v": torch.tensor(array[:, 1:])},
        {"a": [0, 1, None], "v.0": [1.5, None, 1.0], "v.1": (2.5, 0.5, 1.0), "unused": ["x"]},
        {"a": pd.Series([0, 1, None], index=[7, 8, 9]), "v": array[:, 1:].tolist()},
    ]
    first = read(tables[0], **spaces)
    for table in tables[1:]:
        other = read(table, **spaces)
        for node in spaces:
            assert torch.equal(first.values[node], other.values[node])
            assert torch.equal(first.mask[node], other.mask[node])


def test_one_dimensional_array_for_one_cell() -> None:
    assert read(np.arange(3.0), x=Real()).values["x"].tolist() == [[[0], [1], [2]]]


def test_images_are_flattened() -> None:
    pixels = np.random.default_rng(0).random((5, 3, 4, 2))
    batch = read({"image": pixels}, image=Image(3, 4, 2))
    assert np.array_equal(batch.values["image"][0], pixels.reshape(5, -1))


def test_dtype() -> None:
    schema = schema_of(x=Real(), c=Discrete(2))
    batch = encode({"x": [1, 2], "c": [0, 1]}, schema, hidden=(), dtype=torch.float32)
    assert {tensor.dtype for tensor in (*batch.values.values(), batch.weight)} == {torch.float32}
    assert {tensor.dtype for tensor in batch.mask.values()} == {torch.bool}


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA, pd.NaT])
def test_every_kind_of_missing_value(missing: Any) -> None:
    numbers = pd.Series([1.5, missing, 2], dtype=object)
    names = pd.Series(["a", missing, "b"], dtype=object)
    table = pd.DataFrame({"x": numbers, "c": names})
    batch = read(table, x=Real(), c=Discrete(2))
    for node in ("x", "c"):
        assert batch.mask[node][0, :, 0].tolist() == [True, False, True]
        assert batch.values[node][0, 1].abs().sum() == 0


@pytest.mark.parametrize(
    "column",
    [
        pd.array([1, None, 3], dtype="Int64"),
        pd.array([1.0, None, 3.0], dtype="Float64"),
        pd.Categorical([1, None, 3]),
        np.array([1, np.nan, 3], dtype=np.float32),
        np.array([Decimal(1), None, Decimal(3)], dtype=object),
    ],
)
def test_numbers_of_every_type(column: Any) -> None:
    batch = read(pd.DataFrame({"x": column}), x=Real())
    assert batch.values["x"][0, :, 0].tolist() == [1, 0, 3]
    assert batch.mask["x"][0, :, 0].tolist() == [True, False, True]


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
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema


def test_unused_categories_are_dropped_where_there_are_too_many() -> None:
    table = pd.DataFrame({"c": pd.Categorical(["d", "a", "d"], categories=["d", "c", "b", "a"])})
    assert schema_of(table, c=Discrete(2))["c"].labels == ("d", "a")
    assert schema_of(table, c=Discrete(4))["c"].labels == ("d", "c", "b", "a")


def test_intervals_become_text() -> None:
    table = pd.DataFrame({"c": pd.cut(pd.Series([1.0, 5.0, 9.0, np.nan]), [0, 4, 10])})
    schema = schema_of(table, c=Discrete(2))
    assert schema["c"].labels == ("(0, 4]", "(4, 10]")
    assert encode(table, schema, hidden=()).values["c"].sum(-1).tolist() == [[1, 1, 1, 0]]


def test_boolean_categories_with_gaps() -> None:
    table = pd.DataFrame({"c": pd.Series([True, None, False], dtype=object)})
    schema = schema_of(table, c=Discrete(2))
    batch = encode(table, schema, hidden=())
    decoded = decode(batch.values, schema)["c"]
    assert str(decoded.dtype) == "boolean"
    assert decoded.tolist() == [True, pd.NA, False]


def test_labels_are_kept_for_later_tables() -> None:
    schema = schema_of(pd.DataFrame({"c": ["a", "b", "c"]}), c=Discrete(3))
    later = encode(pd.DataFrame({"c": ["c", "c"]}), schema, hidden=())
    assert later.values["c"].argmax(-1).tolist() == [[2, 2]]


def test_schema_without_data_holds_codes() -> None:
    assert schema_of(c=Discrete(3))["c"].labels is None


@pytest.mark.parametrize("space", [Real(2), Positive(), Unit(), Simplex(3), Count(2), Discrete(4), Image(1, 2, 2)])
def test_schema_to_json(space: Space) -> None:
    schema = schema_of(x=space, y=Real())
    assert Schema.from_json(schema.to_json()) == schema
    assert schema.nodes == ("x", "y")


def test_decode_shapes() -> None:
    schema = schema_of(x=Real(), n=Count(), c=Discrete(2))
    table = decode({"c": torch.eye(2)[None], "x": [1.5, 2.5], "n": np.array([[2.9999], [0.0]])}, schema)
    assert list(table) == ["x", "n", "c"]
    assert table["n"].tolist() == [3, 0]
    assert table["n"].dtype == np.int64
    assert table["c"].tolist() == [0, 1]


# --- partial tables ---------------------------------------------------------------------------------------


def test_partial_tables() -> None:
    spaces = {"a": Discrete(2), "v": Real(2), "x": Real()}
    batch = read({"a": "yes", "v.1": [2.0]}, partial=True, **spaces)
    assert batch.rows == 1
    assert batch.mask["v"].tolist() == [[[False, True]]]
    assert batch.mask["x"].tolist() == [[[False]]]
    assert batch.values["v"].tolist() == [[[0.0, 2.0]]]
    table = pd.DataFrame({"a": [None, None], "v.0": [np.nan, np.nan]})
    assert not any(mask.any() for mask in read(table, partial=True, **spaces).mask.values())


def test_partial_table_without_a_known_column() -> None:
    assert read(pd.DataFrame({"other": [1, 2, 3]}), partial=True, x=Real()).rows == 3


# --- weights ----------------------------------------------------------------------------------------------


def test_weights_have_mean_one() -> None:
    schema = schema_of(x=Real())
    batch = encode({"x": [1, 2, 3]}, schema, hidden=(), weights=[0, 1, 3])
    assert batch.weight.tolist() == [[0, 0.75, 2.25]]
    batch = encode({"x": [1, 2]}, schema, hidden=(), weights=torch.tensor([[1.0, 1.0], [2.0, 0.0]]))
    assert batch.weight.tolist() == [[1, 1], [2, 0]]
    assert batch.replicas == 2


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2], r"weights must have one entry for each of the 3 rows; got shape \(2,\)"),
        (np.ones((1, 1, 3)), r"weights must have one entry for each of the 3 rows; got shape \(1, 1, 3\)"),
        ([1, -2, 1], r"weights must be finite and at least 0; found -2.0 in row 1"),
        ([1, 1, np.nan], r"weights must be finite and at least 0; found nan in row 2"),
        ([np.inf, 1, 1], r"weights must be finite and at least 0; found inf in row 0"),
        ([0, 0, 0], r"weights must not all be 0"),
        (["a", "b", "c"], r"weights must be numbers; got \['a', 'b', 'c'\]"),
    ],
)
def test_bad_weights(weights: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode({"x": [1, 2, 3]}, schema_of(x=Real()), hidden=(), weights=weights)


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "column", "message"),
    [
        (Real(), [1.0, np.inf], r"^column 'x' must hold finite numbers; found inf in row 1$"),
        (Count(), [-np.inf, 1.0], r"column 'x' must hold finite numbers; found -inf in row 0"),
        (Real(), ["a", "b"], r"column 'x' must hold numbers; found 'a' in row 0"),
        (Real(), [None, "1.5"], r"column 'x' must hold numbers; found '1.5' in row 1"),
        (Real(), [1.5, "b"], r"column 'x' must hold numbers; found 'b' in row 1"),
        (Real(), [1j, 2j], r"column 'x' must hold numbers; found '1j' in row 0"),
        (Real(), pd.to_datetime(["2020-01-01", None]), r"column 'x' must hold numbers; found '2020-01-01"),
        (Positive(), [1.0, 0.0], r"column 'x' must hold numbers above 0; found 0 in row 1"),
        (Unit(), [0.5, 1.0], r"column 'x' must hold numbers strictly between 0 and 1; found 1 in row 1"),
        (Count(), [1, -2], r"column 'x' must hold whole numbers of at least 0; found -2 in row 1"),
        (Count(), [1, 2.5], r"column 'x' must hold whole numbers of at least 0; found 2.5 in row 1"),
        (Discrete(3), [0, 3], r"column 'x' must hold category codes from 0 to 2; found 3 in row 1. For cat"),
        (Discrete(3), [-1, 1], r"column 'x' must hold category codes from 0 to 2; found -1 in row 0"),
        (Discrete(3), [0.5, 1], r"column 'x' must hold category codes from 0 to 2; found 0.5 in row 0"),
        (Discrete(3), [np.inf, 1], r"column 'x' must hold category codes from 0 to 2; found inf in row 0"),
        (Discrete(2), list("abc"), r"column 'x' must hold at most 2 categories; found 3: 'a', 'b', 'c'"),
        (
            Discrete(9),
            pd.to_datetime(["2020-01-01"] * 2),
            r"must hold category codes from 0 to 8; found '2020",
        ),
        (Real(), [np.nan, None], r"column 'x' must hold at least one value; all 2 are missing"),
        (Discrete(2), [None, None], r"column 'x' must hold at least one value; .* make it hidden"),
        (Real(), [], r"data must have at least 2 rows; got 0"),
        (Real(), [1.0], r"data must have at least 2 rows; got 1"),
    ],
)
def test_bad_columns(space: Space, column: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(pd.DataFrame({"x": column}), x=space)


def test_unknown_category() -> None:
    schema = schema_of(pd.DataFrame({"c": ["a", "b"]}), c=Discrete(2))
    with pytest.raises(DataError, match=r"column 'c' must hold one of 'a', 'b'; found 'z' in row 2"):
        encode(pd.DataFrame({"c": ["a", None, "z"]}), schema, hidden=())


def test_text_where_codes_are_expected() -> None:
    with pytest.raises(DataError, match=r"column 'c' must hold category codes from 0 to 1; found 'a' in row 0"):
        encode({"c": ["a", "b"]}, schema_of(c=Discrete(2)), hidden=())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0.5, 0.4], [0.5, 0.5]], r"columns of node 'p' must sum to 1 in every row; found 0.9 in row 0"),
        ([[0.5, 0.5], [0.5, 0.501]], r"columns of node 'p' must sum to 1 in every row; found 1.001 in row 1"),
        (
            [[0.5, 0.5], [-0.5, 1.5]],
            r"column 'p.0' of node 'p' must hold shares from 0 to 1; found -0.5 in row 1",
        ),
    ],
)
def test_bad_shares(rows: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read({"p": rows}, p=Simplex(2))


def test_shares_with_gaps_and_rounding() -> None:
    rows = [[0.5, np.nan, 0.2], [0.3, 0.3, 0.4 + 9e-7], [0.0, 0.0, 1.0]]
    assert read({"p": rows}, p=Simplex(3)).rows == 3


def test_column_of_a_vector_is_named() -> None:
    with pytest.raises(DataError, match=r"column 'v.1' of node 'v' must hold numbers above 0; found -1 in row 0"):
        read({"v": [[1.0, -1.0], [1.0, 1.0]]}, v=Positive(2))


def test_missing_column() -> None:
    table = pd.DataFrame({"a": [1, 2], "v.0": [1, 2]})
    with pytest.raises(DataError, match=r"^column 'x' is missing; the table has the columns 'a', 'v.0'\. If"):
        read(table, x=Real())
    with pytest.raises(DataError, match=r"column 'v.1' of node 'v' is missing; .* If 'v' is never seen, make it"):
        read(table, v=Real(2))
    with pytest.raises(DataError, match=r"column 'x' is missing; the table has the columns 'a'"):
        read({"a": [1, 2]}, x=Real())


@pytest.mark.parametrize("name", ["load", "load.1"])
def test_hidden_node_with_a_column(name: str) -> None:
    graph = Graph([("load", "x")], hidden=["load"])
    schema = Schema.of({"load": Real(2), "x": Real()}, graph)
    message = f"node 'load' is hidden, but the table has a column '{name}'; drop the column or take the node out"
    for table in (pd.DataFrame({name: [1, 2], "x": [1, 2]}), {name: [1, 2], "x": [1, 2]}):
        with pytest.raises(DataError, match=message):
            encode(table, schema, hidden=graph.hidden)


def test_duplicate_columns() -> None:
    table = pd.DataFrame([[1, 2, 3], [4, 5, 6]], columns=["x", "x", "y"])
    with pytest.raises(DataError, match=r"column 'x' must be there once; the table has several of that name"):
        read(table, x=Real())
    assert read(table, y=Real()).rows == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.ones((3, 3)), r"data must have 2 columns \('x', 'y'\); got shape \(3, 3\)"),
        (np.ones(3), r"data must have 2 columns \('x', 'y'\); got shape \(3,\)"),
        ([[1, 2], [3, 4]], r"data must be a DataFrame, a mapping .* torch array; got list$"),
        ("table.csv", r"data must be a DataFrame.*; got str; read a file with read_table"),
        ({"x": [1, 2], "y": [1, 2, 3]}, r"data must have the same number of rows .*; got \{'x': 2, 'y': 3\}"),
        ({"x": np.ones((2, 2)), "y": [1, 2]}, r"data\['x'\] must have shape \(rows, 1\).*; got \(2, 2\)"),
    ],
)
def test_bad_tables(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode(data, schema_of(x=Real(), y=Real()), hidden=())


def test_bad_schemas() -> None:
    graph = Graph([("x", "x.0")])
    with pytest.raises(DataError, match=r"spaces must have an entry for every node; node 'x.0' has none"):
        Schema.of({"x": Real()}, graph)
    with pytest.raises(DataError, match=r"nodes 'x' and 'x.0' both claim column 'x.0'; rename one"):
        Schema.of({"x": Real(2), "x.0": Real()}, graph)
    with pytest.raises(DataError, match=r"node 'y' is not in the schema, which holds 'x'"):
        schema_of(x=Real())["y"]
    state = schema_of(x=Real()).to_dict()
    state["x"]["space"]["kind"] = "Complex"
    with pytest.raises(DataError, match=r"node 'x': space must be one of 'Count', .*; got 'Complex'"):
        Schema.from_dict(state)


def test_bad_values_to_decode() -> None:
    schema = schema_of(x=Real(2), y=Real())
    with pytest.raises(DataError, match=r"node 'z' is not in the schema"):
        decode({"z": [1.0]}, schema)
    with pytest.raises(DataError, match=r"values of node 'x' must have shape \(rows, 2\); got \(3, 1\)"):
        decode({"x": np.ones((3, 1))}, schema)
    with pytest.raises(DataError, match=r"values of node 'y' must have 3 rows like the others; got 2"):
        decode({"x": np.ones((3, 2)), "y": [1.0, 2.0]}, schema)
    with pytest.raises(DataError, match=r"mask of node 'x' must have shape \(rows, 2\); got \(3, 1\)"):
        decode({"x": np.ones((3, 2))}, schema, mask={"x": np.ones((3, 1))})
    with pytest.raises(DataError, match=r"mask of node 'x' must have 3 rows like its values; got 4"):
        decode({"x": np.ones((3, 2))}, schema, mask={"x": np.ones((4, 2))})


# --- batches ----------------------------------------------------------------------------------------------


@pytest.fixture
def batch() -> Batch:
    values = torch.arange(10.0).reshape(1, 5, 2)
    return Batch({"x": values}, {"x": values > 2}, torch.arange(5.0)[None])


def test_take_rows(batch: Batch) -> None:
    part = batch.take(torch.tensor([3, 0]))
    assert part.values["x"].tolist() == [[[6, 7], [0, 1]]]
    assert part.mask["x"].tolist() == [[[True, True], [False, False]]]
    assert part.weight.tolist() == [[3, 0]]
    assert batch.take(torch.tensor([True, False, False, False, True])).weight.tolist() == [[0, 4]]


def test_take_rows_for_each_replica(batch: Batch) -> None:
    part = batch.take(torch.tensor([[3, 0], [1, 1]]))
    assert (part.rows, part.replicas) == (2, 2)
    assert part.weight.tolist() == [[3, 0], [1, 1]]
    again = part.take(torch.tensor([[1], [0]]))
    assert again.values["x"].tolist() == [[[0, 1]], [[2, 3]]]
    shared = Batch(batch.values, batch.mask, batch.weight.repeat(3, 1))
    assert shared.take(torch.tensor([[0], [1], [2]])).values["x"].tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_take_refuses_other_shapes(batch: Batch) -> None:
    with pytest.raises(DataError, match=r"index must have shape \(n,\) or \(replicas, n\); got \(1, 1, 1\)"):
        batch.take(torch.zeros(1, 1, 1, dtype=torch.long))


def test_to(batch: Batch) -> None:
    moved = batch.to("cpu", torch.float64)
    assert (moved.values["x"].dtype, moved.weight.dtype) == (torch.float64, torch.float64)
    assert moved.mask["x"].dtype == torch.bool
    assert batch.to(dtype=torch.float32).values["x"].dtype == torch.float32


def test_stack(batch: Batch) -> None:
    twin = batch.take(torch.tensor([4, 3, 2, 1, 0]))
    both = Batch.stack([batch, twin])
    assert (both.rows, both.replicas) == (5, 2)
    assert both.weight.tolist() == [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]
    assert Batch.stack([both, batch]).values["x"].shape == (3, 5, 2)
    mixed = Batch(batch.values, batch.mask, batch.weight.repeat(2, 1))
    assert Batch.stack([mixed, batch]).values["x"].shape == (3, 5, 2)


def test_stack_refuses_unlike_batches(batch: Batch) -> None:
    with pytest.raises(DataError, match="batches must hold at least one batch; got none"):
        Batch.stack([])
    with pytest.raises(DataError, match=r"same rows and nodes; got Batch\(5 rows: x\) and Batch\(1 rows: x\)"):
        Batch.stack([batch, batch.take(torch.tensor([0]))])


def test_fully_observed_refuses_unknown_nodes(batch: Batch) -> None:
    with pytest.raises(DataError, match=r"node 'y' is not in the batch, which holds 'x'"):
        batch.fully_observed("y")


def test_repr(batch: Batch) -> None:
    assert repr(batch) == "Batch(5 rows: x)"
    assert repr(Batch.stack([batch, batch])) == "Batch(5 rows, 2 replicas: x)"


@settings(deadline=None)
@given(hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=6)), st.data())
def test_masks_mark_exactly_the_missing_cells(array: np.ndarray, data: st.DataObject) -> None:
    array = np.nan_to_num(array, posinf=1.0, neginf=-1.0)
    gaps = data.draw(hnp.arrays(bool, array.shape))
    table = np.where(gaps, np.nan, array)
    schema = schema_of(x=Real(array.shape[1]))
    batch = encode(table, schema, hidden=(), partial=True)
    assert np.array_equal(batch.mask["x"][0], ~gaps)
    assert np.array_equal(batch.values["x"][0], np.where(gaps, 0.0, array))
    back = decode(batch.values, schema, mask=batch.mask).to_numpy()
    assert np.array_equal(back, table, equal_nan=True)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=2, max_size=30))
def test_categories_survive_the_round_trip(column: list) -> None:
    table = pd.DataFrame({"c": pd.Series(column, dtype=object)})
    schema = schema_of(table, c=Discrete(3))
    batch = encode(table, schema, hidden=(), partial=True)
    decoded = decode(batch.values, schema)["c"]
    assert [None if pd.isna(label) else label for label in decoded] == column


# --- distinct rows ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    hnp.arrays(np.int64, st.tuples(st.integers(2, 60), st.just(2)), elements=st.integers(-1, 2)),
    st.sampled_from([0.5, 1.0]),
)
def test_unique_rows_keep_the_weighted_table(codes: np.ndarray, shrink: float) -> None:
    table = np.where(codes < 0, np.nan, codes)
    weights = np.arange(1.0, len(codes) + 1)
    schema = schema_of(a=Discrete(3), b=Discrete(3))
    batch = encode(table, schema, hidden=(), weights=weights, partial=True)
    small = unique_rows(batch, shrink=shrink)
    assert torch.isclose(small.weight.sum(), torch.tensor(float(len(codes)), dtype=torch.float64))
    for node in batch.nodes:
        total = torch.einsum("bn,bnw->bw", batch.weight, batch.values[node])
        assert torch.allclose(torch.einsum("bn,bnw->bw", small.weight, small.values[node]), total)
    distinct = len(np.unique(codes, axis=0))
    assert small.rows == (distinct if distinct <= shrink * len(codes) else len(codes))


def test_unique_rows_with_replicas() -> None:
    values = torch.tensor([[[1.0], [1.0], [2.0], [1.0]], [[5.0], [5.0], [5.0], [6.0]]])
    batch = Batch({"x": values}, {"x": torch.ones(1, 4, 1).bool()}, torch.ones(1, 4))
    small = unique_rows(batch, shrink=1.0)
    assert small.values["x"].tolist() == [[[1], [2], [1]], [[5], [5], [6]]]
    assert small.weight.tolist() == [[2, 1, 1]]


def test_unique_rows_of_many_columns() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 3, (20, 60))[rng.integers(0, 20, 500)]
    spaces = {f"n{place}": Discrete(3) for place in range(60)}
    batch = encode(rows, schema_of(**spaces), hidden=())
    assert unique_rows(batch).rows == len(np.unique(rows, axis=0))


def test_unique_rows_leave_continuous_tables_alone() -> None:
    batch = read(np.random.default_rng(0).random((50, 1)), x=Real())
    assert unique_rows(batch) is batch


# --- files and suggestions --------------------------------------------------------------------------------


def test_read_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    table.to_csv(tmp_path / "table.csv", index=False)
    pd.testing.assert_frame_equal(read_table(str(tmp_path / "table.csv")), table)
    with pytest.raises(DataError, match=r"path must end in \.csv or \.parquet; got 'table.xls'"):
        read_table("table.xls")
    with pytest.raises(DataError, match=r"path must be a file that exists; got 'nowhere.csv'"):
        read_table("nowhere.csv")
    (tmp_path / "table.parquet").write_bytes(b"")
    for name in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=r"table.parquet' needs the package pyarrow: pip install pyarrow"):
        read_table(tmp_path / "table.parquet")


def test_read_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    table = pd.DataFrame({"a": [1, 2]})
    table.to_parquet(tmp_path / "table.parquet")
    pd.testing.assert_frame_equal(read_table(tmp_path / "table.parquet"), table)


@pytest.mark.parametrize(
    ("column", "space"),
    [
        (["a", "b", "a", None], Discrete(2)),
        (["a", "a"], Discrete(2)),
        ([True, True], Discrete(2)),
        (pd.Categorical(["a"], categories=["a", "b", "c"]), Discrete(3)),
        ([0, 1, 2, 1], Discrete(3)),
        ([0, 1, None, 1], Discrete(2)),
        (list(range(10)), Discrete(10)),
        (list(range(11)), Count()),
        ([0, 2, 3], Count()),
        ([1, 2, 3], Count()),
        (pd.array([5, None, 30], dtype="Int64"), Count()),
        ([-1, 0, 1], Real()),
        ([0.0, 1.0, 2.0], Real()),
        ([0.5, None, 2.0], Real()),
    ],
)
def test_infer_space(column: Any, space: Space) -> None:
    assert infer_space(pd.Series(column)) == space


def test_infer_space_refuses_dates_and_nothing() -> None:
    with pytest.raises(DataError, match=r"column 'x' must hold at least one value; all 2 are missing"):
        infer_space(pd.Series([None, None], name="x"))
    with pytest.raises(DataError, match=r"column 'x' must hold numbers or categories; found '2020-01-01"):
        infer_space(pd.Series(pd.to_datetime(["2020-01-01"]), name="x"))
