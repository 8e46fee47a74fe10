"""Sequences, and parts of them."""

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
    "times",
    [
        ["8", "9", "10", "11"],
        [8, "9", "10", 11],
        pd.Categorical(["8", "9", "10", "11"]),
        pd.Categorical(["a", "d", "b", "c"], categories=["a", "d", "b", "c"], ordered=True),
        ["2020-02-01", "2020-02-09", "2020-02-10 08:00", "2020-12-01"],
        pd.period_range("2020-09", periods=4, freq="M"),
        pd.date_range("2020-09-30", periods=4, tz="Europe/Rome"),
    ],
    ids=str,
)
@pytest.mark.parametrize("sequence", ["who", None])
def test_steps_are_ordered_by_what_their_times_say(times, sequence):
    frame = pd.DataFrame({"who": "a", "when": times, "x": [1.0, 2.0, 3.0, 4.0]}).iloc[[2, 0, 3, 1]]
    assert Sequences(frame, sequence=sequence, time="when").table["x"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_weights_of_sequences_are_known_by_their_names():
    rng = np.random.default_rng(4)
    frame = pd.DataFrame({"who": np.repeat(["b", "a"], 20), "x": rng.normal(size=40) + np.repeat([0.0, 3.0], 20)})
    each = pd.Series({"a": 3.0, "b": 1.0})  # as a groupby has it: sorted
    found = []
    for weights in (each, [1.0, 3.0]):
        model = otp.Model(otp.Graph([otp.lag("x", "x")]), {"x": m.Normal()})
        found.append(otp.fit(model, Sequences(frame, sequence="who"), weights=weights).loss)
    assert found[0] == found[1]
    with pytest.raises(otp.DataError, match="weights must have the index of the table, or the names of its sequences"):
        otp.fit(model, Sequences(frame, sequence="who"), weights=each.rename({"a": "c"}))


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
        (lambda: Sequences(pd.DataFrame({"x": [1, 2], "t": ["w9", "w10"]}), time="t"), "'t' must order .* got 'w9'"),
        (lambda: Sequences(pd.DataFrame({"x": [1, 2], "s": [1, "1"]}), sequence="s"), "'1' as text and as a number"),
        (lambda: Sequences(pd.DataFrame([[1, 2, 2]], columns=[*"xtt"]), time="t"), "column 't' must be there once"),
        (lambda: Sequences([pd.DataFrame({"x": [1]}), pd.DataFrame({"y": [1]})]), "same columns; got 'x' and 'y'"),
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


def numbered(lengths):
    """Steps whose value is their row."""
    x = torch.arange(sum(lengths), dtype=torch.float64).reshape(1, -1, 1)
    return SequenceBatch(
        Batch({"x": x}, {"x": torch.ones_like(x).bool()}, torch.ones(1, x.shape[1]).double()), torch.tensor(lengths)
    )


def runs(batch):
    """The rows of each sequence of a part."""
    return [part.tolist() for part in batch.steps.values["x"].flatten().long().split(batch.lengths.tolist())]


def test_all_of_it_if_there_is_not_more():
    batch = numbered([30, 20])
    assert batch.part(50, seed=0) is batch
    assert batch.part(80, seed=0) is batch


def test_short_sequences_stay_whole():
    batch = numbered([10, 20, 30, 40] * 10)
    part = batch.part(200, seed=0)
    whole = {tuple(one) for one in runs(batch)}
    chosen = [tuple(one) for one in runs(part)]
    assert set(chosen) <= whole
    assert len(set(chosen)) == len(chosen)
    assert 200 <= part.rows < 200 + 40  # no more than the last one too many


def test_long_sequences_are_cut_in_pieces_of_neighbouring_steps():
    batch = numbered([5000])
    part = batch.part(1000, seed=0)
    assert 1000 <= part.rows < 1000 + 250
    for run in runs(part):
        assert len(run) == 250
        assert run == list(range(run[0], run[0] + 250))
        assert run[0] % 250 == 0
    rows = part.steps.values["x"].flatten()
    assert len(rows.unique()) == len(rows)


def test_pieces_grow_with_the_part_so_that_there_are_about_forty():
    part = numbered([100_000]).part(40_000, seed=0)
    assert part.lengths.tolist() == [1000] * 40


def test_the_seed_decides_and_sequences_may_be_asked_for():
    batch = numbered([25] * 40)
    first, same, other = (runs(batch.part(300, seed)) for seed in (1, 1, 2))
    assert first == same
    assert first != other
    assert runs(batch.part(torch.tensor([3, 1]), seed=0)) == [list(range(75, 100)), list(range(25, 50))]
