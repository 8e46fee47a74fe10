"""What a pandas column holds: numbers, categories and their labels, and the space to suggest for it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from otpdag.data.column import Label
from otpdag.errors import DataError
from otpdag.spaces import Count, Discrete, Real, Space

__all__ = ["Floats", "as_label", "as_numbers", "find_labels", "infer_space"]


Floats: TypeAlias = npt.NDArray[np.float64]
_NUMERIC_KINDS = {"integer", "floating", "mixed-integer-float", "decimal", "boolean", "empty"}
_MOST_CATEGORIES_GUESSED = 10  # whole numbers 0..K-1 with K up to here are taken for categories


def infer_space(series: pd.Series[Any]) -> Space:
    """Suggest a space for a column, by this rule.

    - Text, Booleans and pandas categories: :class:`~otpdag.spaces.Discrete`, as many as there are.
    - Whole numbers that are exactly 0, 1, ..., K-1 with K from 2 to 10: ``Discrete(K)``.
    - Other whole numbers, none negative: :class:`~otpdag.spaces.Count`.
    - All other numbers: :class:`~otpdag.spaces.Real`.

    A floating column is taken for whole numbers only if all its values are whole and some are missing,
    because pandas stores integers with gaps that way. Rates, shares and durations come out as ``Real``: name
    a tighter space yourself.

    Args:
        series: A column.

    Returns:
        The suggestion.

    Raises:
        DataError: The column has no value, or holds neither numbers nor categories.

    >>> infer_space(pd.Series(["wet", "dry", None]))
    Discrete(size=2)
    >>> infer_space(pd.Series([12, 0, 7])), infer_space(pd.Series([1.0, 2.5]))
    (Count(dim=1), Real(dim=1))
    """
    present = series.dropna()
    where = f"column {series.name!r}"
    if present.empty:
        raise DataError(f"{where} must hold at least one value; all {len(series)} are missing")
    labels = find_labels(present)
    if labels is not None:
        return Discrete(max(2, len(labels)))
    numbers = as_numbers(present, where, "numbers or categories")
    whole = bool((numbers == np.floor(numbers)).all())
    if pd.api.types.is_float_dtype(present.dtype) and len(present) == len(series):
        whole = False
    if not whole:
        return Real()
    distinct = np.unique(numbers)
    if 2 <= len(distinct) <= _MOST_CATEGORIES_GUESSED and np.array_equal(distinct, np.arange(len(distinct))):
        return Discrete(len(distinct))
    return Count() if distinct[0] >= 0 else Real()


def find_labels(present: pd.Series[Any]) -> tuple[Label, ...] | None:
    """The categories of a column without missing values, or None if it holds numbers (or nothing)."""
    if isinstance(present.dtype, pd.CategoricalDtype):
        return tuple(as_label(value) for value in present.dtype.categories)
    kind = pd.api.types.infer_dtype(present, skipna=True)
    if kind == "boolean":
        return (False, True)
    if kind in _NUMERIC_KINDS or kind.startswith(("datetime", "timedelta", "complex")):
        return None
    return tuple(sorted({as_label(value) for value in present.unique()}, key=lambda x: (type(x).__name__, x)))


def as_label(value: Any) -> Label:
    """A category as a value that JSON knows."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, (str, bool, int, float)) else str(value)


def as_numbers(series: pd.Series[Any], where: str, expected: str) -> Floats:
    """A column as floats, NaN where missing; text and dates are refused even if they look like numbers."""
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(object)
    present = series.dropna()
    if pd.api.types.infer_dtype(present, skipna=True) not in _NUMERIC_KINDS:
        odd = [not isinstance(value, (int, float, np.number, np.bool_)) for value in present.array]
        place = int(np.flatnonzero(series.notna())[odd.index(True) if True in odd else 0])
        odd_value = as_label(series.iloc[place])
        raise DataError(f"{where} must hold {expected}; found {odd_value!r} in row {place}")
    return series.to_numpy(dtype=np.float64, na_value=np.nan)
