"""Exact expectation-maximisation for a latent class model."""

import numpy as np
import pandas as pd
from scipy.special import logsumexp

from otpdag.datasets import Truth

_FLOOR = 1e-12


def latent_class_em(
    frame: pd.DataFrame,
    truth: Truth,
    seed: int,
    starts: int = 10,
    tolerance: float = 1e-10,
    steps: int = 5000,
) -> Truth:
    """The best of several random starts, all of them run at once on the distinct rows and their counts.

    `truth` tells the numbers of classes and states only. Shapes: S starts, C classes, R distinct rows, and J
    indicators, one for each state of each child.
    """
    states = [truth[name]["probs"].shape[-1] for name in frame]
    rows, counts = np.unique(frame.to_numpy(), axis=0, return_counts=True)
    indicators = np.hstack([np.eye(k)[rows[:, j]] for j, k in enumerate(states)])
    child_of = np.repeat(np.arange(len(states)), states)
    generator = np.random.default_rng(seed)
    posterior = generator.dirichlet(np.ones(len(truth["z"]["probs"])), size=(starts, len(rows)))

    before = np.full(starts, -np.inf)
    for _ in range(steps):
        probs, tables = _maximise(posterior, counts, indicators, child_of)
        posterior, likelihood = _expect(probs, tables, counts, indicators)
        if (likelihood - before < tolerance).all():
            break
        before = likelihood
    best = int(np.argmax(likelihood))
    children = np.split(tables[best], np.cumsum(states)[:-1], axis=-1)
    return {"z": {"probs": probs[best]}} | {name: {"probs": table} for name, table in zip(frame, children, strict=True)}


def _maximise(posterior, counts, indicators, child_of):
    """Return class weights (S, C) and all tables side by side (S, C, J), each child's block normalised."""
    weighted = posterior * counts[:, None]
    probs = weighted.sum(axis=1) / counts.sum()
    mass = np.einsum("src,rj->scj", weighted, indicators) + _FLOOR
    same_child = (child_of[:, None] == child_of[None, :]).astype(float)
    return probs, mass / (mass @ same_child)


def _expect(probs, tables, counts, indicators):
    """Return the posterior (S, R, C) and the mean log-likelihood of a row (S,)."""
    joint = np.log(probs + _FLOOR)[:, None, :] + np.einsum("rj,scj->src", indicators, np.log(tables))
    evidence = logsumexp(joint, axis=-1)
    return np.exp(joint - evidence[..., None]), evidence @ counts / counts.sum()
