"""Hidden steps of sequences under a fitted model: draws, imputation, scores."""

import numpy as np
import pytest

from experiments.small_models import poisson_chain
from tests.dynamic_models import fitted_poisson_hmm, known_state_space, linear_series


@pytest.mark.slow
def test_a_model_of_numbers_samples_and_imputes():
    model = known_state_space()
    drawn = model.sample(50, length=40, seed=0)
    assert drawn["x"].mean() == pytest.approx(2.0, abs=0.3)
    x, _ = linear_series(3, sequences=2, length=20)
    gaps = x.copy()
    gaps[0, 4:6] = np.nan
    filled = np.stack([model.impute(gaps, seed=seed)["x"].to_numpy().reshape(x.shape) for seed in range(30)])
    seen = ~np.isnan(gaps)
    np.testing.assert_array_equal(filled[:, seen], np.broadcast_to(x[seen], (30, seen.sum())))
    mean = mean_given(gaps[0])
    assert np.abs(mean - 2.0).min() > 0.3  # the stationary mean would not do
    error = filled[:, ~seen].std(0, ddof=1).max() / 30**0.5
    assert error < 0.05
    np.testing.assert_allclose(filled[:, ~seen].mean(0), mean, atol=4.5 * error)


def mean_given(x):
    """Mean of the missing steps of ``known_state_space`` given the others, from the joint normal."""
    steps = len(x)
    variance = [1.0]
    for _ in range(steps - 1):
        variance.append(0.85**2 * variance[-1] + 1.0)
    lag = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    hidden = 0.85**lag * np.minimum.outer(variance, variance)  # cov(z_s, z_t) = a^|t-s| var(z_min)
    joint = 0.7**2 * hidden + 0.5**2 * np.eye(steps)
    gap, seen = np.isnan(x), ~np.isnan(x)
    gain = joint[np.ix_(gap, seen)] @ np.linalg.inv(joint[np.ix_(seen, seen)])
    return 2.0 + gain @ (x[seen] - 2.0)


def test_draws_of_paths_agree_with_the_probabilities():
    model, counts = fitted_poisson_hmm()
    draws = model.posterior(counts[:2], draws=400, seed=0)
    share = (draws["z"].to_numpy().reshape(120, 400)[..., None] == np.arange(4)).mean(1)
    np.testing.assert_allclose(share, model.predict_proba(counts[:2], "z"), atol=0.1)


def test_scores():
    model, counts = fitted_poisson_hmm()
    other, _, _ = poisson_chain(20, 60, np.random.default_rng(9))
    assert model.score(counts, kind="likelihood") > model.score(other * 2, kind="likelihood")
    assert model.distance(counts) < model.distance(other * 2)
