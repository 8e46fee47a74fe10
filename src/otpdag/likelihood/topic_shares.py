r"""Shares of topics in documents given their words: closed-form maps, exact draws, and the concentrations they tell.

With a Dirichlet prior on the shares and a multinomial on the words, and each word's assignment to a topic summed out by
its best distribution, the best Dirichlet :math:`\phi(\theta \mid x) = \mathrm{Dir}(g)` solves

.. math:: g_k = \alpha_k + w_k \sum_v \frac{x_v \gamma_{kv}}{\sum_l w_l \gamma_{lv}}, \qquad
          w_k = \exp(\psi(g_k) - \psi(\textstyle\sum_l g_l))

(Blei, Ng & Jordan 2003): two matrix products a step for a whole batch of documents. It is sharper than the exact
distribution, which Gibbs sampling draws from: a document is given to few topics, and stray
words of others are put down to these. With the shares integrated out, :func:`infer_assignments` tells the topic of each
word from the topics of all other words of its document, which leaves hardly any stray words.

The maps know a document's shares too surely. Where topics are easy to tell that matters little; where many words could
be of several topics, it bends the topics (decision 0054). Draws have no such error. With a prior
:math:`\gamma_k \sim \mathrm{Dir}(\eta, \dots, \eta)`, each sweep draws

.. math:: z_{dv} \sim \theta_d \gamma_{\cdot v}, \qquad \theta_d \sim \mathrm{Dir}(\alpha + n_d), \qquad
          \gamma_k \sim \mathrm{Dir}(\eta + n_k)

and moves :math:`\alpha` and :math:`\eta` to where the draws are likeliest (stochastic EM).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import scipy as sp
import torch
from torch import Tensor

from otpdag.numerics import Array, Ints

Documents: TypeAlias = "sp.sparse.csr_array"  # imported when it is used

SMALLEST = 1e-30  # keeps quotients and logarithms finite in single precision, whose smallest number is 1e-38
ALPHA_RANGE = (1e-4, 1e3)  # concentrations beyond are as good as zero, or as even shares

# -- maps in closed form ----------------------------------------------------------------------------------------------


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
    def of(cls, documents: Documents) -> Cells:
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


def batches(documents: Documents, size: int, *, filled: float = 0.05) -> Iterator[Tensor | Cells]:
    """Documents some at a time: dense, or by cells where less is filled, which makes matrix products cost more."""
    if documents.nnz < filled * documents.shape[0] * documents.shape[1]:
        return cell_batches(documents, size)
    parts = (documents[start : start + size] for start in range(0, documents.shape[0], size))
    return (torch.from_numpy(part.toarray().astype(np.float32)) for part in parts)


def cell_batches(documents: Documents, size: int) -> Iterator[Cells]:
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


# -- exact draws ------------------------------------------------------------------------------------------------------


class AssignmentDraws:
    """Gibbs sampling: the topics of all words given the shares of their documents, then the shares given these.

    Args:
        documents: Whole counts of words.
        topics: How many topics there are.
        generator: Where draws come from.
        at_once: Filled cells of documents whose assignments are drawn at a time: with ten topics 16 MB each of chances
            and draws.
    """

    def __init__(
        self, documents: Documents, topics: int, generator: np.random.Generator, at_once: int = 200_000
    ) -> None:
        """Start from even shares."""
        self._generator = generator
        self._shares = np.full((documents.shape[0], topics), 1 / topics)
        ends = np.searchsorted(documents.indptr, np.arange(at_once, documents.nnz, at_once))
        parts = [slice(*ends) for ends in pairwise(np.unique([0, *ends, documents.shape[0]]).tolist())]
        self._blocks = [(part, Cells.of(documents[part])) for part in parts]

    def sweep(self, topics: Array, alpha: Array) -> tuple[Array, Array]:
        """Draw assignments by topics (K, words), then shares by concentrations (K,).

        Returns:
            How many words each topic gave: to each document (documents, K), and of each kind (K, words).
        """
        of_words = np.ascontiguousarray(topics.T)
        by_document, by_word = np.zeros_like(self._shares), np.zeros_like(of_words)
        for part, cells in self._blocks:
            chances = self._shares[part][cells.rows.numpy()] * of_words[cells.columns.numpy()] + np.finfo(float).tiny
            chances /= chances.sum(1, keepdims=True)
            counts = cells.values.numpy().astype(np.int64)
            drawn = torch.from_numpy(self._generator.multinomial(counts, chances)).double()
            by_document[part] = cells.by_document(drawn)
            by_word += cells.by_word(drawn).numpy()
        shape = alpha + by_document
        # of Gamma(a) as Gamma(a + 1) U^(1/a): small shapes would round to zero
        gamma, uniform = self._generator.standard_gamma(shape + 1), self._generator.random(shape.shape)
        self._shares = sp.special.softmax(np.log(gamma) + np.log1p(-uniform) / shape, axis=1)
        return by_document, by_word.T


def simulated_documents(
    lengths: Ints, topics: Array, alpha: Array, generator: np.random.Generator
) -> tuple[Documents, Array]:
    """Documents of these lengths drawn from topics (K, words) and concentrations (K,).

    Returns:
        The documents, and how often each topic gave each word (K, words): what data without gaps would tell.
    """
    by_document = generator.multinomial(lengths, generator.dirichlet(alpha, len(lengths)))
    counts = sp.sparse.csr_array((len(lengths), topics.shape[1]), dtype=np.int64)
    by_word = np.zeros_like(topics)
    for k, chances in enumerate(topics):
        rows = np.repeat(np.arange(len(lengths)), by_document[:, k])
        words = generator.choice(len(chances), len(rows), p=chances / chances.sum())
        counts = counts + sp.sparse.csr_array((np.ones(len(rows), dtype=np.int64), (rows, words)), shape=counts.shape)
        by_word[k] = np.bincount(words, minlength=len(chances))
    return counts, by_word


def newton_concentration(alpha: Tensor, mean_logs: Tensor, steps: int = 8) -> Tensor:
    """Concentrations that are likeliest for these mean logarithms of shares, by Newton's method (Minka 2000)."""
    a, logs = alpha.double(), mean_logs.double()
    for _ in range(steps):
        gradient = torch.digamma(a.sum()) - torch.digamma(a) + logs
        curvature, common = -torch.polygamma(1, a), torch.polygamma(1, a.sum())
        shift = (gradient / curvature).sum() / (1 / common + (1 / curvature).sum())
        moved = a - (gradient - shift) / curvature
        a = torch.where(moved > 0, moved, a / 2).clamp(*ALPHA_RANGE)
    return a.to(alpha)


