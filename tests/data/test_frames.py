"""Tables of other libraries."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import as_frame, known_table
from otpdag.errors import DataError, ModelError

CHAIN = otp.Graph([("k", "x")])
COLUMNS = {"k": ["a", "b", None, "b", "a", "b"], "x": [1.5, 2.5, 0.5, None, 2.25, 1.0]}


@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_tables_of_other_libraries_give_the_same_fit(library: str) -> None:
    module = pytest.importorskip(library)
    table = module.DataFrame(COLUMNS) if library == "polars" else module.table(COLUMNS)
    pd.testing.assert_frame_equal(as_frame(table), pd.DataFrame(COLUMNS), check_dtype=False)
    models = [otp.Model.from_frame(CHAIN, data) for data in (table, pd.DataFrame(COLUMNS))]
    otp.fit(models[0], table)
    otp.fit(models[1], pd.DataFrame(COLUMNS))
    for name in ("loc", "scale"):
        np.testing.assert_allclose(models[0].params()["x"][name], models[1].params()["x"][name])
    assert models[0].impute(table).notna().all(axis=None)
    assert models[0].score(table, kind="likelihood") == models[1].score(pd.DataFrame(COLUMNS), kind="likelihood")


def test_lazy_tables_are_refused() -> None:
    polars = pytest.importorskip("polars")
    with pytest.raises(DataError, match=r"a lazy LazyFrame: collect\(\) or compute\(\) it first"):
        known_table(polars.LazyFrame(COLUMNS))


def test_a_dictionary_makes_a_model_and_bad_ones_are_refused() -> None:
    assert otp.Model.from_frame(CHAIN, COLUMNS).spaces["k"].width == 2
    with pytest.raises(DataError, match="data must be a dictionary of columns of one length"):
        otp.Model.from_frame(CHAIN, {"k": ["a"], "x": [1.0, 2.0]})
    with pytest.raises(DataError, match="data must be a DataFrame or a dictionary of columns; got int"):
        otp.Model.from_frame(CHAIN, 3)
    with pytest.raises(ModelError, match=r"graph must be an otp.Graph, and comes before the data; got DataFrame"):
        otp.Model.from_frame(pd.DataFrame(COLUMNS), CHAIN)


def test_columns_of_one_name_are_refused() -> None:
    doubled = pd.DataFrame([[0, 1.0, 2.0], [1, 2.0, 3.0]], columns=["k", "x", "x"])
    with pytest.raises(DataError, match="column 'x' must be there once; the table has several of that name"):
        otp.Model.from_frame(CHAIN, doubled)
    model = otp.Model(CHAIN, {"k": m.Categorical(2), "x": m.Normal()})
    with pytest.raises(DataError, match="column 'x' must be there once; the table has several of that name"):
        otp.fit(model, doubled)
    model.set_params({"k": {"probs": [0.5, 0.5]}, "x": {"loc": [0.0, 1.0], "scale": [1.0, 1.0]}})
    for use in (model.score, model.impute, model.check):
        with pytest.raises(DataError, match="column 'x' must be there once"):
            use(doubled)
