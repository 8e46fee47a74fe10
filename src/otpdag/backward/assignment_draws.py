"""Draws of the topics of words and of the shares of documents, given topics; and documents drawn from a model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, special

__all__ = ["AssignmentDraws", "WordCounts", "simulated_documents"]

Array = NDArray[np.float64]
Indices = NDArray[np.integer]
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
        self._generator = generator
        self._shares = np.full((documents.shape[0], topics), 1 / topics)
        cells = np.arange(CELLS_AT_A_TIME, documents.nnz, CELLS_AT_A_TIME)
        bounds = np.unique([0, *np.searchsorted(documents.indptr, cells), documents.shape[0]])
        self._blocks = [_Block.of(documents, *ends) for ends in pairwise(bounds.tolist())]

    def sweep(self, topics: Array, alpha: Array) -> WordCounts:
        """Draw assignments by topics (K, words), then shares by concentrations (K,)."""
        of_words = np.ascontiguousarray(topics.T)
        by_document, by_word = np.zeros_like(self._shares), np.zeros_like(of_words)
        for block in self._blocks:
            chances = self._shares[block.rows] * of_words[block.words] + np.finfo(float).tiny
            chances /= chances.sum(1, keepdims=True)
            drawn = self._generator.multinomial(block.counts, chances)
            by_document += block.in_documents @ drawn
            by_word += block.in_words @ drawn
        shape = alpha + by_document
        # of Gamma(a) as Gamma(a + 1) U^(1/a): small shapes would round to zero
        gamma, uniform = self._generator.standard_gamma(shape + 1), self._generator.random(shape.shape)
        self._shares = special.softmax(np.log(gamma) + np.log1p(-uniform) / shape, axis=1)
        return WordCounts(by_document, by_word.T)


@dataclass(frozen=True)
class _Block:
    """Filled cells of some documents: their rows, words and counts, and what sums them by either (many, cells)."""

    rows: Indices
    words: Indices
    counts: Indices
    in_documents: Documents
    in_words: Documents

    @classmethod
    def of(cls, documents: Documents, begin: int, end: int) -> _Block:
        """The cells of the documents from ``begin`` to ``end``."""
        cells = slice(documents.indptr[begin], documents.indptr[end])
        rows = np.repeat(np.arange(begin, end), np.diff(documents.indptr[begin : end + 1]))
        words, counts = documents.indices[cells], documents.data[cells].astype(np.int64)
        many, kinds = documents.shape
        return cls(rows, words, counts, _members(rows, many), _members(words, kinds))


def _members(groups: Indices, many: int) -> Documents:
    """A matrix of ones that sums the rows of another by group."""
    return sparse.csr_array((np.ones(len(groups)), (groups, np.arange(len(groups)))), shape=(many, len(groups)))


def simulated_documents(
    lengths: NDArray[np.int64], topics: Array, alpha: Array, generator: np.random.Generator
) -> tuple[Documents, Array]:
    """Documents of these lengths drawn from topics (K, words) and concentrations (K,).

    Returns:
        The documents, and how often each topic gave each word (K, words): what data without gaps would tell.
    """
    by_document = generator.multinomial(lengths, generator.dirichlet(alpha, len(lengths)))
    counts = sparse.csr_array((len(lengths), topics.shape[1]), dtype=np.int64)
    by_word = np.zeros_like(topics)
    for k, chances in enumerate(topics):
        rows = np.repeat(np.arange(len(lengths)), by_document[:, k])
        words = generator.choice(len(chances), len(rows), p=chances / chances.sum())
        counts = counts + sparse.csr_array((np.ones(len(rows), dtype=np.int64), (rows, words)), shape=counts.shape)
        by_word[k] = np.bincount(words, minlength=len(chances))
    return counts, by_word
