"""The adversarial bound: what it converges to, what it remembers, and what it refuses."""

import copy
import dataclasses
import math

import pytest
import torch

from otpdag.divergences import JensenShannon
from otpdag.divergences.jensen_shannon import _bound, _moments
from otpdag.errors import DataError, ModelError
from otpdag.layers import apply_mlp


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def true_divergence(shift):
    """Integrate the divergence of N(0, 1) and N(shift, 1) on a grid."""
    grid = torch.linspace(-12.0, 12.0 + shift, 20_001, dtype=torch.float64)
    p, q = (torch.exp(-0.5 * (grid - mean) ** 2) / math.sqrt(2 * math.pi) for mean in (0.0, shift))
    middle = 0.5 * (p + q)
    return torch.trapezoid(0.5 * (torch.xlogy(p, p / middle) + torch.xlogy(q, q / middle)), grid).item()


def test_trained_for_long_it_is_the_divergence_of_two_gaussians():
    x, y = draw(1, 2000, 1), draw(1, 2000, 1, seed=1) + 2
    value = JensenShannon(hidden=(16,), steps=200, learning_rate=1e-2)(x, y)
    assert value.item() == pytest.approx(true_divergence(2.0), abs=0.02)


def test_it_never_exceeds_log_two():
    x, y = draw(1, 50, 2), draw(1, 50, 2, seed=1) + 100
    value = JensenShannon(hidden=(16,), steps=100, learning_rate=2e-2)(x, y)
    assert 0.68 < value.item() <= math.log(2)


def test_it_learns_from_call_to_call():
    x, y = draw(1, 200, 2), draw(1, 200, 2, seed=1) + 1
    divergence = JensenShannon()
    values = [divergence(x, y).item() for _ in range(10)]
    assert values[-1] > values[0] > 0


def test_a_step_returns_the_bound_before_it():
    x, y = draw(2, 50, 2), draw(2, 50, 2, seed=1) + 1
    divergence = JensenShannon(steps=0)
    torch.testing.assert_close(divergence.fit_step(x, y), torch.zeros(2, dtype=torch.float64))
    second = divergence.fit_step(x, y)
    assert (second > 0).all()
    assert not second.requires_grad


def test_weights_count_when_it_is_trained_and_evaluated():
    """Between two equal samples only the weights differ."""
    x = draw(1, 100, 1)
    upper = (x[..., 0] > 0).double()
    assert JensenShannon(hidden=(16,), steps=100, learning_rate=2e-2)(x, x, upper, 1 - upper).item() > 0.6


def test_training_leaves_no_gradient_in_the_samples():
    x, y = draw(1, 20, 2).requires_grad_(), draw(1, 20, 2, seed=1)
    JensenShannon().fit_step(x, y)
    assert x.grad is None


def test_a_replaced_copy_is_untrained_and_a_deep_copy_is_not():
    x, y = draw(1, 50, 2), draw(1, 50, 2, seed=1) + 1
    divergence = JensenShannon()
    first = divergence(x, y)
    untrained, trained = dataclasses.replace(divergence), copy.deepcopy(divergence)
    assert torch.equal(untrained(x, y), first)
    assert torch.equal(trained(x, y), divergence(x, y))


def test_the_seed_chooses_the_discriminator():
    x, y = draw(1, 50, 2), draw(1, 50, 2, seed=1) + 1
    assert not torch.equal(JensenShannon(seed=0)(x, y), JensenShannon(seed=1)(x, y))


