"""Dirichlet nodes: where they start, cells that are missing, and the noise that they come from."""

import numpy as np
import pytest
import torch
from scipy import stats

from otpdag import mechanisms as m
from otpdag.spaces import Discrete
from tests.mechanisms.plain import pooled

FAMILY = m.Family("x", (("a", Discrete(3)),))
ALPHA = np.array([0.7, 1.5, 3.0])


def rows(rng, alpha=ALPHA, many=80):
    a = rng.choice(3, many, p=[0.5, 0.45, 0.05])
    return a, rng.dirichlet(alpha, many), rng.uniform(0.5, 2.0, many)


def started(node, a, value, weight):
    parents = {"a": torch.eye(3).double()[torch.as_tensor(a)]}
    return node.setup(FAMILY).start(torch.as_tensor(value), parents, torch.as_tensor(weight))["concentration"].numpy()


def test_it_starts_from_means_and_the_total_variance():
    a, value, weight = rows(np.random.default_rng(0))
    mean = pooled(value, a, weight)
    variance = (pooled(value**2, a, weight) - mean**2).sum(-1, keepdims=True)
    total = (mean * (1 - mean)).sum(-1, keepdims=True) / variance - 1
    np.testing.assert_allclose(started(m.Dirichlet(3), a, value, weight), mean * total, rtol=1e-9)


def test_totals_start_within_bounds_and_rare_coordinates_above_zero():
    a, value, weight = rows(np.random.default_rng(2))
    same = np.tile([[0.2, 0.3, 0.5]], (80, 1))
    np.testing.assert_allclose(started(m.Dirichlet(3), a, same, weight).sum(-1), m.Dirichlet.totals[1])
    corners = np.eye(3)[np.arange(80) % 3]
    np.testing.assert_allclose(started(m.Dirichlet(3), a, corners, weight).sum(-1), m.Dirichlet.totals[0], rtol=0.05)
    value[:, 2] = 0.0
    value /= value.sum(-1, keepdims=True)
    found = started(m.Dirichlet(3), a, value, weight)
    assert (found[:, 2] > 0).all()
    assert (found[:, 2] < 1e-3 * found[:, :2].sum(-1)).all()


@pytest.mark.parametrize("seen", [[True, True, True], [True, False, True], [False, False, True], [False, False, False]])
def test_coordinates_that_are_seen_and_the_rest_of_their_mass_are_dirichlet_again(seen):
    value = np.array([0.2, 0.3, 0.5])
    node, params = m.Dirichlet(3).setup(m.Family("x")), {"concentration": torch.as_tensor(ALPHA).reshape(1, 1, 3)}
    mask = torch.tensor(seen).reshape(1, 1, 3)
    found = node.log_prob(params, torch.as_tensor(value).reshape(1, 1, 3), {}, mask).item()
    seen = np.array(seen)
    if seen.all():
        expected = stats.dirichlet(ALPHA).logpdf(value)
    elif not seen.any():
        expected = 0.0
    else:
        merged = np.append(ALPHA[seen], ALPHA[~seen].sum())
        expected = stats.dirichlet(merged).logpdf(np.append(value[seen], value[~seen].sum()))
    assert found == pytest.approx(expected, abs=1e-9)


def test_noise_that_is_found_gives_the_vector_and_has_the_right_level():
    node = m.Dirichlet(3).setup(m.Family("x"))
    params = {"concentration": torch.as_tensor(ALPHA).reshape(1, 1, 3)}
    value = torch.tensor([[[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]], dtype=torch.float64)
    uniform = torch.tensor([[[0.3, 0.9, 0.9], [0.8, 0.1, 0.1]]], dtype=torch.float64)
    noise = node.abduct(params, value, {}, uniform)
    torch.testing.assert_close(node.forward(params, {}, noise), value, rtol=1e-6, atol=1e-9)
    # the total of the gamma variables is at the level of the first uniform number
    totals = stats.gamma(ALPHA).ppf(noise[0].numpy()).sum(-1)
    np.testing.assert_allclose(totals, stats.gamma(ALPHA.sum()).ppf([0.3, 0.8]), rtol=1e-6)


def test_missing_coordinates_share_what_the_seen_ones_leave():
    node = m.Dirichlet(3).setup(m.Family("x"))
    params = {"concentration": torch.as_tensor(ALPHA).reshape(1, 1, 3)}
    noise = torch.tensor([[[0.4, 0.5, 0.6]] * 3], dtype=torch.float64)
    fresh = node.forward(params, {}, noise)[0, 0].numpy()
    value = torch.tensor([[[0.2, 0.0, 0.5], [0.2, 0.0, 0.0], [0.2, 0.3, 0.5]]], dtype=torch.float64)
    mask = torch.tensor([[[True, False, True], [True, False, False], [True, True, True]]])
    found = node.complete(params, value, {}, mask, noise)[0].numpy()
    share = fresh[1] / (fresh[1] + fresh[2])
    np.testing.assert_allclose(found, [[0.2, 0.3, 0.5], [0.2, 0.8 * share, 0.8 * (1 - share)], [0.2, 0.3, 0.5]])
    over = torch.tensor([[[0.7, 0.0, 0.6]]], dtype=torch.float64)  # more than all
    assert node.complete(params, over, {}, mask[:, :1], noise[:, :1])[0, 0, 1].item() == 0.0


def test_its_mean_is_in_proportion_to_the_concentrations():
    params = {"concentration": torch.as_tensor(ALPHA).reshape(1, 1, 3)}
    np.testing.assert_allclose(m.Dirichlet(3).setup(m.Family("x")).mean(params, {}).flatten(), ALPHA / ALPHA.sum())
