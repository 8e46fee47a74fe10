"""Sums that do not depend on the order of rows, against sums that are rounded once."""

import math

import numpy as np
import pytest

from otpdag.numerics import BLOCK_ENTRIES, order_free_products


def columns(rows, seed=0):
    """Columns of all sizes and tails; the last is the sum of two others."""
    rng = np.random.default_rng(seed)
    made = [
        rng.normal(size=rows),
        1e-9 * rng.standard_cauchy(rows),
        1e6 + rng.normal(size=rows),
        rng.integers(0, 2, rows),
    ]
    return [*(np.asarray(column, dtype=float) for column in made), made[0] + made[3]]


@pytest.mark.parametrize("rows", [1, 7, 3 * BLOCK_ENTRIES])
def test_rows_in_any_order_give_the_same_digits(rows):
    own, centres = columns(rows), [0.1, 0.0, 1e6, 0.5, 0.0]
    found = order_free_products(own, centres, len(own[0]))
    rng = np.random.default_rng(1)
    for order in (np.arange(rows)[::-1], np.argsort(own[0]), rng.permutation(rows), rng.permutation(rows)):
        np.testing.assert_array_equal(order_free_products([column[order] for column in own], centres, rows), found)


def test_they_are_the_sums_to_the_last_digits():
    own, centres = columns(5000), [0.1, 0.0, 1e6, 0.5, 0.0]
    found = order_free_products(own, centres, len(own[0]))
    less = [*(column - centre for column, centre in zip(own, centres, strict=True)), np.ones(5000)]
    exact = np.array([[math.fsum(one * other) for other in less] for one in less])
    size = np.sqrt(exact.diagonal())
    assert (np.abs(found - exact) <= 4 * 2.0**-50 * size[:, None] * size).all()


def test_constant_columns_and_none_at_all():
    np.testing.assert_array_equal(order_free_products([np.full(6, 3.0)], [3.0], 6), [[0.0, 0.0], [0.0, 6.0]])
    np.testing.assert_array_equal(order_free_products([np.full(6, 3.0)], [1.0], 6), [[24.0, 12.0], [12.0, 6.0]])
    np.testing.assert_array_equal(order_free_products([], [], 6), [[6.0]])
