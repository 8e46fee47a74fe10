"""Hidden classes have no names and hidden factors no sign: an estimate is lined up before it is compared."""

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment


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


def match_signs(true: ArrayLike, estimate: ArrayLike) -> NDArray[np.float64]:
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


def _groups(parameters: ArrayLike | Mapping[str, ArrayLike]) -> dict[str, NDArray[np.float64]]:
    named = parameters if isinstance(parameters, Mapping) else {"": parameters}
    return {name: np.asarray(values, dtype=float) for name, values in named.items()}


def _pairwise(true: NDArray[np.float64], estimate: NDArray[np.float64]) -> NDArray[np.float64]:
    left, right = true.reshape(len(true), 1, -1), estimate.reshape(1, len(estimate), -1)
    return np.asarray(np.abs(left - right).mean(axis=-1))


def _mean_error(name: str, true: NDArray[np.float64], estimate: NDArray[np.float64]) -> float:
    left, right = _same_shape(name, true, estimate)
    return float(np.abs(left - right).mean())


def _same_shape(
    name: str, true: NDArray[np.float64], estimate: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if true.shape != estimate.shape:
        where = f" of `{name}`" if name else ""
        raise ValueError(f"the shapes{where} must agree; got {true.shape} (true) and {estimate.shape} (estimate)")
    return true, estimate
