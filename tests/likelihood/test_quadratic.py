"""Unknown numbers that are normal and linear: integrals against the multivariate normal distribution."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import multivariate_normal

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.likelihood.entropic_terms import row_losses
from otpdag.likelihood.enumeration import SumSizes, group_rows, integrated, stencil


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_the_integral_of_a_quadratic_is_exact(dim):
    rng = np.random.default_rng(dim)
    root = rng.normal(size=(dim, dim))
    curvature, slope = root @ root.T, rng.normal(size=dim)
    u = stencil(dim).numpy()
    values = 0.3 + u @ slope - 0.5 * np.einsum("pi,ij,pj->p", u, curvature, u)
    log_integral, expected = integrated(
        torch.zeros(1, 1, len(u), dtype=torch.float64), torch.as_tensor(values).reshape(1, 1, -1), 1.0, dim, split=True
    )
    precision = np.eye(dim) + curvature
    covariance = np.linalg.inv(precision)
    mean = covariance @ slope
    truth = 0.3 + 0.5 * slope @ mean - 0.5 * np.linalg.slogdet(precision)[1]
    cost = 0.3 + slope @ mean - 0.5 * np.trace(curvature @ (covariance + np.outer(mean, mean)))
    assert float(log_integral + expected) == pytest.approx(truth, rel=1e-10)
    assert float(expected) == pytest.approx(cost, rel=1e-10)


def test_an_impossible_state_stays_impossible_and_has_no_gradient():
    values = torch.tensor([[[0.0, -1.0, -1.0, -torch.inf, -torch.inf, -torch.inf]]], dtype=torch.float64)
    values.requires_grad_(True)
    found, _ = integrated(torch.zeros_like(values), values, 1.0, 1, split=False)
    torch.logsumexp(found, -1).sum().backward()
    assert torch.isneginf(found[0, 0, 1])
    assert bool(torch.isfinite(values.grad).all())


def chain_model():
    """Two linked factors, one missing cell in the middle of the graph, a logarithm below."""
    graph = otp.Graph([("f", "g"), ("f", "a"), ("g", "b"), ("g", "c"), ("b", "d")], hidden=["f", "g"])
    nodes = {"f": m.Normal(), "g": m.Normal()} | {n: m.Normal() for n in "abc"} | {"d": m.LogNormal()}
    model = otp.Model(graph, nodes)
    return model.set_params(
        {
            "g": {"loc": 0.0, "weight": 0.7, "scale": 1.0},
            "a": {"loc": 1.0, "weight": 1.5, "scale": 0.5},
            "b": {"loc": -1.0, "weight": 0.8, "scale": 0.6},
            "c": {"loc": 0.5, "weight": -1.2, "scale": 0.7},
            "d": {"loc": 0.2, "weight": 0.4, "scale": 0.3},
        }
    )


def chain_moments():
    """Mean and covariance of (a, b, c, log d) by propagation through the graph."""
    unit = np.eye(6)
    f = unit[0]
    g = 0.7 * f + unit[1]
    a, b, c = 1.5 * f + 0.5 * unit[2], 0.8 * g + 0.6 * unit[3], -1.2 * g + 0.7 * unit[4]
    d = 0.4 * b + 0.3 * unit[5]
    loadings = np.stack([a, b, c, d])
    return np.array([1.0, -1.0, 0.5, 0.2 - 0.4]), loadings @ loadings.T


def test_likelihoods_with_missing_cells_are_those_of_the_joint_normal_distribution():
    rng = np.random.default_rng(5)
    mean, covariance = chain_moments()
    line = rng.multivariate_normal(mean, covariance, size=60)
    frame = pd.DataFrame(np.column_stack([line[:, :3], np.exp(line[:, 3])]), columns=list("abcd"))
    frame.loc[::3, "b"] = np.nan
    frame.loc[1::4, "d"] = np.nan
    frame.loc[5, ["a", "b", "c", "d"]] = [np.nan, np.nan, 1.0, np.nan]
    model = chain_model()
    schema = Schema.of(model.spaces, model.graph, frame)
    batch = encode(frame, schema, hidden=model.graph.hidden)
    groups = group_rows(
        model.structure, batch, generator=torch.Generator(), options=SumSizes(), count_range={}, exact=True
    )
    assert all(group.quadratic for group in groups)
    found = -row_losses(model.structure, model.fitted.naturals, groups)[0].detach().numpy()
    expected = []
    for row in frame.to_numpy():
        seen = np.isfinite(row)
        value = np.array([*row[:3], np.log(row[3])])[seen]
        density = multivariate_normal(mean[seen], covariance[np.ix_(seen, seen)]).logpdf(value)
        expected.append(density - (np.log(row[3]) if seen[3] else 0.0))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_states_of_a_mixture_of_factors_are_weighed_exactly():
    graph = otp.Graph([("z", "f"), ("f", "x"), ("z", "x"), ("f", "y")], hidden=["z", "f"])
    model = otp.Model(graph, {"z": m.Categorical(2), "f": m.Normal(), "x": m.Normal(), "y": m.Normal()})
    model.set_params(
        {
            "z": {"probs": [0.3, 0.7]},
            "f": {"loc": [-1.0, 1.0], "scale": [1.0, 1.0]},
            "x": {"loc": [0.0, 2.0], "weight": 0.9, "scale": [0.5, 0.8]},
            "y": {"loc": 0.0, "weight": 1.1, "scale": 0.4},
        }
    )
    frame = pd.DataFrame({"x": [0.0, 1.0, 3.5], "y": [-1.0, 0.2, 1.0]})
    densities = []
    for weight, centre, shift, scale in ((0.3, -1.0, 0.0, 0.5), (0.7, 1.0, 2.0, 0.8)):
        loadings = np.array([0.9, 1.1])
        covariance = np.outer(loadings, loadings) + np.diag([scale**2, 0.4**2])
        mean = np.array([shift, 0.0]) + loadings * centre
        densities.append(weight * multivariate_normal(mean, covariance).pdf(frame.to_numpy()))
    truth = np.array(densities) / np.sum(densities, 0)
    np.testing.assert_allclose(model.predict_proba(frame, "z").to_numpy(), truth.T, atol=1e-9)


@pytest.mark.parametrize(
    ("child", "serves"), [(m.Normal(), True), (m.Poisson(), False), (m.Normal(network=(4,)), False)]
)
def test_only_linear_normal_children_are_integrated_exactly(child, serves):
    graph = otp.Graph([("f", "x"), ("f", "y")], hidden=["f"])
    model = otp.Model(graph, {"f": m.Normal(), "x": m.Normal(), "y": child})
    frame = pd.DataFrame({"x": [0.1, 0.4, 1.0, 2.0], "y": [1, 2, 3, 0]})
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=["f"])
    (group,) = group_rows(
        model.structure, batch, generator=torch.Generator(), options=SumSizes(), count_range={}, exact=True
    )
    assert bool(group.quadratic) is serves


def test_what_is_lost_in_rounding_is_ruled_out():
    # a scale of 1e-9: two numbers of 1e17 and more are subtracted, of which no digit behind the point is left
    u = stencil(1)[:, 0]
    row = (-0.5 * ((0.7 - 3.0 * u) / 1e-9) ** 2).reshape(1, 1, 3)
    found, _ = integrated(torch.zeros(1, 1, 3, dtype=torch.float64), row, 1.0, 1, split=False)
    assert torch.isneginf(found).all()
    row = (-0.5 * ((0.7 - 3.0 * u) / 1e-5) ** 2).reshape(1, 1, 3)
    found, _ = integrated(torch.zeros(1, 1, 3, dtype=torch.float64), row, 1.0, 1, split=False)
    exact = -0.5 * 0.7**2 / (1e-10 + 9) - 0.5 * math.log(1 + 9e10)
    assert float(found) == pytest.approx(exact, abs=1e-4)
