"""Cells and weights that a schema takes or refuses."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from otpdag.data import Batch, Schema, encode
from otpdag.errors import DataError
from otpdag.graph import Graph
from otpdag.spaces import Count, Discrete, Positive, Real, Simplex, Space, Unit


def schema_of(data: Any = None, **spaces: Space) -> Schema:
    return Schema.of(spaces, Graph([], nodes=list(spaces)), data)


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
