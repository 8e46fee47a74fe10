"""Intervals: how often the nominal 90 % bootstrap interval covers the truth, over simulated data sets.

``ratio`` is the coverage itself, which should lie between 0.85 and 0.95; 40 data sets with ``--quick``, 200 without.
"""

from functools import partial

import numpy as np

import otpdag as otp
from benchmarks.harness import Case, Record, Settings, streams, timed
from benchmarks.problems import FACTOR, MIXTURE, Problem
from experiments.metrics import match_signs, match_states
from otpdag.datasets import Truth

SETS_FOR_EACH_REPEAT = {5: 8}
ROWS, DRAWS, LEVEL = 400, 100, 0.9


def coverage(problem: Problem, settings: Settings) -> Record:
    """The share of parameters, over all data sets, whose interval holds the true value (labels and signs matched)."""
    sets = settings.repeats * SETS_FOR_EACH_REPEAT.get(settings.repeats, 10)
    held, seconds = [], []
    for repeat in range(sets):
        draws = streams(settings.seed, f"coverage {problem.name}", repeat)
        frame, truth = problem.draw(ROWS, draws.data)
        model = problem.model()
        result = otp.fit(model, frame, seed=draws.fit)
        table, spent = timed(partial(result.intervals, draws=DRAWS, level=LEVEL, seed=draws.fit))
        seconds.append(spent)
        held += _held(problem, truth, model.params(), table)
    covered = float(np.mean(held))
    return {
        "ratio": covered,
        "ours": covered,
        "oracle": LEVEL,
        "low": 0.85,
        "high": 0.95,
        "sets": sets,
        "rows": ROWS,
        "draws": DRAWS,
        "parameters": len(held),
        "seconds": float(np.mean(seconds)),
        "oracle_seconds": 0.0,
    }


def _held(problem: Problem, truth: Truth, params: Truth, table) -> list[bool]:
    """For every parameter: does its interval hold the truth, in the labelling that is closest to the estimate?"""
    aligned = aligned_truth(problem, truth, params)
    held = []
    for (node, name, index), row in table.iterrows():
        true = np.asarray(aligned[node][name])[index]
        held.append(bool(row["lower"] <= true <= row["upper"]))
    return held


def aligned_truth(problem: Problem, truth: Truth, estimate: Truth) -> Truth:
    """The truth in the labelling and with the signs that are closest to the estimate."""
    return ALIGN[problem.name](truth, estimate)


def _same_sign(truth: Truth, estimate: Truth) -> Truth:
    """The truth with the factor pointing the way the estimate's does."""
    loadings = [np.concatenate([np.ravel(p[n]["weight"]) for n in p if n != "f"]) for p in (truth, estimate)]
    sign = match_signs([loadings[1]], [loadings[0]])[0]
    return {
        node: {
            name: sign * np.asarray(value) if name == "weight" else np.asarray(value) for name, value in values.items()
        }
        for node, values in truth.items()
    }


def _same_labels(truth: Truth, estimate: Truth) -> Truth:
    """The truth with the components in the estimate's order."""
    order = match_states(estimate["x"]["loc"], truth["x"]["loc"])
    return {node: {name: np.asarray(value)[order] for name, value in values.items()} for node, values in truth.items()}


def _same_classes(truth: Truth, estimate: Truth) -> Truth:
    """The truth with the classes in the estimate's order."""
    tables = [np.concatenate([np.asarray(p[n]["probs"]) for n in p if n != "z"], -1) for p in (estimate, truth)]
    order = match_states(*tables)
    return {node: {name: np.asarray(value)[order] for name, value in values.items()} for node, values in truth.items()}


ALIGN = {"factor": _same_sign, "mixture": _same_labels, "latent_class": _same_classes}

CASES: dict[str, Case] = {
    "coverage_factor": partial(coverage, FACTOR),
    "coverage_mixture": partial(coverage, MIXTURE),
}
