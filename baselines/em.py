"""EM for the means of Gaussian mixtures whose variances and weights are fixed, many data sets at once."""

from collections.abc import Callable

import numpy as np

from baselines.base import Array, Estimate, log_sum_exp

LOG_2PI = float(np.log(2 * np.pi))


def fit(data: Array, *, means: Array, variances: Array, weights: Array, steps: int = 300) -> Estimate:
    """Maximise the likelihood over the means.

    Args:
        data: Data sets (sims, n, d).
        means: Starts (sims, k, d).
        variances: Fixed variances, broadcast to (sims, k, d).
        weights: Fixed weights (sims, k).
        steps: Steps of EM; all are done.

    Returns:
        ``means`` with their history (steps + 1, sims, k, d); the objective is the mean log-likelihood of a row.
    """

    def responsibilities(log_density: Array) -> tuple[Array, Array]:
        joint = log_density + np.log(np.maximum(weights, 1e-300))[..., None]
        row = log_sum_exp(joint, 1)
        return np.exp(joint - row[:, None]), row.mean(-1)

    return run_steps(data, means, variances, responsibilities, steps)


def run_steps(
    data: Array,
    means: Array,
    variances: Array,
    responsibilities: Callable[[Array], tuple[Array, Array]],
    steps: int,
) -> Estimate:
    """Alternate an E-step, which gives responsibilities (sims, k, n) and an objective, and the M-step of the means."""
    means = np.array(means, dtype=float)
    variances = np.broadcast_to(variances, means.shape)
    failed = np.zeros(len(means), dtype=bool)
    history = [means]
    for _ in range(steps):
        share, _ = responsibilities(log_densities(data, means, variances))
        mass = share.sum(-1, keepdims=True)
        # a component without any mass stays where it is
        moved = np.where(mass > 1e-12, share @ data / np.maximum(mass, 1e-12), means)
        failed |= ~np.isfinite(moved).all((1, 2))
        means = np.where(failed[:, None, None], means, moved)
        history.append(means)
    objective = responsibilities(log_densities(data, means, variances))[1]
    return Estimate({"means": means}, objective, {"means": np.stack(history)}, failed)


def log_densities(data: Array, means: Array, variances: Array) -> Array:
    """Log-density of each row under each component: (sims, k, n)."""
    # |x - m|^2 / v expanded, so that the work is a matrix product
    precision, across = 1 / variances, data.swapaxes(1, 2)
    square = precision @ across**2 - 2 * (means * precision) @ across
    constant = (means**2 * precision + np.log(variances) + LOG_2PI).sum(-1, keepdims=True)
    return np.asarray(-0.5 * (square + constant))
