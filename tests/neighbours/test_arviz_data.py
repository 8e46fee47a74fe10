"""Draws arrive in ArviZ in the shapes that it expects, with the right contents."""

from __future__ import annotations

import numpy as np
import pytest

from otpdag import Graph, Model
from otpdag import mechanisms as m
from otpdag.neighbours import to_arviz


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
