"""Cells lost completely at random."""

import numpy as np
import pandas as pd


def delete_cells(frame: pd.DataFrame, share: float, generator: np.random.Generator) -> pd.DataFrame:
    """Set each cell to NaN with probability ``share``, whatever it and the others hold.

    Args:
        frame: A table of numbers; it is left as it is.
        share: The probability, from 0 to 1.
        generator: The source of the choice.

    Returns:
        A new table of floats.

    Example:
        >>> frame = pd.DataFrame({"a": [1, 2, 3], "b": [4, 5, 6]})
        >>> int(delete_cells(frame, 0.5, np.random.default_rng(0)).isna().sum().sum())
        3
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"`share` must be between 0 and 1; got {share}")
    lost = generator.random(frame.shape) < share
    return frame.astype(float).mask(lost)
