"""Distances between discrete distributions."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_TOLERANCE = 1e-6  # of the sum of probabilities that were written with seven digits


def hellinger(p: ArrayLike, q: ArrayLike) -> float:
    r"""Measure the Hellinger distance between two discrete distributions, from 0 (equal) to 1 (disjoint).

    .. math:: H(p, q) = \frac{1}{\sqrt 2} \left\| \sqrt p - \sqrt q \right\|_2

    Args:
        p: Probabilities, of any shape, that sum to one over all entries.
        q: Probabilities of the same shape.

    Example:
        >>> hellinger([0.5, 0.5], [0.5, 0.5]), hellinger([1.0, 0.0], [0.0, 1.0])
        (0.0, 1.0)
    """
    left, right = _pair(p, q)
    return float(np.sqrt(0.5 * np.square(np.sqrt(left) - np.sqrt(right)).sum()))


def kl_divergence(p: ArrayLike, q: ArrayLike) -> float:
    r"""Measure the Kullback-Leibler divergence of ``q`` from ``p``, in nats.

    .. math:: KL(p \| q) = \sum_x p(x) \log \frac{p(x)}{q(x)}

    It is infinite where ``q`` excludes what ``p`` allows; states that ``p`` excludes count nothing.

    Args:
        p: Probabilities, of any shape, that sum to one over all entries.
        q: Probabilities of the same shape.

    Example:
        >>> round(kl_divergence([0.5, 0.5], [0.25, 0.75]), 4)
        0.1438
    """
    left, right = _pair(p, q)
    held = left > 0
    with np.errstate(divide="ignore"):
        return float((left[held] * (np.log(left[held]) - np.log(right[held]))).sum())


def _pair(p: ArrayLike, q: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    left, right = _probabilities("p", p), _probabilities("q", q)
    if left.shape != right.shape:
        raise ValueError(f"`p` and `q` must have one shape; got {left.shape} and {right.shape}")
    return left, right


def _probabilities(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=float)
    if not ((array >= -_TOLERANCE).all() and abs(array.sum() - 1.0) < _TOLERANCE):
        raise ValueError(f"`{name}` must be probabilities that sum to 1; got a sum of {array.sum():.6g}")
    return np.asarray(np.maximum(array, 0.0))
