"""What all estimators share of scikit-learn's contract: seeds, and an error where nothing is fitted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from otpdag.errors import DataError, NotFittedError

RandomState = int | np.random.RandomState | None


def seed_of(random_state: RandomState) -> int:
    """The seed that a ``random_state`` stands for: itself, or one that it draws; None is another each time.

    >>> seed_of(3)
    3
    """
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def check_fitted(estimator: object, call: str = "fit(X)") -> None:
    """Refuse to use an estimator before its ``fit``."""
    model = getattr(estimator, "model_", None)
    if model is None or not model.is_fitted:
        raise NotFittedError(f"this {type(estimator).__name__} is not fitted yet: call {call} first")


def checked_rows(estimator: object, X: Any, *, first: bool, dtype: DTypeLike, **options: Any) -> NDArray[Any]:
    """Rows (n, features) as scikit-learn checks them, with an error that is this library's too."""
    least = 2 if first else 1
    try:
        return np.asarray(validate_data(estimator, X, reset=first, dtype=dtype, ensure_min_samples=least, **options))
    except ValueError as error:
        raise DataError(str(error)) from None
