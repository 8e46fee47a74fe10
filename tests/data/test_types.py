"""What a column is taken for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import column_types as column_types_benchmark
from benchmarks.harness import Settings
from otpdag.data import column_type, column_types
from otpdag.errors import DataError
from otpdag.spaces import Count, Discrete, Real, Space


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
        ([5, 30, 5, 30], Discrete(2)),
        ([-1, 0, 1], Real()),
        ([0.0, 1.0, 2.0], Discrete(3)),
        ([0.5, None, 2.0], Real()),
    ],
)
def test_spaces_of_columns(column: Any, space: Space) -> None:
    assert column_type(pd.Series(column)).space == space


def test_column_type_refuses_dates_and_nothing() -> None:
    with pytest.raises(DataError, match=r"column 'x' must hold at least one value; all 2 are missing"):
        column_type(pd.Series([None, None], name="x"))
    with pytest.raises(DataError, match=r"column 'x' must hold numbers or categories; found '2020-01-01"):
        column_type(pd.Series(pd.to_datetime(["2020-01-01"]), name="x"))


def test_types_of_real_columns_are_those_given_by_hand_and_the_same_with_gaps():
    pytest.importorskip("statsmodels")
    record = column_types_benchmark.types(Settings(seed=1, repeats=1))
    assert record["columns"] >= 60
    assert record["wrong"] == []
    assert record["changed"] == []


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("column", "kind", "doubt"),
    [
        (np.repeat([10, 20, 30], 20), "category", "amounts rather than codes"),
        ([f"id{i}" for i in range(150)], "category", "150 levels in 150 rows: names or ids"),
        (RNG.permutation(150), "number", "an id, a row number or a time"),
        ([*map(str, RNG.normal(size=60)), "n/a"], "number", "1 of the cells hold text, first 'n/a' in row 60"),
        ([*RNG.normal(size=60), "n/a"], "number", "1 of the cells hold text, first 'n/a' in row 60"),
        ([*map(str, RNG.normal(size=60))], "number", "the numbers are text"),
        ([f"2020-01-{day:02}" for day in range(1, 29)] * 4, "category", "dates"),
        ([f"town {i}" for i in range(40)] * 10, "category", "40 levels need many rows"),
        (np.ones(30), "number", "constant"),
        (["yes"] * 30, "category", "constant"),
        (RNG.negative_binomial(1, 0.05, 200), "count", "m.NegativeBinomial"),
        (np.repeat([200, 404, 500], 20), "number", "if they are codes, m.Categorical(3)"),
        (np.maximum(RNG.normal(size=200), 0), "number", "are zero: no normal column"),
        (np.tile([0.0, 1.0], 20), "category", ""),
        (RNG.poisson(4.0, 300), "count", ""),
        (np.minimum(RNG.poisson(1.5, 300), 7), "count", "if they are codes"),
        (RNG.integers(0, 7, 300), "category", ""),
        (RNG.binomial(4, 0.5, 300), "category", ""),
        (1 + RNG.poisson(1.0, 300) % 4, "category", ""),
        (RNG.normal(size=100), "number", ""),
    ],
)
def test_doubtful_columns_say_so(column: Any, kind: str, doubt: str) -> None:
    decided = column_type(pd.Series(column, name="x"))
    assert decided.kind == kind
    assert doubt in decided.doubt
    assert bool(doubt) == bool(decided.doubt)


def test_one_empty_cell_changes_nothing():
    vote = pd.Series(np.tile([0.0, 1.0], 50))
    codes = pd.Series(np.tile([10, 20, 30], 30))
    for column in (vote, codes, vote.astype(int), codes.astype(float)):
        assert column_type(column.where(column.index != 3)).space == column_type(column).space


def test_columns_that_can_be_no_node_are_listed_with_the_reason():
    frame = pd.DataFrame({"day": pd.to_datetime(["2020-01-01"] * 3), "none": [None] * 3, "x": [0.5, 1.5, 3.0]})
    decided = {one.column: one for one in column_types(frame)}
    assert {name: one.kind for name, one in decided.items()} == {"day": "none", "none": "none", "x": "number"}
    assert "a time: make it a number" in decided["day"].reason
    assert str(decided["x"]) == "x: number, numbers with fractions, 3 values"


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([f"{value / 7:.1f}%" for value in range(40)], "numbers with a sign or unit"),
        ([f"${value},{value}00.50" for value in range(1, 40)], "numbers with a sign or unit"),
        ([f"{value} kg" for value in range(40)], "numbers with a sign or unit"),
        (["m", "f", "M", "m "] * 20, "levels differ by capitals or blanks alone, 'M', 'm', 'm '"),
        ([18.0, 25.5, 70.0, -99.0, 44.5] * 12, "12 cells are -99, far from the others"),
        ([1.0, 2.0, 3.0, 4.0, 999.0] * 12, "12 cells are 999, far from the others"),
        ([-99.0, -98.0, 4.0, 5.5, 80.0] * 12, "only 5 values"),
        ([60.0, 70.5, 80.0, 90.5, 99.0] * 12, "only 5 values"),
        (["m", "f", "other"] * 20, ""),
    ],
)
def test_cells_that_stand_for_something_else_are_doubted(cells, words):
    doubt = column_type(pd.Series(cells, name="x")).doubt
    assert words in doubt
    assert bool(words) == bool(doubt)
