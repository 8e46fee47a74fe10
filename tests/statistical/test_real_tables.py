"""The questions that a new user asks, on real tables that ship with scikit-learn and statsmodels."""

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.naive_bayes import GaussianNB

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.spaces import Real

sm = pytest.importorskip("statsmodels.api", reason="statsmodels is the outside truth here")


def covariate() -> m.Given:
    return m.Given(Real())


def test_anes96_votes_are_predicted_as_by_a_logistic_regression():
    table = sm.datasets.anes96.load_pandas().data[["vote", "PID", "age", "educ"]].astype(float)
    graph = otp.Graph([(name, "vote") for name in ("PID", "age", "educ")])
    nodes = {name: covariate() for name in ("PID", "age", "educ")} | {"vote": m.Categorical(2)}
    model = otp.Model(graph, nodes)
    result = otp.fit(model, table)
    truth = sm.Logit(table["vote"], sm.add_constant(table[["PID", "age", "educ"]])).fit(disp=False)
    assert model.log_likelihood(table) == pytest.approx(truth.llf, abs=1e-3)
    assert model.aic(table) == pytest.approx(truth.aic, abs=1e-2)
    assert model.bic(table) == pytest.approx(truth.bic, abs=1e-2)
    found = result.summary().to_frame()
    names = [f"vote.weight[{name}, 1]" for name in ("PID", "age", "educ")]
    np.testing.assert_allclose(found.loc[names, "estimate"], truth.params.iloc[1:], rtol=1e-3)
    np.testing.assert_allclose(found.loc[names, "std_error"], truth.bse.iloc[1:], rtol=1e-3)
    held_out = table.drop(columns="vote").head(50)
    predicted = model.predict_proba(held_out, "vote")
    np.testing.assert_allclose(predicted[1], truth.predict(sm.add_constant(held_out)), atol=1e-4)
    assert (model.predict(table, "vote") == (truth.predict() > 0.5).astype(int)).all()


def test_fair_an_effect_is_that_of_the_regression_that_adjusts():
    table = sm.datasets.fair.load_pandas().data[["rate_marriage", "religious", "age", "affairs"]].iloc[:1500]
    graph = otp.Graph(
        [("age", "religious"), ("age", "rate_marriage"), ("religious", "rate_marriage")]
        + [(name, "affairs") for name in ("age", "religious", "rate_marriage")]
    )
    model = otp.Model(graph, {node: m.Normal() for node in graph.nodes})
    result = otp.fit(model, table)
    effect = result.effect("rate_marriage", "affairs", values=(4.0, 5.0))
    truth = sm.OLS(table["affairs"], sm.add_constant(table[["age", "religious", "rate_marriage"]])).fit()
    row = effect.table.iloc[0]
    assert row["effect"] == pytest.approx(truth.params["rate_marriage"], rel=1e-3)
    assert row["std_error"] == pytest.approx(truth.bse["rate_marriage"], rel=1e-2)  # divided by n, not by n - 4
    assert effect.identification.by == "back-door"
    assert set(effect.identification.nodes) == {"age", "religious"}


def test_breast_cancer_gaps_are_left_out_as_naive_bayes_would():
    data = load_breast_cancer(as_frame=True)
    columns = ["mean radius", "mean texture", "mean smoothness"]
    table = data.data[columns].assign(target=data.target)
    graph = otp.Graph([("target", name) for name in columns])
    model = otp.Model(graph, {"target": m.Categorical(2)} | {name: m.Normal() for name in columns})
    otp.fit(model, table)
    truth = GaussianNB(var_smoothing=0.0).fit(table[columns].to_numpy(), table["target"])
    np.testing.assert_allclose(
        model.predict_proba(table, "target"), truth.predict_proba(table[columns].to_numpy()), atol=1e-4
    )
    gaps = table.copy()
    gaps["mean texture"] = np.nan
    fewer = GaussianNB(var_smoothing=0.0).fit(table[columns].drop(columns="mean texture").to_numpy(), table["target"])
    np.testing.assert_allclose(
        model.predict_proba(gaps, "target"),
        fewer.predict_proba(table[columns].drop(columns="mean texture").to_numpy()),
        atol=1e-4,
    )
    classes = model.query("target", given={"mean radius": 12.0})
    assert classes.sum() == pytest.approx(1.0)


def test_nile_and_sunspots_are_forecast_as_by_an_autoregression():
    from statsmodels.tsa.ar_model import AutoReg

    nile = sm.datasets.nile.load_pandas().data[["volume"]].astype(float)
    sunspots = sm.datasets.sunspots.load_pandas().data.rename(columns={"SUNACTIVITY": "spots"})[["spots"]]
    for table, name, lags in ((nile, "volume", 1), (sunspots, "spots", 2)):
        graph = otp.Graph([otp.lag(name, name, by) for by in range(1, lags + 1)], nodes=[name])
        model = otp.Model(graph, {name: m.Normal()})
        otp.fit(model, table)
        truth = AutoReg(table[name].to_numpy(), lags).fit()
        forecast = model.forecast(table, 8, level=0.9, draws=4000)
        expected = truth.predict(len(table), len(table) + 7)
        spread = float(np.std(table[name]))
        np.testing.assert_allclose(forecast[name], expected, atol=0.08 * spread)
        assert (forecast[f"{name}.lower"] < forecast[name]).all()
        assert (forecast[f"{name}.upper"] > forecast[name]).all()


def test_numbers_in_a_real_table_are_predicted_around_gaps():
    table = sm.datasets.fair.load_pandas().data[["rate_marriage", "age", "yrs_married"]].iloc[:400].astype(float)
    graph = otp.Graph([("age", "yrs_married"), ("age", "rate_marriage"), ("yrs_married", "rate_marriage")])
    model = otp.Model(graph, {node: m.Normal() for node in graph.nodes})
    otp.fit(model, table)
    mean, covariance = table.mean(), table.cov(ddof=0)
    gaps = table.copy()
    gaps.loc[::2, "rate_marriage"] = np.nan
    predicted = model.predict(gaps, "yrs_married")
    for row in (0, 1):
        seen = [name for name in ("age", "rate_marriage") if pd.notna(gaps.loc[row, name])]
        gain = np.linalg.solve(covariance.loc[seen, seen], covariance.loc[seen, "yrs_married"])
        expected = mean["yrs_married"] + gain @ (gaps.loc[row, seen] - mean[seen])
        assert predicted[row] == pytest.approx(expected, abs=1e-3)
