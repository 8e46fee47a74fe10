"""Long sequences cut in pieces with context."""

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ModelError
from otpdag.learned.sequence_steps import Cuts, check_context
from otpdag.structure import lag_name
from tests.dynamic_models import poisson_steps


def hmm(size=3, transition=None):
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": transition or m.Categorical(size), "x": m.Poisson()})


def test_pieces_count_every_step_once():
    batch = poisson_steps([95, 7, 41])
    cuts = Cuts.of(batch)
    features = torch.arange(batch.rows, dtype=torch.float64).reshape(1, -1, 1)
    pieces = cuts.take(hmm().structure, features, torch.arange(len(cuts)))
    counted = pieces.features[0, pieces.counted, 0].sort().values
    torch.testing.assert_close(counted, torch.arange(batch.rows, dtype=torch.float64))
    lagged = pieces.lagged(pieces.features, 1)[0, :, 0]
    follows = pieces.follows(1) & pieces.counted
    torch.testing.assert_close(lagged[follows], pieces.features[0, follows, 0] - 1)
    assert int(follows.sum()) == batch.rows - 3


def driven():
    """A hidden category with two lags of an observed number beside it."""
    edges = [otp.lag("z", "z"), ("z", "x"), otp.lag("x", "x"), otp.lag("x", "x", by=2), ("k", "x")]
    graph = otp.Graph(edges, hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "k": m.Normal()}).structure


def steps_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    rows = sum(lengths)
    values = {name: torch.as_tensor(rng.normal(size=(1, rows, 1))) for name in "xk"}
    mask = {name: torch.as_tensor(rng.random((1, rows, 1)) < 0.8) for name in "xk"}
    return SequenceBatch(Batch(values, mask, torch.ones(1, rows).double()), torch.tensor(lengths))


@pytest.mark.parametrize(("lengths", "counted", "context"), [((9, 4, 1), 4, 2), ((5, 3), 5, 2), ((8, 8), 3, 1)])
def test_cuts_are_as_even_as_can_be(lengths, counted, context):
    cuts = Cuts.of(steps_of(lengths), counted=counted, context=context)
    expected, start = [], 0
    for length in lengths:
        many = -(-length // counted)
        each = -(-length // many)
        for piece in range(many):
            first = start + piece * each
            last = min(first + each, start + length)
            expected.append((max(first - context, start), first, last, start + length))
        start += length
    found = zip(*(one.tolist() for one in (cuts.begin, cuts.first, cuts.last, cuts.end)), strict=True)
    assert list(found) == expected
    assert len(cuts) == len(expected)
    longest = max(-(-length // -(-length // counted)) for length in lengths)
    assert cuts.span == longest + (2 * context if max(lengths) > counted else 0)


def test_pieces_show_what_their_steps_show():
    """Every cell of every piece by its number in the sequences."""
    structure, lengths = driven(), (9, 4, 1)
    batch = steps_of(lengths)
    cuts = Cuts.of(batch, counted=4, context=2)
    features = torch.arange(1.0, batch.rows + 1).double().reshape(1, -1, 1)
    chosen = torch.tensor([2, 0, 4, 3])
    pieces = cuts.take(structure, features, chosen)
    assert pieces.block.sizes == (4,) * cuts.span
    assert pieces.block.kinds.tolist() == list(range(cuts.span * 4))
    begins = np.concatenate([[0], np.cumsum(lengths)])
    x, seen = batch.steps.values["x"][0, :, 0], batch.steps.mask["x"][0, :, 0]
    for step, number in np.ndindex(cuts.span, 4):
        at, piece = step * 4 + number, int(chosen[number])
        row = int(cuts.begin[piece]) + step
        inside = row < int(cuts.end[piece])
        assert bool(pieces.inside[at]) == inside
        assert bool(pieces.counted[at]) == (int(cuts.first[piece]) <= row < int(cuts.last[piece]))
        assert pieces.block.steps[at].item() == step
        assert pieces.features[0, at, 0].item() == (row + 1 if inside else 0.0)
        if not inside:
            assert not bool(pieces.mask["x"][0, at, 0])
            continue
        time = row - max(begin for begin in begins if begin <= row)
        assert pieces.times[at].item() == time
        assert pieces.values["x"][0, at, 0] == x[row]
        assert bool(pieces.mask["x"][0, at, 0]) == bool(seen[row])
        for by in (1, 2):
            follows = time >= by and step >= by
            assert bool(pieces.follows(by)[at]) == follows
            name = lag_name("x", by)
            assert bool(pieces.mask[name][0, at, 0]) == (follows and bool(seen[row - by]))
            if follows:
                assert pieces.values[name][0, at, 0] == x[row - by]
        known = bool(batch.steps.mask["k"][0, row, 0])
        before = [step >= by and time >= by and bool(seen[row - by]) for by in (1, 2)]
        made = bool(pieces.counted[at]) and time >= 2 and known and all(before)
        assert bool(pieces.made("x")[at]) == made
        assert bool(pieces.made("k")[at]) == bool(pieces.counted[at])
        assert bool(pieces.made("z")[at]) == (bool(pieces.counted[at]) and time >= 1 and step >= 1)
        assert bool(pieces.made("z[0]")[at]) == (bool(pieces.counted[at]) and time < 1)
        rows = pieces.as_batch()
        assert bool(rows.mask["x"][0, at, 0]) == (made and bool(seen[row]))
        assert rows.weight[0, at].item() == float(pieces.counted[at])
        assert set(rows.values) == {"x", "k"}


def test_pieces_are_drawn_in_proportion_to_their_steps():
    structure, batch = driven(), steps_of((12, 2))
    cuts = Cuts.of(batch, counted=6, context=1)
    features = torch.zeros(1, batch.rows, 1).double()
    generator = torch.Generator().manual_seed(0)
    some = cuts.draw(structure, features, 2, generator)
    assert some.block.sizes[0] == 2
    many = cuts.draw(structure, features, 4000, generator)
    share = many.counted.unflatten(0, (cuts.span, 4000)).sum(0)
    assert (share == 2).double().mean().item() == pytest.approx(2 / 14, abs=0.02)
    whole = cuts.draw(structure, features, 3, generator)
    assert int(whole.counted.sum()) == 14


def test_lags_that_reach_further_than_pieces_read_are_refused():
    for by, refused in ((8, False), (9, True)):
        graph = otp.Graph([otp.lag("x", "x", by=by)])
        structure = otp.Model(graph, {"x": m.Normal()}).structure
        if refused:
            with pytest.raises(ModelError, match=r"pieces of sequences read 8 steps around them; .* reaches further"):
                check_context(structure)
        else:
            check_context(structure)
