"""A hidden class behind discrete answers."""

import numpy as np
import pandas as pd

from otpdag.datasets._truth import Array, Truth, draw_states, draw_weights

_FAVOURITE = 0.45  # probability that each class adds to one state of its own


def latent_class(
    rows: int, generator: np.random.Generator, *, classes: int = 2, children: int = 4, states: int = 3
) -> tuple[pd.DataFrame, Truth]:
    r"""Draw a latent class model: a hidden class ``z`` and children ``x1``, ``x2``, ... independent given it.

    .. math:: z \sim \pi, \qquad x_j \mid z \sim \mathrm{Categorical}(P_{j, z})

    In each class a child has its own favourite state, with probability 0.45 or more, so that the classes are
    well apart; no class weight is below 0.6 / classes.

    Args:
        rows: How many rows.
        generator: The source of the truth and of the rows.
        classes: How many states the hidden class has; at most ``states``.
        children: How many children.
        states: How many states each child has.

    Returns:
        The children as integer codes from 0 (the class is not in the table), and the truth.

    Example:
        >>> frame, truth = latent_class(100, np.random.default_rng(0))
        >>> list(frame), truth["x1"]["probs"].shape
        (['x1', 'x2', 'x3', 'x4'], (2, 3))
    """
    if classes > states:
        raise ValueError(f"`classes` must be at most `states` = {states}; got {classes}")
    names = [f"x{j + 1}" for j in range(children)]
    probs = draw_weights(classes, 0.6 / classes, generator)
    tables = {name: _table(classes, states, generator) for name in names}
    z = draw_states(probs, rows, generator)
    frame = pd.DataFrame({name: draw_states(tables[name][z], rows, generator) for name in names})
    return frame, {"z": {"probs": probs}} | {name: {"probs": tables[name]} for name in names}


def _table(classes: int, states: int, generator: np.random.Generator) -> Array:
    """Draw a row per class, each with another favourite state."""
    table = (1.0 - _FAVOURITE) * generator.dirichlet(np.full(states, 2.0), size=classes)
    table[np.arange(classes), generator.permutation(states)[:classes]] += _FAVOURITE
    return table
