"""The objective with the closed-form backward map, against formulas written out by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import logsumexp, softmax

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.divergences import MMD, Energy, Wasserstein
from tests.table_problems import point_of, problem_of

RNG = np.random.default_rng(5)
PROBS = np.array([0.3, 0.7])
LOC, SCALE = np.array([-1.0, 2.0]), np.array([0.5, 1.5])


def entropic(reconstruction=1.0, **settings):
    method = otp.entropic(**settings)
    return replace(method, objective=replace(method.objective, reconstruction=reconstruction))


def terms_of(model, frame, params, method, weights=None):
    problem, _ = problem_of(model, frame, method, weights=weights)
    return problem.loss(point_of(problem, params))


def mixture(x, method, weights=None):
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
    params = {"z": {"probs": PROBS}, "x": {"loc": LOC, "scale": SCALE}}
    return terms_of(model, pd.DataFrame({"x": x}), params, method, weights)


def log_densities(x):
    return -0.5 * ((x[:, None] - LOC) / SCALE) ** 2 - np.log(SCALE) - 0.5 * np.log(2 * np.pi)


@pytest.mark.parametrize("eps", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("reconstruction", [1.0, 0.5])
@pytest.mark.parametrize("reference", ["model", "uniform"])
def test_soft_minimum_over_states(eps, reconstruction, reference):
    r"""-eps log sum_k pi_k exp(-w c_k / eps); the cheapest state for eps = 0."""
    x, weights = RNG.normal(size=40), RNG.uniform(0.5, 2.0, 40)
    terms = mixture(x, entropic(reconstruction, eps=eps, reference=reference), weights)
    cost, prior = -reconstruction * log_densities(x), PROBS if reference == "model" else np.full(2, 0.5)
    if eps:
        rows = -eps * logsumexp(np.log(prior) - cost / eps, axis=1)
        posterior = softmax(np.log(prior) - cost / eps, axis=1)
    else:
        rows, posterior = cost.min(1), np.eye(2)[cost.argmin(1)]
    share = weights / weights.sum()
    assert terms.total.item() == pytest.approx((share * rows).sum(), rel=1e-10)
    if (eps, reconstruction, reference) != (1.0, 1.0, "model"):  # a likelihood is not told apart in its parts
        assert terms.reconstruction.item() == pytest.approx((share[:, None] * posterior * cost).sum(), rel=1e-7)
    assert terms.entropic.item() == pytest.approx(terms.total.item() - terms.reconstruction.item(), abs=1e-10)


def test_the_entropic_term_is_eps_times_a_divergence_between_posterior_and_prior():
    x = RNG.normal(size=30)
    posterior = softmax(np.log(PROBS) + log_densities(x) / 0.5, axis=1)
    kl = (posterior * (np.log(posterior) - np.log(PROBS))).sum(1).mean()
    assert mixture(x, entropic(eps=0.5)).entropic.item() == pytest.approx(0.5 * kl, rel=1e-6)


@pytest.mark.parametrize("eps", [0.0, 0.5, 1.0])
def test_a_category_with_children_may_be_missing_in_some_rows(eps):
    """Where it is seen, its own probability is part of the cost; where it is not, of the prior."""
    graph = otp.Graph([("g", "h"), ("g", "x"), ("h", "x")])
    model = otp.Model(graph, {"g": m.Categorical(2), "h": m.Categorical(3), "x": m.Normal()})
    g, h = np.array([0.2, 0.8]), np.array([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2]])
    loc, scale = RNG.normal(size=(2, 3)), RNG.uniform(0.5, 1.5, (2, 3))
    params = {"g": {"probs": g}, "h": {"probs": h}, "x": {"loc": loc, "scale": scale}}
    table = pd.DataFrame(
        {"g": RNG.integers(0, 2, 60), "h": RNG.integers(0, 3, 60), "x": RNG.normal(size=60)}, dtype=float
    )
    table = table.mask(RNG.random(table.shape) < 0.3)
    rows = []
    for g_cell, h_cell, x in table.to_numpy():
        prior, cost = np.zeros((2, 3)), np.zeros((2, 3))
        prior[~np.isnan([g_cell]) & (np.arange(2) != g_cell)] = -np.inf
        prior[:, ~np.isnan([h_cell]) & (np.arange(3) != h_cell)] = -np.inf
        if np.isnan(g_cell) and np.isnan(h_cell) and np.isnan(x):
            rows.append(0.0)
            continue
        for one, cell in ((np.log(g)[:, None] + np.zeros((2, 3)), g_cell), (np.log(h), h_cell)):
            prior, cost = (prior + one, cost) if np.isnan(cell) else (prior, cost - one)
        if not np.isnan(x):
            cost = cost + 0.5 * ((x - loc) / scale) ** 2 + np.log(scale) + 0.5 * np.log(2 * np.pi)
        rows.append(-eps * logsumexp(prior - cost / eps) if eps else cost[np.isfinite(prior)].min())
    found = terms_of(model, table, params, entropic(eps=eps))
    assert found.total.item() == pytest.approx(np.mean(rows), rel=1e-9)


# -- the push-forward term --------------------------------------------------------------------------------------------


def energy(points, p, q):
    """Energy distance between two weightings of the same points."""
    gaps = np.linalg.norm(points[:, None] - points[None], axis=-1)
    return 2 * p @ gaps @ q - p @ gaps @ p - q @ gaps @ q


@pytest.mark.parametrize("eps", [0.0, 0.5, 1.0])
def test_the_posterior_of_a_root_is_held_to_its_prior(eps):
    x = RNG.normal(size=50)
    if eps:
        posterior = softmax(np.log(PROBS) + log_densities(x) / eps, axis=1)
    else:
        posterior = np.eye(2)[log_densities(x).argmax(1)]
    expected = energy(np.eye(2), posterior.mean(0), PROBS)
    assert mixture(x, entropic(eta=3.0, eps=eps)).divergence.item() == pytest.approx(3 * expected, rel=1e-8)


@pytest.mark.parametrize("divergence", [Energy(), MMD(), Wasserstein()], ids=lambda d: type(d).__name__)
def test_the_term_vanishes_where_the_posterior_is_the_prior(divergence):
    """A child that tells nothing: every row's posterior is the prior."""
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(3), "x": m.Normal()})
    params = {"z": {"probs": [0.2, 0.3, 0.5]}, "x": {"loc": [0.0] * 3, "scale": [1.0] * 3}}
    frame = pd.DataFrame({"x": RNG.normal(size=20)})
    found = terms_of(model, frame, params, entropic(eta=1.0, divergence=divergence))
    assert found.divergence.item() == pytest.approx(0, abs=1e-8)


