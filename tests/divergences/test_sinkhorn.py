"""Entropic transport against POT, its limits, and finite differences."""

import numpy as np
import ot
import pytest
import torch
from scipy import special

from otpdag.costs import KL, Euclidean, SquaredEuclidean
from otpdag.divergences import MMD, Sinkhorn, Wasserstein, sinkhorn
from otpdag.divergences.sinkhorn import BLOCK, _is_symmetric, _Problem, _ratio
from otpdag.errors import ConvergenceWarning, DataError, ModelError
from otpdag.testing import check_divergence

EXACT = {"relative": False, "tolerance": 1e-10, "iterations": 20_000}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_weights(*shape, seed=0):
    weights = 0.1 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return weights / weights.sum(-1, keepdim=True)


def entropic_cost(a, b, matrix, epsilon):
    """Evaluate POT's plan by the definition, the relative entropy included."""
    plan = ot.bregman.sinkhorn(a, b, matrix, epsilon, method="sinkhorn_log", numItermax=2000, stopThr=1e-9, warn=False)
    return (plan * matrix).sum() + epsilon * (plan * np.log(plan / np.outer(a, b))).sum()


@pytest.mark.parametrize("cost", [SquaredEuclidean(), Euclidean()], ids=str)
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
@pytest.mark.parametrize("debiased", [False, True])
def test_it_agrees_with_pot(cost, epsilon, debiased):
    x, y, a, b = draw(1, 15, 2), draw(1, 20, 2, seed=1) + 0.5, draw_weights(1, 15), draw_weights(1, 20, seed=1)
    value = Sinkhorn(epsilon, cost, debiased=debiased, **EXACT)(x, y, a, b)
    u, v = a[0].numpy(), b[0].numpy()
    expected = entropic_cost(u, v, cost(x, y)[0].numpy(), epsilon)
    if debiased:
        own = entropic_cost(u, u, cost(x, x)[0].numpy(), epsilon)
        expected -= 0.5 * (own + entropic_cost(v, v, cost(y, y)[0].numpy(), epsilon))
    assert value.item() == pytest.approx(expected, rel=1e-5)


def test_relative_epsilon_is_a_fraction_of_the_mean_cost():
    x, y, a = draw(1, 15, 2), draw(1, 20, 2, seed=1), draw_weights(1, 15)
    mean = (a[0] @ SquaredEuclidean()(x, y)[0]).mean().item()
    absolute = Sinkhorn(0.1 * mean, relative=False)(x, y, a)
    torch.testing.assert_close(Sinkhorn(0.1)(x, y, a), absolute, rtol=1e-6, atol=0)


def test_with_little_entropy_it_is_exact_transport():
    x, y = draw(1, 12, 2), draw(1, 12, 2, seed=1) + 1
    value = Sinkhorn(1e-3, tolerance=1e-4, iterations=20_000)(x, y)
    torch.testing.assert_close(value, Wasserstein()(x, y), rtol=1e-2, atol=0)


def test_with_much_entropy_it_is_a_kernel_discrepancy():
    """For the cost |x - y|^2 the limit is the squared distance of the means (Feydy et al. 2019, theorem 1)."""
    x, y = draw(1, 12, 2), draw(1, 12, 2, seed=1) + 1
    expected = (x.mean(1) - y.mean(1)).square().sum(-1)
    torch.testing.assert_close(Sinkhorn(1e4, **EXACT)(x, y), expected, rtol=1e-3, atol=0)
    linear = MMD(kernel=lambda s: -0.5 * s, bandwidth=1.0, unbiased=False)(x, y)
    torch.testing.assert_close(linear, expected)


