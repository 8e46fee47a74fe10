"""A hidden class behind a Normal, a count and a discrete node, with an edge between two of them."""

import numpy as np
import pandas as pd

from otpdag.datasets._truth import Truth, draw_states, draw_weights


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
