r"""The backward map of documents: what share each topic has in a document, given its words.

With a Dirichlet prior on the shares and a multinomial on the words, and each word's assignment to a topic summed out by
its best distribution, the best Dirichlet :math:`\phi(\theta \mid x) = \mathrm{Dir}(g)` solves

.. math:: g_k = \alpha_k + w_k \sum_v \frac{x_v \gamma_{kv}}{\sum_l w_l \gamma_{lv}}, \qquad
          w_k = \exp(\psi(g_k) - \psi(\textstyle\sum_l g_l))

(Blei, Ng & Jordan 2003): two matrix products a step for a whole batch of documents. It is sharper than the exact
distribution, which :mod:`otpdag.likelihood.topic_draws` draws from: a document is given to few topics, and stray
words of others are put down to these. With the shares integrated out, :func:`infer_assignments` tells the topic of each
word from the topics of all other words of its document, which leaves hardly any stray words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

SMALLEST = 1e-30  # keeps quotients and logarithms finite in single precision, whose smallest number is 1e-38


@dataclass(frozen=True)
class Cells:
    """A batch of documents by the words that they have: short documents are mostly zeros.

    Attributes:
        rows: Document of each cell, in rising order.
        columns: Word of each cell.
        values: How often the document has the word.
        shape: Documents and words.
    """

    rows: Tensor
    columns: Tensor
    values: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, documents: sparse.csr_array) -> Cells:
        """The cells of sparse documents."""
        cells = documents.tocoo()
        rows, columns = (torch.from_numpy(index.astype(np.int64)) for index in (cells.row, cells.col))
        return cls(rows, columns, torch.from_numpy(cells.data.astype(np.float32)), documents.shape)

    def by_document(self, values: Tensor) -> Tensor:
        """Sums of what cells hold (cells, K) over the words of each document (documents, K)."""
        return values.new_zeros(self.shape[0], values.shape[1]).index_add_(0, self.rows, values)

    def by_word(self, values: Tensor) -> Tensor:
        """Sums over documents (words, K)."""
        return values.new_zeros(self.shape[1], values.shape[1]).index_add_(0, self.columns, values)

    @cached_property
    def lengths(self) -> Tensor:
        """Words of each document (documents, 1)."""
        return self.by_document(self.values.unsqueeze(-1))


@dataclass(frozen=True)
class Shares:
    """Dirichlet distributions of the topics' shares in documents.

    Attributes:
        concentration: Of each document's distribution (documents, K).
        weights: Exponentials of the expected logarithms of the shares (documents, K).
        words: The words' probabilities at these weights (documents, words), or in each cell; they sum to less than one.
    """

    concentration: Tensor
    weights: Tensor
    words: Tensor

    @property
    def mean(self) -> Tensor:
        """Expected shares."""
        return self.concentration / self.concentration.sum(-1, keepdim=True)

    def expected_counts(self, counts: Tensor | Cells, topics: Tensor) -> Tensor:
        """How often each topic gave each word, summed over documents (K, words)."""
        if isinstance(counts, Cells):
            weighed = (counts.values / self.words).unsqueeze(-1) * self.weights[counts.rows]
            return topics * counts.by_word(weighed).T
        return topics * (self.weights.T @ (counts / self.words))

    def log_prob(self, counts: Tensor | Cells) -> Tensor:
        """Logarithms of the rebuilt words' probabilities, summed over all documents."""
        values = counts.values if isinstance(counts, Cells) else counts
        return (values * torch.log(self.words)).sum()

    def kl(self, alpha: Tensor) -> Tensor:
        r"""Divergence of each document's distribution from the prior's :math:`\mathrm{Dir}(\alpha)`."""
        g = self.concentration
        normal = torch.lgamma(g.sum(-1)) - torch.lgamma(g).sum(-1)
        prior = torch.lgamma(alpha.sum()) - torch.lgamma(alpha).sum()
        return normal - prior + ((g - alpha) * torch.log(self.weights)).sum(-1)

    def cost(self, counts: Tensor | Cells, alpha: Tensor) -> Tensor:
        """Minus the bound on the log-likelihood of all documents: what rebuilding costs, and the divergence."""
        return self.kl(alpha).sum().double() - self.log_prob(counts).double()


