"""Tables of other libraries (polars, arrow and whatever narwhals knows) as frames of pandas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import narwhals
import numpy as np
import pandas as pd

from otpdag.errors import DataError

__all__ = ["as_frame", "known_table"]


def known_table(data: Any) -> Any:
    """The same data, as a pandas frame if they are a table of another library; anything else as it is.

    Raises:
        DataError: The table is lazy: its cells are not there yet.
    """
    if isinstance(data, pd.DataFrame | Mapping | np.ndarray):
        return data
    table = narwhals.from_native(data, pass_through=True)
    if isinstance(table, narwhals.LazyFrame):
        raise DataError(
            f"data must be a table with its cells; got a lazy {type(data).__name__}: collect() or compute() it first"
        )
    if not isinstance(table, narwhals.DataFrame):
        return data
    return pd.DataFrame({name: _cells(table[name]) for name in table.columns})


def as_frame(data: Any) -> pd.DataFrame:
    """A table of any library, or a dictionary of columns, as a pandas frame with one column of each name.

    >>> as_frame({"x": [1.0, None], "k": ["a", "b"]}).shape
    (2, 2)
    """
    table = known_table(data)
    if isinstance(table, Mapping):
        try:
            table = pd.DataFrame({name: np.asarray(column) for name, column in table.items()})
        except ValueError as error:
            raise DataError(f"data must be a dictionary of columns of one length; {error}") from None
    if not isinstance(table, pd.DataFrame):
        raise DataError(f"data must be a DataFrame or a dictionary of columns; got {type(data).__name__}")
    if not table.columns.is_unique:
        name = table.columns[table.columns.duplicated()][0]
        raise DataError(f"column {name!r} must be there once; the table has several of that name")
    return table


def _cells(column: narwhals.Series[Any]) -> Any:
    """Numbers as an array with NaN for what is missing, anything else cell by cell with None."""
    if column.dtype.is_numeric() and not column.dtype.is_decimal():
        return column.to_numpy()
    return column.to_list()
