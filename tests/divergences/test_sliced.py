"""Sliced transport against POT, closed forms and finite differences."""

import ot
import pytest
import torch

from otpdag.divergences import SlicedWasserstein
from otpdag.errors import ModelError


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_weights(*shape, seed=0):
    weights = 0.1 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return weights / weights.sum(-1, keepdim=True)


def directions(features, count, seed):
    draws = draw(features, count, seed=seed)
    return (draws / draws.norm(dim=0)).numpy()


@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("sizes", [(20, 20), (20, 33)])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_agrees_with_pot(p, sizes, weighted):
    x, y = draw(1, sizes[0], 4), draw(1, sizes[1], 4, seed=1) + 0.5
    weights = (draw_weights(1, sizes[0]), draw_weights(1, sizes[1], seed=1)) if weighted else ()
    value = SlicedWasserstein(30, p, seed=7)(x, y, *weights)
    expected = ot.sliced_wasserstein_distance(
        x[0].numpy(), y[0].numpy(), *(w[0].numpy() for w in weights), p=p, projections=directions(4, 30, 7)
    )
    assert value.item() == pytest.approx(expected**p)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_on_a_line_it_is_exact(p):
    x, y, a, b = draw(1, 9, 1), draw(1, 13, 1, seed=1), draw_weights(1, 9), draw_weights(1, 13, seed=1)
    expected = ot.wasserstein_1d(*(value.flatten().numpy() for value in (x, y, a, b)), p=p)
    assert SlicedWasserstein(p=p)(x, y, a, b).item() == pytest.approx(expected.item())


def test_two_gaussians_on_a_line_are_at_their_closed_form_distance():
    x, y = draw(1, 20_000, 1), 2 * draw(1, 30_000, 1, seed=1) + 3
    assert SlicedWasserstein()(x, y).item() == pytest.approx(3**2 + (2 - 1) ** 2, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("sizes", [(6, 6), (5, 7)])
def test_gradients_in_samples_and_weights_are_those_of_finite_differences(p, sizes):
    divergence = SlicedWasserstein(5, p, seed=0)
    x, y = draw(2, sizes[0], 3).requires_grad_(), draw(2, sizes[1], 3, seed=1).requires_grad_()
    a, b = draw_weights(2, sizes[0]).requires_grad_(), draw_weights(2, sizes[1], seed=1).requires_grad_()
    assert torch.autograd.gradcheck(divergence, (x, y))
    assert torch.autograd.gradcheck(divergence, (x, y, a, b))


def test_a_seed_fixes_the_directions_and_a_generator_refreshes_them():
    x, y = draw(1, 10, 3), draw(1, 10, 3, seed=1)
    generator = torch.Generator().manual_seed(0)
    fixed, fresh = SlicedWasserstein(seed=1), SlicedWasserstein()
    assert torch.equal(fixed(x, y, generator=generator), fixed(x, y))
    assert not torch.equal(fresh(x, y, generator=generator), fresh(x, y, generator=generator))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projections": 0}, "projections must be a whole number of at least 1; got 0"),
        ({"p": 0.5}, "`p` must be 1 or 2; got 0.5"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        SlicedWasserstein(**options)


def test_a_line_has_one_direction_and_others_unit_length():
    divergence = SlicedWasserstein(12, seed=3)
    assert divergence._directions(draw(1, 4, 1), None).tolist() == [[1.0]]
    drawn = divergence._directions(draw(1, 4, 5), None)
    assert drawn.shape == (5, 12)
    torch.testing.assert_close(drawn.norm(dim=0), torch.ones(12).double())


def test_one_sided_weights_are_the_same_as_both_written_out():
    x, y, a = draw(1, 6, 2), draw(1, 6, 2, seed=1), draw_weights(1, 6)
    even = torch.ones(1, 6).double() / 6
    divergence = SlicedWasserstein(4, seed=0)
    torch.testing.assert_close(divergence(x, y, a), divergence(x, y, a, even))
    torch.testing.assert_close(divergence(y, x, None, a), divergence(x, y, a))
