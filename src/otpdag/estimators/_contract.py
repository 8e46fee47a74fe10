"""What all estimators share: each is the face of a model, and keeps scikit-learn's contract.

Arguments of estimators are fields of a dataclass: its ``__init__`` keeps them as they are, as scikit-learn asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import validate_data

from otpdag.engine import FitResult
from otpdag.errors import DataError, NotFittedError, check_count
from otpdag.model import Model

RandomState = int | np.random.RandomState | None


def drawn_seed(random_state: RandomState) -> int:
    """A seed that a ``random_state`` draws; None is another each time."""
    return int(check_random_state(random_state).randint(2**31 - 1))


def seed_of(random_state: RandomState) -> int:
    """The seed that a ``random_state`` stands for: itself, or one that it draws.

    >>> seed_of(3)
    3
    """
    return int(random_state) if isinstance(random_state, int | np.integer) else drawn_seed(random_state)


class ModelEstimator(BaseEstimator):
    """An estimator with a model behind it.

    Attributes:
        fit_call: What to call first.
        allows_gaps: Whether cells may be missing.
        reads: What else scikit-learn's tags say of the input.
    """

    fit_call: ClassVar[str] = "fit(X)"
    allows_gaps: ClassVar[bool] = False
    reads: ClassVar[Mapping[str, bool]] = {}

    model_: Model
    result_: FitResult

    @property
    def _fitted(self) -> Model:
        """The model, which must be fitted."""
        model: Model | None = getattr(self, "model_", None)
        if model is None or not model.is_fitted:
            raise NotFittedError(f"this {type(self).__name__} is not fitted yet: call {self.fit_call} first")
        return model

    def _check_counts(self, *names: str) -> None:
        """Refuse arguments that are no whole numbers of at least one; those that are None by default may be None."""
        for name in names:
            value = getattr(self, name)
            if value is not None or getattr(type(self), name) is not None:
                check_count(name, value)

    def _checked(self, X: Any, *, first: bool = False, least: int = 1, **options: Any) -> Any:
        """Rows (n, features) as scikit-learn checks them, with an error that is this library's too."""
        options = {"dtype": np.float64, "ensure_all_finite": "allow-nan" if self.allows_gaps else True, **options}
        try:
            return validate_data(self, X, reset=first, ensure_min_samples=least if first else 1, **options)
        except ValueError as error:
            raise DataError(str(error)) from None

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags = replace(tags.input_tags, allow_nan=self.allows_gaps, **self.reads)
        return tags
