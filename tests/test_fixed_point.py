"""Anderson's mixing, where the fixed point is known."""

import numpy as np
import torch

from otpdag.numerics import FixedPoint


def iterated(function, point, times):
    course = FixedPoint().at(point)
    for _ in range(times):
        course = course.with_image(function(course.begin))
        course = course.at(course.best())
    return course.begin


def test_a_slow_linear_map_is_solved_in_as_many_steps_as_it_has_directions():
    rng = np.random.default_rng(0)
    basis = rng.normal(size=(3, 3))
    slope = torch.as_tensor(basis @ np.diag([0.97, 0.6, -0.3]) @ np.linalg.inv(basis))
    shift = torch.as_tensor(rng.normal(size=3))
    expected = torch.linalg.solve(torch.eye(3).double() - slope, shift)
    starts = torch.as_tensor(rng.normal(size=(2, 3)))
    found = iterated(lambda x: x @ slope.T + shift, starts, 6)
    torch.testing.assert_close(found, expected.expand(2, 3), rtol=1e-4, atol=1e-4)
    plain = starts
    for _ in range(6):
        plain = plain @ slope.T + shift
    assert (plain - expected).norm() > 100 * (found - expected).norm()


def test_replicas_do_not_mix():
    function = torch.cos
    both = iterated(function, torch.tensor([[0.1, 0.2], [1.4, -0.7]]).double(), 9)
    alone = iterated(function, torch.tensor([[1.4, -0.7]]).double(), 9)
    torch.testing.assert_close(both[1:], alone)
    torch.testing.assert_close(both, torch.full_like(both, 0.7390851332151607), rtol=1e-5, atol=1e-5)


def test_a_correction_that_goes_too_far_is_left_out():
    """Steps that hardly change would be extrapolated without end: the plain image is taken."""
    course = FixedPoint().at(torch.zeros(1, 1)).with_image(torch.ones(1, 1))
    image = torch.tensor([[1.9999]])
    course = course.at(course.best()).with_image(image)
    assert torch.equal(course.best(), image)


def test_one_start_serves_many_replicas():
    course = FixedPoint().at(torch.zeros(1, 2)).with_image(torch.ones(3, 2))
    course = course.at(course.best()).with_image(torch.full((3, 2), 1.5))
    torch.testing.assert_close(course.best(), torch.full((3, 2), 2.0))
