"""Many fits at once: the time of fitting a stack of data sets together over that of one fit after another."""

from collections.abc import Sequence
from functools import partial

import pandas as pd

import otpdag as otp
from benchmarks.harness import Case, Outcome, Record, Settings, Skip, by_method, streams, summary, timed
from benchmarks.problems import FACTOR, MIXTURE, Problem
from otpdag.datasets import Truth

REPLICAS = 16


def replicas(problem: Problem, settings: Settings) -> Record:
    """The seconds of all fits together over the seconds of the same fits in turn.

    ``ours`` and ``oracle`` are these seconds; the mean error of both ways stands beside them, so that speed
    bought by worse estimates shows.
    """
    frames, truths = stack(problem, settings.seed)
    seed = streams(settings.seed, problem.name, REPLICAS).fit

    def measure(method: str) -> Record:
        together, seconds = timed(lambda: fit_together(problem, frames, seed, method))
        in_turn, seconds_in_turn = timed(lambda: fit_in_turn(problem, frames, seed, method))
        fields = {"ratio": seconds / seconds_in_turn, "replicas": REPLICAS}
        fields |= summary("ours", [Outcome(seconds, seconds)])
        fields |= summary("oracle", [Outcome(seconds_in_turn, seconds_in_turn)])
        return fields | {
            "mean_error": mean_error(problem, truths, together),
            "oracle_mean_error": mean_error(problem, truths, in_turn),
        }

    return by_method(settings, measure)


def stack(problem: Problem, seed: int) -> tuple[list[pd.DataFrame], list[Truth]]:
    """Draw the data sets, each with a truth of its own."""
    drawn = [problem.draw(problem.rows, streams(seed, problem.name, i).data) for i in range(REPLICAS)]
    return [frame for frame, _ in drawn], [truth for _, truth in drawn]


def fit_in_turn(problem: Problem, frames: Sequence[pd.DataFrame], seed: int, method: str) -> list[Truth]:
    """Fit a fresh model to each data set, one after another."""
    models = [problem.model() for _ in frames]
    for model, frame in zip(models, frames, strict=True):
        otp.fit(model, frame, seed=seed, method=method)
    return [model.params() for model in models]


def fit_together(problem: Problem, frames: Sequence[pd.DataFrame], seed: int, method: str) -> list[Truth]:
    """Fit all data sets at once and return the parameters of each."""
    raise Skip("fitting several data sets at once has no public function yet")


def mean_error(problem: Problem, truths: Sequence[Truth], estimates: Sequence[Truth]) -> float:
    errors = [problem.error(truth, estimate) for truth, estimate in zip(truths, estimates, strict=True)]
    return sum(errors) / len(errors)


CASES: dict[str, Case] = {problem.name: partial(replicas, problem) for problem in (FACTOR, MIXTURE)}
