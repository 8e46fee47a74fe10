"""One hidden Normal factor behind several Normal indicators."""

import numpy as np
import pandas as pd

from otpdag.datasets._truth import Truth

_NEGATIVE_SHARE = 0.2  # of the loadings


def factor(rows: int, generator: np.random.Generator, *, indicators: int = 4) -> tuple[pd.DataFrame, Truth]:
    r"""Draw a one-factor model: a hidden ``f`` and its indicators ``x1``, ``x2``, ...

    .. math:: f \sim N(0, 1), \qquad x_j = b_j + w_j f + s_j u_j, \quad u_j \sim N(0, 1)

    Loadings are between 0.5 and 1.5 in size, one in five negative; the first one is positive. Intercepts are
    between -1 and 1, noise scales between 0.4 and 1.

    Args:
        rows: How many rows.
        generator: The source of the truth and of the rows.
        indicators: How many indicators.

    Returns:
        The indicators (the factor is not in the table), and the truth.

    Example:
        >>> frame, truth = factor(100, np.random.default_rng(0))
        >>> list(frame), truth["x2"]["weight"].shape
        (['x1', 'x2', 'x3', 'x4'], (1,))
    """
    loading = generator.uniform(0.5, 1.5, indicators)
    loading[1:] *= np.where(generator.random(indicators - 1) < _NEGATIVE_SHARE, -1.0, 1.0)
    intercept = generator.uniform(-1.0, 1.0, indicators)
    scale = generator.uniform(0.4, 1.0, indicators)
    hidden = generator.standard_normal((rows, 1))
    values = intercept + hidden * loading + scale * generator.standard_normal((rows, indicators))

    names = [f"x{j + 1}" for j in range(indicators)]
    truth: Truth = {"f": {"loc": np.array(0.0), "scale": np.array(1.0)}}
    for j, name in enumerate(names):
        truth[name] = {"loc": intercept[j, ...], "weight": loading[j : j + 1], "scale": scale[j, ...]}
    return pd.DataFrame(values, columns=names), truth


def siblings(rows: int, generator: np.random.Generator) -> tuple[pd.DataFrame, Truth]:
    """Draw two indicators of one hidden factor: all they tell of it is how they correlate.

    Args:
        rows: How many rows.
        generator: The source of the truth and of the rows.

    Returns:
        The two indicators ``x1`` and ``x2``, and the truth, as from ``factor``.

    Example:
        >>> frame, truth = siblings(100, np.random.default_rng(0))
        >>> list(frame)
        ['x1', 'x2']
    """
    return factor(rows, generator, indicators=2)
