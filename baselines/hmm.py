"""Baum-Welch for Poisson hidden Markov models: hmmlearn, best of several starts.

hmmlearn spends most of its time in calls to scipy's Poisson density, one for each state of each sequence. ``quick``
looks the same numbers up in a table; forward, backward and the updates stay hmmlearn's own, and so do the estimates.
Time is compared with ``quick=False`` only.
"""

import warnings
from collections.abc import Sequence

import numpy as np
from hmmlearn.hmm import PoissonHMM
from numpy.typing import ArrayLike
from scipy.stats import poisson

from baselines.base import Array, Estimate


class _Quick(PoissonHMM):
    """The same model, with densities of the distinct counts computed once in a step."""

    def _compute_likelihood(self, X):
        return self._table()[X[:, 0]]

    def _compute_log_likelihood(self, X):
        return np.log(self._table()[X[:, 0]])

    def _table(self):
        key = self.lambdas_.tobytes()
        if getattr(self, "_key", None) != key:
            self._key = key
            self._probs = np.maximum(poisson.pmf(np.arange(self._most + 1)[:, None], self.lambdas_[:, 0]), 1e-300)
        return self._probs


def fit(
    data: ArrayLike,
    lengths: Sequence[int],
    *,
    states: int,
    starts: int = 5,
    steps: int = 50,
    tolerance: float = 0.05,
    transitions: Array | None = None,
    seed: int = 0,
    quick: bool = True,
) -> Estimate:
    """Maximise the likelihood from hmmlearn's own random starts.

    Args:
        data: Counts of all sequences one after another.
        lengths: Their lengths.
        states: Number of states.
        starts: Number of starts, of which the likeliest end is kept.
        steps: Most steps of EM.
        tolerance: Gain of the log-likelihood at which a run stops; minus infinity runs all steps.
        transitions: The true transition matrix, to be held fixed; learned if left out.
        seed: Determines the starts.
        quick: Look densities up.

    Returns:
        ``rates`` in rising order, ``transitions`` and ``stay``, the mean of its diagonal; the objective is the
        log-likelihood, ``history`` has the rates and the log-likelihood of every start.
    """
    counts = np.asarray(data, dtype=np.int64).reshape(-1, 1)
    fitted = []
    for start in range(starts):
        model = (_Quick if quick else PoissonHMM)(
            states,
            n_iter=steps,
            tol=tolerance,
            random_state=np.random.RandomState([seed, start]),
            implementation="scaling",
            params="sl" if transitions is not None else "stl",
            init_params="sl" if transitions is not None else "stl",
        )
        model._most = int(counts.max())
        if transitions is not None:
            model.transmat_ = transitions
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(counts, list(lengths))
        fitted.append(model)
    ends = np.array([model.monitor_.history[-1] for model in fitted])
    best = fitted[int(ends.argmax())]
    order = best.lambdas_[:, 0].argsort()
    moves = best.transmat_[np.ix_(order, order)]
    return Estimate(
        {"rates": best.lambdas_[order, 0], "transitions": moves, "stay": np.array(moves.diagonal().mean())},
        ends.max(keepdims=True),
        {"rates": np.stack([np.sort(model.lambdas_[:, 0]) for model in fitted]), "objective": ends},
    )
