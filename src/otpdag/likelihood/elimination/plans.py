r"""How one kind of piece is integrated out: what is summed, placed on points or integrated exactly, in which order.

Pieces with the same unknown nodes and the same factors are of one kind. Categories are summed over their states. A
number is *linear* if every factor that reads it is linear and normal: such numbers are integrated exactly, cluster by
cluster, given the categories and points that they meet. Any other number, and any count, is a variable with points of
its own in each row.

Summing out a variable multiplies all tables that mention it into one, over it and its neighbours, and leaves a table
over the neighbours. The cost is that of the largest tables, and depends on the order alone. The best order is hard to
find; weighted min-fill (take next the variable whose elimination links the fewest pairs of neighbours, weighed by
their sizes) and min-weight (the one with the smallest table) are near it in practice (Koller & Friedman 2009, 9.4.3).
Both are tried, and the cheaper kept.

Where summing out a variable would need a table beyond the budget, the tables that mention it are put into groups that
fit (the mini-buckets of Dechter & Rish 2003), and each group has a copy of the variable of its own. The piece with
copies is summed exactly, like any other. What the copies say of each other is sent between them as messages
(:mod:`~otpdag.likelihood.elimination.sums`), until they agree. With tables no larger than single families this is loopy
belief propagation on what is left of the graph's loops; with larger ones it is the join graph of Dechter, Kask &
Mateescu (2002), or the deletion of edges of Choi & Darwiche (2006).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import TypeAlias

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from otpdag.errors import ModelError
from otpdag.likelihood.elimination.families import FamilyView

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


Cells = tuple[int, ...]
SMALL_COST = 512  # entries of a piece below which one more call costs more than larger tables
ORDERED_FROM = 24  # unknown linear numbers of a cluster from which on their order is looked for
NARROW = 6  # by how much a band must be smaller than the cluster to be worth its steps
VALUES_OF_A_ROW = 4  # that a family reads, about
ROUNDING = 1.3  # how much larger sums may get for the sake of fewer calls


@dataclass(frozen=True)
class Kind:
    """A kind of piece.

    Attributes:
        nodes: Its unknown nodes.
        families: The factors that read them.
        missing: Of vectors that are seen in part, the coordinates that are not.
        points: Of placed nodes the number of points, where it is not the usual one.
    """

    nodes: tuple[int, ...]
    families: tuple[int, ...]
    missing: tuple[tuple[int, Cells], ...] = ()
    points: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Factor:
    """A table that one family gives over its unknown members, the one that is eliminated last first.

    ``variables`` are the same members as the sums know them: some may be copies.
    """

    family: int
    members: tuple[int, ...]
    variables: tuple[int, ...]


@dataclass(frozen=True)
class Cluster:
    """Linear normal numbers that meet, with all factors that read them.

    Attributes:
        coordinates: What is integrated out: (node, coordinate).
        families: The factors.
        categories: Unknown categories on which coefficients depend.
        placed: Unknown numbers and counts on points of their own that enter the factors.
        members: Categories and placed ones in the order of the axes of the table that remains.
        variables: The same as the sums know them: some may be copies.
        band: How far apart coordinates that share a factor stand at most, where it is worth knowing; otherwise zero.
    """

    coordinates: tuple[tuple[int, int], ...]
    families: tuple[int, ...]
    categories: tuple[int, ...]
    placed: tuple[int, ...]
    members: tuple[int, ...]
    variables: tuple[int, ...]
    band: int = 0


@dataclass(frozen=True, eq=False)
class Plan:
    """How a kind of piece is integrated out.

    Attributes:
        kind: The kind.
        order: Nodes that are summed out, in the order of elimination.
        sizes: Number of states of each, and the same rounded up so that more pieces can be summed together.
        placed: Nodes with points of their own in each row.
        factors: Tables from single families.
        clusters: Tables from linear normal numbers.
        copies: Variables that are copies of nodes, where an exact plan would need too large a table.
        exact: The plan without copies, if there are some.
    """

    kind: Kind
    order: tuple[int, ...]
    sizes: Mapping[int, tuple[int, int]]
    placed: tuple[int, ...]
    factors: tuple[Factor, ...]
    clusters: tuple[Cluster, ...]
    copies: Mapping[int, int] = field(default_factory=dict)
    exact: Plan | None = None

    def table_sizes(self, members: Iterable[int]) -> tuple[int, ...]:
        """The axes of a table over these nodes, as it is stored."""
        return tuple(self.sizes[node][1] for node in members)

    @cached_property
    def cliques(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of the table that each node is summed out of, that node last."""
        rank = {node: i for i, node in enumerate(self.order)}
        separators: dict[int, list[set[int]]] = {node: [] for node in self.order}
        for variables in (*(one.variables for one in self.factors), *(one.variables for one in self.clusters)):
            if variables:
                separators[variables[-1]].append(set(variables))
        cliques = []
        for node in self.order:
            joined = set().union({node}, *separators[node])
            clique = tuple(sorted(joined, key=lambda one: -rank[one]))
            if len(clique) > 1:
                separators[clique[-2]].append(set(clique[:-1]))
            cliques.append(clique)
        return tuple(cliques)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """How many steps must come before each: zero for those that read factors alone."""
        level = dict.fromkeys(self.order, 0)
        for clique in self.cliques:
            after = clique[-2] if len(clique) > 1 else self.next_root.get(clique[-1])
            if after is not None:
                level[after] = max(level[after], level[clique[-1]] + 1)
        return tuple(level[node] for node in self.order)

    @cached_property
    def next_root(self) -> Mapping[int, int]:
        """Copies may leave parts that do not touch: the variable that each part ends with, and that of the next."""
        roots = [clique[-1] for clique in self.cliques if len(clique) == 1]
        return dict(pairwise(roots))

    @property
    def is_exact(self) -> bool:
        """Whether no node has copies."""
        return not self.copies

    @property
    def cost(self) -> int:
        """Entries of all tables."""
        return sum(math.prod(self.sizes[node][0] for node in clique) for clique in self.cliques)

    def entries(self, families: Sequence[FamilyView]) -> int:
        """Entries of all arrays that one piece takes: sums, messages, tables, values on points, equations."""
        total = 1
        for clique in self.cliques:
            total += math.prod(self.table_sizes(clique)) + math.prod(self.table_sizes(clique[:-1]))
        for factor in self.factors:
            if not families[factor.family].is_table:
                total += (1 + VALUES_OF_A_ROW) * math.prod(self.table_sizes(factor.members))
        for cluster in self.clusters:
            width = 1 + max(len(families[v].columns) for v in cluster.families)
            across = len(cluster.coordinates) if cluster.band == 0 else 6 * cluster.band
            own = len(cluster.families) * width * (width + 2) + len(cluster.coordinates) * across
            total += own * math.prod(self.table_sizes(cluster.members))
        return total

    @property
    def largest(self) -> tuple[int, tuple[int, ...]]:
        """Entries of the largest table, and its nodes."""
        sized = [(math.prod(self.sizes[node][0] for node in clique), clique) for clique in self.cliques]
        return max(sized, default=(1, ()))


