"""Draws of the topics of words and of the shares of documents, given topics; and documents drawn from a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, special

__all__ = ["AssignmentDraws", "WordCounts", "simulated_documents"]

Array = NDArray[np.float64]
Documents = sparse.csr_array

CELLS_AT_A_TIME = 200_000
"""Filled cells of documents whose assignments are drawn at a time: with ten topics 16 MB each of chances and draws."""


@dataclass(frozen=True)
class WordCounts:
    """How many words each topic gave: to each document (documents, K), and of each kind (K, words)."""

    by_document: Array
    by_word: Array


class AssignmentDraws:
    """Gibbs sampling: the topics of all words given the shares of their documents, then the shares given these.

    Args:
        documents: Whole counts of words.
        topics: How many topics there are.
        generator: Where draws come from.
    """

    def __init__(self, documents: Documents, topics: int, generator: np.random.Generator) -> None:
        """Start from even shares."""
        self._documents, self._generator = documents, generator
        self._shares = np.full((documents.shape[0], topics), 1 / topics)
        cells = np.arange(CELLS_AT_A_TIME, documents.nnz, CELLS_AT_A_TIME)
        inner = np.searchsorted(documents.indptr, cells)
        self._bounds = np.unique(np.concatenate([[0], inner, [documents.shape[0]]]))

    def sweep(self, topics: Array, alpha: Array) -> WordCounts:
        """Draw assignments by topics (K, words), then shares by concentrations (K,)."""
        by_document, by_word = np.zeros_like(self._shares), np.zeros_like(topics)
        for begin, end in zip(self._bounds[:-1], self._bounds[1:], strict=True):
            by_document[begin:end], of_words = self._assigned(slice(begin, end), topics)
            by_word += of_words
        shape = alpha + by_document
        # of Gamma(a) as Gamma(a + 1) U^(1/a): small shapes would round to zero
        gamma, uniform = self._generator.standard_gamma(shape + 1), self._generator.random(shape.shape)
        self._shares = special.softmax(np.log(gamma) + np.log1p(-uniform) / shape, axis=1)
        return WordCounts(by_document, by_word)

    def _assigned(self, part: slice, topics: Array) -> tuple[Array, Array]:
        documents = self._documents[part]
        rows = np.repeat(np.arange(documents.shape[0]), np.diff(documents.indptr))
        chances = self._shares[part][rows] * topics.T[documents.indices] + np.finfo(float).tiny
        chances /= chances.sum(1, keepdims=True)
        drawn = self._generator.multinomial(documents.data.astype(np.int64), chances)
        return _summed(drawn, rows, documents.shape[0]), _summed(drawn, documents.indices, topics.shape[1]).T


def _summed(drawn: NDArray[np.int64], groups: NDArray[np.integer], many: int) -> Array:
    """Sums of the rows of each group (many, K)."""
    members = sparse.csr_array((np.ones(len(groups)), (groups, np.arange(len(groups)))), shape=(many, len(groups)))
    return np.asarray(members @ drawn)


def simulated_documents(
    lengths: NDArray[np.int64], topics: Array, alpha: Array, generator: np.random.Generator
) -> tuple[Documents, Array]:
    """Documents of these lengths drawn from topics (K, words) and concentrations (K,).

    Returns:
        The documents, and how often each topic gave each word (K, words): what data without gaps would tell.
    """
    by_document = generator.multinomial(lengths, generator.dirichlet(alpha, len(lengths)))
    counts = np.zeros((len(lengths), topics.shape[1]), dtype=np.int64)
    by_word = np.zeros_like(topics)
    for k, chances in enumerate(topics):
        drawn = generator.multinomial(by_document[:, k], chances / chances.sum())
        counts += drawn
        by_word[k] = drawn.sum(0)
    return sparse.csr_array(counts), by_word
