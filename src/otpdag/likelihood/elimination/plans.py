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

from otpdag.errors import ModelError
from otpdag.likelihood.elimination.families import FamilyView, TableView
from otpdag.likelihood.elimination.unknown_numbers import COARSE_POINTS, Cluster, cloud_size

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


@dataclass(frozen=True)
class EliminationOptions:
    """Sizes of the sums.

    Args:
        grid: Points of an unknown number that is not linear and normal.
        count_points: Most points of an unknown count.
        vector_points: Points of an unknown vector that is not linear and normal.
        largest_table: Most entries of one table of one row; a piece that needs more is approximated, or refused.
        split_table: Most entries of a table of a piece that is approximated, but for tables of single families; if
            zero, such pieces are refused.
        largest_family: Most entries of the table of a single family (or of linear normal numbers that meet) there.
        memory: Bytes that the tables of one block of rows may take.
        merged: Whether pieces that show the same are one piece with a weight.
        fine_table: Entries of one table of one row up to which unknown numbers and counts have all their points.
            Where larger tables are needed they begin with a few, and get as many as their posteriors ask for. Numbers
            have half the grid where several unknowns of a piece are on points.
        integrate: Whether linear normal numbers are integrated exactly; otherwise they stand on points like others.
        entries: Most entries of all tables of all rows in one evaluation of exact sums, where rows need large ones.
        approximate: Whether rows that need a larger table are approximated rather than refused, where the sizes are
            a budget (:func:`~otpdag.likelihood.elimination.layout.lay_out_within`).
    """

    grid: int = 24
    count_points: int = 48
    vector_points: int = 512
    largest_table: int = 2**20
    split_table: int = 0
    largest_family: int = 2**20
    memory: int = 2**27
    merged: bool = True
    fine_table: int | None = None
    integrate: bool = True
    entries: int = 2**31
    approximate: bool = True


Cells = tuple[int, ...]
VALUES_OF_A_ROW = 4  # that a family reads, about


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


@dataclass(frozen=True, eq=False)
class Plan:
    """How a kind of piece is integrated out.

    Attributes:
        kind: The kind.
        order: Nodes that are summed out, in the order of elimination.
        sizes: Number of states of each.
        placed: Nodes with points of their own in each row.
        factors: Tables from single families.
        clusters: Tables from linear normal numbers.
        copies: Variables that are copies of nodes, where an exact plan would need too large a table.
        exact: The plan without copies, if there are some.
    """

    kind: Kind
    order: tuple[int, ...]
    sizes: Mapping[int, int]
    placed: tuple[int, ...]
    factors: tuple[Factor, ...]
    clusters: tuple[Cluster, ...]
    copies: Mapping[int, int] = field(default_factory=dict)
    exact: Plan | None = None

    def table_sizes(self, members: Iterable[int]) -> tuple[int, ...]:
        """The axes of a table over these nodes."""
        return tuple(self.sizes[node] for node in members)

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
        return sum(math.prod(self.table_sizes(clique)) for clique in self.cliques)

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
            own = len(cluster.families) * width * (width + 2) + len(cluster.coordinates) ** 2
            total += own * math.prod(self.table_sizes(cluster.members))
        return total

    @property
    def largest(self) -> tuple[int, tuple[int, ...]]:
        """Entries of the largest table, and its nodes."""
        return max(((math.prod(self.table_sizes(clique)), clique) for clique in self.cliques), default=(1, ()))


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
    missing: Mapping[int, Cells] = dict(kind.missing)
    made = []
    for (nodes, members), met in zip(clusters, around, strict=True):
        coordinates = ((n, cell) for n in nodes for cell in missing.get(n, range(families[n].widths[-1])))
        axes = descending(met)
        made.append(Cluster(tuple(coordinates), tuple(members), kind.nodes, frozenset(placed), axes, axes))
    return Plan(kind, order, sizes, placed, factors, tuple(made))


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
    clusters: list[tuple[set[int], list[int]]] = []
    for v in kind.families:
        nodes = linear.intersection(families[v].members)
        if nodes:
            met = [cluster for cluster in clusters if cluster[0] & nodes]
            joined = (nodes.union(*(own for own, _ in met)), [one for _, own in met for one in own] + [v])
            clusters = [cluster for cluster in clusters if cluster not in met] + [joined]
    return sorted((sorted(nodes), sorted(members)) for nodes, members in clusters)


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


_Tables = list[tuple[frozenset[int], tuple[int, ...]]]
"""Tables while variables are being summed out: their variables, and the factors that went into them."""


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
    tables: _Tables = [(frozenset(scope), (i,)) for i, scope in enumerate(scopes)]
    names: list[dict[int, int]] = [{} for _ in scopes]
    copies: dict[int, int] = {}
    copied: list[int] = []
    following = max(sizes, default=-1) + 1
    for variable in order:
        bucket = [table for table in tables if variable in table[0]]
        tables = [table for table in tables if variable not in table[0]]
        for number, group in enumerate(_groups(bucket, sizes, most) or [[]]):
            name = variable
            if number:
                name, following = following, following + 1
                copies[name] = variable
            factors = tuple(i for _, own in group for i in own)
            for i in factors:
                if variable in scopes[i]:
                    names[i][variable] = name
            copied.append(name)
            tables.append((_scope(group) - {variable}, factors))
    renamed = tuple(tuple(name[n] for n in scope) for scope, name in zip(scopes, names, strict=True))
    return Split(renamed, tuple(copied), copies)


