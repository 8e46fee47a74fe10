"""Ground costs: values by hand, agreement of the two forms, gradients, and refusals."""

import inspect

import pytest
import torch

from otpdag import costs
from otpdag.costs import (
    KL,
    AbstractCost,
    CrossEntropy,
    Euclidean,
    FunctionCost,
    SmoothL1,
    SquaredEuclidean,
    SumOfCosts,
    as_cost,
)
from otpdag.errors import DataError, ModelError

CLASSES = [getattr(costs, name) for name in costs.__all__ if name not in ("FunctionCost", "SumOfCosts")]
ALL = [cls() for cls in CLASSES if inspect.isclass(cls) and not inspect.isabstract(cls)]
ALL.append(FunctionCost(lambda x, y: (x - y).abs().sum(-1)))
ALL.append(SumOfCosts(((slice(0, 1), Euclidean()), (slice(1, None), SquaredEuclidean()))))


def simplex(*shape, seed=0, dtype=torch.float64):
    """Draw probability vectors, on which every cost is defined."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(*shape, generator=generator, dtype=dtype), -1)


@pytest.mark.parametrize("cost", ALL, ids=lambda cost: type(cost).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pairwise_agrees_with_between(cost, dtype):
    x, y = simplex(3, 5, 4, dtype=dtype), simplex(3, 6, 4, seed=1, dtype=dtype)
    pairs = cost(x, y)
    assert pairs.shape == (3, 5, 6)
    assert pairs.dtype == dtype
    torch.testing.assert_close(pairs, cost.between(x[:, :, None], y[:, None, :]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cost", ALL, ids=lambda cost: type(cost).__name__)
def test_one_replica_broadcasts(cost):
    x, y = simplex(1, 5, 4), simplex(3, 6, 4, seed=1)
    torch.testing.assert_close(cost(x, y), cost(x.expand(3, -1, -1), y))
    torch.testing.assert_close(cost(y, x), cost(y, x.expand(3, -1, -1)))


@pytest.mark.parametrize("cost", ALL, ids=lambda cost: type(cost).__name__)
def test_gradients_are_those_of_finite_differences(cost):
    x, y = simplex(2, 3, 4).requires_grad_(), simplex(2, 2, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(cost, (x, y))
    assert torch.autograd.gradcheck(cost.between, (x[:, :2], y))


@pytest.mark.parametrize("cost", ALL, ids=lambda cost: type(cost).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_where_points_coincide_or_touch_the_border(cost, dtype):
    x = torch.eye(3, dtype=dtype)[None].requires_grad_()
    y = torch.eye(3, dtype=dtype)[None].requires_grad_()
    (cost(x, y).sum() + cost.between(x, y).sum()).backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(y.grad).all()


@pytest.mark.parametrize("cost", [SquaredEuclidean(), Euclidean()], ids=str)
def test_far_from_the_origin_little_precision_is_lost(cost):
    x, y = simplex(1, 40, 4) * 3, simplex(1, 30, 4, seed=1) * 3
    shifted = cost((x + 1000).float(), (y + 1000).float()).double()
    torch.testing.assert_close(
        shifted, cost((x + 1000).float().double(), (y + 1000).float().double()), atol=2e-3, rtol=1e-3
    )


def test_values_by_hand():
    x, y = torch.tensor([0.2, 0.8]), torch.tensor([0.5, 0.5])
    kl = 0.2 * torch.tensor(0.4).log() + 0.8 * torch.tensor(1.6).log()
    torch.testing.assert_close(KL().between(x, y), kl)
    entropy = -(x * x.log()).sum()
    torch.testing.assert_close(CrossEntropy().between(x, y), kl + entropy)
    torch.testing.assert_close(SquaredEuclidean().between(x, y), torch.tensor(0.18))
    torch.testing.assert_close(Euclidean().between(x, y), torch.tensor(0.18).sqrt())


def test_kl_agrees_with_torch():
    x, y = simplex(2, 5, 4), simplex(2, 5, 4, seed=1)
    expected = torch.nn.functional.kl_div(y.log(), x, reduction="none").sum(-1)
    torch.testing.assert_close(KL().between(x, y), expected)


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
def test_smooth_l1_agrees_with_torch(beta):
    x, y = 5 * simplex(2, 5, 4), simplex(2, 5, 4, seed=1)
    expected = torch.nn.functional.smooth_l1_loss(x, y, beta=beta, reduction="none").sum(-1)
    torch.testing.assert_close(SmoothL1(beta).between(x, y), expected)


def test_kl_of_a_certain_vector_is_finite():
    certain, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert KL().between(certain, certain) == 0
    assert 20 < KL().between(certain, other) < 30


def test_as_cost_keeps_a_cost_and_wraps_a_function():
    cost = Euclidean()
    assert as_cost(cost) is cost
    assert isinstance(as_cost(lambda x, y: (x - y).sum(-1)), AbstractCost)
    with pytest.raises(ModelError, match=r"`cost` must be an AbstractCost or a function .* got 'euclid'"):
        as_cost("euclid")


def test_options_out_of_range_are_refused():
    with pytest.raises(ModelError, match="`beta` must be positive; got 0"):
        SmoothL1(beta=0)
    for cost in (KL, CrossEntropy):
        with pytest.raises(ModelError, match="floor must lie between 0 and 1; got -1"):
            cost(floor=-1)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((3, 2), (1, 3, 2), r"`x` must be \(replicas, points, features\), none of them 0; got shape \(3, 2\)"),
        ((1, 3, 2), (3, 2), r"`y` must be \(replicas, points, features\), none of them 0; got shape \(3, 2\)"),
        ((1, 3, 2), (1, 3, 4), "equally many features; got 2 and 4"),
        ((2, 3, 2), (3, 3, 2), r"equal replicas, or one; got \[2, 3\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x, y, message):
    with pytest.raises(DataError, match=message):
        Euclidean()(torch.zeros(x), torch.zeros(y))


def test_a_function_that_does_not_reduce_is_refused():
    with pytest.raises(DataError, match=r"`cost` must reduce the last axis, to shape \(1, 2, 3\).* got \(1, 2, 3, 4\)"):
        FunctionCost(lambda x, y: x - y)(torch.zeros(1, 2, 4), torch.zeros(1, 3, 4))
