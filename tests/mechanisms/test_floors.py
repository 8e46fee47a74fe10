"""Floors of scales."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.mechanisms.normal import default_floor, resolution

RNG = np.random.default_rng(0)


def floor_of(column, *, hidden_parents=True, weight=None):
    values = torch.as_tensor(np.asarray(column, dtype=float)).unsqueeze(-1)
    weight = torch.ones(len(values)) if weight is None else weight
    return float(default_floor(values, weight, hidden_parents=hidden_parents)[0])


def test_rounded_columns_have_the_spread_of_rounding():
    assert floor_of(RNG.normal(0, 10, 500).round()) == pytest.approx(1 / math.sqrt(12))
    assert floor_of(RNG.normal(0, 1, 500).round(1)) == pytest.approx(0.1 / math.sqrt(12))
    assert resolution(torch.tensor([5.0, 5.0, 5.0])) == 0


def test_columns_of_few_values_have_a_part_of_their_spread():
    assert floor_of(np.tile([0.0, 1.0], 100)) <= 0.25 * 0.5


def test_other_columns_have_a_small_share_of_their_spread_which_outliers_do_not_raise():
    column = RNG.normal(size=2000)
    assert floor_of(column) == pytest.approx(1e-3, rel=0.05)
    assert floor_of(column, hidden_parents=False) == pytest.approx(1e-6, rel=0.05)
    column[0] = 1e9
    assert floor_of(column) == pytest.approx(1e-3, rel=0.05)


def test_rows_without_a_weight_do_not_count():
    column = np.concatenate([np.arange(100.0) % 10, RNG.normal(size=100)])
    weight = torch.cat([torch.ones(100), torch.zeros(100)])
    assert floor_of(column, weight=weight) == pytest.approx(1 / math.sqrt(12))


@pytest.mark.parametrize("noise", [1e-2, 1e-4])
def test_small_noise_is_estimated_as_it_is(noise):
    a = RNG.normal(size=600)
    table = pd.DataFrame({"a": a, "b": 3 * a + noise * RNG.normal(size=600)})
    model = otp.Model(otp.Graph([("a", "b")]), {"a": m.Normal(), "b": m.Normal()})
    assert otp.fit(model, table).notes == ()
    assert float(model.params()["b"]["scale"]) == pytest.approx(noise, rel=0.1)


def test_honestly_rounded_noise_is_above_the_floor():
    a = RNG.normal(size=2000)
    table = pd.DataFrame({"a": a, "b": (3 * a + 0.05 * RNG.normal(size=2000)).round(1)})
    model = otp.Model(otp.Graph([("a", "b")]), {"a": m.Normal(), "b": m.Normal()})
    assert otp.fit(model, table).notes == ()
    assert float(model.params()["b"]["scale"]) == pytest.approx(math.hypot(0.05, 0.1 / math.sqrt(12)), rel=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
@pytest.mark.parametrize("mechanism", [m.Normal, m.StudentT, m.LogNormal])
def test_a_floor_of_ones_own_is_kept_and_none_is_zero(mechanism):
    table = pd.DataFrame({"k": np.repeat([0, 1], 50), "x": np.r_[np.full(50, 2.0), RNG.gamma(5.0, 1.0, 50)]})
    graph = otp.Graph([("k", "x")])
    scales = {}
    for floor in (None, 0.2, 0.0):
        model = otp.Model(graph, {"k": m.Categorical(2), "x": mechanism(floor=floor)})
        otp.fit(model, table, steps=60)
        scales[floor] = float(model.params()["x"]["scale"][0])
    line = np.log(table["x"]) if mechanism is m.LogNormal else table["x"]
    assert scales[0.2] == pytest.approx(0.2 * line.std(ddof=0), rel=0.05)
    assert 0 < scales[0.0] < scales[None] < scales[0.2]
    with pytest.raises(otp.ModelError, match="floor must be a number of at least 0; got -1"):
        mechanism(floor=-1)


def test_a_model_with_a_floor_comes_back_from_its_file(tmp_path):
    table = pd.DataFrame({"x": RNG.normal(size=50).round(1)})
    for floor in (None, 0.1):
        model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal(floor=floor)})
        otp.fit(model, table)
        model.save(tmp_path / "model")
        again = otp.load(tmp_path / "model")
        assert again.mechanisms["x"].floor == floor
        assert again.score(table, kind="likelihood") == model.score(table, kind="likelihood")


@pytest.mark.parametrize("unit", [0.01, 1.0, 1000.0])
def test_the_smallest_scale_is_a_share_of_the_columns_spread_in_its_own_unit(unit):
    table = pd.DataFrame({"x": unit * np.linspace(0.0, 2.0, 50)})
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal(floor=0.2)})
    otp.fit(model, table)
    smallest = model.structure.mechanisms["x"].smallest_scale
    assert smallest.item() == pytest.approx(0.2 * table["x"].std(ddof=0), rel=1e-3)


@pytest.mark.parametrize("unit", [1e-3, 40.0])
def test_floors_have_the_unit_of_their_column(unit):
    column = unit * (RNG.normal(size=400) + 2)
    ordered = np.sort(column)
    spread = min(column.std(), (ordered[399 * 3 // 4] - ordered[399 // 4]) / 1.349)
    assert floor_of(column) == pytest.approx(1e-3 * spread, rel=1e-9)
    assert floor_of(column, hidden_parents=False) == pytest.approx(1e-6 * spread, rel=1e-9)
    halves = unit * np.tile([0.0, 1.0], 100)
    assert floor_of(halves) == pytest.approx(0.25 * 0.5 * unit, rel=1e-9)
    assert floor_of(np.full(20, unit)) == pytest.approx(1e-3 * unit, rel=1e-9)
    assert floor_of(np.zeros(20)) == pytest.approx(1e-3, rel=1e-9)
