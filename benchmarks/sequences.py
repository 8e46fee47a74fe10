"""Sequences: Poisson hidden Markov models beside hmmlearn's Baum-Welch, small, large and real."""

import os
import resource
from functools import cache
from pathlib import Path
from time import process_time

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from benchmarks.harness import Case, Outcome, Record, Settings, Skip, streams, summary, timed
from experiments.small_models import poisson_chain
from otpdag.estimators import HiddenMarkovModel

STATES, SEQUENCES, LENGTH = 4, 250, 200
DATASETS = 20
STARTS = 5
FOUND = 3.0  # a state is found if a rate lies this close to its own; true ones are at least ten apart
MILLION = 5000
TIMED_STEPS = 3  # hmmlearn's steps that are timed; each costs the same, and 50 are asked for
STEPS = 50
EARTHQUAKES = np.array([13.146, 19.721, 29.714])  # Zucchini, MacDonald and Langrock (2016), three states


def baseline():
    try:
        from baselines import hmm
    except ImportError as error:
        raise Skip("hmmlearn: run `make bench-setup`") from error
    return hmm


@cache
def drawn(seed: int, repeat: int):
    sources = streams(seed, "poisson_chain", repeat)
    counts, _, truth = poisson_chain(SEQUENCES, LENGTH, sources.data)
    return counts, truth, sources


def flat(counts):
    return counts.reshape(-1, 1), [counts.shape[1]] * len(counts)


@cache
def ours(seed: int, repeat: int):
    counts, _, sources = drawn(seed, repeat)
    hmm = HiddenMarkovModel(
        STATES, transitions="stay", n_init=STARTS, random_state=sources.fit % 2**31, emission="poisson"
    )
    return timed(lambda: hmm.fit(*flat(counts)))


@cache
def theirs(seed: int, repeat: int):
    counts, _, sources = drawn(seed, repeat)
    hmm = baseline()
    with threadpool_limits(1):
        return timed(lambda: hmm.fit(*flat(counts), states=STATES, starts=STARTS, seed=sources.oracle % 2**31))


def rate_error(truth, rates) -> float:
    return float(np.abs(np.sort(np.ravel(rates)) - np.exp(truth["x"]["log_rate"])).mean())


def datasets(settings: Settings) -> range:
    """Twenty data sets whether quick or not; fewer only if fewer are asked for."""
    return range(DATASETS if settings.repeats >= 5 else settings.repeats)


def rates(settings: Settings) -> Record:
    """Error of the rates over that of hmmlearn's best of five."""
    us, them = [], []
    for repeat in datasets(settings):
        _, truth, _ = drawn(settings.seed, repeat)
        hmm, seconds = ours(settings.seed, repeat)
        us.append(Outcome(rate_error(truth, hmm.lambdas_), seconds))
        estimate, seconds = theirs(settings.seed, repeat)
        them.append(Outcome(rate_error(truth, estimate.params["rates"]), seconds))
    return compared(us, them, limit=1.1)


def stay(settings: Settings) -> Record:
    """Error of the probability to stay over that of hmmlearn's best of five."""
    us, them = [], []
    for repeat in datasets(settings):
        _, truth, _ = drawn(settings.seed, repeat)
        true = float(truth["z"]["stay"])
        hmm, seconds = ours(settings.seed, repeat)
        us.append(Outcome(abs(hmm.stay_ - true), seconds))
        estimate, seconds = theirs(settings.seed, repeat)
        them.append(Outcome(abs(float(estimate.params["stay"]) - true), seconds))
    return compared(us, them, limit=1.25)


def compared(us, them, limit: float) -> Record:
    record = summary("ours", us) | summary("oracle", them)
    return {"ratio": record["ours"] / record["oracle"], "limit": limit} | record


def states_found(settings: Settings) -> Record:
    """Share of fits from a single start that find every state; ``oracle`` is hmmlearn's share."""
    us, them = [], []
    for repeat in datasets(settings):
        counts, truth, sources = drawn(settings.seed, repeat)
        true = np.exp(truth["x"]["log_rate"])
        for start in range(STARTS):
            hmm = HiddenMarkovModel(
                STATES, transitions="stay", n_init=1, random_state=(sources.fit + start) % 2**31, emission="poisson"
            )
            us.append(found(true, hmm.fit(*flat(counts)).lambdas_))
        estimate, _ = theirs(settings.seed, repeat)
        them += [found(true, one) for one in estimate.history["rates"]]
    return {"ratio": float(np.mean(us)), "at_least": 0.95, "ours": float(np.mean(us)), "oracle": float(np.mean(them))}


