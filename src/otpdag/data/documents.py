"""Documents as sparse counts of words, images as rows of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import ArrayLike
from scipy import sparse
from torch import Tensor

from otpdag.data.batch import mixed
from otpdag.errors import DataError


class Documents:
    """Counts of words in documents, for :func:`otpdag.fit`.

    Args:
        counts: A matrix (documents, words), sparse or dense; counts need not be whole, fractions weigh words.

    >>> Documents([[2, 0, 1], [0, 3, 0]]).counts.shape
    (2, 3)
    """

    def __init__(self, counts: Any) -> None:
        held: Any = counts if sparse.issparse(counts) else np.asarray(counts, dtype=float)
        matrix: sparse.csr_array = sparse.csr_array(held, dtype=np.float64, copy=True)  # what follows works in place
        matrix.sum_duplicates()
        if matrix.ndim != 2 or not matrix.shape[0]:
            raise DataError(f"documents must be a matrix (documents, words); got shape {matrix.shape}")
        if matrix.nnz and (not np.isfinite(matrix.data).all() or matrix.data.min() < 0):
            raise DataError("counts of words must be finite and at least 0")
        matrix.eliminate_zeros()
        self.counts: sparse.csr_array = matrix

    @property
    def canonical_order(self) -> npt.NDArray[np.int64]:
        """Numbers of the documents that have words, in an order that depends on what they hold alone."""
        filled = np.flatnonzero(np.diff(self.counts.indptr))
        words = mixed(mixed(self.counts.data.view(np.uint64)) ^ self.counts.indices.astype(np.uint64))
        hashed = np.add.reduceat(words, self.counts.indptr[filled]) if len(filled) else filled
        return filled[np.argsort(hashed, kind="stable")]


def shuffled_words(documents: sparse.csr_array, generator: np.random.Generator) -> list[Tensor]:
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

    def __init__(self, pixels: ArrayLike | Tensor) -> None:
        held = pixels.detach().cpu().numpy() if isinstance(pixels, Tensor) else np.asarray(pixels)
        if held.ndim < 2 or len(held) < 2:
            raise DataError(f"images must have shape (n, ...) with at least 2 of them; got {held.shape}")
        if not np.isfinite(held).all():
            raise DataError("images must be finite; got NaN or infinity")
        self.rows = torch.from_numpy(np.ascontiguousarray(held.reshape(len(held), -1), dtype=np.float32))
