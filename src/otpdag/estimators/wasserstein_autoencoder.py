"""Wasserstein auto-encoders: a thin face on the graph ``latent -> image`` (Appendix B)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags
from torch import Tensor, nn

from otpdag import mechanisms as m
from otpdag.data import Schema
from otpdag.divergences import MMD, Sinkhorn, SlicedWasserstein
from otpdag.divergences.base import AbstractDivergence
from otpdag.engine import Adam, FitResult, Method
from otpdag.engine.image_data import initial_theta
from otpdag.engine.monitor import Callback
from otpdag.errors import DataError, ModelError
from otpdag.estimators._contract import RandomState, check_fitted, checked_rows, seed_of
from otpdag.estimators._pictures import (
    PictureFormat,
    check_accounted,
    check_at_least,
    read_estimator,
    read_format,
    train_encoder,
    write_estimator,
)
from otpdag.graph import Graph
from otpdag.learned.autoencoder import Encoded, EncoderMap
from otpdag.learned.image_networks import dense_decoder, dense_encoder, seeded
from otpdag.mechanisms import Mechanism
from otpdag.model import Model
from otpdag.safe_archive import refusing
from otpdag.settings import Objective, PushForward
from otpdag.simulation import ancestral
from otpdag.spaces import Image, Real

Floats = NDArray[np.float32]
KIND = "Wasserstein auto-encoder"
ROWS_AT_ONCE = 1000  # bounds memory; changes no result
DIVERGENCES = ("mmd", "sliced", "sinkhorn")


class WassersteinAutoencoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
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

    def fit(
        self,
        X: ArrayLike | Tensor,
        y: object = None,
        *,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Self:
        """Learn encoder and decoder.

        Args:
            X: Images (see :class:`VectorQuantizedAutoencoder` for their layouts), or rows (n, features) of any numbers.
            y: Ignored.
            checkpoint: A file that is written after every epoch; if it exists, training goes on from there.
            progress: Show a progress bar; by default only on a terminal.
            callbacks: Called with each record of the history; returning True stops.
        """
        divergence = self._checked_divergence()
        self.format_ = None if _is_table(X) else PictureFormat.of(X)
        rows = self._table_rows(X, first=True) if self.format_ is None else self.format_.rows(X)
        if len(rows) < 2:
            raise DataError(f"X must have at least 2 rows to learn from; got {len(rows)}")
        self.n_features_in_ = rows.shape[1]
        seed = seed_of(self.random_state)
        self._build(seed)
        steps = self.n_epochs * math.ceil(len(rows) / self.batch_size)
        method = Method(
            "wasserstein auto-encoder",
            Objective(push_forward=PushForward(self.eta, divergence) if self.eta else None),
            Encoded(self._map, batch_size=self.batch_size),
            Adam(steps=steps, learning_rate=self.learning_rate, averaging=0.0),
        )
        self.result_: FitResult = train_encoder(
            self.model_,
            rows,
            method,
            seed=seed,
            device=self.device,
            progress=progress,
            callbacks=callbacks,
            checkpoint=checkpoint,
        )
        return self

    def _checked_divergence(self) -> AbstractDivergence:
        check_at_least(1, n_components=self.n_components, n_epochs=self.n_epochs, batch_size=self.batch_size)
        check_at_least(0, eta=self.eta, learning_rate=self.learning_rate)
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ModelError(f"device {self.device!r} was asked for, but no CUDA device is available")
        if isinstance(self.divergence, AbstractDivergence):
            return self.divergence
        named = {"mmd": MMD(), "sliced": SlicedWasserstein(), "sinkhorn": Sinkhorn(0.1, iterations=200, tolerance=0.05)}
        if self.divergence not in named:
            raise ModelError(
                f"divergence must be {', '.join(map(repr, DIVERGENCES))} or a divergence; got {self.divergence!r}"
            )
        return named[self.divergence]

    def _build(self, seed: int = 0) -> None:
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
        rows = self._rows(X)
        phi = self.model_.fitted.phi
        with torch.no_grad():
            parts = [self._map.latents(phi, part.unsqueeze(0))[0] for part in rows.split(ROWS_AT_ONCE)]
        return torch.cat(parts).numpy()

    def inverse_transform(self, Z: ArrayLike) -> Floats:
        """Images or rows of latents (n, n_components)."""
        self._check_fitted()
        held = np.asarray(Z, dtype=np.float32)
        if held.ndim != 2 or held.shape[1] != self.n_components:
            raise DataError(f"latents must have shape (n, {self.n_components}); got {held.shape}")
        fitted = self.model_.fitted
        decoder = fitted.structure.mechanisms["image"]
        with torch.no_grad():
            parts = [
                decoder.forward(fitted.naturals["image"], {"latent": part.unsqueeze(0)}, torch.zeros(1, len(part), 0))[
                    0
                ]
                for part in torch.from_numpy(held).split(ROWS_AT_ONCE)
            ]
        rows = torch.cat(parts)
        return rows.numpy() if self.format_ is None else self.format_.pictures(rows)

    def sample(self, n_samples: int = 1, *, seed: int = 0) -> Floats:
        """Images or rows of latents that are drawn from the prior."""
        return self.inverse_transform(self.sample_latents(n_samples, seed=seed))

    def sample_latents(self, n_samples: int = 1, *, seed: int = 0) -> Floats:
        """Latents that are drawn from the prior: (n, n_components)."""
        self._check_fitted()
        if n_samples < 1:
            raise DataError(f"n_samples must be at least 1; got {n_samples}")
        none = torch.zeros(1, 1, self.n_features_in_)
        fitted = self.model_.fitted
        drawn = ancestral(
            fitted.structure, fitted.naturals, n_samples, torch.Generator().manual_seed(seed), do={"image": none}
        )
        return drawn["latent"][0].float().numpy()

    def score(self, X: ArrayLike | Tensor, y: object = None) -> float:
        """Minus the mean squared error of what is rebuilt, for images with pixels from 0 to 1."""
        rows = self._rows(X)
        rebuilt = self.inverse_transform(self.transform(X))
        again = torch.from_numpy(rebuilt) if self.format_ is None else self.format_.rows(rebuilt)
        return -float((again - rows).square().mean())

    def _rows(self, X: ArrayLike | Tensor) -> Tensor:
        self._check_fitted()
        return self._table_rows(X) if self.format_ is None else self.format_.rows(X)

    def _table_rows(self, X: ArrayLike | Tensor, *, first: bool = False) -> Tensor:
        held = X.detach().cpu().numpy() if isinstance(X, Tensor) else X
        return torch.from_numpy(checked_rows(self, held, first=first, dtype=np.float32))

    def _check_fitted(self) -> None:
        check_fitted(self)

    @property
    def _n_features_out(self) -> int:
        return int(self.n_components)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write settings and parameters to one file (JSON and safetensors in a zip)."""
        self._check_fitted()
        skipped = ("encoder", "decoder", "divergence", "prior")
        settings = {name: value for name, value in self.get_params(deep=False).items() if name not in skipped}
        state: dict[str, Any] = {
            "settings": settings | {"hidden": list(self.hidden)},
            "format_": None if self.format_ is None else asdict(self.format_),
            "features": self.n_features_in_,
            "prior": self._prior().spec(),
            "own_networks": [self.encoder is not None, self.decoder is not None],
        }
        raw = self.model_.structure.raw(self.model_.fitted.naturals)
        write_estimator(path, KIND, state, {**raw, **self.model_.fitted.phi})

    @classmethod
    def load(cls, path: str | Path, *, encoder: nn.Module | None = None, decoder: nn.Module | None = None) -> Self:
        """Read what :meth:`save` wrote; networks of your own, whose code is not saved, must be given again."""
        state, tensors = read_estimator(path, KIND)
        with refusing(path, KIND):
            return cls._restored(state, tensors, encoder, decoder)

    @classmethod
    def _restored(
        cls,
        state: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        encoder: nn.Module | None,
        decoder: nn.Module | None,
    ) -> Self:
        for name, own, given in zip(("encoder", "decoder"), state["own_networks"], (encoder, decoder), strict=True):
            if own and given is None:
                raise DataError(f"this auto-encoder has a network of its user, which is not saved: pass {name}")
        restored = cls(**state["settings"], encoder=encoder, decoder=decoder, prior=m.from_spec(state["prior"]))
        restored.format_ = None if state["format_"] is None else read_format(state["format_"])
        restored.n_features_in_ = state["features"]
        restored._check_sizes(tensors)
        restored._build()
        known = initial_theta(restored.model_.structure, 0) | restored._map.init()
        if {k: (v.shape, v.dtype) for k, v in known.items()} != {k: (v.shape, v.dtype) for k, v in tensors.items()}:
            raise DataError("it holds parameters of other networks than these")
        ordered = {key: tensors[key] for key in known}
        schema = Schema.of(restored.model_.spaces, restored.model_.graph)
        restored.model_.adopt(restored.model_.structure, ordered, schema, ())
        return restored

    def _check_sizes(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse settings of a file that its tensors do not bear out."""
        features = self.n_features_in_
        if type(features) is not int or (self.format_ is not None and features != math.prod(self.format_.shape)):
            raise ValueError(f"it has {features!r:.40} features")
        sizes = (features, *self.hidden, self.n_components)
        if self.encoder is None:
            check_accounted(tensors, encoder=sum(a * b for a, b in pairwise(sizes)))
        if self.decoder is None:
            check_accounted(tensors, decoder=sum(a * b for a, b in pairwise(sizes)))
        check_at_least(1, n_components=self.n_components, features=features)


def _is_table(X: ArrayLike | Tensor) -> bool:
    """Rows rather than images: anything with at most two axes."""
    axes = getattr(X, "ndim", None)
    return (np.asarray(X).ndim if axes is None else axes) <= 2
