"""Rules for means over noise."""

import numpy as np
import pytest

from otpdag.numerics import quadrature


@pytest.mark.parametrize("points", [48, 160])
def test_the_normal_rule_integrates_moments_exactly(points):
    u, log_weight = quadrature("normal", points)
    moments = [float((log_weight.exp() * u**power).sum()) for power in (0, 1, 2, 4)]
    np.testing.assert_allclose(moments, [1, 0, 1, 3], atol=1e-4)


def test_the_uniform_rule_integrates_moments():
    u, log_weight = quadrature("uniform", 48)
    moments = [float((log_weight.exp() * u**power).sum()) for power in (0, 1, 2)]
    np.testing.assert_allclose(moments, [1, 1 / 2, 1 / 3], atol=1e-4)
