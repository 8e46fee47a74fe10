"""The one thing a divergence has to do, and what several share: checks of samples, and weighted means over pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from otpdag.costs import check_points
from otpdag.errors import DataError


class AbstractDivergence(ABC):
    """A divergence between two weighted samples; a subclass writes :meth:`forward`.

    Calling it checks the shapes, normalises the weights and returns one number per replica.

    Example:
        >>> class MeanShift(AbstractDivergence):
        ...     def forward(self, x, y, a, b, generator):
        ...         shift = (a.unsqueeze(-1) * x).sum(-2) - (b.unsqueeze(-1) * y).sum(-2)
        ...         return shift.square().sum(-1)
        >>> MeanShift()(torch.zeros(2, 5, 3), torch.ones(1, 7, 3))
        tensor([3., 3.])
    """

    def __call__(
        self,
        x: Tensor,
        y: Tensor,
        a: Tensor | None = None,
        b: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compare two samples, replica by replica; differentiable in all four arguments.

        Args:
            x: A sample, (R, N, d).
            y: A sample, (R, M, d). A replica axis of 1 broadcasts, here and in the weights.
            a: Non-negative weights of ``x``, (R, N), normalised here; uniform where None.
            b: Non-negative weights of ``y``, (R, M), normalised here; uniform where None.
            generator: Source of randomness, for the divergences that draw something.

        Returns:
            The divergence of each replica, (R,).

        Raises:
            DataError: If shapes, types or weights do not fit together.
        """
        check_points(x, y)
        if x.dtype != y.dtype:
            raise DataError(f"`x` and `y` must have the same type; got {x.dtype} and {y.dtype}")
        a, b = _normalised("a", fill_weights(x, a), "x", x), _normalised("b", fill_weights(y, b), "y", y)
        counts = {value.shape[0] for value in (x, y, a, b)}
        if len(counts - {1}) > 1:
            raise DataError(f"`x`, `y`, `a` and `b` must have equal replicas, or one; got {sorted(counts - {1})}")
        return self.forward(x, y, a, b, generator).expand(max(counts))

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor, generator: torch.Generator | None) -> Tensor:
        """Compute the divergence of checked samples.

        Shapes fit, but replica axes of 1 are not expanded. Weights (R, N) and (R, M) sum to 1.
        """


def fill_weights(x: Tensor, a: Tensor | None) -> Tensor:
    """Return the weights of a sample ``x`` (R, N, d), written out where they are uniform.

    >>> fill_weights(torch.zeros(3, 4, 2), None)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return x.new_full((1, x.shape[-2]), 1.0 / x.shape[-2]) if a is None else a


def require_finite(costs: Tensor) -> Tensor:
    """Return ground costs as they are, unless a solver could not deal with them.

    >>> require_finite(torch.zeros(1, 1, 1))
    tensor([[[0.]]])
    """
    if not bool(torch.isfinite(costs).all()):
        raise DataError("`x` and `y` must have finite costs; got NaN or infinity, in the samples or the cost")
    return costs


def _normalised(name: str, weights: Tensor, of: str, sample: Tensor) -> Tensor:
    """Divide weights by their sum, after checking that they can be weights at all."""
    if weights.ndim != 2 or weights.shape[-1] != sample.shape[-2]:
        raise DataError(
            f"`{name}` must have shape (replicas, {sample.shape[-2]}), one weight for each point of `{of}`; "
            f"got {tuple(weights.shape)}"
        )
    if weights.dtype != sample.dtype:
        raise DataError(f"`{name}` must have the type of `{of}`, {sample.dtype}; got {weights.dtype}")
    total = weights.sum(-1, keepdim=True)
    lowest, smallest_total = float(weights.detach().amin()), float(total.detach().amin())
    if not (lowest >= 0 and 0 < smallest_total < float("inf")):
        raise DataError(
            f"`{name}` must be non-negative with a positive, finite sum; got a smallest weight of {lowest} "
            f"and a smallest sum of {smallest_total}"
        )
    return weights / total


def is_uniform(weights: Tensor) -> bool:
    """Whether weights are equal, and want no gradient: what is quicker for equal ones has none in them."""
    return not weights.requires_grad and bool((weights == weights[:1, :1]).all())


def pair_mean(values: Tensor, a: Tensor, b: Tensor) -> Tensor:
    r"""Average a matrix over independent pairs.

    .. math:: \sum_{ij} a_i b_j v_{ij}

    Args:
        values: One value for each pair, (R, N, M).
        a: Weights that sum to 1, (R, N).
        b: Weights that sum to 1, (R, M).

    Returns:
        The mean of each replica, (R,).

    Example:
        >>> pair_mean(torch.tensor([[[1.0, 3.0]]]), torch.ones(1, 1), torch.tensor([[0.75, 0.25]]))
        tensor([1.5000])
    """
    return (weigh_rows(values, a) * b).sum(-1)


def weigh_rows(values: Tensor, a: Tensor) -> Tensor:
    """Sum the rows of matrices (R, N, M) with weights (R, N), to (R, M).

    The weights stand on the left: a batch of products in this order is several times faster on a processor.

    >>> weigh_rows(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[1.0, 10.0]]))
    tensor([[31., 42.]])
    """
    return torch.matmul(a.unsqueeze(-2), values).squeeze(-2)


def self_mean(values: Tensor, a: Tensor, unbiased: bool) -> Tensor:
    r"""Average a matrix over pairs from one sample; unbiased means over pairs of different points.

    .. math:: \frac{\sum_{i \ne j} a_i a_j v_{ij}}{1 - \sum_i a_i^2}

    Args:
        values: One value for each pair, (R, N, N).
        a: Weights that sum to 1, (R, N).
        unbiased: Leave out the pairs of a point with itself.

    Returns:
        The mean of each replica, (R,).

    Example:
        >>> self_mean(torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]), torch.tensor([[0.5, 0.5]]), unbiased=True)
        tensor([1.])
    """
    total = pair_mean(values, a, a)
    if not unbiased:
        return total
    own = (values.diagonal(dim1=-2, dim2=-1) * a.square()).sum(-1)
    rest = 1.0 - a.square().sum(-1)
    if not bool((rest > 0).all()):
        raise DataError("`unbiased=True` needs at least two points with weight in each sample; got one")
    return (total - own) / rest
