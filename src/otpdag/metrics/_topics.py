"""How far estimated topics are from true ones: topics have no order, so they are lined up first."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otpdag.metrics._distributions import kl_divergence
from otpdag.metrics._matching import match_labels

Array = NDArray[np.float64]

_TOLERANCE = 1e-4  # topics in single precision sum to one no better


def match_topics(true: ArrayLike, estimate: ArrayLike) -> NDArray[np.intp]:
    r"""Find the assignment of estimated to true topics with the least Hellinger distance in all.

    .. math:: \min_\sigma \sum_k H(\gamma_k, \hat\gamma_{\sigma(k)})

    Args:
        true: The true topics, a row of word probabilities each.
        estimate: The estimated topics, as many.

    Returns:
        The estimated topic of each true one, so that ``estimate[order]`` lines up with the truth.

    Example:
        >>> match_topics([[1.0, 0.0], [0.0, 1.0]], [[0.1, 0.9], [0.8, 0.2]])
        array([1, 0])
    """
    left, right = _pair(true, estimate)
    return match_labels(_hellinger_matrix(left, right))


def topic_errors(true: ArrayLike, estimate: ArrayLike, *, ground: ArrayLike | None = None) -> dict[str, float]:
    r"""Measure how far estimated topics are from the true ones, lined up by :func:`match_topics`.

    Each figure is the mean over topics, in the order of the pairs :math:`(\gamma_k, \hat\gamma_{\sigma(k)})`:

    - ``kl``: :math:`KL(\gamma_k \| \hat\gamma_{\sigma(k)})` in nats, infinite where the estimate excludes a word;
    - ``hellinger``: from 0 to 1;
    - ``wasserstein``: the least cost of moving one topic's mass onto the other's, exactly (POT). Moving mass between
      two words costs ``ground``; if left out, every move costs one and the distance is total variation.

    Args:
        true: The true topics, a row of word probabilities each.
        estimate: The estimated topics, as many.
        ground: Distances between words, (words, words): for bars, those of :func:`grid_distances`.

    Example:
        >>> truth = [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
        >>> found = topic_errors(truth, [[0.0, 0.1, 0.9], [0.5, 0.5, 0.0]])
        >>> {name: round(value, 4) for name, value in found.items()}
        {'kl': 0.0527, 'hellinger': 0.1133, 'wasserstein': 0.05}
    """
    left, right = _pair(true, estimate)
    distances = _hellinger_matrix(left, right)
    order = match_labels(distances)
    pairs = list(zip(left, right[order], strict=True))
    costs = _ground(ground, left.shape[1])
    return {
        "kl": float(np.mean([kl_divergence(p, q) for p, q in pairs])),
        "hellinger": float(distances[np.arange(len(left)), order].mean()),
        "wasserstein": float(np.mean([_transport(p, q, costs) for p, q in pairs])),
    }


def grid_distances(side: int) -> Array:
    """Compute the Euclidean distances between the cells of a square grid, in cells, row by row.

    Args:
        side: Cells along one side.

    Returns:
        Distances (side², side²): the ground metric of words that lie on a grid.

    Example:
        >>> grid_distances(2)[0].round(2)
        array([0.  , 1.  , 1.  , 1.41])
    """
    cells = np.stack(np.divmod(np.arange(side * side), side), axis=-1).astype(float)
    return np.asarray(np.linalg.norm(cells[:, None] - cells[None], axis=-1))


def patterns_recovered(true: ArrayLike, estimate: ArrayLike, *, mass: float = 0.75) -> float:
    """Measure the share of true patterns that are recovered exactly.

    A pattern is the set of words that a true topic allows. It is recovered if the likeliest words of the topic that
    :func:`match_topics` assigns to it, as many, are that very set, and hold more than ``mass`` of the topic: two
    patterns in one topic are not one, and a nearly flat topic, whose order is chance, recovers nothing.

    Args:
        true: The true topics, with words that they exclude.
        estimate: The estimated topics, as many.
        mass: The share of an estimated topic that must be exceeded on the pattern.

    Example:
        >>> patterns_recovered([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]], [[0.4, 0.1, 0.4, 0.1], [0.1, 0.1, 0.4, 0.4]])
        0.5
    """
    left, right = _pair(true, estimate)
    recovered = [
        set(np.argsort(-q, kind="stable")[: np.count_nonzero(p)]) == set(np.flatnonzero(p)) and q[p > 0].sum() > mass
        for p, q in zip(left, right[match_topics(left, right)], strict=True)
    ]
    return float(np.mean(recovered))


def published_topic_errors(true: ArrayLike, estimate: ArrayLike) -> dict[str, float]:
    r"""Compute what Table 1 of the paper prints: **not** a measure of quality, kept to compare with that table only.

    These are the formulas of the published metric code, and they give the table's figures for EM back. With
    :math:`s(\cdot)` the softmax of numbers that are probabilities already, which leaves little but the uniform
    distribution of V words:

    - ``kl``: mean of :math:`KL(\gamma_k \| s(\hat\gamma_k))`, topics not lined up; for any good estimate it is close to
      that of a uniform one, :math:`\log (K/2)`;
    - ``hellinger``: :math:`\| \sqrt\gamma - \sqrt{\hat\gamma} \| / \sqrt 2` of the whole matrices, topics not lined up;
    - ``wasserstein``: transport between topics at the cost
      :math:`\frac{1}{2V} [KL(\gamma_j \| s(\hat\gamma_i)) + KL(\hat\gamma_j \| s(\gamma_i))]`.

    Args:
        true: The true topics, a row of word probabilities each.
        estimate: The estimated topics, as many.

    Example:
        >>> uniform = published_topic_errors(np.eye(2), np.full((2, 2), 0.5))
        >>> round(uniform["kl"], 4), round(float(np.log(2)), 4)
        (0.6931, 0.6931)
    """
    left, right = _pair(true, estimate)
    flat_left, flat_right = _softmax(left), _softmax(right)
    costs = (_kl_matrix(left, flat_right).T + _kl_matrix(right, flat_left).T) / (2 * left.shape[1])
    return {
        "kl": float(_kl_matrix(left, flat_right).diagonal().mean()),
        "hellinger": float(np.sqrt(0.5 * np.square(np.sqrt(left) - np.sqrt(right)).sum())),
        "wasserstein": float(costs[np.arange(len(costs)), match_labels(costs)].mean()),
    }


def _pair(true: ArrayLike, estimate: ArrayLike) -> tuple[Array, Array]:
    left, right = _topics("true", true), _topics("estimate", estimate)
    if left.shape != right.shape:
        raise ValueError(f"`true` and `estimate` must have one shape; got {left.shape} and {right.shape}")
    return left, right


def _topics(name: str, values: ArrayLike) -> Array:
    array = np.asarray(values, dtype=float)
    if array.ndim != 2:
        raise ValueError(f"`{name}` must be a matrix with a row per topic; got shape {array.shape}")
    sums = array.sum(axis=1)
    if not ((array >= 0).all() and (np.abs(sums - 1.0) < _TOLERANCE).all()):
        worst = sums[np.argmax(np.abs(sums - 1.0))]
        raise ValueError(f"the rows of `{name}` must be probabilities that sum to 1; got a sum of {worst:.6g}")
    return np.asarray(array / sums[:, None])


def _hellinger_matrix(left: Array, right: Array) -> Array:
    """Hellinger distance of every pair; differences and not affinities, which lose half the digits near zero."""
    roots = np.sqrt(left)[:, None] - np.sqrt(right)[None]
    return np.asarray(np.sqrt(0.5 * np.square(roots).sum(axis=-1)))


def _kl_matrix(left: Array, right: Array) -> Array:
    """Divergence of every pair, for ``right`` without zeros."""
    entropies = np.where(left > 0, left * np.log(np.where(left > 0, left, 1.0)), 0.0).sum(axis=1)
    return np.asarray(entropies[:, None] - left @ np.log(right).T)


def _softmax(values: Array) -> Array:
    raised = np.exp(values - values.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def _ground(ground: ArrayLike | None, words: int) -> Array | None:
    if ground is None:
        return None
    costs = np.asarray(ground, dtype=float)
    if costs.shape != (words, words):
        raise ValueError(f"`ground` must have shape {(words, words)}, a distance for each two words; got {costs.shape}")
    return costs


def _transport(p: Array, q: Array, costs: Array | None) -> float:
    if costs is None:
        return float(0.5 * np.abs(p - q).sum())
    import ot  # takes seconds to import

    return float(ot.emd2(p, q, costs))
