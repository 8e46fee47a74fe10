"""Small models with their truth: factors, classes, mixtures, a mixed network, a chain of counts; and cells lost.

A generator takes the number of rows and a numpy ``Generator``, draws a truth and then rows, and returns both.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from otpdag.datasets import Truth, draw_states

Array = NDArray[np.float64]


def draw_weights(states: int, minimum: float, generator: np.random.Generator) -> Array:
    """Draw the weights of a hidden class uniformly among those with no state rarer than ``minimum``."""
    return minimum + (1.0 - states * minimum) * generator.dirichlet(np.ones(states))


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
    loading[1:] *= np.where(generator.random(indicators - 1) < 0.2, -1.0, 1.0)
    intercept = generator.uniform(-1.0, 1.0, indicators)
    scale = generator.uniform(0.4, 1.0, indicators)
    hidden = generator.standard_normal((rows, 1))
    values = intercept + hidden * loading + scale * generator.standard_normal((rows, indicators))

    names = [f"x{j + 1}" for j in range(indicators)]
    truth: Truth = {"f": {"loc": np.array(0.0), "scale": np.array(1.0)}}
    for j, name in enumerate(names):
        truth[name] = {"loc": intercept[j, ...], "weight": loading[j : j + 1], "scale": scale[j, ...]}
    return pd.DataFrame(values, columns=names), truth


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


def _table(classes: int, states: int, generator: np.random.Generator, favourite: float = 0.45) -> Array:
    """Draw a row per class, each with another state that has ``favourite`` more probability."""
    table = (1.0 - favourite) * generator.dirichlet(np.full(states, 2.0), size=classes)
    table[np.arange(classes), generator.permutation(states)[:classes]] += favourite
    return table


def mixed_dag(rows: int, generator: np.random.Generator) -> tuple[pd.DataFrame, Truth]:
    r"""Draw a mixed network: hidden ``h`` -> ``x1``, ``x2``, ``x3``, and ``x1`` -> ``x2``.

    .. math::
        h &\sim \pi \text{ (3 states)}, & x_1 \mid h &\sim N(m_h, s_h^2), \\
        x_2 \mid h, x_1 &\sim \mathrm{Poisson}(e^{a_h + w x_1}), & x_3 \mid h &\sim \mathrm{Categorical}(P_h)

    Means are about 2 apart and scales between 0.5 and 1; the log-rates at ``x1`` = 0 are between 0 and 2, in
    any order; the slope is between 0.1 and 0.3 in size; no weight is below 0.2.

    Args:
        rows: How many rows.
        generator: The source of the truth and of the rows.

    Returns:
        The columns ``x1`` (real), ``x2`` (counts) and ``x3`` (codes 0 to 2), and the truth.

    Example:
        >>> frame, truth = mixed_dag(100, np.random.default_rng(0))
        >>> list(frame), truth["x2"]["log_rate"].shape, truth["x2"]["weight"].shape
        (['x1', 'x2', 'x3'], (3,), (1,))
    """
    probs = draw_weights(3, 0.2, generator)
    loc = np.array([-2.0, 0.0, 2.0]) + generator.uniform(-0.3, 0.3, 3)
    scale = generator.uniform(0.5, 1.0, 3)
    log_rate = generator.permutation(generator.uniform([0.0, 0.8, 1.6], [0.4, 1.2, 2.0]))
    weight = generator.uniform(0.1, 0.3, 1) * generator.choice([-1.0, 1.0])
    table = 0.1 + 0.7 * generator.dirichlet(np.ones(3), size=3)

    h = draw_states(probs, rows, generator)
    x1 = loc[h] + scale[h] * generator.standard_normal(rows)
    x2 = generator.poisson(np.exp(log_rate[h] + weight[0] * x1))
    x3 = draw_states(table[h], rows, generator)
    truth = {
        "h": {"probs": probs},
        "x1": {"loc": loc, "scale": scale},
        "x2": {"log_rate": log_rate, "weight": weight},
        "x3": {"probs": table},
    }
    return pd.DataFrame({"x1": x1, "x2": x2, "x3": x3}), truth


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


def _separated(components: int, dim: int, generator: np.random.Generator, apart: float = 2.5) -> Array:
    """Draw points in a box of side 6 one by one, each again until it is far enough from those before."""
    points = np.empty((0, dim))
    for attempt in range(1, 10_001):
        if len(points) == components:
            return points
        point = generator.uniform(-3.0, 3.0, dim)
        if (np.linalg.norm(points - point, axis=1) >= apart).all():
            points = np.vstack([points, point])
        elif attempt % 100 == 0:
            points = points[:0]
    raise ValueError(f"cannot place {components} means {apart} apart in {dim} dimensions")


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


def poisson_chain(
    sequences: int, length: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64], Truth]:
    """Draw counts from a Poisson hidden Markov model with four states (Section 5.2 of the paper).

    The rates come from U(10, 20), U(30, 40), U(50, 60) and U(80, 90), the probability to stay in a state from
    U(0.8, 0.9); a chain that moves goes to any other state alike, and begins in any. Every sequence has its own path.

    Args:
        sequences: Number of sequences.
        length: Steps of each.
        rng: Source of all randomness.

    Returns:
        The counts and the states, both (sequences, length), and the truth.
    """
    rates = np.array([rng.uniform(low, high) for low, high in ((10, 20), (30, 40), (50, 60), (80, 90))])
    stay = rng.uniform(0.8, 0.9)
    size = len(rates)
    states = np.empty((sequences, length), dtype=np.int64)
    states[:, 0] = rng.integers(size, size=sequences)
    for step in range(1, length):
        moved = (states[:, step - 1] + rng.integers(1, size, size=sequences)) % size
        states[:, step] = np.where(rng.random(sequences) < stay, states[:, step - 1], moved)
    truth: Truth = {
        "z": {"stay": np.array(stay)},
        "z[0]": {"probs": np.full(size, 1 / size)},
        "x": {"log_rate": np.log(rates)},
    }
    return rng.poisson(rates[states]), states, truth
