"""What Table 3 and the figure of the estimates share: data sets of a Poisson hidden Markov model, and their fits."""

import os
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from baselines import hmm
from experiments.paper_chain import fit_paper
from otpdag.cli.registry import Run
from otpdag.datasets import poisson_chain
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


@dataclass(frozen=True)
class Size:
    """How many data sets, and how many of them the paper's slower way gets."""

    datasets: int
    paper: int
    sequences: int = SEQUENCES

    @classmethod
    def of(cls, quick: bool) -> "Size":
        return cls(2, 1, 100) if quick else cls(200, 20)


def estimates(run: Run, size: Size) -> pd.DataFrame:
    """One row for each data set, method and state: true and estimated rate and stay probability, and seconds.

    Each data set is a part of the run, which goes on where it was.
    """
    jobs = 1 if size.datasets < 10 else os.cpu_count() or 1
    parts = Parallel(n_jobs=jobs)(
        delayed(run.part)(f"dataset{number:03d}", partial(_one, run.seed, number, size))
        for number in range(size.datasets)
    )
    return pd.concat(parts, ignore_index=True)


def _one(seed: int, number: int, size: Size) -> pd.DataFrame:
    counts, _, truth = poisson_chain(size.sequences, LENGTH, np.random.default_rng([seed, number]))
    rates, stay = np.exp(truth["x"]["log_rate"]), float(truth["z"]["stay"])
    X, lengths = counts.reshape(-1, 1), [LENGTH] * size.sequences
    known = np.full((STATES, STATES), (1 - stay) / (STATES - 1))
    np.fill_diagonal(known, stay)
    rows = []
    with threadpool_limits(1):
        runs = {
            "ours": lambda: _ours(X, lengths, "stay", number),
            "ours_full": lambda: _ours(X, lengths, "full", number),
            "em": lambda: _em(X, lengths, None, number),
            "em_known": lambda: _em(X, lengths, known, number),
        }
        if number < size.paper:
            runs["paper"] = lambda: fit_paper(counts, states=STATES, starts=STARTS, seed=number)
        for method, run in runs.items():
            begin = time.perf_counter()
            estimated, estimated_stay = run()
            seconds = time.perf_counter() - begin
            for state in range(STATES):
                rows.append(
                    {
                        "dataset": number,
                        "method": method,
                        "state": state + 1,
                        "true": rates[state],
                        "estimate": estimated[state],
                        "true_stay": stay,
                        "stay": estimated_stay,
                        "seconds": seconds,
                    }
                )
    return pd.DataFrame(rows)


def _ours(X, lengths, transitions, seed):
    fitted = HiddenMarkovModel(
        STATES, transitions=transitions, n_init=STARTS, random_state=seed, emission="poisson"
    ).fit(X, lengths)
    return fitted.lambdas_[:, 0], float(fitted.transmat_.diagonal().mean())


def _em(X, lengths, transitions, seed):
    fitted = hmm.fit(X, lengths, states=STATES, starts=STARTS, transitions=transitions, seed=seed).params
    return fitted["rates"], float(fitted["stay"])
