"""Beta nodes: where they start, and what they do at the ends."""

import numpy as np
import pytest
import torch
from scipy import special, stats

from otpdag import mechanisms as m
from tests.mechanisms.plain import FAMILY, as_parents, line_of, pooled, table


def test_concentrations_start_from_the_residuals_of_a_regression():
    rng = np.random.default_rng(0)
    a, r, weight = table(rng)
    mean = special.expit(0.5 - 0.4 * a + 0.6 * r)[:, None].repeat(2, 1)
    value = rng.beta(6 * mean, 6 * (1 - mean))
    found = m.Beta(2).setup(FAMILY).start(torch.as_tensor(value), as_parents(a, r), torch.as_tensor(weight))
    fitted = special.expit(line_of(found, "logit_mean", a, r))
    share = pooled((value - fitted) ** 2 / (fitted * (1 - fitted)), a, weight)
    np.testing.assert_allclose(found["concentration"], 1 / share - 1, rtol=1e-9)


def test_concentrations_start_within_bounds():
    a, r, weight = table(np.random.default_rng(1))
    for value, bound in ((np.full(60, 0.3), m.Beta.starts_between[1]), ((r > 0) + 0.0, m.Beta.starts_between[0])):
        found = (
            m.Beta()
            .setup(FAMILY)
            .start(torch.as_tensor(value).unsqueeze(-1), as_parents(a, 0 * r), torch.as_tensor(weight))
        )
        np.testing.assert_allclose(found["concentration"], bound)


def test_values_at_the_ends_have_finite_densities_and_noise():
    node = m.Beta().setup(m.Family("x"))
    params = {
        "logit_mean": torch.tensor([[[0.4]]], dtype=torch.float64),
        "concentration": torch.tensor([[[0.7]]], dtype=torch.float64),
    }
    ends = torch.tensor([[[0.0], [1.0], [0.5]]], dtype=torch.float64)
    law = stats.beta(0.7 * special.expit(0.4), 0.7 * special.expit(-0.4))
    info = np.finfo(float)
    inside = np.array([info.tiny, 1 - info.eps / 2, 0.5])
    np.testing.assert_allclose(node.log_prob(params, ends, {})[0], law.logpdf(inside), rtol=1e-6)
    np.testing.assert_allclose(node.abduct(params, ends, {}, ends)[0, :, 0], law.cdf(inside), rtol=1e-6)
    drawn = node.forward(params, {}, ends)
    assert ((drawn > 0) & (drawn < 1)).all()


def test_shapes_stay_above_zero_however_far_the_mean_is():
    node = m.Beta().setup(m.Family("x"))
    for logit, at in ((1e4, 15.0), (-1e4, -15.0), (2.0, 2.0)):
        params = {"logit_mean": torch.full((1, 1, 1), logit).double(), "concentration": torch.ones(1, 1, 1).double()}
        value = torch.full((1, 1, 1), 0.3, dtype=torch.float64)
        found = node.log_prob(params, value, {}).item()
        assert found == pytest.approx(stats.beta(special.expit(at), special.expit(-at)).logpdf(0.3), rel=1e-9)
