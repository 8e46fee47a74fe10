"""Posterior means and variances of unknown numbers, against the conditional normal, mixtures and conjugate pairs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.likelihood.elimination import lay_out, moved
from otpdag.likelihood.elimination.posterior import _unknown_moments, node_moments
from otpdag.structure import Structure
from tests.likelihood.elimination.linear_groups import CASES, PIECES, Plain, entries, make_group
from tests.likelihood.elimination.worlds import linear_moments, make_world, random_edges, random_naturals


@pytest.mark.parametrize("seed", range(3))
def test_linear_numbers_have_the_moments_of_the_conditional_normal(seed):
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(5)]
    structure, naturals, batch = make_world({n: m.Normal() for n in names}, random_edges(rng, names, 0.6), rng, rows=15)
    mean, covariance, at = linear_moments(structure, naturals)
    for node in names:
        first, variance = node_moments(naturals, lay_out(structure, batch, keep=(node,)), node)
        here = at[node].start
        for row in range(batch.rows):
            if bool(batch.mask[node][0, row].all()):
                assert float(first[row, 0]) == float(batch.values[node][0, row, 0])
                assert float(variance[row, 0]) == 0.0
                continue
            shown = [n for n in names if bool(batch.mask[n][0, row].all())]
            places = [at[n].start for n in shown]
            gain = covariance[here, places] @ np.linalg.inv(covariance[np.ix_(places, places)])
            values = np.array([float(batch.values[n][0, row, 0]) for n in shown])
            assert float(first[row, 0]) == pytest.approx(mean[here] + gain @ (values - mean[places]), abs=1e-9)
            assert float(variance[row, 0]) == pytest.approx(covariance[here, here] - gain @ covariance[places, here])


def only(name, values):
    """Rows that show one node."""
    values = torch.as_tensor(values).reshape(1, -1, 1).double()
    return Batch({name: values}, {name: torch.ones_like(values, dtype=torch.bool)}, torch.ones_like(values[..., 0]))


def test_a_number_below_a_hidden_category_has_the_moments_of_the_mixture():
    rng = np.random.default_rng(7)
    graph = otp.Graph([("k", "u"), ("u", "x")], hidden=["k", "u"])
    structure = Structure.bind(graph, {"k": m.Categorical(3), "u": m.Normal(), "x": m.Normal()})
    naturals, x = random_naturals(structure, rng), rng.normal(size=8)
    first, variance = node_moments(naturals, lay_out(structure, only("x", x), keep=("u",)), "u")
    weight, centre = (naturals[n][name][0].numpy().ravel() for n, name in (("k", "probs"), ("u", "loc")))
    inner, outer = (naturals[n]["scale"][0].numpy().ravel() for n in "ux")
    level, slope = (float(naturals["x"][name].flatten()[0]) for name in ("loc", "weight"))
    spread = slope**2 * inner**2 + outer**2
    posterior = weight * norm.pdf(x[:, None], level + slope * centre, np.sqrt(spread))
    posterior /= posterior.sum(-1, keepdims=True)
    own = centre + slope * inner**2 / spread * (x[:, None] - level - slope * centre)
    expected = (posterior * own).sum(-1)
    second = (posterior * (own**2 + inner**2 * outer**2 / spread)).sum(-1)
    np.testing.assert_allclose(first[:, 0].numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(variance[:, 0].numpy(), second - expected**2, atol=1e-10)


def test_a_number_on_points_has_the_moments_of_a_fine_grid():
    graph = otp.Graph([("u", "x")], hidden=["u"])
    structure = Structure.bind(graph, {"u": m.Normal(loc=0.3, scale=0.8), "x": m.Poisson()})
    naturals = random_naturals(structure, np.random.default_rng(1))
    naturals["u"] = {"loc": torch.full((1, 1, 1), 0.3).double(), "scale": torch.full((1, 1, 1), 0.8).double()}
    counts = np.array([0.0, 2.0, 9.0])
    layout = moved(naturals, lay_out(structure, only("x", counts), keep=("u",)))
    first, variance = node_moments(naturals, layout, "u")
    line = np.linspace(-7, 7, 20_001)
    rate = np.exp(float(naturals["x"]["log_rate"].flatten()[0]) + float(naturals["x"]["weight"].flatten()[0]) * line)
    density = norm.pdf(line, 0.3, 0.8) * np.exp(counts[:, None] * np.log(rate) - rate)
    density /= density.sum(-1, keepdims=True)
    expected = density @ line
    np.testing.assert_allclose(first[:, 0].numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(variance[:, 0].numpy(), density @ line**2 - expected**2, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_moments_of_unknowns_are_means_over_states_and_points(case):
    group, equations, points = make_group(np.random.default_rng(len(case)), **CASES[case])
    integrals = group.integrate(equations, points)
    alone = replace(integrals, points=tuple(one[:1] for one in points))  # of the first replica
    weight = torch.rand(integrals.table[:1].shape, generator=torch.Generator().manual_seed(1)).double()
    one, two = _unknown_moments(alone, weight)
    first, second = np.zeros((PIECES, group.dim)), np.zeros((PIECES, group.dim))
    for replica, piece, state, place, y in entries(group, points):
        if replica == 0:
            _, mean, covariance = Plain(group, equations, 1.0, 0, piece, state).given(y)
            first[piece] += float(weight[place]) * mean
            second[piece] += float(weight[place]) * (mean**2 + covariance.diagonal())
    total = weight[0].reshape(PIECES, -1).sum(-1, keepdim=True).numpy()
    np.testing.assert_allclose(one, first / total)
    np.testing.assert_allclose(two, second / total)
