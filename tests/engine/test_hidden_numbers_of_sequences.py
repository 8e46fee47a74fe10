"""Fits with hidden numbers in sequences: beside a Kalman filter and smoother, and with categories that switch."""

import numpy as np
import pytest
from scipy.optimize import minimize

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.model.base import in_one_order
from tests.dynamic_models import (
    kalman,
    known_state_space,
    linear_series,
    state_space,
    switching_model,
    switching_series,
)


@pytest.mark.slow
def test_a_switching_latent_autoregression_is_recovered():
    data, regime, level = switching_series(0)
    found = switching_model()
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


def test_what_is_not_fitted_together_is_refused():
    data, _, _ = switching_series(0, 3, 10)
    with pytest.raises(otp.ModelError, match="together need eps = 1"):
        otp.fit(switching_model(), data, method=otp.entropic(eps=0.5), seed=0)
    graph = otp.Graph([otp.lag("z", "z"), otp.lag("k", "k"), ("z", "x"), ("k", "x")], hidden=["z", "k"])
    counts = otp.Model(graph, {"z": m.Normal(), "k": m.Poisson(), "k[0]": m.Poisson(), "x": m.Normal()})
    with pytest.raises(otp.ModelError, match="hidden counts are not fitted"):
        otp.fit(counts, np.zeros((3, 10)), seed=0)


def estimates(model):
    params = model.params()
    return [
        float(np.squeeze(params[n][k])) for n, k in (("z", "weight"), ("x", "weight"), ("x", "scale"), ("x", "loc"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_a_linear_gaussian_state_space_model_is_recovered_as_by_a_kalman_filter(missing):
    x, _ = linear_series(0)
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


@pytest.mark.slow
def test_one_series_of_a_hundred_thousand_steps_is_cut_in_pieces():
    x, _ = linear_series(2, sequences=1, length=100_000)
    model = state_space()
    with pytest.warns(otp.ConvergenceWarning):
        otp.fit(model, x, method=otp.entropic(steps=3), seed=0, restarts=1)
    assert np.isfinite(estimates(model)).all()


def latent_counts(seed, sequences=40, length=60):
    """Few counts whose log-rate is a latent autoregression: far from linear and Gaussian."""
    rng = np.random.default_rng([5, seed])
    z = np.zeros((sequences, length))
    z[:, 0] = rng.normal(size=sequences)
    for t in range(1, length):
        z[:, t] = 0.9 * z[:, t - 1] + rng.normal(size=sequences)
    return rng.poisson(np.exp(0.3 + 0.4 * z)), z


@pytest.mark.slow
def test_the_bound_of_counts_is_close_to_their_likelihood_once_means_are_read():
    counts, z = latent_counts(0)
    model = otp.Model(otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]), {"z": m.Normal(), "x": m.Poisson()})
    result = otp.fit(model, counts, seed=0, restarts=1)
    assert result.loss < result.stages[0].losses[-1][0] - 0.02
    likelihood = model.score(counts, kind="likelihood")  # as particles find it
    assert -result.loss == pytest.approx(likelihood, abs=0.02)
    params = model.params()
    assert float(params["z"]["weight"].squeeze()) == pytest.approx(0.9, abs=0.05)
    assert float(params["x"]["weight"].squeeze()) == pytest.approx(0.4, abs=0.08)
    assert float(params["x"]["log_rate"]) == pytest.approx(0.3, abs=0.12)
    draws = model.posterior(counts[:5], draws=50)["z"].to_numpy().reshape(-1, 50).mean(1)
    assert np.corrcoef(draws, z[:5].ravel())[0, 1] > 0.75


def test_a_hidden_number_points_so_that_its_childs_slope_is_positive():
    model = known_state_space()
    naturals = {node: dict(values) for node, values in model.fitted.naturals.items()}
    naturals["x"]["weight"] = -naturals["x"]["weight"]
    found = in_one_order(model.structure, naturals)
    assert float(found["x"]["weight"]) == pytest.approx(0.7)
    assert float(found["z"]["weight"]) == pytest.approx(0.85)
