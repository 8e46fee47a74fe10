"""Plain EM from many random starts, vectorised over them: what a search must not end below.

Every hidden state of a row, or of a step, has a log-density that is linear in features of the row: ones and values of a
category, a count and one, a square, a number and one. So an E-step is one product of matrices for all starts, and an
M-step another. Starts end when they gain little; nothing else is shared between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

Array = NDArray[np.float64]

LITTLE = 1e-6  # of a row's log-likelihood in a step: a start has ended
MOST_STEPS = 1000
FLATTEST, SMALLEST_RATE, SMALLEST_SHARE = 0.1, 1e-3, 1e-10
"""A scale below a tenth of its column's spread is a component that has collapsed: such starts are left out."""


@dataclass(frozen=True)
class Child:
    """A column, its family, and which of its own configurations each hidden state is."""

    column: Array
    family: str
    configuration: tuple[int, ...]
    size: int = 0

    @property
    def features(self) -> Array:
        """What the log-density is linear in (N, F)."""
        one = np.ones_like(self.column)
        if self.family == "category":
            return np.eye(self.size)[self.column.astype(int)]
        if self.family == "count":
            return np.stack([self.column, one], 1)
        return np.stack([self.column**2, self.column, one], 1)

    @property
    def belongs(self) -> Array:
        """Configurations by hidden states (K, C)."""
        return np.eye(max(self.configuration) + 1)[list(self.configuration)]

    @property
    def constant(self) -> float:
        """What no parameter changes of the log-likelihood."""
        return -float(gammaln(self.column + 1).sum()) if self.family == "count" else 0.0

    def random(self, starts: int, generator: np.random.Generator) -> Array:
        """Coefficients (R, F, C): tables from a uniform Dirichlet distribution, means at random rows."""
        many = max(self.configuration) + 1
        if self.family == "category":
            return np.log(generator.dirichlet(np.ones(self.size), (starts, many))).swapaxes(1, 2)
        at = self.column[generator.integers(len(self.column), size=(starts, many))]
        if self.family == "count":
            return _of_rate(at + 0.5)
        return _of_scale(at, np.full_like(at, self.column.std()))

    def maximised(self, sums: Array) -> Array:
        """Coefficients (R, F, C) from expected sums of features (R, F, C)."""
        if self.family == "category":
            shares = sums + SMALLEST_SHARE
            return np.log(shares / shares.sum(1, keepdims=True))
        total = np.maximum(sums[:, -1], SMALLEST_SHARE)
        if self.family == "count":
            return _of_rate(np.maximum(sums[:, 0] / total, SMALLEST_RATE))
        mean = sums[:, 1] / total
        return _of_scale(mean, np.sqrt(np.maximum(sums[:, 0] / total - mean**2, 1e-12)))

    def has_collapsed(self, coefficients: Array) -> NDArray[np.bool_]:
        """Which starts (R,) have a scale that fits a few rows alone."""
        if self.family != "number":
            return np.zeros(len(coefficients), dtype=bool)
        return ((-0.5 / coefficients[:, 0]) < (FLATTEST * self.column.std()) ** 2).any(-1)


def _of_rate(rate: Array) -> Array:
    return np.stack([np.log(rate), -rate], 1)


def _of_scale(mean: Array, scale: Array) -> Array:
    constant = -0.5 * (mean / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)
    return np.stack([-0.5 / scale**2, mean / scale**2, constant], 1)


def best_of_rows(
    children: Sequence[Child], hidden: Sequence[int], starts: int, generator: np.random.Generator
) -> Array:
    """Log-likelihoods (R,) where EM ends, of tables whose independent hidden categories have these sizes."""
    places = np.indices(hidden).reshape(len(hidden), -1)
    priors = [generator.dirichlet(np.ones(size), starts) for size in hidden]
    columns, widths, coefficients = _columns(children, starts, generator)
    ended, live, before = np.full(starts, -np.inf), np.arange(starts), np.full(starts, -np.inf)
    for _ in range(MOST_STEPS):
        log_prior = sum(
            np.log(np.maximum(prior, 1e-300))[:, place] for prior, place in zip(priors, places, strict=True)
        )
        joint = _emissions(children, columns, coefficients) + log_prior
        posterior, loss = _normalised(joint)
        total = loss.sum(0)
        gone = total - before < LITTLE * len(columns)
        ended[live] = np.where(_collapsed(children, coefficients), -np.inf, total)
        if gone.all():
            break
        keep = ~gone
        live, before, posterior = live[keep], total[keep], posterior[:, keep]
        priors = [posterior.mean(0) @ np.eye(size)[place] for size, place in zip(hidden, places, strict=True)]
        coefficients = _maximised(children, widths, columns, posterior)
    return ended + sum(child.constant for child in children)


