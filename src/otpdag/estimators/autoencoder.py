"""Auto-encoders: what all share (training, what encoder and decoder make of rows, scores, files), and Wasserstein's.

A network is trained for as many epochs as were asked for. A :class:`WassersteinAutoencoder` is a thin face on the graph
``latent -> image`` (Appendix B).
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags
from torch import Tensor, nn

from otpdag import mechanisms as m
from otpdag.backward import EncoderMap, QuantizedMap
from otpdag.data import Images
from otpdag.data.documents import Floats, PictureFormat, read_format
from otpdag.divergences import MMD, Sinkhorn, SlicedWasserstein
from otpdag.divergences.base import AbstractDivergence
from otpdag.engine import Adam, Method, fit
from otpdag.engine.data_kind import initial_theta
from otpdag.engine.monitor import Callback
from otpdag.errors import ConvergenceWarning, DataError, ModelError, check_choice, check_count, check_number
from otpdag.estimators._contract import ModelEstimator, RandomState, seed_of
from otpdag.graph import Graph
from otpdag.learned.autoencoder import Encoded
from otpdag.learned.image_networks import dense_decoder, dense_encoder, seeded
from otpdag.mechanisms import Mechanism
from otpdag.model import Model
from otpdag.safe_archive import read_bundle, refusing, write_bundle
from otpdag.settings import Objective, PushForward
from otpdag.simulation import ancestral
from otpdag.spaces import Image, Real

DIVERGENCES = {"mmd": MMD(), "sliced": SlicedWasserstein(), "sinkhorn": Sinkhorn(0.1, iterations=200, tolerance=0.05)}


@dataclass(eq=False, repr=False)
class AbstractAutoencoder(TransformerMixin, ModelEstimator, ABC):
    """An encoder and a decoder, behind which stands a graph whose last edge leads to the node ``image``.

    Attributes:
        kind: What messages and files call it.
        decoded_from: The parent of the image.
    """

    kind: ClassVar[str]
    decoded_from: ClassVar[str]
    fit_call = "fit(images)"
    not_saved: ClassVar[tuple[str, ...]] = ("encoder", "decoder", "divergence")

    format_: PictureFormat | None = field(init=False)
    _map: EncoderMap | QuantizedMap = field(init=False)

    _: KW_ONLY
    encoder: nn.Module | None = None
    decoder: nn.Module | None = None
    n_epochs: int = 100
    batch_size: int = 32
    learning_rate: float = 1e-3
    random_state: RandomState = 0
    device: str = "cpu"

    # -- what each has of its own -------------------------------------------------------------------------------------

    @abstractmethod
    def _check_arguments(self) -> None:
        """Refuse settings that make no sense."""

    @abstractmethod
    def _rows(self, X: ArrayLike, *, first: bool = False) -> Tensor:
        """Images or rows as (n, numbers); of the first ones, which are fitted, the layout is kept."""

    @abstractmethod
    def _build(self, seed: int = 0, rows: Tensor | None = None) -> None:
        """The graph with its mechanisms, ``model_``, and the backward map, ``_map``."""

    @abstractmethod
    def _learned_by(self) -> tuple[Objective, Encoded]:
        """The objective, and how it is evaluated."""

    def _read_params(self, rows: Tensor | None = None) -> None:
        """Keep what users ask for of the fitted parameters, and of the rows that were fitted."""

    def _sent(self, latents: Tensor) -> Tensor:
        """What the decoder reads of latents (n, width)."""
        return latents

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """What a file holds beside format and networks; ``settings`` that are not to follow later defaults, too."""

    @abstractmethod
    def _restore(self, state: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take what :meth:`_state` gave, and refuse sizes that the tensors do not bear out."""

    # -- fit ----------------------------------------------------------------------------------------------------------

    def fit(
        self,
        X: ArrayLike,
        y: object = None,
        *,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Self:
        """Learn encoder and decoder.

        Args:
            X: Images: bytes or numbers from 0 to 1, channels first or last or, if grey, without an axis for them. A
                :class:`WassersteinAutoencoder` also takes rows (n, features) of any numbers.
            y: Ignored.
            checkpoint: A file that is written after every epoch; if it exists, training goes on from there.
            progress: Show a progress bar; by default only on a terminal.
            callbacks: Called with each record of the history; returning True stops.
        """
        self._check_counts("n_epochs", "batch_size")
        self._check_arguments()
        rows = self._rows(X, first=True)
        if len(rows) < 2:
            raise DataError(f"images must be at least 2 to learn from; got {len(rows)}")
        seed = seed_of(self.random_state)
        self._build(seed, rows)
        steps = self.n_epochs * math.ceil(len(rows) / self.batch_size)
        adam = Adam(steps=steps, learning_rate=self.learning_rate, averaging=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # all epochs that were asked for; the status tells more
            self.result_ = fit(
                self.model_,
                Images(rows),
                method=Method(self.kind, *self._learned_by(), adam),
                restarts=1,
                seed=seed,
                device=self.device,
                checkpoint=checkpoint,
                progress=progress,
                callbacks=callbacks,
            )
        self._read_params(rows)
        return self

    # -- use ----------------------------------------------------------------------------------------------------------

    def score(self, X: ArrayLike, y: object = None) -> float:
        """Minus the mean squared error of what is rebuilt; pixels of images go from 0 to 1."""
        _ = self._fitted
        rows = self._rows(X)
        rebuilt = self._decoded(self._sent(self._latents(rows)))
        return -float(((rebuilt if self.format_ is None else rebuilt.clamp(0, 1)) - rows).square().mean())

    def _latents(self, rows: Tensor) -> Tensor:
        """What the encoder makes of rows: (n, width)."""
        return in_parts(lambda part: self._map.latents(self.model_.fitted.phi, part), rows)

    def _decoded(self, latents: Tensor) -> Tensor:
        """Rows that the decoder makes of what it reads."""
        fitted = self.model_.fitted
        decoder, params = fitted.structure.mechanisms["image"], fitted.naturals["image"]
        read = self.decoded_from
        return in_parts(
            lambda part: decoder.forward(params, {read: part}, part.new_zeros(1, part.shape[1], 0)), latents
        )

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write settings and parameters to one file (JSON and safetensors in a zip); nothing is pickled."""
        _ = self._fitted
        own = self._state()
        settings = self.get_params(deep=False) | own.pop("settings", {})
        state = {
            "format": f"otpdag {self.kind}",
            "version": 2,
            "format_": None if self.format_ is None else asdict(self.format_),
            "own_networks": [self.encoder is not None, self.decoder is not None],
            "settings": {
                name: value.spec() if isinstance(value, Mechanism) else value
                for name, value in settings.items()
                if name not in self.not_saved
            },
            **own,
        }
        raw = self.model_.structure.raw(self.model_.fitted.naturals)
        write_bundle(path, "estimator.json", state, {**raw, **self.model_.fitted.phi})

    @classmethod
    def load(cls, path: str | Path, *, encoder: nn.Module | None = None, decoder: nn.Module | None = None) -> Self:
        """Read what :meth:`save` wrote; networks of your own, whose code is not saved, must be given again."""
        state, tensors = read_bundle(path, "estimator.json", cls.kind)
        if state.get("format") != f"otpdag {cls.kind}" or state.get("version") != 2:
            raise DataError(
                f"{str(path)!r} holds {state.get('format')!r:.60}, version {state.get('version')!r:.20}; "
                f"not a {cls.kind} of version 2"
            )
        with refusing(path, cls.kind):
            if not isinstance(state["settings"], dict):
                raise ValueError("its settings are none")
            for name, value in tensors.items():
                if not value.is_floating_point() or not bool(torch.isfinite(value).all()):
                    raise ValueError(f"{name!r:.60} holds numbers that are not finite")
            return cls._restored(state, tensors, {"encoder": encoder, "decoder": decoder})

    @classmethod
    def _restored(cls, state: Mapping[str, Any], tensors: dict[str, Tensor], networks: Mapping[str, Any]) -> Self:
        own = zip(networks, state["own_networks"], strict=True)
        missing = [name for name, is_own in own if is_own and networks[name] is None]
        if missing:
            names = " and ".join(missing)
            raise DataError(f"this auto-encoder has networks of its user, which are not saved: pass {names}")
        settings: dict[str, Any] = {
            name: m.from_spec(value) if isinstance(value, Mapping) else value
            for name, value in state["settings"].items()
        }
        restored = cls(**settings, **networks)
        restored.format_ = None if state["format_"] is None else read_format(state["format_"])
        restored._restore(state, tensors)
        restored._build()
        known = initial_theta(restored.model_.structure, 0) | restored._map.init()
        if {k: (v.shape, v.dtype) for k, v in known.items()} != {k: (v.shape, v.dtype) for k, v in tensors.items()}:
            raise DataError("it holds parameters of other networks than these")
        restored.model_.adopt(restored.model_.structure, {key: tensors[key] for key in known})
        restored._read_params()
        return restored


def in_parts(work: Callable[[Tensor], Tensor], rows: Tensor, at_once: int = 250) -> Tensor:
    """What is made of rows (n, ...), some at a time, which bounds memory: ``work`` has an axis of one before them."""
    with torch.no_grad():
        return torch.cat([work(part.unsqueeze(0))[0] for part in rows.split(at_once)])


def check_accounted(tensors: Mapping[str, Tensor], **sizes: int) -> None:
    """Refuse settings that ask for larger networks than the file's tensors fill, before one is made.

    Args:
        tensors: All that the file holds.
        sizes: Numbers of entries of single parameters, by what messages call them.
    """
    held = sum(value.numel() for value in tensors.values())
    for name, size in sizes.items():
        if not 0 <= size <= held:
            raise ValueError(f"its {name} asks for {size:,} numbers, the file holds {held:,}")


def check_at_least(least: float, **arguments: float) -> None:
    """Refuse numbers that are too small."""
    for name, value in arguments.items():
        check_number(name, value, least)


@dataclass(eq=False, repr=False)
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
    decoded_from = "latent"

    n_components: int = 8
    _: KW_ONLY
    divergence: str | AbstractDivergence = "sliced"
    prior: Mechanism | None = None
    hidden: Sequence[int] = (256, 256)
    eta: float = 0.1
    n_epochs: int = 20
    batch_size: int = 128

    def _check_arguments(self) -> None:
        check_at_least(1, n_components=self.n_components)
        check_at_least(0, eta=self.eta, learning_rate=self.learning_rate)
        if not isinstance(self.divergence, AbstractDivergence):
            check_choice("divergence that is named", self.divergence, tuple(DIVERGENCES))

    def _learned_by(self) -> tuple[Objective, Encoded]:
        divergence = DIVERGENCES[self.divergence] if isinstance(self.divergence, str) else self.divergence
        objective = Objective(push_forward=PushForward(self.eta, divergence) if self.eta else None)
        return objective, Encoded(self._map, batch_size=self.batch_size)

    def _build(self, seed: int = 0, rows: Tensor | None = None) -> None:
        shape = (self.n_features_in_,) if self.format_ is None else self.format_.shape
        sizes = self.n_features_in_, self.n_components, tuple(self.hidden)
        encoder = self.encoder or seeded(lambda: dense_encoder(*sizes), seed)
        decoder = self.decoder or seeded(lambda: dense_decoder(sizes[1], sizes[0], sizes[2]), seed + 1)
        space = Real(self.n_features_in_) if self.format_ is None else Image(*self.format_.shape)
        graph = Graph([("latent", "image")], hidden=["latent"])
        self.model_ = Model(graph, {"latent": self._prior(), "image": m.Decoder(decoder, space)})
        self._map = EncoderMap(encoder, self.n_components, shape)

    def _prior(self) -> Mechanism:
        prior = self.prior or m.Normal(self.n_components, loc=0.0, scale=1.0)
        if prior.space.width != self.n_components or prior.space.is_countable:
            raise ModelError(f"prior must have n_components={self.n_components} numbers; got {prior.space}")
        return prior

    # -- use ---------------------------------------------------------------------------------------------------------

    def transform(self, X: ArrayLike) -> Floats:
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
        check_count("n_samples", n_samples)
        none = torch.zeros(1, 1, self.n_features_in_)
        fitted = self.model_.fitted
        generator = torch.Generator().manual_seed(seed)
        drawn = ancestral(fitted.structure, fitted.naturals, n_samples, generator, do={"image": none})
        return drawn["latent"][0].float().numpy()

    def _rows(self, X: ArrayLike, *, first: bool = False) -> Tensor:
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

    def _state(self) -> dict[str, Any]:
        return {"features": self.n_features_in_}

    def _restore(self, state: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
        self.n_features_in_ = features = state["features"]
        if type(features) is not int or (self.format_ is not None and features != math.prod(self.format_.shape)):
            raise ValueError(f"it has {features!r:.40} features")
        size = sum(a * b for a, b in pairwise((features, *self.hidden, self.n_components)))
        own = {"encoder": self.encoder, "decoder": self.decoder}
        check_accounted(tensors, **{name: size for name, network in own.items() if network is None})
        check_at_least(1, n_components=self.n_components, features=features)


def _is_table(X: ArrayLike) -> bool:
    """Rows rather than images: anything with at most two axes."""
    axes = getattr(X, "ndim", None)
    return (np.asarray(X).ndim if axes is None else axes) <= 2
