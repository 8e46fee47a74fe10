"""What every public divergence promises, whichever it is."""

import dataclasses
import inspect

import pytest
import torch

from otpdag import divergences
from otpdag.divergences import AbstractDivergence
from otpdag.errors import DataError

PUBLIC = [getattr(divergences, name) for name in divergences.__all__]
CLASSES = [cls for cls in PUBLIC if inspect.isclass(cls) and issubclass(cls, AbstractDivergence)]
CLASSES = [cls for cls in CLASSES if not inspect.isabstract(cls)]
every_divergence = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


# Settings for the tests, where a divergence has them: the empirical distributions themselves, and small machinery.
SETTINGS = {"unbiased": False, "features": 40, "hidden": (16,), "steps": 20}


def empirical(cls):
    """Build a divergence that compares the empirical distributions themselves."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in SETTINGS.items() if name in names})


def evaluate(cls, *samples):
    """Evaluate a fresh divergence with a fixed stream of randomness."""
    return empirical(cls)(*samples, generator=torch.Generator().manual_seed(0))


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def draw_weights(*shape, seed=0, dtype=torch.float64):
    return 0.1 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_the_list_is_not_empty():
    assert len(CLASSES) >= 5


@every_divergence
@every_dtype
def test_equal_samples_are_at_distance_zero(cls, dtype):
    x = draw(2, 20, 3, dtype=dtype)
    assert evaluate(cls, x, x.clone()).abs().max() < 1e-4


@every_divergence
@every_dtype
def test_shifted_samples_are_apart_and_further_ones_more_so(cls, dtype):
    x, y = draw(2, 20, 3, dtype=dtype), draw(2, 25, 3, seed=1, dtype=dtype)
    near, far = evaluate(cls, x, y + 0.5), evaluate(cls, x, y + 3.0)
    assert near.shape == far.shape == (2,)
    assert near.dtype == dtype
    assert (far > 0).all()
    assert (far > near).all()


@every_divergence
def test_order_of_the_points_does_not_matter(cls):
    x, y, a = draw(1, 20, 3), draw(1, 15, 3, seed=1) + 1, draw_weights(1, 20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(evaluate(cls, x[:, order], y, a[:, order]), evaluate(cls, x, y, a), rtol=1e-6, atol=1e-8)


@every_divergence
@every_dtype
def test_a_weight_of_two_thirds_is_a_point_repeated_twice(cls, dtype):
    x, y = draw(1, 2, 3, dtype=dtype), draw(1, 4, 3, seed=1, dtype=dtype) + 1
    weighted = evaluate(cls, x, y, torch.tensor([[2.0, 1.0]], dtype=dtype))
    torch.testing.assert_close(weighted, evaluate(cls, x[:, [0, 0, 1]], y), rtol=1e-3, atol=1e-5)
    weighted = evaluate(cls, y, x, None, torch.tensor([[2 / 3, 1 / 3]], dtype=dtype))
    torch.testing.assert_close(weighted, evaluate(cls, y, x[:, [0, 0, 1]]), rtol=1e-3, atol=1e-5)


@every_divergence
def test_a_weight_of_zero_leaves_a_point_out(cls):
    x, y = draw(1, 6, 3), draw(1, 5, 3, seed=1) + 1
    a = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(evaluate(cls, x, y, a), evaluate(cls, x[:, [0, 2, 3, 5]], y), rtol=1e-4, atol=1e-8)


@every_divergence
def test_uniform_weights_are_the_default(cls):
    x, y = draw(2, 8, 3), draw(2, 8, 3, seed=1) + 1
    ones = torch.full((1, 8), 5.0, dtype=torch.float64)
    torch.testing.assert_close(evaluate(cls, x, y, ones, ones), evaluate(cls, x, y), rtol=1e-4, atol=1e-8)


@every_divergence
@pytest.mark.parametrize("weighted", [False, True])
def test_replicas_are_separate_calls(cls, weighted):
    x, y = draw(3, 12, 2), draw(3, 10, 2, seed=1) * 2 + 1
    weights = (draw_weights(3, 12), draw_weights(3, 10, seed=1)) if weighted else ()
    together = evaluate(cls, x, y, *weights)
    alone = [evaluate(cls, *(value[r : r + 1] for value in (x, y, *weights))) for r in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-8)


@every_divergence
def test_one_replica_broadcasts(cls):
    x, y, a = draw(3, 12, 2), draw(1, 10, 2, seed=1) + 1, draw_weights(3, 12)
    full = y.expand(3, -1, -1)
    torch.testing.assert_close(evaluate(cls, x, y), evaluate(cls, x, full), rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(evaluate(cls, y, x), evaluate(cls, full, x), rtol=1e-4, atol=1e-8)
    one = evaluate(cls, x[:1], y, a)
    assert one.shape == (3,)
    torch.testing.assert_close(one, evaluate(cls, x[:1].expand(3, -1, -1), full, a), rtol=1e-4, atol=1e-8)


@every_divergence
@every_dtype
def test_gradients_are_finite_in_samples_and_weights_even_with_ties(cls, dtype):
    x, y = draw(2, 8, 3, dtype=dtype), draw(2, 8, 3, seed=1, dtype=dtype)
    y[:, :3] = x[:, :3]
    x[:, 4] = x[:, 3]
    arguments = [x, y, draw_weights(2, 8, dtype=dtype), draw_weights(2, 8, seed=1, dtype=dtype)]
    arguments = [value.requires_grad_() for value in arguments]
    evaluate(cls, *arguments).sum().backward()
    for value in arguments:
        assert torch.isfinite(value.grad).all()
    assert arguments[0].grad.abs().sum() > 0


@every_divergence
def test_gradients_without_weights_are_those_with_uniform_ones(cls):
    x, y = draw(1, 8, 3).requires_grad_(), draw(1, 8, 3, seed=1) + 1
    (plain,) = torch.autograd.grad(evaluate(cls, x, y).sum(), x)
    ones = torch.ones(1, 8, dtype=torch.float64).requires_grad_()
    (weighted,) = torch.autograd.grad(evaluate(cls, x, y, ones, ones).sum(), x)
    torch.testing.assert_close(plain, weighted, rtol=1e-2, atol=1e-5)


@every_divergence
def test_following_the_gradient_brings_the_samples_together(cls):
    x, y = draw(1, 16, 2), (draw(1, 16, 2, seed=1) + 2.0).requires_grad_()
    (gradient,) = torch.autograd.grad(evaluate(cls, x, y).sum(), y)
    assert (gradient.mean(1) > 0).all()


@every_divergence
def test_the_same_generator_gives_the_same_value(cls):
    x, y = draw(1, 16, 4), draw(1, 16, 4, seed=1)
    assert torch.equal(evaluate(cls, x, y), evaluate(cls, x, y))


@every_divergence
def test_the_global_random_state_is_left_alone_when_a_generator_is_given(cls):
    before = torch.get_rng_state()
    evaluate(cls, draw(1, 8, 4), draw(1, 8, 4, seed=1))
    assert torch.equal(before, torch.get_rng_state())


@every_divergence
def test_arguments_are_left_as_they_are(cls):
    x, y, a = draw(1, 8, 2), draw(1, 7, 2, seed=1), draw_weights(1, 8)
    copies = [value.clone() for value in (x, y, a)]
    evaluate(cls, x, y, a)
    for value, copy in zip((x, y, a), copies, strict=True):
        assert torch.equal(value, copy)


@every_divergence
def test_it_runs_without_gradients(cls):
    with torch.no_grad():
        assert torch.isfinite(evaluate(cls, draw(1, 8, 2), draw(1, 7, 2, seed=1), draw_weights(1, 8))).all()


@every_divergence
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(5, 2)}, r"`x` must be \(replicas, points, features\).* got shape \(5, 2\)"),
        ({"y": torch.zeros(1, 0, 2)}, r"`y` must be .* none of them 0; got shape \(1, 0, 2\)"),
        ({"y": torch.zeros(1, 5, 3)}, "equally many features; got 2 and 3"),
        ({"y": torch.zeros(1, 5, 2, dtype=torch.float64)}, "same type; got torch.float32 and torch.float64"),
        ({"x": torch.zeros(1, 5, 2, dtype=torch.int64)}, "`x` must be floating point; got torch.int64"),
        ({"x": torch.zeros(2, 5, 2), "y": torch.zeros(3, 5, 2)}, r"equal replicas, or one; got \[2, 3\]"),
        ({"a": torch.ones(1, 4)}, r"`a` must have shape \(replicas, 5\).* point of `x`; got \(1, 4\)"),
        ({"b": torch.ones(5)}, r"`b` must have shape \(replicas, 5\).* point of `y`; got \(5,\)"),
        ({"a": torch.ones(1, 5).double()}, "`a` must have the type of `x`, torch.float32; got torch.float64"),
        ({"b": -torch.ones(1, 5)}, "`b` must be non-negative .* got a smallest weight of -1.0"),
        ({"a": torch.zeros(1, 5)}, "`a` must be non-negative with a positive, finite sum"),
        ({"a": torch.full((1, 5), float("nan"))}, "`a` must be non-negative with a positive, finite sum"),
    ],
)
def test_what_does_not_fit_is_refused(cls, changed, message):
    arguments = {"x": torch.zeros(1, 5, 2), "y": torch.ones(1, 5, 2), **changed}
    with pytest.raises(DataError, match=message):
        cls()(**arguments)


@every_divergence
def test_it_is_frozen(cls):
    name = dataclasses.fields(cls)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(cls(), name, None)