def _scope(group: _Tables) -> frozenset[int]:
    return frozenset().union(*(scope for scope, _ in group))


def _groups(bucket: _Tables, sizes: Mapping[int, int], most: int) -> list[_Tables]:
    """Put each table, the largest first, where it adds least; where it fits nowhere it begins a group."""

    def entries(group: _Tables) -> int:
        return math.prod(sizes[n] for n in _scope(group))

    groups: list[_Tables] = []
    for table in sorted(bucket, key=lambda one: -entries([one])):
        fitting = [group for group in groups if entries([*group, table]) <= most]
        if fitting:
            min(fitting, key=lambda group: entries([*group, table]) - entries(group)).append(table)
        else:
            groups.append([table])
    return groups


def split_plan(exact: Plan, most: int) -> Plan:
    """The same plan with copies, so that no table has more entries than ``most``, or than the largest factor."""
    parts: list[Factor | Cluster] = [*exact.factors, *exact.clusters]
    cut = split([one.members for one in parts], exact.sizes, exact.order, most)
    if not cut.copies:
        return exact
    rank = {variable: i for i, variable in enumerate(cut.order)}
    nodes = {variable: cut.copies.get(variable, variable) for variable in cut.order}
    renamed = []
    for one, scope in zip(parts, cut.scopes, strict=True):
        variables = tuple(sorted(scope, key=lambda variable: -rank[variable]))
        renamed.append(replace(one, members=tuple(nodes[variable] for variable in variables), variables=variables))
    return replace(
        exact,
        order=cut.order,
        sizes={variable: exact.sizes[node] for variable, node in nodes.items()},
        factors=tuple(one for one in renamed if isinstance(one, Factor)),
        clusters=tuple(one for one in renamed if isinstance(one, Cluster)),
        copies=cut.copies,
        exact=exact,
    )


class Planner:
    """Plans of kinds of pieces within some sizes, each made once; ``refused`` says why the sizes do not serve."""

    def __init__(self, table: TableView, options: EliminationOptions) -> None:
        self.table, self.options, self.families = table, options, table.families
        self.plans: dict[Kind, Plan] = {}
        self.refused = ""

    def first(self, kind: Kind) -> Plan:
        """How a kind of piece is integrated out, before its posteriors are known: coarsely where that is much work."""
        if kind not in self.plans:
            made, options = self._plan(kind), self.options
            if options.fine_table is not None and len(made.placed) > 1:
                made = plan(kind, self.families, self._points_of_several, integrate=options.integrate)
            if options.fine_table is not None and made.largest[0] > options.fine_table:
                single = [n for n in made.placed if self.families[n].widths[-1] == 1]
                few = tuple((n, min(COARSE_POINTS, made.sizes[n])) for n in single)
                made = self._plan(replace(kind, points=few))
            if made.largest[0] > options.largest_table and options.split_table:
                made = self._split(made)
            self._check(made)
            self.plans[kind] = made
        return self.plans[kind]

    def with_points(self, kind: Kind) -> Plan:
        """A plan with the points of a kind, or with fewer where its largest table would be too large."""
        if kind not in self.plans:
            made = self._plan(kind)
            while made.largest[0] > self.options.largest_table:
                points = made.kind.points
                most = max(size for _, size in points)
                if most <= COARSE_POINTS:
                    break
                fewer = max(COARSE_POINTS, most // 2)
                points = tuple((n, fewer if size == most else size) for n, size in points)
                made = self._plan(replace(kind, points=points))
            self.plans[kind] = made
        return self.plans[kind]

    def _plan(self, kind: Kind) -> Plan:
        return plan(kind, self.families, self._points, integrate=self.options.integrate)

    def _split(self, exact: Plan) -> Plan:
        """Give nodes copies; where linear normal numbers meet too many categories to be integrated, points as well."""
        most = min(self.options.split_table, self.options.largest_table)
        made = split_plan(exact, most)
        if made.largest[0] <= self.options.largest_family or not exact.clusters:
            return made
        return split_plan(plan(exact.kind, self.families, self._points, integrate=False), most)

    def _points(self, family: FamilyView) -> int:
        if family.mechanism.space.is_countable:
            return self.table.count_points(family, self.options.count_points)
        width = family.mechanism.space.free_width
        return self.options.grid if width == 1 else cloud_size(width, self.options.vector_points)

    def _points_of_several(self, family: FamilyView) -> int:
        """The same where others are on points, too: half the grid of a number."""
        space, many = family.mechanism.space, self._points(family)
        return many // 2 if space.free_width == 1 and not space.is_countable else many

    def _check(self, made: Plan) -> None:
        entries, clique = made.largest
        most = self.options.largest_family if self.options.split_table else self.options.largest_table
        if entries > max(most, self.options.largest_table):
            names = ", ".join(
                f"{self.families[made.copies.get(n, n)].node!r} ({size})"
                for n, size in zip(clique, made.table_sizes(clique), strict=True)
            )
            self.refused = (
                f"unknown nodes {names} meet, whose joint states are a table of {entries} entries for one row; at most "
                f"{self.options.largest_table} are summed: raise `largest_table`, or use method='paper'"
            )
