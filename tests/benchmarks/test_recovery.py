"""The cases, with a stand-in for the library that takes its estimates from the oracle."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import networks, recovery, siblings
from benchmarks.harness import Settings, Skip
from benchmarks.oracles import factor_analysis
from benchmarks.problems import FACTOR, PROBLEMS, factor_error

SETTINGS = Settings(seed=1, repeats=2, methods=("auto", "paper"))


class StandIn:
    """A model whose parameters the stand-in for `fit` sets."""

    found = None

    def params(self):
        return self.found


def fit_by_oracle(model, frame, *, seed, method, lost_rows=0):
    model.found = factor_analysis(frame.fillna(frame.mean()), {}, seed)
    if method == "paper":
        model.found["x1"]["scale"] = np.array(50.0)
    return SimpleNamespace(rows_used=len(frame) - lost_rows)


@pytest.fixture
def problem(monkeypatch):
    monkeypatch.setattr(recovery.otp, "fit", fit_by_oracle, raising=False)
    recovery.complete_outcome.cache_clear()
    return replace(FACTOR, rows=500, model=StandIn)


def test_an_estimate_as_good_as_the_oracles_has_ratio_one(problem):
    record = recovery.recovery(problem, SETTINGS)
    assert record["ratio"] == pytest.approx(1.0)
    assert record["ours_each"] == pytest.approx(record["oracle_each"])
    assert len(record["ours_each"]) == 2
    assert record["ratio_paper"] > 50
    assert record["seconds"] > 0


def test_missing_cells_are_compared_with_our_own_complete_fits(problem):
    record = recovery.recovery_with_missing(problem, SETTINGS)
    assert record["complete"] == pytest.approx(record["oracle"])
    assert record["ratio"] == pytest.approx(record["ours"] / record["complete"])
    assert record["ratio"] > 2  # means in the place of missing cells bend the loadings
    assert record["over_oracle"] == pytest.approx(record["ratio"])


def test_a_fit_that_drops_rows_fails(problem, monkeypatch):
    monkeypatch.setattr(recovery.otp, "fit", partial(fit_by_oracle, lost_rows=3))
    record = recovery.recovery_with_missing(problem, replace(SETTINGS, methods=("auto",)))
    assert record["ratio"] is None
    assert "a fit must use all 500 rows; it used 497" in record["error"]


def test_factor_error_ignores_the_sign_of_the_factor_only():
    _, truth = FACTOR.draw(1, np.random.default_rng(0))
    mirrored = {node: dict(values) for node, values in truth.items()}
    for name in ("x1", "x2", "x3", "x4"):
        mirrored[name]["weight"] = -truth[name]["weight"]
    assert factor_error(truth, mirrored) == 0.0
    mirrored["x1"]["weight"] = truth["x1"]["weight"]
    assert factor_error(truth, mirrored) == pytest.approx(abs(truth["x1"]["weight"][0]) / 4)


@pytest.mark.parametrize("problem", PROBLEMS[1:], ids=lambda problem: problem.name)
def test_errors_ignore_the_labels_of_the_hidden_class(problem):
    _, truth = problem.draw(1, np.random.default_rng(0))
    relabelled = {
        node: {name: values if name == "weight" else values[::-1] for name, values in parameters.items()}
        for node, parameters in truth.items()
    }
    assert problem.error(truth, relabelled) == pytest.approx(0.0)


def test_correlation_gap():
    frame, _ = siblings.factor(500, np.random.default_rng(0), indicators=2)
    shuffled = frame.assign(x2=np.random.default_rng(1).permutation(frame["x2"]))
    assert siblings.correlation_gap(frame, frame) == 0.0
    assert siblings.correlation_gap(frame, shuffled) == pytest.approx(abs(frame.corr().iloc[0, 1]), abs=0.15)


def test_networks_are_skipped_without_their_folder(monkeypatch):
    monkeypatch.delenv("OTPDAG_DATA", raising=False)
    with pytest.raises(Skip, match="set OTPDAG_DATA"):
        recovery.CASES["asia_hidden"](SETTINGS)


def test_the_error_of_a_network_is_a_distance_of_distributions(data_folder, monkeypatch):
    monkeypatch.setenv("OTPDAG_DATA", str(data_folder))
    problem = networks.network_problem("survey", "E")
    frame, truth = problem.draw(100, np.random.default_rng(0))
    assert "E" not in frame
    assert problem.error(truth, truth) == pytest.approx(0.0, abs=1e-7)
    swapped = truth | {  # the labels of the hidden node do not matter
        "E": {"probs": truth["E"]["probs"][..., ::-1]},
        "O": {"probs": truth["O"]["probs"][::-1]},
        "R": {"probs": truth["R"]["probs"][::-1]},
    }
    assert problem.error(truth, swapped) == pytest.approx(0.0, abs=1e-7)
    moved = truth | {"A": {"probs": np.array([0.2, 0.5, 0.3])}}
    affinity = np.sqrt(truth["A"]["probs"] * [0.2, 0.5, 0.3]).sum()
    assert problem.error(truth, moved) == pytest.approx(np.sqrt(1 - affinity))