def best_of_chains(
    children: Sequence[Child], states: int, lengths: int, starts: int, generator: np.random.Generator
) -> Array:
    """Log-likelihoods (R,) where EM ends, of hidden Markov chains in sequences of equal lengths."""
    first = generator.dirichlet(np.ones(states), starts)
    moves = generator.dirichlet(np.ones(states), (starts, states))
    columns, widths, coefficients = _columns(children, starts, generator)
    ended, live, before = np.full(starts, -np.inf), np.arange(starts), np.full(starts, -np.inf)
    for _ in range(MOST_STEPS):
        emissions = _emissions(children, columns, coefficients)
        posterior, pairs, total = _forward_backward(emissions, first, moves, lengths)
        gone = total - before < LITTLE * len(columns)
        ended[live] = np.where(_collapsed(children, coefficients), -np.inf, total)
        if gone.all():
            break
        keep = ~gone
        live, before, posterior, pairs = live[keep], total[keep], posterior[:, keep], pairs[keep]
        first = posterior[::lengths].mean(0) + SMALLEST_SHARE
        first, moves = first / first.sum(-1, keepdims=True), pairs + SMALLEST_SHARE
        moves = moves / moves.sum(-1, keepdims=True)
        coefficients = _maximised(children, widths, columns, posterior)
    return ended + sum(child.constant for child in children)


def _columns(
    children: Sequence[Child], starts: int, generator: np.random.Generator
) -> tuple[Array, list[int], list[Array]]:
    """Features of all children (N, F), where each one's begin, and their first coefficients."""
    features = [child.features for child in children]
    widths = np.cumsum([0, *(one.shape[1] for one in features)]).tolist()
    return np.concatenate(features, 1), widths, [child.random(starts, generator) for child in children]


def _emissions(children: Sequence[Child], columns: Array, coefficients: Sequence[Array]) -> Array:
    """Log-densities (N, R, K) of rows in every state."""
    each = [own @ child.belongs.T for child, own in zip(children, coefficients, strict=True)]
    stacked = np.concatenate(each, 1)  # (R, F, K)
    flat = stacked.swapaxes(0, 1).reshape(stacked.shape[1], -1)
    return (columns @ flat).reshape(len(columns), len(stacked), -1)


def _maximised(children: Sequence[Child], widths: Sequence[int], columns: Array, posterior: Array) -> list[Array]:
    sums = (columns.T @ posterior.reshape(len(columns), -1)).reshape(-1, *posterior.shape[1:]).swapaxes(0, 1)
    parts = [sums[:, begin:end] for begin, end in pairwise(widths)]
    return [child.maximised(own @ child.belongs) for child, own in zip(children, parts, strict=True)]


def _collapsed(children: Sequence[Child], coefficients: Sequence[Array]) -> NDArray[np.bool_]:
    return np.any([child.has_collapsed(own) for child, own in zip(children, coefficients, strict=True)], axis=0)


def _normalised(joint: Array) -> tuple[Array, Array]:
    """Posterior probabilities and log-likelihoods."""
    top = joint.max(-1, keepdims=True)
    weights = np.exp(joint - top)
    total = weights.sum(-1, keepdims=True)
    return weights / total, (top + np.log(total))[..., 0]


def _forward_backward(emissions: Array, first: Array, moves: Array, steps: int) -> tuple[Array, Array, Array]:
    """Posteriors (N, R, K), expected moves (R, K, K) and log-likelihoods (R,)."""
    rows, starts, states = emissions.shape
    top = emissions.max(-1, keepdims=True)
    # time first, then replicas, then sequences: a step of all is one product of matrices
    density = np.exp(emissions - top).reshape(-1, steps, starts, states).transpose(1, 2, 0, 3)
    forward, scale = np.empty_like(density), np.empty((*density.shape[:3], 1))
    for step in range(steps):
        ahead = first[:, None] if step == 0 else forward[step - 1] @ moves
        forward[step] = ahead * density[step]
        scale[step] = forward[step].sum(-1, keepdims=True)
        forward[step] /= scale[step]
    backward = np.ones_like(density)
    for step in range(steps - 2, -1, -1):
        backward[step] = (density[step + 1] * backward[step + 1] / scale[step + 1]) @ moves.swapaxes(1, 2)
    later = density[1:] * backward[1:] / scale[1:]
    pairs = np.einsum("trni,trnj->rij", forward[:-1], later, optimize=True) * moves
    posterior = (forward * backward).transpose(2, 0, 1, 3).reshape(rows, starts, states)
    return posterior, pairs, np.log(scale).sum((0, 2, 3)) + top.sum((0, 2))