def plan(
    kind: Kind, families: Sequence[FamilyView], points: Callable[[FamilyView], int], *, integrate: bool = True
) -> Plan:
    """Choose how to integrate a kind of piece out.

    Args:
        kind: The unknown nodes and the factors.
        families: All families of the graph.
        points: Number of points of a node that is not a category.
        integrate: Whether linear normal numbers are integrated exactly; otherwise they have points like all others.

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> from otpdag.likelihood.elimination.families import describe_families
    >>> from otpdag.structure import Structure
    >>> graph = otp.Graph([("z", "x"), ("x", "y"), ("y", "count")])
    >>> nodes = {"z": m.Categorical(3), "x": m.Normal(), "y": m.Normal(), "count": m.Poisson()}
    >>> made = plan(Kind((0, 1, 2), (0, 1, 2, 3)), describe_families(Structure.bind(graph, nodes)), lambda _: 32)
    >>> made.placed, made.clusters[0].coordinates, made.cliques
    ((2,), ((1, 0),), ((2, 0), (2,)))
    """
    linear = _linear(kind, families) if integrate else set()
    placed = tuple(n for n in kind.nodes if n not in linear and not families[n].mechanism.space.is_discrete)
    _check(kind, placed, families)
    sizes = {n: families[n].mechanism.space.width for n in kind.nodes if n not in linear and n not in placed}
    sizes |= {n: points(families[n]) for n in placed} | dict(kind.points)
    clusters = _clusters(kind, families, linear)
    inside = {family for _, members in clusters for family in members}
    scopes = {v: [n for n in families[v].members if n in sizes] for v in kind.families if v not in inside}
    around = [list({n: None for v in members for n in families[v].members if n in sizes}) for _, members in clusters]
    order = elimination_order([*scopes.values(), *around], sizes)
    rank = {node: i for i, node in enumerate(order)}

    def descending(nodes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(nodes, key=lambda node: -rank[node]))

    factors = tuple(Factor(v, descending(scope), descending(scope)) for v, scope in scopes.items())
    made = tuple(
        _cluster(nodes, members, descending(met), placed, kind, families)
        for (nodes, members), met in zip(clusters, around, strict=True)
    )
    exact = Plan(kind, order, {n: (size, size) for n, size in sizes.items()}, placed, factors, made)
    return replace(exact, sizes=rounded(exact))


