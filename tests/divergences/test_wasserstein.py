"""Exact transport against POT, closed forms and finite differences."""

import numpy as np
import ot
import pytest
import torch
from scipy.stats import wasserstein_distance

from otpdag.costs import KL, Euclidean, SmoothL1, SquaredEuclidean
from otpdag.divergences import Wasserstein, wasserstein
from otpdag.divergences.wasserstein import _solve_transport, reverse_gradient, semi_dual
from otpdag.errors import DataError, ModelError


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_weights(*shape, seed=0):
    return 0.1 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shift", [0.0, 5.0])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("features", [1, 2, 8])
def test_assignment_agrees_with_pot(shift, scale, features):
    x, y = draw(1, 30, features), draw(1, 30, features, seed=1) * scale + shift
    uniform = np.full(30, 1 / 30)
    expected = ot.emd2(uniform, uniform, ot.dist(x[0].numpy(), y[0].numpy()))
    assert Wasserstein()(x, y).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("cost", [SquaredEuclidean(), Euclidean(), SmoothL1()], ids=str)
@pytest.mark.parametrize("sizes", [(20, 20), (20, 31)])
@pytest.mark.parametrize("p", [1.0, 1.5])
def test_weighted_transport_agrees_with_pot(cost, sizes, p):
    x, y = draw(2, sizes[0], 3), draw(2, sizes[1], 3, seed=1) + 0.5
    a, b = draw_weights(2, sizes[0]), draw_weights(2, sizes[1], seed=1)
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
    matrices = cost(x, y).pow(p).numpy()
    expected = [ot.emd2(a[r].numpy(), b[r].numpy(), matrices[r]) for r in range(2)]
    torch.testing.assert_close(Wasserstein(cost, p)(x, y, a, b), torch.tensor(expected, dtype=torch.float64))


def test_kl_between_probability_vectors_as_ground_cost():
    x, y = torch.softmax(draw(1, 12, 4), -1), torch.softmax(draw(1, 12, 4, seed=1), -1)
    matrix = (x[0, :, None] * (x[0, :, None].log() - y[0, None].log())).sum(-1).numpy()
    expected = ot.emd2(np.full(12, 1 / 12), np.full(12, 1 / 12), matrix)
    assert Wasserstein(KL())(x, y).item() == pytest.approx(expected)


def test_a_function_serves_as_ground_cost():
    x, y = draw(1, 12, 3), draw(1, 12, 3, seed=1)
    expected = ot.emd2([], [], ot.dist(x[0].numpy(), y[0].numpy(), "cityblock"))
    assert Wasserstein(lambda u, v: (u - v).abs().sum(-1))(x, y).item() == pytest.approx(expected)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_on_a_line_it_matches_sorted_points(p):
    x, y = draw(2, 25, 1), 2 * draw(2, 25, 1, seed=1) + 1
    expected = (x.sort(1).values - y.sort(1).values).abs().pow(p).mean((1, 2))
    torch.testing.assert_close(Wasserstein(Euclidean(), p)(x, y), expected)


def test_on_a_line_it_agrees_with_scipy_with_weights():
    x, y, a, b = draw(1, 9, 1), draw(1, 7, 1, seed=1), draw_weights(1, 9), draw_weights(1, 7, seed=1)
    expected = wasserstein_distance(*(value.flatten().numpy() for value in (x, y, a, b)))
    assert Wasserstein(Euclidean())(x, y, a, b).item() == pytest.approx(expected)


def test_a_positive_definite_linear_map_is_optimal():
    """The gradient of a convex function transports optimally (Brenier 1991), also between samples."""
    x, root = draw(1, 60, 3), draw(3, 3, seed=1)
    y = x @ (root @ root.T) + torch.tensor([3.0, -2.0, 1.0])
    expected = (x - y).square().sum(-1).mean(-1)
    shuffled = y[:, torch.randperm(60, generator=torch.Generator().manual_seed(0))]
    torch.testing.assert_close(Wasserstein()(x, shuffled), expected)


