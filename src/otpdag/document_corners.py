"""Topics of the documents that are most unlike each other: the corners of the simplex that all documents fill."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import svds
from torch import Tensor

__all__ = ["start_topics"]

Array = NDArray[np.float64]
Documents = sparse.csr_array

CORNER_SHARE = 0.9
"""Share of the corner in a start; the rest is the frequency of words, so that no word starts at zero."""


def start_topics(documents: Documents, size: int, generator: np.random.Generator, *, first: bool) -> Tensor:
    """Topics of the documents that are most unlike each other, each averaged with its neighbours.

    Documents about one topic are the corners of the simplex of all. Successive projection finds them among rank-K
    projections of the word frequencies (Gillis & Vavasis 2014): the longest residual is a corner; it is projected out.
    Further starts look at a random half of the documents.
    """
    rows = documents.shape[0]
    chosen = np.arange(rows) if first or rows < 4 * size else np.sort(generator.choice(rows, rows // 2, replace=False))
    part = documents[chosen].astype(np.float64)
    lengths = np.maximum(np.asarray(part.sum(1)).ravel(), 1e-12)
    overall = np.asarray(part.sum(0)).ravel()
    overall = overall / overall.sum()
    shares = sparse.csr_array(sparse.diags_array(1 / lengths) @ part)
    # a share's variance is that of its word's frequency; a short document's is larger
    scaled = sparse.diags_array(np.sqrt(np.minimum(lengths / lengths.mean(), 1))) @ shares
    scaled = sparse.csr_array(scaled @ sparse.diags_array(1 / np.sqrt(np.maximum(overall, 1e-12))))
    residual = _project(scaled, min(size, min(scaled.shape)), generator)
    near = max(1, min(len(chosen), max(5, len(chosen) // (20 * size))))
    corners = []
    for _ in range(residual.shape[1]):
        corner = residual[(residual**2).sum(1).argmax()]
        members = np.argpartition(-(residual @ corner), near - 1)[:near]
        direction = residual[members].mean(0)
        direction = direction / max(float(np.linalg.norm(direction)), 1e-12)
        residual = residual - np.outer(residual @ direction, direction)
        corners.append(np.asarray(shares[members].mean(0)).ravel())
    for _ in range(size - len(corners)):
        corners.append(np.asarray(shares[[generator.integers(len(chosen))]].mean(0)).ravel())
    topics = CORNER_SHARE * np.stack(corners) + (1 - CORNER_SHARE) * overall
    return torch.from_numpy((topics / topics.sum(1, keepdims=True)).astype(np.float32))


def _project(matrix: Documents, rank: int, generator: np.random.Generator) -> Array:
    """Coordinates of the rows along the leading right singular vectors."""
    if rank < min(matrix.shape):
        vectors = svds(matrix, k=rank, v0=generator.standard_normal(min(matrix.shape)))[2]
    else:
        vectors = np.linalg.svd(matrix.toarray(), full_matrices=False)[2][:rank]
    return np.asarray(matrix @ vectors.T)
