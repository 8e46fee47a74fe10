"""Maximum likelihood of a -> b -> c with a count b that has gaps: the count is summed out, then L-BFGS."""

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import gammaln, logsumexp

from otpdag.datasets import Truth

LARGEST = 300  # counts beyond have no mass worth counting in the benchmark's data


def count_gap_ml(frame: pd.DataFrame, truth: Truth, largest: int = LARGEST) -> Truth:
    """Climb from the truth; ``a`` and ``c`` are normal and complete, ``b`` is Poisson with NaN where unknown."""
    start = np.array(
        [
            truth["b"]["log_rate"],
            truth["b"]["weight"][0],
            truth["c"]["loc"],
            truth["c"]["weight"][0],
            np.log(truth["c"]["scale"]),
        ],
        dtype=float,
    )
    options = {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    best = minimize(loss, start, args=(frame, largest), jac=True, method="L-BFGS-B", options=options).x
    return {
        "a": {"loc": np.asarray(frame["a"].mean()), "scale": np.asarray(frame["a"].std(ddof=0))},
        "b": {"log_rate": best[0], "weight": best[1:2]},
        "c": {"loc": best[2], "weight": best[3:4], "scale": np.exp(best[4])},
    }


def loss(vector: np.ndarray, frame: pd.DataFrame, largest: int = LARGEST) -> tuple[float, np.ndarray]:
    """Minus the mean log-likelihood of ``b`` and ``c`` given ``a``, and its gradient by Fisher's identity."""
    seen = frame["b"].notna().to_numpy()
    counts = np.arange(largest + 1.0)
    terms = [
        _family(vector, frame[seen], frame["b"].to_numpy()[seen, None]),
        _family(vector, frame[~seen], np.broadcast_to(counts, ((~seen).sum(), len(counts)))),
    ]
    total, gradient = 0.0, np.zeros(5)
    for log_joint, slopes in terms:
        evidence = logsumexp(log_joint, axis=1)
        posterior = np.exp(log_joint - evidence[:, None])
        total += evidence.sum()
        gradient += [(posterior * slope).sum() for slope in slopes]
    return -total / len(frame), -gradient / len(frame)


def _family(vector: np.ndarray, rows: pd.DataFrame, b: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Log-density of b and c given a at each count, (rows, counts), and its derivatives by the five parameters."""
    log_rate, slope, loc, weight, log_scale = vector
    a, c = rows["a"].to_numpy()[:, None], rows["c"].to_numpy()[:, None]
    log_mean = np.clip(log_rate + slope * a, -50.0, 50.0)
    surplus = b - np.exp(log_mean)
    residual = (c - loc - weight * b) / np.exp(log_scale)
    log_joint = b * log_mean - np.exp(log_mean) - gammaln(b + 1.0)
    log_joint = log_joint - 0.5 * residual**2 - log_scale - 0.5 * np.log(2 * np.pi)
    scaled = residual / np.exp(log_scale)
    return log_joint, [surplus, surplus * a, scaled, scaled * b, residual**2 - 1.0]
