"""Rows that are kept between two limits: estimates and errors beside scipy and statsmodels, means, draws, refusals."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize, stats
from statsmodels.discrete.truncated_model import TruncatedLFPoisson

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.spaces import Real
from otpdag.testing import check_mechanism


def kept(draw: Callable[[np.ndarray], np.ndarray], low: float, high: float, rows: int = 400) -> pd.DataFrame:
    """Rows whose value lies between the limits."""
    x = np.random.default_rng(812).normal(size=20 * rows)
    y = draw(x)
    inside = (y >= low) & (y <= high)
    return pd.DataFrame({"x": x[inside], "y": y[inside]}).head(rows)


def fitted(mechanism: m.Mechanism, table: pd.DataFrame) -> otp.FitResult:
    return otp.fit(otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": mechanism}), table)


def normal(x: np.ndarray) -> np.ndarray:
    return 0.5 + x + 1.5 * np.random.default_rng(813).normal(size=len(x))


@pytest.mark.parametrize("limits", [(0.0, None), (None, 2.0), (-1.0, 2.5)])
def test_normal_regressions_are_those_of_scipy(limits):
    low, high = (far if end is None else end for end, far in zip(limits, (-np.inf, np.inf), strict=True))
    table = kept(normal, low, high)

    def loss(p: np.ndarray) -> float:
        line, scale = p[0] + p[1] * table["x"], np.exp(p[2])
        return -stats.truncnorm.logpdf(table["y"], (low - line) / scale, (high - line) / scale, line, scale).sum()

    best = optimize.minimize(loss, np.zeros(3), method="BFGS", options={"gtol": 1e-4})
    result = fitted(m.Normal(truncated=limits), table)
    params = result.model.params()["y"]
    found = [float(params["loc"]), float(params["weight"][0]), float(np.log(params["scale"]))]
    np.testing.assert_allclose(found, best.x, atol=2e-4)
    own = result.standard_errors().query("node == 'y'")["std_error"].to_numpy()
    curvature = np.linalg.inv(optimize.approx_fprime(best.x, lambda p: optimize.approx_fprime(p, loss, 1e-5), 1e-4))
    np.testing.assert_allclose(own[:2], np.sqrt(np.diag(curvature))[:2], rtol=0.02)
    at, line = pd.DataFrame({"x": [-1.0, 2.0]}), found[0] + found[1] * np.array([-1.0, 2.0])
    ends = [(end - line) / np.exp(found[2]) for end in (low, high)]
    mean = stats.truncnorm.mean(*ends, line, np.exp(found[2]))
    np.testing.assert_allclose(result.model.predict(at, "y", partial=True), mean, atol=1e-5)
    drawn = result.model.sample(2000, seed=0)["y"]
    assert low <= drawn.min() <= drawn.max() <= high
    assert result.model.check(table)["adjusted"].min() > 0.01


def test_counts_without_zeros_are_those_of_statsmodels():
    table = kept(lambda x: np.random.default_rng(814).poisson(np.exp(0.2 + 0.6 * x)), 1, np.inf)
    result = fitted(m.Poisson(truncated=(1, None)), table)
    design = np.column_stack([np.ones(len(table)), table["x"]])
    other = TruncatedLFPoisson(table["y"], design, truncation=0).fit(disp=0, gtol=1e-8)
    own = result.standard_errors().query("node == 'y'")
    np.testing.assert_allclose(own["estimate"], other.params, atol=1e-5)
    np.testing.assert_allclose(own["std_error"], other.bse, rtol=1e-3)
    rate = np.exp(other.params @ [1.0, 0.7])
    at = pd.DataFrame({"x": [0.7]})
    assert float(result.model.predict(at, "y", partial=True).iloc[0]) == pytest.approx(
        rate / -np.expm1(-rate), rel=1e-4
    )
    assert result.model.sample(500, seed=0)["y"].min() >= 1


@pytest.mark.parametrize("kind", [m.Weibull, m.Exponential, m.LogNormal])
def test_times_are_found_where_short_ones_were_not_recorded(kind):
    """Of the truth the log-likelihood is at most a chi-square's 1 % below."""
    rng = np.random.default_rng(815)
    quantiles = {m.Weibull: lambda u: stats.weibull_min.ppf(u, 1.5), m.Exponential: stats.expon.ppf}
    of_level = quantiles.get(kind, lambda u: stats.lognorm.ppf(u, 0.8))
    table = kept(lambda x: np.exp(0.4 * x) * of_level(rng.random(len(x))), 0.7, np.inf)
    model = fitted(kind(truncated=(0.7, None)), table).model
    best = model.log_likelihood(table)
    truth = {"Weibull": {"log_scale": 0.0, "shape": 1.5}, "Exponential": {"log_mean": 0.0}}
    params = truth.get(kind.__name__, {"loc": 0.0, "scale": 0.8})
    model.set_params({"x": model.params()["x"], "y": {**params, "weight": [0.4]}})
    assert 0 <= best - model.log_likelihood(table) < 0.5 * stats.chi2.ppf(0.99, 3)


