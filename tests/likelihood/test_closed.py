"""The objective with the closed-form backward map, against formulas written out by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import logsumexp, softmax

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import encode
from otpdag.divergences import MMD, Energy, Wasserstein
from otpdag.likelihood import enumeration
from otpdag.likelihood.entropic_terms import closed_terms, state_divergence
from otpdag.likelihood.enumeration import SumSizes, group_rows
from otpdag.settings import Weights

RNG = np.random.default_rng(5)
PROBS = np.array([0.3, 0.7])
LOC, SCALE = np.array([-1.0, 2.0]), np.array([0.5, 1.5])


def mixture(x, weights=None, options=None):
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
    model.set_params({"z": {"probs": PROBS}, "x": {"loc": LOC, "scale": SCALE}})
    batch = encode(x[:, None], model._known_schema(), hidden=["z"], weights=weights)
    groups = group_rows(
        model.structure, batch, generator=torch.Generator().manual_seed(0), options=options or SumSizes()
    )
    return model, groups


def log_densities(x):
    return -0.5 * ((x[:, None] - LOC) / SCALE) ** 2 - np.log(SCALE) - 0.5 * np.log(2 * np.pi)


@pytest.mark.parametrize("eps", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("reconstruction", [1.0, 0.5])
def test_soft_minimum_over_states(eps, reconstruction):
    r"""-eps log sum_k pi_k exp(-w c_k / eps); the cheapest state for eps = 0."""
    x, weights = RNG.normal(size=40), RNG.uniform(0.5, 2.0, 40)
    model, groups = mixture(x, weights)
    cost = -reconstruction * log_densities(x)
    if eps:
        rows = -eps * logsumexp(np.log(PROBS) - cost / eps, axis=1)
        posterior = softmax(np.log(PROBS) - cost / eps, axis=1)
    else:
        rows, posterior = cost.min(1), np.eye(2)[cost.argmin(1)]
    share = weights / weights.sum()
    terms = closed_terms(model.structure, model.fitted.naturals, groups, Weights(reconstruction, eps=eps))
    assert terms.total.item() == pytest.approx((share * rows).sum(), rel=1e-10)
    assert terms.reconstruction.item() == pytest.approx((share[:, None] * posterior * cost).sum(), rel=1e-10)
    assert terms.entropic.item() == pytest.approx(terms.total.item() - terms.reconstruction.item(), abs=1e-10)


def test_the_entropic_term_is_eps_times_a_divergence_between_posterior_and_prior():
    x = RNG.normal(size=30)
    model, groups = mixture(x)
    posterior = softmax(np.log(PROBS) + log_densities(x) / 0.5, axis=1)
    kl = (posterior * (np.log(posterior) - np.log(PROBS))).sum(1).mean()
    terms = closed_terms(model.structure, model.fitted.naturals, groups, Weights(eps=0.5))
    assert terms.entropic.item() == pytest.approx(0.5 * kl, rel=1e-8)


@pytest.mark.parametrize("eps", [0.0, 0.5, 1.0])
def test_merged_patterns_equal_separate_ones_for_every_eps(eps):
    """A category with children is missing in some rows; where it is seen, its own probability is part of the cost."""
    graph = otp.Graph([("g", "h"), ("g", "x"), ("h", "x")])
    model = otp.Model(graph, {"g": m.Categorical(2), "h": m.Categorical(3), "x": m.Normal()})
    model.set_params(
        {
            "g": {"probs": [0.2, 0.8]},
            "h": {"probs": [[0.2, 0.3, 0.5], [0.6, 0.2, 0.2]]},
            "x": {"loc": RNG.normal(size=(2, 3)), "scale": RNG.uniform(0.5, 1.5, (2, 3))},
        }
    )
    table = pd.DataFrame(
        {"g": RNG.integers(0, 2, 60), "h": RNG.integers(0, 3, 60), "x": RNG.normal(size=60)}, dtype=float
    )
    table = table.mask(RNG.random(table.shape) < 0.3)
    batch = encode(table, model._known_schema(), hidden=())
    found = []
    for patterns in (12, 1):
        groups = group_rows(
            model.structure,
            batch,
            generator=torch.Generator().manual_seed(0),
            options=SumSizes(patterns=patterns),
        )
        assert len(groups) == (4 if patterns == 12 else 1)
        found.append(closed_terms(model.structure, model.fitted.naturals, groups, Weights(eps=eps)))
    assert found[0].total.item() == pytest.approx(found[1].total.item(), rel=1e-10)
    assert found[0].reconstruction.item() == pytest.approx(found[1].reconstruction.item(), rel=1e-10)


# -- the push-forward term --------------------------------------------------------------------------------------------


def energy(points, p, q):
    """Energy distance between two weightings of the same points."""
    gaps = np.linalg.norm(points[:, None] - points[None], axis=-1)
    return 2 * p @ gaps @ q - p @ gaps @ p - q @ gaps @ q


def states_of(model, groups, eps=1.0):
    found = []
    for group in groups:
        result = enumeration.evaluate(model.structure, model.fitted.naturals, group)
        found.append((group, torch.softmax(result.log_prior + result.log_likelihood / eps, -1)))
    return found


def test_the_posterior_of_a_root_is_held_to_its_prior():
    x = RNG.normal(size=50)
    model, groups = mixture(x)
    pushed = softmax(np.log(PROBS) + log_densities(x), axis=1).mean(0)
    expected = energy(np.eye(2), pushed, PROBS)
    found = state_divergence(model.structure, model.fitted.naturals, states_of(model, groups), Energy())
    assert found.item() == pytest.approx(expected, rel=1e-8)
    terms = closed_terms(model.structure, model.fitted.naturals, groups, Weights(eta=3.0, eps=1.0), divergence=Energy())
    assert terms.divergence.item() == pytest.approx(3 * expected, rel=1e-8)


@pytest.mark.parametrize("divergence", [Energy(), MMD(), Wasserstein()], ids=lambda d: type(d).__name__)
def test_the_term_vanishes_where_the_posterior_is_the_prior(divergence):
    """A child that tells nothing: every row's posterior is the prior."""
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(3), "x": m.Normal()})
    model.set_params({"z": {"probs": [0.2, 0.3, 0.5]}, "x": {"loc": [0.0] * 3, "scale": [1.0] * 3}})
    batch = encode(RNG.normal(size=(20, 1)), model._known_schema(), hidden=["z"])
    groups = group_rows(model.structure, batch, generator=torch.Generator(), options=SumSizes())
    found = state_divergence(model.structure, model.fitted.naturals, states_of(model, groups), divergence)
    assert found.item() == pytest.approx(0, abs=1e-8)


