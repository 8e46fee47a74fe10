"""What a fit tells of its end."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import Status
from otpdag.errors import ModelError

ROWS = np.random.default_rng(0).normal(3.0, 2.0, 400)


@pytest.fixture(scope="module")
def result():
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    return otp.fit(model, pd.DataFrame({"x": ROWS}), seed=5)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status(True, "the loss stopped changing"), "converged: the loss stopped changing"),
        (Status(False, "no steps left", "raise steps"), "not converged: no steps left (raise steps)"),
    ],
)
def test_a_status_is_read_and_counts_as_whether_it_converged(status, text):
    assert str(status) == text
    assert bool(status) is status.converged


def test_the_loss_is_the_negative_log_likelihood_of_a_row(result):
    spread = ROWS.std()
    entropy = 0.5 * np.log(2 * np.pi * np.e * spread**2)
    assert result.loss == pytest.approx(entropy, rel=1e-6)
    assert (result.rows_used, result.seed) == (400, 5)
    assert result.history[-1]["loss"] == pytest.approx(result.loss)


def test_rows_below_half_a_weight_are_dropped(result):
    assert result.dropped.tolist() == []
    assert replace(result, row_weights=np.array([1.0, 0.49, 0.5, 0.0])).dropped.tolist() == [1, 3]


def test_intervals_are_those_of_the_theory(result):
    table = result.intervals(draws=150, level=0.9, seed=1)
    loc, scale = table.xs(("x", "loc")).iloc[0], table.xs(("x", "scale")).iloc[0]
    assert loc["estimate"] == pytest.approx(ROWS.mean(), rel=1e-4)
    assert scale["estimate"] == pytest.approx(ROWS.std(), rel=1e-4)
    error = ROWS.std() / np.sqrt(len(ROWS))
    assert (loc["upper"] - loc["lower"]) / (2 * 1.645 * error) == pytest.approx(1.0, abs=0.25)
    assert (scale["upper"] - scale["lower"]) / (2 * 1.645 * error / np.sqrt(2)) == pytest.approx(1.0, abs=0.3)


def test_a_method_that_draws_has_no_intervals(result):
    for other in (replace(result, method=otp.paper()), replace(result, problem=None)):
        with pytest.raises(ModelError, match=f"intervals need a deterministic method; '{other.method.name}'"):
            other.intervals(draws=2)


def test_it_shows_method_end_and_size(result):
    shown = repr(result)
    assert shown.startswith("FitResult(entropic, converged")
    assert f"{len(result.history)} steps, start 1 of 1, 400 rows" in shown
