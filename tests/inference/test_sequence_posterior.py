"""Hidden steps of sequences under a fitted model: draws, imputation, scores."""

import numpy as np
import pytest

from otpdag.datasets import poisson_chain
from tests.dynamic_models import fitted_poisson_hmm, known_state_space, linear_series


def test_a_model_of_numbers_samples_and_imputes():
    model = known_state_space()
    drawn = model.sample(50, length=40, seed=0)
    assert drawn["x"].mean() == pytest.approx(2.0, abs=0.3)
    x, _ = linear_series(3, sequences=2, length=20)
    gaps = x.copy()
    gaps[0, 4:6] = np.nan
    filled = model.impute(gaps, seed=0)["x"].to_numpy().reshape(x.shape)
    np.testing.assert_array_equal(filled[~np.isnan(gaps)], x[~np.isnan(gaps)])
    assert np.abs(filled - x).max() < 4


def test_draws_of_paths_agree_with_the_probabilities():
    model, counts = fitted_poisson_hmm()
    draws = model.posterior(counts[:2], draws=400, seed=0)
    share = (draws["z"].to_numpy().reshape(120, 400)[..., None] == np.arange(4)).mean(1)
    np.testing.assert_allclose(share, model.predict_proba(counts[:2], "z"), atol=0.1)


def test_scores():
    model, counts = fitted_poisson_hmm()
    other, _, _ = poisson_chain(20, 60, np.random.default_rng(9))
    assert model.score(counts, kind="likelihood") > model.score(other * 2, kind="likelihood")
    assert model.score(counts) < model.score(other * 2)
