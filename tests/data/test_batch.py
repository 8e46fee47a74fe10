"""Batches: rows picked, stacked and collapsed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from otpdag.data import Batch, Schema, encode, random_part
from otpdag.data.batch import canonical_order, row_hashes, unique_rows
from otpdag.data.table import read_cells
from otpdag.errors import DataError
from otpdag.graph import Graph
from otpdag.spaces import Discrete, Real, Space


def schema_of(data: Any = None, **spaces: Space) -> Schema:
    return Schema.of(spaces, Graph([], nodes=list(spaces)), data)


def read(data: Any, partial: bool = False, **spaces: Space) -> Batch:
    return encode(data, schema_of(data, **spaces), hidden=(), partial=partial)


@pytest.fixture
def batch() -> Batch:
    values = torch.arange(10.0).reshape(1, 5, 2)
    return Batch({"x": values}, {"x": values > 2}, torch.arange(5.0)[None])


def test_a_narrow_batch_has_bytes_and_the_rows_taken_of_it_are_those_of_a_wide_one() -> None:
    data = {"k": [0, 2, None, 1, 2], "x": [1.5, None, 2.5, 0.5, -1.0]}
    schema, order = schema_of(k=Discrete(3), x=Real()), np.array([3, 1, 4, 0, 2])
    narrow, wide = (read_cells(data, schema, hidden=()).batch(order=order, narrow=flag) for flag in (True, False))
    assert narrow.values["k"].dtype == torch.uint8
    assert narrow.weight.untyped_storage().nbytes() == 8
    parts = (
        lambda b: b.widened(),
        lambda b: b.take(torch.tensor([4, 0])),
        lambda b: b.take(torch.tensor([[4, 0], [1, 1]])),
        lambda b: b.first(2),
        lambda b: b.between(1, 4),
    )
    for part in parts:
        one, other = part(narrow), part(wide)
        assert torch.equal(one.weight.expand_as(other.weight), other.weight)
        for node in other.nodes:
            assert one.values[node].dtype == torch.float64
            assert torch.equal(one.values[node], other.values[node])
            assert torch.equal(one.mask[node], other.mask[node])
    assert wide.widened() is wide


def test_weights_that_differ_stay_with_their_rows_in_a_narrow_batch() -> None:
    cells = read_cells({"x": [1.0, 2.0, 3.0]}, schema_of(x=Real()), hidden=(), weights=[1.0, 2.0, 3.0])
    assert cells.batch(order=np.array([2, 0, 1]), narrow=True).weight.tolist() == [[1.5, 0.5, 1.0]]


def test_a_random_part_has_different_rows_and_holds_no_others() -> None:
    part = random_part(1000, 10, seed=3)
    assert part is not None
    assert len(set(part.tolist())) == 10
    assert part.untyped_storage().nbytes() == 80
    assert torch.equal(part, torch.randperm(1000, generator=torch.Generator().manual_seed(3))[:10])


def test_take_rows(batch: Batch) -> None:
    part = batch.take(torch.tensor([3, 0]))
    assert part.values["x"].tolist() == [[[6, 7], [0, 1]]]
    assert part.mask["x"].tolist() == [[[True, True], [False, False]]]
    assert part.weight.tolist() == [[3, 0]]
    assert batch.take(torch.tensor([True, False, False, False, True])).weight.tolist() == [[0, 4]]


def test_take_rows_for_each_replica(batch: Batch) -> None:
    part = batch.take(torch.tensor([[3, 0], [1, 1]]))
    assert (part.rows, part.replicas) == (2, 2)
    assert part.weight.tolist() == [[3, 0], [1, 1]]
    again = part.take(torch.tensor([[1], [0]]))
    assert again.values["x"].tolist() == [[[0, 1]], [[2, 3]]]
    shared = Batch(batch.values, batch.mask, batch.weight.repeat(3, 1))
    assert shared.take(torch.tensor([[0], [1], [2]])).values["x"].tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_take_refuses_other_shapes(batch: Batch) -> None:
    with pytest.raises(DataError, match=r"index must have shape \(n,\) or \(replicas, n\); got \(1, 1, 1\)"):
        batch.take(torch.zeros(1, 1, 1, dtype=torch.long))


def test_to(batch: Batch) -> None:
    moved = batch.to("cpu", torch.float64)
    assert (moved.values["x"].dtype, moved.weight.dtype) == (torch.float64, torch.float64)
    assert moved.mask["x"].dtype == torch.bool
    assert batch.to(dtype=torch.float32).values["x"].dtype == torch.float32


def test_repr(batch: Batch) -> None:
    assert repr(batch) == "Batch(5 rows: x)"
    assert repr(Batch(batch.values, batch.mask, batch.weight.repeat(2, 1))) == "Batch(5 rows, 2 replicas: x)"


@settings(deadline=None)
@given(
    hnp.arrays(np.int64, st.tuples(st.integers(2, 60), st.just(2)), elements=st.integers(-1, 2)),
    st.sampled_from([0.5, 1.0]),
)
def test_unique_rows_keep_the_weighted_table(codes: np.ndarray, shrink: float) -> None:
    table = np.where(codes < 0, np.nan, codes)
    weights = np.arange(1.0, len(codes) + 1)
    schema = schema_of(a=Discrete(3), b=Discrete(3))
    batch = encode(table, schema, hidden=(), weights=weights, partial=True)
    small = unique_rows(batch, shrink=shrink)
    assert torch.isclose(small.weight.sum(), torch.tensor(float(len(codes)), dtype=torch.float64))
    for node in batch.nodes:
        total = torch.einsum("bn,bnw->bw", batch.weight, batch.values[node])
        assert torch.allclose(torch.einsum("bn,bnw->bw", small.weight, small.values[node]), total)
    distinct = len(np.unique(codes, axis=0))
    assert small.rows == (distinct if distinct <= shrink * len(codes) else len(codes))


def test_unique_rows_with_replicas() -> None:
    values = torch.tensor([[[1.0], [1.0], [2.0], [1.0]], [[5.0], [5.0], [5.0], [6.0]]])
    batch = Batch({"x": values}, {"x": torch.ones(1, 4, 1).bool()}, torch.ones(1, 4))
    small = unique_rows(batch, shrink=1.0)
    assert small.values["x"].tolist() == [[[1], [2], [1]], [[5], [5], [6]]]
    assert small.weight.tolist() == [[2, 1, 1]]


def test_unique_rows_of_many_columns() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 3, (20, 60))[rng.integers(0, 20, 500)]
    spaces = {f"n{place}": Discrete(3) for place in range(60)}
    batch = encode(rows, schema_of(**spaces), hidden=())
    assert unique_rows(batch).rows == len(np.unique(rows, axis=0))


def test_unique_rows_leave_continuous_tables_alone() -> None:
    batch = read(np.random.default_rng(0).random((50, 1)), x=Real())
    assert unique_rows(batch) is batch


def test_the_canonical_order_depends_on_content_alone():
    rng = np.random.default_rng(0)
    number, kind = rng.normal(size=60), rng.integers(0, 2, 60).astype(float)
    number[:20], number[20:30] = np.nan, 1.5  # which leaves rows to the second column, and equal ones
    rows = np.stack([number, kind], 1)
    shuffled = rows[rng.permutation(60)]
    orders = [canonical_order(list(table.T), 60) for table in (rows, shuffled)]
    assert sorted(orders[0]) == list(range(60))
    np.testing.assert_array_equal(rows[orders[0]], shuffled[orders[1]])


@pytest.mark.parametrize("distinct", [1, 7, 100_000], ids=["constant", "few", "many"])
def test_rows_are_hashed_by_the_ranks_of_their_cells(distinct):
    """By numpy's ranks, column by column: cells, whether they are seen, and weights."""
    rng = np.random.default_rng(0)
    cells = rng.integers(0, distinct, 20_000) * 0.5 - 3.0
    gaps = rng.random(20_000) < 0.1
    batch = read({"a": np.where(gaps, np.nan, cells)}, a=Real())
    expected = np.zeros(20_000, dtype=np.uint64)
    for column in (np.where(gaps, -np.inf, cells), ~gaps, np.ones(20_000)):
        spread = (expected ^ np.unique(column, return_inverse=True)[1].astype(np.uint64)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        expected = spread ^ (spread >> np.uint64(29))
    np.testing.assert_array_equal(row_hashes(batch), expected)
