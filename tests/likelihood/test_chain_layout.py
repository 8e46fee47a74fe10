"""Sequences laid out for a chain, cell by cell: blocks, stretches, distinct steps, and what is unknown."""

from collections import Counter

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import DataError, ModelError
from otpdag.likelihood.chain_layout import Block, Stretches, _blocks, joint_states, lay_out_chain, one_block, pairs_vary
from otpdag.spaces import Discrete
from otpdag.structure import lag_name

LENGTHS = (3, 7, 1, 7, 5)


def sizes_of(lengths):
    return tuple(sum(length > step for length in lengths) for step in range(max(lengths)))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("lengths", [(7, 7, 5, 3, 1), (4,), (6, 6, 6), (9, 2)])
def test_stretches_cut_sequences_from_their_ends(lengths, length):
    found = Stretches.of(torch.tensor(sizes_of(lengths)), length)
    starts = np.cumsum([0, *sizes_of(lengths)])
    columns, inside, owners, ends, begins = [], [], [], [], {}
    for number, steps in enumerate(lengths):
        many = -(-steps // length)
        empty = many * length - steps
        begins.setdefault(empty, []).append(len(owners))
        for stretch in range(many):
            times = [stretch * length - empty + place for place in range(length)]
            inside.append([time >= 0 for time in times])
            columns.append([starts[time] + number if time >= 0 else 0 for time in times])
            owners.append(number)
        ends.append(len(owners) - 1)
    np.testing.assert_array_equal(found.columns, np.array(columns).T)
    np.testing.assert_array_equal(found.inside, np.array(inside).T)
    assert found.owners.tolist() == owners
    assert found.ends.tolist() == ends
    assert {at: which.tolist() for at, which in found.begins} == begins
    assert [at for at, _ in found.begins] == sorted(begins)
    # every column stands where it says
    assert found.columns.flatten()[found.place].tolist() == list(range(sum(lengths)))
    assert found.inside.flatten()[found.place].all()


def batch_of(lengths, seed=0, values=3):
    rng, rows = np.random.default_rng(seed), sum(lengths)
    x = torch.as_tensor(rng.integers(0, values, (1, rows, 1))).double()
    mask = torch.as_tensor(rng.random((1, rows, 1)) < 0.9)
    steps = Batch({"x": torch.where(mask, x, 0.0)}, {"x": mask}, torch.ones(1, rows).double())
    return SequenceBatch(steps, torch.tensor(lengths))


@pytest.mark.parametrize("most", [1, 7, 14, 100])
def test_blocks_hold_sequences_of_like_length_step_by_step(most):
    batch = batch_of(LENGTHS)
    kinds = torch.arange(100, 100 + batch.rows)
    blocks = _blocks(batch, kinds, most)
    order = sorted(range(5), key=lambda number: -LENGTHS[number])
    starts = np.cumsum([0, *LENGTHS])
    assert torch.cat([block.sequences for block in blocks]).tolist() == order
    at = 0
    for block in blocks:
        own = order[at : at + max(1, most // LENGTHS[order[at]])]
        at += len(own)
        assert block.sequences.tolist() == own
        assert block.sizes == sizes_of([LENGTHS[number] for number in own])
        rows = [starts[number] + step for step in range(len(block.sizes)) for number in own if step < LENGTHS[number]]
        assert block.rows.tolist() == rows
        assert block.kinds.tolist() == [100 + row for row in rows]
        owners = [i for step in range(len(block.sizes)) for i, number in enumerate(own) if step < LENGTHS[number]]
        assert block.owners.tolist() == owners
        first = np.cumsum([0, *block.sizes])
        assert block.spans == [(first[step], size) for step, size in enumerate(block.sizes)]
        columns = [[first[step] + i for step in range(LENGTHS[number])] for i, number in enumerate(own)]
        assert [one.tolist() for one in block.columns] == columns
    (whole,) = one_block(batch)
    assert whole.sequences.tolist() == order
    assert whole.kinds.tolist() == whole.rows.tolist()
    stretched = Block(whole.kinds, whole.rows, whole.sizes, whole.sequences).in_stretches
    assert stretched.place.shape == (batch.rows,)


def model_of(edges, nodes, hidden=("z",)):
    return otp.Model(otp.Graph(edges, hidden=hidden), nodes).structure


def lagged_model():
    edges = [otp.lag("z", "z"), ("z", "x"), otp.lag("x", "x", by=2)]
    return model_of(edges, {"z": m.Categorical(2), "x": m.Normal()})


@pytest.mark.parametrize(("values", "alike"), [(1, True), (40, False)])
def test_steps_that_show_the_same_are_laid_out_once(values, alike):
    structure = lagged_model()
    batch = batch_of((30, 12, 20), values=values)
    chain = lay_out_chain(structure, batch)
    assert (chain.steps, chain.sequences, chain.longest_lag, chain.varying) == (62, 3, 2, False)
    assert set(chain.values) == {"x", lag_name("x", 2)}
    starts = np.cumsum([0, 30, 12, 20])
    x, seen = batch.steps.values["x"][0, :, 0].tolist(), batch.steps.mask["x"][0, :, 0].tolist()
    shown = []
    for row in range(62):
        time = row - max(start for start in starts if start <= row)
        before = row - min(time, 2)
        shown.append((min(time, 2), x[row], seen[row], x[before], seen[before]))
    for block in chain.blocks:
        for row, kind in zip(block.rows.tolist(), block.kinds.tolist(), strict=True):
            phase, value, known, earlier, was_known = shown[row]
            assert chain.phase[kind].item() == phase
            assert (chain.values["x"][0, kind, 0].item(), bool(chain.mask["x"][0, kind, 0])) == (value, known)
            if phase == 2:
                name = lag_name("x", 2)
                assert chain.values[name][0, kind, 0].item() == earlier
                assert bool(chain.mask[name][0, kind, 0]) == was_known
    assert (len(chain.phase) == len(set(shown))) if alike else (len(chain.phase) == 62)
    if alike:
        assert Counter(kind for block in chain.blocks for kind in block.kinds.tolist()).total() == 62
    known = chain.seen(["x"])
    assert known.tolist() == chain.mask["x"][0, :, 0].tolist()
    assert chain.seen([]).all()
    assert chain.dtype == torch.float64


def test_blocks_of_a_chain_hold_so_many_entries():
    chain = lay_out_chain(lagged_model(), batch_of((10,) * 6), block_steps=40)
    assert [len(block.sequences) for block in chain.blocks] == [2, 2, 2]  # twenty steps of two states


VARYING = {
    "plain": ([otp.lag("z", "z"), ("z", "x")], {}, False),
    "driven": ([otp.lag("z", "z"), ("u", "z"), ("z", "x")], {"u": m.Given(Discrete(2))}, True),
    "a lagged emission": ([otp.lag("z", "z"), ("z", "x"), otp.lag("z", "x")], {}, True),
    "driven now": ([otp.lag("z", "z"), ("z", "x"), ("u", "x")], {"u": m.Given(Discrete(2))}, False),
    "driven without memory": ([("u", "z"), ("z", "x"), otp.lag("x", "x")], {"u": m.Given(Discrete(2))}, False),
}


@pytest.mark.parametrize("name", VARYING)
def test_pairs_of_states_vary_where_what_joins_them_reads_something_observed(name):
    edges, others, varies = VARYING[name]
    structure = model_of(edges, {"z": m.Categorical(2), "x": m.Poisson(), **others})
    assert pairs_vary(structure, joint_states(structure, ("z",))) is varies


def test_observed_categories_with_gaps_and_children_are_unknown_too():
    rng = np.random.default_rng(0)
    one_hot = torch.eye(2).double()[torch.as_tensor(rng.integers(0, 2, 12))][None]
    seen = torch.ones(1, 12, 1, dtype=torch.bool)
    gaps = seen.clone()
    gaps[0, 3] = False
    x = torch.as_tensor(rng.normal(size=(1, 12, 1)))
    worlds = {
        "child": ([otp.lag("z", "z"), ("z", "k"), ("k", "x")], gaps, ("z", "k")),
        "later": ([otp.lag("z", "z"), ("z", "x"), otp.lag("k", "x")], gaps, ("z", "k")),
        "leaf": ([otp.lag("z", "z"), ("z", "k"), ("z", "x")], gaps, ("z",)),
        "whole": ([otp.lag("z", "z"), ("z", "k"), ("k", "x")], seen, ("z",)),
    }
    for edges, mask, unknown in worlds.values():
        structure = model_of(edges, {"z": m.Categorical(2), "k": m.Categorical(2), "x": m.Normal()})
        steps = Batch({"k": one_hot, "x": x}, {"k": mask, "x": seen}, torch.ones(1, 12).double())
        chain = lay_out_chain(structure, SequenceBatch(steps, torch.tensor([7, 5])))
        assert set(chain.states.nodes) == set(unknown)


def test_what_a_chain_cannot_hold_is_refused():
    batch = batch_of((4,))
    number = model_of([otp.lag("z", "z"), ("z", "x")], {"z": m.Normal(), "x": m.Normal()})
    with pytest.raises(ModelError, match="hidden node 'z' is no category"):
        lay_out_chain(number, batch)
    driven = model_of(
        [otp.lag("z", "z"), ("x", "z"), ("z", "y")], {"z": m.Categorical(2), "x": m.Given(), "y": m.Normal()}
    )
    gaps = torch.tensor([True, True, False, True]).reshape(1, 4, 1)
    values = {"x": torch.zeros(1, 4, 1).double(), "y": torch.zeros(1, 4, 1).double()}
    steps = Batch(values, {"x": gaps, "y": torch.ones_like(gaps)}, torch.ones(1, 4).double())
    with pytest.raises(DataError, match="node 'x' is Given: its values must not be missing"):
        lay_out_chain(driven, SequenceBatch(steps, torch.tensor([4])))
