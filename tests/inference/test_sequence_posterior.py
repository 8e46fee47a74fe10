"""Hidden steps of sequences under a fitted model: draws, imputation, scores."""

import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.datasets import poisson_chain


def series(seed, sequences=20, length=50):
    rng = np.random.default_rng(seed)
    z = np.zeros((sequences, length))
    z[:, 0] = rng.normal(size=sequences)
    for t in range(1, length):
        z[:, t] = 0.85 * z[:, t - 1] + rng.normal(size=sequences)
    return 2.0 + 0.7 * z + 0.5 * rng.normal(size=z.shape), z


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


def hmm(transition=None, size=4):
    return otp.Model(
        otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]),
        {"z": transition or m.Categorical(size), "x": m.Poisson()},
    )


def fitted(seed=0):
    counts, _, _ = poisson_chain(20, 60, np.random.default_rng(seed))
    model = hmm()
    otp.fit(model, counts, seed=0, restarts=2)
    return model, counts


def test_draws_of_paths_agree_with_the_probabilities():
    model, counts = fitted()
    draws = model.posterior(counts[:2], draws=400, seed=0)
    share = (draws["z"].to_numpy().reshape(120, 400)[..., None] == np.arange(4)).mean(1)
    np.testing.assert_allclose(share, model.predict_proba(counts[:2], "z"), atol=0.1)


def test_scores():
    model, counts = fitted()
    other, _, _ = poisson_chain(20, 60, np.random.default_rng(9))
    assert model.score(counts, kind="likelihood") > model.score(other * 2, kind="likelihood")
    assert model.score(counts) < model.score(other * 2)
