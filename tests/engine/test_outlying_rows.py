"""Rows that lie apart, against what was put there."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from otpdag.engine.outlying_rows import (
    ApartOptions,
    apart_groups,
    apart_sides,
    central_rows,
    dense_rows,
    joined_rows,
    tail_weights,
)

RNG = np.random.default_rng(0)
OPTIONS = ApartOptions()


def test_rows_beyond_a_gap_or_far_out_are_apart_on_their_side():
    bulk = RNG.uniform(-1.5, 1.5, (200, 2))
    columns = np.concatenate([bulk, [[3.0, 0.0]] * 10, [[0.0, -8.0]]])
    apart = apart_sides(columns, OPTIONS)
    assert apart.shape == (211, 4)
    np.testing.assert_array_equal(np.flatnonzero(apart[:, 0]), np.arange(200, 210))
    np.testing.assert_array_equal(np.flatnonzero(apart[:, 3]), [210])
    assert not apart[:, 1:3].any()


def test_too_many_rows_behind_a_gap_are_no_outliers():
    column = np.concatenate([RNG.uniform(-1.5, 1.5, 100), np.full(60, 3.0)])[:, None]
    assert not apart_sides(column, OPTIONS).any()


def test_groups_are_rows_apart_in_the_same_columns_the_largest_first():
    apart = np.zeros((100, 4), dtype=bool)
    apart[:5, 0], apart[10:20, 2], apart[50, 1] = True, True, True
    first, second = apart_groups(apart, OPTIONS)
    np.testing.assert_array_equal(first, np.arange(10, 20))
    np.testing.assert_array_equal(second, np.arange(5))
    assert apart_groups(np.zeros((10, 4), dtype=bool), OPTIONS) == []


def test_central_rows_are_nearest_to_the_middle():
    columns = RNG.normal(size=(40, 3))
    kept = central_rows(columns)
    assert len(kept) == 30
    others = np.setdiff1d(np.arange(40), kept)
    assert np.abs(columns[kept]).max(1).max() <= np.abs(columns[others]).max(1).min()


def test_dense_rows_have_near_neighbours():
    columns = RNG.normal(size=(60, 2))
    kept = dense_rows(columns, np.random.default_rng(1))
    tenth = np.sort(cdist(columns, columns), axis=1)[:, 9]  # of all rows, itself among them
    assert len(kept) == 48
    assert tenth[kept].max() <= np.delete(tenth, kept).min() + 1e-4


def test_an_isolated_group_is_left_out_of_the_joined_rows():
    columns = np.concatenate([RNG.normal(size=(300, 2)), 0.1 * RNG.normal(size=(30, 2)) + 40.0])
    kept = joined_rows(columns, np.random.default_rng(2))
    assert not (kept >= 300).any()
    assert len(kept) >= 0.75 * 330


def test_rows_as_the_model_makes_them_keep_their_weight_and_an_excess_does_not():
    model = torch.from_numpy(RNG.exponential(size=20_000))
    clean = torch.from_numpy(RNG.exponential(size=4_000))
    tails = (0.1, 0.02, 0.004)
    assert float(tail_weights(clean, model, tails, 1.25, 2.0, 0.25).mean()) > 0.99
    low, high = (float(model.quantile(1 - tail)) for tail in (0.02, 0.004))
    excess = torch.full((400,), 0.5 * (low + high), dtype=torch.float64)
    weights = tail_weights(torch.cat([clean, excess]), model, tails, 1.25, 2.0, 0.25)
    inside = torch.cat([clean, excess]).ge(low) & torch.cat([clean, excess]).lt(high)
    allowed = 1.25 * (0.02 - 0.004)
    assert float((weights * inside).sum()) / 4400 == pytest.approx(allowed, rel=1e-6)


def test_where_too_much_would_be_left_out_the_likeliest_rows_are_kept():
    model, losses = torch.linspace(0, 1, 1001), torch.tensor([0.1, 0.2, 9.0, 8.0])
    assert tail_weights(losses, model, (0.1, 0.01), 1.25, 2.0, 0.25).tolist() == [1.0, 1.0, 0.0, 1.0]
