"""What every divergence promises, as checks that run on any of them.

They look at divergences between the empirical distributions themselves; give an estimator that corrects for the
sample size (an unbiased MMD, say) its uncorrected setting.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from otpdag.divergences import AbstractDivergence


def check_divergence(divergence: AbstractDivergence) -> None:
    """Run every check on one divergence; it is copied before each use.

    Raises:
        AssertionError: If a check fails; the message says which promise is broken.
    """
    for check in DIVERGENCE_CHECKS:
        check(divergence)


def check_zero(divergence: AbstractDivergence) -> None:
    """Equal samples are at distance zero."""
    x = _points(2, 20, 3)
    distance = _evaluate(divergence, x, x.clone()).abs().max().item()
    _require(divergence, distance < 1e-4, f"equal samples are {distance:.2e} apart, not zero")


def check_order(divergence: AbstractDivergence) -> None:
    """Samples further apart have the larger divergence."""
    x, y = _points(2, 20, 3), _points(2, 25, 3, seed=1)
    near, far = _evaluate(divergence, x, y + 0.5), _evaluate(divergence, x, y + 3.0)
    _require(divergence, near.shape == (2,), f"two replicas gave the shape {tuple(near.shape)}, not (2,)")
    _require(divergence, near.dtype == x.dtype, f"{x.dtype} gave {near.dtype}")
    _require(divergence, (far > near).all() and (far > 0).all(), "a larger shift did not give a larger value")


def check_permutation(divergence: AbstractDivergence) -> None:
    """The order of the points does not matter."""
    x, y, a = _points(1, 20, 3), _points(1, 15, 3, seed=1) + 1, _weights(1, 20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    permuted = _evaluate(divergence, x[:, order], y, a[:, order])
    _require_close(divergence, permuted, _evaluate(divergence, x, y, a), "the order of the points matters")


def check_weights(divergence: AbstractDivergence) -> None:
    """Weights count as repeated points, zero leaves a point out, equal ones are the default."""
    x, y = _points(1, 3, 3), _points(1, 4, 3, seed=1) + 1
    weights = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    repeated = _evaluate(divergence, x[:, [0, 0, 1]], y)
    _require_close(divergence, _evaluate(divergence, x, y, weights), repeated, "a weight is not a repetition")
    repeated = _evaluate(divergence, y, x[:, [0, 0, 1]])
    weighted = _evaluate(divergence, y, x, None, weights)
    _require_close(divergence, weighted, repeated, "a weight of the second sample is not a repetition")
    ones = torch.full((1, 3), 5.0, dtype=torch.float64)
    plain = _evaluate(divergence, x, y)
    _require_close(divergence, _evaluate(divergence, x, y, ones), plain, "equal weights differ from none")


def check_replicas(divergence: AbstractDivergence) -> None:
    """Replicas together give what they give one by one, and one replica broadcasts."""
    x, y, a = _points(3, 12, 2), 2 * _points(3, 10, 2, seed=1) + 1, _weights(3, 12)
    together = _evaluate(divergence, x, y, a)
    alone = torch.cat([_evaluate(divergence, x[r : r + 1], y[r : r + 1], a[r : r + 1]) for r in range(3)])
    _require_close(divergence, together, alone, "replicas influence each other")
    shared = _evaluate(divergence, x, y[:1])
    expanded = _evaluate(divergence, x, y[:1].expand(3, -1, -1))
    _require_close(divergence, shared, expanded, "one replica does not broadcast")


def check_gradients(divergence: AbstractDivergence) -> None:
    """Gradients are finite in samples and weights, also where points coincide, and lead the samples together."""
    x, y = _points(2, 8, 3), _points(2, 8, 3, seed=1)
    y[:, :3] = x[:, :3]
    x[:, 4] = x[:, 3]
    arguments = [value.requires_grad_() for value in (x, y, _weights(2, 8), _weights(2, 8, seed=1))]
    gradients = torch.autograd.grad(_evaluate(divergence, *arguments).sum(), arguments, allow_unused=True)
    for name, grad in zip(("x", "y", "a", "b"), gradients, strict=True):
        _require(divergence, grad is not None, f"there is no gradient in {name!r}")
        _require(divergence, grad is None or torch.isfinite(grad).all(), f"the gradient in {name!r} is not finite")
    x, y = _points(1, 16, 2), (_points(1, 16, 2, seed=1) + 2.0).requires_grad_()
    (grad,) = torch.autograd.grad(_evaluate(divergence, x, y).sum(), y)
    _require(divergence, (grad.mean(1) > 0).all(), "the gradient does not bring a shifted sample back")


def check_randomness(divergence: AbstractDivergence) -> None:
    """The same generator gives the same value; neither global randomness nor the arguments change."""
    x, y = _points(1, 16, 4), _points(1, 16, 4, seed=1)
    kept, state = (x.clone(), y.clone()), torch.get_rng_state()
    first, second = _evaluate(divergence, x, y), _evaluate(divergence, x, y)
    _require(divergence, torch.equal(first, second), "the same generator gave two values")
    _require(divergence, torch.equal(state, torch.get_rng_state()), "the global random state was touched")
    _require(divergence, torch.equal(kept[0], x) and torch.equal(kept[1], y), "the samples were changed in place")


# all checks of this file in their order, to parametrise a test with
DIVERGENCE_CHECKS: tuple[Callable[[AbstractDivergence], None], ...] = tuple(
    value for name, value in vars().items() if name.startswith("check_") and value is not check_divergence
)


def _points(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _weights(*shape: int, seed: int = 0) -> Tensor:
    return 0.1 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _evaluate(divergence: AbstractDivergence, *arguments: Tensor | None) -> Tensor:
    """A fresh copy's value, with a fixed stream of randomness."""
    return copy.deepcopy(divergence)(*arguments, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]


def _require(divergence: AbstractDivergence, condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(f"{type(divergence).__name__}: {message}")


def _require_close(divergence: AbstractDivergence, value: Tensor, expected: Tensor, message: str) -> None:
    error = ((value - expected).abs() / (1 + expected.abs())).max().item()
    _require(divergence, error < 1e-3, f"{message}: off by {error:.2e}")
