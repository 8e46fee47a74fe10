"""From tables to batches and back, and what is refused on the way."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from otpdag.data import Batch, Schema, decode, encode
from otpdag.data.columns import Column
from otpdag.errors import DataError
from otpdag.graph import Graph
from otpdag.spaces import Count, Discrete, Positive, Real, Simplex, Space, Unit


def schema_of(data: Any = None, **spaces: Space) -> Schema:
    return Schema.of(spaces, Graph([], nodes=list(spaces)), data)


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
    assert batch.mask["v"].all(-1).tolist() == [[True, True, False, True]]
    assert batch.values["outages"].tolist() == [[[3], [0], [0], [1]]]
    assert batch.weight.tolist() == [[1, 1, 1, 1]]
    assert batch.values["v"].dtype == torch.float64


def with_gaps(batch: Batch) -> dict[str, Tensor]:
    return {node: torch.where(batch.mask[node], value, torch.nan) for node, value in batch.values.items()}


def test_batch_to_frame(frame: pd.DataFrame, grid: Graph) -> None:
    schema = Schema.of(SPACES, grid, frame)
    batch = encode(frame, schema, hidden=grid.hidden)
    load = torch.arange(4.0)[:, None]
    table = decode({"load": load, **with_gaps(batch)}, schema)
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


def test_dtype() -> None:
    schema = schema_of(x=Real(), c=Discrete(2))
    batch = encode({"x": [1, 2], "c": [0, 1]}, schema, hidden=()).to(dtype=torch.float32)
    assert {tensor.dtype for tensor in (*batch.values.values(), batch.weight)} == {torch.float32}
    assert {tensor.dtype for tensor in batch.mask.values()} == {torch.bool}


def test_boolean_categories_with_gaps() -> None:
    table = pd.DataFrame({"c": pd.Series([True, None, False], dtype=object)})
    schema = schema_of(table, c=Discrete(2))
    batch = encode(table, schema, hidden=())
    decoded = decode(batch.values, schema)["c"]
    assert str(decoded.dtype) == "boolean"
    assert decoded.tolist() == [True, pd.NA, False]


def test_decode_shapes() -> None:
    schema = schema_of(x=Real(), n=Count(), c=Discrete(2))
    table = decode({"c": torch.eye(2)[None], "x": [1.5, 2.5], "n": np.array([[2.9999], [0.0]])}, schema)
    assert list(table) == ["x", "n", "c"]
    assert table["n"].tolist() == [3, 0]
    assert table["n"].dtype == np.int64
    assert table["c"].tolist() == [0, 1]


def test_bad_values_to_decode() -> None:
    schema = schema_of(x=Real(2), y=Real())
    with pytest.raises(DataError, match=r"node 'z' is not in the schema"):
        decode({"z": [1.0]}, schema)
    with pytest.raises(DataError, match=r"values of node 'x' must have shape \(rows, 2\); got \(3, 1\)"):
        decode({"x": np.ones((3, 1))}, schema)
    with pytest.raises(DataError, match=r"values of node 'y' must have 3 rows like the others; got 2"):
        decode({"x": np.ones((3, 2)), "y": [1.0, 2.0]}, schema)


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
    back = decode(with_gaps(batch), schema).to_numpy()
    assert np.array_equal(back, table, equal_nan=True)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=2, max_size=30))
def test_categories_survive_the_round_trip(column: list) -> None:
    table = pd.DataFrame({"c": pd.Series(column, dtype=object)})
    schema = schema_of(table, c=Discrete(3))
    batch = encode(table, schema, hidden=(), partial=True)
    decoded = decode(batch.values, schema)["c"]
    assert [None if pd.isna(label) else label for label in decoded] == column


def read(data: Any, partial: bool = False, **spaces: Space) -> Batch:
    return encode(data, schema_of(data, **spaces), hidden=(), partial=partial)


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
        (Count(), [1, -2], r"column 'x' must hold whole numbers of at least 0 and at most 7e10; found -2 in row 1"),
        (Count(), [1, 2.5], r"column 'x' must hold whole numbers of at least 0 and at most 7e10; found 2.5 in row 1"),
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
