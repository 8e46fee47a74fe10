"""Particles, beside a Kalman filter and smoother."""

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m


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


def smoother(parameters, x):
    a = parameters[0]
    _, means, variances = kalman(parameters, x)
    smooth = means.copy()
    for t in range(x.shape[1] - 2, -1, -1):
        gain = variances[:, t] * a / (a * a * variances[:, t] + 1)
        smooth[:, t] += gain * (smooth[:, t + 1] - a * means[:, t])
    return smooth


def state_space():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Normal(), "x": m.Normal()})


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


def test_particles_give_the_kalman_likelihood_and_smoother():
    model = fixed()
    x, _ = series(3, sequences=3, length=25)
    x[0, 5:8] = np.nan
    truth = (0.85, 0.7, 0.5, 2.0)
    assert model.score(x, kind="likelihood") * x.size == pytest.approx(kalman(truth, x)[0].sum(), abs=0.6)
    draws = model.posterior(x, draws=200, seed=0)["z"].to_numpy().reshape(3, 25, 200)
    np.testing.assert_allclose(draws.mean(-1), smoother(truth, x), atol=0.25)
