"""Plans of sums: which tables they need, and how sizes are rounded."""

from dataclasses import replace

import numpy as np

from otpdag.backward.elimination.piece_plans import ROUNDING, SMALL_COST, Factor, Kind, Plan, rounded


def plan(sizes, scopes, placed=(), order=None):
    order = tuple(order or sizes)
    rank = {node: at for at, node in enumerate(order)}
    ordered = [tuple(sorted(scope, key=lambda node: -rank[node])) for scope in scopes]
    factors = tuple(Factor(at, scope, scope) for at, scope in enumerate(ordered))
    both = {node: (size, size) for node, size in sizes.items()}
    return Plan(Kind(order, tuple(range(len(scopes)))), order, both, tuple(placed), factors, ())


def test_tables_of_a_chain_are_pairs_and_of_a_star_the_children_one_by_one():
    chain = plan({0: 2, 1: 3, 2: 4}, [(0,), (0, 1), (1, 2)])
    assert chain.cliques == ((1, 0), (2, 1), (2,))
    assert chain.levels == (0, 1, 2)
    star = plan({0: 2, 1: 3, 2: 4}, [(2, 0), (2, 1), (2,)])
    assert star.cliques == ((2, 0), (2, 1), (2,))
    assert star.levels == (0, 0, 1)
    assert star.table_sizes((2, 0)) == (4, 2)


def test_small_tables_have_categories_of_one_size():
    found = rounded(plan({0: 2, 1: 3, 2: 7}, [(0, 1), (1, 2)], placed=[1]))
    assert found == {0: (2, 7), 1: (3, 3), 2: (7, 7)}


def test_larger_ones_are_rounded_to_powers_of_two_where_that_costs_little():
    side = 31  # 31 * 31 * 2 entries, of which powers of two are 1.066 times as many, and all alike 16 times
    assert 2 * side**2 > SMALL_COST
    assert 32**2 / side**2 < ROUNDING
    found = rounded(plan({0: 2, 1: side, 2: side}, [(0, 1, 2)]))
    assert found == {0: (2, 2), 1: (side, 32), 2: (side, 32)}


def test_and_not_at_all_where_it_costs_much():
    sizes = {0: 17, 1: 33, 2: 3}
    found = rounded(plan(sizes, [(0, 1, 2)]))
    assert found == {node: (size, size) for node, size in sizes.items()}


def test_cost_is_the_sum_over_all_tables():
    """Alike, 16 * 16 + 16: little enough while the sum is below the limit, not a product of both tables."""
    sizes = {0: 15, 1: 16, 2: 15}
    exact = plan(sizes, [(0, 1), (1, 2)])
    alike = sum(int(np.prod([16 for _ in clique])) for clique in exact.cliques)
    assert alike <= max(SMALL_COST, ROUNDING * sum(int(np.prod([sizes[n] for n in c])) for c in exact.cliques))
    assert rounded(exact) == {0: (15, 16), 1: (16, 16), 2: (15, 16)}


def test_a_plan_without_copies_is_exact():
    chain = plan({0: 2, 1: 3}, [(0,), (0, 1)])
    assert chain.is_exact
    assert not replace(chain, copies={2: 0}).is_exact