def test_families_take_their_parents_from_the_posterior():
    """u -> v, both hidden: D((v, u) pushed, (v from its mechanism, u pushed)), and D(u pushed, u)."""
    graph = otp.Graph([("u", "v"), ("u", "x"), ("v", "x")], hidden=["u", "v"])
    model = otp.Model(graph, {"u": m.Categorical(2), "v": m.Categorical(2), "x": m.Normal()})
    u, v = np.array([0.4, 0.6]), np.array([[0.7, 0.3], [0.2, 0.8]])
    loc = np.array([[-2.0, 0.0], [1.0, 3.0]])
    model.set_params({"u": {"probs": u}, "v": {"probs": v}, "x": {"loc": loc, "scale": np.ones((2, 2))}})
    x = RNG.normal(1.0, 2.0, size=30)
    batch = encode(x[:, None], model._known_schema(), hidden=["u", "v"])
    groups = group_rows(model.structure, batch, generator=torch.Generator(), options=SumSizes())
    joint = np.log(u[:, None] * v)[None] - 0.5 * (x[:, None, None] - loc) ** 2
    pushed = np.exp(joint - logsumexp(joint, axis=(1, 2), keepdims=True)).mean(0)  # (u, v)
    points = np.array([[*np.eye(2)[b], *np.eye(2)[a]] for a in (0, 1) for b in (0, 1)])
    model_weights = pushed.sum(1, keepdims=True) * v
    expected = energy(np.eye(2), pushed.sum(1), u) + energy(points, pushed.ravel(), model_weights.ravel())
    found = state_divergence(model.structure, model.fitted.naturals, states_of(model, groups), Energy())
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_patterns_are_pooled_before_they_are_compared():
    """Rows that miss a parent stand in a group of their own; the hidden node's posterior is that of all rows."""
    graph = otp.Graph([("z", "a"), ("z", "x"), ("a", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "a": m.Categorical(2), "x": m.Normal()})
    a_table, loc = np.array([[0.8, 0.2], [0.3, 0.7]]), np.array([[-1.0, 0.0], [1.0, 3.0]])
    model.set_params({"z": {"probs": PROBS}, "a": {"probs": a_table}, "x": {"loc": loc, "scale": np.ones((2, 2))}})
    a = RNG.integers(0, 2, 40).astype(float)
    a[:10] = np.nan
    x, weights = RNG.normal(size=40), RNG.uniform(0.5, 2.0, 40)
    batch = encode({"a": a, "x": x}, model._known_schema(), hidden=["z"], weights=weights)
    groups = group_rows(model.structure, batch, generator=torch.Generator(), options=SumSizes())
    assert len(groups) == 2
    joint = np.log(PROBS[:, None] * a_table)[None] - 0.5 * (x[:, None, None] - loc) ** 2  # (row, z, a)
    for value in (0, 1):
        joint[a == 1 - value, :, value] = -np.inf
    posterior = np.exp(joint - logsumexp(joint, axis=(1, 2), keepdims=True)).sum(2)
    expected = energy(np.eye(2), (weights / weights.sum()) @ posterior, PROBS)
    found = state_divergence(model.structure, model.fitted.naturals, states_of(model, groups), Energy())
    assert found.item() == pytest.approx(expected, rel=1e-8)


def test_terms_have_gradients_in_every_parameter():
    x = RNG.normal(size=12)
    model, groups = mixture(x)

    def loss(logits, loc, log_scale):
        naturals = {
            "z": {"probs": torch.softmax(logits, -1)},
            "x": {"loc": loc, "scale": torch.exp(log_scale)},
        }
        terms = closed_terms(model.structure, naturals, groups, Weights(eta=0.5, eps=0.7), divergence=Energy())
        return terms.total

    inputs = [
        torch.tensor(v, dtype=torch.float64, requires_grad=True)
        for v in ([[[0.1, -0.2]]], [[[-1.0], [0.5]]], [[[0.1], [0.2]]])
    ]
    assert torch.autograd.gradcheck(loss, inputs)
