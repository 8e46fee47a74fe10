"""Hidden numbers in sequences, beside a Kalman filter and smoother."""

import numpy as np
import pytest
from scipy.optimize import minimize

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import Adam
from otpdag.model.relabelling import canonical
from otpdag.objective import Drawn, Objective


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


def test_particles_give_the_kalman_likelihood_and_smoother():
    model = fixed()
    x, _ = series(3, sequences=3, length=25)
    x[0, 5:8] = np.nan
    truth = (0.85, 0.7, 0.5, 2.0)
    assert model.score(x, kind="likelihood") * x.size == pytest.approx(kalman(truth, x)[0].sum(), abs=0.6)
    draws = model.posterior(x, draws=200, seed=0)["z"].to_numpy().reshape(3, 25, 200)
    np.testing.assert_allclose(draws.mean(-1), smoother(truth, x), atol=0.25)


def test_a_model_of_numbers_samples_and_imputes():
    model = fixed()
    drawn = model.sample(50, length=40, seed=0)
    assert drawn["x"].mean() == pytest.approx(2.0, abs=0.3)
    x, _ = series(3, sequences=2, length=20)
    gaps = x.copy()
    gaps[0, 4:6] = np.nan
    filled = model.impute(gaps, seed=0)["x"].to_numpy().reshape(x.shape)
    np.testing.assert_array_equal(filled[~np.isnan(gaps)], x[~np.isnan(gaps)])
    assert np.abs(filled - x).max() < 4


@pytest.mark.slow
def test_the_bidirectional_map_is_that_of_a_kalman_smoother():
    x, _ = series(0)
    model = state_space()
    method = otp.entropic(network=True)
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
        otp.fit(model, x, method=otp.entropic(steps=3), seed=0, restarts=1)
    assert np.isfinite(estimates(model)).all()
    drawn = Drawn(noise="marginal", batch_size=2000)
    method = otp.Method("long", Objective(eps=1.0), drawn, Adam(steps=60, learning_rate=0.02))
    otp.fit(model, x, method=method, seed=0, restarts=1)
    np.testing.assert_allclose(estimates(model), [0.85, 0.7, 0.5, 2.0], atol=0.15)


def test_a_hidden_number_points_so_that_its_childs_slope_is_positive():
    model = fixed()
    naturals = {node: dict(values) for node, values in model.fitted.naturals.items()}
    naturals["x"]["weight"] = -naturals["x"]["weight"]
    found, _ = canonical(model.structure, naturals, {}, ())
    assert float(found["x"]["weight"]) == pytest.approx(0.7)
    assert float(found["z"]["weight"]) == pytest.approx(0.85)
