"""Data that a model makes: gaps and covariates are those of rows of the data, all else is the model's."""

import numpy as np
import pandas as pd
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.data.sequences import as_sequences, encode_sequences
from otpdag.simulation import batch_of, simulated_rows, simulated_sequences


def test_rows_have_gaps_and_covariates_of_rows_and_values_of_the_model():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"t": rng.integers(0, 2, 60).astype(float), "y": rng.normal(size=60)})
    table.loc[table["t"] == 1, "y"] = np.nan  # a gap tells of its covariate
    table.loc[:3, "y"] = 0.0
    model = otp.Model(otp.Graph([("t", "y")]), {"t": m.Given(), "y": m.Normal()})
    model.set_params({"y": {"loc": 5.0, "weight": 3.0, "scale": 0.1}})
    batch = encode(table, Schema.of(model.spaces, model.graph, table), hidden=[])
    made = simulated_rows(model.structure, model.fitted.naturals, batch, 4000, seed=1)
    assert made.rows == 4000
    t, y, seen = made.values["t"][0, :, 0], made.values["y"][0, :, 0], made.mask["y"][0, :, 0]
    assert set(t.tolist()) == {0.0, 1.0}
    shown = table["y"].notna()
    assert abs(float(seen.double().mean()) - shown.mean()) < 0.03
    assert abs(float(seen[t == 1].double().mean()) - shown[table["t"] == 1].mean()) < 0.03
    assert float((y[seen] - 5.0 - 3.0 * t[seen]).abs().max()) < 0.5
    assert not y[~seen].any()
    assert torch.equal(made.weight, torch.ones(1, 4000).double())


def test_sequences_are_as_long_as_those_of_the_data():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
    model.set_params(
        {
            "z[0]": {"probs": [1.0, 0.0]},
            "z": {"probs": [[0.0, 1.0], [1.0, 0.0]]},
            "x": {"loc": [0.0, 9.0], "scale": [0.1, 0.1]},
        }
    )
    data = [pd.DataFrame({"x": np.arange(float(n))}) for n in (2, 5)]
    data[1].loc[3, "x"] = np.nan
    sequences = as_sequences(data)
    schema = Schema.of(model.spaces, model.graph, sequences.table)
    batch = encode_sequences(sequences, schema, hidden=["z"])
    made = simulated_sequences(model.structure, model.fitted.naturals, batch, 200, seed=0)
    assert set(made.lengths.tolist()) == {2, 5}
    assert made.steps.rows == int(made.lengths.sum())
    for start, length in zip(made.starts.tolist(), made.lengths.tolist(), strict=True):
        x, seen = (held["x"][0, start : start + length, 0] for held in (made.steps.values, made.steps.mask))
        assert seen.tolist() == [True, True, True, False, True][:length]
        level = torch.tensor([0.0, 9.0] * 3)[:length]
        assert float((x - level)[seen].abs().max()) < 1.0


def test_every_cell_of_a_complete_batch_is_seen():
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Normal(), "x": m.Normal(2)})
    batch = batch_of(model.structure, {"z": torch.zeros(1, 4, 1), "x": torch.ones(1, 4, 2)})
    assert list(batch.values) == ["x"]
    assert batch.mask["x"].shape == (1, 4, 2)
    assert bool(batch.mask["x"].all())
