"""Log-normal nodes."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from otpdag.mechanisms.base import Params, Parents, sum_cells
from otpdag.mechanisms.normal import LocationScale, normal_log_density
from otpdag.mechanisms.parameters import Setting
from otpdag.spaces import Positive, Space


class LogNormal(LocationScale):
    r"""A positive node whose logarithm is normal, with the location of a linear predictor.

    .. math:: \log x = \mathrm{loc}[\mathrm{pa}] + W^\top \mathrm{pa} + \mathrm{scale}[\mathrm{pa}] \, u,
              \quad u \sim N(0, I)

    ``exp(loc)`` is the median. Of a hidden node the location is fixed at zero unless it is given (its
    children's slopes can take it over), while the scale shapes the distribution and is learned.

    Args:
        dim: Number of coordinates.
        loc: Intercept of the logarithm.
        weight: Slopes of the numeric parents.
        scale: Standard deviation of the logarithm.
        network: Sizes of hidden layers of a network of the parents that replaces the linear prediction.
        shared_scale: One scale for all configurations of the discrete parents.
        floor: A scale that none falls below, as a share of the column's own spread; see :class:`Normal`.

    >>> LogNormal().space
    Positive(dim=1)
    """

    keeps_rounding: ClassVar[bool] = False

    def hidden_scale(self) -> Setting:
        """Learned."""
        return None

    @property
    def space(self) -> Space:
        """Positive vectors."""
        return Positive(self.dim)

    def on_line(self, value: Tensor) -> Tensor:
        """The logarithm."""
        return torch.log(value.clamp(min=torch.finfo(value.dtype).tiny))

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """``exp(loc + scale * u)``."""
        loc, scale = self.location_and_scale(params, parents, noise)
        return torch.exp(loc + scale * noise)

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Normal log-density of the logarithm, less the logarithm itself."""
        line = self.on_line(value)
        return sum_cells(normal_log_density(line, *self.location_and_scale(params, parents, value)) - line, mask)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """``(log x - loc) / scale``."""
        loc, scale = self.location_and_scale(params, parents, value)
        return (self.on_line(value) - loc) / scale

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """``exp(loc + scale^2 / 2)``."""
        loc = self.predictor(params, parents)
        return torch.exp(loc + 0.5 * self.row_of(params["scale"], parents, loc.ndim) ** 2)
