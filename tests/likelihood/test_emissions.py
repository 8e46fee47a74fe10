"""Observed nodes read through features: log-densities in every state, and updates from expected sums."""

import numpy as np
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.likelihood.state_problem import emissions_of

ROWS = 25
RATES = np.array([0.5, 3.0, 7.0])
LOC = np.arange(6.0).reshape(3, 2) - 2.0
SCALE = np.array([[0.5, 1.0], [2.0, 0.7], [1.2, 3.0]])
PROBS = np.array([[0.2, 0.8], [0.6, 0.4], [0.9, 0.1]])


@pytest.fixture
def world():
    rng = np.random.default_rng(0)
    graph = otp.Graph([("z", "a"), ("z", "x"), ("a", "x"), ("z", "n")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(3), "a": m.Categorical(2), "x": m.Normal(), "n": m.Poisson()})
    model.set_params(
        {
            "z": {"probs": [0.2, 0.3, 0.5]},
            "a": {"probs": PROBS},
            "x": {"loc": LOC, "scale": SCALE},
            "n": {"log_rate": np.log(RATES)},
        }
    )
    a, x, n = rng.integers(0, 2, ROWS), rng.normal(size=ROWS), rng.poisson(3, ROWS)
    seen = {"a": np.ones(ROWS, bool), "x": rng.random(ROWS) < 0.8, "n": rng.random(ROWS) < 0.8}
    values = {
        "a": torch.eye(2).double()[a],
        "x": torch.as_tensor(x)[:, None],
        "n": torch.as_tensor(n)[:, None].double(),
    }
    mask = {name: torch.as_tensor(one)[:, None] for name, one in seen.items()}
    emissions = emissions_of(model.structure, {"z": torch.eye(3).double()}, values, mask)
    return model, emissions, (a, x, n), seen, emissions.features(values, mask)


def test_features_times_coefficients_are_log_densities(world):
    model, emissions, (a, x, n), seen, features = world
    log_prior = torch.tensor([[0.1, -0.4, -2.0]]).double()
    found = features @ emissions.coefficients(model.fitted.naturals, log_prior)[0].T
    for z in range(3):
        expected = log_prior[0, z].item() + np.log(PROBS[z, a])
        expected += np.where(seen["x"], stats.norm(LOC[z, a], SCALE[z, a]).logpdf(x), 0.0)
        expected += np.where(seen["n"], stats.poisson(RATES[z]).logpmf(n), 0.0)
        np.testing.assert_allclose(found[:, z], expected, rtol=1e-9, atol=1e-9)


def test_expected_sums_give_weighted_means_by_state_and_observed_parent(world):
    model, emissions, (a, x, n), seen, features = world
    belief = np.random.default_rng(1).dirichlet(np.ones(3), ROWS)
    sums = (torch.as_tensor(belief).T @ features).unsqueeze(0)
    naturals = dict(emissions.maximised(model.fitted.naturals, sums))
    for z in range(3):
        weight = belief[:, z]
        assert naturals["n"]["log_rate"][0, z, 0].item() == pytest.approx(
            np.log(np.average(n[seen["n"]], weights=weight[seen["n"]])), abs=1e-4
        )
        ones, braked = weight @ a + 0.1 * PROBS[z, 1], weight.sum() + 0.1  # a little of what was before is kept
        assert naturals["a"]["probs"][0, z, 1].item() == pytest.approx(ones / braked, abs=1e-8)
        for parent in range(2):
            here = seen["x"] & (a == parent)
            mean = np.average(x[here], weights=weight[here])
            spread = np.sqrt(np.average((x[here] - mean) ** 2, weights=weight[here]))
            assert naturals["x"]["loc"][0, 2 * z + parent, 0].item() == pytest.approx(mean, abs=1e-6)
            assert naturals["x"]["scale"][0, 2 * z + parent, 0].item() == pytest.approx(spread, rel=1e-5)


def test_a_numeric_parent_has_no_features():
    graph = otp.Graph([("z", "x"), ("x", "y")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal()})
    values = {"x": torch.zeros(2, 1).double(), "y": torch.zeros(2, 1).double()}
    mask = {name: torch.ones(2, 1).bool() for name in values}
    assert emissions_of(model.structure, {"z": torch.eye(2).double()}, values, mask) is None
