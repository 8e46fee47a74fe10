"""Answers against closed forms: samples of long lags, AIC and BIC, sandwiches, short sequences, noise, fit indices."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

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


def test_counts_in_three_classes_would_have_been_all_that_their_noise_leaves_open():
    """The last class is split off first, then the second: u of each split is uniform where its count leaves it open."""
    probs = np.array([[0.2, 0.3, 0.5], [0.5, 0.3, 0.2]])
    model = otp.Model(otp.Graph([("t", "y")]), {"t": m.Categorical(2), "y": m.Multinomial(3, total=5)})
    model.set_params({"t": {"probs": [0.5, 0.5]}, "y": {"probs": probs}})
    rows = pd.DataFrame([[0, 1, 2, 2]], columns=["t", "y.0", "y.1", "y.2"])
    told = model.counterfactual(rows, {"t": 1}, draws=4000, seed=3)
    level = (np.arange(400) + 0.5) / 400
    early, late = stats.binom(5, 0.5), stats.binom(3, 0.2 / 0.5)  # three of five in the first two, one of three first
    kept = stats.binom.ppf(early.cdf(2) + early.pmf(3) * level, 5, 0.8)[:, None]
    first = stats.binom.ppf(late.cdf(0) + late.pmf(1) * level, np.broadcast_to(kept, (400, 400)), 0.5 / 0.8)
    expected = first.mean(), (kept - first).mean(), (5 - kept).mean()
    np.testing.assert_allclose(told[["y.0", "y.1", "y.2"]].to_numpy(dtype=float)[0], expected, atol=0.04)


def test_the_share_of_missing_cells_is_that_of_the_weighed_table():
    rng = np.random.default_rng(2)
    table = pd.DataFrame(rng.normal(size=(200, 3)), columns=list("abc"))
    table = table.mask(rng.random(table.shape) < [0.0, 0.1, 0.4])
    weights = rng.integers(1, 5, 200)
    graph = otp.Graph([("a", "b"), ("b", "c")])
    result = otp.fit(otp.Model(graph, dict.fromkeys("abc", m.Normal())), table, weights=weights)
    missing = (table.isna().to_numpy() * (weights / weights.mean())[:, None]).sum()
    assert result.summary().facts["missing cells"] == f"{round(missing)} ({missing / 600:.1%})"


def test_indices_with_gaps_are_against_columns_that_are_independent():
    """The baseline is the likelihood of each column by itself, where it is seen."""
    rng = np.random.default_rng(4)
    f = rng.normal(size=400)
    table = pd.DataFrame({name: 0.7 * f + rng.normal(size=400) for name in "abcde"})
    table["e"] += 0.8 * table["d"]
    table = table.mask(rng.random(table.shape) < 0.15)
    graph = otp.Graph([("f", name) for name in "abcde"], hidden=["f"])
    nodes = {"f": m.Normal(loc=0.0, scale=1.0), **{name: m.Normal() for name in "abcde"}}
    result = otp.fit(otp.Model(graph, nodes), table, restarts=2)
    full = otp.Graph([(a, b) for b in "abcde" for a in "abcde" if a < b])
    best = otp.fit(otp.Model(full, {name: m.Normal() for name in "abcde"}), table).model.log_likelihood(table)
    seen = [table[name].dropna() for name in "abcde"]
    apart = sum(stats.norm.logpdf(one, one.mean(), one.std(ddof=0)).sum() for one in seen)
    chi, base, degrees, base_degrees = 2 * (best - result.model.log_likelihood(table)), 2 * (best - apart), 5, 10
    found = result.fit_indices()
    assert found.degrees == degrees
    assert found.chi_square == pytest.approx(chi, abs=0.02)
    assert found.cfi == pytest.approx(1 - (chi - degrees) / (base - base_degrees), abs=1e-4)
    ratio = base / base_degrees
    assert found.tli == pytest.approx((ratio - chi / degrees) / (ratio - 1), abs=1e-3)
