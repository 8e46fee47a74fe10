"""The most probable joint state of a row, against all joint states one by one."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import norm

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.likelihood.elimination import lay_out
from otpdag.likelihood.elimination.posterior import likeliest_states
from otpdag.structure import Structure
from tests.likelihood.elimination.worlds import CATEGORY, make_world, random_edges, random_naturals


def best_of_all(structure, naturals, batch, row):
    """The states of all nodes that are likeliest together with what a row shows, and their log-density."""
    free = {n: not bool(batch.mask[n][0, row].all()) for n in structure.graph.order}
    choices = [torch.eye(structure.mechanisms[n].space.width).double() for n in structure.graph.order]
    lists = [
        list(c) if free[n] else [batch.values[n][0, row]] for n, c in zip(structure.graph.order, choices, strict=True)
    ]
    best, states = -np.inf, None
    for one in itertools.product(*lists):
        values = {n: v.reshape(1, 1, -1) for n, v in zip(structure.graph.order, one, strict=True)}
        total = sum(
            float(mechanism.log_prob(naturals[n], values[n], structure.parents(n, values)))
            for n, mechanism in structure.mechanisms.items()
        )
        if total > best:
            best, states = total, dict(zip(structure.graph.order, one, strict=True))
    return states, best


@pytest.mark.parametrize("seed", range(4))
def test_states_and_density_are_those_of_the_best_of_all_joint_states(seed):
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(5)]
    nodes = {name: CATEGORY[rng.integers(3)]() for name in names}
    structure, naturals, batch = make_world(nodes, random_edges(rng, names, 0.6), rng, rows=12)
    states, density = likeliest_states(naturals, lay_out(structure, batch, keep=names))
    for row in range(batch.rows):
        expected, best = best_of_all(structure, naturals, batch, row)
        assert float(density[row]) == pytest.approx(best, abs=1e-10)
        for name in names:
            assert states[name][row].tolist() == expected[name].tolist()


def switching(rng, hidden):
    graph = otp.Graph([("k", "u"), ("u", "x")], hidden=hidden)
    structure = Structure.bind(graph, {"k": m.Categorical(3), "u": m.Normal(), "x": m.Normal()})
    return structure, random_naturals(structure, rng)


def test_linear_numbers_are_integrated_out_first():
    rng = np.random.default_rng(3)
    structure, naturals = switching(rng, ["k", "u"])
    x = torch.as_tensor(rng.normal(size=(1, 20, 1)))
    batch = Batch({"x": x}, {"x": torch.ones(1, 20, 1, dtype=torch.bool)}, torch.ones(1, 20).double())
    states, density = likeliest_states(naturals, lay_out(structure, batch, keep=["k"]))
    probs, loc = naturals["k"]["probs"][0].numpy().ravel(), naturals["u"]["loc"][0].numpy().ravel()
    inner, outer = (naturals[n]["scale"][0].numpy().ravel() for n in "ux")
    level, slope = (float(naturals["x"][name].flatten()[0]) for name in ("loc", "weight"))
    centre, spread = level + slope * loc, np.sqrt(outer**2 + slope**2 * inner**2)
    joint = np.log(probs) + norm.logpdf(x.numpy().ravel()[:, None], centre, spread)
    np.testing.assert_array_equal(states["k"].numpy().argmax(-1), joint.argmax(-1))
    np.testing.assert_allclose(density.numpy(), joint.max(-1), atol=1e-10)


def test_numbers_on_points_are_refused():
    graph = otp.Graph([("k", "u"), ("u", "x")], hidden=["k", "u"])
    structure = Structure.bind(graph, {"k": m.Categorical(2), "u": m.Normal(), "x": m.Poisson()})
    x = torch.ones(1, 3, 1).double()
    batch = Batch({"x": x}, {"x": x > 0}, torch.ones(1, 3).double())
    with pytest.raises(ModelError, match="one of them stands on points"):
        likeliest_states(random_naturals(structure, np.random.default_rng(0)), lay_out(structure, batch, keep=["k"]))
