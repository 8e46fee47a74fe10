"""What a summary says of data and model, and how it shows it."""

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from tests.answers.regression_tables import regression_table


def test_of_a_table_in_parts_the_facts_are_those_of_all_its_rows(tmp_path):
    pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    state = rng.integers(0, 2, 900)
    table = pd.DataFrame({"x": rng.normal(4.0 * state), "n": rng.poisson(2 + 5 * state).astype(float)})
    table = table.mask(rng.random(table.shape) < 0.1)
    table["w"] = rng.integers(1, 4, 900)
    table.to_parquet(tmp_path / "table.parquet")
    graph = otp.Graph([("z", "x"), ("z", "n")], hidden=["z"])
    facts = []
    for data in (table, otp.Partitioned(tmp_path / "table.parquet", held_rows=300, block_rows=250)):
        model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "n": m.Poisson()})
        facts.append(otp.fit(model, data, restarts=2, weights="w").summary().facts)
    memory, parts = facts
    assert parts["rows"] == memory["rows"] == 900
    assert parts["missing cells"] == memory["missing cells"]
    for name in ("log-likelihood", "AIC", "BIC", "parameters"):
        assert parts[name] == pytest.approx(memory[name], rel=1e-7)


def test_the_facts_are_those_of_the_data():
    table = regression_table()
    graph = otp.Graph([(p, c) for c in ("y", "n", "k") for p in ("a", "b")])
    nodes = {"a": m.Normal(), "b": m.Normal(), "y": m.Normal(), "n": m.Poisson(), "k": m.Categorical(2)}
    result = otp.fit(otp.Model(graph, nodes), table)
    facts = result.summary().facts
    model = result.model
    assert facts["log-likelihood"] == pytest.approx(model.log_likelihood(table))
    assert facts["parameters"] == model.n_parameters == 2 + 2 + 4 + 3 + 3
    assert facts["AIC"] == pytest.approx(model.aic(table))
    assert facts["BIC"] == pytest.approx(model.bic(table))
    text = str(result.summary())
    assert "missing cells: 0" in text
    assert "k.weight[b, 1]" in text
    assert "<table" in result.summary()._repr_html_()


def test_all_intervals_have_one_default_level():
    from inspect import signature

    from otpdag.cli import commands

    asked = [otp.Model.effect, otp.Model.forecast, commands.summary, commands.forecast, commands.effect]
    asked += [
        getattr(otp.FitResult, name) for name in ("effect", "forecast", "intervals", "standard_errors", "summary")
    ]
    assert {signature(one).parameters["level"].default for one in asked} == {0.95}
