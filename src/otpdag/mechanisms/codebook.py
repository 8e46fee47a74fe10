"""Nodes of discrete representations: codes at many positions, latents around codewords, and their quantisation."""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.errors import ModelError, check_count
from otpdag.mechanisms.base import Mechanism, Noise, Params, Parents
from otpdag.mechanisms.parameters import POSITIVE, SIMPLEX, Parameter, SettingLike, Support, as_setting
from otpdag.numerics import expand_to, nearest
from otpdag.spaces import Count, Real, Space


class _Quick(Support):
    """Real numbers that the optimiser moves ``pace`` times as far: codewords have to follow the latents."""

    name = "a finite number"
    pace = 10.0

    def natural(self, raw: Tensor) -> Tensor:
        return self.pace * raw

    def raw(self, natural: Tensor) -> Tensor:
        return natural / self.pace


QUICK = _Quick()


class Codes(Mechanism):
    r"""A code for each of several positions, each with weights of its own.

    .. math:: P(c^m = k) = \pi^m_k, \quad m = 1, \dots, M

    Args:
        size: Number of values of a code, K.
        positions: Number of positions, M.
        weights: Probabilities, (positions, size).

    >>> Codes(512, 64).space
    Count(dim=64)
    """

    def __init__(self, size: int, positions: int = 1, *, weights: SettingLike = None) -> None:
        _check_sizes(size=size, positions=positions)
        self.size, self.positions = size, positions
        self.weights = as_setting(weights)

    def on_setup(self) -> None:
        """Refuse parents."""
        if self.family.parents:
            raise ModelError(f"node {self.family.node!r} is {type(self).__name__} and has no parents")

    @property
    def space(self) -> Space:
        """Codes as numbers 0, 1, ..., one for each position."""
        return Count(self.positions)

    @property
    def noise(self) -> Noise:
        """A uniform number for each position."""
        return Noise(self.positions, "uniform")

    def parameters(self) -> dict[str, Parameter]:
        """The weights of each position."""
        return {"weights": Parameter((self.positions, self.size), SIMPLEX, self.weights)}

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The inverse of the cumulative distribution, position by position."""
        rows = noise.flatten(1, -2).mT.contiguous()  # (R, positions, n)
        cumulative = params["weights"].to(noise).cumsum(-1).expand(len(rows), -1, -1).contiguous()
        drawn = torch.searchsorted(cumulative, rows).clamp(max=self.size - 1)
        return drawn.mT.reshape(noise.shape).to(noise)

    def relaxed(self, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
        """The same with every step of the inverse a steep slope."""
        cumulative = params["weights"].to(noise).cumsum(-1)[..., :-1]
        cumulative = expand_to(cumulative, noise.ndim + 1, event_dims=2)
        return torch.sigmoid((noise.unsqueeze(-1) - cumulative) / (0.1 * temperature)).sum(-1)


class _Codewords(Mechanism):
    """Codewords and their scales, which all positions share."""

    def __init__(self, size: int, dim: int, *, mean: SettingLike = None, scale: SettingLike = None) -> None:
        _check_sizes(size=size, dim=dim)
        self.size, self.dim = size, dim
        self.mean_setting, self.scale_setting = as_setting(mean), as_setting(scale)

    def parameters(self) -> dict[str, Parameter]:
        """Codewords and their scales."""
        return {
            "mean": Parameter((self.size, self.dim), QUICK, self.mean_setting, init_scale=1.0 / QUICK.pace),
            "scale": Parameter((self.size, self.dim), POSITIVE, self.scale_setting),
        }


class Codebook(_Codewords):
    r"""Latents around the codewords that their codes name.

    .. math:: z^m = \mu_{c^m} + \sigma_{c^m} u^m, \quad u^m \sim N(0, I_D)

    The codewords are shared by all positions.

    Args:
        size: Number of codewords, K.
        dim: Length of a codeword, D.
        mean: Codewords (size, dim).
        scale: Standard deviations (size, dim): the diagonal covariance of each codeword.

    >>> Codebook(512, 64).dim
    64
    """

    def on_setup(self) -> None:
        """Refuse anything but one parent that holds codes."""
        parents = self.family.parents
        if len(parents) != 1 or not isinstance(parents[0][1], Count):
            raise ModelError(f"node {self.family.node!r} is a Codebook and needs one parent, whose mechanism is Codes")

    @property
    def positions(self) -> int:
        """Number of positions of the parent's codes."""
        return self.family.parents[0][1].width

    @property
    def space(self) -> Space:
        """All positions' latents side by side."""
        return Real(self.positions * self.dim)

    @property
    def noise(self) -> Noise:
        """Standard normal."""
        return Noise(self.positions * self.dim, "normal")

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The codewords plus scaled noise."""
        mean, scale = self._named(params, parents)
        return mean + scale * noise

    def mean(self, params: Params, parents: Parents) -> Tensor:
        """The codewords."""
        return self._named(params, parents)[0]

    def _named(self, params: Params, parents: Parents) -> tuple[Tensor, Tensor]:
        codes = next(iter(parents.values())).long().clamp(0, self.size - 1)
        return _rows_of(params["mean"], codes), _rows_of(params["scale"], codes)


class Quantized(_Codewords):
    r"""The codeword nearest to each position's latent, by Mahalanobis distance.

    .. math:: Q(z^m) = \mu_k, \quad k = \arg\min_k (z^m - \mu_k)^\top \Sigma_k^{-1} (z^m - \mu_k)

    Codewords and scales are those of a :class:`Codebook`: tie them to it.

    Args:
        size: Number of codewords.
        dim: Length of a codeword.
        mean: Codewords, mostly ``otp.tie("codebook")``.
        scale: Scales, mostly ``otp.tie("spread")``.
    """

    def on_setup(self) -> None:
        """Refuse anything but one parent made of codewords' latents."""
        parents = self.family.parents
        if len(parents) != 1 or not parents[0][1].is_unbounded or parents[0][1].width % self.dim:
            raise ModelError(
                f"node {self.family.node!r} is Quantized and needs one parent with real values, a multiple of "
                f"{self.dim} of them"
            )

    @property
    def space(self) -> Space:
        """As many coordinates as the latents."""
        return Real(self.family.parents[0][1].width)

    noise = Noise(0)

    def codes(self, params: Params, latents: Tensor) -> Tensor:
        """Numbers of the nearest codewords: (R, ..., positions) of latents (R, ..., positions * dim)."""
        points = latents.reshape(len(latents), -1, self.dim)
        codes = nearest(mahalanobis(points, params["mean"], params["scale"]))
        return codes.reshape(len(codes), *latents.shape[1:-1], -1)

    def lookup(self, params: Params, codes: Tensor) -> Tensor:
        """The codewords that codes (R, ..., positions) name, side by side."""
        return _rows_of(params["mean"], codes)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """The nearest codewords."""
        latents = next(iter(parents.values()))
        return self.lookup(params, self.codes(params, latents)).to(latents)

    def relaxed(self, params: Params, parents: Parents, noise: Tensor, temperature: float) -> Tensor:
        """The same, with the gradient of the codewords copied to the latents (van den Oord et al. 2017)."""
        latents = next(iter(parents.values()))
        codewords = self.forward(params, parents, noise)
        return copy_gradient(latents, codewords) + (codewords - codewords.detach())


