"""Answers against closed forms: samples of long lags, AIC and BIC of tables, weighted sandwiches, short sequences."""

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m

sm = pytest.importorskip("statsmodels.api")


@pytest.mark.parametrize("by", [1, 2, 3])
def test_a_lag_reaches_so_many_steps_back(by):
    """x[t] = 0.8 x[t - by] + e is correlated by powers of 0.8 over multiples of by steps, else not at all."""
    model = otp.Model(otp.Graph([otp.lag("x", "x", by)]), {"x": m.Normal()})
    model.set_params({"x": {"loc": 0.0, "weight": [0.8], "scale": 1.0}})
    drawn = model.sample(300, seed=0, length=40)
    x = drawn["x"].to_numpy().reshape(300, 40)
    for apart in (1, 2, 3):
        late = slice(20, None)
        found = np.corrcoef(x[:, late].ravel(), np.roll(x, apart, axis=1)[:, late].ravel())[0, 1]
        assert found == pytest.approx(0.0 if apart % by else 0.8 ** (apart / by), abs=0.06)


def test_criteria_of_tables_count_every_free_probability():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 3, 400)
    b = np.where(rng.random(400) < 0.5, a, rng.integers(0, 4, 400))
    table = pd.DataFrame({"a": a.astype(str), "b": b.astype(str)})
    model = otp.Model(otp.Graph([("a", "b")]), {"a": m.Categorical(3), "b": m.Categorical(4)})
    result = otp.fit(model, table)
    joint = pd.crosstab(table["a"], table["b"]).to_numpy()
    by_row = joint.sum(1, keepdims=True)
    log_likelihood = (by_row * np.log(by_row / 400)).sum() + (joint * np.log(np.maximum(joint, 1e-300) / by_row)).sum()
    facts = result.summary().facts
    free = 2 + 3 * 3
    assert facts["log-likelihood"] == pytest.approx(log_likelihood, abs=1e-3)
    assert model.aic(table) == pytest.approx(2 * free - 2 * log_likelihood, abs=1e-2)
    assert model.bic(table) == pytest.approx(free * np.log(400) - 2 * log_likelihood, abs=1e-2)


def test_the_sandwich_of_weighted_rows_counts_a_row_as_often_as_it_weighs():
    """H^-1 (sum w g g^T) H^-1, with weights of mean one: the same as for rows that stand in the table so often."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=300)
    table = pd.DataFrame({"x": x, "y": 1 + 2 * x + (0.5 + np.abs(x)) * rng.normal(size=300)})
    weights = rng.uniform(0.2, 3.0, 300)
    result = otp.fit(otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()}), table, weights=weights)
    found = result.summary(errors="sandwich").table
    own = found[(found["node"] == "y") & found["parameter"].isin(["loc", "weight"])]
    design, scaled = sm.add_constant(x), weights / weights.mean()
    truth = sm.WLS(table["y"], design, weights=weights).fit()
    np.testing.assert_allclose(own["estimate"], truth.params, atol=1e-4)
    bread = np.linalg.inv(design.T @ (scaled[:, None] * design))
    meat = design.T @ ((scaled * truth.resid.to_numpy() ** 2)[:, None] * design)
    np.testing.assert_allclose(own["std_error"], np.sqrt(np.diag(bread @ meat @ bread)), rtol=2e-3)


def test_sequences_of_one_step_are_forecast_from_it():
    model = otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": m.Normal()})
    model.set_params({"x": {"loc": 0.0, "weight": [0.8], "scale": 1.0}})
    steps = pd.DataFrame({"x": [4.0, -2.0, 1.0, 5.0], "of": [0, 1, 1, 2]})
    told = model.forecast(otp.Sequences(steps, sequence="of"), 2, seed=0)
    means = told.filter(regex="mean|^x$").to_numpy().reshape(3, 2, -1)[..., 0]
    np.testing.assert_allclose(means, np.array([[4.0], [1.0], [5.0]]) * [0.8, 0.64], atol=0.1)
