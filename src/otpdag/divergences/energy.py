"""Energy distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.costs import Euclidean
from otpdag.divergences.base import AbstractDivergence
from otpdag.divergences.statistics import pair_mean, self_mean

__all__ = ["Energy"]


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

    def forward(
        self, x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """Compute the distance of checked samples."""
        across = pair_mean(Euclidean().pairwise(x, y), a, b)
        return 2.0 * across - self._within(x, a) - self._within(y, b)

    def _within(self, x: Tensor, a: Tensor | None) -> Tensor:
        return self_mean(Euclidean().pairwise(x, x), a, self.unbiased)
