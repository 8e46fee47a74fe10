r"""How one kind of piece is integrated out: what is summed, placed on points or integrated exactly, in which order.

Pieces with the same unknown nodes and the same factors are of one kind. Categories are summed over their states. A
number is *linear* if every factor that reads it is linear and normal: such numbers are integrated exactly, cluster by
cluster, given the categories and points that they meet. Any other number, and any count, is a variable with points of
its own in each row.

A generalised linear node reads its numeric parents through its *lines* alone, :math:`\ell = w^\top x`. Where several
parents are unknown, and linear but for such children, all lines of a cluster are one vector on points in their place:
given what is seen parents and lines are jointly normal, so that the parents are integrated exactly still.

Summing out a variable multiplies all tables that mention it into one, over it and its neighbours, and leaves a table
over the neighbours. The cost is that of the largest tables, and depends on the order alone. The best order is hard to
find; weighted min-fill (take next the variable whose elimination links the fewest pairs of neighbours, weighed by
their sizes) is near it in practice (Koller & Friedman 2009, 9.4.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TypeAlias

from otpdag.errors import ModelError, check_time
from otpdag.likelihood.elimination.families import FamilyView, TableView, line_of, name_of
from otpdag.likelihood.elimination.unknown_numbers import COARSE_POINTS, Cluster, cloud_size

Neighbours: TypeAlias = dict[int, set[int]]


def elimination_order(scopes: Iterable[Sequence[int]], sizes: Mapping[int, int]) -> tuple[int, ...]:
    """Weighted min-fill: next the variable whose elimination links the fewest pairs, weighed by their sizes.

    Args:
        scopes: The variables of each factor.
        sizes: Number of states of each variable.

    >>> elimination_order([(0, 1), (1, 2), (2, 3)], {0: 2, 1: 9, 2: 2, 3: 2})
    (0, 1, 2, 3)
    """
    near: Neighbours = {variable: set() for variable in sizes}
    for scope in scopes:
        for variable in scope:
            near[variable].update(other for other in scope if other != variable)
    scores = {variable: _fill(variable, near, sizes) for variable in near}
    order = []
    while near:
        variable = min(scores, key=lambda one: (scores[one], one))
        order.append(variable)
        changed = set(near[variable])
        _remove(variable, near)
        del scores[variable]
        for other in changed | {far for one in changed for far in near[one]}:
            scores[other] = _fill(other, near, sizes)
    return tuple(order)


def _remove(variable: int, near: Neighbours) -> None:
    """Link the neighbours of a variable with each other, and take it away."""
    linked = near.pop(variable)
    for one in linked:
        near[one] |= linked
        near[one] -= {one, variable}


def _fill(variable: int, near: Neighbours, sizes: Mapping[int, int]) -> int:
    pairs = combinations(near[variable], 2)
    return sum(sizes[one] * sizes[two] for one, two in pairs if two not in near[one])


@dataclass(frozen=True)
class EliminationOptions:
    """Sizes of the sums.

    Args:
        grid: Points of an unknown number that is not linear and normal.
        count_points: Most points of an unknown count.
        vector_points: Points of an unknown vector that is not linear and normal.
        largest_table: Most entries of one table of one row; a piece that needs more is refused.
        memory: Bytes that the tables of one block of rows may take.
        merged: Whether pieces that show the same are one piece with a weight.
        fine_table: Entries of one table of one row up to which unknown numbers and counts have all their points.
            Where larger tables are needed they begin with a few, and get as many as their posteriors ask for. Numbers
            have the usual grid at most where several unknowns of a piece are on points.
        integrate: Whether linear normal numbers are integrated exactly; otherwise they stand on points like others.
    """

    grid: int = 24
    count_points: int = 48
    vector_points: int = 512
    largest_table: int = 2**20
    memory: int = 2**27
    merged: bool = True
    fine_table: int | None = None
    integrate: bool = True


Cells = tuple[int, ...]
VALUES_OF_A_ROW = 4  # that a family reads, about
LINE_POINTS = 13  # of each of two or three lines, a standard deviation apart


@dataclass(frozen=True)
class Kind:
    """A kind of piece.

    Attributes:
        nodes: Its unknown nodes.
        families: The factors that read them.
        missing: Of vectors that are seen in part, the coordinates that are not.
        points: Of placed nodes the number of points, where it is not the usual one.
        lines: Families that read linear numbers through their lines.
    """

    nodes: tuple[int, ...]
    families: tuple[int, ...]
    missing: tuple[tuple[int, Cells], ...] = ()
    points: tuple[tuple[int, int], ...] = ()
    lines: tuple[int, ...] = ()


@dataclass(frozen=True)
class Factor:
    """A table that one family gives over its unknown members, the one that is eliminated last first.

    Lines of the family are the coordinates from ``first`` on of the lines among the members.
    """

    family: int
    members: tuple[int, ...]
    first: int = 0


@dataclass(frozen=True, eq=False)
class Plan:
    """How a kind of piece is integrated out.

    Attributes:
        kind: The kind.
        order: Nodes that are summed out, in the order of elimination.
        sizes: Number of states of each.
        placed: Nodes and lines with points of their own in each row.
        factors: Tables from single families.
        clusters: Tables from linear normal numbers.
    """

    kind: Kind
    order: tuple[int, ...]
    sizes: Mapping[int, int]
    placed: tuple[int, ...]
    factors: tuple[Factor, ...]
    clusters: tuple[Cluster, ...]

    def table_sizes(self, members: Iterable[int]) -> tuple[int, ...]:
        """The axes of a table over these nodes."""
        return tuple(self.sizes[node] for node in members)

    @cached_property
    def cliques(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of the table that each node is summed out of, that node last."""
        rank = {node: i for i, node in enumerate(self.order)}
        separators: dict[int, list[set[int]]] = {node: [] for node in self.order}
        for members in (*(one.members for one in self.factors), *(one.members for one in self.clusters)):
            if members:
                separators[members[-1]].append(set(members))
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
            if len(clique) > 1:
                level[clique[-2]] = max(level[clique[-2]], level[clique[-1]] + 1)
        return tuple(level[node] for node in self.order)

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
    kind: Kind, families: Sequence[FamilyView], points: Callable[[FamilyView | int], int], *, integrate: bool = True
) -> Plan:
    """Choose how to integrate a kind of piece out.

    Args:
        kind: The unknown nodes and the factors.
        families: All families of the graph.
        points: Number of points of a node that is not a category, or of so many lines.
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
    linear = _linear(kind, families, kind.lines) if integrate else set()
    clusters = _clusters(kind, families, linear)
    read = [tuple(v for v in members if v in kind.lines) for _, members in clusters]
    lines = {v: line_of(own, families) for own in read for v in own}
    numbers = [n for n in kind.nodes if n not in linear and not families[n].mechanism.space.is_discrete]
    placed = (*numbers, *dict.fromkeys(lines.values()))
    _check(kind, numbers, families)
    sizes = {n: families[n].mechanism.space.width for n in kind.nodes if n not in linear and n not in numbers}
    sizes |= {n: points(families[n] if n in numbers else n // len(families)) for n in placed} | dict(kind.points)
    inside = {family for _, members in clusters for family in members if family not in lines}
    reads = {v: (*families[v].members, lines.get(v, -1)) for v in kind.families}
    scopes = {v: [n for n in reads[v] if n in sizes] for v in kind.families if v not in inside}
    meets = reads | {v: (*(place for place, _ in families[v].selectors), line) for v, line in lines.items()}
    around = [list({n: None for v in members for n in meets[v] if n in sizes}) for _, members in clusters]
    order = elimination_order([*scopes.values(), *around], sizes)
    rank = {node: i for i, node in enumerate(order)}

    def descending(nodes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(nodes, key=lambda node: -rank[node]))

    firsts = {v: sum(families[u].lines for u in own if u < v) for own in read for v in own}
    factors = tuple(Factor(v, descending(scope), firsts.get(v, 0)) for v, scope in scopes.items())
    missing: Mapping[int, Cells] = dict(kind.missing)
    made = []
    for (nodes, members), met, own in zip(clusters, around, read, strict=True):
        coordinates = ((n, cell) for n in nodes for cell in missing.get(n, range(families[n].widths[-1])))
        exact = tuple(v for v in members if v not in own)
        made.append(Cluster(tuple(coordinates), exact, kind.nodes, frozenset(placed), descending(met), own))
    return Plan(kind, order, sizes, placed, factors, tuple(made))


def chosen_lines(kind: Kind, families: Sequence[FamilyView]) -> tuple[int, ...]:
    """Families whose lines should have points in the place of the numbers that they read.

    Either a family's lines or all its linear numbers are on points: a vertex cover. Next comes whichever leaves the
    fewest pairs of numbers and families for each axis that it adds, numbers first.
    """
    able = [v for v in kind.families if families[v].lines]
    linear = _linear(kind, families, able)
    left = {v: linear.intersection(families[v].members) for v in able}
    chosen = []
    while any(left.values()):
        counts = {n: sum(n in own for own in left.values()) for own in left.values() for n in own}
        number = max(counts, key=lambda n: (counts[n], -n))
        gains = {v: sum(families[n].widths[-1] for n in own) / families[v].lines for v, own in left.items()}
        family = max(gains, key=lambda v: (gains[v], -v))
        if gains[family] > counts[number]:
            chosen.append(family)
            del left[family]
        else:
            left = {v: own - {number} for v, own in left.items()}
    return _worth(kind, families, chosen)


def _worth(kind: Kind, families: Sequence[FamilyView], lines: Collection[int]) -> tuple[int, ...]:
    """Those of the families that read more linear coordinates than they have lines, which then are independent."""
    linear = _linear(kind, families, lines)
    unknown = dict(kind.missing)

    def coordinates(v: int) -> int:
        return sum(len(unknown.get(n, range(families[n].widths[-1]))) for n in linear.intersection(families[v].members))

    some = tuple(v for v in kind.families if v in lines and coordinates(v) > families[v].lines)
    return some if len(some) == len(lines) else _worth(kind, families, some)


def _linear(kind: Kind, families: Sequence[FamilyView], lines: Collection[int]) -> set[int]:
    """Unknown numbers that all factors read linearly, with normal noise, or through lines."""
    linear = {n for n in kind.nodes if families[n].is_linear}
    numbers = [n for n in kind.nodes if not families[n].mechanism.space.is_discrete]
    before = len(linear) + 1
    while len(linear) < before:
        before = len(linear)
        vectors = {n for n in numbers if n not in linear and families[n].widths[-1] > 1}
        for v in kind.families:
            if v in lines:
                continue
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
            raise ModelError(f"node {families[n].node!r}: a vector of counts with children cannot be hidden or missing")


class Planner:
    """Plans of kinds of pieces within some sizes, each made once; ``refused`` says why the sizes do not serve."""

    def __init__(self, table: TableView, options: EliminationOptions) -> None:
        self.table, self.options, self.families = table, options, table.families
        self.plans: dict[Kind, Plan] = {}
        self.refused = ""

    def first(self, kind: Kind) -> Plan:
        """How a kind of piece is integrated out, before its posteriors are known: coarsely where that is much work."""
        if kind not in self.plans:
            check_time()
            made, options = self._with_lines(self._plan(kind)), self.options
            if options.fine_table is not None and len(made.placed) > 1:
                made = plan(made.kind, self.families, self._points_of_several, integrate=options.integrate)
            if options.fine_table is not None and made.largest[0] > options.fine_table:
                single = [n for n in made.placed if self._width(n) == 1]
                few = tuple((n, min(COARSE_POINTS, made.sizes[n])) for n in single)
                made = self._plan(replace(made.kind, points=few))
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

    def _with_lines(self, made: Plan) -> Plan:
        """The same with lines on points in the place of several numbers, where that makes tables smaller."""
        lines = chosen_lines(made.kind, self.families) if self.options.integrate and made.placed else ()
        other = self._plan(replace(made.kind, lines=lines)) if lines else made
        return other if other.largest[0] < made.largest[0] else made

    def _width(self, variable: int) -> int:
        many = len(self.families)
        return self.families[variable].widths[-1] if variable < many else variable // many

    def _points(self, family: FamilyView | int) -> int:
        if isinstance(family, int):
            return self.options.grid if family == 1 else cloud_size(family, LINE_POINTS ** min(family, 3))
        if family.mechanism.space.is_countable:
            return self.table.count_points(family, self.options.count_points)
        width = family.mechanism.space.free_width
        if width > 1:
            return cloud_size(width, self.options.vector_points)
        return self.options.grid * (2 if family.place in self._along_curves else 1)

    @cached_property
    def _along_curves(self) -> frozenset[int]:
        """Numbers that some node does not follow along a line: where a curve is steep, a posterior is narrow."""
        curved = (one for one in self.families if not getattr(one.mechanism, "is_affine", True))
        return frozenset(parent for one in curved for parent in one.members[:-1])

    def _points_of_several(self, family: FamilyView | int) -> int:
        """The same where others are on points, too: not more than usual."""
        many, space = self._points(family), None if isinstance(family, int) else family.mechanism.space
        is_number = family == 1 if space is None else space.free_width == 1 and not space.is_countable
        return min(many, EliminationOptions.grid) if is_number else many

    def _check(self, made: Plan) -> None:
        entries, clique = made.largest
        if entries > self.options.largest_table:
            sizes = zip(clique, made.table_sizes(clique), strict=True)
            names = ", ".join(f"{name_of(n, self.families)} ({size})" for n, size in sizes)
            self.refused = (
                f"unknown nodes {names} meet, whose joint states are a table of {entries} entries for one row; at most "
                f"{self.options.largest_table} are summed: raise `largest_table`, or use method='paper'"
            )
