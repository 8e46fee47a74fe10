"""Rows that do not belong to a table."""

from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Array = NDArray[np.float64]


def replace_rows(
    frame: pd.DataFrame,
    share: float,
    kind: Literal["box", "cluster"],
    generator: np.random.Generator,
    *,
    categories: tuple[str, ...] = (),
) -> tuple[pd.DataFrame, NDArray[np.int64]]:
    """Replace a share of the rows by outliers; also the numbers of these rows.

    Args:
        frame: A complete table.
        share: Share of rows that become outliers.
        kind: ``"box"``: uniform in a box five times as wide as the data's range; ``"cluster"``: one cluster, shifted by
            one to one and a half ranges in every column.
        generator: Source of randomness.
        categories: Columns that hold categories: drawn at random in a box, one category in a cluster.

    >>> frame = pd.DataFrame({"x": np.linspace(0, 1, 100)})
    >>> spoilt, rows = replace_rows(frame, 0.1, "cluster", np.random.default_rng(0))
    >>> len(rows), bool((spoilt["x"].iloc[rows].abs() > 1).all())
    (10, True)
    """
    spoilt = frame.copy()
    rows = np.sort(generator.choice(len(frame), round(share * len(frame)), replace=False))
    for column in frame.columns:
        values = frame[column].to_numpy()
        if column in categories:
            labels = np.unique(values)
            drawn = generator.choice(labels, len(rows) if kind == "box" else 1)
        else:
            drawn = _numbers(values.astype(float), len(rows), kind, generator)
            drawn = drawn if values.dtype.kind == "f" else np.abs(np.round(drawn)).astype(values.dtype)
        changed = values.copy()
        changed[rows] = drawn
        spoilt[column] = changed
    return spoilt, rows


def _numbers(values: Array, size: int, kind: str, generator: np.random.Generator) -> Array:
    low, high = float(values.min()), float(values.max())
    middle, width = (low + high) / 2, high - low
    if kind == "box":
        return generator.uniform(middle - 2.5 * width, middle + 2.5 * width, size)
    shift = generator.choice([-1.0, 1.0]) * generator.uniform(1.0, 1.5) * width
    return middle + shift + 0.3 * values.std() * generator.standard_normal(size)
