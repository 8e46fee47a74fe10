"""Nodes with a network: they converge by default, are shrunk by a prior, and do not follow the noise."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m

GRID = np.linspace(-1.8, 1.8, 31)


def curved(rows: int, seed: int, unit: float = 1.0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=rows)
    return pd.DataFrame({"x": x, "y": unit * (3.0 + np.sin(2 * x) + 0.3 * rng.normal(size=rows))})


def fitted(table: pd.DataFrame, **options) -> otp.FitResult:
    mechanisms = {"x": m.Normal(), "y": m.Normal(**({"network": (12,)} | options))}
    return otp.fit(otp.Model(otp.Graph([("x", "y")]), mechanisms), table, seed=1, progress=False)


def curve(result: otp.FitResult) -> np.ndarray:
    return np.ravel(result.model.predict(pd.DataFrame({"x": GRID}), "y"))


@pytest.mark.parametrize("gaps", [0.0, 0.3])
def test_a_network_converges_and_finds_a_curve(gaps):
    table = curved(250, seed=5)
    table.loc[np.random.default_rng(6).random(250) < gaps, "x"] = np.nan
    result = fitted(table)
    assert result.status.converged
    assert "ridge(0.1) on y.network" in str(result.summary())
    error = np.sqrt(np.mean((curve(result) - 3.0 - np.sin(2 * GRID)) ** 2))
    assert error < (0.11 if gaps else 0.16)  # noise of 0.3, about nine free coefficients: 0.06


@pytest.mark.parametrize("options", [{}, {"network": (), "terms": "spline(x, 12)"}], ids=["network", "spline"])
def test_gaps_below_a_steep_curve_are_summed_exactly_and_cost_no_accuracy(options):
    table, truth = curved(600, seed=7), 2 * np.exp(-4 * GRID**2)
    table["y"] = 2 * np.exp(-4 * table["x"] ** 2) + 0.5 * np.random.default_rng(8).normal(size=600)
    gaps = table.assign(x=table["x"].where(np.random.default_rng(9).random(600) > 0.3))
    result, complete = fitted(gaps, **options), fitted(gaps.dropna().reset_index(drop=True), **options)
    errors = [np.sqrt(np.mean((curve(one) - truth) ** 2)) for one in (result, complete)]
    assert errors[0] < 1.2 * errors[1]
    x, y = (result.model.params()[node] for node in "xy")
    at, step = np.linspace(x["loc"] - 7 * x["scale"], x["loc"] + 7 * x["scale"], 4001, retstep=True)
    middle = np.ravel(result.model.predict(pd.DataFrame({"x": at}), "y"))
    alone = gaps.loc[gaps["x"].isna(), "y"].to_numpy()
    density = stats.norm.pdf(alone[:, None], middle, y["scale"]) @ stats.norm.pdf(at, x["loc"], x["scale"]) * step
    rows = pd.DataFrame({"x": np.nan, "y": alone})
    assert result.model.log_likelihood(rows) == pytest.approx(np.log(density).sum(), abs=0.5)


def test_units_of_a_column_change_nothing_but_its_units():
    plain, large = (fitted(curved(80, seed=7, unit=unit)) for unit in (1.0, 1e4))
    np.testing.assert_allclose(curve(large) / 1e4, curve(plain), atol=0.02)


def test_the_estimate_is_where_likelihood_times_prior_is_largest():
    table, prior = curved(80, seed=8), 0.5
    result = fitted(table, network_prior=prior)
    own, spread = result.model.params()["y"], table["y"].std(ddof=0)
    x = ((table["x"] - table["x"].mean()) / table["x"].std(ddof=0)).to_numpy()

    def height(moved: dict[str, np.ndarray]) -> float:
        first, bias, last, level = (moved[f"network.{name}"] for name in ("0.weight", "0.bias", "1.weight", "1.bias"))
        inner = x[:, None] * first + bias
        mean = own["loc"] + (inner / (1 + np.exp(-inner))) @ last[:, 0] + level[0]
        shrunk = sum((one**2).sum() for one in (first, bias, last / spread, level / spread))
        return float(stats.norm.logpdf(table["y"], mean, own["scale"]).sum() - 0.5 * prior * shrunk)

    layers = {name: value.double().numpy()[0] for name, value in result.model.fitted.naturals["y"].items()}
    best, rng = height(layers), np.random.default_rng(0)
    for _ in range(40):
        step = {name: 0.01 * rng.normal(size=value.shape) for name, value in layers.items()}
        assert height({name: value + step[name] for name, value in layers.items()}) < best


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.errors.ConvergenceWarning")  # it would follow the noise for long
def test_without_a_prior_it_is_maximum_likelihood():
    table = curved(80, seed=9)
    likely, shrunk = fitted(table, network_prior=0.0), fitted(table)
    assert likely.model.log_likelihood(table) > shrunk.model.log_likelihood(table) + 1.0
    assert "ridge" not in str(likely.summary())


def test_a_negative_precision_is_refused():
    with pytest.raises(otp.ModelError, match="network_prior must be a number of at least 0; got -1"):
        m.Normal(network=(4,), network_prior=-1)