def rounded(exact: Plan) -> dict[int, tuple[int, int]]:
    """Sizes rounded up as far as that costs little: all categories alike, or each to a power of two, or not at all."""
    sizes = {node: size for node, (size, _) in exact.sizes.items()}
    placed = {node for node in sizes if exact.copies.get(node, node) in exact.placed}
    powers = {node: size if node in placed else 1 << (size - 1).bit_length() for node, size in sizes.items()}
    largest = max((size for node, size in sizes.items() if node not in placed), default=1)
    alike = {node: size if node in placed else largest for node, size in sizes.items()}

    def cost(chosen: Mapping[int, int]) -> int:
        return sum(math.prod(chosen[node] for node in clique) for clique in exact.cliques)

    for chosen in (alike, powers):
        if cost(chosen) <= max(SMALL_COST, ROUNDING * cost(sizes)):
            return {node: (size, chosen[node]) for node, size in sizes.items()}
    return dict(exact.sizes)


def _linear(kind: Kind, families: Sequence[FamilyView]) -> set[int]:
    """Unknown numbers that all factors read linearly, with normal noise."""
    linear = {n for n in kind.nodes if families[n].is_linear}
    numbers = [n for n in kind.nodes if not families[n].mechanism.space.is_discrete]
    before = len(linear) + 1
    while len(linear) < before:
        before = len(linear)
        vectors = {n for n in numbers if n not in linear and families[n].widths[-1] > 1}
        for v in kind.families:
            # a vector on points has one axis for all its coordinates, which a quadratic form in them does not fit
            if not families[v].is_linear or vectors & set(families[v].members):
                linear -= set(families[v].members)
    return linear


def _clusters(kind: Kind, families: Sequence[FamilyView], linear: set[int]) -> list[tuple[list[int], list[int]]]:
    """Linear numbers that share factors, with these factors."""
    first: dict[int, int] = {n: n for n in linear}

    def leader(node: int) -> int:
        while first[node] != node:
            first[node] = first[first[node]]
            node = first[node]
        return node

    read = {v: nodes for v in kind.families if (nodes := [n for n in families[v].members if n in linear])}
    for nodes in read.values():
        for other in nodes[1:]:
            first[leader(other)] = leader(nodes[0])
    clusters: dict[int, tuple[list[int], list[int]]] = {}
    for node in sorted(linear):
        clusters.setdefault(leader(node), ([], []))[0].append(node)
    for v, nodes in read.items():
        clusters[leader(nodes[0])][1].append(v)
    return [cluster for cluster in clusters.values() if cluster[1]]


def _cluster(
    nodes: Sequence[int],
    members: Sequence[int],
    met: tuple[int, ...],
    placed: Sequence[int],
    kind: Kind,
    families: Sequence[FamilyView],
) -> Cluster:
    missing: Mapping[int, Cells] = dict(kind.missing)
    coordinates = tuple((n, cell) for n in nodes for cell in missing.get(n, range(families[n].widths[-1])))
    categories = tuple(n for n in met if n not in placed)
    on_points = tuple(n for n in met if n in placed)
    band = 0
    if len(coordinates) >= ORDERED_FROM and not on_points:
        coordinates, band = _along_a_band(coordinates, [families[v].columns for v in members])
    return Cluster(coordinates, tuple(members), categories, on_points, met, met, band)


def _along_a_band(
    coordinates: tuple[tuple[int, int], ...], scopes: Sequence[Sequence[tuple[int, int]]]
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Coordinates in an order in which those that share a factor stand close together (Cuthill & McKee 1969).

    Also how far apart they stand at most; zero if that is so far that the order is of no use.
    """
    place = {cell: i for i, cell in enumerate(coordinates)}
    groups = [[place[cell] for cell in scope if cell in place] for scope in scopes]
    pairs = np.array([(a, b) for group in groups for a in group for b in group], dtype=np.int64)
    size = len(coordinates)
    matrix = csr_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(size, size))
    order = reverse_cuthill_mckee(matrix, symmetric_mode=True)
    rank = np.empty(size, dtype=np.int64)
    rank[order] = np.arange(size)
    band = int(np.abs(rank[pairs[:, 0]] - rank[pairs[:, 1]]).max())
    if band * NARROW > size:
        return coordinates, 0
    return tuple(coordinates[i] for i in order), max(band, 1)


def _check(kind: Kind, placed: Sequence[int], families: Sequence[FamilyView]) -> None:
    """Refuse what has no density, and vectors of counts."""
    for v in kind.families:
        if not families[v].mechanism.has_density:
            raise ModelError(
                f"{type(families[v].mechanism).__name__} at node {families[v].node!r} has no density, and a value in "
                "its family is unknown: use method='paper'"
            )
    for n in placed:
        space = families[n].mechanism.space
        if space.width > 1 and space.is_countable:
            raise ModelError(
                f"node {families[n].node!r}: a vector of counts cannot be hidden or missing while it has children"
            )


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
