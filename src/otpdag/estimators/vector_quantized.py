"""Discrete representations of images: a thin face on the graph ``code -> latent -> quantized -> image``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import entropy
from torch import Tensor, nn

from otpdag import mechanisms as m
from otpdag.backward import EncoderMap, QuantizedMap
from otpdag.data.documents import Floats, PictureFormat
from otpdag.divergences import SlicedWasserstein
from otpdag.divergences.base import AbstractDivergence
from otpdag.errors import DataError, ModelError, check_choice
from otpdag.estimators.autoencoder import AbstractAutoencoder, check_accounted, check_at_least, in_parts
from otpdag.graph import Graph
from otpdag.learned.autoencoder import Codewords, Encoded, NoiseScale
from otpdag.learned.image_networks import (
    Flat,
    Grid,
    image_decoder,
    image_encoder,
    positions,
    seeded,
    started_from_data,
    with_bottleneck,
)
from otpdag.mechanisms.codebook import Quantized
from otpdag.model import Model
from otpdag.numerics import Array
from otpdag.settings import Objective, PushForward
from otpdag.spaces import Image

Codes = NDArray[np.int64]
CHOICES = {"balance": ("codebook", "position"), "noise": get_args(NoiseScale)}


@dataclass(eq=False, repr=False)
class VectorQuantizedAutoencoder(AbstractAutoencoder):
    r"""Images as grids of codes, learned by optimal transport (Section 5.3 and Appendix C.3).

    .. math:: c^m \sim \pi^m, \quad z^m \sim N(\mu_{c^m}, \Sigma_{c^m}), \quad x = \psi(Q(z^1), \dots, Q(z^M))

    The objective has four terms: reconstruction, the divergence of each position's latents from the mixture of
    Gaussians, their transport to the weighted codewords, and the divergence of the weights from uniform ones. Since the
    transport gives every codeword its share of the latents, the whole codebook is used.

    Training has two stages under one learning-rate schedule. In the first the latents are not quantised; then
    the codewords are placed among them by a few steps of k-means, and the four terms are minimised. The default
    networks start with their last layers in the units of the data.

    Images may be bytes or numbers from 0 to 1, channels first or last or, if grey, without an axis for them; what is
    rebuilt has the layout and range of what was fitted.

    Args:
        n_codes: Number of codewords, K.
        code_dim: Channels of the grid between encoder and decoder, D.
        rank: Length of a codeword: latents and codewords lie in a learned subspace of the D channels. By default half
            as many directions as a code has bits, :math:`\tfrac12 \log_2 K`: a code tells four values of each apart.
        width: Channels of the default networks; the residual blocks have a quarter of it inside.
        encoder: A module from images (n, channels, height, width) to a grid (n, code_dim, h, w), in place of the
            default one.
        decoder: A module back.
        eta: Weight of the transport to the codewords, relative to the reconstruction in units of the pixels' variance.
        pull: Share of that transport's gradient that moves latents: more brings them closer to codewords, and leaves
            fewer codewords in use.
        mixture: Weight of the divergence from the mixture of Gaussians, which teaches the covariances.
        eta_r: Weight of the divergence of the weights from uniform ones.
        divergence: Of the second term; sliced Wasserstein if left out.
        balance: ``"codebook"``: the weights of all positions together are held by one transport problem;
            ``"position"``: every position's own by a problem of its own, as the paper reads it.
        noise: ``"shared"``: what is decoded has one noise scale for all images, at its maximum, so that the cost is the
            logarithm of the mean squared error; ``"image"``: one of its own for every image, which may give up
            images that are hard; ``"fixed"``: the squared error, as in the paper.
        warm_up: Share of the steps in which latents are not quantised.
        n_epochs: How often every image is seen, on average.
        batch_size: Images in a step.
        learning_rate: Of Adam; falls to zero along a cosine.
        random_state: Seed or generator; None is another each time.
        device: ``"cpu"`` or ``"cuda"``.

    Attributes:
        codebook_: Codewords (n_codes, rank_).
        rank_: Their length.
        scales_: Their standard deviations, the roots of the diagonal covariances.
        weights_: Weights of the codewords at each position (positions, n_codes).
        perplexity_: Of the codes of the images that were fitted.
        grid_: Height and width of the grid of codes.
        model_: The fitted :class:`otpdag.Model`.
        result_: The :class:`otpdag.FitResult`.

    Example:
        >>> images = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 1), dtype=np.uint8)
        >>> small = VectorQuantizedAutoencoder(n_codes=8, code_dim=4, width=8, n_epochs=2, batch_size=20)
        >>> codes = small.fit(images).encode(images)
        >>> codes.shape, small.decode(codes).shape
        ((60, 4), (60, 8, 8, 1))
    """

    kind = "vector-quantised auto-encoder"
    decoded_from = "quantized"
    reads: ClassVar[Mapping[str, bool]] = {"two_d_array": False, "three_d_array": True}
    format_: PictureFormat = field(init=False)

    n_codes: int = 512
    code_dim: int = 64
    _: KW_ONLY
    rank: int | None = None
    width: int = 128
    eta: float = 1.0
    pull: float = 0.2
    mixture: float = 0.01
    eta_r: float = 1.0
    divergence: AbstractDivergence | None = None
    balance: Literal["codebook", "position"] = "codebook"
    noise: NoiseScale = "shared"
    warm_up: float = 0.2

    # -- fit ---------------------------------------------------------------------------------------------------------

    def _check_arguments(self) -> None:
        check_at_least(2, n_codes=self.n_codes)
        self._check_sizes()
        check_at_least(0, eta=self.eta, pull=self.pull, mixture=self.mixture, eta_r=self.eta_r, warm_up=self.warm_up)
        if self.warm_up >= 1:
            raise ModelError(f"warm_up must be a share below 1; got {self.warm_up}")
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if (self.encoder is None) != (self.decoder is None):
            raise ModelError("encoder and decoder must be given together, or neither")

    def _check_sizes(self) -> None:
        check_at_least(1, n_codes=self.n_codes, code_dim=self.code_dim, width=self.width)
        if self.rank is not None and not 1 <= self.rank <= self.code_dim:
            raise ModelError(f"rank must be from 1 to code_dim, {self.code_dim}; got {self.rank}")

    def _rows(self, X: ArrayLike, *, first: bool = False) -> Tensor:
        if first:
            self.format_ = PictureFormat.of(X)
        return self.format_.rows(X)

    def _length(self) -> int:
        """Of a codeword."""
        return min(self.code_dim, directions(self.n_codes)) if self.rank is None else self.rank

    def _build(self, seed: int = 0, rows: Tensor | None = None) -> None:
        """The graph with its mechanisms, and the backward map; default networks start in the units of the rows."""
        channels, height, width = self.format_.shape
        if self.encoder is None or self.decoder is None:
            self.grid_ = positions(height, width)
            encoder = seeded(lambda: image_encoder(channels, self.code_dim, self.width), seed)
            decoder = seeded(lambda: image_decoder(channels, self.code_dim, self.width), seed + 1)
        else:
            encoder, decoder = self.encoder, self.decoder
            self.grid_ = self._grid_of(encoder)
        self.rank_ = self._length()
        encoder, decoder = seeded(lambda: with_bottleneck(encoder, decoder, self.code_dim, self.rank_), seed + 2)
        if self.encoder is None and rows is not None:
            some = rows[:: math.ceil(len(rows) / 64)]  # thousands of latents tell their units
            started_from_data(encoder, decoder, some.reshape(-1, *self.format_.shape))
        self.n_positions_ = math.prod(self.grid_)
        mean, scale = m.tie("codebook"), m.tie("spread")
        hidden = ["code", "latent", "quantized"]
        graph = Graph(pairwise([*hidden, "image"]), hidden=hidden)
        self.model_ = Model(
            graph,
            {
                "code": m.Codes(self.n_codes, self.n_positions_),
                "latent": m.Codebook(self.n_codes, self.rank_, mean=mean, scale=scale),
                "quantized": Quantized(self.n_codes, self.rank_, mean=mean, scale=scale),
                "image": m.Decoder(Grid(decoder, *self.grid_, self.rank_), Image(channels, height, width)),
            },
        )
        self._map = QuantizedMap(
            EncoderMap(Flat(encoder), self.n_positions_ * self.rank_, self.format_.shape),
            self.n_positions_,
            self.n_codes,
            self.rank_,
            by_position=self.balance == "position",
        )

    def _grid_of(self, encoder: nn.Module) -> tuple[int, int]:
        with torch.no_grad():
            made = encoder(torch.zeros(1, *self.format_.shape))
        if made.ndim != 4 or made.shape[1] != self.code_dim:
            raise ModelError(
                f"encoder must map images (1, {', '.join(map(str, self.format_.shape))}) to a grid "
                f"(1, {self.code_dim}, h, w); got {tuple(made.shape)}"
            )
        return int(made.shape[2]), int(made.shape[3])

    def _learned_by(self) -> tuple[Objective, Encoded]:
        divergence = self.divergence or SlicedWasserstein(projections=8)
        codewords = Codewords(pull=self.pull, mixture=self.mixture, eta_r=self.eta_r, warm_up=self.warm_up)
        objective = Objective(push_forward=PushForward(self.eta, divergence))
        return objective, Encoded(self._map, self.batch_size, codewords, noise=self.noise)

    def _read_params(self, rows: Tensor | None = None) -> None:
        naturals = self.model_.fitted.naturals
        self.codebook_ = naturals["latent"]["mean"][0].numpy().copy()
        self.scales_ = naturals["latent"]["scale"][0].numpy().copy()
        self.weights_ = naturals["code"]["weights"][0].numpy().copy()
        if rows is not None:
            self.perplexity_ = _perplexity(self._codes(self._latents(rows)).numpy())

    # -- use ---------------------------------------------------------------------------------------------------------

    def encode(self, X: ArrayLike) -> Codes:
        """Codes of images: integers (n, positions), row by row of the grid."""
        _ = self._fitted
        return np.asarray(self._codes(self._latents(self._rows(X))).numpy(), dtype=np.int64)

    def decode(self, codes: ArrayLike) -> Floats:
        """Images of codes (n, positions), in the layout and range of the images that were fitted."""
        _ = self._fitted
        held = torch.from_numpy(checked_codes(codes, self.n_codes, self.n_positions_))
        return self.format_.pictures(self._decoded(self._codewords(held)))

    transform, inverse_transform = encode, decode

    def reconstruct(self, X: ArrayLike) -> Floats:
        """Encode and decode."""
        return self.decode(self.encode(X))

    def usage(self, X: ArrayLike | None = None) -> Array:
        """Share of the codes of images that each codeword has, (n_codes,); without images, its mean weight."""
        _ = self._fitted
        if X is None:
            return np.asarray(self.weights_.mean(0), dtype=np.float64)
        return np.bincount(self.encode(X).ravel(), minlength=self.n_codes) / (self.n_positions_ * len(np.asarray(X)))

    def perplexity(self, X: ArrayLike) -> float:
        """The exponential of the entropy of :meth:`usage`: how many codewords are in use."""
        return _perplexity(self.encode(X))

    def _sent(self, latents: Tensor) -> Tensor:
        return self._codewords(self._codes(latents))

    def _codes(self, latents: Tensor) -> Tensor:
        """Of latents (n, positions * length): (n, positions)."""
        params = self.model_.fitted.naturals["quantized"]
        return in_parts(lambda part: self._quantized.codes(params, part), latents)

    def _codewords(self, codes: Tensor) -> Tensor:
        """Of codes (n, positions), side by side: (n, positions * length)."""
        return self._quantized.lookup(self.model_.fitted.naturals["quantized"], codes.unsqueeze(0))[0]

    @property
    def _quantized(self) -> Quantized:
        return cast(Quantized, self.model_.fitted.structure.mechanisms["quantized"])

    # -- files -------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {"settings": {"rank": self.rank_}, "perplexity": self.perplexity_}

    def _restore(self, state: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
        self._check_sizes()
        check_accounted(tensors, codebook=self.n_codes * self._length(), channels=self.code_dim)
        if self.encoder is None or self.decoder is None:
            grid = math.prod(positions(self.format_.height, self.format_.width))
            check_accounted(tensors, network=self.width**2, weights=grid * self.n_codes)
        self.perplexity_ = float(state["perplexity"])


def directions(size: int) -> int:
    """That a code with this many values tells apart: four values, two bits, of each; at least one.

    >>> directions(512), directions(31), directions(2)
    (4, 2, 1)
    """
    bits = size.bit_length() - 1
    return max(1, bits // 2)


def checked_codes(codes: ArrayLike, size: int, positions: int | None = None) -> Codes:
    """Vectors of codes (n, positions) with so many values; anything else is refused."""
    held = np.asarray(codes)
    if held.ndim != 2 or not held.size or not np.issubdtype(held.dtype, np.integer):
        raise DataError(f"codes must be integers (n, positions); got shape {held.shape} of {held.dtype}")
    if positions is not None and held.shape[1] != positions:
        raise DataError(f"codes must have {positions} positions, as in fit; got {held.shape[1]}")
    if held.min() < 0 or held.max() >= size:
        raise DataError(f"codes must be from 0 to {size - 1}; got {held.min()} to {held.max()}")
    return held.astype(np.int64)


def _perplexity(codes: Codes) -> float:
    return float(np.exp(entropy(np.bincount(codes.ravel()))))