def test_families_take_their_parents_from_the_posterior():
    """u -> v, both hidden: D((v, u) pushed, (v from its mechanism, u pushed)), and D(u pushed, u)."""
    graph = otp.Graph([("u", "v"), ("u", "x"), ("v", "x")], hidden=["u", "v"])
    model = otp.Model(graph, {"u": m.Categorical(2), "v": m.Categorical(2), "x": m.Normal()})
    u, v = np.array([0.4, 0.6]), np.array([[0.7, 0.3], [0.2, 0.8]])
    loc = np.array([[-2.0, 0.0], [1.0, 3.0]])
    x = RNG.normal(1.0, 2.0, size=30)
    joint = np.log(u[:, None] * v)[None] - 0.5 * (x[:, None, None] - loc) ** 2
    pushed = np.exp(joint - logsumexp(joint, axis=(1, 2), keepdims=True)).mean(0)  # (u, v)
    points = np.array([[*np.eye(2)[b], *np.eye(2)[a]] for a in (0, 1) for b in (0, 1)])
    model_weights = pushed.sum(1, keepdims=True) * v
    expected = energy(np.eye(2), pushed.sum(1), u) + energy(points, pushed.ravel(), model_weights.ravel())
    params = {"u": {"probs": u}, "v": {"probs": v}, "x": {"loc": loc, "scale": np.ones((2, 2))}}
    found = terms_of(model, pd.DataFrame({"x": x}), params, entropic(eta=1.0))
    assert found.divergence.item() == pytest.approx(expected, rel=1e-6)


def test_all_rows_are_pooled_before_they_are_compared():
    """Rows that miss a parent, or show nothing at all: the hidden node's posterior is that of all rows."""
    graph = otp.Graph([("z", "a"), ("z", "x"), ("a", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "a": m.Categorical(2), "x": m.Normal()})
    a_table, loc = np.array([[0.8, 0.2], [0.3, 0.7]]), np.array([[-1.0, 0.0], [1.0, 3.0]])
    a = RNG.integers(0, 2, 40).astype(float)
    a[:10] = np.nan
    x, weights = RNG.normal(size=40), RNG.uniform(0.5, 2.0, 40)
    x[:3] = np.nan
    joint = np.log(PROBS[:, None] * a_table)[None] - np.nan_to_num(0.5 * (x[:, None, None] - loc) ** 2)  # (row, z, a)
    for value in (0, 1):
        joint[a == 1 - value, :, value] = -np.inf
    posterior = np.exp(joint - logsumexp(joint, axis=(1, 2), keepdims=True)).sum(2)
    expected = energy(np.eye(2), (weights / weights.sum()) @ posterior, PROBS)
    params = {"z": {"probs": PROBS}, "a": {"probs": a_table}, "x": {"loc": loc, "scale": np.ones((2, 2))}}
    found = terms_of(model, pd.DataFrame({"a": a, "x": x}), params, entropic(eta=1.0), weights)
    assert found.divergence.item() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("reference", ["model", "uniform"])
def test_terms_have_gradients_in_every_parameter(reference):
    """Against differences of the loss, in three replicas at once."""
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
    method = entropic(eta=0.5, eps=0.7, reference=reference)
    problem, start = problem_of(model, pd.DataFrame({"x": RNG.normal(size=12)}), method)
    points = start + 0.3 * torch.randn(3, start.shape[1], generator=torch.Generator().manual_seed(0)).double()
    leaf = points.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.loss(leaf).total.sum(), leaf)
    steps = 1e-5 * torch.eye(points.shape[1]).double()
    differences = [(problem.loss(points + step).total - problem.loss(points - step).total) / 2e-5 for step in steps]
    torch.testing.assert_close(gradient, torch.stack(differences, -1), rtol=1e-6, atol=1e-8)


def test_a_fit_with_a_push_forward_term_finds_the_weights():
    rng = np.random.default_rng(1)
    x = np.where(rng.random(200) < 0.3, rng.normal(-2, 1, 200), rng.normal(2, 1, 200))
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
    method = entropic(eta=2.0, eps=0.5)
    otp.fit(model, pd.DataFrame({"x": x}), method=method, seed=0)
    assert sorted(np.ravel(model.params()["z"]["probs"])) == pytest.approx([0.3, 0.7], abs=0.1)
