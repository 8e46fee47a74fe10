"""Distances between distributions, and of estimates from the truth; the likeliest words of topics.

Hidden classes and topics have no order and hidden factors no sign: an estimate is lined up before it is compared.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import rel_entr, softmax

Array = NDArray[np.float64]

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
    return float(rel_entr(left, right).sum())


def _pair(p: ArrayLike, q: ArrayLike) -> tuple[Array, Array]:
    pair = []
    for name, values in (("p", p), ("q", q)):
        array = np.asarray(values, dtype=float)
        if not ((array >= -_TOLERANCE).all() and abs(array.sum() - 1.0) < _TOLERANCE):
            raise ValueError(f"`{name}` must be probabilities that sum to 1; got a sum of {array.sum():.6g}")
        pair.append(np.maximum(array, 0.0))
    left, right = pair
    return _same_shape("", left, right)


def match_labels(cost: ArrayLike) -> NDArray[np.intp]:
    r"""Find the assignment of estimated to true labels that costs least in all.

    .. math:: \min_\sigma \sum_i C_{i, \sigma(i)}

    Args:
        cost: The square matrix :math:`C`, a row per true and a column per estimated label.

    Returns:
        :math:`\sigma`, the estimated label of each true one: ``estimate[order]`` lines up with the truth.

    Raises:
        ValueError: ``cost`` is not a square matrix of finite numbers.

    Example:
        >>> match_labels([[9.0, 1.0], [2.0, 8.0]])
        array([1, 0])
    """
    matrix = np.asarray(cost, dtype=float)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"`cost` must be a square matrix; got shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise ValueError("`cost` must hold finite numbers only; got NaN or infinity")
    return linear_sum_assignment(matrix)[1].astype(np.intp)


def match_states(
    true: ArrayLike | Mapping[str, ArrayLike], estimate: ArrayLike | Mapping[str, ArrayLike]
) -> NDArray[np.intp]:
    """Line the states of a hidden class up by the parameters that each state has.

    The cost of a pair of states is the mean absolute difference of their parameters; each group counts once.

    Args:
        true: One array, or several by name, whose first axis is the true state.
        estimate: The same for the estimated states.

    Returns:
        The estimated state of each true one, so that ``estimate[order]`` lines up with the truth.

    Example:
        >>> match_states({"loc": [0.0, 5.0]}, {"loc": [4.9, 0.2]})
        array([1, 0])
    """
    left, right = _groups(true), _groups(estimate)
    return match_labels(np.mean([_pairwise(left[name], right[name]) for name in left], axis=0))


def match_signs(true: ArrayLike, estimate: ArrayLike) -> Array:
    """Find the sign of each estimated factor that brings its loadings closest to the true ones.

    Args:
        true: The true loadings, a row per factor.
        estimate: The estimated loadings, in the same order.

    Returns:
        +1 or -1 per row.

    Example:
        >>> match_signs([[1.0, 2.0]], [[-1.1, -1.9]])
        array([-1.])
    """
    left, right = _same_shape("", np.asarray(true, float), np.asarray(estimate, float))
    axes = tuple(range(1, left.ndim))
    flipped = np.abs(left + right).sum(axis=axes) < np.abs(left - right).sum(axis=axes)
    return np.where(flipped, -1.0, 1.0)


def matched_errors(
    true: Mapping[str, ArrayLike], estimate: Mapping[str, ArrayLike], *, shared: Collection[str] = ()
) -> dict[str, float]:
    """Measure the mean absolute error of each group of parameters, with the hidden states lined up first.

    Args:
        true: The true parameters by name; the first axis is the hidden state.
        estimate: The estimated parameters, under the same names.
        shared: The names of the groups that all states have in common and that have no state axis.

    Example:
        >>> truth, estimate = {"loc": [0.0, 5.0], "slope": 1.0}, {"loc": [5.0, 1.0], "slope": 1.5}
        >>> matched_errors(truth, estimate, shared=["slope"])
        {'loc': 0.5, 'slope': 0.5}
    """
    left, right = _groups(true), _groups(estimate)
    by_state = [name for name in left if name not in shared]
    order = match_states({name: left[name] for name in by_state}, {name: right[name] for name in by_state})
    lined_up = {name: right[name][order] if name in by_state else right[name] for name in left}
    return {name: _mean_error(name, left[name], lined_up[name]) for name in left}


def _groups(parameters: ArrayLike | Mapping[str, ArrayLike]) -> dict[str, Array]:
    named = parameters if isinstance(parameters, Mapping) else {"": parameters}
    return {name: np.asarray(values, dtype=float) for name, values in named.items()}


def _pairwise(true: Array, estimate: Array) -> Array:
    left, right = true.reshape(len(true), 1, -1), estimate.reshape(1, len(estimate), -1)
    return np.asarray(np.abs(left - right).mean(axis=-1))


def _mean_error(name: str, true: Array, estimate: Array) -> float:
    left, right = _same_shape(name, true, estimate)
    return float(np.abs(left - right).mean())


def _same_shape(name: str, true: Array, estimate: Array) -> tuple[Array, Array]:
    if true.shape != estimate.shape:
        where = f" of `{name}`" if name else ""
        raise ValueError(f"the shapes{where} must agree; got {true.shape} and {estimate.shape}")
    return true, estimate


_TOPIC_TOLERANCE = 1e-4  # topics in single precision sum to one no better


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
    left, right = _topic_pair(true, estimate)
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
    left, right = _topic_pair(true, estimate)
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
    left, right = _topic_pair(true, estimate)
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
    left, right = _topic_pair(true, estimate)
    flat_left, flat_right = softmax(left, axis=1), softmax(right, axis=1)
    costs = (_kl_matrix(left, flat_right).T + _kl_matrix(right, flat_left).T) / (2 * left.shape[1])
    return {
        "kl": float(_kl_matrix(left, flat_right).diagonal().mean()),
        "hellinger": float(np.sqrt(0.5 * np.square(np.sqrt(left) - np.sqrt(right)).sum())),
        "wasserstein": float(costs[np.arange(len(costs)), match_labels(costs)].mean()),
    }


def _topic_pair(true: ArrayLike, estimate: ArrayLike) -> tuple[Array, Array]:
    return _same_shape("", _topics("true", true), _topics("estimate", estimate))


def _topics(name: str, values: ArrayLike) -> Array:
    array = np.asarray(values, dtype=float)
    if array.ndim != 2:
        raise ValueError(f"`{name}` must be a matrix with a row per topic; got shape {array.shape}")
    sums = array.sum(axis=1)
    if not ((array >= 0).all() and (np.abs(sums - 1.0) < _TOPIC_TOLERANCE).all()):
        worst = sums[np.argmax(np.abs(sums - 1.0))]
        raise ValueError(f"the rows of `{name}` must be probabilities that sum to 1; got a sum of {worst:.6g}")
    return np.asarray(array / sums[:, None])


def _hellinger_matrix(left: Array, right: Array) -> Array:
    """Hellinger distance of every pair; differences and not affinities, which lose half the digits near zero."""
    roots = np.sqrt(left)[:, None] - np.sqrt(right)[None]
    return np.asarray(np.sqrt(0.5 * np.square(roots).sum(axis=-1)))


def _kl_matrix(left: Array, right: Array) -> Array:
    """Divergence of every pair."""
    return np.asarray(rel_entr(left[:, None], right[None]).sum(axis=-1))


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


def top_words(topics: ArrayLike, vocabulary: Sequence[str], n: int = 10) -> list[list[str]]:
    """List the likeliest words of each topic, the likeliest first.

    Args:
        topics: Word probabilities or weights, a row per topic.
        vocabulary: The words of the columns.
        n: How many words of each topic.

    Example:
        >>> top_words([[0.1, 0.6, 0.3]], ["the", "cat", "sat"], n=2)
        [['cat', 'sat']]
    """
    matrix = np.asarray(topics, dtype=float)
    if matrix.ndim != 2 or matrix.shape[1] != len(vocabulary):
        raise ValueError(f"`topics` must have a column for each of {len(vocabulary)} words; got shape {matrix.shape}")
    if not 1 <= n <= len(vocabulary):
        raise ValueError(f"`n` must be between 1 and the {len(vocabulary)} words of the vocabulary; got {n}")
    return [[vocabulary[word] for word in row] for row in np.argsort(-matrix, axis=1, kind="stable")[:, :n]]
