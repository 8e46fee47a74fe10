"""What every baseline returns."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """Where a baseline ended, and how it got there.

    Attributes:
        params: Estimates by name; a leading axis counts data sets where several were fitted at once.
        objective: What the baseline maximises, at the end: one number for each data set.
        history: The estimates by name after 0, 1, 2, ... steps: one more leading axis.
        failed: Which data sets met a number that is not finite; they keep their last good estimate.
        seconds: Processor time of the fit, without keeping its history; not a number where that is not measured.
    """

    params: dict[str, Array]
    objective: Array
    history: dict[str, Array] = field(default_factory=dict, repr=False)
    failed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    seconds: float = float("nan")


def log_sum_exp(values: Array, axis: int) -> Array:
    """Logarithm of the sum of exponentials of finite numbers, without overflow."""
    top = values.max(axis, keepdims=True)
    return np.asarray(np.log(np.exp(values - top).sum(axis)) + top.squeeze(axis))
