r"""Pairs of words of one document, the simplest thing that shows a topic: their distribution in data and model.

.. math:: P_\theta(v, w) = \sum_{k, l} A_{kl} \gamma_{kv} \gamma_{lw}, \qquad
          A_{kl} = \frac{\alpha_k (\alpha_l + [k = l])}{\alpha_\cdot (\alpha_\cdot + 1)}.

Topics of the documents that are most unlike each other: the corners of the simplex that all documents fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import svds
from torch import Tensor

Array = NDArray[np.float64]
Documents = sparse.csr_array


def topic_pairs(alpha: Tensor) -> Tensor:
    """Probabilities that two words of a document come from two topics (K, K)."""
    total = alpha.sum()
    return (torch.outer(alpha, alpha) + torch.diag(alpha)) / (total * (total + 1))


@dataclass
class WordPairs:
    """How often two words are together in a document, counted once and kept sparse.

    Attributes:
        counts: Ordered pairs of different words of one document (words, words).
        total: Number of all pairs.
        at_once: Pairs that are made dense at a time: 16 MB.
        kept: Pairs that are kept dense: 100 MB.
    """

    counts: sparse.csr_array
    total: float
    at_once: int = 4_000_000
    kept: int = 25_000_000
    _kept: list[tuple[slice, Tensor]] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def of(cls, documents: sparse.csr_array) -> WordPairs:
        """Count the pairs of sparse documents; a word that is there n times makes n (n - 1) pairs with itself."""
        documents = documents.astype(np.float64)
        pairs = sparse.csr_array(documents.T @ documents)
        with_itself = documents.copy()
        with_itself.data = np.minimum(with_itself.data, with_itself.data**2)
        pairs = sparse.csr_array(pairs - sparse.diags_array(np.asarray(with_itself.sum(0)).ravel()))
        pairs.eliminate_zeros()
        return cls(pairs, float(pairs.sum()))

    @property
    def words(self) -> Tensor:
        """How often each word is in a pair, as a share (words,)."""
        return torch.from_numpy(np.asarray(self.counts.sum(0), dtype=np.float64).ravel() / self.total)

    def __add__(self, other: WordPairs) -> WordPairs:
        """Pairs of both sets of documents."""
        return WordPairs(sparse.csr_array(self.counts + other.counts), self.total + other.total)

    def blocks(self) -> Iterable[tuple[slice, Tensor]]:
        """Shares of the pairs, dense, some rows at a time; of a small vocabulary they are kept for the next time."""
        if self.counts.shape[0] ** 2 > self.kept:
            return self._blocks()
        self._kept = self._kept or list(self._blocks())
        return self._kept

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        words = self.counts.shape[0]
        rows = max(1, min(words, self.at_once // words))
        for start in range(0, words, rows):
            part = slice(start, min(start + rows, words))
            yield part, torch.from_numpy((self.counts[part].toarray() / self.total).astype(np.float32))

    def expected(self, topics: Tensor, alpha: Tensor, smallest: float = 1e-20) -> tuple[float, Tensor, Tensor]:
        r"""Cross-entropy :math:`-\sum P_{data} \log P_\theta`, and expected counts of the latent topics.

        The second result is how often a topic gave a word (K, words), the third how often two topics met (K, K);
        each sums to one. No probability is below ``smallest``, which keeps logarithms finite in single precision.
        """
        among = topic_pairs(alpha)
        mixed = among @ topics
        ratios = torch.zeros_like(topics)
        loss = 0.0
        for part, seen in self.blocks():
            model = topics[:, part].T @ mixed + smallest
            loss -= float((seen * torch.log(model)).sum())
            ratios[:, part] = topics @ (seen / model).T
        # the pairs are symmetric, so that the product from one side serves both
        return loss, topics * (among @ ratios), among * (ratios @ topics.T)


@dataclass(frozen=True)
class Repeats:
    """How often documents repeat a word, over how often a model does that draws words independently given shares.

    Attributes:
        ratio: One where the model holds; texts are bursty (above one), titles avoid repeats (below one).
        error: Its standard error, over documents.
        missed: What estimated topics may miss: those of bars, which LDA made, missed 0 to 0.02, and texts 0.15 to 8.
    """

    ratio: float
    error: float
    missed: float = 0.1

    @property
    def as_modelled(self) -> bool:
        """Whether the ratio is one, up to its error and to what estimated topics may miss."""
        return abs(self.ratio - 1) <= max(self.missed, 2 * self.error)


def repeats(documents: sparse.csr_array, topics: Tensor, alpha: Tensor) -> Repeats:
    r"""Compare pairs of a word with itself in documents with those of the model.

    .. math:: \frac{\sum_d \sum_w x_{dw} (x_{dw} - 1)}{\sum_d n_d (n_d - 1) \, \sum_w P_\theta(w, w)}
    """
    again = documents.copy().astype(np.float64)
    again.data = np.maximum(again.data * (again.data - 1), 0.0)
    seen = np.asarray(again.sum(1)).ravel()
    length = np.asarray(documents.sum(1)).ravel()
    chance = float((topics * (topic_pairs(alpha).to(topics) @ topics)).sum())
    expected = np.maximum(length * (length - 1), 0.0) * chance
    total = max(float(expected.sum()), 1e-300)
    ratio = float(seen.sum()) / total
    error = float(np.sqrt(((seen - ratio * expected) ** 2).sum())) / total
    return Repeats(ratio, error)


def start_topics(
    documents: Documents, size: int, generator: np.random.Generator, *, first: bool, corner: float = 0.9
) -> Tensor:
    """Topics of the documents that are most unlike each other, each averaged with its neighbours.

    Documents about one topic are the corners of the simplex of all. Successive projection finds them among rank-K
    projections of the word frequencies (Gillis & Vavasis 2014): the longest residual is a corner; it is projected out.
    Further starts look at a random half of the documents. The share ``corner`` of a start is the corner's; the rest is
    the frequency of words, so that no word starts at zero.
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
        longest = residual[(residual**2).sum(1).argmax()]
        members = np.argpartition(-(residual @ longest), near - 1)[:near]
        direction = residual[members].mean(0)
        direction = direction / max(float(np.linalg.norm(direction)), 1e-12)
        residual = residual - np.outer(residual @ direction, direction)
        corners.append(np.asarray(shares[members].mean(0)).ravel())
    for _ in range(size - len(corners)):
        corners.append(np.asarray(shares[[generator.integers(len(chosen))]].mean(0)).ravel())
    topics = corner * np.stack(corners) + (1 - corner) * overall
    return torch.from_numpy((topics / topics.sum(1, keepdims=True)).astype(np.float32))


def _project(matrix: Documents, rank: int, generator: np.random.Generator) -> Array:
    """Coordinates of the rows along the leading right singular vectors."""
    if rank < min(matrix.shape):
        vectors = svds(matrix, k=rank, v0=generator.standard_normal(min(matrix.shape)))[2]
    else:
        vectors = np.linalg.svd(matrix.toarray(), full_matrices=False)[2][:rank]
    return np.asarray(matrix @ vectors.T)