@pytest.mark.parametrize("shape", [(1, 20, 3), (2, 20, 2)])
def test_a_trained_discriminator_refuses_other_shapes(shape):
    divergence = JensenShannon()
    divergence(draw(1, 20, 2), draw(1, 20, 2, seed=1))
    with pytest.raises(DataError, match=r"must fit the discriminator of earlier calls, .*one JensenShannon object"):
        divergence(draw(*shape), draw(*shape, seed=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "`steps` must not be negative; got -1"),
        ({"learning_rate": 0.0}, "`learning_rate` must be positive; got 0.0"),
        ({"hidden": (8, 0)}, r"`hidden` must hold positive widths; got \(8, 0\)"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        JensenShannon(**options)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_bound_is_its_formula_on_standardised_samples(weighted):
    x, y = 2 * draw(2, 7, 3) + 1, 5 * draw(2, 9, 3, seed=1) - 2
    a, b = (torch.rand(2, n, generator=torch.Generator().manual_seed(n)).double() + 0.1 for n in (7, 9))
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
    divergence = JensenShannon(hidden=(4,), steps=0)
    divergence(x, y, *((a, b) if weighted else ()))
    first = [draw(2, 3, 4, seed=3), draw(2, 1, 4, seed=4), draw(2, 4, 1, seed=5), draw(2, 1, 1, seed=6)]
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(divergence._params) == names
    values = [one.reshape(divergence._params[name].shape) for name, one in zip(names, first, strict=True)]
    divergence._params = dict(zip(names, values, strict=True))
    found = divergence(x, y, *((a, b) if weighted else ()))
    for r in range(2):
        u, v = (a[r], b[r]) if weighted else (torch.ones(7).double() / 7, torch.ones(9).double() / 9)
        both, mass = torch.cat([x[r], y[r]]), torch.cat([u, v]).unsqueeze(-1) / 2
        mean = (mass * both).sum(0)
        scale = (mass * (both - mean) ** 2).sum(0).sqrt()
        alone = {name: value[r : r + 1] for name, value in divergence._params.items()}
        score = apply_mlp(alone, ((both - mean) / scale).unsqueeze(0))[0, :, 0]
        sides = torch.cat([torch.sigmoid(score[:7]), torch.sigmoid(-score[7:])])
        expected = math.log(2) + (mass[:, 0] * sides.log()).sum()
        assert found[r].item() == pytest.approx(expected.item(), rel=1e-10)


def test_a_column_without_spread_is_only_centred():
    x = torch.cat([draw(1, 8, 1), torch.full((1, 8, 1), 3.0).double()], -1)
    centre, scale = _moments(x, x + 0.0, None, None)
    assert (centre[0, 0, 1].item(), scale[0, 0, 1].item()) == (3.0, 1.0)
    assert scale[0, 0, 0].item() == pytest.approx(x[0, :, 0].std(correction=0).item())


def test_training_is_adam_on_the_bound():
    x, y = draw(1, 30, 2), draw(1, 30, 2, seed=1) + 1
    divergence = JensenShannon(hidden=(4,), steps=3, learning_rate=0.02)
    untrained = dataclasses.replace(divergence, steps=0)
    untrained(x, y)
    params = {name: value.detach().clone().requires_grad_() for name, value in untrained._params.items()}
    optimiser = torch.optim.Adam(params.values(), lr=0.02, betas=(0.5, 0.99))
    for _ in range(3):
        optimiser.zero_grad()
        (-_bound(params, x, y, None, None)).sum().backward()
        optimiser.step()
    divergence(x, y)
    for name, value in divergence._params.items():
        torch.testing.assert_close(value.detach(), params[name].detach(), rtol=1e-10, atol=1e-12)


def test_gradients_hold_the_discriminator_and_its_units_fixed():
    x, y = (2 * draw(2, 6, 2) + 1).requires_grad_(), (draw(2, 5, 2, seed=1) - 1).requires_grad_()
    a, b = (torch.rand(2, n, generator=torch.Generator().manual_seed(n)).double() + 0.1 for n in (6, 5))
    a, b = a.requires_grad_(), b.requires_grad_()
    divergence = JensenShannon(hidden=(4,), steps=4, learning_rate=0.1)
    value = divergence(x, y, a, b).sum()
    before = {name: one.grad.clone() for name, one in divergence._params.items()}  # of the last step of training
    found = torch.autograd.grad(value, (x, y, a, b), retain_graph=True)
    value.backward()
    for name, one in divergence._params.items():
        assert torch.equal(one.grad, before[name])
    shares = [one / one.sum(-1, keepdim=True) for one in (a, b)]
    centre, scale = _moments(x.detach(), y.detach(), *(one.detach() for one in shares))
    fixed = {name: one.detach() for name, one in divergence._params.items()}
    bound = 0.0
    for sample, share, sign in ((x, shares[0], 1), (y, shares[1], -1)):
        score = apply_mlp(fixed, (sample - centre) / scale).squeeze(-1)
        bound = bound + 0.5 * (share * torch.nn.functional.logsigmoid(sign * score)).sum()
    for one, expected in zip(found, torch.autograd.grad(bound, (x, y, a, b)), strict=True):
        torch.testing.assert_close(one, expected)


def test_training_sees_neither_samples_nor_weights_as_something_to_learn():
    x, y = draw(1, 20, 2).requires_grad_(), draw(1, 15, 2, seed=1).requires_grad_()
    a, b = (torch.full((1, n), 1 / n).double().requires_grad_() for n in (20, 15))
    divergence = JensenShannon(hidden=(4,))
    divergence.fit_step(x, y, a, b)
    divergence.fit_step(x, y, a, b)
    assert [one.grad for one in (x, y, a, b)] == [None] * 4


def test_what_it_has_learned_is_no_option():
    names = [field.name for field in dataclasses.fields(JensenShannon) if field.init]
    assert names == ["hidden", "steps", "learning_rate", "seed"]
