"""Rows that lie apart: a component of the model is kept, a group of outliers is not."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.engine.outlying_rows import ApartOptions
from otpdag.engine.robust import _has_room, near_rows, standard_columns

CENTRES = np.array([[0.0, 0.0], [5.0, 0.0], [10.0, 12.0]])


def blobs(weights, seed, rows=1000):
    """Three groups of points, the last one apart."""
    rng = np.random.default_rng(seed)
    group = rng.choice(3, rows, p=weights)
    return pd.DataFrame(CENTRES[group] + rng.normal(size=(rows, 2)), columns=["x.0", "x.1"]), group


def mixture(components):
    graph = otp.Graph([("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(components), "x": m.Normal(2)})


def near(frame, losses):
    model = mixture(2)
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=["z"])
    return near_rows(model.structure, batch, ApartOptions(), losses, np.random.default_rng(0)).numpy()


def equal_losses(part):
    return np.zeros(part.rows), 5


def test_rows_beyond_a_gap_are_apart_and_their_price_decides():
    frame, group = blobs([0.55, 0.35, 0.1], seed=1)

    def costly(part):
        return np.full(part.rows, 1.0 if part.rows == len(frame) else 0.0), 5

    assert set(group[near(frame, costly)]) == {0, 1}
    assert len(near(frame, equal_losses)) == len(frame)


def test_scattered_rows_are_apart_without_a_test():
    frame, _ = blobs([0.6, 0.4, 0.0], seed=2)
    rng = np.random.default_rng(3)
    frame.iloc[:40] = rng.uniform(-1, 1, (40, 2)) * rng.choice([40.0, 90.0], (40, 2)) + 60.0 * rng.choice(
        [-1, 1], (40, 2)
    )
    kept = near(frame, equal_losses)
    assert np.mean(kept < 40) < 0.01


def test_nothing_is_apart_where_too_much_would_be():
    frame, _ = blobs([0.5, 0.2, 0.3], seed=4)
    assert len(near(frame, equal_losses)) == len(frame)


@pytest.mark.parametrize(("components", "left_out"), [(3, False), (2, True)])
def test_a_robust_fit_keeps_a_component_that_it_has_room_for(components, left_out):
    frame, group = blobs([0.55, 0.35, 0.1], seed=5)
    result = otp.fit(mixture(components), frame, seed=0, robust=True, restarts=8)
    share = np.isin(np.flatnonzero(group == 2), result.dropped).mean()
    assert share > 0.9 if left_out else share < 0.1
    assert np.isin(np.flatnonzero(group != 2), result.dropped).mean() < 0.02


def room(near_rows_, group, losses, **options):
    frame, _ = blobs([0.6, 0.4, 0.0], seed=0, rows=60)
    model = mixture(2)
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=["z"])
    options = replace(ApartOptions(), **options)
    return _has_room(batch, np.array(near_rows_), np.array(group), options, losses, np.random.default_rng(0))


def test_the_price_of_a_group_is_what_the_others_lose_but_for_its_share():
    """Forty rows beside twenty: the others' losses fall by log(2/3) each, since they are not of the group."""
    share = 40 * np.log(40 / 60)

    def losing(together):
        return lambda part: (np.full(part.rows, together / 40 if part.rows == 60 else 0.0), 3)

    near_rows_, group = range(40), range(40, 60)
    assert room(near_rows_, group, losing(3 - share - 1e-6))
    assert not room(near_rows_, group, losing(3 - share + 1e-6))


def test_a_group_has_no_room_where_there_is_nothing_to_compare():
    assert not room(range(40), [], equal_losses)
    assert not room([], range(40), equal_losses)


def test_few_rows_stand_for_many():
    seen = []

    def counted(part):
        seen.append(part.rows)
        return np.zeros(part.rows), 5

    assert room(range(40), range(40, 60), counted, rows=30)
    assert seen[0] == 30
    assert 10 < seen[1] < 30
    seen.clear()
    room(range(40), range(40, 60), counted, rows=60)
    assert seen == [60, 40]


@pytest.mark.parametrize("unit", [1e-7, 1.0, 1e6])
def test_columns_are_compared_in_robust_units_whatever_their_own(unit):
    """Numbers by median and deviation, counts by their roots, categories as they are; gaps lie in the middle."""
    rng = np.random.default_rng(0)
    x, n, k = rng.normal(size=40), rng.poisson(9.0, 40).astype(float), rng.integers(0, 3, 40)
    x[5] = np.nan
    frame = pd.DataFrame({"x": unit * (x + 4.0), "n": n, "k": k})
    model = otp.Model(otp.Graph([], nodes=list("xnk")), {"x": m.Normal(), "n": m.Poisson(), "k": m.Categorical(3)})
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=[])
    found = standard_columns(model.structure, batch)

    def standard(values):
        low = np.sort(values[~np.isnan(values)])[
            (np.sum(~np.isnan(values)) - 1) // 2
        ]  # the lower median, as torch has it
        gaps = np.sort(np.abs(values[~np.isnan(values)] - low))
        return np.nan_to_num((values - low) / (1.4826 * gaps[(len(gaps) - 1) // 2]))

    np.testing.assert_allclose(found[:, 0], standard(x), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found[:, 1], standard(np.sqrt(n)), rtol=1e-9)
    np.testing.assert_array_equal(found[:, 2:], np.eye(3)[k])
