"""Tables of every kind, read by the names of their columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from otpdag.data import Batch, Schema, encode
from otpdag.errors import DataError
from otpdag.graph import Graph
from otpdag.spaces import Discrete, Image, Real, Space


def schema_of(data: Any = None, **spaces: Space) -> Schema:
    return Schema.of(spaces, Graph([], nodes=list(spaces)), data)


def read(data: Any, partial: bool = False, **spaces: Space) -> Batch:
    return encode(data, schema_of(data, **spaces), hidden=(), partial=partial)


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
        ("table.csv", r"data must be a DataFrame.*; got str; read a file with pandas"),
        ({"x": [1, 2], "y": [1, 2, 3]}, r"data must have the same number of rows .*; got \{'x': 2, 'y': 3\}"),
        ({"x": np.ones((2, 2)), "y": [1, 2]}, r"data\['x'\] must have shape \(rows, 1\).*; got \(2, 2\)"),
    ],
)
def test_bad_tables(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode(data, schema_of(x=Real(), y=Real()), hidden=())
