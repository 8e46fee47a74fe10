"""Orders of elimination, against all orders there are."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from otpdag.likelihood.elimination.plans import elimination_order, order_cost


def brute_cost(scopes, sizes, order):
    """Multiply tables as sets of variables, one variable after the other."""
    tables, costs = [set(scope) for scope in scopes], []
    for variable in order:
        joined = set().union({variable}, *(table for table in tables if variable in table))
        costs.append(math.prod(sizes[one] for one in joined))
        tables = [table for table in tables if variable not in table] + [joined - {variable}]
    return costs


@pytest.mark.parametrize("seed", range(12))
def test_costs_are_those_of_the_tables_and_orders_near_the_best(seed):
    rng = np.random.default_rng(4100 + seed)
    many = 6
    sizes = {i: int(rng.integers(2, 6)) for i in range(many)}
    scopes = [tuple(rng.permutation(many)[: rng.integers(1, 4)].tolist()) for _ in range(6)]
    orders = list(itertools.permutations(range(many)))
    shuffled = orders[int(rng.integers(len(orders)))]
    assert order_cost(scopes, sizes, shuffled) == brute_cost(scopes, sizes, shuffled)
    best = min(sum(brute_cost(scopes, sizes, order)) for order in orders)
    order = elimination_order(scopes, sizes)
    assert sorted(order) == list(range(many))
    assert sum(order_cost(scopes, sizes, order)) <= 1.3 * best


def test_the_cheaper_of_both_orders_is_kept():
    # a star: min-weight takes the leaves, however large they are; any order that takes the centre first joins them all
    scopes, sizes = [(0, i) for i in range(1, 7)], {0: 2, **dict.fromkeys(range(1, 7), 9)}
    assert max(order_cost(scopes, sizes, elimination_order(scopes, sizes))) == 18


def test_one_variable():
    assert elimination_order([(4,)], {4: 3}) == (4,)
