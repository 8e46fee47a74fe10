"""Fits with hidden numbers in sequences: beside a Kalman filter and smoother, and with categories that switch."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.model.relabelling import canonical


def switching(seed, sequences=20, length=40):
    """A latent autoregression with two levels that last, seen through two indicators."""
    rng = np.random.default_rng([11, seed])
    regime, level = np.zeros((sequences, length), dtype=int), np.zeros((sequences, length))
    regime[:, 0] = rng.integers(0, 2, sequences)
    for t in range(length):
        if t:
            regime[:, t] = np.where(rng.random(sequences) < 0.95, regime[:, t - 1], 1 - regime[:, t - 1])
        before = level[:, t - 1] if t else 0.0
        level[:, t] = 0.5 * before + np.array([-2.0, 2.0])[regime[:, t]] + rng.normal(size=sequences)
    x, y = 1 + 0.5 * level, -level
    return {"x": x + 0.4 * rng.normal(size=x.shape), "y": y + 0.8 * rng.normal(size=y.shape)}, regime, level


def model():
    graph = otp.Graph([otp.lag("s", "s"), otp.lag("z", "z"), ("s", "z"), ("z", "x"), ("z", "y")], hidden=["s", "z"])
    return otp.Model(graph, {"s": m.Categorical(2), "z": m.Normal(), "x": m.Normal(), "y": m.Normal()})


@pytest.mark.slow
def test_a_switching_latent_autoregression_is_recovered():
    data, regime, level = switching(0)
    found = model()
    result = otp.fit(found, data, seed=0, restarts=1)
    assert result.stages[1].losses[-1][0] < result.stages[0].losses[-1][0] - 0.01  # reading the categories helps
    params = found.params()
    np.testing.assert_allclose(params["s"]["probs"].diagonal(), 0.95, atol=0.04)
    assert float(params["z"]["weight"].squeeze()) == pytest.approx(0.5, abs=0.06)
    assert float(np.diff(params["z"]["loc"]).squeeze()) == pytest.approx(4.0, abs=0.4)
    assert float(params["x"]["weight"].squeeze()) == pytest.approx(0.5, abs=0.05)
    assert float(params["y"]["weight"].squeeze()) == pytest.approx(-1.0, abs=0.1)
    assert float(params["x"]["scale"]) == pytest.approx(0.4, abs=0.04)
    assert float(params["y"]["scale"]) == pytest.approx(0.8, abs=0.08)
    few = {name: value[:3] for name, value in data.items()}
    probabilities = found.predict_proba(few, "s").to_numpy()
    np.testing.assert_allclose(probabilities.sum(-1), 1.0)
    assert (probabilities.argmax(1) == regime[:3].ravel()).mean() > 0.95
    draws = found.posterior(few, draws=30)["z"].to_numpy().reshape(-1, 30).mean(1)
    assert np.corrcoef(draws, level[:3].ravel())[0, 1] > 0.97


def normal(value, mean, scale):
    return -0.5 * ((value - mean) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)


def test_what_is_not_fitted_together_is_refused():
    data, _, _ = switching(0, 3, 10)
    with pytest.raises(otp.ModelError, match="together need eps = 1"):
        otp.fit(model(), data, method=otp.Method("soft", eps=0.5), seed=0)
    graph = otp.Graph([otp.lag("z", "z"), otp.lag("k", "k"), ("z", "x"), ("k", "x")], hidden=["z", "k"])
    counts = otp.Model(graph, {"z": m.Normal(), "k": m.Poisson(), "k[0]": m.Poisson(), "x": m.Normal()})
    with pytest.raises(otp.ModelError, match="hidden counts are not fitted"):
        otp.fit(counts, np.zeros((3, 10)), seed=0)


def series(seed, sequences=20, length=50):
    rng = np.random.default_rng(seed)
    z = np.zeros((sequences, length))
    z[:, 0] = rng.normal(size=sequences)
    for t in range(1, length):
        z[:, t] = 0.85 * z[:, t - 1] + rng.normal(size=sequences)
    return 2.0 + 0.7 * z + 0.5 * rng.normal(size=z.shape), z


def kalman(parameters, x):
    """Log-likelihood of sequences (N, T), NaN is missing; and filtered means and variances."""
    a, c, s, mu = parameters
    mean, var = np.zeros(len(x)), np.ones(len(x))
    total, means, variances = np.zeros(len(x)), [], []
    for t in range(x.shape[1]):
        if t:
            mean, var = a * mean, a * a * var + 1
        spread = c * c * var + s * s
        error = x[:, t] - mu - c * mean
        seen = ~np.isnan(error)
        gain = var * c / spread
        total += np.where(seen, -0.5 * (np.log(2 * np.pi * spread) + np.nan_to_num(error) ** 2 / spread), 0.0)
        mean, var = mean + np.where(seen, gain * np.nan_to_num(error), 0), np.where(seen, (1 - gain * c) * var, var)
        means.append(mean)
        variances.append(var)
    return total, np.stack(means, 1), np.stack(variances, 1)


def state_space():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Normal(), "x": m.Normal()})


def estimates(model):
    params = model.params()
    return [
        float(np.squeeze(params[n][k])) for n, k in (("z", "weight"), ("x", "weight"), ("x", "scale"), ("x", "loc"))
    ]


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_a_linear_gaussian_state_space_model_is_recovered_as_by_a_kalman_filter(missing):
    x, _ = series(0)
    x[np.random.default_rng(1).random(x.shape) < missing] = np.nan
    model = state_space()
    result = otp.fit(model, x, seed=0, restarts=1)
    assert result.status.converged
    found = estimates(model)

    def loss(p):
        return -kalman((p[0], p[1], np.exp(p[2]), p[3]), x)[0].mean()

    best = minimize(loss, [0.5, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(found, [best.x[0], abs(best.x[1]), np.exp(best.x[2]), best.x[3]], atol=0.01)
    assert loss([found[0], found[1], np.log(found[2]), found[3]]) - best.fun < 0.05  # of a sequence of 50 steps


def fixed():
    model = state_space()
    model.set_params(
        {
            "z": {"loc": 0.0, "weight": 0.85, "scale": 1.0},
            "z[0]": {"loc": 0.0, "scale": 1.0},
            "x": {"loc": 2.0, "weight": 0.7, "scale": 0.5},
        }
    )
    return model


@pytest.mark.slow
def test_the_bidirectional_map_is_that_of_a_kalman_smoother():
    x, _ = series(0)
    model = state_space()
    method = replace(otp.engine.entropic(), backward="bidirectional")
    otp.fit(model, x, method=method, seed=0, restarts=1)

    def loss(p):
        return -kalman((p[0], p[1], np.exp(p[2]), p[3]), x)[0].mean()

    best = minimize(loss, [0.5, 1.0, 0.0, 0.0])
    expected = [best.x[0], abs(best.x[1]), np.exp(best.x[2]), best.x[3]]
    np.testing.assert_allclose(estimates(model), expected, rtol=0.05)


@pytest.mark.slow
def test_one_series_of_a_hundred_thousand_steps_is_cut_in_pieces():
    x, _ = series(2, sequences=1, length=100_000)
    model = state_space()
    with pytest.warns(otp.ConvergenceWarning):
        otp.fit(model, x, method=replace(otp.engine.entropic(), steps=3), seed=0, restarts=1)
    assert np.isfinite(estimates(model)).all()
    method = otp.Method("long", eps=1.0, optimiser="adam", steps=60, batch_size=2000, learning_rate=0.02)
    otp.fit(model, x, method=method, seed=0, restarts=1)
    np.testing.assert_allclose(estimates(model), [0.85, 0.7, 0.5, 2.0], atol=0.15)


def test_a_hidden_number_points_so_that_its_childs_slope_is_positive():
    model = fixed()
    naturals = {node: dict(values) for node, values in model.fitted.naturals.items()}
    naturals["x"]["weight"] = -naturals["x"]["weight"]
    found, _ = canonical(model.structure, naturals, {}, ())
    assert float(found["x"]["weight"]) == pytest.approx(0.7)
    assert float(found["z"]["weight"]) == pytest.approx(0.85)