def copy_gradient(latents: Tensor, codewords: Tensor) -> Tensor:
    """The codewords, with the gradient of the latents (van den Oord et al. 2017)."""
    return latents + (codewords - latents).detach()


def mahalanobis(points: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    r"""Squared Mahalanobis distances (R, N, K) of points (R, N, D) to codewords (R, K, D) with their scales.

    .. math:: d^2 = \sum_d z_d^2 / \sigma_{kd}^2 - 2 \sum_d z_d \mu_{kd} / \sigma_{kd}^2
              + \sum_d \mu_{kd}^2 / \sigma_{kd}^2

    as one matrix product.

    >>> mahalanobis(torch.tensor([[[1.0]]]), torch.tensor([[[3.0]]]), torch.tensor([[[2.0]]]))
    tensor([[[1.]]])
    """
    mean, scale = torch.broadcast_tensors(mean.to(points), scale.to(points))
    precision = scale**-2
    weighted = mean * precision
    left = torch.cat([points.square(), points, torch.ones_like(points[..., :1])], -1)
    right = torch.cat([precision, -2.0 * weighted, (mean * weighted).sum(-1, keepdim=True)], -1)
    return left @ right.mT


def _rows_of(table: Tensor, codes: Tensor) -> Tensor:
    """Rows of a table (R, K, D) that codes (R, ..., M) name, side by side: (R, ..., M * D)."""
    replicas = max(len(codes), len(table))
    own = [table[min(r, len(table) - 1)][codes[min(r, len(codes) - 1)]].flatten(-2) for r in range(replicas)]
    return torch.stack(own)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        check_count(name, value, 2 if name == "size" else 1)
