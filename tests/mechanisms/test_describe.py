"""Parameters as a user reads them."""

import pytest
import torch

from otpdag import mechanisms as m
from otpdag.spaces import Discrete, Real, Simplex

TWO = (("a", Discrete(3)), ("b", Discrete(2)), ("r", Real(2)))


@pytest.mark.parametrize(
    ("mechanism", "parents", "shapes"),
    [
        (m.Normal(), (), {"loc": (), "scale": ()}),
        (m.Normal(), TWO, {"loc": (3, 2), "weight": (2,), "scale": (3, 2)}),
        (m.Normal(4), TWO, {"loc": (3, 2, 4), "weight": (2, 4), "scale": (3, 2, 4)}),
        (m.Normal(shared_scale=True), TWO, {"loc": (3, 2), "weight": (2,), "scale": ()}),
        (m.Normal(4, shared_scale=True), TWO[:1], {"loc": (3, 4), "scale": (4,)}),
        (m.LogNormal(), TWO[:2], {"loc": (3, 2), "scale": (3, 2)}),
        (m.StudentT(), TWO[:1], {"loc": (3,), "scale": (3,), "df": ()}),
        (m.StudentT(2), TWO[:1], {"loc": (3, 2), "scale": (3, 2), "df": (2,)}),
        (m.Gamma(), TWO, {"log_mean": (3, 2), "weight": (2,), "shape": (3, 2)}),
        (m.Beta(), (), {"logit_mean": (), "concentration": ()}),
        (m.Poisson(), TWO[:1], {"log_rate": (3,)}),
        (m.Poisson(2), (), {"log_rate": (2,)}),
        (m.NegativeBinomial(), TWO[:2], {"log_rate": (3, 2), "dispersion": (3, 2)}),
        (m.Categorical(5), TWO[:2], {"probs": (3, 2, 5)}),
        (m.Categorical(5), TWO, {"logits": (3, 2, 5), "weight": (2, 5)}),
        (m.Dirichlet(4), (), {"concentration": (4,)}),
        (m.Dirichlet(4), TWO[:2], {"concentration": (3, 2, 4)}),
        (m.Multinomial(5), (), {"probs": (5,)}),
        (m.Multinomial(5), TWO[:2], {"probs": (3, 2, 5)}),
        (m.Multinomial(5), TWO, {"logits": (3, 2, 5), "weight": (2, 5)}),
        (m.Multinomial(5), (("t", Simplex(4)),), {"topics": (4, 5)}),
    ],
)
def test_shapes(mechanism, parents, shapes):
    bound = mechanism.setup(m.Family("x", parents))
    raw = {name: torch.zeros(2, *p.shape) for name, p in bound.declared().items()}
    shown = bound.describe(bound.natural(raw))
    assert {name: tuple(value.shape[1:]) for name, value in shown.items()} == shapes


@pytest.mark.parametrize("mechanism", [m.Categorical(3), m.Multinomial(3)])
def test_logits_are_relative_to_the_first_category(mechanism):
    bound = mechanism.setup(m.Family("x", TWO))
    generator = torch.Generator().manual_seed(0)
    raw = {name: torch.randn(2, *p.shape, generator=generator) for name, p in bound.declared().items()}
    shown = bound.describe(bound.natural(raw))
    assert (shown["logits"][..., 0] == 0).all()
    assert (shown["weight"][..., 0] == 0).all()


def test_a_network_is_shown_as_it_is():
    bound = m.Normal(network=(4,)).setup(m.Family("x", TWO))
    raw = {name: torch.zeros(2, *p.shape) for name, p in bound.declared().items()}
    shown = bound.describe(bound.natural(raw))
    assert shown["loc"].shape == (2,)
    assert shown["network.0.weight"].shape == (2, 7, 4)
