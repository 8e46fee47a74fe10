"""Minibatches of a table in parts: which rows are at hand when, beside the numbers that they should have."""

import torch

from otpdag.data import Batch, random_part
from otpdag.learned.sampled import Pools, pools_for

TOTAL, HELD, SEED = 1000, 100, 7


def numbered(rows):
    """A batch whose values are the numbers of its rows."""
    value = rows.double().reshape(1, -1, 1)
    return Batch({"x": value}, {"x": torch.ones_like(value, dtype=torch.bool)}, torch.ones(1, len(rows)).double())


def pools(number=4, read=None):
    def picked(rows):
        if read is not None:
            read.append(rows)
        return numbered(rows)

    return Pools(numbered(torch.arange(HELD)), picked, TOTAL, number, SEED)


def at(made, progress):
    return made.at(progress).values["x"][0, :, 0].long()


def test_shares_of_the_steps_have_rows_of_their_own():
    made = pools()
    assert torch.equal(at(made, 0.0), torch.arange(HELD))
    assert torch.equal(at(made, 0.249), torch.arange(HELD))
    for progress, which in [(0.25, 1), (0.499, 1), (0.5, 2), (0.75, 3), (0.9999, 3), (1.0, 3)]:
        assert torch.equal(at(made, progress), random_part(TOTAL, HELD, SEED + which))
        assert len(at(made, progress).unique()) == HELD


def test_rows_are_read_once_while_they_serve_and_again_when_asked_for_again():
    read = []
    made = pools(read=read)
    for progress in (0.3, 0.4, 0.6, 0.7, 0.3):
        at(made, progress)
    assert len(read) == 3
    assert torch.equal(read[0], read[2])
    assert len(made.last) == 1


def test_all_parts_of_a_table_have_the_same_chance():
    made = pools(number=40)
    counts = torch.zeros(TOTAL)
    for which in range(1, 40):
        counts[at(made, (which + 0.5) / 40)] += 1
    assert counts.sum() == 39 * HELD
    quarters = counts.reshape(4, -1).sum(1)  # 975 each, with a standard deviation of 26
    assert (quarters - 975).abs().max() < 100


def test_as_many_pools_as_rows_are_drawn():
    assert pools_for(10, 5, 100) == 1
    assert pools_for(10, 10, 100) == 1
    assert pools_for(11, 10, 100) == 2
