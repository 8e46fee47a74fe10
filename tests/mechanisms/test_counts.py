"""Counts: where they start, how far they reach, and the noise that they come from."""

import numpy as np
import pytest
import torch
from scipy import stats

from otpdag import mechanisms as m
from tests.mechanisms.plain import FAMILY, as_parents, line_of, pooled, table

ROOT = m.Family("x")


def at(log_rate, **others):
    return {
        name: torch.tensor([[[value]]], dtype=torch.float64) for name, value in {"log_rate": log_rate, **others}.items()
    }


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_dispersions_start_from_what_squares_exceed_the_means_by(noise):
    rng = np.random.default_rng(0)
    a, r, weight = table(rng)
    rate = np.exp(1.0 + 0.3 * a + 0.2 * r)[:, None].repeat(2, 1)
    value = rng.poisson(rate * rng.gamma(1.0, size=rate.shape) ** noise).astype(float)
    found = m.NegativeBinomial(2).setup(FAMILY).start(torch.as_tensor(value), as_parents(a, r), torch.as_tensor(weight))
    fitted = np.exp(line_of(found, "log_rate", a, r))
    excess = pooled((value - fitted) ** 2 - fitted, a, weight)
    expected = pooled(fitted**2, a, weight) / np.maximum(excess, 1e-9)
    np.testing.assert_allclose(found["dispersion"], np.clip(expected, *m.NegativeBinomial.starts_between), rtol=1e-9)


def test_rates_are_bounded_above():
    for node in (m.Poisson().setup(ROOT), m.NegativeBinomial().setup(ROOT)):
        params = at(40.0, dispersion=2.0)
        assert node.mean(params, {}).item() == pytest.approx(np.exp(25.0))
    params = {"log_rate": torch.tensor([[[40.0], [1.0]]], dtype=torch.float64)}
    found = m.Poisson().setup(m.Family("x", FAMILY.parents[:1])).coefficients(params)
    assert found[0, 0].tolist() == pytest.approx([-np.exp(25.0), 25.0, -1.0])


def test_noise_of_a_count_lies_between_the_distribution_function_below_it_and_at_it():
    value, uniform = (
        torch.tensor([[[0.0], [1.0], [4.0]]], dtype=torch.float64),
        torch.tensor([[[0.25], [0.5], [0.9]]], dtype=torch.float64),
    )
    for node, law, params in (
        (m.Poisson().setup(ROOT), stats.poisson(2.0), at(np.log(2.0))),
        (m.NegativeBinomial().setup(ROOT), stats.nbinom(3.0, 0.6), at(np.log(2.0), dispersion=3.0)),
    ):
        low, high = law.cdf(np.array([-1, 0, 3])), law.cdf(np.array([0, 1, 4]))
        expected = low + np.array([0.25, 0.5, 0.9]) * (high - low)
        np.testing.assert_allclose(node.abduct(params, value, {}, uniform)[0, :, 0], expected, rtol=1e-9)
        torch.testing.assert_close(node.forward(params, {}, node.abduct(params, value, {}, uniform)), value)


def test_drawn_counts_never_fall_below_zero():
    node, ends = m.NegativeBinomial().setup(ROOT), torch.tensor([[[0.0], [1.0]]], dtype=torch.float64)
    drawn = node.forward(at(-3.0, dispersion=0.5), {}, ends)
    assert drawn[0, 0].item() == 0.0
    assert torch.isfinite(drawn).all()


def test_relaxed_draws_have_the_mean_and_the_variance():
    noise = torch.tensor([[[0.0], [1.0], [-2.0]]], dtype=torch.float64)
    for node, params, variance in (
        (m.Poisson().setup(ROOT), at(1.5), np.exp(1.5)),
        (m.NegativeBinomial().setup(ROOT), at(1.5, dispersion=3.0), np.exp(1.5) + np.exp(3.0) / 3),
    ):
        found = node.relaxed(params, {}, noise, 1.0)[0, :, 0]
        np.testing.assert_allclose(found, np.exp(1.5) + np.array([0, 1, -2]) * np.sqrt(variance))


def test_sums_are_fitted_mean_counts():
    node = m.Poisson(2).setup(ROOT)
    params = {"log_rate": torch.tensor([[[0.3, 0.4]]], dtype=torch.float64)}
    sums = torch.tensor(
        [[[5.0, 4.0, 20.0, 0.0, 9.0]]], dtype=torch.float64
    )  # rows that show each, their counts, factorials
    found = node.fitted(params, sums)["log_rate"][0, 0]
    np.testing.assert_allclose(found, [np.log(4.0), np.log(1e-6 / 4)])
    none = torch.tensor([[[0.0, 4.0, 0.0, 8.0, 9.0]]], dtype=torch.float64)
    np.testing.assert_allclose(node.fitted(params, none)["log_rate"][0, 0], [0.3, np.log(2.0)])
    given = m.Poisson(2, log_rate=0.0).setup(ROOT)
    assert given.fitted(params, sums) == params


def test_units_are_those_of_logarithms_of_counts():
    value, weight = (
        torch.tensor([[0.0], [3.0], [7.0]], dtype=torch.float64),
        torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64),
    )
    units = m.Poisson().setup(ROOT).scaled_to(value, {}, weight).predictor.units
    assert units.out_shift.item() == pytest.approx(np.average(np.log([0.5, 3.5, 7.5]), weights=[1, 2, 1]))
