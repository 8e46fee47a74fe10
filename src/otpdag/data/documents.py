"""Documents as sparse counts of words; images as rows of numbers, and how users lay them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy as sp
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from otpdag.data.batch import mixed
from otpdag.data.columns import to_numpy
from otpdag.errors import DataError, told_as
from otpdag.numerics import Ints

Floats: TypeAlias = NDArray[np.float32]
CHANNELS = (1, 3)  # grey, or red, green and blue


class Documents:
    """Counts of words in documents, for :func:`otpdag.fit`.

    Args:
        counts: A matrix (documents, words), sparse or dense; counts need not be whole, fractions weigh words.

    >>> Documents([[2, 0, 1], [0, 3, 0]]).counts.shape
    (2, 3)
    """

    def __init__(self, counts: Any) -> None:
        what = "documents must be a matrix of counts (documents, words)"
        with told_as(DataError, what, TypeError, ValueError, OverflowError):
            held: Any = counts if sp.sparse.issparse(counts) else np.asarray(counts, dtype=float)
            matrix: sp.sparse.csr_array = sp.sparse.csr_array(held, dtype=np.float64, copy=True)  # changed below
        matrix.sum_duplicates()
        if matrix.ndim != 2 or not matrix.shape[0]:
            raise DataError(f"documents must be a matrix (documents, words); got shape {matrix.shape}")
        if matrix.nnz and (not np.isfinite(matrix.data).all() or matrix.data.min() < 0):
            raise DataError("counts of words must be finite and at least 0")
        matrix.eliminate_zeros()
        self.counts: sp.sparse.csr_array = matrix

    @property
    def canonical_order(self) -> Ints:
        """Numbers of the documents that have words, in an order that depends on what they hold alone."""
        filled = np.flatnonzero(np.diff(self.counts.indptr))
        words = mixed(mixed(self.counts.data.view(np.uint64)) ^ self.counts.indices.astype(np.uint64))
        hashed = np.add.reduceat(words, self.counts.indptr[filled]) if len(filled) else filled
        return filled[np.argsort(hashed, kind="stable")]


def shuffled_words(documents: sp.sparse.csr_array, generator: np.random.Generator) -> list[Tensor]:
    """Word numbers of each document, in random order; fractions are rounded, and no document is left empty."""
    words = []
    for at in range(documents.shape[0]):
        part = slice(documents.indptr[at], documents.indptr[at + 1])
        often = np.maximum(np.rint(documents.data[part]), 1).astype(np.int64)
        shuffled = generator.permutation(np.repeat(documents.indices[part], often))
        words.append(torch.from_numpy(shuffled.astype(np.int64)))
    return words


class Images:
    """Images, or rows of numbers, for :func:`otpdag.fit` of an auto-encoder.

    Args:
        pixels: An array (n, ...): each image is flattened, channels first.

    >>> Images(np.zeros((5, 1, 8, 8))).rows.shape
    torch.Size([5, 64])
    """

    def __init__(self, pixels: ArrayLike) -> None:
        held = to_numpy(pixels)
        if held.ndim < 2 or len(held) < 2:
            raise DataError(f"images must have shape (n, ...) with at least 2 of them; got {held.shape}")
        if not np.isfinite(held).all():
            raise DataError("images must be finite; got NaN or infinity")
        self.rows = torch.from_numpy(np.ascontiguousarray(held.reshape(len(held), -1), dtype=np.float32))


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
    def of(cls, images: ArrayLike) -> PictureFormat:
        """Read the format from images that a model is to be fitted to."""
        layout = picture_layout(np.shape(images))
        held = _array(images)
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
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one image in each layout."""
        sizes: dict[str, tuple[int, ...]] = {"last": (self.height, self.width, self.channels), "first": self.shape}
        return sizes if self.channels > 1 else {**sizes, "none": (self.height, self.width)}

    def rows(self, images: ArrayLike) -> Tensor:
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
        sizes = self.sizes
        for layout in (self.layout, *sizes):
            if sizes[layout] == shape[1:]:
                return layout
        expected = ", ".join(map(str, ("n", *sizes[self.layout])))
        raise DataError(f"images must have shape ({expected}), as in fit; got {shape}")

    def pictures(self, rows: Tensor) -> Floats:
        """Rows as images in the layout and range of those that were fitted."""
        images = rows.detach().float().cpu().clamp(0, 1).reshape(-1, *self.shape)
        if self.layout == "last":
            images = images.permute(0, 2, 3, 1)
        elif self.layout == "none":
            images = images[:, 0]
        return np.ascontiguousarray((images * self.peak).numpy())


def _array(images: ArrayLike) -> NDArray[Any]:
    held = to_numpy(images)
    if not (np.issubdtype(held.dtype, np.number) or held.dtype == bool):
        raise DataError(f"images must be numbers; got {held.dtype}")
    if not np.isfinite(held).all():
        raise DataError("images must be finite; got NaN or infinity")
    if held.min() < 0 or held.max() > 255:
        raise DataError(f"images must go from 0 to 255 or from 0 to 1; got {held.min():g} to {held.max():g}")
    return held


def picture_layout(shape: tuple[int, ...]) -> str:
    """Where channels are: ``"last"``, ``"first"`` or, of grey images without an axis for them, ``"none"``."""
    if len(shape) not in (3, 4) or not all(shape):
        raise DataError(
            "images must be (n, height, width), (n, height, width, channels) or (n, channels, height, width), none of "
            f"them 0; got shape {tuple(shape)}. For one image, pass images[None]"
        )
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
    return 1.0 if held.dtype != np.uint8 and held.max() <= 1 else 255.0


def read_format(state: Mapping[str, Any], most: int = 1 << 14) -> PictureFormat:
    """The format of images that a file describes, with at most so many pixels along a side."""
    read = PictureFormat(**state)
    sizes = (read.channels, read.height, read.width)
    if not all(type(size) is int and 1 <= size <= most for size in sizes) or read.channels not in CHANNELS:
        raise ValueError(f"its images have sizes {sizes!r:.60}")
    if read.layout not in ("last", "first", "none") or read.peak not in (1, 255):
        raise ValueError(f"its images have layout {read.layout!r:.40} and peak {read.peak!r:.40}")
    return read
