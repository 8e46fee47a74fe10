r"""Draws of topics, of the topics of words, of the shares of documents and of documents; and concentrations.

The closed-form maps of :mod:`otpdag.likelihood.topic_shares` know a document's shares too surely. Where topics are easy
to tell that matters little; where many words could be of several topics, it bends the topics (decision 0054). Draws
have no such error. With a prior :math:`\gamma_k \sim \mathrm{Dir}(\eta, \dots, \eta)`, each sweep draws

.. math:: z_{dv} \sim \theta_d \gamma_{\cdot v}, \qquad \theta_d \sim \mathrm{Dir}(\alpha + n_d), \qquad
          \gamma_k \sim \mathrm{Dir}(\eta + n_k)

and moves :math:`\alpha` and :math:`\eta` to where the draws are likeliest (stochastic EM).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse, special
from torch import Tensor

from otpdag.likelihood.topic_shares import Cells

Array = NDArray[np.float64]
Documents = sparse.csr_array

ALPHA_RANGE = (1e-4, 1e3)  # concentrations beyond are as good as zero, or as even shares


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

    def sweep(self, topics: Array, alpha: Array) -> WordCounts:
        """Draw assignments by topics (K, words), then shares by concentrations (K,)."""
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
        self._shares = special.softmax(np.log(gamma) + np.log1p(-uniform) / shape, axis=1)
        return WordCounts(by_document, by_word.T)


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
    if not np.equal(documents.data, np.floor(documents.data)).all():
        return alpha
    filled = np.flatnonzero(np.diff(documents.indptr))
    each = max(1.0, documents.nnz / max(1, len(filled)))
    many = min(len(filled), max(200, int(cells / each)))
    part = documents[np.sort(generator.choice(filled, many, replace=False))]
    now, logs, kept = alpha.double().numpy(), None, []
    draws, fixed = AssignmentDraws(part, len(now), generator), topics.double().numpy()
    for number in range(burn + sweeps):
        counts = draws.sweep(fixed, now).by_document
        if number >= burn:
            now, logs = drawn_concentration(now, counts, logs)
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
        own = (special.digamma(counts + concentration) - special.digamma(concentration)).sum()
        common = (special.digamma(total + words * concentration) - special.digamma(words * concentration)).sum()
        concentration = float(np.clip(concentration * own / (words * common), *within))
    return concentration


def pair_concentration(among: Tensor) -> Tensor:
    r"""Concentrations under which topics meet as often as in these shares of pairs of topics (K, K).

    A pair has one topic twice with probability :math:`(1 + s \sum \pi_k^2) / (1 + s)`, where :math:`\alpha = s \pi`.
    """
    share = among.double().sum(-1) / among.double().sum()
    twice, by_chance = among.double().trace() / among.double().sum(), (share**2).sum()
    total = (1 - twice) / (twice - by_chance).clamp(min=1e-9)
    return (share * total).clamp(*ALPHA_RANGE).to(among)


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


class TopicChain:
    """Draws of topics, of the topics of words and of shares, one after another.

    Args:
        documents: Whole counts of words.
        start: Topics (K, words) to start from, with concentrations of shares (K,) and of the prior.
        generator: Where draws come from.
        learns_alpha: Whether alpha is learned; it is given otherwise.
        first: Sweeps in which shares alone are drawn: they start from even ones.
    """

    def __init__(
        self,
        documents: Documents,
        start: DrawnTopics,
        generator: np.random.Generator,
        *,
        learns_alpha: bool,
        first: int = 5,
    ) -> None:
        """Draw shares for the topics of the start."""
        self._topics, self._alpha, self._prior = start.topics, start.alpha.astype(float), start.prior
        self._generator, self._learns_alpha = generator, learns_alpha
        self._mean_logs: torch.Tensor | None = None
        self._draws = AssignmentDraws(documents, len(start.topics), generator)
        for _ in range(first):
            self._draws.sweep(self._topics, self._alpha)

    def window(self, sweeps: int, is_over: Callable[[], bool]) -> DrawnTopics:
        """Take so many sweeps, or fewer if somebody wants the end, but one; what they say on average."""
        mean = self._swept()
        for many in range(2, sweeps + 1):
            if is_over():
                break
            mean = mean.averaged_with(self._swept(), many)
        return mean

    def _swept(self) -> DrawnTopics:
        counts = self._draws.sweep(self._topics, self._alpha)
        self._prior = word_concentration(counts.by_word, self._prior)
        if self._learns_alpha:
            self._alpha, self._mean_logs = drawn_concentration(self._alpha, counts.by_document, self._mean_logs)
        shape = counts.by_word + self._prior
        drawn = self._generator.standard_gamma(shape) + np.finfo(float).tiny
        self._topics = drawn / drawn.sum(1, keepdims=True)
        roots = np.exp(special.gammaln(shape + 0.5) - special.gammaln(shape))  # expected of such draws, up to a factor
        roots /= np.linalg.norm(roots, axis=1, keepdims=True)
        return DrawnTopics(roots, counts.by_word.sum(1), self._alpha, self._prior)


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
    chain = TopicChain(documents, start, generator, learns_alpha=learns_alpha)
    windows: list[DrawnTopics] = []
    for number in range(most):
        windows.append(chain.window(sweeps * 2**number, is_over))
        if is_over() or (number > 1 and _has_turned([one.roots for one in windows[-3:]])):
            break
    return windows[-1]


def _has_turned(roots: Sequence[Array]) -> bool:
    before, last = np.diff(np.stack(roots), axis=0)
    return bool((before * last).sum() <= 0)