def test_two_gaussians_are_at_their_closed_form_distance():
    x, y = draw(1, 800, 2), 2 * draw(1, 800, 2, seed=1) + 3
    assert Wasserstein()(x, y).item() == pytest.approx(2 * (3**2 + (2 - 1) ** 2), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("cost", [SquaredEuclidean(), Euclidean()], ids=str)
@pytest.mark.parametrize("sizes", [(6, 6), (5, 7)])
def test_gradients_in_samples_and_weights_are_those_of_finite_differences(cost, sizes):
    x, y = draw(1, sizes[0], 2).requires_grad_(), draw(1, sizes[1], 2, seed=1).requires_grad_()
    a = draw_weights(1, sizes[0]).requires_grad_()
    b = draw_weights(1, sizes[1], seed=1).requires_grad_()
    assert torch.autograd.gradcheck(Wasserstein(cost), (x, y))
    assert torch.autograd.gradcheck(Wasserstein(cost), (x, y, a, b))


def test_the_gradient_in_a_weight_of_zero_is_what_a_little_mass_costs():
    x, y, b = draw(1, 5, 2), draw(1, 6, 2, seed=1), draw_weights(1, 6, seed=1)
    a = draw_weights(1, 5)
    a[0, 2] = 0.0
    a.requires_grad_()
    value = Wasserstein()(x, y, a, b)
    value.sum().backward()
    step = torch.zeros_like(a).index_fill(1, torch.tensor([2]), 1e-6)
    slope = (Wasserstein()(x, y, a.detach() + step, b) - value.detach()) / 1e-6
    assert a.grad[0, 2].item() == pytest.approx(slope.item(), rel=1e-4)


def test_workers_do_not_change_the_result():
    x, y, a = draw(5, 20, 2), draw(5, 20, 2, seed=1), draw_weights(5, 20)
    assert torch.equal(Wasserstein(workers=1)(x, y, a), Wasserstein(workers=3)(x, y, a))
    assert torch.equal(Wasserstein(workers=1)(x, y), Wasserstein(workers=3)(x, y))


@pytest.mark.parametrize("weights", [None, torch.tensor([[1.0, 2.0, 3.0]])])
def test_costs_that_are_not_finite_are_refused(weights):
    x = torch.tensor([[[0.0], [float("nan")], [1.0]]])
    with pytest.raises(DataError, match="finite costs; got NaN or infinity"):
        Wasserstein()(x, torch.zeros(1, 3, 1), weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 0.5}, "p must be a number of at least 1; got 0.5"),
        ({"workers": 0}, "workers must be a whole number of at least 1; got 0"),
        ({"cost": "kl"}, "`cost` must be an AbstractCost .* got 'kl'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        Wasserstein(**options)


def test_potentials_of_the_simplex_are_centred_and_tight_on_the_plan():
    costs = draw(5, 7).abs().numpy()
    a, b = draw_weights(5).numpy(), draw_weights(7, seed=1).numpy()
    b[3] = 0.0  # a point without mass has a potential all the same
    found = _solve_transport(costs, a, b)
    a, b = a / a.sum(), b / b.sum()
    assert found.f @ a == pytest.approx(0, abs=1e-12)
    assert found.g @ b == pytest.approx(0, abs=1e-12)
    slack = costs - found.f[:, None] - found.g
    value = ot.emd2(a, b, costs)
    assert slack.min() == pytest.approx(value, abs=1e-9)
    np.testing.assert_allclose(slack[found.rows, found.columns], value, atol=1e-9)
    np.testing.assert_allclose(slack.min(0), value, atol=1e-9)
    assert (found.mass * costs[found.rows, found.columns]).sum() == pytest.approx(value)


@pytest.mark.parametrize(("replicas", "workers", "threads"), [(1, 2, 0), (2, 1, 0), (2, 2, 2), (3, 2, 2)])
def test_threads_are_started_for_several_problems_and_several_workers_alone(monkeypatch, replicas, workers, threads):
    started = []

    class Pool(wasserstein.ThreadPoolExecutor):
        def __init__(self, many):
            started.append(many)
            super().__init__(many)

    monkeypatch.setattr(wasserstein, "ThreadPoolExecutor", Pool)
    Wasserstein(workers=workers)(draw(replicas, 5, 2), draw(replicas, 5, 2, seed=1))
    assert started == ([threads] if threads else [])


# -- the semi-dual ----------------------------------------------------------------------------------------------------


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
