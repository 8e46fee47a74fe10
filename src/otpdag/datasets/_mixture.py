"""A mixture of Normal vectors."""

import numpy as np
import pandas as pd

from otpdag.datasets._truth import Array, Truth, draw_states, draw_weights

_BOX = 3.0  # means lie between minus and plus this,
_SEPARATION = 2.5  # no nearer to each other than this


def mixture(
    rows: int, generator: np.random.Generator, *, components: int = 3, dim: int = 2
) -> tuple[pd.DataFrame, Truth]:
    r"""Draw a Gaussian mixture: a hidden class ``z`` and a vector ``x``, its means and scales by class.

    .. math:: z \sim \pi, \qquad x = \mu_z + \sigma_z \odot u, \quad u \sim N(0, I)

    Means lie in a box of side 6, at least 2.5 apart; scales are between 0.5 and 1.2; no weight is below 0.15.

    Args:
        rows: How many rows.
        generator: The source of the truth and of the rows.
        components: How many classes; at most 6.
        dim: The length of the vector.

    Returns:
        The columns ``x.0``, ``x.1``, ... (the class is not in the table), and the truth.

    Example:
        >>> frame, truth = mixture(100, np.random.default_rng(0))
        >>> list(frame), truth["x"]["loc"].shape
        (['x.0', 'x.1'], (3, 2))
    """
    if not 1 <= components <= 6:
        raise ValueError(f"`components` must be between 1 and 6; got {components}")
    probs = draw_weights(components, 0.15, generator)
    loc = _separated(components, dim, generator)
    scale = generator.uniform(0.5, 1.2, (components, dim))
    z = draw_states(probs, rows, generator)
    x = loc[z] + scale[z] * generator.standard_normal((rows, dim))
    truth = {"z": {"probs": probs}, "x": {"loc": loc, "scale": scale}}
    return pd.DataFrame(x, columns=[f"x.{j}" for j in range(dim)]), truth


def _separated(components: int, dim: int, generator: np.random.Generator) -> Array:
    """Draw points one by one, each again until it is far enough from those before."""
    points = np.empty((0, dim))
    for attempt in range(1, 10_001):
        if len(points) == components:
            return points
        point = generator.uniform(-_BOX, _BOX, dim)
        if (np.linalg.norm(points - point, axis=1) >= _SEPARATION).all():
            points = np.vstack([points, point])
        elif attempt % 100 == 0:
            points = points[:0]
    raise ValueError(f"cannot place {components} means {_SEPARATION} apart in {dim} dimensions")
