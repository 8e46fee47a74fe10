"""What auto-encoders share: training, what encoder and decoder make of rows, scores, and files.

A network is trained for as many epochs as were asked for.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import TransformerMixin
from torch import Tensor, nn

from otpdag.backward import EncoderMap, QuantizedMap
from otpdag.data import Images, Schema
from otpdag.engine import Adam, FitResult, Method, fit
from otpdag.engine.image_data import initial_theta
from otpdag.engine.monitor import Callback
from otpdag.errors import ConvergenceWarning, DataError, ModelError
from otpdag.estimators._contract import ModelEstimator, RandomState, seed_of
from otpdag.estimators._pictures import PictureFormat, read_format
from otpdag.learned.autoencoder import Encoded
from otpdag.model import Model
from otpdag.safe_archive import read_bundle, refusing, write_bundle
from otpdag.settings import Objective

Floats = NDArray[np.float32]


class AbstractAutoencoder(TransformerMixin, ModelEstimator, ABC):
    """An encoder and a decoder, behind which stands a graph whose last edge leads to the node ``image``."""

    kind: ClassVar[str]
    """What messages and files call it."""
    method_name: ClassVar[str]
    decoded_from: ClassVar[str]
    """The parent of the image."""
    fit_call = "fit(images)"
    not_saved: ClassVar[tuple[str, ...]] = ("encoder", "decoder", "divergence")

    encoder: nn.Module | None
    decoder: nn.Module | None
    n_epochs: int
    batch_size: int
    learning_rate: float
    random_state: RandomState
    device: str
    format_: PictureFormat | None
    _map: EncoderMap | QuantizedMap

    # -- what each has of its own -------------------------------------------------------------------------------------

    @abstractmethod
    def _check_arguments(self) -> None:
        """Refuse settings that make no sense."""

    @abstractmethod
    def _rows(self, X: ArrayLike | Tensor, *, first: bool = False) -> Tensor:
        """Images or rows as (n, numbers); of the first ones, which are fitted, the layout is kept."""

    @abstractmethod
    def _build(self, seed: int = 0, rows: Tensor | None = None) -> None:
        """The graph with its mechanisms, ``model_``, and the backward map, ``_map``."""

    @abstractmethod
    def _learned_by(self) -> tuple[Objective, Encoded]:
        """The objective, and how it is evaluated."""

    @abstractmethod
    def _read_params(self, rows: Tensor | None = None) -> None:
        """Keep what users ask for of the fitted parameters, and of the rows that were fitted."""

    @abstractmethod
    def _sent(self, latents: Tensor) -> Tensor:
        """What the decoder reads of latents (n, width)."""

    @abstractmethod
    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a file holds beside settings, format and networks: plain data, and tensors by name."""

    @classmethod
    @abstractmethod
    def _settings_of(cls, state: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the constructor, of all that a file says."""

    @abstractmethod
    def _restore(self, state: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take what :meth:`_state` gave, and refuse sizes that the tensors do not bear out."""

    # -- fit ----------------------------------------------------------------------------------------------------------

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
            X: Images: bytes or numbers from 0 to 1, channels first or last or, if grey, without an axis for them. A
                :class:`WassersteinAutoencoder` also takes rows (n, features) of any numbers.
            y: Ignored.
            checkpoint: A file that is written after every epoch; if it exists, training goes on from there.
            progress: Show a progress bar; by default only on a terminal.
            callbacks: Called with each record of the history; returning True stops.
        """
        check_at_least(1, n_epochs=self.n_epochs, batch_size=self.batch_size)
        self._check_arguments()
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ModelError(f"device {self.device!r} was asked for, but no CUDA device is available")
        rows = self._rows(X, first=True)
        if len(rows) < 2:
            raise DataError(f"images must be at least 2 to learn from; got {len(rows)}")
        seed = seed_of(self.random_state)
        self._build(seed, rows)
        method = Method(self.method_name, *self._learned_by(), trained_for(self, len(rows), averaging=0.0))
        journal = {"progress": progress, "callbacks": callbacks, "checkpoint": checkpoint}
        self.result_ = trained(self.model_, Images(rows), method, seed=seed, device=self.device, **journal)
        self._read_params(rows)
        return self

    # -- use ----------------------------------------------------------------------------------------------------------

    def score(self, X: ArrayLike | Tensor, y: object = None) -> float:
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
        return in_parts(
            lambda part: decoder.forward(params, {self.decoded_from: part}, torch.zeros(1, part.shape[1], 0)), latents
        )

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write settings and parameters to one file (JSON and safetensors in a zip); nothing is pickled."""
        _ = self._fitted
        own, tensors = self._state()
        settings = {name: value for name, value in self.get_params(deep=False).items() if name not in self.not_saved}
        state = {
            "format": f"otpdag {self.kind}",
            "version": 1,
            "format_": None if self.format_ is None else asdict(self.format_),
            "own_networks": [self.encoder is not None, self.decoder is not None],
            **own,
            "settings": settings | own.get("settings", {}),
        }
        raw = self.model_.structure.raw(self.model_.fitted.naturals)
        write_bundle(path, "estimator.json", state, {**raw, **self.model_.fitted.phi, **tensors})

    @classmethod
    def load(cls, path: str | Path, *, encoder: nn.Module | None = None, decoder: nn.Module | None = None) -> Self:
        """Read what :meth:`save` wrote; networks of your own, whose code is not saved, must be given again."""
        state, tensors = read_bundle(path, "estimator.json", cls.kind)
        if state.get("format") != f"otpdag {cls.kind}" or state.get("version") != 1:
            raise DataError(
                f"{str(path)!r} holds {state.get('format')!r:.60}, version {state.get('version')!r:.20}; "
                f"not a {cls.kind}"
            )
        with refusing(path, cls.kind):
            if not isinstance(state["settings"], dict):
                raise ValueError("its settings are none")
            for name, value in tensors.items():
                if not value.is_floating_point() or not bool(torch.isfinite(value).all()):
                    raise ValueError(f"{name!r:.60} holds numbers that are not finite")
            return cls._restored(state, tensors, {"encoder": encoder, "decoder": decoder})

    @classmethod
    def _restored(
        cls, state: Mapping[str, Any], tensors: dict[str, Tensor], networks: Mapping[str, nn.Module | None]
    ) -> Self:
        own = state["own_networks"]
        own = [own, own] if isinstance(own, bool) else own  # older files say it of both together
        missing = [name for name, is_own in zip(networks, own, strict=True) if is_own and networks[name] is None]
        if missing:
            names = " and ".join(missing)
            raise DataError(f"this auto-encoder has networks of its user, which are not saved: pass {names}")
        restored = cls(**cls._settings_of(state), **networks)
        restored.format_ = None if state["format_"] is None else read_format(state["format_"])
        restored._restore(state, tensors)
        restored._build()
        known = initial_theta(restored.model_.structure, 0) | restored._map.init()
        if {k: (v.shape, v.dtype) for k, v in known.items()} != {k: (v.shape, v.dtype) for k, v in tensors.items()}:
            raise DataError("it holds parameters of other networks than these")
        schema = Schema.of(restored.model_.spaces, restored.model_.graph)
        restored.model_.adopt(restored.model_.structure, {key: tensors[key] for key in known}, schema, ())
        restored._read_params()
        return restored


def in_parts(work: Callable[[Tensor], Tensor], rows: Tensor, at_once: int = 250) -> Tensor:
    """What is made of rows (n, ...), some at a time, which bounds memory: ``work`` has an axis of one before them."""
    with torch.no_grad():
        return torch.cat([work(part.unsqueeze(0))[0] for part in rows.split(at_once)])


def trained_for(estimator: Any, rows: int, *, averaging: float) -> Adam:
    """Steps for as many epochs as were asked for."""
    steps = estimator.n_epochs * math.ceil(rows / estimator.batch_size)
    return Adam(steps=steps, learning_rate=estimator.learning_rate, averaging=averaging)


def trained(model: Model, data: Any, method: Method, **arguments: Any) -> FitResult:
    """Fit; a network is trained for the epochs that were asked for, and ``status`` tells if more would help."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return fit(model, data, method=method, restarts=1, **arguments)


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
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= least:
            raise ModelError(f"{name} must be a number of at least {least:g}; got {value!r}")
