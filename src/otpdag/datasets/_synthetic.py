"""Synthetic documents with their truth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy as sp
from numpy.typing import ArrayLike

from otpdag.errors import check_count
from otpdag.numerics import Array, Ints

Truth = dict[str, dict[str, Array]]  # parameters by name, by node: the layout of `Model.params()`


def draw_states(probs: Array, rows: int, generator: np.random.Generator) -> Ints:
    """Draw a state per row from probabilities ``(states,)``, the same for all, or ``(rows, states)``."""
    edges = np.cumsum(probs, axis=-1)[..., :-1]
    return np.asarray((generator.random(rows)[:, None] > edges).sum(axis=-1), dtype=np.int64)


# --- documents about bars on a grid (Griffiths & Steyvers 2004; Section 5.1 of the paper) ---------------------


@dataclass(frozen=True)
class Bars:
    """Documents with the topics that they were drawn from.

    Attributes:
        counts: How often each document has each word, (documents, words of the vocabulary), sparse.
        topics: The true word probabilities of each topic: horizontal bars from top to bottom, then vertical ones from
            left to right. Words are the cells of the grid, row by row.
        theta: The true share of each topic in each document.
        alpha: The concentrations of the Dirichlet distribution that the shares were drawn from.
    """

    counts: sp.sparse.csr_array
    topics: Array
    theta: Array
    alpha: Array

    @property
    def side(self) -> int:
        """Cells along one side of the grid."""
        return len(self.topics) // 2


def bars(
    topics: int, documents: int, words: int, *, alpha: ArrayLike | None = None, seed: int | np.random.Generator
) -> Bars:
    r"""Draw documents by latent Dirichlet allocation from topics that are the rows and columns of a square grid.

    .. math:: \theta_m \sim \mathrm{Dir}(\alpha), \qquad z_{mn} \sim \theta_m, \qquad w_{mn} \sim \gamma_{z_{mn}}

    Each topic allows the words of one row or column, alike; K topics need a grid of K/2 by K/2 words. Assignments
    z are summed out: the counts of a document are multinomial with probabilities :math:`\theta_m \gamma`.

    Args:
        topics: How many topics, K; an even number of at least 4.
        documents: How many documents, M.
        words: How many words each document has, N.
        alpha: Concentrations of the topics in a document, one for all or one for each; 1 / K if left out.
        seed: Determines the draws; a numpy ``Generator`` is drawn from.

    Returns:
        The documents and their truth.

    Example:
        >>> drawn = bars(10, 1000, 100, seed=0)
        >>> drawn.counts.shape, drawn.topics.shape, drawn.theta.shape
        ((1000, 25), (10, 25), (1000, 10))
    """
    if topics < 4 or topics % 2:
        raise ValueError(f"`topics` must be an even number of at least 4; got {topics}")
    for name, value in (("documents", documents), ("words", words)):
        check_count(f"`{name}`", value)
    rng = np.random.default_rng(seed)
    concentrations = _concentrations(alpha, topics)
    gamma = _lines(topics // 2)
    theta = rng.dirichlet(concentrations, size=documents)
    chunks = (theta[start : start + 1000] for start in range(0, documents, 1000))  # bounds memory
    parts = [sp.sparse.csr_array(rng.multinomial(words, _normalised(part @ gamma))) for part in chunks]
    return Bars(sp.sparse.csr_array(sp.sparse.vstack(parts)), gamma, theta, concentrations)


def _lines(side: int) -> Array:
    cells = np.arange(side * side)
    rows, columns = (cells // side == np.arange(side)[:, None]), (cells % side == np.arange(side)[:, None])
    return np.concatenate([rows, columns]) / side


def _concentrations(alpha: ArrayLike | None, topics: int) -> Array:
    values = np.asarray(1 / topics if alpha is None else alpha, dtype=float)
    if values.shape not in ((), (topics,)):
        raise ValueError(f"`alpha` must be one number or one for each of {topics} topics; got shape {values.shape}")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError(f"`alpha` must be positive; got {values}")
    return np.array(np.broadcast_to(values, topics))


def _normalised(probs: Array) -> Array:
    """Rounding may bring a sum above one, which numpy refuses."""
    return np.asarray(probs / probs.sum(axis=1, keepdims=True))
