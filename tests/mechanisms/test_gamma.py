"""Gamma nodes: where they start, and how far their means reach."""

import math

import numpy as np
import pytest
import torch

from otpdag import mechanisms as m
from tests.mechanisms.plain import FAMILY, as_parents, line_of, pooled, table


def plain_shape(value, log_mean, a, weight):
    """Minka (2002), from the ratios of values to their fitted means."""
    ratio = np.maximum(value / np.exp(np.clip(log_mean, -60, 60)), 1e-12)
    gap = np.maximum(np.log(pooled(ratio, a, weight)) - pooled(np.log(ratio), a, weight), 1e-6)
    return np.clip((3 - gap + np.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap), 1e-2, 1e4)


@pytest.mark.parametrize(("level", "slope"), [(0.3, 0.5), (50.0, 12.0), (-50.0, 12.0)])
def test_shapes_start_from_the_ratios_to_a_regression(level, slope):
    rng = np.random.default_rng(0)
    a, r, weight = table(rng)
    value = np.exp(level + slope * r + 0.4 * a)[:, None] * rng.gamma(2.0 + a, size=(2, 60)).T
    node = m.Gamma(2).setup(FAMILY)
    found = node.start(torch.as_tensor(value), as_parents(a, r), torch.as_tensor(weight))
    expected = plain_shape(value, line_of(found, "log_mean", a, r), a, weight)
    np.testing.assert_allclose(found["shape"], expected, rtol=1e-9)


def test_values_without_spread_start_with_the_largest_shape():
    a, r, weight = table(np.random.default_rng(1))
    found = m.Gamma().setup(FAMILY).start(torch.full((60, 1), 3.0).double(), as_parents(a, r), torch.as_tensor(weight))
    assert found["shape"].flatten().tolist() == [1e4] * 3


def test_means_are_bounded_both_ways():
    node = m.Gamma().setup(m.Family("x"))
    for log_mean, bound in ((80.0, 60.0), (-80.0, -60.0), (7.0, 7.0)):
        params = {"log_mean": torch.full((1, 1, 1), log_mean).double(), "shape": torch.ones(1, 1, 1).double()}
        assert node.mean(params, {}).item() == pytest.approx(math.exp(bound))
        value = torch.full((1, 1, 1), math.exp(bound)).double()
        assert node.log_prob(params, value, {}).item() == pytest.approx(-bound - 1)  # exponential, at its mean
