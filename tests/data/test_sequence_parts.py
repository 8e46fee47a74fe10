"""Parts of sequences."""

import torch

from otpdag.data import Batch
from otpdag.data.sequences import PIECE, SequenceBatch, part_of


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
    assert part_of(batch, 50, seed=0) is batch
    assert part_of(batch, 80, seed=0) is batch


def test_short_sequences_stay_whole():
    batch = numbered([10, 20, 30, 40] * 10)
    part = part_of(batch, 200, seed=0)
    whole = {tuple(one) for one in runs(batch)}
    chosen = [tuple(one) for one in runs(part)]
    assert set(chosen) <= whole
    assert len(set(chosen)) == len(chosen)
    assert 200 <= part.rows < 200 + 40  # no more than the last one too many


def test_long_sequences_are_cut_in_pieces_of_neighbouring_steps():
    batch = numbered([5000])
    part = part_of(batch, 1000, seed=0)
    assert 1000 <= part.rows < 1000 + PIECE
    for run in runs(part):
        assert len(run) == PIECE
        assert run == list(range(run[0], run[0] + PIECE))
        assert run[0] % PIECE == 0
    rows = part.steps.values["x"].flatten()
    assert len(rows.unique()) == len(rows)


def test_pieces_grow_with_the_part_so_that_there_are_about_forty():
    part = part_of(numbered([100_000]), 40_000, seed=0)
    assert part.lengths.tolist() == [1000] * 40


def test_the_seed_decides_and_sequences_may_be_asked_for():
    batch = numbered([25] * 40)
    first, same, other = (runs(part_of(batch, 300, seed)) for seed in (1, 1, 2))
    assert first == same
    assert first != other
    assert runs(part_of(batch, torch.tensor([3, 1]), seed=0)) == [list(range(75, 100)), list(range(25, 50))]
