r"""Pieces whose tables would be too large are cut apart: some of their variables get copies.

Where summing out a variable would need a table beyond the budget, the tables that mention it are put into groups that
fit (the mini-buckets of Dechter & Rish 2003), and each group has a copy of the variable of its own. The piece with
copies is summed exactly, like any other. What the copies say of each other is sent between them as messages
(:mod:`~otpdag.likelihood.elimination.sums`), until they agree.

With tables no larger than single families this is loopy belief propagation on what is left of the graph's loops; with
larger ones it is the join graph of Dechter, Kask & Mateescu (2002), or the deletion of edges of Choi & Darwiche (2006).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from otpdag.likelihood.elimination.plans import Cluster, Factor, Plan, rounded


@dataclass(frozen=True)
class Split:
    """Scopes with copies of variables.

    Attributes:
        scopes: The variables or copies that each factor reads, in the order of the scopes that were given.
        order: Variables and copies in the order of elimination.
        copies: The variable of which each copy is one.
    """

    scopes: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    copies: Mapping[int, int]


@dataclass
class _Table:
    """A table while variables are being summed out: its variables, and the factors that went into it."""

    scope: frozenset[int]
    factors: tuple[int, ...]


@dataclass
class _Group:
    """Tables that are multiplied."""

    scope: frozenset[int]
    tables: list[_Table] = field(default_factory=list)


def split(scopes: Sequence[Sequence[int]], sizes: Mapping[int, int], order: Sequence[int], most: int) -> Split:
    """Give variables copies until no table along the order has more entries than ``most``, or than the largest factor.

    Args:
        scopes: The variables of each factor.
        sizes: Number of states of each variable.
        order: In which order they are summed out.
        most: Entries of a table.

    >>> ring = split([(0, 1), (1, 2), (2, 3), (3, 0)], dict.fromkeys(range(4), 2), (0, 1, 2, 3), 4)
    >>> ring.scopes, ring.copies
    (((0, 1), (1, 2), (2, 3), (3, 4)), {4: 0})
    """
    most = max(most, *(math.prod(sizes[n] for n in scope) for scope in scopes))
    tables = [_Table(frozenset(scope), (i,)) for i, scope in enumerate(scopes)]
    names: list[dict[int, int]] = [{} for _ in scopes]
    copies: dict[int, int] = {}
    copied: list[int] = []
    following = max(sizes, default=-1) + 1
    for variable in order:
        bucket = [table for table in tables if variable in table.scope]
        tables = [table for table in tables if variable not in table.scope]
        for number, group in enumerate(_groups(bucket, sizes, most) or [_Group(frozenset())]):
            name = variable
            if number:
                name, following = following, following + 1
                copies[name] = variable
            factors = tuple(i for table in group.tables for i in table.factors)
            for i in factors:
                if variable in scopes[i]:
                    names[i][variable] = name
            copied.append(name)
            tables.append(_Table(group.scope - {variable}, factors))
    renamed = tuple(tuple(name[n] for n in scope) for scope, name in zip(scopes, names, strict=True))
    return Split(renamed, tuple(copied), copies)


def _groups(bucket: Sequence[_Table], sizes: Mapping[int, int], most: int) -> list[_Group]:
    """Put each table, the largest first, where it adds least; where it fits nowhere it begins a group."""

    def entries(scope: frozenset[int]) -> int:
        return math.prod(sizes[n] for n in scope)

    groups: list[_Group] = []
    for table in sorted(bucket, key=lambda one: -entries(one.scope)):
        fitting = [group for group in groups if entries(group.scope | table.scope) <= most]
        if not fitting:
            groups.append(_Group(table.scope, [table]))
            continue
        group = min(fitting, key=lambda one: entries(one.scope | table.scope) - entries(one.scope))
        group.scope |= table.scope
        group.tables.append(table)
    return groups


def split_plan(exact: Plan, most: int) -> Plan:
    """The same plan with copies, so that no table has more entries than ``most``, or than the largest factor."""
    sizes = {node: size for node, (size, _) in exact.sizes.items()}
    scopes = [*(one.members for one in exact.factors), *(one.members for one in exact.clusters)]
    cut = split(scopes, sizes, exact.order, most)
    if not cut.copies:
        return exact
    rank = {variable: i for i, variable in enumerate(cut.order)}
    nodes = {variable: variable for variable in exact.order} | dict(cut.copies)
    renamed = [tuple(sorted(scope, key=lambda variable: -rank[variable])) for scope in cut.scopes]
    members = [tuple(nodes[variable] for variable in scope) for scope in renamed]
    many = len(exact.factors)
    factors = [
        Factor(one.family, nodes_of, names)
        for one, nodes_of, names in zip(exact.factors, members[:many], renamed[:many], strict=True)
    ]
    clusters = [
        _reordered(one, nodes_of, names)
        for one, nodes_of, names in zip(exact.clusters, members[many:], renamed[many:], strict=True)
    ]
    sized = {variable: (sizes[nodes[variable]],) * 2 for variable in cut.order}
    plain = replace(
        exact,
        order=cut.order,
        sizes=sized,
        factors=tuple(factors),
        clusters=tuple(clusters),
        copies=cut.copies,
        exact=exact,
    )
    return replace(plain, sizes=rounded(plain))


def _reordered(cluster: Cluster, members: tuple[int, ...], variables: tuple[int, ...]) -> Cluster:
    categories = tuple(n for n in members if n in cluster.categories)
    placed = tuple(n for n in members if n in cluster.placed)
    return replace(cluster, categories=categories, placed=placed, members=members, variables=variables)
