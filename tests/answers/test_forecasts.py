"""Forecasts against the closed form of an autoregression and of a Markov chain."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.answers.notes import point_of
from otpdag.answers.standard_errors import information_at, likely_points
from otpdag.errors import ModelError


def test_an_autoregression_returns_to_its_mean():
    model = otp.Model(otp.Graph([otp.lag("x", "x")], nodes=["x"]), {"x": m.Normal()})
    model.set_params({"x": {"loc": 1.0, "weight": 0.5, "scale": 2.0}})
    table = model.forecast(otp.Sequences([pd.DataFrame({"x": [0.0, 10.0]})]), 3, level=0.9, draws=20_000)
    mean = [1 + 0.5 * 10, 1 + 0.5 * 6, 1 + 0.5 * 4]
    variance = np.cumsum(4.0 * 0.25 ** np.arange(3))
    assert table["x"].tolist() == pytest.approx(mean, abs=0.07)
    reach = 1.645 * np.sqrt(variance)
    assert (table["x.upper"] - table["x"]).tolist() == pytest.approx(reach, rel=0.04)
    assert list(table.index) == [(0, 1), (0, 2), (0, 3)]


def test_sequences_of_every_length_go_on_from_their_own_ends():
    """By a plain loop: two lags and a parent that is given; before the first step there is nothing but that step."""
    graph = otp.Graph([otp.lag("x", "x"), otp.lag("x", "x", by=2), ("u", "x")])
    model = otp.Model(graph, {"u": m.Given(), "x": m.Normal()})
    model.set_params({"x": {"loc": 1.0, "weight": [2.0, 0.5, -0.3], "scale": 1e-7}})
    seen = [[4.0], [7.0, -3.0], [1.0, 2.0, 5.0, -6.0]]
    rows = [pd.DataFrame({"u": np.zeros(len(one)), "x": one}) for one in seen]
    future = np.random.default_rng(0).normal(size=(3, 4))
    table = model.forecast(otp.Sequences(rows), 4, draws=2, given=pd.DataFrame({"u": future.ravel()}))
    for number, one in enumerate(seen):
        path = [one[0], *one]
        for step, u in enumerate(future[number], start=1):
            path.append(1.0 + 2.0 * u + 0.5 * path[-1] - 0.3 * path[-2])
            assert table.loc[(number, step), "x"] == pytest.approx(path[-1], abs=1e-5)


def test_a_hidden_chain_forgets_its_state():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Categorical(2)})
    stay = np.array([[0.9, 0.1], [0.3, 0.7]])
    model.set_params({"z": {"probs": stay}, "z[0]": {"probs": [0.5, 0.5]}, "x": {"probs": [[1.0, 0.0], [0.0, 1.0]]}})
    table = model.forecast(otp.Sequences([pd.DataFrame({"x": [0, 1, 1]})]), 30, draws=5000)
    after = np.array([0.0, 1.0])
    for step in range(1, 31):
        after = after @ stay
        assert table.loc[(0, step), "x.probability"] == pytest.approx(after.max(), abs=0.03)
    assert table.loc[(0, 30), "x"] == 0


def test_only_sequences_have_a_future():
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal(loc=0.0, scale=1.0)}).set_params({})
    with pytest.raises(ModelError, match="forecast is for graphs with lagged edges"):
        model.forecast(pd.DataFrame({"x": [1.0]}), 2)


def test_few_steps_leave_the_parameters_open_and_a_result_says_so():
    rng = np.random.default_rng(0)
    steps = pd.DataFrame({"x": np.cumsum(rng.normal(size=30))})
    result = otp.fit(otp.Model(otp.Graph([otp.lag("x", "x")], nodes=["x"]), {"x": m.Normal()}), steps, seed=0)
    known, unsure = result.model.forecast(steps, 8, draws=4000), result.forecast(steps, 8, draws=4000)
    reach = [float((one["x.upper"] - one["x.lower"]).iloc[-1]) for one in (known, unsure)]
    assert 1.1 < reach[1] / reach[0] < 3
    assert list(unsure.columns) == list(known.columns)
    pd.testing.assert_frame_equal(result.forecast(steps, 3, draws=100), result.forecast(steps, 3, draws=100))


def test_parameters_of_few_steps_are_drawn_by_their_likelihood():
    rng = np.random.default_rng(1)
    steps = pd.DataFrame({"x": rng.normal(size=13)})
    result = otp.fit(otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": m.Normal()}), steps, seed=0)
    problem, point = result.problem, point_of(result.model.fitted, result.problem.shapes)
    drawn = likely_points(problem, point, information_at(problem, point), 400, seed=0)
    scale, best = (problem.naturals(at)["x"]["scale"].flatten() for at in (drawn, point))
    # of a regression with a flat prior: a chi-squared variable with as many degrees of freedom as steps less slopes
    ends = [40, 200, 360]
    told = (12 * (best / scale) ** 2).sort().values[ends]
    np.testing.assert_allclose(told, stats.chi2(10).ppf([0.1, 0.5, 0.9]), rtol=0.12)


@pytest.mark.parametrize("level", [0.6, 0.9])
def test_an_interval_after_few_steps_is_that_of_a_regression_with_unknown_scale(level):
    rng = np.random.default_rng(2)
    x = rng.normal(size=13)
    result = otp.fit(otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": m.Normal()}), pd.DataFrame({"x": x}), seed=0)
    design, now = np.column_stack([np.ones(12), x[:-1]]), np.array([1.0, x[-1]])
    slopes, squares, *_ = np.linalg.lstsq(design, x[1:])
    spread = np.sqrt(squares[0] / 10 * (1 + now @ np.linalg.inv(design.T @ design) @ now))
    told = result.forecast(pd.DataFrame({"x": x}), 1, level=level, draws=20_000, seed=1).iloc[0]
    reach = stats.t(10).ppf((1 + level) / 2) * spread
    assert told["x"] == pytest.approx(slopes @ now, abs=0.1 * spread)
    assert told["x.upper"] == pytest.approx(slopes @ now + reach, abs=0.1 * spread)
    assert told["x.lower"] == pytest.approx(slopes @ now - reach, abs=0.1 * spread)


def test_a_forecast_by_what_no_data_tell_has_no_interval():
    rng = np.random.default_rng(0)
    x = np.zeros(120)
    for step in range(1, 120):
        x[step] = 0.6 * x[step - 1] + rng.normal()
    table = pd.DataFrame({"x": x, "g": 1.0})
    model = otp.Model(otp.Graph([otp.lag("x", "x"), ("g", "x")]), {"x": m.Normal(), "g": m.Given()})
    result = otp.fit(model, table)
    # the slope of a covariate that never varied and the intercept trade off: only their sum is known
    same, other = (result.forecast(table, 2, given=pd.DataFrame({"g": [g, g]}), draws=100) for g in (1.0, 5.0))
    assert same["x.lower"].notna().all()
    assert other["x.lower"].isna().all()
