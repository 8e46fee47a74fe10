"""Wasserstein auto-encoders: a thin face on the graph ``latent -> image`` (Appendix B)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassNamePrefixFeaturesOutMixin
from sklearn.utils import Tags
from torch import Tensor, nn

from otpdag import mechanisms as m
from otpdag.backward import EncoderMap
from otpdag.divergences import MMD, Sinkhorn, SlicedWasserstein
from otpdag.divergences.base import AbstractDivergence
from otpdag.errors import DataError, ModelError
from otpdag.estimators._autoencoder import AbstractAutoencoder, Floats, check_accounted, check_at_least
from otpdag.estimators._contract import RandomState
from otpdag.estimators._pictures import PictureFormat
from otpdag.graph import Graph
from otpdag.learned.autoencoder import Encoded
from otpdag.learned.image_networks import dense_decoder, dense_encoder, seeded
from otpdag.mechanisms import Mechanism
from otpdag.model import Model
from otpdag.settings import Objective, PushForward
from otpdag.simulation import ancestral
from otpdag.spaces import Image, Real

DIVERGENCES = {"mmd": MMD(), "sliced": SlicedWasserstein(), "sinkhorn": Sinkhorn(0.1, iterations=200, tolerance=0.05)}


class WassersteinAutoencoder(ClassNamePrefixFeaturesOutMixin, AbstractAutoencoder):
    r"""Continuous representations whose distribution is a given one (Tolstikhin et al. 2018).

    .. math:: \min_{\theta, \phi} E\,\|x - \psi_\theta(\phi(x))\|^2 / s^2 + \eta\, D(\phi_\# P_{data}, P_\theta(Z))

    It is the paper's objective for the graph of two nodes, ``latent -> image``; ``s`` is the spread of the data.

    Args:
        n_components: Coordinates of the latent.
        divergence: ``"sliced"``, ``"mmd"``, ``"sinkhorn"``, or an object from :mod:`otpdag.divergences`.
        prior: Mechanism of the latent, without parents and with real values; standard normal if left out.
        encoder: A module from images (n, channels, height, width), or rows (n, features), to (n, n_components).
        decoder: A module from (n, n_components) to (n, ...) with the numbers of an image or row.
        hidden: Layers of the default networks.
        eta: Weight of the divergence.
        n_epochs: How often every image is seen, on average.
        batch_size: Images in a step.
        learning_rate: Of Adam; falls to zero along a cosine.
        random_state: Seed or generator; None is another each time.
        device: ``"cpu"`` or ``"cuda"``.

    Attributes:
        model_: The fitted :class:`otpdag.Model`.
        result_: The :class:`otpdag.FitResult`.
        n_features_in_: Numbers in an image or row.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(300, 2)) @ rng.normal(size=(2, 10))
        >>> encoder = WassersteinAutoencoder(2, hidden=(32,), n_epochs=150, learning_rate=3e-3).fit(X)
        >>> error = np.square(encoder.inverse_transform(encoder.transform(X)) - X).mean()
        >>> bool(error < 0.2 * X.var())
        True
    """

    kind = "Wasserstein auto-encoder"
    method_name = "wasserstein auto-encoder"
    decoded_from = "latent"
    not_saved = (*AbstractAutoencoder.not_saved, "prior")

    def __init__(
        self,
        n_components: int = 8,
        *,
        divergence: str | AbstractDivergence = "sliced",
        prior: Mechanism | None = None,
        encoder: nn.Module | None = None,
        decoder: nn.Module | None = None,
        hidden: Sequence[int] = (256, 256),
        eta: float = 0.1,
        n_epochs: int = 20,
        batch_size: int = 128,
        learning_rate: float = 1e-3,
        random_state: RandomState = 0,
        device: str = "cpu",
    ) -> None:
        self.n_components = n_components
        self.divergence = divergence
        self.prior = prior
        self.encoder = encoder
        self.decoder = decoder
        self.hidden = hidden
        self.eta = eta
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.device = device

    def _check_arguments(self) -> None:
        check_at_least(1, n_components=self.n_components)
        check_at_least(0, eta=self.eta, learning_rate=self.learning_rate)
        if not isinstance(self.divergence, AbstractDivergence) and self.divergence not in DIVERGENCES:
            raise ModelError(
                f"divergence must be {', '.join(map(repr, DIVERGENCES))} or a divergence; got {self.divergence!r}"
            )

    def _learned_by(self) -> tuple[Objective, Encoded]:
        divergence = DIVERGENCES[self.divergence] if isinstance(self.divergence, str) else self.divergence
        objective = Objective(push_forward=PushForward(self.eta, divergence) if self.eta else None)
        return objective, Encoded(self._map, batch_size=self.batch_size)

    def _build(self, seed: int = 0, rows: Tensor | None = None) -> None:
        shape = (self.n_features_in_,) if self.format_ is None else self.format_.shape
        hidden = tuple(self.hidden)
        encoder = self.encoder or seeded(lambda: dense_encoder(self.n_features_in_, self.n_components, hidden), seed)
        decoder = self.decoder or seeded(
            lambda: dense_decoder(self.n_components, self.n_features_in_, hidden), seed + 1
        )
        space = Real(self.n_features_in_) if self.format_ is None else Image(*self.format_.shape)
        self.model_ = Model(
            Graph([("latent", "image")], hidden=["latent"]),
            {"latent": self._prior(), "image": m.Decoder(decoder, space)},
        )
        self._map = EncoderMap(encoder, self.n_components, shape)

    def _prior(self) -> Mechanism:
        prior = self.prior or m.Normal(self.n_components, loc=0.0, scale=1.0)
        if prior.space.width != self.n_components or prior.space.is_countable:
            raise ModelError(
                f"prior must have {self.n_components} numeric coordinates, as n_components says; got {prior.space}"
            )
        return prior

    # -- use ---------------------------------------------------------------------------------------------------------

    def transform(self, X: ArrayLike | Tensor) -> Floats:
        """Latents of images or rows: (n, n_components)."""
        _ = self._fitted
        return self._latents(self._rows(X)).numpy()

    def inverse_transform(self, Z: ArrayLike) -> Floats:
        """Images or rows of latents (n, n_components)."""
        _ = self._fitted
        held = np.asarray(Z, dtype=np.float32)
        if held.ndim != 2 or held.shape[1] != self.n_components:
            raise DataError(f"latents must have shape (n, {self.n_components}); got {held.shape}")
        rows = self._decoded(torch.from_numpy(held))
        return rows.numpy() if self.format_ is None else self.format_.pictures(rows)

    def sample(self, n_samples: int = 1, *, seed: int = 0) -> Floats:
        """Images or rows of latents that are drawn from the prior."""
        return self.inverse_transform(self.sample_latents(n_samples, seed=seed))

    def sample_latents(self, n_samples: int = 1, *, seed: int = 0) -> Floats:
        """Latents that are drawn from the prior: (n, n_components)."""
        _ = self._fitted
        if n_samples < 1:
            raise DataError(f"n_samples must be at least 1; got {n_samples}")
        none = torch.zeros(1, 1, self.n_features_in_)
        fitted = self.model_.fitted
        drawn = ancestral(
            fitted.structure, fitted.naturals, n_samples, torch.Generator().manual_seed(seed), do={"image": none}
        )
        return drawn["latent"][0].float().numpy()

    def _sent(self, latents: Tensor) -> Tensor:
        return latents

    def _rows(self, X: ArrayLike | Tensor, *, first: bool = False) -> Tensor:
        if first:
            self.format_ = None if _is_table(X) else PictureFormat.of(X)
        if self.format_ is None:
            held = X.detach().cpu().numpy() if isinstance(X, Tensor) else X
            rows = torch.from_numpy(self._checked(held, first=first, least=2, dtype=np.float32))
        else:
            rows = self.format_.rows(X)
        if first:
            self.n_features_in_ = rows.shape[1]
        return rows

    @property
    def _n_features_out(self) -> int:
        return int(self.n_components)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    # -- files -------------------------------------------------------------------------------------------------------

    def _read_params(self, rows: Tensor | None = None) -> None:
        """The networks are all there is."""

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        settings = {"hidden": list(self.hidden)}
        return {"settings": settings, "features": self.n_features_in_, "prior": self._prior().spec()}, {}

    @classmethod
    def _settings_of(cls, state: Mapping[str, Any]) -> dict[str, Any]:
        return {**state["settings"], "prior": m.from_spec(state["prior"])}

    def _restore(self, state: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
        self.n_features_in_ = features = state["features"]
        if type(features) is not int or (self.format_ is not None and features != math.prod(self.format_.shape)):
            raise ValueError(f"it has {features!r:.40} features")
        size = sum(a * b for a, b in pairwise((features, *self.hidden, self.n_components)))
        own = {"encoder": self.encoder, "decoder": self.decoder}
        check_accounted(tensors, **{name: size for name, network in own.items() if network is None})
        check_at_least(1, n_components=self.n_components, features=features)


def _is_table(X: ArrayLike | Tensor) -> bool:
    """Rows rather than images: anything with at most two axes."""
    axes = getattr(X, "ndim", None)
    return (np.asarray(X).ndim if axes is None else axes) <= 2
