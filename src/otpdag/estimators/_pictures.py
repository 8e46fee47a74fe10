"""Training of auto-encoders: as many epochs as were asked for.

What users pass as images, as rows of pixels between 0 and 1, and back; files of auto-encoders.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from otpdag.data import Images
from otpdag.engine import FitResult, Method, fit
from otpdag.errors import ConvergenceWarning, DataError, ModelError
from otpdag.model import Model
from otpdag.safe_archive import read_bundle, refusing, write_bundle


def train_encoder(model: Model, rows: Tensor, method: Method, **arguments: Any) -> FitResult:
    """Fit images; a network is trained for the epochs that were asked for, and ``status`` tells if more would help."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return fit(model, Images(rows), method=method, restarts=1, **arguments)


Floats = NDArray[np.float32]
CHANNELS = (1, 3)  # grey, or red, green and blue
MOST_PIXELS = 1 << 14  # along a side


@dataclass(frozen=True)
class PictureFormat:
    """How a user's images are laid out: channels first, last or none, and the brightest value.

    Attributes:
        channels: Number of channels.
        height: Rows of pixels.
        width: Columns of pixels.
        layout: ``"last"``, ``"first"`` or ``"none"`` (grey images without an axis for channels).
        peak: 255 for bytes, 1 for numbers from 0 to 1.
    """

    channels: int
    height: int
    width: int
    layout: str
    peak: float

    @classmethod
    def of(cls, images: ArrayLike | Tensor) -> PictureFormat:
        """Read the format from images that a model is to be fitted to."""
        held = _array(images)
        layout = _layout(held.shape)
        if layout == "first":
            channels, height, width = held.shape[1:]
        else:
            height, width = held.shape[1:3]
            channels = held.shape[3] if layout == "last" else 1
        return cls(channels, height, width, layout, _peak(held))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.channels, self.height, self.width

    @property
    def expected(self) -> str:
        """The shape in words."""
        sizes = {
            "none": f"(n, {self.height}, {self.width})",
            "last": f"(n, {self.height}, {self.width}, {self.channels})",
            "first": f"(n, {self.channels}, {self.height}, {self.width})",
        }
        return sizes[self.layout]

    def rows(self, images: ArrayLike | Tensor) -> Tensor:
        """Images as rows (n, channels * height * width) in single precision, from 0 to 1.

        Images in another layout than those of the fit are read if their shape leaves no doubt.
        """
        held = _array(images)
        layout = self._layout_of(held.shape)
        if held.dtype != np.uint8 and _peak(held) > self.peak:
            raise DataError(f"images must go up to {self.peak:g}, as in fit; got {held.max():g}")
        divisor = 255.0 if held.dtype == np.uint8 else self.peak
        if layout == "last":
            held = held.transpose(0, 3, 1, 2)
        scaled = np.ascontiguousarray(held, dtype=np.float32).reshape(len(held), -1) / np.float32(divisor)
        return torch.from_numpy(scaled)

    def _layout_of(self, shape: tuple[int, ...]) -> str:
        sizes = {"last": (self.height, self.width, self.channels), "first": self.shape}
        if self.channels == 1:
            sizes["none"] = (self.height, self.width)  # type: ignore[assignment]
        for layout in (self.layout, "last", "first", "none"):
            if sizes.get(layout) == shape[1:]:
                return layout
        raise DataError(f"images must have shape {self.expected}, as in fit; got {shape}")

    def pictures(self, rows: Tensor) -> Floats:
        """Rows as images in the layout and range of those that were fitted."""
        images = rows.detach().float().cpu().clamp(0, 1).reshape(-1, *self.shape)
        if self.layout == "last":
            images = images.permute(0, 2, 3, 1)
        elif self.layout == "none":
            images = images[:, 0]
        return np.ascontiguousarray((images * self.peak).numpy())


def _array(images: ArrayLike | Tensor) -> NDArray[Any]:
    held = images.detach().cpu().numpy() if isinstance(images, Tensor) else np.asarray(images)
    if held.ndim not in (3, 4) or not held.size:
        raise DataError(
            "images must be (n, height, width), (n, height, width, channels) or (n, channels, height, width), none of "
            f"them 0; got shape {held.shape}. For one image, pass images[None]"
        )
    if not (np.issubdtype(held.dtype, np.number) or held.dtype == bool):
        raise DataError(f"images must be numbers; got {held.dtype}")
    if not np.isfinite(held).all():
        raise DataError("images must be finite; got NaN or infinity")
    if held.min() < 0:
        raise DataError(f"images must go from 0 to 255 or from 0 to 1; got {held.min():g} to {held.max():g}")
    return held


def _layout(shape: tuple[int, ...]) -> str:
    if len(shape) == 3 and shape[2] in CHANNELS:
        raise DataError(f"images must be many; got shape {shape}, which looks like one of them: pass images[None]")
    if len(shape) == 3:
        return "none"
    last, first = shape[3] in CHANNELS, shape[1] in CHANNELS
    if last == first:
        raise DataError(
            f"images must have 1 or 3 channels, first or last; got shape {shape}, which "
            + ("could be either" if last else "is neither. A single image needs an axis before it: images[None]")
        )
    return "last" if last else "first"


def _peak(held: NDArray[Any]) -> float:
    if held.dtype == np.uint8:
        return 255.0
    most = float(held.max())
    if most <= 1:
        return 1.0
    if most <= 255:
        return 255.0
    raise DataError(f"images must go from 0 to 255 or from 0 to 1; got {held.min():g} to {most:g}")


def write_estimator(path: str | Path, kind: str, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write settings as JSON and numbers as safetensors in one zip file, in one step; nothing is pickled."""
    write_bundle(path, "estimator.json", {"format": f"otpdag {kind}", "version": 1, **state}, tensors)


def read_estimator(path: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what :func:`write_estimator` wrote."""
    state, tensors = read_bundle(path, "estimator.json", kind)
    if state.get("format") != f"otpdag {kind}" or state.get("version") != 1:
        raise DataError(
            f"{str(path)!r} holds {state.get('format')!r:.60}, version {state.get('version')!r:.20}; not a {kind}"
        )
    with refusing(path, kind):
        if not isinstance(state["settings"], dict):
            raise ValueError("its settings are none")
        for name, value in tensors.items():
            if not value.is_floating_point() or not bool(torch.isfinite(value).all()):
                raise ValueError(f"{name!r:.60} holds numbers that are not finite")
    return state, tensors


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


def read_format(state: Mapping[str, Any]) -> PictureFormat:
    """The format of images that a file describes."""
    read = PictureFormat(**state)
    sizes = (read.channels, read.height, read.width)
    if not all(type(size) is int and 1 <= size <= MOST_PIXELS for size in sizes) or read.channels not in CHANNELS:
        raise ValueError(f"its images have sizes {sizes!r:.60}")
    if read.layout not in ("last", "first", "none") or read.peak not in (1, 255):
        raise ValueError(f"its images have layout {read.layout!r:.40} and peak {read.peak!r:.40}")
    return read


def check_at_least(least: float, **arguments: float) -> None:
    """Refuse numbers that are too small."""
    for name, value in arguments.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= least:
            raise ModelError(f"{name} must be a number of at least {least:g}; got {value!r}")
