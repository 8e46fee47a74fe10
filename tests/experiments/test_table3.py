"""Table 3 is run block by block, and says which data sets each method has been fitted to."""

import numpy as np
import pandas as pd
import pytest

from experiments.registry import Run

pytest.importorskip("hmmlearn", reason="the baseline of Table 3 is hmmlearn's")

from experiments import poisson_chain, table3  # asks for hmmlearn

SMALL = poisson_chain.Size(12, 4, sequences=3)


@pytest.fixture
def stand_in(monkeypatch):
    """Methods that find the truth, or rates that are one too high; how often each was asked."""
    asked = []

    def fit(method, counts, stay, seed):
        asked.append(method)
        rates = np.exp(truth_of(seed)["x"]["log_rate"])
        return rates + (method == "em"), stay

    def truth_of(number):
        drawn = poisson_chain.poisson_chain(3, poisson_chain.LENGTH, np.random.default_rng([0, number]))
        return drawn[2]

    monkeypatch.setattr(poisson_chain, "_fit", fit)
    monkeypatch.setattr(poisson_chain.Size, "of", classmethod(lambda cls, quick: SMALL))
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    return asked


def test_a_part_of_table_3_is_reported_as_such(stand_in, tmp_path):
    table3.table3(Run(tmp_path, only="ours-*"))
    table3.table3(Run(tmp_path, resume=True, only="em-000"))
    table3.table3(Run(tmp_path, resume=True, only="paper-*"))
    assert stand_in == ["ours"] * 12 + ["em"] * 10 + ["paper"] * 4
    rows = pd.read_csv(tmp_path / "estimates.csv")
    assert len(rows) == 4 * len(stand_in)
    text = (tmp_path / "table3.md").read_text()
    assert "| otpdag, stay form | 12 of 12 | 0.000 ± 0.000 |" in text
    assert "| EM (hmmlearn, best of 5) | 10 of 12 | 1.000 ± 0.000 |" in text
    assert "| OTP-DAG as the paper has it | 4 of 4 |" in text
    assert "on the 4 data sets that every method has been fitted to" in text
    own_range = text.split("by their own least and largest")[1]
    assert "| EM (hmmlearn, best of 5) | 10 of 12 | 0.0000 ± 0.0000 |" in own_range  # one count in all is taken out
    assert "| Where the printed cost is least | 4 | 0.0" in text
    assert table3.page(tmp_path).text.startswith(text)


def test_a_run_that_goes_on_keeps_the_rows_of_its_table_that_are_not_made_anew(tmp_path):
    pd.DataFrame({"method": ["em", "paper", "ours"], "error": [1.0, 2.0, 3.0]}).to_csv(tmp_path / "t.csv", index=False)
    made = pd.DataFrame({"method": ["late", "paper"], "error": [5.0, 4.0]})
    joined = Run(tmp_path, resume=True).joined(made, "t.csv", ("method",))
    assert joined["method"].tolist() == ["em", "paper", "ours", "late"]
    assert joined["error"].tolist() == [1.0, 4.0, 3.0, 5.0]
    assert Run(tmp_path).joined(made, "t.csv", ("method",)) is made


def test_readings_of_min_max_differ_by_a_common_bias_and_count_the_tens_of_data_sets_that_hold():
    true = np.array([12.0, 32.0, 55.0, 85.0]) + np.random.default_rng(0).random((25, 4))
    dataset, state = np.indices(true.shape).reshape(2, -1)
    columns = {"dataset": dataset, "state": state + 1, "true": true.ravel(), "estimate": true.ravel() + 1}
    frame = pd.DataFrame(columns).assign(method="paper")
    text = "\n".join(table3._readings(frame))
    assert "| the range of the uniform | 0.1000 | 0.1000 | 0.1000 | 0.1000 | 0 of 2 | 0 of 2 |" in text
    assert "| own least and largest | 0.0000 | 0.0000 | 0.0000 | 0.0000 | 2 of 2 | 2 of 2 |" in text
    assert f"| the range of all four true rates | {1 / np.ptp(true):.4f} |" in text
    assert table3._readings(frame[frame["dataset"] < 9]) == []
