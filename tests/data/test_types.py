"""What a column is taken for."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from otpdag.data import infer_space
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