def are_whole(documents: Documents) -> bool:
    """Whether words can be assigned one by one: their numbers are whole."""
    return bool(np.equal(documents.data, np.floor(documents.data)).all())


def exact_alpha(
    documents: Documents,
    topics: Tensor,
    alpha: Tensor,
    generator: np.random.Generator,
    *,
    cells: int = 30_000,
    burn: int = 15,
    sweeps: int = 45,
) -> Tensor:
    """Concentrations that are likeliest at the topics, by draws from the exact distribution of the assignments.

    The closed-form backward map is too sharp in short documents, which makes concentrations too small: 8 % for a
    hundred words of ten topics. Stochastic EM on some documents removes that. Counts that are not whole cannot be
    drawn; their concentrations stay as they are.

    Args:
        documents: Counts of words.
        topics: Word probabilities (K, words).
        alpha: Where concentrations start (K,).
        generator: Where draws come from.
        cells: Of the documents that are drawn.
        burn: Sweeps before concentrations are learned.
        sweeps: Sweeps from which they are; the mean of the later half counts.
    """
    if not are_whole(documents):
        return alpha
    filled = np.flatnonzero(np.diff(documents.indptr))
    each = max(1.0, documents.nnz / max(1, len(filled)))
    many = min(len(filled), max(200, int(cells / each)))
    part = documents[np.sort(generator.choice(filled, many, replace=False))]
    now, logs, kept = alpha.double().numpy(), None, []
    draws, fixed = AssignmentDraws(part, len(now), generator), topics.double().numpy()
    for number in range(burn + sweeps):
        by_document, _ = draws.sweep(fixed, now)
        if number >= burn:
            now, logs = drawn_concentration(now, by_document, logs)
            kept.append(now)
    return torch.from_numpy(np.mean(kept[sweeps // 2 :], 0)).to(alpha)


def drawn_concentration(
    alpha: Array, by_document: Array, mean_logs: Tensor | None, pace: float = 0.2
) -> tuple[Array, Tensor]:
    """Concentrations (K,) after one more draw of how many words each topic gave to documents (documents, K).

    Returns:
        The likeliest ones, and the running mean of expected logarithms of shares that they are told by, in which this
        draw has the weight ``pace``.
    """
    shape = torch.from_numpy(alpha + by_document)
    logs = (torch.digamma(shape) - torch.digamma(shape.sum(-1, keepdim=True))).mean(0)
    mean_logs = logs if mean_logs is None else mean_logs + pace * (logs - mean_logs)
    return newton_concentration(torch.from_numpy(alpha), mean_logs).numpy(), mean_logs


def word_concentration(
    counts: Array, concentration: float, steps: int = 3, within: tuple[float, float] = (1e-4, 1e2)
) -> float:
    """Concentration of a symmetric Dirichlet prior that is likeliest for words by topic (K, words) (Minka 2000).

    A few steps of the fixed point: draws that follow one another take it further.
    """
    words, total = counts.shape[1], counts.sum(1)
    for _ in range(steps):
        own = (sp.special.digamma(counts + concentration) - sp.special.digamma(concentration)).sum()
        common = (sp.special.digamma(total + words * concentration) - sp.special.digamma(words * concentration)).sum()
        concentration = float(np.clip(concentration * own / (words * common), *within))
    return concentration


@dataclass(frozen=True)
class DrawnTopics:
    """What some draws say.

    Attributes:
        roots: Mean square roots of the topics (K, words).
        words: How many words each topic gave on average (K,).
        alpha: Concentrations of the shares (K,).
        prior: Concentration of the topics' prior; that from which it is learned is forgotten within some sweeps.
    """

    roots: Array
    words: Array
    alpha: Array
    prior: float = 0.1

    @property
    def topics(self) -> Array:
        """The centre of the draws in Hellinger distance; a mean would follow the few that give a rare word much."""
        return self.roots**2 / (self.roots**2).sum(1, keepdims=True)

    def averaged_with(self, one: DrawnTopics, many: int) -> DrawnTopics:
        """The mean of ``many`` draws: this one of all but the last, which is ``one``."""
        return DrawnTopics(**{name: old + (getattr(one, name) - old) / many for name, old in vars(self).items()})


def topic_draws(
    documents: Documents, start: DrawnTopics, generator: np.random.Generator, *, learns_alpha: bool, first: int = 5
) -> Iterator[DrawnTopics]:
    """Draws of topics, of the topics of words and of shares, one after another.

    Args:
        documents: Whole counts of words.
        start: Topics (K, words) to start from, with concentrations of shares (K,) and of the prior.
        generator: Where draws come from.
        learns_alpha: Whether alpha is learned; it is given otherwise.
        first: Sweeps in which shares alone are drawn: they start from even ones.
    """
    topics, alpha, prior = start.topics, start.alpha.astype(float), start.prior
    mean_logs: Tensor | None = None
    draws = AssignmentDraws(documents, len(topics), generator)
    for _ in range(first):
        draws.sweep(topics, alpha)
    while True:
        by_document, by_word = draws.sweep(topics, alpha)
        prior = word_concentration(by_word, prior)
        if learns_alpha:
            alpha, mean_logs = drawn_concentration(alpha, by_document, mean_logs)
        shape = by_word + prior
        drawn = generator.standard_gamma(shape) + np.finfo(float).tiny
        topics = drawn / drawn.sum(1, keepdims=True)
        roots = np.exp(sp.special.gammaln(shape + 0.5) - sp.special.gammaln(shape))  # up to a factor
        roots /= np.linalg.norm(roots, axis=1, keepdims=True)
        yield DrawnTopics(roots, by_word.sum(1), alpha, prior)


def mean_draw(draws: Iterator[DrawnTopics], many: int, is_over: Callable[[], bool]) -> DrawnTopics:
    """What so many draws say on average, or fewer if somebody wants the end, but one."""
    mean = next(draws)
    for number in range(2, many + 1):
        if is_over():
            break
        mean = mean.averaged_with(next(draws), number)
    return mean


def drawn_topics(
    documents: Documents,
    start: DrawnTopics,
    generator: np.random.Generator,
    *,
    learns_alpha: bool,
    is_over: Callable[[], bool],
    sweeps: int = 25,
    most: int = 5,
) -> DrawnTopics:
    """Draw topics in ever longer windows until they move no further in one direction; what the last window says.

    A chain that is on its way moves on from window to window; one that has arrived moves back as often as on. Windows
    that grow tell a slow way from noise.

    Args:
        documents: Whole counts of words.
        start: Where draws begin.
        generator: Where they come from.
        learns_alpha: Whether alpha is learned; it is given otherwise.
        is_over: Whether somebody wants the end.
        sweeps: Of the first window, each later one having twice as many (decision 0054).
        most: Windows at most; three tell whether topics turn back.
    """
    draws = topic_draws(documents, start, generator, learns_alpha=learns_alpha)
    windows: list[DrawnTopics] = []
    for number in range(most):
        windows.append(mean_draw(draws, sweeps * 2**number, is_over))
        if is_over() or (number > 1 and _has_turned([one.roots for one in windows[-3:]])):
            break
    return windows[-1]


def _has_turned(roots: Sequence[Array]) -> bool:
    before, last = np.diff(np.stack(roots), axis=0)
    return bool((before * last).sum() <= 0)
