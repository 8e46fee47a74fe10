"""Nodes of discrete representations: codes at many positions, latents around codewords, and their quantisation.

Also a distribution over all codes of an image, which depend on each other: what it takes to make new images.
"""

from __future__ import annotations

import math

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, pad, scaled_dot_product_attention

from otpdag.errors import DataError, ModelError
from otpdag.mechanisms.base import Mechanism, Noise, Params, Parents, sum_cells
from otpdag.mechanisms.normal import normal_log_density
from otpdag.mechanisms.parameters import POSITIVE, SIMPLEX, Parameter, Setting, Support, as_setting
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


class _CodeVector(Mechanism):
    """A code for each of several positions, of a node without parents."""

    positions: int

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


class Codes(_CodeVector):
    r"""A code for each of several positions, each with weights of its own.

    .. math:: P(c^m = k) = \pi^m_k, \quad m = 1, \dots, M

    Args:
        size: Number of values of a code, K.
        positions: Number of positions, M.
        weights: Probabilities, (positions, size).

    >>> Codes(512, 64).space
    Count(dim=64)
    """

    def __init__(self, size: int, positions: int = 1, *, weights: ArrayLike | Setting = None) -> None:
        _check_sizes(size=size, positions=positions)
        self.size, self.positions = size, positions
        self.weights = as_setting(weights)

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

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Sum of the log-probabilities of the codes that are seen."""
        logs = params["weights"].clamp(min=1e-30).log()  # (R, M, K)
        rows = value.flatten(1, -2).mT.long()
        replicas = max(len(rows), len(logs))
        inside = rows.clamp(0, self.size - 1).expand(replicas, -1, -1)
        log_probs = logs.expand(replicas, -1, -1).gather(-1, inside)
        log_probs = torch.where((rows == rows.clamp(0, self.size - 1)), log_probs, -torch.inf).mT
        log_probs = log_probs.reshape(replicas, *value.shape[1:])
        return (log_probs if mask is None else torch.where(mask, log_probs, 0.0)).sum(-1)


class _Codewords(Mechanism):
    """Codewords and their scales, which all positions share."""

    def __init__(
        self, size: int, dim: int, *, mean: ArrayLike | Setting = None, scale: ArrayLike | Setting = None
    ) -> None:
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

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Normal log-density, over the coordinates that are seen."""
        mean, scale = self._named(params, parents)
        return sum_cells(normal_log_density(value, mean, scale), mask)

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

    @property
    def noise(self) -> Noise:
        """None."""
        return Noise(0)

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


