"""The cases in small, and the oracle of the effect against what it must find."""

import numpy as np
import pytest

from benchmarks import answers
from benchmarks.harness import Settings

SETTINGS = Settings(seed=3, repeats=1)


def test_standard_errors_and_coverage_in_small(monkeypatch):
    monkeypatch.setattr(answers, "ERROR_ROWS", 300)
    monkeypatch.setattr(answers, "DRAWS", 20)
    record = answers.standard_errors(SETTINGS)
    assert 0.5 < record["ratio"] < 2.0
    assert record["factor_each"] == [record["factor_ratio"]]  # of one data set
    monkeypatch.setattr(answers, "SETS_FOR_EACH_REPEAT", 1)
    monkeypatch.setattr(answers, "COVERAGE_ROWS", 300)
    record = answers.coverage(SETTINGS)
    assert 0.5 < record["ratio"] <= 1.0
    assert set(record) >= {"factor_coverage", "mixture_coverage", "latent_class_coverage"}


def test_the_oracle_of_the_effect_finds_it_in_many_rows(monkeypatch):
    monkeypatch.setattr(answers, "EFFECT_ROWS", 200_000)
    frame = answers._confounded(np.random.default_rng(0))
    assert answers._oracle_effect(frame) == pytest.approx(answers.EFFECT, abs=0.01)
    naive = np.polyfit(frame["t"], frame["y"], 1)[0]
    assert abs(naive - answers.EFFECT) > 0.3  # the confounder matters


def test_effects_and_choices_in_small(monkeypatch):
    monkeypatch.setattr(answers, "EFFECT_SETS_FOR_EACH_REPEAT", 2)
    record = answers.effects(SETTINGS)
    assert record["ratio"] == pytest.approx(1.0, abs=0.01)
    monkeypatch.setattr(answers, "SELECT_SETS_FOR_EACH_REPEAT", 1)
    monkeypatch.setattr(answers, "MOST_CLASSES", 2)
    monkeypatch.setattr(answers, "SELECT_ROWS", 300)
    record = answers.select(SETTINGS)
    assert (record["ours"], record["oracle"]) == (1.0, 1.0)


def test_queries_in_small(monkeypatch):
    pytest.importorskip("pyagrum", exc_type=ImportError)
    monkeypatch.setattr(answers, "QUERIES_FOR_EACH_REPEAT", 2)
    try:
        record = answers.query(SETTINGS)
    except answers.Skip as reason:
        pytest.skip(str(reason))
    assert record["ratio"] < record["limit"]
