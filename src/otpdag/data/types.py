r"""What a column holds, decided by its values: numbers, counts or categories, each choice with its reason.

The dtype plays no part: pandas stores whole numbers with a gap as floats, so that a rule on dtypes would decide
otherwise as soon as one cell is empty. The rules look at what a random part of the rows shows as well (how many values
there are, how they are spaced, where they lie), never at how many cells are missing.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from otpdag.data.reading import Label
from otpdag.errors import DataError, listed
from otpdag.spaces import Count, Discrete, Real, Space

Floats: TypeAlias = npt.NDArray[np.float64]
_CONSTANT = "constant: it tells nothing of other columns"
_NUMERIC_KINDS = {"integer", "floating", "mixed-integer-float", "decimal", "boolean", "empty"}


@dataclass(frozen=True)
class _Rules:
    """What the choices go by.

    Attributes:
        codes: So many whole numbers, evenly spaced, are taken for codes of categories.
        mean_count: Beyond this mean, a Poisson count is as good as normal, and most whole numbers are amounts.
        levels: More levels need many rows.
        share_of_names: A level for every second row: names rather than kinds.
        few_rows: With fewer nothing can be said of ids.
        share_of_text: Up to so many cells may be text in a column of numbers.
    """

    codes: int = 10
    mean_count: float = 30.0
    levels: int = 30
    share_of_names: float = 0.5
    few_rows: int = 20
    share_of_text: float = 0.2


_RULES = _Rules()


@dataclass(frozen=True)
class ColumnType:
    """What a column is taken for.

    Attributes:
        column: The column's name.
        space: What its values are; None if it cannot be a node at all.
        reason: Why, in words.
        doubt: What speaks against it and what to do then; empty if nothing does.
        useless: Whether a model is better off without it: ids, names, dates as text, a constant.
    """

    column: str
    space: Space | None
    reason: str
    doubt: str = ""
    useless: bool = False

    @property
    def kind(self) -> str:
        """``"category"``, ``"count"``, ``"number"`` or ``"none"``."""
        kinds = {Discrete: "category", Count: "count", Real: "number"}
        return "none" if self.space is None else kinds[type(self.space)]

    def __str__(self) -> str:
        size = f" of {self.space.size}" if isinstance(self.space, Discrete) else ""
        doubt = f" [doubtful: {self.doubt}]" if self.doubt else ""
        return f"{self.column}: {self.kind}{size}, {self.reason}{doubt}"


def infer_space(series: pd.Series[Any]) -> Space:
    """Suggest a space for a column: that of :func:`column_type`.

    Raises:
        DataError: The column has no value, or holds neither numbers nor categories.

    >>> infer_space(pd.Series(["wet", "dry", None]))
    Discrete(size=2)
    >>> infer_space(pd.Series([12, 0, 7])), infer_space(pd.Series([1.0, 2.5, 3.7]))
    (Count(dim=1), Real(dim=1))
    """
    space = column_type(series).space
    assert space is not None
    return space


def column_types(frame: pd.DataFrame) -> list[ColumnType]:
    """What each column is taken for; one that can be no node (dates, no value at all) says why.

    >>> frame = pd.DataFrame({"vote": [0.0, 1.0, None, 1.0], "day": pd.to_datetime(["2020-01-01"] * 4)})
    >>> [(one.column, one.kind) for one in column_types(frame)]
    [('vote', 'category'), ('day', 'none')]
    """
    types = []
    for place, name in enumerate(frame.columns):
        try:
            types.append(column_type(frame.iloc[:, place]))
        except DataError as error:
            types.append(ColumnType(str(name), None, str(error)))
    return types


def column_type(series: pd.Series[Any]) -> ColumnType:
    """Decide what a column holds, by its values.

    - Text, Booleans and pandas categories are categories, as many as there are; text is taken for numbers if nearly all
      cells are numbers of more than ten values (and the cells that are none must be mended before a fit).
    - Any two values are a category, however they are written: 0/1, 1.0/2.0, -1/1.
    - Up to ten whole numbers that begin at 0 or 1 or are evenly spaced (10, 20, 30) are codes of categories.
    - Other whole numbers are counts if none is negative and they lie as counts do: near zero, with a tail to the right.
    - All other numbers are real. Rates, shares and durations are among them: name a tighter mechanism yourself.

    Args:
        series: A column.

    Returns:
        The choice, the reason, and what is doubtful about it.

    Raises:
        DataError: The column has no value, or holds neither numbers nor categories.

    >>> column_type(pd.Series([10, 20, 30, 20, None, 10, 30], name="code")).doubt
    'amounts rather than codes? then m.Normal()'
    """
    name, present = str(series.name), series.dropna()
    where = f"column {series.name!r}"
    if present.empty:
        raise DataError(f"{where} must hold at least one value; all {len(series)} are missing")
    if isinstance(present.dtype, pd.CategoricalDtype):
        return _of_levels(name, len(present.dtype.categories), len(present), "a pandas Categorical")
    kind = pd.api.types.infer_dtype(present, skipna=True)
    if kind == "boolean":
        return ColumnType(name, Discrete(2), "False and True")
    if kind.startswith(("datetime", "timedelta", "date", "period", "time")):
        raise DataError(
            f"{where} must hold numbers or categories; found {as_label(present.iloc[0])!r}, a time: make it a number, "
            "for instance the days since the first, or a category such as the month"
        )
    if kind in _NUMERIC_KINDS:
        return _of_numbers(name, as_numbers(present, where, "numbers or categories"))
    if kind.startswith("complex"):
        as_numbers(present, where, "numbers or categories")  # refuses
    return _of_text(name, present)


# -- text --------------------------------------------------------------------------------------------------------------


def _of_text(name: str, present: pd.Series[Any]) -> ColumnType:
    numbers = pd.to_numeric(present.astype(str), errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    odd = np.isnan(numbers)
    whole = np.unique(numbers[~odd])
    if odd.mean() <= _RULES.share_of_text and len(whole) > _RULES.codes:
        decided = _of_numbers(name, numbers[~odd])
        if not isinstance(decided.space, Discrete):
            return _numbers_as_text(decided, present[odd])
    levels = present.map(as_label).nunique()
    decided = _of_levels(name, levels, len(present), "text")
    if levels > _RULES.codes and _are_dates(present):
        doubt = "dates? then make them numbers, or leave the column out"
        return ColumnType(name, decided.space, decided.reason, doubt, useless=True)
    return decided


def _numbers_as_text(decided: ColumnType, odd: pd.Series[Any]) -> ColumnType:
    """Numbers, but for some cells; a fit reads no text as numbers, so that these must be mended first."""
    if odd.empty:
        doubt = "the numbers are text: pd.to_numeric makes them numbers"
    else:
        doubt = (
            f"{len(odd)} of the cells hold text, first {as_label(odd.iloc[0])!r} in row {odd.index[0]!r}: "
            "pd.to_numeric(column, errors='coerce') makes them missing"
        )
    return ColumnType(decided.column, decided.space, decided.reason, doubt)


def _of_levels(name: str, levels: int, rows: int, what: str) -> ColumnType:
    reason = f"{what} with {levels} level{'s' * (levels != 1)}"
    doubt, are_names = "", rows >= _RULES.few_rows and levels >= _RULES.share_of_names * rows
    if levels == 1:
        doubt = _CONSTANT
    elif are_names:
        doubt = f"{levels} levels in {rows} rows: names or ids rather than kinds; leave the column out"
    elif levels > _RULES.levels:
        doubt = f"{levels} levels need many rows: join rare ones, or leave the column out"
    return ColumnType(name, Discrete(max(2, levels)), reason, doubt, useless=levels == 1 or are_names)


def _are_dates(present: pd.Series[Any]) -> bool:
    """Whether text reads as days in the usual form."""
    return bool(present.astype(str).str.fullmatch(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?").all())


# -- numbers -----------------------------------------------------------------------------------------------------------


def _of_numbers(name: str, numbers: Floats) -> ColumnType:
    distinct = np.unique(numbers)
    levels = len(distinct)
    if levels == 1:
        return ColumnType(name, Real(), f"one value, {distinct[0]:g}", _CONSTANT, useless=True)
    whole = bool(np.isfinite(distinct).all() and (distinct == np.floor(distinct)).all())
    if levels == 2 and (_is_repeated(numbers, 2) or (whole and distinct[0] == 0 and distinct[1] == 1)):
        return ColumnType(name, Discrete(2), f"two values, {_shown(distinct)}")
    if not whole:
        reason = f"numbers with fractions, {levels} values"
        return ColumnType(name, Real(), reason, _doubt_of_real(numbers, distinct))
    if levels <= _RULES.codes and (codes := _codes(name, numbers, distinct)):
        return codes
    return _of_many_whole(name, numbers, distinct)


def _codes(name: str, numbers: Floats, distinct: Floats) -> ColumnType | None:
    """Whole numbers that are codes: from zero or one on, or evenly spaced; None if they are something else."""
    levels, first = len(distinct), distinct[0]
    step = np.diff(distinct)
    if first == 0 and (step == 1).all():
        return ColumnType(name, Discrete(levels), f"whole numbers 0 to {levels - 1}")
    if not _is_repeated(numbers, levels):
        return None
    if first == 1 and (step == 1).all():
        return ColumnType(name, Discrete(levels), f"whole numbers 1 to {levels}")
    if step[0] > 1 and (step == step[0]).all() and first in (0, step[0]):
        doubt = "amounts rather than codes? then m.Normal()"
        return ColumnType(name, Discrete(levels), f"{levels} values, evenly spaced: {_shown(distinct)}", doubt)
    return None


def _of_many_whole(name: str, numbers: Floats, distinct: Floats) -> ColumnType:
    low, mean = float(distinct[0]), float(numbers.mean())
    reason = f"whole numbers from {low:g} to {distinct[-1]:g}"
    if _is_row_number(numbers, distinct):
        doubt = "every row has its own, nearly one after another: an id, a row number or a time; leave an id out"
        return ColumnType(name, Real(), reason, doubt, useless=True)
    if unlike := _unlike_counts(numbers, low, mean):
        return ColumnType(name, Real(), f"{reason}, {unlike}", _doubt_of_real(numbers, distinct))
    ratio = float(numbers.var()) / mean
    spread_out = ratio > 5 and len(numbers) >= _RULES.few_rows
    doubt = f"their variance is {ratio:.0f} times their mean: m.NegativeBinomial()?" if spread_out else ""
    return ColumnType(name, Count(), f"{reason}, as counts lie", doubt)


def _unlike_counts(numbers: Floats, low: float, mean: float) -> str:
    """What tells whole numbers from counts, which lie near zero with a tail to the right; empty if nothing does."""
    if low < 0:
        return "some of them negative"
    if low > max(2.0, mean / 3) or mean > _RULES.mean_count:
        return "too far from zero for counts"
    return "with their tail on the left, unlike counts" if _leans_left(numbers) else ""


def _is_repeated(numbers: Floats, levels: int) -> bool:
    """Whether values come back, as those of categories do."""
    return len(numbers) >= 2 * levels


def _leans_left(numbers: Floats) -> bool:
    """Whether the long tail is clearly on the left: the third moment, beyond twice its error."""
    centred = numbers - numbers.mean()
    skewness = float((centred**3).mean() / max((centred**2).mean() ** 1.5, 1e-300))
    return skewness < -max(0.3, 2 * math.sqrt(6 / len(numbers)))


def _is_row_number(numbers: Floats, distinct: Floats) -> bool:
    """Whether all differ and fill most of their range."""
    rows = len(numbers)
    return rows >= _RULES.few_rows and len(distinct) == rows and distinct[-1] - distinct[0] <= 1.5 * rows


def _doubt_of_real(numbers: Floats, distinct: Floats) -> str:
    if len(distinct) <= _RULES.codes and _is_repeated(numbers, len(distinct)):
        return f"only {len(distinct)} values, {_shown(distinct)}: if they are codes, m.Categorical({len(distinct)})"
    zeros = float((numbers == 0).mean())
    if distinct[0] >= 0 and zeros >= 0.25 and len(numbers) >= _RULES.few_rows:
        return f"{zeros:.0%} are zero: no normal column"
    return ""


def _shown(values: Iterable[float]) -> str:
    return listed(list(values), most=4, show=lambda value: f"{value:g}")


# -- labels and cells --------------------------------------------------------------------------------------------------


def find_labels(present: pd.Series[Any]) -> tuple[Label, ...] | None:
    """The categories of a column without missing values, or None if it holds numbers (or nothing)."""
    if isinstance(present.dtype, pd.CategoricalDtype):
        return tuple(as_label(value) for value in present.dtype.categories)
    kind = pd.api.types.infer_dtype(present, skipna=True)
    if kind == "boolean":
        return (False, True)
    if kind in _NUMERIC_KINDS or kind.startswith(("datetime", "timedelta", "complex")):
        return None
    try:
        distinct = present.unique()
    except TypeError:
        odd = next((value for value in present.array if not isinstance(value, Hashable)), "a list inside another")
        raise DataError(f"column {present.name!r} must hold labels; found {odd!r:.100}") from None
    return tuple(sorted({as_label(value) for value in distinct}, key=lambda x: (type(x).__name__, x)))


def count_categories(series: pd.Series[Any]) -> int | None:
    """How many categories a column shows, if it must be one: all values of text; None for numbers that are no codes."""
    labels = find_labels(series.dropna())
    if labels is not None:
        return max(2, len(labels))
    space = infer_space(series)
    return space.size if isinstance(space, Discrete) else None


def find_number_labels(present: pd.Series[Any], size: int) -> tuple[Label, ...] | None:
    """Numbers that name categories: exactly ``size`` of them, other than the codes 0, 1, ...; None if they do not.

    >>> find_number_labels(pd.Series([30.0, 10.0, 20.0]), 3)
    (10, 20, 30)
    """
    if pd.api.types.infer_dtype(present, skipna=True) not in _NUMERIC_KINDS:
        return None
    distinct = np.unique(present.to_numpy(dtype=np.float64, na_value=np.nan))
    if len(distinct) != size or not np.isfinite(distinct).all() or np.array_equal(distinct, np.arange(size)):
        return None
    return tuple(int(value) if value == np.floor(value) else float(value) for value in distinct)


def in_blocks(series: pd.Series[Any], rows: int = 2**16) -> Iterator[pd.Series[Any]]:
    """A column part by part: what is looked up in a long one takes as much memory as the column, and keeps it."""
    for begin in range(0, len(series), rows):
        yield series.iloc[begin : begin + rows]


def as_label(value: Any) -> Label:
    """A category as a value that JSON knows."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, (str, bool, int, float)) else str(value)


def as_numbers(series: pd.Series[Any], where: str, expected: str) -> Floats:
    """A column as floats, NaN where missing; text and dates are refused even if they look like numbers."""
    if isinstance(series.dtype, np.dtype) and series.dtype.kind in "iuf":
        return series.to_numpy(dtype=np.float64)
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(object)
    present = series.dropna()
    if pd.api.types.infer_dtype(present, skipna=True) not in _NUMERIC_KINDS:
        odd = [not isinstance(value, (int, float, np.number, np.bool_)) for value in present.array]
        place = int(np.flatnonzero(series.notna())[odd.index(True) if True in odd else 0])
        odd_value = as_label(series.iloc[place])
        raise DataError(f"{where} must hold {expected}; found {odd_value!r} in row {place}")
    return series.to_numpy(dtype=np.float64, na_value=np.nan)
