"""Sums along an order, against sums over all joint states."""

from __future__ import annotations

import itertools

import pytest
import torch

from otpdag.likelihood.elimination.sum_product import (
    RandomNumbers,
    Step,
    beliefs,
    draws,
    eliminate,
    replica_draws,
    variable_beliefs,
)

SIZES = (3, 2, 4)  # a - b - c, with tables over (a, b), (b, c), (b) and twice over (c)
REPLICAS, PIECES = 2, 5


def chain(seed):
    """Log-tables of five chains of three variables, the steps that sum them, and their joint log-density."""
    generator = torch.Generator().manual_seed(seed)

    def tables(*sizes):
        return torch.randn(REPLICAS, PIECES, *sizes, generator=generator, dtype=torch.float64)

    ab, bc, b, c, d = tables(3, 2), tables(2, 4), tables(2), tables(4), tables(4)
    joint = ab[..., None] + bc[:, :, None] + b[:, :, None, :, None] + (c + d)[:, :, None, None]
    one = torch.zeros(REPLICAS, 1, 1, dtype=torch.float64)
    room = torch.zeros(REPLICAS, PIECES, 1, dtype=torch.float64)

    def bank(size, *entries):
        return torch.cat([one.expand(-1, 1, size), *(entry.reshape(REPLICAS, PIECES, size) for entry in entries)], 1)

    banks = {
        (2, 3): bank(6, ab.transpose(-1, -2)),
        (2, 4): bank(8, bc),
        (2,): bank(2, b, room.expand(-1, -1, 2), room.expand(-1, -1, 2)),
        (4,): bank(4, c, d),
        (): bank(1, room),
    }
    rows = 1 + torch.arange(PIECES)
    first, second = 1 + PIECES, 1 + 2 * PIECES
    cells = 3 * torch.arange(PIECES)
    column = rows.unsqueeze(1)
    steps = [
        Step((2, 3), {(0, 1): column}, first, cells, (cells + 1).unsqueeze(1)),
        Step(
            (2, 4),
            {(0, 1): column, (1,): torch.stack([rows, rows + PIECES], 1)},
            second,
            cells + 2,
            (cells + 1)[:, None],
        ),
        Step(
            (2,),
            {(0,): torch.stack([rows, rows + first - 1, rows + second - 1], 1)},
            1,
            cells + 1,
            cells[:, None][:, :0],
        ),
    ]
    return joint, banks, steps


@pytest.mark.parametrize("seed", range(3))
def test_evidence_and_beliefs_are_those_of_all_joint_states(seed):
    joint, banks, steps = chain(seed)
    joint.requires_grad_(True)
    evidence = joint.flatten(2).logsumexp(-1)
    shares = torch.autograd.grad(evidence.sum(), joint)[0]
    conditionals = eliminate(steps, banks)
    torch.testing.assert_close(banks[()][:, 1:, 0], evidence.detach())
    weight = torch.rand(REPLICAS, PIECES, 1, dtype=torch.float64)
    out = {sizes: torch.zeros_like(bank) for sizes, bank in banks.items()}
    out[()][:, 1:] = weight
    told = dict.fromkeys(range(3))
    for cell, belief in variable_beliefs(steps, conditionals, out):
        told[int(cell[0]) % 3] = belief
    for axis, away in enumerate(((3, 4), (2, 4), (2, 3))):
        torch.testing.assert_close(told[axis], weight * shares.sum(away))
    torch.testing.assert_close(out[2, 3][:, 1:], weight * shares.sum(4).transpose(-1, -2).flatten(2))
    torch.testing.assert_close(out[2, 4][:, 1:], weight * shares.sum(2).flatten(2))
    torch.testing.assert_close(out[4,][:, 1 : 1 + PIECES], out[4,][:, 1 + PIECES :])
    again = {sizes: torch.zeros_like(bank) for sizes, bank in banks.items()}
    again[()][:, 1:] = weight
    beliefs(steps, conditionals, again)
    assert all(torch.equal(again[sizes], out[sizes]) for sizes in out)


def test_the_largest_entry_instead_of_the_sum():
    joint, banks, steps = chain(7)
    conditionals = eliminate(steps, banks, best=True)
    torch.testing.assert_close(banks[()][:, 1:, 0], joint.flatten(2).amax(-1))
    states = draws(steps, conditionals, 3 * PIECES, 1, RandomNumbers(torch.Generator().manual_seed(0)))
    best = joint[0].flatten(1).argmax(-1)
    expected = torch.stack(torch.unravel_index(best, SIZES), 1)
    assert torch.equal(states.reshape(PIECES, 3), expected)


def test_draws_are_joint():
    joint, banks, steps = chain(5)
    conditionals = eliminate(steps, banks)
    numbers = RandomNumbers(torch.Generator().manual_seed(1))
    states = draws(steps, conditionals, 3 * PIECES, 20_000, numbers).reshape(PIECES, 3, -1)
    shares = joint.flatten(2).softmax(-1).reshape(joint.shape)
    for a, b, c in itertools.product(*map(range, SIZES)):
        here = (states[:, 0] == a) & (states[:, 1] == b) & (states[:, 2] == c)
        torch.testing.assert_close(here.double().mean(-1), shares[0, :, a, b, c], atol=0.016, rtol=0)
    generator = torch.Generator().manual_seed(2)
    many = torch.stack([replica_draws(steps, conditionals, 3 * PIECES, generator) for _ in range(3000)])
    first = many.reshape(-1, PIECES, 3, REPLICAS)[:, :, 0].permute(2, 1, 0)  # (R, pieces, draws) of a
    for a in range(3):
        torch.testing.assert_close(
            (first == a).double().mean(-1), shares[..., a, :, :].sum((-1, -2)), atol=0.04, rtol=0
        )


def test_what_is_impossible_is_not_a_nan():
    _, banks, steps = chain(3)
    banks[4,][:, 1] = -torch.inf
    conditionals = eliminate(steps, banks)
    assert banks[()][0, 1, 0] < -1e300
    assert all(bool(torch.isfinite(one).all()) for one in conditionals)


def test_a_step_without_tables_is_a_bug():
    _, banks, steps = chain(3)
    with pytest.raises(RuntimeError, match="at least one table"):
        eliminate([Step((2,), {}, 1, steps[0].cell, steps[2].separator)], banks)
