"""What a summary says of data and model, and how it shows it."""

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.answers.summary import explained
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


def test_the_share_that_parents_explain_is_that_of_closed_forms():
    graph = otp.Graph([("x", "y"), ("h", "y"), ("x", "n"), ("x", "k")], hidden=["h"])
    nodes = {"x": m.Normal(), "h": m.Normal(), "y": m.Normal(), "n": m.Poisson(), "k": m.Categorical(2)}
    model = otp.Model(graph, nodes).set_params(
        {
            "x": {"loc": 5.0, "scale": 2.0},
            "h": {"loc": 0.0, "scale": 1.0},
            "y": {"loc": 1.0, "weight": [0.5, 1.0], "scale": 1.5},
            "n": {"log_rate": 0.2, "weight": 0.3},
            "k": {"logits": [0.0, 0.0], "weight": [0.0, 1.0]},
        }
    )
    rate = np.exp(0.2 + 0.3 * 5.0 + 0.3**2 * 4 / 2)  # the mean of a log-normal rate, and its variance
    variance = rate**2 * np.expm1(0.3**2 * 4)
    found = explained(model.fitted)
    assert found == pytest.approx({"y": 2 / (2 + 1.5**2), "n": variance / (variance + rate)}, abs=0.02)
    still = otp.Model(
        otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Deterministic(lambda parents: 2 * parents["x"])}
    )
    assert explained(still.set_params({"x": {"loc": 0.0, "scale": 1.0}}).fitted).get("y", 1.0) == 1.0


def test_all_that_draws_parameters_is_told():
    rng = np.random.default_rng(1)
    table = pd.DataFrame({"x": rng.normal(size=200), "c": rng.integers(0, 3, 200), "d": rng.integers(0, 2, 200)})
    table["y"], table["v"] = table["x"] + rng.normal(size=200), np.sin(table["x"]) + 0.1 * rng.normal(size=200)
    nodes = {
        "x": m.Normal(),
        "c": m.Categorical(3, probs=otp.pseudo_counts(2.0)),
        "d": m.Categorical(2, probs=otp.pseudo_counts(0.5)),
        "y": m.Normal(weight=otp.ridge(3.0)),
        "v": m.Normal(terms="spline(x, 6)"),
    }
    graph = otp.Graph([("x", "y"), ("x", "v"), ("c", "d")])
    result = otp.fit(otp.Model(graph, nodes), table)
    told = "pseudo-counts(2) on c.probs, pseudo-counts(0.5) on d.probs, ridge(3) on y.weight, smoothness of v"
    assert sorted(result.summary().facts["priors"].split(", ")) == sorted(told.split(", "))


def test_two_columns_of_facts_stand_above_a_table_of_so_many_parameters():
    rng = np.random.default_rng(2)
    table = pd.DataFrame({"x": rng.normal(size=50), "y": rng.normal(size=50)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(scale=1.0), "y": m.Normal()})
    summary = otp.fit(model, table).summary(level=0.9)
    lines = str(summary).splitlines()
    rule = [at for at, line in enumerate(lines) if set(line) == {"="}]
    width = len(lines[0])
    assert rule == [0, rule[1], len(lines) - 1]
    assert all(len(line) <= width for line in lines)
    halves = [half.strip() for line in lines[1 : rule[1]] for half in (line[: width // 2], line[width // 2 :])]
    shown = dict(half.split(": ", 1) for half in halves if half)
    assert set(shown) == set(summary.all_facts())
    assert shown["rows"] == "50"
    assert float(shown["log-likelihood"]) == pytest.approx(summary.facts["log-likelihood"], rel=1e-5)
    head = lines[rule[1] + 1].split()
    assert head == ["parameter", "estimate", "std", "err", "[0.05", "0.95]", "standardised"]
    assert set(lines[rule[1] + 2]) == {"-"}
    body = lines[rule[1] + 3 : -1]
    assert [line.split()[0] for line in body] == ["x.loc", "x.scale", "y.loc", "y.weight[x]", "y.scale"]
    assert "fixed" in body[1]
    few = summary.to_text(most=2).splitlines()
    assert few[-2].startswith("... and 3 more: to_frame() has all of them")
    assert len(few) == len(lines) - 2
