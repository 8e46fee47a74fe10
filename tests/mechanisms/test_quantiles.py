"""Quantiles and distribution functions beside SciPy, their gradients beside finite differences."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from otpdag.mechanisms import quantiles as q

GENERATOR = np.random.default_rng(0)
LAWS = {
    "gamma": (q.GAMMA.quantile, q.GAMMA.cdf, stats.gamma, 1),
    "beta": (q.BETA.quantile, q.BETA.cdf, stats.beta, 2),
    "student": (q.STUDENT.quantile, q.STUDENT.cdf, stats.t, 1),
}
LEVELS = np.array([0.02, 0.3, 0.49, 0.51, 0.8, 0.98])


def shapes_of(many):
    return [torch.as_tensor(GENERATOR.uniform(0.8, 6.0, len(LEVELS))) for _ in range(many)]


@pytest.mark.parametrize("name", LAWS)
def test_values_are_scipys(name):
    quantile, cdf, law, many = LAWS[name]
    u, shapes = torch.as_tensor(LEVELS), shapes_of(many)
    point = quantile(u, *shapes)
    np.testing.assert_allclose(point, law.ppf(LEVELS, *shapes), rtol=1e-8)
    np.testing.assert_allclose(cdf(point, *shapes), LEVELS, rtol=1e-8)


def test_uniform_numbers_at_the_ends_have_finite_quantiles():
    ends, shape = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([2.0, 3.0], dtype=torch.float64)
    for found in (q.GAMMA.quantile(ends, shape), q.BETA.quantile(ends, shape, shape)):
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("df", [2.0, 2.5, 5.0, 50.0])
def test_student_quantiles_far_out_follow_the_power_law_of_the_tail(df):
    """For large |x| the distribution function is c |x|^-df, so that levels of any size have their logarithm."""
    levels = torch.tensor([0.0, 1e-305, 1e-150, 1e-99], dtype=torch.float64)
    found = q.STUDENT.quantile(levels, torch.tensor(df).double()).numpy()
    assert (found[:-1] < found[1:]).all()
    assert found[-1] < 0
    log_c = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(math.pi) + (df / 2 - 1) * math.log(df)
    smallest = [torch.finfo(torch.float64).tiny, *levels[1:].tolist()]
    np.testing.assert_allclose(np.log(-found), (log_c - np.log(smallest)) / df, rtol=1e-5)
    np.testing.assert_allclose(stats.t(df).cdf(found), smallest, rtol=1e-9)
    ends = q.STUDENT.quantile(torch.tensor([0.0, 1.0]), torch.tensor(df))
    assert torch.isfinite(ends).all()
    assert ends[0] < 0 < ends[1]


@pytest.mark.parametrize("name", LAWS)
def test_gradients_are_those_of_finite_differences(name):
    quantile, cdf, _, many = LAWS[name]
    u, shapes = torch.as_tensor(LEVELS).requires_grad_(), [one.requires_grad_() for one in shapes_of(many)]
    assert torch.autograd.gradcheck(quantile, (u, *shapes), rtol=1e-4, atol=1e-6)
    point = quantile(u, *shapes).detach().requires_grad_()
    assert torch.autograd.gradcheck(cdf, (point, *shapes), rtol=1e-4, atol=1e-6)
    for function, first in ((quantile, u), (cdf, point)):  # also where only one of them is asked for
        (alone,) = torch.autograd.grad(function(first.detach(), *shapes).sum(), shapes[0])
        (both, *_) = torch.autograd.grad(function(first, *shapes).sum(), [shapes[0], first])
        torch.testing.assert_close(alone, both)
        (alone,) = torch.autograd.grad(function(first, *(one.detach() for one in shapes)).sum(), first)
        assert torch.isfinite(alone).all()


def test_slopes_hold_to_many_digits():
    """The step of a central difference leaves seven digits, beside two of larger steps extrapolated."""
    shape = torch.tensor([2.5]).double().requires_grad_()
    (slope,) = torch.autograd.grad(q.GAMMA.cdf(torch.tensor([1.7]).double(), shape).sum(), shape)

    def central(step):
        return (stats.gamma.cdf(1.7, 2.5 + step) - stats.gamma.cdf(1.7, 2.5 - step)) / (2 * step)

    exact = (4 * central(5e-4) - central(1e-3)) / 3
    assert slope.item() == pytest.approx(exact, rel=3e-8)


def test_the_logarithm_of_a_quantile_is_known_where_the_quantile_underflows():
    u, shape = torch.as_tensor(np.array([0.5, 0.5, 0.9])), torch.as_tensor(np.array([2.0, 1e-3, 0.5]))
    found = q.gamma_log_quantile(u, shape)
    assert found[0].item() == pytest.approx(np.log(stats.gamma.ppf(0.5, 2.0)), rel=1e-10)
    assert found[2].item() == pytest.approx(np.log(stats.gamma.ppf(0.9, 0.5)), rel=1e-10)
    series = (np.log(0.5) + math.lgamma(1.001)) / 1e-3
    assert found[1].item() == pytest.approx(series, rel=1e-9)


@pytest.mark.parametrize("rate", [1e-3, 0.3, 1.0, 7.5, 120.0, 4e4])
def test_counts_are_scipys(rate):
    u = torch.as_tensor(np.concatenate([GENERATOR.uniform(size=200), [1e-9, 1e-4, 0.9999, 1 - 1e-9]]))
    np.testing.assert_array_equal(q.poisson_quantile(u, torch.tensor(rate).double()), stats.poisson.ppf(u, rate))


def test_counts_of_large_rates_are_near():
    u, rate = torch.as_tensor(np.array([0.01, 0.5, 0.999])), torch.as_tensor(np.array([2e6, 5e7, 1e8]))
    found = q.poisson_quantile(u, rate).numpy()
    assert (np.abs(found - stats.poisson.ppf(u, rate)) <= 1e-2 * np.sqrt(rate.numpy())).all()
    mixed = q.poisson_quantile(torch.as_tensor(np.array([[0.2], [0.7]])), torch.tensor([3.0, 5e6]).double())
    assert mixed.shape == (2, 2)
    np.testing.assert_array_equal(mixed[:, 0], stats.poisson.ppf([0.2, 0.7], 3.0))
