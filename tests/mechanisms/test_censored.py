"""Intervals and waiting times beside lifelines, zeros of their own beside statsmodels, and both beside likelihoods."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import torch
from scipy import optimize, special, stats
from statsmodels.discrete.count_model import ZeroInflatedPoisson

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import DataError, ModelError
from otpdag.spaces import Discrete, Real
from otpdag.testing import check_mechanism

ROWS = 400
FAMILY = m.Family("t", (("x", Real()), ("z", Discrete(2))))


@pytest.fixture(scope="module")
def times():
    rng = np.random.default_rng(8)
    x, z = rng.normal(50, 10, ROWS), rng.integers(0, 2, ROWS)
    time, end = np.exp(2 + 0.02 * x - 0.4 * z) * rng.weibull(1.6, ROWS), np.exp(3 + 0.4 * rng.normal(size=ROWS))
    return pd.DataFrame({"x": x, "z": z, "time": np.minimum(time, end), "seen": time <= end})


def fitted(mechanism, rows, node="t"):
    nodes = {"x": m.Normal(), "z": m.Categorical(2), node: mechanism}
    return otp.fit(otp.Model(otp.Graph([("x", node), ("z", node)]), nodes), rows)


def lines(result):
    own = result.standard_errors().query("node == 't'")
    return own["estimate"].to_numpy(), own["std_error"].to_numpy()


KINDS = [(m.Weibull, "WeibullAFTFitter"), (m.LogNormal, "LogNormalAFTFitter")]


@pytest.mark.filterwarnings("ignore::Warning")  # lifelines' own
@pytest.mark.parametrize(("kind", "other"), KINDS)
def test_censored_times_are_those_of_lifelines(times, kind, other):
    ends = times.assign(**{"t.0": times["time"], "t.1": times["time"].where(times["seen"])})
    found, errors = lines(fitted(kind(terms="x + C(z)", censored=True), ends[["x", "z", "t.0", "t.1"]]))
    theirs = getattr(pytest.importorskip("lifelines"), other)().fit(times, "time", "seen").summary
    order = [2, 0, 1]  # the level comes last there
    np.testing.assert_allclose(found[:3], theirs["coef"].iloc[order], rtol=1e-4)
    np.testing.assert_allclose(errors[:3], theirs["se(coef)"].iloc[order], rtol=1e-4)
    np.testing.assert_allclose(np.log(found[3]), theirs["coef"].iloc[3], rtol=1e-3)


@pytest.mark.filterwarnings("ignore::Warning")  # lifelines' own
@pytest.mark.parametrize(("kind", "other"), KINDS)
def test_intervals_are_those_of_lifelines(times, kind, other):
    low = np.floor(times["time"] / 4) * 4
    high = np.where(low >= 36, np.inf, low + 4)
    rows = times[["x", "z"]].assign(t=pd.arrays.IntervalArray.from_arrays(low, high))
    found, errors = lines(fitted(kind(terms="x + C(z)", censored=True), rows))
    given = times[["x", "z"]].assign(low=np.maximum(low, 1e-9), high=high)
    theirs = getattr(pytest.importorskip("lifelines"), other)().fit_interval_censoring(given, "low", "high").summary
    np.testing.assert_allclose(found[1:3], theirs["coef"].iloc[:2], rtol=1e-4)
    np.testing.assert_allclose(errors[1:3], theirs["se(coef)"].iloc[:2], rtol=1e-4)


def test_limits_of_detection_of_a_normal_value():
    rng = np.random.default_rng(2)
    x = rng.normal(size=ROWS)
    y = 1 + 0.5 * x + rng.normal(size=ROWS)
    hidden = y < 0.3
    rows = pd.DataFrame({"x": x, "t.0": np.where(hidden, np.nan, y), "t.1": np.where(hidden, 0.3, y)})
    model = otp.Model(otp.Graph([("x", "t")]), {"x": m.Normal(), "t": m.Normal(censored=True)})
    found = otp.fit(model, rows).model

    def loss(p):
        line, scale = p[0] + p[1] * x, np.exp(p[2])
        return -np.where(hidden, stats.norm.logcdf(0.3, line, scale), stats.norm.logpdf(y, line, scale)).sum()

    best = optimize.minimize(loss, np.zeros(3), tol=1e-10).x
    own = found.params()["t"]
    np.testing.assert_allclose([own["loc"], *own["weight"], np.log(own["scale"])], best, rtol=1e-4, atol=1e-5)
    drawn = found.impute(rows, seed=0)
    assert (drawn["t.0"][hidden] <= 0.3).all()
    np.testing.assert_array_equal(drawn["t.1"], drawn["t.0"])


def test_gaps_in_parents_of_a_time(times):
    rng = np.random.default_rng(3)
    ends = times.assign(**{"t.0": times["time"], "t.1": times["time"].where(times["seen"])})[["x", "z", "t.0", "t.1"]]
    gaps = ends.copy()
    gaps[["x", "z"]] = ends[["x", "z"]].mask(rng.random((ROWS, 2)) < 0.2)
    whole, partly = (lines(fitted(m.Weibull(terms="x + C(z)", censored=True), rows)) for rows in (ends, gaps))
    assert (np.abs(whole[0] - partly[0]) < 2 * partly[1]).all()


def test_an_exponential_time_has_the_rate_of_events(times):
    ends = pd.DataFrame({"t.0": times["time"], "t.1": times["time"].where(times["seen"])})
    model = otp.fit(otp.Model(otp.Graph([], nodes=["t"]), {"t": m.Exponential(censored=True)}), ends).model
    assert model.params()["t"]["log_mean"] == pytest.approx(np.log(times["time"].sum() / times["seen"].sum()), rel=1e-5)


def test_densities_are_those_of_scipy():
    node = m.Weibull(log_scale=0.3, shape=1.7).setup(m.Family("t"))
    value = torch.tensor([[[0.2], [1.0], [4.0]]]).double()
    told = node.log_prob(node.natural({}), value, {})
    np.testing.assert_allclose(told[0], stats.weibull_min.logpdf([0.2, 1, 4], 1.7, scale=np.exp(0.3)))
    assert node.mean(node.natural({}), {}).item() == pytest.approx(np.exp(0.3) * special.gamma(1 + 1 / 1.7))


@pytest.mark.parametrize(
    "mechanism",
    [
        m.Weibull(),
        m.Exponential(),
        m.Poisson(extra_zeros="inflated"),
        m.Poisson(extra_zeros="hurdle"),
        m.NegativeBinomial(extra_zeros="inflated"),
    ],
)
def test_the_contract_holds(mechanism):
    check_mechanism(mechanism, FAMILY)


def test_inflated_counts_are_those_of_statsmodels():
    rng = np.random.default_rng(4)
    x = rng.normal(size=ROWS)
    y = np.where(rng.random(ROWS) < 0.3, 0, rng.poisson(np.exp(0.6 + 0.4 * x)))
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Poisson(extra_zeros="inflated")})
    found = otp.fit(model, pd.DataFrame({"x": x, "y": y})).model.params()["y"]
    other = ZeroInflatedPoisson(y, sm.add_constant(x)).fit(disp=0, maxiter=500, gtol=1e-8)
    np.testing.assert_allclose([found["log_rate"], *found["weight"]], other.params[1:], rtol=1e-4)
    np.testing.assert_allclose(special.logit(found["zeros"]), other.params[0], rtol=1e-4)


def test_a_hurdle_is_passed_by_the_share_that_is_not_zero():
    rng = np.random.default_rng(5)
    y = np.where(rng.random(ROWS) < 0.4, 0, np.maximum(rng.poisson(2.0, ROWS), 1))
    found = otp.fit(
        otp.Model(otp.Graph([], nodes=["y"]), {"y": m.Poisson(extra_zeros="hurdle")}), pd.DataFrame({"y": y})
    ).model
    assert found.params()["y"]["zeros"] == pytest.approx((y == 0).mean(), rel=1e-4)
    rate = np.exp(found.params()["y"]["log_rate"])
    assert rate / (1 - np.exp(-rate)) == pytest.approx(y[y > 0].mean(), rel=1e-4)
    drawn = found.sample(20_000, seed=1)["y"]
    assert (drawn == 0).mean() == pytest.approx((y == 0).mean(), abs=0.01)
    assert drawn.mean() == pytest.approx(y.mean(), abs=0.05)


def test_what_cannot_be_is_refused(times):
    with pytest.raises(ModelError, match="dim=2"):
        m.Normal(2, censored=True)
    with pytest.raises(ModelError, match="hurdle"):
        m.Poisson(extra_zeros="many")
    with pytest.raises(ModelError, match="censored"):
        otp.Model(otp.Graph([("t", "y")]), {"t": m.Weibull(censored=True), "y": m.Normal()})
    wrong = times[["x", "z"]].assign(**{"t.0": 2.0, "t.1": 1.0})
    with pytest.raises(DataError, match="not above the upper end"):
        fitted(m.Weibull(censored=True), wrong)


@pytest.mark.parametrize("gaps", [0.0, 0.2])
def test_a_censored_number_is_predicted_as_the_number_that_it_is(gaps: float) -> None:
    rng = np.random.default_rng(5)
    table = pd.DataFrame({"x": rng.normal(size=200)})
    time, end = np.exp(1 + 0.5 * table["x"]) * rng.weibull(1.7, 200), rng.exponential(6.0, 200)
    table["t.0"], table["t.1"] = np.minimum(time, end), np.where(time < end, time, np.inf)
    table["x"] = table["x"].mask(rng.random(200) < gaps)
    model = otp.Model(otp.Graph([("x", "t")]), {"x": m.Normal(), "t": m.Weibull(censored=True)})
    result = otp.fit(model, table)
    t = model.params()["t"]
    means = np.exp(t["log_scale"] + t["weight"][0] * np.array([0.0, 1.0])) * special.gamma(1 + 1 / t["shape"])
    asked = pd.DataFrame({"x": [0.0, 1.0], "t.0": [1.0, np.nan], "t.1": [np.inf, np.nan]})
    predicted = model.predict(asked, "t")
    assert predicted.name == "t"
    np.testing.assert_allclose(predicted, means, rtol=1e-2)
    assert model.query("t", {"x": 0.0})["mean"] == pytest.approx(means[0], rel=1e-2)
    effect = result.effect("x", "t").table
    assert effect["effect"].item() == pytest.approx(means[1] - means[0], rel=2e-2)
    assert effect["std_error"].notna().all()


def test_ends_are_read_alike_from_frames_mappings_and_arrays(times):
    high = times["time"].where(times["seen"], np.inf)
    ends = pd.arrays.IntervalArray.from_arrays(times["time"], high)
    both = np.stack([times["time"], high], 1)
    told = (
        pd.DataFrame({"t.0": both[:, 0], "t.1": both[:, 1]}),
        {"t": both},
        {"t": ends},
        {"t": pd.Series(ends)},
        both,
    )
    models = [otp.Model(otp.Graph([], nodes=["t"]), {"t": m.Exponential(censored=True)}) for _ in told]
    losses = {otp.fit(model, rows).loss for model, rows in zip(models, told, strict=True)}
    assert len(losses) == 1


def test_a_number_may_stand_for_the_two_ends_of_what_is_known(times):
    ends = times[["x"]].assign(**{"t.0": times["time"], "t.1": times["time"].where(times["seen"])})
    model = otp.Model(otp.Graph([("x", "t")]), {"x": m.Normal(), "t": m.Weibull(censored=True)})
    otp.fit(model, ends)
    one, two = (model.query("x", given={"t": value}) for value in (3.0, (3.0, 3.0)))
    pd.testing.assert_series_equal(one, two)
    with pytest.raises(ModelError, match=r"values must be at least two: .* \(2 cells each\); got \(0, 1\)"):
        model.effect("t", "x")