@pytest.mark.parametrize("limits", [(-0.5, 1.0), (None, 0.4), (3.0, None)])
def test_noise_makes_means_and_values_between_limits_and_is_found_again(limits):
    node = m.Normal(truncated=limits, loc=0.3, scale=0.8).setup(m.Family("x"))
    params, noise = node.natural({}), torch.linspace(-3, 3, 31, dtype=torch.float64).reshape(1, -1, 1)
    low, high = (far if end is None else end for end, far in zip(limits, (-np.inf, np.inf), strict=True))
    other = stats.truncnorm((low - 0.3) / 0.8, (high - 0.3) / 0.8, 0.3, 0.8)
    value = node.forward(params, {}, noise)
    np.testing.assert_allclose(value.flatten(), other.ppf(stats.norm.cdf(noise.flatten())), rtol=1e-7)
    np.testing.assert_allclose(node.abduct(params, value, {}, torch.zeros(1)), noise, atol=1e-6)
    np.testing.assert_allclose(node.log_prob(params, value, {})[0], other.logpdf(value.flatten()), atol=1e-9)
    assert float(node.mean(params, {})) == pytest.approx(other.mean(), abs=1e-6)


def test_counts_between_limits_keep_the_contract_and_gaps_say_nothing():
    check_mechanism(m.Poisson(truncated=(1, 4)), m.Family("x", (("load", Real()),)))
    table = kept(normal, 0.0, np.inf, 100)
    model = fitted(m.Normal(truncated=(0, None)), table).model
    shown = model.log_likelihood(table, per_row=True)
    hidden = model.log_likelihood(table.assign(y=np.nan), per_row=True)
    alone = stats.norm.logpdf(table["x"], model.params()["x"]["loc"], model.params()["x"]["scale"])
    np.testing.assert_allclose(hidden, alone, atol=1e-9)
    assert not np.allclose(shown, hidden)


def test_densities_between_limits_sum_to_one():
    node = m.Poisson(truncated=(2, 5), rate=2.0).setup(m.Family("x"))
    value = torch.arange(2.0, 6.0, dtype=torch.float64).reshape(1, -1, 1)
    assert node.log_prob(node.natural({}), value, {}).exp().sum() == pytest.approx(1.0)


def test_rows_beyond_the_limits_are_named():
    table = kept(normal, -1.0, np.inf, 50)
    with pytest.raises(otp.DataError, match="node 'y' is truncated to \\[0, None\\]; a row has -0"):
        fitted(m.Normal(truncated=(0, None)), table)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda: otp.Model(otp.Graph([("u", "y")]), {"u": m.Normal(truncated=(0, 1)), "y": m.Normal()}),
            "its parent 'u'",
        ),
        (lambda: m.Normal(truncated=(1, 0)), "a lower and a larger upper limit"),
        (lambda: m.Normal(truncated=3.0), "a lower and a larger upper limit"),
        (lambda: m.Normal(truncated=(0, 1), censored=True), "not both"),
        (lambda: m.Poisson(truncated=(1, None), extra_zeros="hurdle"), "not both"),
        (
            lambda: otp.Model(
                otp.Graph([("u", "y")], hidden=["u"]), {"u": m.Normal(truncated=(0, 1)), "y": m.Normal()}
            ),
            "is hidden",
        ),
    ],
)
def test_limits_that_make_no_sense_are_refused(made, words):
    with pytest.raises(otp.ModelError, match=words):
        made()
