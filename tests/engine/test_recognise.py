"""Data are read as the kind that they are."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine.document_data import DocumentData
from otpdag.engine.fit import recognise
from otpdag.engine.image_data import ImageData
from otpdag.engine.sequence_data import SequenceData
from otpdag.engine.table_data import TableData
from otpdag.errors import DataError
from otpdag.spaces import Real


def model(kind):
    if kind == "table":
        return otp.Model(otp.Graph([("a", "b")]), {"a": m.Categorical(2), "b": m.Categorical(2)})
    if kind == "sequences":
        graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
        return otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
    if kind == "documents":
        graph = otp.Graph([("shares", "words")], hidden=["shares"])
        return otp.Model(graph, {"shares": m.Dirichlet(2), "words": m.Multinomial(3)})
    graph = otp.Graph([("latent", "image")], hidden=["latent"])
    return otp.Model(graph, {"latent": m.Normal(1), "image": m.Decoder(torch.nn.Linear(1, 4), Real(4))})


COUNTS = np.array([[2, 0, 1], [0, 3, 0], [1, 1, 1]])
TABLE = pd.DataFrame({"a": [0, 1, 1, 0, 1, 1], "b": [1, 0, 0, 1, 1, 0]})


def read(kind, data, **options):
    return recognise(model(kind), data, **{"weights": None, "device": "cpu", "every_row": False, **options})


@pytest.mark.parametrize(
    ("kind", "data", "wanted", "rows"),
    [
        ("table", TABLE, TableData, 6),
        ("sequences", np.zeros((3, 4)), SequenceData, 12),
        ("sequences", [np.zeros(2), np.zeros(5)], SequenceData, 7),
        ("documents", otp.Documents(COUNTS), DocumentData, 3),
        ("documents", sparse.csc_array(COUNTS), DocumentData, 3),
        ("images", otp.Images(np.zeros((6, 1, 2, 2))), ImageData, 6),
    ],
)
def test_the_kind_follows_from_data_and_graph(kind, data, wanted, rows):
    found = read(kind, data)
    assert type(found) is wanted
    assert found.rows == rows


@pytest.mark.parametrize("options", [{"weights": [1.0] * 6}, {"weights": "nonsense"}, {"device": "cuda"}])
def test_what_is_read_already_takes_no_weights_and_no_device(options):
    own = model("table")
    with pytest.raises(DataError, match="TableData are read already: give weights and device when they are made"):
        recognise(own, TableData.of(own, TABLE), **{"weights": None, "device": "cpu", "every_row": False, **options})


def test_the_weight_of_a_sequence_is_what_its_steps_say():
    frame = pd.DataFrame({"id": list("aabbb"), "x": np.arange(5.0), "w": [2.0, 2.0, 1.0, 1.0, 1.0]})
    for data in (otp.Sequences(frame, sequence="id"), otp.Sequences(frame.drop(columns="id"), lengths=[2, 3])):
        named = read("sequences", data, weights="w")
        given = read("sequences", otp.Sequences(frame[["x"]], lengths=[2, 3]), weights=[2.0, 1.0])
        torch.testing.assert_close(named.batch.steps.weight, given.batch.steps.weight)
        assert named.is_weighted
    mixed = otp.Sequences(frame.assign(w=[2.0, 2.0, 1.0, 1.0, 3.0]), sequence="id")
    with pytest.raises(DataError, match="the same in all steps of a sequence; the sequence of row 4"):
        read("sequences", mixed, weights="w")
    with pytest.raises(DataError, match="weights must be numbers, or name a column of a DataFrame; got 'v'"):
        read("sequences", otp.Sequences(frame, sequence="id"), weights="v")
    with pytest.raises(DataError, match="weights must be numbers, or name a column of a DataFrame; got 'w'"):
        read("sequences", [np.zeros(2), np.zeros(5)], weights="w")


def test_rows_that_are_alike_are_one_unless_every_row_is_wanted():
    merged, whole = read("table", TABLE), read("table", TABLE, every_row=True)
    assert (merged.batch.rows, whole.batch.rows) == (3, 6)
    assert sorted(merged.batch.weight[0].tolist()) == [1.0, 2.0, 3.0]
    weight = read("table", TABLE, weights=[1, 2, 3, 4, 5, 6]).batch.weight[0]
    expected = torch.tensor([1.0 + 4, 5, 2 + 3 + 6]).double()  # in the order of their size
    torch.testing.assert_close(weight.sort().values / weight.sum(), expected / expected.sum())


def test_data_that_are_adapted_serve_themselves_and_no_other_model():
    mine = model("table")
    data = TableData.of(mine, TABLE)
    assert recognise(mine, data, weights=None, device="cpu", every_row=False) is data
    with pytest.raises(DataError, match="data were adapted to another model than the one that is fitted"):
        read("table", data)


@pytest.mark.parametrize("data", [[np.zeros(3)], (np.zeros(3),), otp.Sequences(np.zeros((2, 3)))])
def test_sequences_need_a_lagged_edge(data):
    with pytest.raises(DataError, match="data are sequences, but the graph has no lagged edge"):
        read("table", data)
