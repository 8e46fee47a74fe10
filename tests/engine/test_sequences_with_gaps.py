"""Gaps in numbers that later steps are drawn from: maximum likelihood, whatever is missing."""

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

import otpdag as otp
from otpdag import mechanisms as m


def autoregression(steps: int, seed: int, slope: float = 0.8) -> np.ndarray:
    rng = np.random.default_rng(seed)
    series = np.zeros(steps)
    for step in range(1, steps):
        series[step] = slope * series[step - 1] + rng.normal()
    return series


def lost_at_random(series: np.ndarray, seed: int) -> np.ndarray:
    """Steps are often lost before a high value that was recorded."""
    rng = np.random.default_rng(seed)
    seen = np.ones(len(series), dtype=bool)
    for step in range(len(series) - 1, 0, -1):
        if seen[step] and series[step] > 0.5:
            seen[step - 1] = rng.random() > 0.7
    seen[0] = True
    return np.where(seen, series, np.nan)


def exact_autoregression(series: np.ndarray) -> np.ndarray:
    """The maximum of the likelihood of what is seen: k steps ahead, the mean is a^k x and the variances add up."""
    at = np.flatnonzero(~np.isnan(series))

    def loss(point: np.ndarray) -> float:
        level, slope, log_scale = point
        powers = [slope ** np.arange(ahead) for ahead in np.diff(at)]
        mean = [slope ** len(p) * series[i] + level * p.sum() for i, p in zip(at[:-1], powers, strict=True)]
        scale = [np.exp(log_scale) * np.sqrt((p**2).sum()) for p in powers]
        return -stats.norm.logpdf(series[at[1:]], mean, scale).sum()

    found = optimize.minimize(loss, [0.0, 0.5, 0.0], method="BFGS", options={"gtol": 1e-8}).x
    return np.array([found[0], found[1], np.exp(found[2])])


def gaussian(params: dict, steps: int, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of (x, y) in all steps after the first two: x -> x, x -> y, and x -> y two steps later."""
    x, y = params["x"], params["y"]
    size = 2 * steps
    slopes, level, scale = np.zeros((size, size)), np.zeros(size), np.zeros(size)
    for step in range(steps):
        here = 2 * step
        level[here], scale[here] = x["loc"], x["scale"]
        level[here + 1], scale[here + 1] = y["loc"], y["scale"]
        slopes[here + 1, here] = y["weight"][0]
        if step:
            slopes[here, here - 2] = x["weight"][0]
        if step > 1:
            slopes[here + 1, here - 4] = y["weight"][1]
    level[0] += x["weight"][0] * first[-1]
    level[1] += y["weight"][1] * first[-2]
    if steps > 1:
        level[3] += y["weight"][1] * first[-1]
    effects = np.linalg.inv(np.eye(size) - slopes)
    return effects @ level, effects @ np.diag(scale**2) @ effects.T


@pytest.fixture(scope="module")
def two_columns() -> tuple[otp.Model, otp.FitResult, pd.DataFrame]:
    rng = np.random.default_rng(11)
    x = autoregression(60, 11, 0.6)
    y = 0.5 * x + rng.normal(size=60) * 0.5
    y[2:] += 0.3 * x[:-2]
    table = pd.DataFrame({"x": x, "y": y})
    table[2:] = table[2:].mask(rng.random((58, 2)) < 0.35)
    graph = otp.Graph([otp.lag("x", "x"), ("x", "y"), otp.lag("x", "y", 2)])
    model = otp.Model(graph, {"x": m.Normal(), "y": m.Normal()})
    return model, otp.fit(model, table, seed=0, progress=False), table


@pytest.mark.parametrize("which", ["at random", "completely at random"])
def test_autoregression_is_maximum_likelihood(which: str) -> None:
    series = autoregression(400, 3)
    rng = np.random.default_rng(4)
    gaps = lost_at_random(series, 4) if which == "at random" else np.where(rng.random(400) < 0.4, np.nan, series)
    model = otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": m.Normal()})
    otp.fit(model, pd.DataFrame({"x": gaps}), seed=0, progress=False)
    own = model.params()["x"]
    estimate = [float(own["loc"]), float(own["weight"][0]), float(own["scale"])]
    np.testing.assert_allclose(estimate, exact_autoregression(gaps), atol=1e-5)


def test_counts_are_summed_exactly() -> None:
    rng = np.random.default_rng(6)
    counts = np.ones(150)
    for step in range(1, 150):
        counts[step] = rng.poisson(np.exp(0.3 + 0.1 * min(counts[step - 1], 8)))
    gaps = np.where(rng.random(150) < 0.4, np.nan, counts)
    gaps[0] = 1
    model = otp.Model(otp.Graph([otp.lag("k", "k")]), {"k": m.Poisson()})
    table = pd.DataFrame({"k": gaps})
    otp.fit(model, table, seed=0, progress=False)
    own, states = model.params()["k"], np.arange(80)
    move = stats.poisson.pmf(states, np.exp(own["log_rate"] + own["weight"][0] * states)[:, None])
    belief, total = (states == 1).astype(float), 0.0
    for count in gaps[1:]:
        belief = belief @ move * (np.isnan(count) | (states == count))
        total += np.log(belief.sum())
        belief /= belief.sum()
    assert model.log_likelihood(table) == pytest.approx(total, abs=1e-6)


def test_likelihood_of_two_columns_and_two_lags(two_columns: tuple[otp.Model, otp.FitResult, pd.DataFrame]) -> None:
    model, result, table = two_columns
    mean, covariance = gaussian(model.params(), 58, table["x"].to_numpy()[:2])
    own, cells = model.params(), table.to_numpy()[2:].ravel()
    seen = ~np.isnan(cells)
    total = stats.multivariate_normal.logpdf(cells[seen], mean[seen], covariance[np.ix_(seen, seen)])
    second = own["x"]["loc"] + own["x"]["weight"][0] * table["x"][0]
    total += stats.norm.logpdf(table["x"][1], second, own["x"]["scale"])
    assert -result.loss * 60 == pytest.approx(total, abs=1e-6)


def test_missing_cells_are_filled_from_both_sides(
    two_columns: tuple[otp.Model, otp.FitResult, pd.DataFrame],
) -> None:
    model, _, table = two_columns
    mean, covariance = gaussian(model.params(), 58, table["x"].to_numpy()[:2])
    cells = table.to_numpy()[2:].ravel()
    seen = ~np.isnan(cells)
    gain = covariance[np.ix_(~seen, seen)] @ np.linalg.inv(covariance[np.ix_(seen, seen)])
    expected = mean[~seen] + gain @ (cells - mean)[seen]
    filled = model.impute(otp.Sequences([table] * 50), seed=1).to_numpy().reshape(50, 60, 2)
    means = filled[:, 2:].reshape(50, -1)[:, ~seen].mean(0)
    np.testing.assert_allclose(means, expected, atol=0.04)


def test_gaps_beside_hidden_states_are_told() -> None:
    rng = np.random.default_rng(2)
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x"), otp.lag("x", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
    series = np.where(rng.random(300) < 0.1, np.nan, autoregression(300, 5))
    result = otp.fit(model, pd.DataFrame({"x": series}), seed=0, progress=False, restarts=1)
    assert any("'x'" in note and "left out" in note for note in result.notes)
