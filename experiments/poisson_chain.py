"""What Table 3 and the figure of the estimates share: data sets of a Poisson hidden Markov model, and their fits."""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from baselines import hmm
from experiments.paper_chain import fit_paper
from experiments.registry import Run
from experiments.small_models import poisson_chain
from otpdag.estimators import HiddenMarkovModel

STATES, SEQUENCES, LENGTH, STARTS = 4, 250, 200, 5
RANGES = ((10, 20), (30, 40), (50, 60), (80, 90))
METHODS = {
    "ours": "otpdag, stay form",
    "ours_full": "otpdag, full transitions",
    "paper": "OTP-DAG as the paper has it",
    "em": "EM (hmmlearn, best of 5)",
    "em_known": "EM, transitions known",
}


BLOCK = 10  # data sets of one part
EM_STEPS, EM_TOLERANCE = 500, 0.01  # hmmlearn's own tolerance, which stops it long before so many steps


@dataclass(frozen=True)
class Size:
    """How many data sets, and how many of them the paper's slower way gets."""

    datasets: int
    paper: int
    sequences: int = SEQUENCES

    @classmethod
    def of(cls, quick: bool) -> "Size":
        return cls(2, 1, 100) if quick else cls(200, 200)

    def of_method(self, method: str) -> int:
        """How many data sets a method gets."""
        return self.paper if method == "paper" else self.datasets


def estimates(run: Run, size: Size) -> pd.DataFrame:
    """One row for each data set, method and state: true and estimated rate and stay probability, and seconds.

    A block of data sets by one method is a part of the run, which goes on where it was.
    """
    parts = run.parts(
        (f"{method}-{first:03d}", partial(_block, run.seed, method, first, size))
        for first in range(0, size.datasets, BLOCK)
        for method in METHODS
        if first < size.of_method(method)
    )
    return run.together(parts)


def _block(seed: int, method: str, first: int, size: Size) -> pd.DataFrame:
    numbers = range(first, min(first + BLOCK, size.of_method(method)))
    return pd.concat([_one(seed, method, number, size) for number in numbers], ignore_index=True)


def _one(seed: int, method: str, number: int, size: Size) -> pd.DataFrame:
    counts, _, truth = poisson_chain(size.sequences, LENGTH, np.random.default_rng([seed, number]))
    rates, stay = np.exp(truth["x"]["log_rate"]), float(truth["z"]["stay"])
    begin = time.process_time()
    with threadpool_limits(1):
        estimated, estimated_stay = _fit(method, counts, stay, number)
    columns = {"dataset": number, "method": method, "state": np.arange(1, STATES + 1), "true": rates}
    columns |= {"estimate": estimated, "true_stay": stay, "stay": estimated_stay}
    return pd.DataFrame(columns | {"seconds": time.process_time() - begin})


def _fit(method: str, counts: np.ndarray, stay: float, seed: int) -> tuple[np.ndarray, float]:
    """Rates in rising order and the stay probability by one method."""
    if method == "paper":
        return fit_paper(counts, states=STATES, starts=STARTS, seed=seed)
    X, lengths = counts.reshape(-1, 1), [LENGTH] * len(counts)
    if method in ("ours", "ours_full"):
        return _ours(X, lengths, "stay" if method == "ours" else "full", seed)
    known = np.full((STATES, STATES), (1 - stay) / (STATES - 1))
    np.fill_diagonal(known, stay)
    return _em(X, lengths, known if method == "em_known" else None, seed)


def _ours(X, lengths, transitions, seed):
    fitted = HiddenMarkovModel(
        STATES, transitions=transitions, n_init=STARTS, random_state=seed, emission="poisson"
    ).fit(X, lengths)
    return fitted.lambdas_[:, 0], float(fitted.transmat_.diagonal().mean())


def _em(X, lengths, transitions, seed):
    options = {"starts": STARTS, "steps": EM_STEPS, "tolerance": EM_TOLERANCE, "seed": seed}
    fitted = hmm.fit(X, lengths, states=STATES, transitions=transitions, **options).params
    return fitted["rates"], float(fitted["stay"])
