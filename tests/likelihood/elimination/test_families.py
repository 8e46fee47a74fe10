"""Linear normal families as equations: the same densities, whatever the units."""

import numpy as np
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.likelihood.elimination.families import describe_families
from otpdag.structure import Structure


@pytest.mark.parametrize("level", [0.0, 3.0, 1e8, -1e8])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_equations_give_the_density_however_far_from_zero_a_column_lies(level, scale):
    """A level of a million scales cost eight digits once: the slopes were differences of two large numbers."""
    model = otp.Model(otp.Graph([("a", "y"), ("x", "y")]), {"a": m.Categorical(2), "x": m.Normal(), "y": m.Normal()})
    model.set_params(
        {
            "a": {"probs": [0.5, 0.5]},
            "x": {"loc": 0.0, "scale": 1.0},
            "y": {"loc": [level, level + scale], "weight": 0.7 * scale, "scale": [scale, 2 * scale]},
        }
    )
    family = next(one for one in describe_families(model.structure) if one.node == "y")
    coefficients, constants = family.equations(model.fitted.naturals["y"])
    rng = np.random.default_rng(0)
    for configuration in range(2):
        x = rng.normal(size=20)
        mean, spread = level + configuration * scale + 0.7 * scale * x, (1 + configuration) * scale
        y = mean + spread * rng.normal(size=20)
        a_own, a_x, a_one = coefficients[0, configuration, 0].tolist()
        assert a_own == pytest.approx(1 / spread, rel=1e-13)
        assert a_x == pytest.approx(-0.7 / (1 + configuration), rel=1e-13)
        assert constants[0, configuration].item() == pytest.approx(-np.log(spread) - 0.5 * np.log(2 * np.pi), abs=1e-12)
        if level == 0:
            found = constants[0, configuration].item() - 0.5 * (a_own * y + a_x * x + a_one) ** 2
            np.testing.assert_allclose(found, stats.norm(mean, spread).logpdf(y), rtol=1e-9)


def test_equations_have_the_gradient_of_the_density():
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.MultivariateNormal(2)})
    family = next(one for one in describe_families(model.structure) if one.node == "y")
    rng = np.random.default_rng(1)
    params = {
        "loc": torch.as_tensor(rng.normal(size=(1, 1, 2))),
        "weight": torch.as_tensor(rng.normal(size=(1, 1, 2))),
        "covariance": torch.tensor([[[[2.0, 0.3], [0.3, 0.5]]]]).double(),
    }
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    x, y = torch.as_tensor(rng.normal(size=(1, 30, 1))), torch.as_tensor(rng.normal(size=(1, 30, 2)))
    exact = model.structure.mechanisms["y"].log_prob(leaves, y, {"x": x}).sum()
    wanted = torch.autograd.grad(exact, list(leaves.values()))
    coefficients, constants = family.equations(leaves)
    columns = torch.cat([y, x, torch.ones_like(x)], -1)
    noise = columns @ coefficients[:, 0].mT
    found = (constants[:, 0] - 0.5 * noise.square().sum(-1)).sum()
    assert found.item() == pytest.approx(exact.item(), rel=1e-12)
    for one, other in zip(torch.autograd.grad(found, list(leaves.values())), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_families_are_of_one_kind_if_they_differ_in_names_only():
    graph = otp.Graph([("a", "x"), ("b", "y"), ("k", "u"), ("a", "v"), ("b", "w")])
    nodes = {"a": m.Normal(), "b": m.Normal(), "k": m.Categorical(2), "x": m.Poisson(), "y": m.Poisson()}
    nodes |= {"u": m.Poisson(), "v": m.Poisson(network=(4,)), "w": m.Poisson(network=(4,))}
    kind = {family.node: family.kind for family in describe_families(Structure.bind(graph, nodes))}
    assert kind["x"] == kind["y"] != kind["u"]
    assert kind["v"] != kind["w"]  # layers of networks have units of their own
