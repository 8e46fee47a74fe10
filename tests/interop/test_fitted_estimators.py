"""Fits of other libraries as models, and fits for ArviZ."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.mixture import GaussianMixture

import otpdag as otp
from otpdag import Graph, Model, fit
from otpdag import mechanisms as m
from otpdag.interop import from_hmmlearn, from_sklearn_mixture, to_arviz


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


def test_groups_and_their_contents():
    pytest.importorskip("arviz")
    model = Model(Graph([("z", "x")], hidden=["z"]), {"z": m.Normal(loc=0.0, scale=1.0), "x": m.Normal()})
    model.set_params({"z": {}, "x": {"loc": 1.0, "weight": [2.0], "scale": 0.5}})
    table = model.sample(300, seed=1)[["x"]]
    data = to_arviz(model, table, draws=100, seed=0)
    assert data.posterior["z"].shape == (1, 100, 300)
    # the posterior of a linear normal pair is known: mean 2 (x - 1) / 4.25
    means = data.posterior["z"].mean(("chain", "draw")).to_numpy()
    np.testing.assert_allclose(means, 2 * (table["x"] - 1) / 4.25, atol=0.15)
    assert float(data.posterior_predictive["x"].mean()) == pytest.approx(1.0, abs=0.1)
    np.testing.assert_array_equal(data.observed_data["x"], table["x"])


def test_parameters_are_drawn_by_the_bootstrap_and_named():
    arviz = pytest.importorskip("arviz")
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, 400)
    table = pd.DataFrame({"g": np.array(["no", "yes"])[group], "x": 3.0 * group + rng.normal(size=400)})
    model = Model(Graph([("g", "x")]), {"g": m.Categorical(2), "x": m.Normal(shared_scale=True)})
    result = fit(model, table, seed=0)
    data = to_arviz(result, table, draws=200, seed=0)
    assert list(data.posterior["x.loc"].coords["x.loc at"].to_numpy()) == ["g=no", "g=yes"]
    summary = arviz.summary(data, var_names=["x.loc", "x.scale"], kind="stats")
    errors = result.summary().to_frame()["std_error"]
    assert summary.loc["x.loc[g=yes]", "sd"] == pytest.approx(errors["x.loc[g=yes]"], rel=0.2)
    assert summary.loc["x.scale", "sd"] == pytest.approx(errors["x.scale"], rel=0.2)
