"""Documents: sparse counts of words."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from otpdag.errors import DataError

__all__ = ["Documents"]


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
