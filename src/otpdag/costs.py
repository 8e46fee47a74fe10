"""Ground costs: what it takes to move one point to another.

A cost is used in two ways. ``cost(x, y)`` compares every row of ``x`` (R, N, d) with every row of ``y``
(R, M, d) and returns a matrix (R, N, M), for divergences. ``cost.between(x, y)`` compares values one by one
and reduces the last axis, for reconstruction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.errors import DataError, ModelError, check_choice, check_positive, check_share
from otpdag.spaces import CostKind

__all__ = [
    "KL",
    "AbstractCost",
    "CrossEntropy",
    "Euclidean",
    "FunctionCost",
    "SmoothL1",
    "SquaredEuclidean",
    "SumOfCosts",
    "as_cost",
]

PointFunction = Callable[[Tensor, Tensor], Tensor]


class AbstractCost(ABC):
    """A ground cost; a subclass says how to compare values one by one and, where it can be faster, all pairs.

    Example:
        >>> class Chebyshev(AbstractCost):
        ...     def between(self, x, y):
        ...         return (x - y).abs().amax(-1)
        >>> Chebyshev()(torch.zeros(1, 2, 3), torch.ones(1, 4, 3)).shape
        torch.Size([1, 2, 4])
    """

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare all pairs.

        Args:
            x: Points, (R, N, d).
            y: Points, (R, M, d); a replica axis of 1 broadcasts.

        Returns:
            The cost matrix, (R, N, M).
        """
        check_points(x, y)
        return self.pairwise(x, y)

    @abstractmethod
    def between(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare ``x`` (..., d) with ``y`` (..., d) value by value, and return the costs (...)."""

    def pairwise(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare every row of ``x`` (R, N, d) with every row of ``y`` (R, M, d), shapes already checked."""
        return all_pairs(self.between, x, y)


@dataclass(frozen=True)
class SquaredEuclidean(AbstractCost):
    r"""Squared Euclidean distance.

    .. math:: c(x, y) = \|x - y\|_2^2

    Example:
        >>> SquaredEuclidean().between(torch.tensor([3.0, 4.0]), torch.zeros(2))
        tensor(25.)
    """

    def between(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare value by value."""
        return (x - y).square().sum(-1)

    def pairwise(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare all pairs by one matrix product, after centring so that little precision is lost."""
        centre = y.detach().mean(-2, keepdim=True)
        x, y = x - centre, y - centre
        squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
        return (squares - 2.0 * (x @ y.mT)).clamp(min=0.0)


@dataclass(frozen=True)
class Euclidean(AbstractCost):
    r"""Euclidean distance, with gradient zero where two points coincide.

    .. math:: c(x, y) = \|x - y\|_2

    Example:
        >>> Euclidean().between(torch.tensor([3.0, 4.0]), torch.zeros(2))
        tensor(5.)
    """

    def between(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare value by value."""
        return torch.linalg.vector_norm(x - y, dim=-1)

    def pairwise(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare all pairs, after centring so that little precision is lost in a matrix product."""
        centre = y.detach().mean(-2, keepdim=True)
        return torch.cdist(x - centre, y - centre)


@dataclass(frozen=True)
class SmoothL1(AbstractCost):
    r"""Smooth absolute error (Huber 1964, divided by ``beta``), summed over the coordinates.

    .. math:: c(x, y) = \sum_k \begin{cases} (x_k - y_k)^2 / 2\beta & |x_k - y_k| < \beta \\
              |x_k - y_k| - \beta / 2 & \text{otherwise} \end{cases}

    Args:
        beta: Where the square turns into the absolute value.

    Example:
        >>> SmoothL1().between(torch.tensor([3.0, 0.5]), torch.zeros(2))
        tensor(2.6250)
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        """Check the option."""
        check_positive("`beta`", self.beta)

    def between(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare value by value."""
        gap = (x - y).abs()
        return torch.where(gap < self.beta, gap.square() / (2.0 * self.beta), gap - 0.5 * self.beta).sum(-1)


@dataclass(frozen=True)
class _OfShares(AbstractCost):
    floor: float = 1e-12

    def __post_init__(self) -> None:
        """Check the option."""
        check_share("floor", self.floor)


@dataclass(frozen=True)
class KL(_OfShares):
    r"""Kullback-Leibler divergence between probability vectors; not symmetric.

    .. math:: c(x, y) = \sum_k x_k \log (x_k / y_k)

    Args:
        floor: Probabilities below it count as ``floor`` inside the logarithm (and pass no gradient there).

    Example:
        >>> KL().between(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
        tensor(0.6931)
    """

    def between(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare value by value."""
        return (x * (x.clamp(min=self.floor).log() - y.clamp(min=self.floor).log())).sum(-1)

    def pairwise(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare all pairs by one matrix product."""
        negative_entropy = (x * x.clamp(min=self.floor).log()).sum(-1, keepdim=True)
        return negative_entropy - x @ y.clamp(min=self.floor).log().mT


@dataclass(frozen=True)
class CrossEntropy(_OfShares):
    r"""Cross-entropy of predicted probabilities ``y`` under target probabilities (or a one-hot vector) ``x``.

    .. math:: c(x, y) = -\sum_k x_k \log y_k

    Args:
        floor: Probabilities below it count as ``floor`` inside the logarithm (and pass no gradient there).

    Example:
        >>> CrossEntropy().between(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5]))
        tensor(0.6931)
    """

    def between(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare value by value."""
        return -(x * y.clamp(min=self.floor).log()).sum(-1)

    def pairwise(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare all pairs by one matrix product."""
        return -(x @ y.clamp(min=self.floor).log().mT)


@dataclass(frozen=True)
class FunctionCost(AbstractCost):
    """A cost from any function of two points.

    Args:
        function: Takes two tensors (..., d) that broadcast against each other and returns (...).

    Example:
        >>> cost = FunctionCost(lambda x, y: (x - y).abs().sum(-1))
        >>> cost(torch.zeros(1, 2, 3), torch.ones(1, 1, 3))
        tensor([[[3.],
                 [3.]]])
    """

    function: PointFunction

    def between(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare value by value."""
        return self.function(x, y)


@dataclass(frozen=True)
class SumOfCosts(AbstractCost):
    """Costs of parts of a point, each with the coordinates that it reads.

    Example:
        >>> cost = SumOfCosts(((slice(0, 1), Euclidean()), (slice(1, 2), FunctionCost(differ))))
        >>> cost.between(torch.tensor([3.0, 1.0]), torch.zeros(2))
        tensor(4.)
    """

    parts: tuple[tuple[slice, AbstractCost], ...]

    def between(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare value by value."""
        return torch.stack([cost.between(x[..., at], y[..., at]) for at, cost in self.parts]).sum(0)

    def pairwise(self, x: Tensor, y: Tensor) -> Tensor:
        """Compare all pairs, part by part."""
        return torch.stack([cost.pairwise(x[..., at], y[..., at]) for at, cost in self.parts]).sum(0)


def differ(x: Tensor, y: Tensor) -> Tensor:
    """One where two values (..., d) differ, else zero."""
    return (x != y).any(-1).to(x)


def as_cost(cost: AbstractCost | PointFunction) -> AbstractCost:
    """Return a cost as it is, and wrap a plain function of two points.

    >>> as_cost(Euclidean())
    Euclidean()
    """
    if isinstance(cost, AbstractCost):
        return cost
    if callable(cost):
        return FunctionCost(cost)
    raise ModelError(f"`cost` must be an AbstractCost or a function of two points; got {cost!r}")


def all_pairs(function: PointFunction, x: Tensor, y: Tensor) -> Tensor:
    """Evaluate a function of two points on all pairs, holding (R, N, M, d) in memory.

    >>> all_pairs(lambda x, y: (x - y).sum(-1), torch.ones(1, 2, 3), torch.zeros(1, 4, 3)).shape
    torch.Size([1, 2, 4])
    """
    costs = function(x.unsqueeze(-2), y.unsqueeze(-3))
    expected = (max(x.shape[0], y.shape[0]), x.shape[1], y.shape[1])
    if tuple(costs.shape) != expected:
        raise DataError(
            f"`cost` must reduce the last axis, to shape {expected} for all pairs; got {tuple(costs.shape)}"
        )
    return costs


def check_points(x: Tensor, y: Tensor) -> None:
    """Refuse anything but two tensors of floating-point numbers (R, N, d) and (R, M, d), neither empty."""
    for name, value in (("x", x), ("y", y)):
        if value.ndim != 3 or 0 in value.shape:
            shape = tuple(value.shape)
            raise DataError(f"`{name}` must be (replicas, points, features), none of them 0; got shape {shape}")
        if not value.is_floating_point():
            raise DataError(f"`{name}` must be floating point; got {value.dtype}")
    if x.shape[-1] != y.shape[-1]:
        raise DataError(f"`x` and `y` must have equally many features; got {x.shape[-1]} and {y.shape[-1]}")
    if x.shape[0] != y.shape[0] and 1 not in (x.shape[0], y.shape[0]):
        raise DataError(f"`x` and `y` must have equal replicas, or one; got {[x.shape[0], y.shape[0]]}")


# the cost by a node's type: cross-entropy for categories, smooth L1 for counts, else squared error
DEFAULT_COSTS: Mapping[CostKind, AbstractCost] = {
    "squared": SquaredEuclidean(),
    "smooth l1": SmoothL1(),
    "cross-entropy": CrossEntropy(),
}

# ground costs by what a user may call them
NAMED_COSTS: Mapping[str, AbstractCost] = {
    "squared": SquaredEuclidean(),
    "absolute": Euclidean(),
    "0/1": FunctionCost(differ),
}


def ground_cost(node: str, cost: AbstractCost | PointFunction | str) -> AbstractCost:
    """The ground cost of a node, which may be called by its name.

    >>> ground_cost("x", "absolute")
    Euclidean()
    """
    if isinstance(cost, str):
        check_choice(f"the cost of node {node!r}", cost, tuple(NAMED_COSTS))
        return NAMED_COSTS[cost]
    return as_cost(cost)
