"""Distances, plans and both sides of Theorem 1 against POT, SciPy and closed forms."""

from __future__ import annotations

import copy
from itertools import combinations

import numpy as np
import ot
import pandas as pd
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.answers.transport import _steps
from otpdag.engine.fit import recognise


def pair(slope=2.0, rows=1500, seed=0):
    """Two normal columns and their model, at the truth."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=rows)
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    model.set_params({"x": {"loc": 0.0, "scale": 1.0}, "y": {"loc": 0.0, "weight": [slope], "scale": 1.0}})
    return model, pd.DataFrame({"x": x, "y": 2.0 * x + rng.normal(size=rows)})


def test_a_shift_is_told_in_the_columns_units_and_chance_explains_the_rest():
    model, table = pair()
    told = model.distance(table)
    assert told < told.upper
    assert (told.nodes["deviations"] < told.nodes["upper"]).all()
    far = model.distance(table.assign(y=table["y"] + 3.0))
    assert far.nodes.index[0] == "y"
    assert far.nodes.loc["y", "distance"] == pytest.approx(3.0, abs=0.2)
    assert far.describe().endswith("most of it in 'y'")
    assert copy.copy(far).chance == far.chance


def test_columns_come_by_what_chance_does_not_explain_of_their_distance():
    """A sample of many levels is far from any other, and its model no worse for it."""
    model = otp.Model(otp.Graph([], nodes=["c", "x"]), {"c": m.Categorical(60), "x": m.Normal()})
    model.set_params({"c": {"probs": np.full(60, 1 / 60)}, "x": {"loc": 0.0, "scale": 1.0}})
    table = model.sample(200, seed=4)
    nodes = model.distance(table.assign(x=table["x"] + 0.3)).nodes
    assert nodes.index[0] == "x"
    assert nodes.loc["c", "deviations"] > nodes.loc["x", "deviations"]
    assert nodes.loc["c", "deviations"] < nodes.loc["c", "upper"]


def test_what_chance_gives_is_the_distance_of_the_models_own_tables():
    model, table = pair()
    told = [model.distance(model.sample(len(table), seed=seed), seed=seed) for seed in range(12)]
    own, chance, upper = (
        np.array(one) for one in zip(*((float(one), one.chance, one.upper) for one in told), strict=True)
    )
    assert own.mean() == pytest.approx(chance.mean(), rel=0.15)
    assert (chance < upper).all()
    assert (own > upper).sum() <= 3  # of twelve, each above with a chance of one in twenty


def test_a_node_is_compared_by_the_exact_distance_of_its_column():
    model, table = pair()
    far = model.distance(table.assign(y=table["y"] * 1.5 + 1.0), seed=3)
    sample = model.sample(200_000, seed=1)["y"]
    exact = stats.wasserstein_distance(table["y"] * 1.5 + 1.0, sample)
    assert far.nodes.loc["y", "distance"] == pytest.approx(exact, abs=0.1)


def test_rows_shifted_in_all_columns_are_as_far_as_the_shift_is_long():
    _, table = pair(rows=4000)
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    otp.fit(model, table)
    moved = table + 2.0 * table.std()
    assert float(model.distance(moved)) == pytest.approx(2.0 * np.sqrt(2.0), rel=0.1)


def test_dependence_alone_is_seen_and_no_column_is_blamed():
    model, table = pair()
    shuffled = table.assign(y=table["y"].to_numpy()[::-1])
    told = model.distance(shuffled)
    assert told > 2 * told.upper
    assert told.describe().endswith("columns agree one by one, not together")


def test_a_categorys_distance_is_the_share_of_rows_in_another_one():
    model = otp.Model(otp.Graph([], nodes=["c"]), {"c": m.Categorical(3)})
    model.set_params({"c": {"probs": [0.5, 0.3, 0.2]}})
    told = model.distance({"c": np.repeat([0, 1, 2], [700, 100, 200])})
    assert told.nodes.loc["c", "distance"] == pytest.approx(0.2, abs=0.04)


def test_a_plan_is_pots_and_says_which_cells_would_have_to_move():
    model, table = pair(rows=300)
    table = table.assign(c=np.where(np.arange(300) % 2, "a", "b"))
    graph = otp.Graph([("x", "y"), ("c", "y")])
    model = otp.Model.from_frame(graph, table)
    result = otp.fit(model, table)
    table.loc[7, "y"] += 25.0
    plan = result.plan(table)
    assert plan.most_moved(1).index[0] == 7
    assert plan.moves.loc[7, "y"] < -15
    np.testing.assert_allclose(plan.sources["y"], table["y"] + plan.moves["y"])
    spread = table[["x", "y"]].std(ddof=0)
    left, right = table[["x", "y"]] / spread, plan.sources[["x", "y"]] / spread
    cost = ot.dist(left.to_numpy(), right.to_numpy(), "cityblock")
    cost += table["c"].to_numpy()[:, None] != plan.sources["c"].to_numpy()[None]
    assert plan.costs.to_numpy().sum() / 300 == pytest.approx(ot.emd2([], [], cost), rel=1e-6)
    np.testing.assert_allclose(plan.columns["cost"].sum(), plan.costs.sum(axis=1).mean())


def test_a_plan_tells_of_each_column_what_chance_would_cost_but_of_no_covariate():
    """Rows as the model makes them cost what two tables of it do; of others the columns that are off cost more."""
    rng = np.random.default_rng(2)
    graph = otp.Graph([("g", "x"), ("h", "x"), ("h", "c")], hidden=["h"])
    nodes = {"g": m.Given(), "h": m.Normal(), "x": m.Normal(), "c": m.Categorical(2)}
    model = otp.Model(graph, nodes).set_params(
        {
            "h": {"loc": 0.0, "scale": 1.0},
            "x": {"loc": 0.0, "weight": [3.0, 1.0], "scale": 0.5},
            "c": {"logits": [0.0, 0.0], "weight": [0.0, 1.0]},
        }
    )
    g = rng.normal(size=400)
    h = rng.normal(size=400)
    table = pd.DataFrame({"g": g, "x": 3 * g + h + 0.5 * rng.normal(size=400)}, index=np.arange(400) * 10)
    table["c"] = (rng.random(400) < 1 / (1 + np.exp(-h))).astype(int)
    otp.fit(model, table)
    plan = model.plan(table)
    assert list(plan.costs.index) == list(table.index)
    assert set(plan.costs) == set(plan.columns.index) == {"x", "c"}
    assert set(plan.sources) == {"g", "h", "x", "c"}
    np.testing.assert_allclose(np.sort(plan.sources["g"]), np.sort(table["g"]))  # samples have the covariates of rows
    np.testing.assert_allclose(plan.columns["cost"], plan.columns["chance"], atol=0.05)
    shifted = model.plan(table.assign(x=table["x"] + 2.0 * table["x"].std()))
    assert shifted.columns.index[0] == "x"
    assert shifted.columns.loc["x", "cost"] == pytest.approx(2.0, abs=0.2)
    assert shifted.columns.loc["c", "cost"] < 0.3
    few = model.plan(table, rows=30, seed=4)
    assert len(few.costs) == 30
    assert list(few.costs.index) == sorted(set(few.costs.index)) != list(table.index[:30])
    assert len(plan.most_moved()) == 10
    assert plan.most_moved(3).sum(axis=1).tolist() == sorted(plan.costs.sum(axis=1), reverse=True)[:3]


def test_cells_that_are_missing_cost_nothing():
    model, table = pair(rows=200)
    gappy = table.mask(np.random.default_rng(1).random(table.shape) < 0.3)
    plan = model.plan(gappy)
    assert (plan.costs.isna() == gappy.isna()).to_numpy().all()
    assert plan.columns["cost"].max() < 0.3


def test_both_sides_of_theorem_1_meet_as_eta_grows():
    """Of a normal column the backward side is eta / (eta + s^2) times the direct one, with s the slope in the noise."""
    x = np.random.default_rng(0).normal(1.0, 2.0, 120)
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal(scale=1.0)})
    result = otp.fit(model, {"x": x})
    told = result.transport({"x": x}, etas=(0.1, 1.0, 10.0))
    spread = 1.4826 * np.median(np.abs(x - np.sort(x)[59]))
    etas = told.index.to_numpy()
    np.testing.assert_allclose(told["backward"] / told["direct"], etas / (etas + spread**-2), rtol=0.02)


@pytest.mark.parametrize("hidden", ["number", "category"])
def test_the_gap_closes_with_hidden_nodes_too(hidden):
    rng = np.random.default_rng(1)
    z = rng.normal(size=100) if hidden == "number" else rng.integers(0, 2, 100) * 3.0
    table = pd.DataFrame({name: z + rng.standard_t(3, 100) for name in "ab"})
    top = m.Normal(loc=0.0, scale=1.0) if hidden == "number" else m.Categorical(2)
    graph = otp.Graph([("z", "a"), ("z", "b")], hidden=["z"])
    result = otp.fit(otp.Model(graph, {"z": top, "a": m.Normal(), "b": m.Normal()}), table, restarts=2)
    told = result.transport(table, etas=(1.0, 10.0, 100.0))
    assert (told["backward"].diff().dropna() > 0).all()
    assert 0 <= told["gap"].iloc[-1] < 0.05 < told["gap"].iloc[0]


def test_steps_are_compared_beside_those_before_them_of_as_many_sequences_as_are_asked_for():
    rng = np.random.default_rng(3)
    sequences = [rng.normal(size=5) + 10.0 * number for number in range(7)]
    sequences[0][2] = sequences[4][0] = np.nan
    model = otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": m.Normal()})
    otp.fit(model, sequences)
    batch = recognise(model, sequences, weights=None, device="cpu", every_row=True).batch
    data, draws = _steps(model.fitted, batch, torch.Generator().manual_seed(0), 14)
    found = {tuple(one) for one in np.round(data["x"], 9).tolist()}
    assert len(data["x"]) == len(found) == 14

    def pairs(own):
        mean, spread = np.nanmean(np.concatenate(own)), np.nanstd(np.concatenate(own))
        told = [[now, before] for one in own for before, now in zip([one[0], *one[:-1]], one, strict=True)]
        return set(map(tuple, np.round(np.nan_to_num((np.array(told) - mean) / spread), 9).tolist()))

    assert sum(found < pairs(own) for own in combinations(sequences, 3)) == 1  # 14 / 5, rounded up
    drawn = next(draws)["x"]
    assert drawn.shape == data["x"].shape
    assert ((drawn == 0) == (data["x"] == 0)).all()
