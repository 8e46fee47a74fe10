"""Fits for ArviZ."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from otpdag import Graph, Model, fit
from otpdag import mechanisms as m
from otpdag.interop import to_arviz


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