@pytest.mark.slow
@pytest.mark.parametrize("cost", [SquaredEuclidean(), Euclidean()], ids=str)
@pytest.mark.parametrize("debiased", [False, True])
def test_gradients_in_samples_and_weights_are_those_of_finite_differences(cost, debiased):
    divergence = Sinkhorn(0.5, cost, debiased=debiased, **EXACT)
    x, y = draw(1, 4, 2).requires_grad_(), draw(1, 5, 2, seed=1).requires_grad_()
    a, b = draw_weights(1, 4).requires_grad_(), draw_weights(1, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(divergence, (x, y, a, b), atol=1e-5, rtol=1e-4)


def test_a_cost_that_is_not_symmetric_is_solved_as_such():
    x, y = torch.softmax(draw(1, 10, 3), -1), torch.softmax(draw(1, 12, 3, seed=1), -1)
    value = Sinkhorn(0.1, KL(), **EXACT)(x, y)
    u, v, cost = np.full(10, 0.1), np.full(12, 1 / 12), KL()
    expected = entropic_cost(u, v, cost(x, y)[0].numpy(), 0.1) - 0.5 * (
        entropic_cost(u, u, cost(x, x)[0].numpy(), 0.1) + entropic_cost(v, v, cost(y, y)[0].numpy(), 0.1)
    )
    assert value.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shift", [0.0, 100.0])
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_single_precision_stays_close_to_double(shift, scale):
    x, y = draw(1, 100, 4), scale * draw(1, 80, 4, seed=1) + shift
    single = Sinkhorn(0.02)(x.float(), y.float()).double()
    torch.testing.assert_close(single, Sinkhorn(0.02)(x, y), rtol=1e-3, atol=1e-3)


def test_before_convergence_the_value_is_a_lower_bound():
    x, y = draw(1, 30, 2), draw(1, 30, 2, seed=1)
    options = {"relative": False, "debiased": False}
    best = Sinkhorn(0.5, tolerance=1e-9, iterations=20_000, **options)(x, y)
    with pytest.warns(ConvergenceWarning, match="stopped after 10 sweeps with a marginal error of"):
        early = Sinkhorn(0.5, tolerance=1e-9, iterations=10, **options)(x, y)
    assert early.item() <= best.item()


def test_samples_without_any_spread_are_fine():
    x = torch.zeros(1, 4, 2, requires_grad=True)
    value = Sinkhorn()(x, torch.zeros(1, 3, 2))
    value.sum().backward()
    assert value.item() == pytest.approx(0.0, abs=1e-12)
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_costs_that_are_not_finite_are_refused(bad):
    with pytest.raises(DataError, match="finite costs; got NaN or infinity"):
        Sinkhorn()(torch.full((1, 2, 1), bad), torch.zeros(1, 3, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "`epsilon` must be positive; got 0.0"),
        ({"tolerance": -1.0}, "`tolerance` must be positive; got -1.0"),
        ({"iterations": 0}, "iterations must be a whole number of at least 1; got 0"),
        ({"cost": 3}, "`cost` must be an AbstractCost .* got 3"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        Sinkhorn(**options)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_costs_are_symmetric_up_to_rounding_in_any_unit(scale):
    x = torch.randn(1, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    costs = scale * torch.cdist(x, x)
    assert _is_symmetric(costs)
    noise = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert _is_symmetric(costs * (1 + 1e-12 * noise))
    assert not _is_symmetric(costs * (1 + 1e-4 * noise))


def test_a_cost_that_is_not_symmetric_has_its_own_self_transport():
    """Going up costs twice as much as going down: POT, with the same entropic term."""

    def uphill(x, y):
        gap = (y - x).sum(-1)
        return torch.where(gap > 0, 2.0, 1.0) * gap.square()

    x, y = torch.linspace(0, 2, 6).double().reshape(1, 6, 1), torch.linspace(0.5, 3, 7).double().reshape(1, 7, 1)
    value = Sinkhorn(epsilon=0.3, relative=False, cost=uphill, tolerance=1e-9)(x, y)

    def exact(one, other):
        a, b = np.full(one.shape[1], 1 / one.shape[1]), np.full(other.shape[1], 1 / other.shape[1])
        costs = uphill(one[0][:, None], other[0][None]).numpy()
        plan = ot.sinkhorn(a, b, costs, 0.3, stopThr=1e-12, numItermax=100_000)
        entropy = (plan * np.log(plan / np.outer(a, b))).sum()
        return (plan * costs).sum() + 0.3 * entropy

    assert value.item() == pytest.approx(exact(x, y) - 0.5 * (exact(x, x) + exact(y, y)), abs=1e-6)


def plain_softmin(costs, weights, potential, temperature):
    """-t log sum_j w_j exp((p_j - c_ij) / t), row by row."""
    return -temperature * special.logsumexp((potential - costs) / temperature, axis=1, b=weights)


def problem(seed=0):
    """Two replicas of five and four points, and their strengths."""
    costs = 3 * draw(2, 5, 4, seed=seed).abs()
    return _Problem(costs, draw_weights(2, 5), draw_weights(2, 4, seed=1), torch.tensor([[0.5], [0.9]]).double())


def test_every_part_of_the_solver_is_its_formula():
    many, f, g = problem(), draw(2, 5, seed=5), draw(2, 4, seed=6)
    temperature = torch.tensor([[0.7], [2.0]]).double()
    rows, columns, plan = many.softmin_rows(g, temperature), many.softmin_columns(f, temperature), many.plan(f, g)
    for r in range(2):
        costs, a, b, u, v = (one[r].numpy() for one in (many.costs, many.a, many.b, f, g))
        t, epsilon = temperature[r].item(), many.epsilon[r].item()
        np.testing.assert_allclose(rows[r], plain_softmin(costs, b, v, t), rtol=1e-12)
        np.testing.assert_allclose(columns[r], plain_softmin(costs.T, a, u, t), rtol=1e-12)
        expected = np.outer(a, b) * np.exp((u[:, None] + v - costs) / epsilon)
        np.testing.assert_allclose(plan[r], expected, rtol=1e-10)
        limit = 4 * np.finfo(float).eps * costs.max() / epsilon
        assert many.attainable(1e-20)[r].item() == pytest.approx(limit, rel=1e-12)
    assert many.attainable(0.1).flatten().tolist() == [0.1, 0.1]
    below = _Problem(-many.costs, many.a, many.b, many.epsilon)  # costs that are gains have the same digits
    torch.testing.assert_close(below.attainable(1e-20), many.attainable(1e-20))
    assert [one.shape for one in many.start()] == [(2, 5), (2, 4)]
    assert all((one == 0).all() for one in many.start())


def test_cooling_goes_from_the_largest_cost_to_epsilon_by_steps_that_are_averaged():
    many = problem()
    found = many.anneal(0.4)
    for r in range(2):
        costs, a, b = (one[r].numpy() for one in (many.costs, many.a, many.b))
        f, g, epsilon = np.zeros(5), np.zeros(4), many.epsilon.numpy()
        temperatures = np.maximum(many.costs.amax((1, 2)).numpy(), epsilon[:, 0])
        f, g = plain_softmin(costs, b, g, temperatures[r]), plain_softmin(costs.T, a, f, temperatures[r])
        while (temperatures > epsilon[:, 0]).any():  # both replicas sweep until the last is cold
            temperatures = np.maximum(0.4 * temperatures, epsilon[:, 0])
            new_f = plain_softmin(costs, b, g, temperatures[r])
            new_g = plain_softmin(costs.T, a, f, temperatures[r])
            f, g = (f + new_f) / 2, (g + new_g) / 2
        np.testing.assert_allclose(found[0][r], f, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(found[1][r], g, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("averaged", [False, True])
def test_a_block_of_sweeps_is_that_many_plain_ones(averaged):
    many, f, g = problem(), draw(2, 5, seed=5), draw(2, 4, seed=6)
    plan = many.plan(f, g).numpy()
    new_f, new_g, error = many.sweep(f, g, averaged)
    for r in range(2):
        a, b, u, v = many.a[r].numpy(), many.b[r].numpy(), np.ones(5), np.ones(4)
        for _ in range(BLOCK):
            new_u = a / (plan[r] @ v)
            new_v = b / ((u if averaged else new_u) @ plan[r])
            u, v = (np.sqrt(u * new_u), np.sqrt(v * new_v)) if averaged else (new_u, new_v)
        epsilon = many.epsilon[r].item()
        np.testing.assert_allclose(new_f[r], f[r].numpy() + epsilon * np.log(u), rtol=1e-10)
        np.testing.assert_allclose(new_g[r], g[r].numpy() + epsilon * np.log(v), rtol=1e-10)
        scaled = u[:, None] * plan[r] * v
        violated = np.abs(scaled.sum(1) - a).sum() + np.abs(scaled.sum(0) - b).sum()
        assert error[r].item() == pytest.approx(violated, rel=1e-8, abs=1e-15)


def test_replicas_stop_each_on_its_own():
    """One that has converged stays where it is while another, which is harder, goes on."""
    x, y = draw(2, 12, 2), draw(2, 12, 2, seed=1)
    y[1] = 4 * y[1] + 3
    options = {"epsilon": 0.2, "relative": False, "iterations": 20_000}
    together = Sinkhorn(**options)(x, y)
    for r in range(2):
        torch.testing.assert_close(
            Sinkhorn(**options)(x[r : r + 1], y[r : r + 1]), together[r : r + 1], rtol=1e-6, atol=0
        )


def test_iterations_are_counted_in_whole_blocks():
    x, y = draw(1, 30, 2), draw(1, 30, 2, seed=1)

    def value(iterations):
        with pytest.warns(ConvergenceWarning, match=f"stopped after {iterations} sweeps"):
            return Sinkhorn(0.01, tolerance=1e-13, iterations=iterations, debiased=False)(x, y).item()

    assert value(BLOCK + 1) == value(2 * BLOCK)
    assert value(BLOCK) < value(2 * BLOCK) < value(3 * BLOCK)


def test_points_without_mass_keep_their_scaling():
    target, actual = torch.tensor([0.0, 0.5, 0.2]).double(), torch.tensor([0.3, 0.25, 0.1]).double()
    assert _ratio(target, actual).tolist() == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_value_is_that_of_the_dual_also_before_it_has_converged(symmetric, monkeypatch):
    """<a, f> + <b, g> - epsilon (mass of the plan - 1), of which the plan of a self-transport has not quite one."""
    x, a = draw(2, 9, 2), draw_weights(2, 9)
    y, b = (x, a) if symmetric else (draw(2, 7, 2, seed=1), draw_weights(2, 7, seed=1))
    a, b, epsilon = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True), torch.tensor([[0.05], [0.02]]).double()
    costs = SquaredEuclidean()(x, y)
    monkeypatch.setattr(sinkhorn, "BLOCK", 1)
    solver = Sinkhorn(iterations=1, tolerance=1e-12)
    with pytest.warns(ConvergenceWarning):
        found = solver._transport(costs, a, b, epsilon, symmetric=symmetric)
    with pytest.warns(ConvergenceWarning):
        f, g = solver._potentials(_Problem(costs, a, b, epsilon), symmetric)
    for r in range(2):
        plan = np.outer(a[r], b[r]) * np.exp((f[r][:, None] + g[r] - costs[r]).numpy() / epsilon[r].item())
        value = (a[r] @ f[r] + b[r] @ g[r]).item() - epsilon[r].item() * (plan.sum() - 1)
        assert found[r].item() == pytest.approx(value, rel=1e-9)
        assert (abs(plan.sum() - 1) > 1e-6) == symmetric


def test_a_relative_epsilon_is_not_differentiated():
    x, y = draw(1, 6, 2).requires_grad_(), draw(1, 5, 2, seed=1).requires_grad_()
    a, b = draw_weights(1, 6).requires_grad_(), draw_weights(1, 5, seed=1).requires_grad_()
    options = {"tolerance": 1e-12, "iterations": 5000}
    share, other = (one.detach() / one.detach().sum() for one in (a, b))
    mean = (share[0] @ SquaredEuclidean()(x, y)[0].detach() @ other[0]).item()
    found = torch.autograd.grad(Sinkhorn(0.3, **options)(x, y, a, b).sum(), (x, y, a, b))
    fixed = Sinkhorn(0.3 * mean, relative=False, **options)(x, y, a, b).sum()
    for one, expected in zip(found, torch.autograd.grad(fixed, (x, y, a, b)), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("epsilon", "price"), [(1.0, 2.0), (0.3, 0.5), (2.0, 20.0)])
def test_unbalanced_it_agrees_with_pot(epsilon, price):
    x, y, a, b = draw(1, 15, 2), draw(1, 20, 2, seed=1) + 0.5, draw_weights(1, 15), draw_weights(1, 20, seed=1)
    divergence = Sinkhorn(epsilon, debiased=False, unbalanced=price, **EXACT)
    u, v, matrix = a[0].numpy(), b[0].numpy(), SquaredEuclidean()(x, y)[0].numpy()
    plan = ot.unbalanced.sinkhorn_unbalanced(u, v, matrix, epsilon, price, numItermax=20_000, stopThr=1e-12)
    marginals = special.kl_div(plan.sum(1), u).sum() + special.kl_div(plan.sum(0), v).sum()
    expected = (plan * matrix).sum() + epsilon * special.kl_div(plan, np.outer(u, v)).sum() + price * marginals
    assert divergence(x, y, a, b).item() == pytest.approx(expected, rel=1e-8)
    np.testing.assert_allclose(divergence.matched(x, y, a, b)[0], plan.sum(1) / u, rtol=1e-7)


def test_unbalanced_two_points_have_a_closed_form():
    """The mass t of the only pair minimises t c + (2 rho + epsilon) (t log t - t + 1)."""
    x, y, total = torch.zeros(1, 1, 1), torch.full((1, 1, 1), 2.0), 2 * 1.5 + 0.5
    divergence = Sinkhorn(0.5, relative=False, unbalanced=1.5)
    assert divergence(x, y).item() == pytest.approx(total * (1 - np.exp(-4 / total)), rel=1e-5)
    assert divergence.matched(x, y).item() == pytest.approx(np.exp(-4 / total), rel=1e-5)


def test_with_a_high_price_unbalanced_transport_is_balanced():
    x, y, a = draw(1, 12, 2), draw(1, 14, 2, seed=1) + 1, draw_weights(1, 12)
    torch.testing.assert_close(Sinkhorn(unbalanced=1e4)(x, y, a), Sinkhorn()(x, y, a), rtol=2e-3, atol=0)


def test_unbalanced_it_keeps_what_every_divergence_promises():
    check_divergence(Sinkhorn(0.3, unbalanced=0.5))


@pytest.mark.slow
@pytest.mark.parametrize("debiased", [False, True])
def test_unbalanced_gradients_are_those_of_finite_differences(debiased):
    divergence = Sinkhorn(0.5, debiased=debiased, unbalanced=1.0, **EXACT)
    x, y = draw(1, 4, 2).requires_grad_(), draw(1, 5, 2, seed=1).requires_grad_()
    a, b = draw_weights(1, 4).requires_grad_(), draw_weights(1, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(divergence, (x, y, a, b), atol=1e-5, rtol=1e-4)


def test_a_price_must_be_positive():
    with pytest.raises(ModelError, match="`unbalanced` must be positive; got 0"):
        Sinkhorn(unbalanced=0)
