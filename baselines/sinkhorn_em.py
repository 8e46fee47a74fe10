"""Sinkhorn EM (Mena, Nejatbakhsh, Varol & Niles-Weed 2020, https://arxiv.org/abs/2006.16548).

The E-step is an entropic transport plan between the rows and the components, so that the mean responsibility of each
component **is** its weight; the M-step is that of EM. Fixed variances and weights, many data sets at once.
"""

import numpy as np

from baselines.base import Array, Estimate, log_sum_exp
from baselines.em import run_steps


def fit(
    data: Array,
    *,
    means: Array,
    variances: Array,
    weights: Array,
    steps: int = 300,
    iterations: int = 20,
    tolerance: float = 1e-6,
) -> Estimate:
    """Minimise the entropic transport loss over the means.

    Args:
        data: Data sets (sims, n, d).
        means: Starts (sims, k, d).
        variances: Fixed variances, broadcast to (sims, k, d).
        weights: Fixed weights (sims, k).
        steps: Steps; all are done.
        iterations: Most Sinkhorn iterations in one E-step; each begins with the potentials of the last one.
        tolerance: A plan is good when its column sums are this close to the weights.

    Returns:
        ``means`` with their history; the objective is minus the transport loss.
    """
    potential = np.zeros(weights.shape)

    def responsibilities(log_density: Array) -> tuple[Array, Array]:
        nonlocal potential  # the last step's is a good start for the next
        plan, objective, potential = transport_plan(
            log_density, weights, start=potential, iterations=iterations, tolerance=tolerance
        )
        return plan * plan.shape[-1], objective

    return run_steps(data, means, variances, responsibilities, steps)


def transport_plan(
    log_density: Array,
    weights: Array,
    *,
    start: Array | None = None,
    iterations: int = 200,
    tolerance: float = 1e-9,
) -> tuple[Array, Array, Array]:
    r"""The plan with costs :math:`-\log p(x_i \mid k)` and entropic weight one, in the log domain.

    .. math:: \max_{f, g} \frac1n \sum_i f_i + \sum_k \pi_k g_k, \quad
              P_{ki} = \frac{\pi_k}{n} \exp(f_i + g_k + \log p(x_i \mid k))

    Args:
        log_density: Of each row under each component, (sims, k, n).
        weights: Column sums (sims, k); rows have 1 / n each.
        start: Potentials g to begin with.
        iterations: Most iterations.
        tolerance: Of the column sums.

    Returns:
        The plan (sims, k, n), minus its loss (sims,), and the potentials g.
    """
    log_weights = np.log(np.maximum(weights, 1e-300))
    rows = log_density.shape[-1]
    g = np.zeros(weights.shape) if start is None else start
    for _ in range(iterations):
        f = -log_sum_exp(log_density + (g + log_weights)[..., None], 1)
        log_sums = log_sum_exp(log_density + f[:, None], -1) - np.log(rows)  # column sums are pi exp(g + this)
        if np.abs(weights * np.expm1(g + log_sums)).max() < tolerance:
            break
        g = -log_sums
    # rows are exact at the end, columns to the tolerance
    f = -log_sum_exp(log_density + (g + log_weights)[..., None], 1)
    plan = np.exp(f[:, None] + (g + log_weights)[..., None] + log_density) / rows
    loss = f.mean(-1) + (weights * g).sum(-1)
    return plan, -loss, g
