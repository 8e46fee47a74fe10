"""What other libraries have fitted is the same model here, and a start that is not lost."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.mixture import GaussianMixture

import otpdag as otp
from otpdag.interop import from_hmmlearn, from_sklearn_mixture


@pytest.mark.parametrize("width", [1, 2])
def test_a_mixture_has_the_same_likelihood(width):
    rng = np.random.default_rng(2)
    X = np.concatenate([rng.normal(-2, 1, (150, width)), rng.normal(2, 0.5, (250, width))])
    theirs = GaussianMixture(2, random_state=0, tol=1e-8, max_iter=500).fit(X)
    ours = from_sklearn_mixture(theirs)
    names = ["x"] if width == 1 else [f"x.{k}" for k in range(width)]
    table = pd.DataFrame(X, columns=names)
    assert ours.score(table, kind="likelihood") == pytest.approx(theirs.score(X), abs=1e-6)
    otp.fit(ours, table, restarts=1, seed=0)
    assert ours.score(table, kind="likelihood") >= theirs.score(X) - 1e-6


def test_an_unfitted_mixture_is_refused():
    with pytest.raises(otp.ModelError, match="fitted first"):
        from_sklearn_mixture(GaussianMixture(2))


@pytest.mark.parametrize("kind", ["poisson", "gaussian", "categorical"])
def test_a_hidden_markov_model_has_the_same_likelihood(kind):
    hmmlearn = pytest.importorskip("hmmlearn.hmm")
    rng = np.random.default_rng(3)
    states = np.repeat(rng.integers(0, 2, 30), 10)
    made = {
        "poisson": lambda: rng.poisson(np.array([2.0, 9.0])[states])[:, None],
        "gaussian": lambda: rng.normal(np.array([-1.0, 2.0])[states], 1.0)[:, None],
        "categorical": lambda: (rng.random(300) < np.array([0.2, 0.8])[states]).astype(int)[:, None],
    }
    X = made[kind]()
    chosen = {
        "poisson": lambda: hmmlearn.PoissonHMM(2, random_state=0, n_iter=50),
        "gaussian": lambda: hmmlearn.GaussianHMM(2, covariance_type="diag", random_state=0, n_iter=50),
        "categorical": lambda: hmmlearn.CategoricalHMM(2, random_state=0, n_iter=50),
    }
    theirs = chosen[kind]().fit(X)
    ours = from_hmmlearn(theirs)
    table = pd.DataFrame({"x0": X[:, 0]})
    score = ours.score(otp.Sequences(table), kind="likelihood")  # of a step
    assert score == pytest.approx(theirs.score(X) / len(X), abs=1e-6)
