"""Counterfactuals against structural equations done by hand."""

import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from tests.answers.linear_models import structural


def test_a_counterfactual_keeps_the_noise_of_its_row():
    model = structural()
    rows = pd.DataFrame({"z": [0.0, 1.0], "t": [1.5, 2.0], "y": [4.0, 9.0]}, index=["a", "b"])
    after = model.counterfactual(rows, {"t": 0.0}, draws=1)
    assert after["y"].tolist() == pytest.approx([4.0 - 3 * 1.5, 9.0 - 3 * 2.0])
    assert after["z"].tolist() == [0.0, 1.0]
    assert list(after.index) == ["a", "b"]
    shifted = model.counterfactual(rows, {"t": lambda table: table["t"] + 1}, draws=2)
    assert (shifted["y"] - rows["y"]).tolist() == pytest.approx([3.0, 3.0])
    each = model.counterfactual(rows, {"t": [0.0, 2.0]}, draws=1)
    assert each["y"].tolist() == pytest.approx([4.0 - 4.5, 9.0])


def test_a_counterfactual_of_categories_bounds_what_could_have_been():
    graph = otp.Graph([("t", "y")])
    model = otp.Model(graph, {"t": m.Categorical(2), "y": m.Categorical(2)})
    model.set_params({"t": {"probs": [0.5, 0.5]}, "y": {"probs": [[0.7, 0.3], [0.4, 0.6]]}})
    # y = 1 iff u > 0.7 under t = 0, so that u > 0.4 for sure: it stays 1 under t = 1
    rows = pd.DataFrame({"t": [0], "y": [1]})
    assert model.counterfactual(rows, {"t": 1})["y"].tolist() == [1]
