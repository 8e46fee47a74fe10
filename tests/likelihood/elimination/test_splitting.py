"""Copies of variables: tables stay within their limit, and every factor keeps its variables."""

import math

import numpy as np
import pytest

from otpdag.likelihood.elimination.plans import elimination_order, split


def random_scopes(seed, variables=14, factors=22):
    rng = np.random.default_rng(seed)
    scopes = [tuple(sorted(rng.choice(variables, 3, replace=False).tolist())) for _ in range(factors)]
    scopes += [(variable,) for variable in range(variables)]
    return scopes, {variable: int(rng.integers(2, 4)) for variable in range(variables)}


def table_sizes(scopes, sizes, order):
    """Entries of all tables that summing variables out one after another makes."""
    tables, found = [set(scope) for scope in scopes], []
    for variable in order:
        joined = set().union({variable}, *(table for table in tables if variable in table))
        found.append(math.prod(sizes[one] for one in joined))
        tables = [table for table in tables if variable not in table] + [joined - {variable}]
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [1, 60, 300])
def test_no_table_is_larger_than_the_limit_or_the_largest_factor(seed, most):
    scopes, sizes = random_scopes(seed)
    order = elimination_order(scopes, sizes)
    found = split(scopes, sizes, order, most)
    copied = sizes | {copy: sizes[variable] for copy, variable in found.copies.items()}
    largest_factor = max(math.prod(sizes[one] for one in scope) for scope in scopes)
    assert max(table_sizes(scopes, sizes, order)) > max(most, largest_factor)
    assert max(table_sizes(found.scopes, copied, found.order)) <= max(most, largest_factor)
    assert sorted(found.order) == sorted(copied)


def test_copies_stand_for_the_variables_of_their_factors():
    scopes, sizes = random_scopes(7)
    found = split(scopes, sizes, elimination_order(scopes, sizes), 30)
    assert found.copies
    assert [tuple(found.copies.get(one, one) for one in scope) for scope in found.scopes] == scopes


def test_a_tree_needs_no_copies_however_small_the_limit():
    scopes = [(0, 1), (1, 2), (1, 3), (3, 4, 5)]
    sizes = dict.fromkeys(range(6), 3)
    assert not split(scopes, sizes, elimination_order(scopes, sizes), 1).copies
