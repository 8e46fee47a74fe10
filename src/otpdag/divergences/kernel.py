"""Distances of kernel means: the energy distance, and maximum mean discrepancies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from otpdag.costs import Euclidean, SquaredEuclidean
from otpdag.divergences.base import AbstractDivergence, is_uniform, pair_mean, self_mean
from otpdag.errors import ModelError, check_numbers


@dataclass(frozen=True)
class Energy(AbstractDivergence):
    r"""Energy distance between two weighted samples (Székely & Rizzo 2013, doi:10.1016/j.jspi.2013.03.018).

    .. math:: D(P, Q) = 2\,E\|X - Y\| - E\|X - X'\| - E\|Y - Y'\|

    It is the maximum mean discrepancy of the kernel :math:`-\|x - y\|`: no bandwidth, and gradients that
    reach far.

    Args:
        unbiased: Average over pairs of different points only, so that minibatch values are unbiased (and may
            be slightly negative). With False it is that of the empirical distributions, never negative.

    Example:
        >>> x, y = torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[3.0], [4.0]]])
        >>> Energy(unbiased=False)(x, y)
        tensor([5.])
    """

    unbiased: bool = True

    def forward(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor, generator: torch.Generator | None) -> Tensor:
        """Compute the distance of checked samples."""
        across = pair_mean(Euclidean().pairwise(x, y), a, b)
        return 2.0 * across - self._within(x, a) - self._within(y, b)

    def _within(self, x: Tensor, a: Tensor) -> Tensor:
        return self_mean(Euclidean().pairwise(x, x), a, self.unbiased)


def gaussian(s: Tensor) -> Tensor:
    """The kernel :math:`e^{-s/2}` of squared distances in units of the bandwidth."""
    return torch.exp(-0.5 * s)


@dataclass(frozen=True)
class MMD(AbstractDivergence):
    r"""Squared maximum mean discrepancy (Gretton et al. 2012, https://jmlr.org/papers/v13/gretton12a.html).

    .. math:: D(P, Q) = E\,k(X, X') + E\,k(Y, Y') - 2\,E\,k(X, Y)

    with a kernel of :math:`s = \|x - y\|^2 / h^2`, averaged over several bandwidths :math:`h`.

    Args:
        kernel: A function of :math:`s`: Gaussian by default, ``lambda s: torch.rsqrt(1 + s)`` is the inverse
            multiquadric one.
        bandwidth: A number, or ``"median"``: the weighted median distance between ``x`` and ``y``, taken anew at each
            call and for each replica, and not differentiated.
        scales: Multiples of the bandwidth to average over.
        unbiased: Average over pairs of different points only, so that minibatch values are unbiased (and may
            be slightly negative). With False it is that of the empirical distributions, never negative.

    Example:
        >>> x, y = torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[3.0], [4.0]]])
        >>> MMD(bandwidth=1.0, scales=(0.5, 1.0, 2.0))(x, y)
        tensor([0.8247])
    """

    kernel: Callable[[Tensor], Tensor] = gaussian
    bandwidth: Literal["median"] | float = "median"
    scales: tuple[float, ...] = (1.0,)
    unbiased: bool = True

    def __post_init__(self) -> None:
        """Check the options."""
        if not callable(self.kernel):
            raise ModelError(f"`kernel` must be a function of squared distances; got {self.kernel!r}")
        check_numbers("`scales`", self.scales)
        width: Any = self.bandwidth
        if not (width == "median" if isinstance(width, str) else isinstance(width, int | float) and width > 0):
            raise ModelError(f"`bandwidth` must be 'median' or a positive number; got {self.bandwidth!r}")
        if not self.scales or not all(scale > 0 for scale in self.scales):
            raise ModelError(f"`scales` must hold positive numbers; got {self.scales}")

    def forward(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor, generator: torch.Generator | None) -> Tensor:
        """Compute the discrepancy of checked samples."""
        distance = SquaredEuclidean().pairwise
        across = distance(x, y)
        widths = self._widths(across, a, b)
        own = self_mean(self._evaluate(distance(x, x), widths), a, self.unbiased)
        other = self_mean(self._evaluate(distance(y, y), widths), b, self.unbiased)
        return own + other - 2.0 * pair_mean(self._evaluate(across, widths), a, b)

    def _evaluate(self, squared: Tensor, widths: list[Tensor]) -> Tensor:
        """Average the kernel over the squared bandwidths, each (R, 1, 1)."""
        values = [self.kernel(squared / width) for width in widths]
        return torch.stack(values).mean(0) if len(values) > 1 else values[0]

    def _widths(self, squared: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        """Return the squared bandwidths, each (R, 1, 1)."""
        if not isinstance(self.bandwidth, str):
            return [squared.new_full((1, 1, 1), (self.bandwidth * scale) ** 2) for scale in self.scales]
        median = _median(squared.detach(), a.detach(), b.detach())
        median = torch.where(median > 0, median, torch.ones_like(median)).reshape(-1, 1, 1)
        return [median * scale**2 for scale in self.scales]


def _median(squared: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the lower weighted median of the entries of each matrix (R, N, M)."""
    if is_uniform(a) and is_uniform(b):
        return squared.flatten(1).median(-1).values
    squared, mass = torch.broadcast_tensors(squared, a.unsqueeze(-1) * b.unsqueeze(-2))
    values, order = squared.flatten(1).sort(-1)
    below = mass.flatten(1).gather(-1, order).cumsum(-1)
    # The slack keeps the rounding of the running sum from passing over a median exactly at one half.
    slack = torch.finfo(below.dtype).eps * below.shape[-1] ** 0.5
    index = torch.searchsorted(below, below[:, -1:] / 2 - slack)
    return values.gather(-1, index).squeeze(-1)
