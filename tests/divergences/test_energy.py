"""Energy distance against scipy, its definition and finite differences."""

import pytest
import torch
from scipy.stats import energy_distance

from otpdag.divergences import Energy
from otpdag.errors import DataError


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_weights(*shape, seed=0):
    return 0.1 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("weighted", [False, True])
def test_on_a_line_it_is_the_square_of_scipy(weighted):
    x, y = draw(1, 12, 1), 2 * draw(1, 9, 1, seed=1) + 1
    weights = (draw_weights(1, 12), draw_weights(1, 9, seed=1)) if weighted else ()
    expected = energy_distance(*(value.flatten().numpy() for value in (x, y, *weights))) ** 2
    assert Energy(unbiased=False)(x, y, *weights).item() == pytest.approx(expected)


def test_unbiased_means_are_over_pairs_of_different_points():
    x, y, a = draw(1, 5, 3), draw(1, 4, 3, seed=1), draw_weights(1, 5)
    a = a / a.sum()
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
    mass = sum(a[0, i] * a[0, j] for i, j in pairs)
    own = sum(a[0, i] * a[0, j] * (x[0, i] - x[0, j]).norm() for i, j in pairs) / mass
    other = torch.pdist(y[0]).mean()
    across = (a[0, :, None] * torch.cdist(x[0], y[0])).sum() / 4
    assert Energy()(x, y, a).item() == pytest.approx((2 * across - own - other).item())


@pytest.mark.parametrize("weighted", [False, True])
def test_unbiased_values_average_to_zero_between_draws_of_one_distribution(weighted):
    x, y = draw(2000, 6, 2), draw(2000, 8, 2, seed=1)
    weights = (draw_weights(1, 6), draw_weights(1, 8, seed=1)) if weighted else ()
    values = Energy()(x, y, *weights)
    standard_error = values.std() / 2000**0.5
    assert values.mean().abs() < 3 * standard_error
    assert Energy(unbiased=False)(x, y, *weights).mean() > 10 * standard_error


@pytest.mark.slow
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradients_in_samples_and_weights_are_those_of_finite_differences(unbiased):
    x, y = draw(2, 4, 2).requires_grad_(), draw(2, 5, 2, seed=1).requires_grad_()
    a, b = draw_weights(2, 4).requires_grad_(), draw_weights(2, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(Energy(unbiased), (x, y))
    assert torch.autograd.gradcheck(Energy(unbiased), (x, y, a, b))


@pytest.mark.parametrize("weights", [(), (torch.tensor([[1.0, 0.0]]),)])
def test_one_point_has_no_unbiased_mean(weights):
    x = torch.zeros(1, 2 if weights else 1, 1)
    with pytest.raises(DataError, match="`unbiased=True` needs at least two points with weight"):
        Energy()(x, torch.ones(1, 3, 1), *weights)
