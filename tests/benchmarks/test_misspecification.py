"""The cases of the benchmark on a few simulations."""

import json

import numpy as np
import pytest

from benchmarks import misspecification
from benchmarks.harness import Settings


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(misspecification, "SIMULATIONS", 3)
    monkeypatch.setattr(misspecification, "STEPS", 15)
    misspecification._course.cache_clear()
    misspecification._simulations.cache_clear()


@pytest.mark.parametrize("case", ["wrong_variances", "well_specified"])
def test_a_record_compares_with_em(case):
    record = misspecification.CASES[case](Settings(seed=2, repeats=2))
    assert record["ratio"] == pytest.approx(np.mean(record["ours_each"]) / np.mean(record["oracle_each"]))
    assert record["difference"] == pytest.approx(np.mean(record["ours_each"]) - np.mean(record["oracle_each"]))
    assert record["low"] <= record["difference"] <= record["high"]
    assert len(record["ours_each"]) == 6
    assert record["failures"] == 0
    assert record["limit"] == (1.1 if case == "well_specified" else 1.0)
    json.dumps(record, allow_nan=False)
