"""Kernel discrepancies against scikit-learn's kernels, their definition and finite differences."""

import pytest
import torch
from sklearn.metrics.pairwise import rbf_kernel

from otpdag.divergences import MMD
from otpdag.divergences.base import is_uniform
from otpdag.divergences.kernel import _median, gaussian
from otpdag.errors import DataError, ModelError


def inverse_multiquadric(s):
    return torch.rsqrt(1 + s)


KERNELS = [gaussian, inverse_multiquadric]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_weights(*shape, seed=0):
    return 0.1 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_it_agrees_with_the_kernels_of_scikit_learn():
    x, y = draw(1, 12, 3), draw(1, 9, 3, seed=1) + 1
    gamma = 1 / (2 * 1.5**2)
    own, other, across = (rbf_kernel(u[0].numpy(), v[0].numpy(), gamma) for u, v in ((x, x), (y, y), (x, y)))
    biased = own.mean() + other.mean() - 2 * across.mean()
    assert MMD(bandwidth=1.5, unbiased=False)(x, y).item() == pytest.approx(biased)
    unbiased = (own.sum() - 12) / 132 + (other.sum() - 9) / 72 - 2 * across.mean()
    assert MMD(bandwidth=1.5)(x, y).item() == pytest.approx(unbiased)


@pytest.mark.parametrize(
    ("kernel", "value"),
    [(gaussian, -2.0), (inverse_multiquadric, -0.5 * torch.log(torch.tensor(5.0)).item())],
)
def test_kernels_by_hand(kernel, value):
    """Two single points at distance 4 and bandwidth 2: k(0) - k(4) on both sides."""
    x, y = torch.zeros(1, 1, 1), torch.full((1, 1, 1), 4.0)
    expected = 2 - 2 * torch.exp(torch.tensor(value))
    torch.testing.assert_close(MMD(kernel, bandwidth=2.0, unbiased=False)(x, y), expected[None])


def test_several_bandwidths_are_averaged():
    x, y = draw(1, 12, 3), draw(1, 9, 3, seed=1) + 1
    apart = torch.stack([MMD(bandwidth=h)(x, y) for h in (0.5, 1.0, 2.0)]).mean(0)
    torch.testing.assert_close(MMD(bandwidth=1.0, scales=(0.5, 1.0, 2.0))(x, y), apart)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_median_makes_it_blind_to_units(kernel):
    x, y, a = draw(2, 12, 3), draw(2, 9, 3, seed=1) + 1, draw_weights(2, 12)
    torch.testing.assert_close(MMD(kernel)(1000 * x, 1000 * y), MMD(kernel)(x, y))
    torch.testing.assert_close(MMD(kernel)(1000 * x, 1000 * y, a), MMD(kernel)(x, y, a))


def test_the_median_is_taken_over_distances_between_the_samples():
    x, y = draw(1, 11, 3), draw(1, 9, 3, seed=1) + 1
    median = torch.cdist(x, y).median().item()
    torch.testing.assert_close(MMD()(x, y), MMD(bandwidth=median)(x, y))


def test_samples_at_one_point_are_fine():
    x = torch.zeros(1, 3, 2, requires_grad=True)
    value = MMD()(x, torch.zeros(1, 3, 2))
    value.sum().backward()
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.isfinite(x.grad).all()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [*KERNELS, lambda s: 1 / (1 + s).square()])
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradients_in_samples_and_weights_are_those_of_finite_differences(kernel, unbiased):
    divergence = MMD(kernel, bandwidth=1.0, scales=(0.7, 2.0), unbiased=unbiased)
    x, y = draw(2, 4, 2).requires_grad_(), draw(2, 5, 2, seed=1).requires_grad_()
    a, b = draw_weights(2, 4).requires_grad_(), draw_weights(2, 5, seed=1).requires_grad_()
    # A point's distance to itself is a border of the square root: only the sum of its two gradients is zero.
    assert torch.autograd.gradcheck(divergence, (x, y, a, b), atol=1e-4)


def test_one_point_has_no_unbiased_mean():
    with pytest.raises(DataError, match="`unbiased=True` needs at least two points"):
        MMD()(torch.zeros(1, 1, 1), torch.ones(1, 3, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "linear"}, "`kernel` must be a function of squared distances; got 'linear'"),
        ({"bandwidth": "mean"}, "`bandwidth` must be 'median' or a positive number; got 'mean'"),
        ({"bandwidth": 0.0}, "`bandwidth` must be 'median' or a positive number; got 0.0"),
        ({"scales": ()}, r"`scales` must hold positive numbers; got \(\)"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        MMD(**options)


@pytest.mark.parametrize("sizes", [(3, 4), (5, 5), (6, 8), (7, 9)])
def test_written_out_weights_have_the_same_lower_median(sizes):
    """With an even number of pairs the running sum is one half exactly at the median, up to rounding."""
    x, y = draw(2, sizes[0], 3), draw(2, sizes[1], 3, seed=1)
    squared = torch.cdist(x, y).square()
    even = [torch.ones(1, size).double() / size for size in sizes]
    torch.testing.assert_close(_median(squared, *even), squared.flatten(1).median(-1).values)
    written = [one.clone().requires_grad_() for one in even]
    assert not is_uniform(written[0])
    torch.testing.assert_close(_median(squared, *written).detach(), _median(squared, *even))


def test_the_median_is_weighted():
    x, y, a, b = draw(2, 6, 3), draw(2, 8, 3, seed=1), draw_weights(2, 6), draw_weights(2, 8, seed=1)
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
    squared = torch.cdist(x, y).square()
    found = _median(squared, a, b)
    for r in range(2):
        pairs = sorted((squared[r, i, j].item(), (a[r, i] * b[r, j]).item()) for i in range(6) for j in range(8))
        reached = [sum(mass for _, mass in pairs[: n + 1]) >= 0.5 for n in range(48)]
        assert found[r].item() == pairs[reached.index(True)][0]


def test_the_median_of_samples_at_one_point_counts_as_one():
    x, y = torch.zeros(1, 3, 2).double(), torch.zeros(1, 4, 2).double()
    y[0, 2], y[0, 3] = 1.0, 2.0  # most pairs are at one point
    expected = MMD(bandwidth=1.0)(x, y)
    assert not torch.allclose(expected, MMD(bandwidth=3.0)(x, y))
    torch.testing.assert_close(MMD()(x, y), expected)
    torch.testing.assert_close(MMD(scales=(3.0,))(x, y), MMD(bandwidth=3.0)(x, y))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_median_is_not_differentiated(weighted):
    x, y = draw(1, 6, 2).requires_grad_(), draw(1, 5, 2, seed=1).requires_grad_()
    weights = (draw_weights(1, 6).requires_grad_(), draw_weights(1, 5, seed=1).requires_grad_()) if weighted else ()
    squared = torch.cdist(x.detach(), y.detach()).square().flatten()
    if weighted:
        share, other = (one.detach()[0] / one.detach().sum() for one in weights)
        order = squared.argsort()
        below = torch.outer(share, other).flatten()[order].cumsum(0)
        median = squared[order][(below < 0.5).sum()].sqrt().item()
    else:
        median = squared.median().sqrt().item()
    arguments = (x, y, *weights)
    found = torch.autograd.grad(MMD(scales=(0.5, 3.0))(*arguments).sum(), arguments)
    fixed = MMD(bandwidth=median, scales=(0.5, 3.0))(*arguments).sum()
    for one, expected in zip(found, torch.autograd.grad(fixed, arguments), strict=True):
        torch.testing.assert_close(one, expected)
