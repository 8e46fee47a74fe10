"""Maximum likelihood by enumeration for the mixed network: the hidden class is summed out, then L-BFGS."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import OptimizeResult, minimize
from scipy.special import gammaln, log_softmax
from sklearn.cluster import KMeans

from otpdag.datasets import Truth

_FLOOR = 1e-12


@dataclass(frozen=True)
class Table:
    """The columns as arrays; a column of indicators per state of x3; the constant of each row."""

    x1: np.ndarray
    x2: np.ndarray
    indicators: np.ndarray
    constants: np.ndarray

    @classmethod
    def of(cls, frame: pd.DataFrame, states: int) -> "Table":
        x1, x2, x3 = (frame[name].to_numpy() for name in ("x1", "x2", "x3"))
        return cls(x1, x2, np.eye(states)[x3], -0.5 * np.log(2 * np.pi) - gammaln(x2 + 1.0))


def mixed_dag_ml(frame: pd.DataFrame, truth: Truth, seed: int, starts: int = 5) -> Truth:
    """Climbs from the truth and from several k-means starts, and takes the highest of these to the top."""
    classes, states = truth["x3"]["probs"].shape
    table = Table.of(frame, states)
    firsts = [truth] + [_cluster(table, classes, seed + start) for start in range(starts)]
    runs = [_climb(_pack(first), table, classes, tolerance=1e-8) for first in firsts]
    best = min(runs, key=lambda run: run.fun)
    return _unpack(_climb(best.x, table, classes, tolerance=1e-13).x, classes)


def _climb(start: np.ndarray, table: Table, classes: int, tolerance: float) -> OptimizeResult:
    options = {"maxiter": 5000, "maxfun": 10_000, "ftol": tolerance, "gtol": 1e-7}
    return minimize(_loss, start, args=(table, classes), jac=True, method="L-BFGS-B", options=options)


def mean_log_likelihood(params: Truth, frame: pd.DataFrame) -> float:
    """The mean log-likelihood of a row, the hidden class summed out."""
    classes, states = params["x3"]["probs"].shape
    return -_loss(_pack(params), Table.of(frame, states), classes)[0]


def _cluster(table: Table, classes: int, seed: int) -> Truth:
    """The parameters within each cluster of k-means on x1 and the square root of x2, standardised."""
    columns = np.column_stack([table.x1, np.sqrt(table.x2)])
    labels = KMeans(classes, n_init=1, random_state=seed % 2**32).fit_predict(columns / columns.std(axis=0))
    inside = [labels == label for label in range(classes)]
    return {
        "h": {"probs": np.array([rows.mean() for rows in inside])},
        "x1": {
            "loc": np.array([table.x1[rows].mean() for rows in inside]),
            "scale": np.array([table.x1[rows].std() for rows in inside]) + 0.1,
        },
        "x2": {
            "log_rate": np.log([table.x2[rows].mean() + 0.1 for rows in inside]),
            "weight": np.zeros(1),
        },
        "x3": {"probs": 0.9 * np.array([table.indicators[rows].mean(axis=0) for rows in inside]) + 0.1 / 3},
    }


def _pack(params: Truth) -> np.ndarray:
    """One unconstrained vector: log weights, means, log scales, log rates, slope, log tables."""
    return np.concatenate(
        [
            np.log(params["h"]["probs"] + _FLOOR),
            params["x1"]["loc"],
            np.log(params["x1"]["scale"]),
            params["x2"]["log_rate"],
            params["x2"]["weight"],
            np.log(params["x3"]["probs"] + _FLOOR).ravel(),
        ]
    )


def _split(vector: np.ndarray, classes: int) -> list[np.ndarray]:
    return np.split(vector, np.cumsum([classes, classes, classes, classes, 1]))


def _unpack(vector: np.ndarray, classes: int) -> Truth:
    weights, loc, log_scale, log_rate, slope, tables = _split(vector, classes)
    return {
        "h": {"probs": np.exp(log_softmax(weights))},
        "x1": {"loc": loc, "scale": np.exp(log_scale)},
        "x2": {"log_rate": log_rate, "weight": slope},
        "x3": {"probs": np.exp(log_softmax(tables.reshape(classes, -1), axis=1))},
    }


def _loss(vector: np.ndarray, table: Table, classes: int) -> tuple[float, np.ndarray]:
    """Minus the mean log-likelihood and its gradient.

    By Fisher's identity the gradient is that of the complete rows, averaged over the posterior of the class.
    """
    weights, loc, log_scale, log_rate, slope, tables = _split(vector, classes)
    log_probs, log_tables = log_softmax(weights), log_softmax(tables.reshape(classes, -1), axis=1)
    residual = (table.x1[:, None] - loc) / np.exp(log_scale)
    log_mean = np.minimum(log_rate + slope * table.x1[:, None], 50.0)
    mean = np.exp(log_mean)
    joint = log_probs + table.indicators @ log_tables.T
    joint += table.x2[:, None] * log_mean - mean - 0.5 * np.square(residual) - log_scale
    highest = joint.max(axis=1, keepdims=True)
    posterior = np.exp(joint - highest)
    total = posterior.sum(axis=1, keepdims=True)
    evidence = table.constants + (highest + np.log(total))[:, 0]

    posterior /= total
    mass = posterior.sum(axis=0)
    surplus = posterior * (table.x2[:, None] - mean)
    gradient = np.concatenate(
        [
            mass - len(posterior) * np.exp(log_probs),
            (posterior * residual).sum(axis=0) / np.exp(log_scale),
            (posterior * (np.square(residual) - 1.0)).sum(axis=0),
            surplus.sum(axis=0),
            [table.x1 @ surplus.sum(axis=1)],
            (posterior.T @ table.indicators - mass[:, None] * np.exp(log_tables)).ravel(),
        ]
    )
    return -float(evidence.mean()), -gradient / len(posterior)
