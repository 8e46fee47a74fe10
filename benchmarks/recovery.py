"""Recovery of known parameters: label-matched error over that of a trusted estimator on the same data."""

from functools import cache, partial

import pandas as pd
from threadpoolctl import threadpool_limits

import otpdag as otp
from benchmarks.harness import Case, Outcome, Record, Settings, Streams, by_method, streams, summary, timed
from benchmarks.networks import network_problem
from benchmarks.problems import FACTOR, MIXED_DAG, PROBLEMS, Problem
from benchmarks.siblings import sibling_correlation
from experiments.small_models import delete_cells
from otpdag.datasets import Truth

MISSING_SHARE = 0.3
MISSING_LIMIT = 2.0


def recovery(problem: Problem, settings: Settings) -> Record:
    """Our error over that of the oracle."""
    repeats = range(settings.repeats)
    oracle = summary("oracle", [oracle_outcome(problem, settings.seed, repeat) for repeat in repeats])

    def measure(method: str) -> Record:
        ours = summary("ours", [complete_outcome(problem, settings.seed, repeat, method) for repeat in repeats])
        return {"ratio": ours["ours"] / oracle["oracle"]} | ours

    return by_method(settings, measure) | oracle


def recovery_with_missing(problem: Problem, settings: Settings) -> Record:
    """Our error with missing cells over our own on complete tables; ``over_oracle`` is over the oracle's."""
    repeats = range(settings.repeats)
    oracle = summary("oracle", [oracle_outcome(problem, settings.seed, repeat) for repeat in repeats])

    def measure(method: str) -> Record:
        case = (problem, settings.seed)
        complete = summary("complete", [complete_outcome(*case, repeat, method) for repeat in repeats])
        ours = summary("ours", [missing_outcome(*case, repeat, method) for repeat in repeats])
        ratios = {
            "ratio": ours["ours"] / complete["complete"],
            "over_oracle": ours["ours"] / oracle["oracle"],
        }
        return ratios | ours | complete

    return {"limit": MISSING_LIMIT} | by_method(settings, measure) | oracle


def recovery_of_network(name: str, hidden: str, settings: Settings) -> Record:
    """Our distance to the true distribution of a published network over that of pgmpy's EM."""
    return {"hidden": hidden} | recovery(network_problem(name, hidden), settings)


def draw(problem: Problem, seed: int, repeat: int) -> tuple[pd.DataFrame, Truth, Streams]:
    """One data set, the same for the oracle and all methods, complete or not."""
    sources = streams(seed, problem.name, repeat)
    frame, truth = problem.draw(problem.rows, sources.data)
    return frame, truth, sources


@cache
def oracle_outcome(problem: Problem, seed: int, repeat: int) -> Outcome:
    """The oracle's error; kept, as cases with missing cells need it again."""
    frame, truth, sources = draw(problem, seed, repeat)
    with threadpool_limits(1):  # on tables of this size further threads only wait for each other
        estimate, seconds = timed(lambda: problem.oracle(frame, truth, sources.oracle))
    return Outcome(problem.error(truth, estimate), seconds)


@cache
def complete_outcome(problem: Problem, seed: int, repeat: int, method: str) -> Outcome:
    """Our error on the complete table; kept, as cases with missing cells need it again."""
    frame, truth, sources = draw(problem, seed, repeat)
    return _fit(problem, frame, truth, sources.fit, method)


def missing_outcome(problem: Problem, seed: int, repeat: int, method: str) -> Outcome:
    """Our error on the same table after it lost cells."""
    frame, truth, sources = draw(problem, seed, repeat)
    incomplete = delete_cells(frame, MISSING_SHARE, sources.missing)
    return _fit(problem, incomplete, truth, sources.fit, method)


def _fit(problem: Problem, frame: pd.DataFrame, truth: Truth, seed: int, method: str) -> Outcome:
    model = problem.model()
    result, seconds = timed(lambda: otp.fit(model, frame, seed=seed, method=method))
    if result.rows_used != len(frame):
        raise ValueError(f"a fit must use all {len(frame)} rows; it used {result.rows_used}")
    return Outcome(problem.error(truth, model.params()), seconds)


CASES: dict[str, Case] = {problem.name: partial(recovery, problem) for problem in PROBLEMS} | {
    "sibling_correlation": sibling_correlation,
    "factor_missing30": partial(recovery_with_missing, FACTOR),
    "mixed_dag_missing30": partial(recovery_with_missing, MIXED_DAG),
    "asia_hidden": partial(recovery_of_network, "asia", "bronc"),
    "survey_hidden": partial(recovery_of_network, "survey", "E"),
}
