"""The semi-dual against exact transport."""

import ot
import pytest
import torch

from otpdag.divergences.wasserstein import reverse_gradient, semi_dual


def test_ascending_potentials_reach_exact_transport():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 2, generator=generator, dtype=torch.float64) + 1.0
    b = torch.tensor([0.3, 0.1, 0.2, 0.2, 0.15, 0.05], dtype=torch.float64)
    costs = torch.cdist(x, y).square()
    exact = ot.emd2(torch.full((300,), 1 / 300, dtype=torch.float64), b, costs).item()
    g = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([g], lr=0.05)
    for step in range(800):
        optimiser.param_groups[0]["lr"] = 0.05 * (1 - step / 800)
        optimiser.zero_grad()
        semi_dual(costs.unsqueeze(0), b.unsqueeze(0), reverse_gradient(g)).value.sum().backward()
        optimiser.step()
    dual = semi_dual(costs.unsqueeze(0), b.unsqueeze(0), g)
    value = dual.value + costs.unsqueeze(0).gather(-1, dual.assignment.unsqueeze(-1)).mean()
    assert value.item() == pytest.approx(exact, rel=0.01)
    share = torch.bincount(dual.assignment[0], minlength=6) / 300
    assert torch.allclose(share.double(), b, atol=0.02)


def test_every_potential_gives_a_lower_bound():
    generator = torch.Generator().manual_seed(1)
    costs = torch.rand(3, 20, 4, generator=generator, dtype=torch.float64)
    b = torch.full((3, 4), 0.25, dtype=torch.float64)
    rows = torch.full((20,), 0.05, dtype=torch.float64)
    exact = torch.stack([ot.emd2(rows, b[0], cost) for cost in costs])
    for _ in range(20):
        g = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        dual = semi_dual(costs, b, g)
        value = dual.value + costs.gather(-1, dual.assignment.unsqueeze(-1)).squeeze(-1).mean(-1)
        assert (value <= exact + 1e-12).all()


def test_gradients_are_shares_and_potentials():
    costs = torch.tensor([[[0.0, 1.0], [0.1, 1.0], [1.0, 0.0], [0.2, 1.0]]])
    b = torch.tensor([[0.5, 0.5]], requires_grad=True)
    g = torch.tensor([[0.1, -0.1]], requires_grad=True)
    in_b, in_g = torch.autograd.grad(semi_dual(costs, b, g).value.sum(), (b, g))
    assert torch.allclose(in_b, g)
    assert torch.allclose(in_g, torch.tensor([[0.5 - 0.75, 0.5 - 0.25]]))
    (reversed_g,) = torch.autograd.grad(semi_dual(costs, b, reverse_gradient(g)).value.sum(), g)
    assert torch.allclose(reversed_g, -in_g)
