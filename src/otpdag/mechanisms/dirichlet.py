"""Dirichlet nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.mechanisms.base import Noise, Params, Parents, axis_count
from otpdag.mechanisms.parameters import POSITIVE, Axis, Parameter, SettingLike
from otpdag.mechanisms.predictor import Predicted
from otpdag.mechanisms.quantiles import GAMMA, gamma_log_quantile, inside_unit
from otpdag.spaces import Simplex, Space

LOG_2PI = math.log(2 * math.pi)


@dataclass(eq=False, repr=False, kw_only=True)
class Dirichlet(Predicted):
    r"""A probability vector, with a row of concentrations for each configuration of discrete parents.

    Exactly, from gamma quantiles:

    .. math:: x_k = g_k / \textstyle\sum_i g_i, \quad g_k = F_{a_k}^{-1}(u_k), \quad u_k \sim U(0, 1)

    With ``laplace=True``, the paper's softmax of a Gaussian (Eq. softGau; MacKay 1998),

    .. math:: x = \mathrm{softmax}(\mu + \sqrt{\Sigma} \, u), \quad
              \mu_k = \log a_k - \tfrac{1}{K} \textstyle\sum_i \log a_i, \quad
              \Sigma_k = \tfrac{1}{a_k} \left(1 - \tfrac{2}{K}\right) + \tfrac{1}{K^2} \textstyle\sum_i \tfrac{1}{a_i},

    with :math:`u \sim N(0, I)`. It approximates the Dirichlet poorly for concentrations below one; its own density is
    exact (a logistic normal). Densities are with respect to the first :math:`K - 1` coordinates.

    Args:
        dim: Number of coordinates, at least two.
        concentration: Concentrations; a number stands for a symmetric distribution.
        laplace: Use the softmax-Gaussian approximation.

    >>> Dirichlet(3, concentration=0.5).space
    Simplex(dim=3)
    """

    dim: int = field(kw_only=False)
    concentration: SettingLike = None
    laplace: bool = False

    weight: SettingLike = field(default=None, init=False)
    network: Sequence[int] = field(default=(), init=False)
    predicts: ClassVar[str] = "concentration"
    totals: ClassVar[tuple[float, float]] = (1e-2, 1e5)
    """Sums of concentrations where learning may start."""

    def on_setup(self) -> None:
        """Refuse numeric parents."""
        if self.family.continuous:
            names = ", ".join(repr(name) for name, _ in self.family.continuous)
            raise ModelError(f"node {self.family.node!r}: Dirichlet takes discrete parents only; {names} are numeric")
        super().on_setup()

    @property
    def space(self) -> Space:
        """Probability vectors."""
        return Simplex(self.dim)

    @property
    def noise(self) -> Noise:
        """One number for each coordinate: uniform, or normal for the approximation."""
        return Noise(self.dim, "normal" if self.laplace else "uniform")

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
        line = value if not self.laplace else _centred_log(value)
        mean = self.pooled(line, rows, parents, weight)
        variance = (self.pooled(line**2, rows, parents, weight) - mean**2).sum(-1, keepdim=True)
        variance = variance.clamp(min=1e-9)
        if self.laplace:
            # the concentrations are c * exp(mean), and all variances fall as 1 / c
            direction = torch.exp(mean)
            total = (1 - 1 / self.dim) * laplace_moments(direction)[1].sum(-1, keepdim=True) / variance
            return {"concentration": direction * total.clamp(*self.totals)}
        total = (mean * (1 - mean)).sum(-1, keepdim=True) / variance - 1
        return {"concentration": mean.clamp(min=1e-4) * total.clamp(*self.totals)}

    def concentration_at(self, params: Params, parents: Parents, like: Tensor | None = None) -> Tensor:
        """The concentrations at these parents: (R, ..., dim)."""
        return self.row_of(params["concentration"], parents, axis_count(parents, like))

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Normalised gamma quantiles, or the softmax of a Gaussian."""
        concentration = self.concentration_at(params, parents, noise)
        if self.laplace:
            mu, variance = laplace_moments(concentration)
            return torch.softmax(mu + torch.sqrt(variance) * noise, -1)
        return torch.softmax(gamma_log_quantile(noise, concentration), -1)

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Log-density of the coordinates that are seen.

        Some of a Dirichlet vector's coordinates and the rest of their mass are Dirichlet again, so that cells may be
        missing one by one; the approximation has no such marginal and leaves out a row with a missing cell.
        """
        concentration = self.concentration_at(params, parents, value)
        line = torch.log(value.clamp(min=torch.finfo(value.dtype).tiny))
        if self.laplace:
            log_prob = _laplace_log_prob(line, *laplace_moments(concentration))
            return log_prob if mask is None else torch.where(mask.all(-1), log_prob, 0.0)
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
        """Noise that gives the vector; what normalising forgot is drawn with ``uniform``'s first coordinate.

        The total of the gamma variables is independent of their shares. The level of the Gaussian's coordinates is
        normal given their differences.
        """
        concentration = self.concentration_at(params, parents, value)
        if not self.laplace:
            total = GAMMA.quantile(uniform[..., :1], concentration.sum(-1, keepdim=True))
            return GAMMA.cdf(value * total, concentration)
        mu, variance = laplace_moments(concentration)
        gap = mu - torch.log(value.clamp(min=torch.finfo(value.dtype).tiny))
        precision = (1 / variance).sum(-1, keepdim=True)
        level = (gap / variance).sum(-1, keepdim=True) / precision
        level = level + torch.special.ndtri(inside_unit(uniform[..., :1])) * torch.rsqrt(precision)
        return (level - gap) * torch.rsqrt(variance)

    @property
    def correlated(self) -> bool:
        """Always: the coordinates sum to one."""
        return True

    def complete(self, params: Params, value: Tensor, parents: Parents, mask: Tensor, noise: Tensor) -> Tensor:
        """Share what the seen coordinates leave among the others, in the proportions of a fresh vector.

        These proportions are independent of the seen ones for the exact distribution, nearly so for the approximation.
        """
        drawn = self.forward(params, parents, noise)
        value, mask, drawn = torch.broadcast_tensors(value, mask, drawn)
        seen = torch.where(mask, value, 0.0)
        fresh = torch.where(mask, 0.0, drawn)
        left = (1 - seen.sum(-1, keepdim=True)).clamp(min=0.0)
        return seen + left * fresh / fresh.sum(-1, keepdim=True).clamp(min=torch.finfo(fresh.dtype).tiny)

    def mean(self, params: Params, parents: Parents) -> Tensor | None:
        """The normalised concentrations; none in closed form for the approximation."""
        concentration = self.concentration_at(params, parents)
        return None if self.laplace else concentration / concentration.sum(-1, keepdim=True)


def _centred_log(value: Tensor) -> Tensor:
    line = torch.log(value.clamp(min=1e-12))
    return line - line.mean(-1, keepdim=True)


def laplace_moments(concentration: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the Gaussian whose softmax approximates a Dirichlet: Eq. (softGau) of the paper."""
    size = concentration.shape[-1]
    line = torch.log(concentration)
    inverse = 1 / concentration
    mu = line - line.mean(-1, keepdim=True)
    return mu, inverse * (1 - 2 / size) + inverse.sum(-1, keepdim=True) / size**2


def _laplace_log_prob(line: Tensor, mu: Tensor, variance: Tensor) -> Tensor:
    r"""Density of ``softmax(z)``, :math:`z \sim N(\mu, \mathrm{diag}\, \Sigma)`, at the logarithms ``line``.

    :math:`p(x) = \prod_k x_k^{-1} \int N(\log x + c; \mu, \Sigma) \, dc`, the integral over the level that is lost.
    """
    gap = line - mu
    precision = (1 / variance).sum(-1)
    squares = (gap**2 / variance).sum(-1) - (gap / variance).sum(-1) ** 2 / precision
    size = line.shape[-1]
    log_norm = 0.5 * ((size - 1) * LOG_2PI + torch.log(variance).sum(-1) + torch.log(precision))
    return -0.5 * squares - log_norm - line.sum(-1)
