"""Effects against regression and back-door sums."""

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
