"""Reading sequences from every kind of table."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch, Sequences


def test_a_frame_is_put_in_order_of_sequence_and_time():
    frame = pd.DataFrame({"who": ["b", "a", "b", "a", "b"], "day": [3, 2, 1, 1, 2], "x": [1.0, 2.0, 3.0, 4.0, 5.0]})
    found = Sequences(frame, sequence="who", time="day")
    assert found.lengths.tolist() == [3, 2]
    assert found.table["x"].tolist() == [3.0, 5.0, 1.0, 4.0, 2.0]
    assert found.index.tolist() == [2, 4, 0, 3, 1]


@pytest.mark.parametrize(
    ("data", "lengths", "shape"),
    [
        (np.zeros(5), [5], (5, 1)),
        (np.zeros((3, 4)), [4, 4, 4], (12, 1)),
        (np.zeros((3, 4, 2)), [4, 4, 4], (12, 2)),
        ([np.zeros(3), np.zeros(1)], [3, 1], (4, 1)),
        ([np.zeros((3, 2)), np.zeros((2, 2))], [3, 2], (5, 2)),
        (torch.zeros(2, 3), [3, 3], (6, 1)),
        ([0.0, 1.0, 2.0], [3], (3, 1)),
    ],
)
def test_arrays_and_lists(data, lengths, shape):
    found = Sequences(data)
    assert found.lengths.tolist() == lengths
    assert found.table.shape == shape


def test_lengths_split_a_table():
    assert Sequences(np.zeros((5, 2)), lengths=[2, 3]).lengths.tolist() == [2, 3]
    assert Sequences(pd.DataFrame({"x": range(5)}), lengths=[2, 3]).lengths.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Sequences(np.zeros((5, 1)), lengths=[2, 2]), "add up to the number of steps, 5; they add up to 4"),
        (lambda: Sequences(np.zeros((5, 1)), lengths=[5, 0]), "at least 1"),
        (lambda: Sequences([]), "at least one sequence"),
        (lambda: Sequences([np.zeros((2, 1)), np.zeros((2, 3))]), "of one width"),
        (lambda: Sequences(np.zeros((1, 2, 3, 4))), "must have shape"),
        (lambda: Sequences(np.zeros(3), time="t"), "columns of a DataFrame"),
        (lambda: Sequences(pd.DataFrame({"x": [1]}), time="t"), "time must name a column; got 't'"),
        (lambda: Sequences(pd.DataFrame({"x": [1, 2], "t": [1, 1]}), time="t"), "found .1. twice"),
        (lambda: Sequences(pd.DataFrame({"x": [1, 2], "t": [1, None]}), time="t"), "no missing values"),
        (lambda: Sequences({"x": np.zeros((2, 3)), "y": np.zeros((2, 4))}), "same sequences for every node"),
    ],
)
def test_bad_sequences_are_refused(call, message):
    with pytest.raises(otp.DataError, match=message):
        call()


def batch():
    x = torch.arange(6.0).reshape(1, 6, 1)
    steps = Batch({"x": x}, {"x": torch.ones_like(x).bool()}, torch.ones(1, 6))
    return SequenceBatch(steps, torch.tensor([4, 2]))


def test_lags_stay_inside_their_sequence():
    found = batch()
    assert found.lagged(found.steps.values["x"], 1).flatten().tolist() == [0, 0, 1, 2, 4, 4]
    assert found.lagged(found.steps.values["x"], 3).flatten().tolist() == [0, 0, 0, 0, 4, 4]


def test_cutting_makes_pieces():
    found = batch().cut(3)
    assert found.lengths.tolist() == [3, 1, 2]
    assert found.take(torch.tensor([2, 0])).steps.values["x"].flatten().tolist() == [4, 5, 0, 1, 2]


def test_sequences_need_a_lagged_edge():
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
    with pytest.raises(otp.DataError, match="no lagged edge"):
        otp.fit(model, [np.zeros(5)])
