r"""Topics drawn from their exact distribution given documents, everything else that is unknown drawn with them.

The closed-form maps of :mod:`otpdag.backward.topic_shares` know a document's shares too surely. Where topics are easy
to tell that matters little; where many words could be of several topics, it bends the topics (decision 0054). Draws
have no such error. With a prior :math:`\gamma_k \sim \mathrm{Dir}(\eta, \dots, \eta)`, each sweep draws

.. math:: z_{dv} \sim \theta_d \gamma_{\cdot v}, \qquad \theta_d \sim \mathrm{Dir}(\alpha + n_d), \qquad
          \gamma_k \sim \mathrm{Dir}(\eta + n_k)

and moves :math:`\alpha` and :math:`\eta` to where the draws are likeliest (stochastic EM).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse, special

from otpdag.backward.assignment_draws import AssignmentDraws, WordCounts
from otpdag.backward.topic_concentrations import drawn_concentration, word_concentration

__all__ = ["DrawnTopics", "TopicChain", "drawn_topics"]

Array = NDArray[np.float64]

FIRST_WINDOW, FEWEST_WINDOWS, MOST_WINDOWS = 25, 3, 5
"""Sweeps of the first window, each later one having twice as many, and how many windows there are (decision 0054)."""

NEAR_WINDOW, NEAR_WINDOWS = 10, 4
"""The same where draws of a part of the documents have led near: each sweep of all of them takes long."""

FIRST_SWEEPS = 5
"""Sweeps in which shares alone are drawn: they start from even ones."""

FIRST_PRIOR = 0.1
"""Concentration of the topics' prior from which it is learned; within some sweeps it is forgotten."""


@dataclass(frozen=True)
class DrawnTopics:
    """What some draws say.

    Attributes:
        roots: Mean square roots of the topics (K, words).
        words: How many words each topic gave on average (K,).
        alpha: Concentrations of the shares (K,).
        prior: Concentration of the topics' prior.
    """

    roots: Array
    words: Array
    alpha: Array
    prior: float = FIRST_PRIOR

    @property
    def topics(self) -> Array:
        """The centre of the draws in Hellinger distance; a mean would follow the few that give a rare word much."""
        return self.roots**2 / (self.roots**2).sum(1, keepdims=True)

    def averaged_with(self, one: DrawnTopics, many: int) -> DrawnTopics:
        """The mean of ``many`` draws: this one of all but the last, which is ``one``."""
        return DrawnTopics(
            self.roots + (one.roots - self.roots) / many,
            self.words + (one.words - self.words) / many,
            self.alpha + (one.alpha - self.alpha) / many,
            self.prior + (one.prior - self.prior) / many,
        )


class TopicChain:
    """Draws of topics, of the topics of words and of shares, one after another.

    Args:
        documents: Whole counts of words.
        start: Topics (K, words) to start from, with concentrations of shares (K,) and of the prior.
        generator: Where draws come from.
        learns_alpha: Whether alpha is learned; it is given otherwise.
    """

    def __init__(
        self, documents: sparse.csr_array, start: DrawnTopics, generator: np.random.Generator, *, learns_alpha: bool
    ) -> None:
        """Draw shares for the topics of the start."""
        self._topics, self._alpha, self._prior = start.topics, start.alpha.astype(float), start.prior
        self._generator, self._learns_alpha = generator, learns_alpha
        self._mean_logs: torch.Tensor | None = None
        self._draws = AssignmentDraws(documents, len(start.topics), generator)
        for _ in range(FIRST_SWEEPS):
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
        self._learn(counts)
        return self._drawn(counts.by_word)

    def _learn(self, counts: WordCounts) -> None:
        self._prior = word_concentration(counts.by_word, self._prior)
        if self._learns_alpha:
            self._alpha, self._mean_logs = drawn_concentration(self._alpha, counts.by_document, self._mean_logs)

    def _drawn(self, by_word: Array) -> DrawnTopics:
        shape = by_word + self._prior
        drawn = self._generator.standard_gamma(shape) + np.finfo(float).tiny
        self._topics = drawn / drawn.sum(1, keepdims=True)
        roots = np.exp(special.gammaln(shape + 0.5) - special.gammaln(shape))  # expected of such draws, up to a factor
        return DrawnTopics(
            roots / np.linalg.norm(roots, axis=1, keepdims=True), by_word.sum(1), self._alpha, self._prior
        )


def drawn_topics(
    documents: sparse.csr_array,
    start: DrawnTopics,
    generator: np.random.Generator,
    *,
    learns_alpha: bool,
    is_near: bool = False,
    is_over: Callable[[], bool],
) -> DrawnTopics:
    """Draw topics in ever longer windows until they move no further in one direction; what the last window says.

    A chain that is on its way moves on from window to window; one that has arrived moves back as often as on. Windows
    that grow tell a slow way from noise.
    """
    chain = TopicChain(documents, start, generator, learns_alpha=learns_alpha)
    first, most = (NEAR_WINDOW, NEAR_WINDOWS) if is_near else (FIRST_WINDOW, MOST_WINDOWS)
    windows: list[DrawnTopics] = []
    for number in range(most):
        windows.append(chain.window(first * 2**number, is_over))
        if is_over() or (len(windows) >= FEWEST_WINDOWS and _has_turned([one.roots for one in windows[-3:]])):
            break
    return windows[-1]


def _has_turned(roots: Sequence[Array]) -> bool:
    before, last = np.diff(np.stack(roots), axis=0)
    return bool((before * last).sum() <= 0)
