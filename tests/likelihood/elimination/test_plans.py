"""Orders of elimination and plans of sums, against all orders there are and against networkx."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.errors import ModelError
from otpdag.likelihood.elimination import plans as piece_plans
from otpdag.likelihood.elimination.families import cut, describe_families, needs
from otpdag.likelihood.elimination.plans import Factor, Kind, Plan, elimination_order
from otpdag.structure import Structure
from tests.likelihood.elimination.worlds import random_edges

# -- orders of elimination, against all orders there are --------------------------------------------------------------


def brute_cost(scopes, sizes, order):
    """Multiply tables as sets of variables, one variable after the other."""
    tables, costs = [set(scope) for scope in scopes], []
    for variable in order:
        joined = set().union({variable}, *(table for table in tables if variable in table))
        costs.append(math.prod(sizes[one] for one in joined))
        tables = [table for table in tables if variable not in table] + [joined - {variable}]
    return costs


@pytest.mark.parametrize("seed", range(12))
def test_orders_are_near_the_best(seed):
    rng = np.random.default_rng(4100 + seed)
    many = 6
    sizes = {i: int(rng.integers(2, 6)) for i in range(many)}
    scopes = [tuple(rng.permutation(many)[: rng.integers(1, 4)].tolist()) for _ in range(6)]
    orders = list(itertools.permutations(range(many)))
    best = min(sum(brute_cost(scopes, sizes, order)) for order in orders)
    order = elimination_order(scopes, sizes)
    assert sorted(order) == list(range(many))
    assert sum(brute_cost(scopes, sizes, order)) <= 1.3 * best


def test_orders_of_a_chain_and_a_star_are_cheap():
    chain, star = [(i, i + 1) for i in range(49)], [(0, i) for i in range(1, 50)]
    for scopes in (chain, star):
        sizes = {0: 2, **dict.fromkeys(range(1, 50), 9)}
        assert max(brute_cost(scopes, sizes, elimination_order(scopes, sizes))) == (81 if scopes is chain else 18)


def test_one_variable():
    assert elimination_order([(4,)], {4: 3}) == (4,)


# -- plans of sums: which tables they need ----------------------------------------------------------------------------


def plan(sizes, scopes, placed=(), order=None):
    order = tuple(order or sizes)
    rank = {node: at for at, node in enumerate(order)}
    ordered = [tuple(sorted(scope, key=lambda node: -rank[node])) for scope in scopes]
    factors = tuple(Factor(at, scope) for at, scope in enumerate(ordered))
    return Plan(Kind(order, tuple(range(len(scopes)))), order, sizes, tuple(placed), factors, ())


def test_tables_of_a_chain_are_pairs_and_of_a_star_the_children_one_by_one():
    chain = plan({0: 2, 1: 3, 2: 4}, [(0,), (0, 1), (1, 2)])
    assert chain.cliques == ((1, 0), (2, 1), (2,))
    assert chain.levels == (0, 1, 2)
    star = plan({0: 2, 1: 3, 2: 4}, [(2, 0), (2, 1), (2,)])
    assert star.cliques == ((2, 0), (2, 1), (2,))
    assert star.levels == (0, 0, 1)
    assert star.table_sizes((2, 0)) == (4, 2)


# -- plans of random graphs, beside their definitions -----------------------------------------------------------------


def random_families(seed, linear=False):
    rng = np.random.default_rng(seed)
    names = list("abcdefghi")
    kinds = [m.Normal, m.Normal, lambda: m.Normal(2)]
    if not linear:
        kinds += [lambda: m.Categorical(3), m.Poisson, m.StudentT]
    nodes = {name: kinds[rng.integers(len(kinds))]() for name in names}
    structure = Structure.bind(otp.Graph(random_edges(rng, names, 0.35), nodes=names), nodes)
    families = describe_families(structure)
    unknown = tuple(sorted(int(n) for n in rng.choice(9, 6, replace=False)))
    read = tuple(v for v, family in enumerate(families) if set(family.members) & set(unknown))
    return Kind(unknown, read), families


def plain_linear(kind, families):
    """The most unknown numbers that all factors read linearly, none beside a vector on points."""
    linear = {n for n in kind.nodes if families[n].is_linear}
    while True:
        vectors = {
            n
            for n in kind.nodes
            if n not in linear and families[n].widths[-1] > 1 and not families[n].mechanism.space.is_discrete
        }
        spoiled = [v for v in kind.families if not families[v].is_linear or vectors & set(families[v].members)]
        kept = linear - {n for v in spoiled for n in families[v].members}
        if kept == linear:
            return linear
        linear = kept


@pytest.mark.parametrize("seed", range(12))
def test_numbers_are_integrated_where_all_read_them_linearly(seed):
    kind, families = random_families(seed)
    made = piece_plans.plan(kind, families, lambda family: 7)
    linear = plain_linear(kind, families)
    assert {n for cluster in made.clusters for n, _ in cluster.coordinates} == linear
    expected = {n for n in kind.nodes if n not in linear and not families[n].mechanism.space.is_discrete}
    assert set(made.placed) == expected
    summed = set(kind.nodes) - linear
    assert set(made.order) == set(made.sizes) == summed
    for node in summed:
        size = 7 if node in expected else families[node].mechanism.space.width
        assert made.sizes[node] == size
    # numbers that share a factor, directly or through others, are of one cluster
    graph = nx.Graph()
    graph.add_nodes_from(linear)
    for v in kind.families:
        own = [n for n in families[v].members if n in linear]
        graph.add_edges_from(pairwise(own))
    parts = {frozenset(part) for part in nx.connected_components(graph)}
    assert {frozenset(n for n, _ in cluster.coordinates) for cluster in made.clusters} == parts
    rank = {node: at for at, node in enumerate(made.order)}
    inside = set()
    for cluster in made.clusters:
        own = {n for n, _ in cluster.coordinates}
        read = [v for v in kind.families if set(families[v].members) & own]
        assert sorted(cluster.families) == read
        inside |= set(read)
        met = {n for v in read for n in families[v].members if n in summed}
        assert list(cluster.members) == sorted(met, key=lambda node: -rank[node])
        assert set(cluster.placed) == met & expected
        assert set(cluster.categories) == met - expected
        cells = [(n, cell) for n in sorted(own) for cell in range(families[n].widths[-1])]
        assert list(cluster.coordinates) == cells
    assert {factor.family for factor in made.factors} == set(kind.families) - inside
    for factor in made.factors:
        scope = [n for n in families[factor.family].members if n in summed]
        assert list(factor.members) == sorted(scope, key=lambda node: -rank[node])
    placed = piece_plans.plan(kind, families, lambda family: 7, integrate=False)
    assert placed.clusters == ()
    assert set(placed.placed) == {n for n in kind.nodes if not families[n].mechanism.space.is_discrete}


@pytest.mark.parametrize("seed", range(4))
def test_entries_are_sums_over_tables(seed):
    kind, families = random_families(seed)
    made = piece_plans.plan(kind, families, lambda family: 7)

    def stored(nodes):
        return int(np.prod([made.sizes[node] for node in nodes]))

    expected = 1 + sum(stored(clique) + stored(clique[:-1]) for clique in made.cliques)
    for factor in made.factors:
        expected += 0 if families[factor.family].is_table else 5 * stored(factor.members)
    for cluster in made.clusters:
        width = 1 + max(len(families[v].columns) for v in cluster.families)
        unknown = len(cluster.coordinates)
        expected += (len(cluster.families) * width * (width + 2) + unknown**2) * stored(cluster.members)
    assert made.entries(families) == expected
    assert made.largest[0] == max((stored(clique) for clique in made.cliques), default=1)
    assert made.largest[0] == stored(made.largest[1])


def test_points_and_missing_coordinates_are_those_of_the_kind():
    kind, families = random_families(1, linear=True)
    vector = next(n for n in kind.nodes if families[n].widths[-1] == 2)
    part = piece_plans.plan(replace(kind, missing=((vector, (1,)),)), families, lambda family: 7)
    cells = [cell for cluster in part.clusters for node, cell in cluster.coordinates if node == vector]
    assert cells == [1]
    for kind, families in map(random_families, range(12)):
        usual = piece_plans.plan(kind, families, lambda family: 7)
        if usual.placed:
            break
    few = piece_plans.plan(replace(kind, points=((usual.placed[0], 3),)), families, lambda family: 7)
    assert few.sizes[usual.placed[0]] == 3


def test_what_cannot_be_summed_is_refused():
    nodes = {"a": m.Poisson(3), "b": m.Normal()}
    structure = Structure.bind(otp.Graph([("a", "b")]), nodes)
    with pytest.raises(ModelError, match="node 'a': a vector of counts with children cannot be hidden"):
        piece_plans.plan(Kind((0,), (0, 1)), describe_families(structure), lambda family: 7)
    nodes = {"a": m.Normal(), "b": m.Deterministic(lambda parents: parents["a"])}
    structure = Structure.bind(otp.Graph([("a", "b")]), nodes)
    with pytest.raises(ModelError, match="Deterministic at node 'b' has no density"):
        piece_plans.plan(Kind((0,), (0, 1)), describe_families(structure), lambda family: 7)


# -- pieces of rows, against networkx on the moral graph of each row --------------------------------------------------


def expected(graph, seen, keep=()):
    """What must be filled in, which families count, and the pieces of one row."""
    whole = nx.DiGraph(list(graph.edges))
    whole.add_nodes_from(graph.nodes)
    shown = {node for node, flag in zip(graph.order, seen, strict=True) if flag}
    wanted = shown | set(keep)
    active = wanted.union(*(nx.ancestors(whole, node) for node in wanted)) if wanted else set()
    unknown = active - shown
    links = nx.Graph()
    links.add_nodes_from(unknown)
    complete = set()
    for node in active:
        members = [one for one in (node, *whole.predecessors(node)) if one in unknown]
        links.add_edges_from(itertools.pairwise(members))
        if not members:
            complete.add(node)
    return unknown, active, complete, {frozenset(piece) for piece in nx.connected_components(links)}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kept", [0, 2])
def test_pieces_are_components_of_the_moral_graph(seed, kept):
    rng = np.random.default_rng(7300 + seed)
    names = [f"n{i}" for i in range(9)]
    graph = otp.Graph(random_edges(rng, names, 0.35), nodes=names)
    structure = Structure.bind(graph, {node: m.Categorical(2) for node in names})
    keep = tuple(rng.permutation(names)[:kept].tolist())
    seen = rng.random((15, 9)) < 0.5
    need = needs(describe_families(structure), seen, np.zeros_like(seen), keep)
    pieces = cut(describe_families(structure), need)
    for row in range(15):
        unknown, active, complete, components = expected(graph, seen[row], keep)
        flagged = lambda flags, row=row: {n for n, flag in zip(graph.order, flags[row], strict=True) if flag}  # noqa: E731
        assert flagged(need.unknown) == unknown
        assert flagged(need.active) == active
        assert flagged(pieces.complete) == complete
        own = np.flatnonzero(pieces.row == row)
        cells = {frozenset(graph.order[n] for n in pieces.cell_node[pieces.cell_piece == piece]) for piece in own}
        assert cells == components
        touched = sorted(graph.order[n] for piece in own for n in pieces.touch_node[pieces.touch_piece == piece])
        assert touched == sorted(active - complete)


def test_given_nodes_have_no_density():
    graph = otp.Graph([("x", "y")])
    structure = Structure.bind(graph, {"x": m.Given(), "y": m.Normal()})
    seen = np.ones((2, 2), dtype=bool)
    assert needs(describe_families(structure), seen, ~seen).active.tolist() == [[False, True], [False, True]]