class CodeSequence(_CodeVector):
    r"""A vector of codes, each of which depends on all before it, by a small causal transformer.

    .. math:: p(c) = \prod_m p(c_m \mid c_1, \dots, c_{m-1}), \quad
              c_m = F^{-1}(u_m \mid c_1, \dots, c_{m-1}), \quad u_m \sim U(0, 1)

    Every position has logits of its own that the network adds to; they start at the frequencies in the data, so that
    before any training the codes are independent and have the right marginals. The network computes in single
    precision.

    Args:
        positions: Number of codes in a vector.
        n_codes: Number of values of a code.
        columns: Codes in a row of the grid; a position then sees the code above it at once, and does not have to learn
            where that stands. As many as positions for codes in a line.
        layers: Layers of the transformer.
        width: Length of its feature vectors.
        heads: Attention heads, a divisor of the width.
    """

    def __init__(
        self,
        positions: int,
        n_codes: int,
        *,
        columns: int | None = None,
        layers: int = 3,
        width: int = 96,
        heads: int = 4,
    ) -> None:
        self.columns = positions if columns is None else columns
        _check_sizes(positions=positions, n_codes=n_codes, columns=self.columns, layers=layers, heads=heads)
        if width < 1 or width % heads:
            raise ModelError(f"`width` must be a multiple of the {heads} heads; got {width}")
        self.positions, self.n_codes = positions, n_codes
        self.layers, self.width, self.heads = layers, width, heads

    @property
    def correlated(self) -> bool:
        """Codes depend on each other."""
        return True

    def parameters(self) -> dict[str, Parameter]:
        """The network's parameters, those of all layers stacked."""
        d, deep = self.width, self.layers
        narrow = 1 / math.sqrt(d)
        into_stream = narrow / math.sqrt(2 * deep)  # so that the sum over layers is of order one
        return {
            "frequency": Parameter((self.positions, self.n_codes)),
            "left": Parameter((self.n_codes, d), init_scale=narrow),
            "above": Parameter((self.n_codes, d), init_scale=narrow),
            "position": Parameter((self.positions, d), init_scale=narrow),
            "norm_attention": Parameter((deep, 2, d)),
            "query_key_value": Parameter((deep, d, 3 * d), init_scale=narrow),
            "attended": Parameter((deep, d, d), init_scale=into_stream),
            "norm_hidden": Parameter((deep, 2, d)),
            "hidden": Parameter((deep, d, 4 * d), init_scale=narrow),
            "hidden_bias": Parameter((deep, 4 * d)),
            "back": Parameter((deep, 4 * d, d), init_scale=into_stream / 2),
            "norm_last": Parameter((2, d)),
            "logits": Parameter((d, self.n_codes), init_scale=0.1 * narrow),
        }

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        """Logits at the frequencies of each position, smoothed by those of all positions."""
        codes = value.long()
        seen = torch.zeros(self.positions, self.n_codes, dtype=torch.float64, device=value.device)
        seen.scatter_add_(1, codes.T, weight.double().expand_as(codes.T))
        overall = seen.sum(0) + 1.0
        smoothed = seen + overall / overall.sum() * math.sqrt(self.n_codes)
        return {"frequency": torch.log(smoothed / smoothed.sum(-1, keepdim=True))}

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        """Sum of the log-probabilities of all codes."""
        if mask is not None and not bool(mask.all()):
            raise DataError(f"node {self.family.node!r} is a CodeSequence: its codes must not be missing")
        replicas = max(len(value), len(params["logits"]))
        by_replica = [
            self.row_log_prob(of_replica(params, r), value[min(r, len(value) - 1)].long()) for r in range(replicas)
        ]
        return torch.stack(by_replica).to(value)

    def row_log_prob(self, params: Params, codes: Tensor) -> Tensor:
        """Log-probabilities (n,) of vectors of codes (n, positions), by the parameters of one replica."""
        logits = self._logits(params, codes)
        return torch.log_softmax(logits, -1).gather(-1, codes.unsqueeze(-1)).squeeze(-1).sum(-1)

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        """Codes drawn one after another."""
        replicas = max(len(noise), len(params["logits"]))
        by_replica = [self.draw(of_replica(params, r), noise[min(r, len(noise) - 1)]) for r in range(replicas)]
        return torch.stack(by_replica).to(noise)

    def draw(self, params: Params, uniform: Tensor, temperature: float = 1.0) -> Tensor:
        """Codes (n, positions) from uniform numbers of that shape; what was attended to is kept, not computed again."""
        rows = len(uniform)
        kept = torch.empty(
            self.layers, 2, rows, self.heads, self.positions, self.width // self.heads, device=uniform.device
        )
        codes = torch.zeros(rows, self.positions, dtype=torch.long, device=uniform.device)
        with torch.no_grad():
            for at in range(self.positions):
                logits = self._logits(params, codes, at, kept)[:, 0] / temperature
                cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
                drawn = (cumulative < uniform[:, at : at + 1]).sum(-1)
                codes[:, at] = drawn.clamp(max=self.n_codes - 1)
        return codes

    # -- the network -----------------------------------------------------------------------------------------------

    def _logits(self, params: Params, codes: Tensor, at: int | None = None, kept: Tensor | None = None) -> Tensor:
        """Logits of every code (n, positions, n_codes), each from those before it.

        Of the position ``at`` alone, (n, 1, n_codes), what the layers made of those before it is in ``kept``.
        """
        places = slice(None) if at is None else slice(at, at + 1)
        # nothing is left of the first code, or above the first row
        padded = pad(codes, (self.columns, 0), value=self.n_codes)
        left, above = padded[:, self.columns - 1 : -1][:, places], padded[:, : -self.columns][:, places]
        tables = {name: pad(params[name], (0, 0, 0, 1)) for name in ("left", "above")}
        stream = tables["left"][left] + tables["above"][above] + params["position"][places]
        for layer in range(self.layers):
            made = _normed(stream, params["norm_attention"][layer]) @ params["query_key_value"][layer]
            query, key, value = made.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            if at is not None and kept is not None:
                kept[layer, 0, :, :, at], kept[layer, 1, :, :, at] = key[:, :, 0], value[:, :, 0]
                key, value = kept[layer, :, :, :, : at + 1]
            attended = scaled_dot_product_attention(query, key, value, is_causal=at is None)
            stream = stream + attended.transpose(1, 2).flatten(2) @ params["attended"][layer]
            hidden = _normed(stream, params["norm_hidden"][layer]) @ params["hidden"][layer]
            stream = stream + gelu(hidden + params["hidden_bias"][layer]) @ params["back"][layer]
        return _normed(stream, params["norm_last"]) @ params["logits"] + params["frequency"][places]


def of_replica(params: Params, replica: int) -> dict[str, Tensor]:
    """One replica's parameters, in single precision."""
    return {name: value[min(replica, len(value) - 1)].float() for name, value in params.items()}


def _normed(stream: Tensor, gain_and_shift: Tensor) -> Tensor:
    return layer_norm(stream, stream.shape[-1:], 1 + gain_and_shift[0], gain_and_shift[1])


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        least = 2 if name in ("size", "n_codes") else 1
        if value < least:
            raise ModelError(f"`{name}` must be at least {least}; got {value}")