def found(true, estimated) -> bool:
    return bool((np.abs(np.sort(np.ravel(estimated)) - true) < FOUND).all())


@cache
def million(seed: int):
    sources = streams(seed, "poisson_chain_million", 0)
    counts, _, truth = poisson_chain(MILLION, LENGTH, sources.data)
    X, lengths = flat(counts)
    hmm = HiddenMarkovModel(
        STATES, transitions="stay", n_init=STARTS, random_state=sources.fit % 2**31, emission="poisson"
    )
    fitted, seconds = timed(lambda: hmm.fit(X, lengths))
    peer = baseline()
    options = {"states": STATES, "starts": 1, "seed": sources.oracle % 2**31}
    with threadpool_limits(1):
        timing = timed(lambda: peer.fit(X, lengths, steps=TIMED_STEPS, tolerance=-np.inf, quick=False, **options))
        estimate = peer.fit(X, lengths, steps=STEPS, tolerance=-np.inf, **options)
    return truth, (fitted, seconds), (estimate, timing[1] * STEPS / TIMED_STEPS)


def million_time(settings: Settings) -> Record:
    """Time of a fit of a million observations over that of 50 steps of hmmlearn (three are timed)."""
    _, (fitted, seconds), (_, oracle_seconds) = million(settings.seed)
    passes = [f"{stage.name}: {len(stage.losses)}" for stage in fitted.result_.stages]
    return {
        "ratio": seconds / oracle_seconds,
        "limit": 0.05,
        "ours": seconds,
        "oracle": oracle_seconds,
        "steps": passes,
        "oracle_steps_timed": TIMED_STEPS,
    }


def million_rates(settings: Settings) -> Record:
    """Error of the rates at a million observations over that of hmmlearn after 50 steps from one start."""
    truth, (fitted, seconds), (estimate, oracle_seconds) = million(settings.seed)
    us = [Outcome(rate_error(truth, fitted.lambdas_), seconds)]
    them = [Outcome(rate_error(truth, estimate.params["rates"]), oracle_seconds)]
    return compared(us, them, limit=1.5)


def ten_million(settings: Settings) -> Record:
    """Processor time of 50,000 sequences over ten times that of 5,000; ``memory_gb`` is the peak of the process.

    Of the same ones: another data set takes other numbers of steps. One that other work slows down is no worse.
    """
    sources = streams(settings.seed, "poisson_chain_ten_million", 0)
    counts, _, truth = poisson_chain(10 * MILLION, LENGTH, sources.data)
    hmm = HiddenMarkovModel(
        STATES, transitions="stay", n_init=STARTS, random_state=sources.fit % 2**31, emission="poisson"
    )
    timed(lambda: hmm.fit(*flat(counts[: MILLION // 10])))  # pays for what is computed once
    _, seconds = timed(lambda: hmm.fit(*flat(counts[:MILLION])), process_time)
    X, lengths = flat(counts)
    fitted, longer = timed(lambda: hmm.fit(X, lengths), process_time)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    return {
        "ratio": longer / (10 * seconds),
        "limit": 1.0,
        "memory_gb": peak,
        "seconds": longer,
        "rate_error": rate_error(truth, fitted.lambdas_),
    }


def earthquakes(settings: Settings) -> Record:
    """Largest relative deviation of three states' rates from the published maximum-likelihood ones."""
    folder = os.environ.get("OTPDAG_DATA")
    if not folder:
        raise Skip("the data folder: set OTPDAG_DATA")
    series = pd.read_csv(Path(folder) / "counts" / "earthquakes.csv")
    hmm, seconds = timed(
        lambda: HiddenMarkovModel(3, random_state=settings.seed % 2**31, emission="poisson").fit(series[["count"]])
    )
    found = hmm.lambdas_.ravel()
    deviation = float(np.abs(found / EARTHQUAKES - 1).max())
    return {"ratio": deviation, "limit": 0.05, "ours": deviation, "rates": found.tolist(), "seconds": seconds}


CASES: dict[str, Case] = {
    "rates": rates,
    "stay": stay,
    "states_found": states_found,
    "million_time": million_time,
    "million_rates": million_rates,
    "ten_million": ten_million,
    "earthquakes": earthquakes,
}
