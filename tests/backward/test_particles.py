"""Particles, beside a Kalman filter and smoother."""

import numpy as np
import pytest

from tests.dynamic_models import kalman, kalman_smoother, known_state_space, linear_series


def test_particles_give_the_kalman_likelihood_and_smoother():
    model = known_state_space()
    x, _ = linear_series(3, sequences=3, length=25)
    x[0, 5:8] = np.nan
    truth = (0.85, 0.7, 0.5, 2.0)
    assert model.score(x, kind="likelihood") * x.size == pytest.approx(kalman(truth, x)[0].sum(), abs=0.6)
    draws = model.posterior(x, draws=200, seed=0)["z"].to_numpy().reshape(3, 25, 200)
    np.testing.assert_allclose(draws.mean(-1), kalman_smoother(truth, x), atol=0.25)