def batches(documents: sparse.csr_array, size: int, *, filled: float = 0.05) -> Iterator[Tensor | Cells]:
    """Documents some at a time: dense, or by cells where less is filled, which makes matrix products cost more."""
    if documents.nnz < filled * documents.shape[0] * documents.shape[1]:
        return cell_batches(documents, size)
    parts = (documents[start : start + size] for start in range(0, documents.shape[0], size))
    return (torch.from_numpy(part.toarray().astype(np.float32)) for part in parts)


def cell_batches(documents: sparse.csr_array, size: int) -> Iterator[Cells]:
    """Documents some at a time, by cells."""
    return (Cells.of(documents[start : start + size]) for start in range(0, documents.shape[0], size))


def infer_assignments(
    cells: Cells, topics: Tensor, alpha: Tensor, start: Tensor, *, steps: int
) -> tuple[Tensor, Tensor]:
    r"""Probabilities of the topics of each cell's word, shares integrated out, and expected words of each topic.

    .. math:: p_{dvk} \propto \gamma_{kv} (\alpha_k + n_{dk} - p_{dvk}), \qquad n_{dk} = \sum_v x_{dv} p_{dvk}

    The collapsed variational map of zero order (Asuncion et al. 2009, https://arxiv.org/abs/1205.2662): a word counts
    all others of its document, not itself.

    Args:
        cells: Words of the documents.
        topics: Word probabilities (K, words).
        alpha: Concentrations of the prior (K,).
        start: Words of each document that each topic gave, to start from (documents, K).
        steps: Steps of the fixed point.

    Returns:
        The probabilities (cells, K), and the words that each topic gave to each document (documents, K).
    """
    of_cells = topics.T[cells.columns]
    one = cells.values.clamp(max=1).unsqueeze(-1)  # a fraction of a word is all of it
    chances = _normalised(of_cells * (start[cells.rows] + alpha))
    given = start
    for _ in range(steps):
        given = cells.by_document(cells.values.unsqueeze(-1) * chances)
        others = (given[cells.rows] - one * chances).clamp(min=0)
        chances = _normalised(of_cells * (others + alpha))
    return chances, given


def _normalised(weights: Tensor) -> Tensor:
    return weights / (weights.sum(-1, keepdim=True) + SMALLEST)


def even_shares(counts: Tensor | Cells, alpha: Tensor) -> Tensor:
    """Where the steps start: the words of a document divided evenly among the topics."""
    lengths = counts.lengths if isinstance(counts, Cells) else counts.sum(-1, keepdim=True)
    return alpha + lengths / len(alpha)


def infer_shares(
    counts: Tensor | Cells, topics: Tensor, alpha: Tensor, start: Tensor, *, steps: int, tolerance: float = 0.0
) -> Shares:
    """Take steps of the fixed point from concentrations ``start``.

    Args:
        counts: Words of the documents (documents, words), or their cells.
        topics: Word probabilities (K, words), or the exponentials of their expected logarithms.
        alpha: Concentrations of the prior (K,).
        start: Concentrations to start from (documents, K).
        steps: Most steps.
        tolerance: Stop when no document's concentrations change by more than this on average.
    """
    g = start
    weights = _weights(g)
    of_cells = topics.T[counts.columns] if isinstance(counts, Cells) else topics
    words = _rebuilt(counts, weights, of_cells)
    for step in range(steps):
        moved = alpha + weights * _explained(counts, words, of_cells)
        far = bool((moved - g).abs().mean(-1).max() > tolerance) if tolerance and step % 4 == 3 else True
        g = moved
        weights = _weights(g)
        words = _rebuilt(counts, weights, of_cells)
        if not far:
            break
    return Shares(g, weights, words)


def _rebuilt(counts: Tensor | Cells, weights: Tensor, topics: Tensor) -> Tensor:
    """Words' probabilities: of all, or of those in the cells, whose topics are given cell by cell."""
    if isinstance(counts, Cells):
        return (weights[counts.rows] * topics).sum(-1) + SMALLEST
    return weights @ topics + SMALLEST


def _explained(counts: Tensor | Cells, words: Tensor, topics: Tensor) -> Tensor:
    """Sums over words of counts over probabilities, times the topics' own (documents, K)."""
    if isinstance(counts, Cells):
        return counts.by_document((counts.values / words).unsqueeze(-1) * topics)
    return (counts / words) @ topics.T


def _weights(concentration: Tensor) -> Tensor:
    total = torch.digamma(concentration.sum(-1, keepdim=True))
    return torch.exp(torch.digamma(concentration) - total).clamp(min=SMALLEST)
