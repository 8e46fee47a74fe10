"""Smooth curves: penalties beside second derivatives, their weight beside the restricted likelihood, curves, files."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.mechanisms.generalised_linear import IDENTITY, LOG_COUNT, LOGIT
from otpdag.mechanisms.smoothing import penalty_of
from otpdag.mechanisms.terms import natural_spline, roughness

ROWS = 300
KNOTS = torch.tensor([0.0, 0.5, 1.2, 2.0, 3.5, 4.0], dtype=torch.float64)


def test_the_penalty_is_the_integral_of_squared_second_derivatives():
    at, step = torch.linspace(0.0, 4.0, 20_001, dtype=torch.float64).unsqueeze(-1), 1 / 20_000  # of the range
    second = natural_spline(at, KNOTS).diff(n=2, dim=0) / step**2
    np.testing.assert_allclose(roughness(KNOTS), (second.mT @ second) * step, rtol=1e-3, atol=1e-3)


def restricted(logarithm, design, target, form):
    """Minus twice the restricted log-likelihood of a normal curve, the spread maximised out."""
    size = np.exp(logarithm)
    penalty = np.zeros((len(form) + 1,) * 2)
    penalty[1:, 1:] = size * form
    gram = design.T @ design + penalty
    beta = np.linalg.solve(gram, design.T @ target)
    total = ((target - design @ beta) ** 2).sum() + beta @ penalty @ beta
    free = len(target) - design.shape[1] + len(form) - 1
    return free * np.log(total) + np.linalg.slogdet(gram)[1] - (len(form) - 1) * logarithm


def test_the_weight_is_that_of_the_restricted_likelihood():
    rng = np.random.default_rng(3)
    x = rng.uniform(0, 4, ROWS)
    y = np.sin(2 * x) + 0.5 * rng.normal(size=ROWS)
    features, form = natural_spline(torch.tensor(x).unsqueeze(-1), KNOTS), roughness(KNOTS)
    found = penalty_of(
        features, torch.tensor(y)[:, None], torch.ones(ROWS).double(), 0.0, [(slice(0, 5), form)], IDENTITY
    )
    design = np.c_[np.ones(ROWS), features.numpy()]
    best = optimize.minimize_scalar(restricted, (-12, -6), args=(design, y, form.numpy()), tol=1e-8).x
    penalty = np.zeros((6, 6))
    penalty[1:, 1:] = np.exp(best) * form.numpy()
    gram = design.T @ design
    beta = np.linalg.solve(gram + penalty, design.T @ y)
    spread = ((y - design @ beta) ** 2).sum() / (ROWS - np.trace(np.linalg.solve(gram + penalty, gram)))
    np.testing.assert_allclose(found, np.exp(best) / spread * form, rtol=2e-3)


@pytest.mark.parametrize(("link", "told"), [(LOG_COUNT, 1.0), (LOGIT, 0.22)])
def test_a_line_has_hardly_a_freedom_to_bend(link, told):
    freedoms = []
    for seed in range(9):
        rng = np.random.default_rng(seed)
        x = rng.uniform(0, 4, 1000)
        line = 0.5 * x - 1
        y = rng.poisson(np.exp(line)) if link is LOG_COUNT else rng.random(1000) < 1 / (1 + np.exp(-line))
        target, weight = torch.tensor(y).double().unsqueeze(-1), torch.ones(1000).double()
        features, bend = natural_spline(torch.tensor(x).unsqueeze(-1), KNOTS), (slice(0, 5), roughness(KNOTS))
        penalty = penalty_of(features, target, weight, 0.0, [bend], link).numpy()
        gram = 1000 * told * np.cov(features.numpy().T)
        freedoms.append(np.trace(np.linalg.solve(gram + penalty, gram)) - 1)
    assert np.median(freedoms) < 1.0  # of four


def fitted(table, mechanism, other=None):
    graph = otp.Graph([("x", "y")] + ([("z", "y")] if other else []))
    return otp.fit(otp.Model(graph, {"x": m.Normal(), "y": mechanism, **(other or {})}), table)


def curve(model, at):
    params, terms = model.params()["y"], model.structure.mechanisms["y"].predictor.terms
    features = terms({"x": torch.tensor(at)[None, :, None]})[0].numpy()
    return params["loc"] + features @ params["weight"]


def test_curves_are_closer_than_free_ones_with_and_without_gaps_and_in_files(tmp_path):
    rng = np.random.default_rng(5)
    x = rng.normal(size=ROWS)
    table = pd.DataFrame({"x": x, "y": np.tanh(2 * x) + 0.7 * rng.normal(size=ROWS)})
    at = np.linspace(-1.8, 1.8, 50)
    smooth, free, gaps = (
        fitted(rows, m.Normal(terms=terms))
        for rows, terms in (
            (table, "spline(x, 12)"),
            (table, "spline(x, 12, 0)"),
            (table.mask(rng.random(table.shape) < 0.1), "spline(x, 12)"),
        )
    )
    errors = [np.sqrt(np.mean((curve(one.model, at) - np.tanh(2 * at)) ** 2)) for one in (smooth, free, gaps)]
    assert errors[0] < 0.8 * errors[1]
    assert errors[2] < 1.6 * errors[0]
    assert "smoothness of y" in smooth.summary().to_text()
    assert smooth.standard_errors()["std_error"].notna().all()
    smooth.model.save(tmp_path / "model.otp")
    again = otp.load(tmp_path / "model.otp")
    np.testing.assert_array_equal(curve(smooth.model, at), curve(again, at))
    np.testing.assert_array_equal(*(one.structure.mechanisms["y"].predictor.bent for one in (smooth.model, again)))


def test_curves_by_group_and_of_categories():
    rng = np.random.default_rng(6)
    x, z = rng.normal(size=ROWS), rng.integers(0, 2, ROWS)
    y = (rng.random(ROWS) < 1 / (1 + np.exp(-2 * np.sin(2 * x) * z))).astype(int)
    table = pd.DataFrame({"x": x, "z": z, "y": y})
    result = fitted(table, m.Bernoulli(terms="C(z) + spline(x, 6):C(z)"), {"z": m.Categorical(2)})
    assert np.abs(result.model.params()["y"]["weight"]).max() < 1e4
    precision = result.model.structure.mechanisms["y"].predictor.bent
    assert precision is not None
    assert precision[0].abs().sum() == 0  # the effect of the group itself is free
