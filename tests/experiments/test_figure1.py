"""Figure 1 runs on a few simulations, and its statistics are right."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from experiments import figure1, mixtures
from experiments.registry import Run


def test_errors_have_their_labels_lined_up():
    true = np.array([[[0.0, 0.0], [2.0, 2.0]]])
    found = np.stack([true, true[:, ::-1] + 0.5])
    np.testing.assert_allclose(mixtures.matched_errors(true, found, 1), [[0.0], [0.5]])
    # a method that rests early stays where it is
    np.testing.assert_allclose(mixtures.matched_errors(true, found, 4), [[0.0], [0.5], [0.5], [0.5], [0.5]])


def test_intervals_are_those_of_a_paired_test():
    rng = np.random.default_rng(0)
    left, right = rng.normal(1.0, 1.0, 30), rng.normal(0.5, 1.0, 30)
    paired = mixtures.Paired.of(left, right)
    interval = stats.ttest_rel(left, right).confidence_interval(0.95)
    assert (paired.low, paired.high) == pytest.approx((interval.low, interval.high))
    assert paired.excludes_zero == (stats.ttest_rel(left, right).pvalue < 0.05)


def test_simulations_are_the_paper_s():
    given = mixtures.simulate(0, sims=40, rows=200)
    told = given.cases["wrong_both"]
    assert given.data.shape == (40, 200, 2)
    assert given.means.min() >= 0
    assert given.means.max() <= 2
    assert told.variances.min() >= 1
    assert told.variances.max() <= 2
    assert (given.cases["well_specified"].variances == 1).all()
    assert (given.cases["well_specified"].weights[:, 0] >= 0.5).all()
    np.testing.assert_allclose(told.weights.sum(-1), 1.0)
    np.testing.assert_allclose(given.starts[:, 0], given.starts[:, 1, ::-1])


def test_everything_is_written(tmp_path):
    given = mixtures.simulate(0, sims=3, rows=60)
    results = figure1.run_all(given, seed=0, steps=8)
    figure1.write(Run(tmp_path), given, results)
    curves = pd.read_csv(tmp_path / "figure1.csv")
    assert len(curves) == 4 * 5 * 9
    assert (curves["low"] <= curves["error"]).all()
    assert len(pd.read_csv(tmp_path / "figure1_final.csv")) == 4 * 5 * 3
    summary = pd.read_csv(tmp_path / "figure1_table.csv")
    assert (summary[summary["method"] == "EM"]["ratio"] == 1).all()
    assert "| weights wrong | ours, robust |" in (tmp_path / "figure1.md").read_text()
    assert (tmp_path / "figure1.png").stat().st_size > 10_000
    # the page of kept results is drawn from the tables alone
    assert figure1.page(tmp_path).text.startswith((tmp_path / "figure1.md").read_text())
