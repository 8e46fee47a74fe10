"""Closed-form updates of mechanisms, beside weighted frequencies and least squares."""

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.mechanisms.base import fitted_to_rows, has_closed_form
from otpdag.structure import Structure
from tests.mechanisms.plain import regressed

N = 200


def bound(parents, child):
    graph = otp.Graph([(name, "x") for name in parents], nodes=[*parents, "x"])
    return Structure.bind(graph, {**parents, "x": child}).mechanisms["x"]


def one_hot(labels, size):
    return torch.as_tensor(np.eye(size)[labels])


def column(values):
    return torch.as_tensor(np.asarray(values, dtype=float).reshape(len(values), -1))


def test_a_table_becomes_weighted_frequencies():
    rng = np.random.default_rng(0)
    a, x, weight = rng.integers(0, 2, N), rng.integers(0, 3, N), rng.uniform(0, 2, (2, N))
    mechanism = bound({"a": m.Categorical(2)}, m.Categorical(3))
    assert has_closed_form(mechanism)
    before = torch.full((2, 2, 3), 1 / 3).double()
    found = fitted_to_rows(mechanism, {"probs": before}, one_hot(x, 3), {"a": one_hot(a, 2)}, torch.as_tensor(weight))
    for replica in range(2):
        counts = np.zeros((2, 3))
        np.add.at(counts, (a, x), weight[replica])
        counts += 0.1 / 3  # a tenth of a row with the probabilities of before
        np.testing.assert_allclose(found["probs"][replica], counts / counts.sum(1, keepdims=True))


def test_a_configuration_without_rows_stays_and_frequencies_stay_themselves():
    mechanism = bound({"a": m.Categorical(2)}, m.Categorical(2))
    before = torch.tensor([[[0.25, 0.75], [0.9, 0.1]]]).double()
    x = np.repeat([0, 1], [1, 3])
    parents, weight = {"a": one_hot(np.zeros(4, dtype=int), 2)}, torch.ones(1, 4).double()
    found = fitted_to_rows(mechanism, {"probs": before}, one_hot(x, 2), parents, weight)
    torch.testing.assert_close(found["probs"], before)


@pytest.mark.parametrize("labelled", [False, True])
def test_a_line_is_that_of_weighted_least_squares(labelled):
    rng = np.random.default_rng(1)
    a, u, v = rng.integers(0, 2, N), rng.normal(size=N), rng.normal(size=N)
    x = 1.0 + 2.0 * a - 0.5 * u + 0.3 * v + np.where(a, 0.5, 2.0) * rng.normal(size=N)
    weight = rng.uniform(0.1, 2, N)
    parents = {"u": m.Normal(), "v": m.Normal(), **({"a": m.Categorical(2)} if labelled else {})}
    mechanism = bound(parents, m.Normal())
    assert has_closed_form(mechanism)
    rows = 2 if labelled else 1
    scale = np.array([[1.5], [0.7]])[:rows]
    params = {
        "loc": torch.zeros(1, rows, 1).double(),
        "weight": torch.zeros(1, 2, 1).double(),
        "scale": torch.as_tensor(scale).unsqueeze(0),
    }
    found = regressed(mechanism, params, x, [u, v], weight, a if labelled else None)
    levels = np.eye(2)[a] if labelled else np.ones((N, 1))
    design = np.column_stack([levels, u, v])
    trust = np.sqrt(weight) / (scale[a, 0] if labelled else scale[0, 0])  # rows weighed by the scales of before
    line = np.linalg.lstsq(trust[:, None] * design, trust * x, rcond=None)[0]
    np.testing.assert_allclose(found["loc"][0, :, 0], line[:rows], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found["weight"][0, :, 0], line[rows:], rtol=1e-5, atol=1e-7)
    squares = weight * (x - design @ line) ** 2
    variance = (levels * squares[:, None]).sum(0) / (levels * weight[:, None]).sum(0)
    np.testing.assert_allclose(found["scale"][0, :, 0] ** 2, variance, rtol=1e-5)


def test_an_update_is_a_fixed_point_of_itself_and_raises_the_likelihood():
    rng = np.random.default_rng(2)
    a, u = rng.integers(0, 2, N), rng.normal(size=N)
    x = a + 0.8 * u + np.where(a, 0.2, 1.5) * rng.normal(size=N)
    mechanism = bound({"a": m.Categorical(2), "u": m.Normal()}, m.Normal())
    value, parents = column(x)[None], {"a": one_hot(a, 2)[None], "u": column(u)[None]}
    weight = rng.uniform(0, 2, N)
    params = {"loc": torch.zeros(1, 2, 1), "weight": torch.zeros(1, 1, 1), "scale": torch.ones(1, 2, 1)}
    params = {name: value.double() for name, value in params.items()}
    heights = []
    for _ in range(40):
        heights.append(float((torch.as_tensor(weight) * mechanism.log_prob(params, value, parents)).sum()))
        params = regressed(mechanism, params, x, [u], weight, a)
    assert (np.diff(heights) > -1e-9).all()
    leaves = {name: value.clone().requires_grad_(True) for name, value in params.items()}
    total = (torch.as_tensor(weight) * mechanism.log_prob(leaves, value, parents)).sum()
    for slope in torch.autograd.grad(total, list(leaves.values())):
        np.testing.assert_allclose(slope, 0.0, atol=1e-3)


def test_two_coordinates_are_two_regressions():
    rng = np.random.default_rng(3)
    u, x = rng.normal(size=N), rng.normal(size=(N, 2))
    mechanism = bound({"u": m.Normal()}, m.Normal(2))
    params = {"loc": torch.zeros(1, 1, 2), "weight": torch.zeros(1, 1, 2), "scale": torch.ones(1, 1, 2)}
    params = {name: value.double() for name, value in params.items()}
    found = regressed(mechanism, params, x, [u], np.ones(N))
    line = np.linalg.lstsq(np.column_stack([np.ones(N), u]), x, rcond=None)[0]
    np.testing.assert_allclose(found["loc"][0, 0], line[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found["weight"][0, 0], line[1], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found["scale"][0, 0], (x - np.column_stack([np.ones(N), u]) @ line).std(0), rtol=1e-5)


@pytest.mark.parametrize(
    ("mechanism", "has"),
    [
        (m.Categorical(2), True),
        (m.Categorical(2, probs=[[0.5, 0.5]]), False),
        (m.Normal(), True),
        (m.Normal(scale=1.0), False),
        (m.Normal(loc=otp.tie("level")), False),
        (m.Normal(floor=0.1), False),
        (m.Normal(2, isotropic=True), False),
        (m.Poisson(), True),
        (m.Poisson(rate=2.0), False),
    ],
)
def test_what_is_given_tied_or_bounded_has_no_closed_form(mechanism, has):
    assert has_closed_form(bound({}, mechanism)) is has


def test_a_mechanism_without_one_says_so():
    with pytest.raises(NotImplementedError, match="Gamma has no features with these parents"):
        fitted_to_rows(bound({}, m.Gamma()), {}, column([1.0]), {}, torch.ones(1, 1).double())
