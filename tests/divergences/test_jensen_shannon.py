"""The adversarial bound: what it converges to, that it remembers nothing, and what it refuses."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.divergences import JensenShannon
from otpdag.divergences.base import fill_weights
from otpdag.divergences.jensen_shannon import _bound, _moments
from otpdag.errors import ModelError
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


def test_more_steps_learn_more_and_no_step_tells_nothing():
    x, y = draw(2, 200, 2), draw(2, 200, 2, seed=1) + 1
    values = [JensenShannon(steps=steps)(x, y) for steps in (0, 3, 30)]
    torch.testing.assert_close(values[0], torch.zeros(2, dtype=torch.float64))
    assert (values[2] > values[1]).all()
    assert (values[1] > 0).all()


def test_a_call_leaves_nothing_behind():
    """The same object gives the same value again, whatever it compared in between, of any shape."""
    x, y = draw(1, 50, 2), draw(1, 50, 2, seed=1) + 1
    divergence = JensenShannon()
    first = divergence(x, y)
    divergence(draw(3, 20, 4), draw(3, 30, 4, seed=1))
    assert torch.equal(divergence(x, y), first)


def test_weights_count_when_it_is_trained_and_evaluated():
    """Between two equal samples only the weights differ."""
    x = draw(1, 100, 1)
    upper = (x[..., 0] > 0).double()
    assert JensenShannon(hidden=(16,), steps=100, learning_rate=2e-2)(x, x, upper, 1 - upper).item() > 0.6


def test_a_fit_from_several_starts_can_be_repeated():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": np.where(rng.random(60) < 0.5, -2.0, 2.0) + rng.normal(size=60)})
    graph, method = otp.Graph([("z", "x")], hidden=["z"]), otp.paper(steps=3, divergence=JensenShannon(steps=2))
    losses = []
    for _ in range(2):
        model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
        with pytest.warns(otp.ConvergenceWarning):
            losses.append(otp.fit(model, table, method=method, restarts=3, seed=1).loss)
    assert losses[0] == losses[1]


def test_the_seed_chooses_the_discriminator():
    x, y = draw(1, 50, 2), draw(1, 50, 2, seed=1) + 1
    assert not torch.equal(JensenShannon(seed=0)(x, y), JensenShannon(seed=1)(x, y))


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
    weights = (a, b) if weighted else (fill_weights(x, None), fill_weights(y, None))
    divergence = JensenShannon(hidden=(4,), steps=5, learning_rate=0.3)
    params, bounds = divergence.discriminator(x, y, *weights), divergence(x, y, *weights)
    assert list(params) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for r in range(2):
        u, v = (a[r], b[r]) if weighted else (torch.ones(7).double() / 7, torch.ones(9).double() / 9)
        both, mass = torch.cat([x[r], y[r]]), torch.cat([u, v]).unsqueeze(-1) / 2
        mean = (mass * both).sum(0)
        scale = (mass * (both - mean) ** 2).sum(0).sqrt()
        alone = {name: value[r : r + 1] for name, value in params.items()}
        score = apply_mlp(alone, ((both - mean) / scale).unsqueeze(0))[0, :, 0]
        sides = torch.cat([torch.sigmoid(score[:7]), torch.sigmoid(-score[7:])])
        expected = math.log(2) + (mass[:, 0] * sides.log()).sum()
        assert bounds[r].item() == pytest.approx(expected.item(), rel=1e-7)  # Adam divides by small numbers


def test_a_column_without_spread_is_only_centred():
    x = torch.cat([draw(1, 8, 1), torch.full((1, 8, 1), 3.0).double()], -1)
    centre, scale = _moments(x, x + 0.0, *[fill_weights(x, None)] * 2)
    assert (centre[0, 0, 1].item(), scale[0, 0, 1].item()) == (3.0, 1.0)
    assert scale[0, 0, 0].item() == pytest.approx(x[0, :, 0].std(correction=0).item())


def test_training_is_adam_on_the_bound():
    x, y = draw(1, 30, 2), draw(1, 30, 2, seed=1) + 1
    even = [fill_weights(x, None)] * 2
    divergence = JensenShannon(hidden=(4,), steps=3, learning_rate=0.02)
    begun = dataclasses.replace(divergence, steps=0).discriminator(x, y, *even)
    params = {name: value.clone().requires_grad_() for name, value in begun.items()}
    optimiser = torch.optim.Adam(params.values(), lr=0.02, betas=(0.5, 0.99))
    for _ in range(3):
        optimiser.zero_grad()
        (-_bound(params, x, y, *even)).sum().backward()
        optimiser.step()
    for name, value in divergence.discriminator(x, y, *even).items():
        torch.testing.assert_close(value, params[name].detach(), rtol=1e-10, atol=1e-12)


def test_gradients_hold_the_discriminator_and_its_units_fixed():
    x, y = (2 * draw(2, 6, 2) + 1).requires_grad_(), (draw(2, 5, 2, seed=1) - 1).requires_grad_()
    a, b = (torch.rand(2, n, generator=torch.Generator().manual_seed(n)).double() + 0.1 for n in (6, 5))
    a, b = a.requires_grad_(), b.requires_grad_()
    divergence = JensenShannon(hidden=(4,), steps=4, learning_rate=0.1)
    gradients = torch.autograd.grad(divergence(x, y, a, b).sum(), (x, y, a, b))
    shares = [one / one.sum(-1, keepdim=True) for one in (a, b)]
    centre, scale = _moments(x.detach(), y.detach(), *(one.detach() for one in shares))
    fixed = divergence.discriminator(x, y, *shares)
    bound = 0.0
    for sample, share, sign in ((x, shares[0], 1), (y, shares[1], -1)):
        score = apply_mlp(fixed, (sample - centre) / scale).squeeze(-1)
        bound = bound + 0.5 * (share * torch.nn.functional.logsigmoid(sign * score)).sum()
    for one, expected in zip(gradients, torch.autograd.grad(bound, (x, y, a, b)), strict=True):
        torch.testing.assert_close(one, expected)


def test_training_sees_neither_samples_nor_weights_as_something_to_learn():
    x, y = draw(1, 20, 2).requires_grad_(), draw(1, 15, 2, seed=1).requires_grad_()
    a, b = (torch.full((1, n), 1 / n).double().requires_grad_() for n in (20, 15))
    params = JensenShannon(hidden=(4,)).discriminator(x, y, a, b)
    assert [one.grad for one in (x, y, a, b)] == [None] * 4
    assert not any(value.requires_grad for value in params.values())
