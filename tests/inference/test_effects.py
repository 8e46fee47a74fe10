"""Effects and counterfactuals against regression, back-door sums and structural equations done by hand."""

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import ModelError


def confounded(rows: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=rows)
    t = 0.8 * z + rng.normal(size=rows)
    return pd.DataFrame({"z": z, "t": t, "y": 1.0 + 1.5 * t - z + rng.normal(size=rows)})


def test_a_linear_effect_and_its_interval_are_those_of_least_squares():
    table = confounded(400, 0)
    graph = otp.Graph([("z", "t"), ("z", "y"), ("t", "y")])
    model = otp.Model(graph, {node: m.Normal() for node in graph.nodes})
    otp.fit(model, table)
    effect = model.effect("t", "y", values=(0.0, 1.0), data=table, level=0.9)
    design = np.column_stack([np.ones(400), table["z"], table["t"]])
    slope, residual, *_ = np.linalg.lstsq(design, table["y"], rcond=None)
    error = np.sqrt(residual[0] / 400 * np.linalg.inv(design.T @ design)[2, 2])  # maximum likelihood divides by n
    row = effect.table.iloc[0]
    assert row["effect"] == pytest.approx(slope[2], abs=1e-6)
    assert row["std_error"] == pytest.approx(error, rel=1e-4)
    assert row["upper"] - row["effect"] == pytest.approx(1.6448536 * row["std_error"])
    assert "adjusting for z" in str(effect)


def test_an_effect_on_a_category_is_the_back_door_sum():
    graph = otp.Graph([("z", "t"), ("z", "y"), ("t", "y")])
    model = otp.Model(graph, {"z": m.Categorical(2), "t": m.Categorical(2), "y": m.Categorical(2)})
    by_z_and_t = np.array([[[0.8, 0.2], [0.5, 0.5]], [[0.3, 0.7], [0.1, 0.9]]])
    model.set_params({"z": {"probs": [0.6, 0.4]}, "t": {"probs": [[0.9, 0.1], [0.2, 0.8]]}, "y": {"probs": by_z_and_t}})
    effect = model.effect("t", "y")
    expected = 0.6 * (0.5 - 0.2) + 0.4 * (0.9 - 0.7)
    assert effect.difference[1, "1"] == pytest.approx(expected)
    assert effect.means.loc[1].tolist() == pytest.approx([1 - 0.6 * 0.5 - 0.4 * 0.9, 0.6 * 0.5 + 0.4 * 0.9])
    conditional = model.effect("t", "y", on={"z": 1})
    assert conditional.difference[1, "1"] == pytest.approx(0.2)
    assert np.isnan(effect.table["std_error"]).all()


def test_effects_that_make_no_sense_are_refused():
    graph = otp.Graph([("t", "w"), ("w", "y")])
    model = otp.Model(graph, {node: m.Normal() for node in graph.nodes})
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(40, 3)), columns=["t", "w", "y"])
    otp.fit(model, table)
    with pytest.raises(ModelError, match="'w' is such a node"):
        model.effect("t", "y", on={"w": 0.0})
    with pytest.raises(ModelError, match="must differ"):
        model.effect("t", "t")
    with pytest.raises(ModelError, match="at least two"):
        model.effect("t", "y", values=[1.0])


def structural() -> otp.Model:
    graph = otp.Graph([("z", "t"), ("z", "y"), ("t", "y")])
    model = otp.Model(graph, {node: m.Normal() for node in graph.nodes})
    return model.set_params(
        {
            "z": {"loc": 0.0, "scale": 1.0},
            "t": {"loc": 1.0, "weight": 2.0, "scale": 0.5},
            "y": {"loc": 0.0, "weight": [-1.0, 3.0], "scale": 2.0},
        }
    )


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


def test_samples_follow_functions_of_what_was_drawn():
    model = structural()
    free = model.sample(2000, seed=3)
    shifted = model.sample(2000, seed=3, do={"t": lambda table: table["t"] + 1.0})
    assert (shifted["t"] - free["t"]).to_numpy() == pytest.approx(1.0)
    assert (shifted["y"] - free["y"]).to_numpy() == pytest.approx(3.0)
    by_z = model.sample(50, seed=3, do={"t": lambda table: np.where(table["z"] > 0, 1.0, -1.0)})
    assert set(by_z["t"]) == {-1.0, 1.0}
