"""Dirichlet nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.mechanisms.base import Params, Parents, axis_count
from otpdag.mechanisms.parameters import POSITIVE, Axis, Parameter, SettingLike
from otpdag.mechanisms.predictor import Predicted
from otpdag.mechanisms.quantiles import GAMMA, gamma_log_quantile
from otpdag.spaces import Simplex, Vector


@dataclass(eq=False, repr=False, kw_only=True)
class Dirichlet(Predicted):
    r"""A probability vector, with a row of concentrations for each configuration of discrete parents.

    From gamma quantiles:

    .. math:: x_k = g_k / \textstyle\sum_i g_i, \quad g_k = F_{a_k}^{-1}(u_k), \quad u_k \sim U(0, 1)

    Densities are with respect to the first :math:`K - 1` coordinates.

    Args:
        dim: Number of coordinates, at least two.
        concentration: Concentrations; a number stands for a symmetric distribution.

    Attributes:
        totals: Sums of concentrations where learning may start.

    >>> Dirichlet(3, concentration=0.5).space
    Simplex(dim=3)
    """

    dim: int = field(kw_only=False)
    concentration: SettingLike = None

    weight: SettingLike = field(default=None, init=False)
    network: Sequence[int] = field(default=(), init=False)
    network_prior: float = field(default=0.0, init=False)
    terms: str | None = field(default=None, init=False)
    predicts: ClassVar[str] = "concentration"
    space_kind: ClassVar[type[Vector]] = Simplex
    totals: ClassVar[tuple[float, float]] = (1e-2, 1e5)

    def on_setup(self) -> None:
        """Refuse numeric parents."""
        if self.family.continuous:
            names = ", ".join(repr(name) for name, _ in self.family.continuous)
            raise ModelError(f"node {self.family.node!r}: Dirichlet takes discrete parents only; {names} are numeric")
        super().on_setup()

    def parameters(self) -> dict[str, Parameter]:
        """Concentration table."""
        shape = (self.predictor.rows, self.dim)
        return {"concentration": Parameter(shape, POSITIVE, self.concentration)}

    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """Concentrations by configuration."""
        return {"concentration": (self.predictor.row_axis, self.own_axis)}

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Match the means and the total variance in each configuration."""
        rows = self.predictor.rows
        mean = self.pooled(value, rows, parents, weight)
        variance = (self.pooled(value**2, rows, parents, weight) - mean**2).sum(-1, keepdim=True).clamp(min=1e-9)
        total = (mean * (1 - mean)).sum(-1, keepdim=True) / variance - 1
        return {"concentration": mean.clamp(min=1e-4) * total.clamp(*self.totals)}

    def concentration_at(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """The concentrations at these parents: (R, ..., dim)."""
        return self.row_of(params["concentration"], parents, axis_count(parents, like))

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Normalised gamma quantiles."""
        concentration = self.concentration_at(params, parents, noise)
        return torch.softmax(gamma_log_quantile(noise, concentration), -1)

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Log-density of the coordinates that are seen.

        Some of a Dirichlet vector's coordinates and the rest of their mass are Dirichlet again, so that cells may be
        missing one by one.
        """
        concentration = self.concentration_at(params, parents, value)
        line = torch.log(value.clamp(min=torch.finfo(value.dtype).tiny))
        total = torch.lgamma(concentration.sum(-1))
        cells = (concentration - 1) * line - torch.lgamma(concentration)
        if mask is None:
            return total + cells.sum(-1)
        cells, mask = torch.broadcast_tensors(cells, mask)
        partial = ~mask.all(-1)
        rest = torch.where(mask, 0.0, concentration).sum(-1)
        mass = (1 - torch.where(mask, value, 0.0).sum(-1)).clamp(min=torch.finfo(value.dtype).eps)
        safe = torch.where(partial, rest, 1.0)
        remainder = torch.where(partial, (safe - 1) * torch.log(mass) - torch.lgamma(safe), 0.0)
        return total + torch.where(mask, cells, 0.0).sum(-1) + remainder

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        """Noise that gives the vector; the total that normalising forgot is drawn with ``uniform``'s first coordinate.

        The total of the gamma variables is independent of their shares.
        """
        concentration = self.concentration_at(params, parents, value)
        total = GAMMA.quantile(uniform[..., :1], concentration.sum(-1, keepdim=True))
        return GAMMA.cdf(value * total, concentration)

    def complete(self, params: Params, value: Tensor, parents: Parents, mask: Tensor, noise: Tensor) -> Tensor:
        """Share what the seen coordinates leave among the others, in the proportions of a fresh vector.

        These proportions are independent of the seen ones.
        """
        drawn = self.forward(params, parents, noise)
        value, mask, drawn = torch.broadcast_tensors(value, mask, drawn)
        seen = torch.where(mask, value, 0.0)
        fresh = torch.where(mask, 0.0, drawn)
        left = (1 - seen.sum(-1, keepdim=True)).clamp(min=0.0)
        return seen + left * fresh / fresh.sum(-1, keepdim=True).clamp(min=torch.finfo(fresh.dtype).tiny)

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The normalised concentrations."""
        concentration = self.concentration_at(params, parents)
        return concentration / concentration.sum(-1, keepdim=True)


def laplace_moments(concentration: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the Gaussian whose softmax approximates a Dirichlet: Eq. (softGau) of the paper."""
    size = concentration.shape[-1]
    line = torch.log(concentration)
    inverse = 1 / concentration
    mu = line - line.mean(-1, keepdim=True)
    return mu, inverse * (1 - 2 / size) + inverse.sum(-1, keepdim=True) / size**2
