r"""In which order the variables of a piece are summed out.

Summing out a variable multiplies all tables that mention it into one, over it and its neighbours, and leaves a table
over the neighbours. The cost is that of the largest tables, and depends on the order alone. The best order is hard to
find; weighted min-fill (take next the variable whose elimination links the fewest pairs of neighbours, weighed by
their sizes) and min-weight (the one with the smallest table) are near it in practice (Koller & Friedman 2009, 9.4.3).
Both are tried, and the cheaper kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

__all__ = ["elimination_order", "order_cost"]

Neighbours: TypeAlias = dict[int, set[int]]
Score: TypeAlias = Callable[[int, Neighbours, Mapping[int, int]], float]


def elimination_order(scopes: Iterable[Sequence[int]], sizes: Mapping[int, int]) -> tuple[int, ...]:
    """The cheaper of two greedy orders for factors with these scopes.

    Args:
        scopes: The variables of each factor.
        sizes: Number of states of each variable.

    >>> elimination_order([(0, 1), (1, 2), (2, 3)], {0: 2, 1: 9, 2: 2, 3: 2})
    (0, 1, 2, 3)
    """
    scopes = list(scopes)
    if len(sizes) == 1:
        return tuple(sizes)
    orders = [_greedy(scopes, sizes, score) for score in (_fill, _weight)]
    return min(orders, key=lambda order: sum(order_cost(scopes, sizes, order)))


def order_cost(scopes: Iterable[Sequence[int]], sizes: Mapping[int, int], order: Sequence[int]) -> list[int]:
    """Number of entries of the table that each step of an order makes.

    >>> order_cost([(0, 1), (1, 2)], {0: 2, 1: 3, 2: 4}, (1, 0, 2))
    [24, 8, 4]
    """
    near = _neighbours(scopes, sizes)
    costs = []
    for variable in order:
        costs.append(math.prod(sizes[other] for other in near[variable]) * sizes[variable])
        _remove(variable, near)
    return costs


def _greedy(scopes: Iterable[Sequence[int]], sizes: Mapping[int, int], score: Score) -> tuple[int, ...]:
    near = _neighbours(scopes, sizes)
    scores = {variable: score(variable, near, sizes) for variable in near}
    order = []
    while near:
        variable = min(scores, key=lambda one: (scores[one], one))
        order.append(variable)
        changed = set(near[variable])
        _remove(variable, near)
        del scores[variable]
        for other in changed | {far for one in changed for far in near[one]}:
            scores[other] = score(other, near, sizes)
    return tuple(order)


def _neighbours(scopes: Iterable[Sequence[int]], sizes: Mapping[int, int]) -> Neighbours:
    near: Neighbours = {variable: set() for variable in sizes}
    for scope in scopes:
        for variable in scope:
            near[variable].update(other for other in scope if other != variable)
    return near


def _remove(variable: int, near: Neighbours) -> None:
    """Link the neighbours of a variable with each other, and take it away."""
    linked = near.pop(variable)
    for one in linked:
        near[one] |= linked
        near[one] -= {one, variable}


def _fill(variable: int, near: Neighbours, sizes: Mapping[int, int]) -> float:
    pairs = combinations(near[variable], 2)
    return float(sum(sizes[one] * sizes[two] for one, two in pairs if two not in near[one]))


def _weight(variable: int, near: Neighbours, sizes: Mapping[int, int]) -> float:
    return float(math.prod(sizes[other] for other in near[variable]) * sizes[variable])
