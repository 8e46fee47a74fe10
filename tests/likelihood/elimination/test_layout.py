"""Layouts of rows: pieces, blocks and sizes, what is refused before any work, and what sums may cost."""

from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.errors import DataError, ModelError
from otpdag.likelihood.elimination.evidence import log_evidence, moved, total_evidence
from otpdag.likelihood.elimination.families import describe_families
from otpdag.likelihood.elimination.layout import Layout, fitting, lay_out, lay_out_within
from otpdag.likelihood.elimination.plans import EliminationOptions, Kind, plan
from otpdag.likelihood.elimination.unknown_numbers import Placement
from otpdag.spaces import Count, Discrete, Real
from otpdag.structure import Structure
from tests.likelihood.elimination.worlds import gappy, lattice, make_world, mixed_nodes, random_naturals

# -- what a layout knows before any work: pieces, sizes, refusals; and that pieces alike are one ----------------------


def grid_of_binaries(side):
    """A square lattice of hidden binaries, each with a child that is seen."""
    hidden = [f"h{i}_{j}" for i in range(side) for j in range(side)]
    edges = [(f"h{i}_{j}", f"h{i + 1}_{j}") for i in range(side - 1) for j in range(side)]
    edges += [(f"h{i}_{j}", f"h{i}_{j + 1}") for i in range(side) for j in range(side - 1)]
    edges += [(h, "x" + h) for h in hidden]
    nodes = {name: m.Bernoulli() for name in (*hidden, *("x" + h for h in hidden))}
    return nodes, edges, hidden


def test_a_lattice_costs_what_its_width_costs():
    nodes, edges, hidden = grid_of_binaries(8)
    structure, naturals, batch = make_world(nodes, edges, np.random.default_rng(0), rows=3, gaps=0.0, hidden=hidden)
    layout = lay_out(structure, batch)
    assert layout.largest_table <= 2**11  # of 2^64 joint states
    assert bool(torch.isfinite(log_evidence(naturals, layout)).all())


def test_a_table_beyond_the_limit_is_refused_before_any_work():
    nodes, edges, hidden = grid_of_binaries(6)
    structure, _, batch = make_world(nodes, edges, np.random.default_rng(0), rows=2, gaps=0.0, hidden=hidden)
    with pytest.raises(ModelError, match=r"'h\d_\d' \(2\).* table of \d+ entries for one row; at most 16 are summed"):
        lay_out(structure, batch, EliminationOptions(largest_table=16))


def test_an_unknown_without_seen_descendants_is_left_out():
    structure, _, batch = make_world(
        {n: m.Normal() for n in "abc"}, [("a", "b"), ("b", "c")], np.random.default_rng(0), gaps=0.0
    )
    batch.mask["c"][:] = False
    assert lay_out(structure, batch).pieces == 0
    batch.mask["b"][:] = False
    assert lay_out(structure, batch).pieces == 0
    assert lay_out(structure, batch, keep=("b",)).pieces == batch.rows


def test_linear_numbers_next_to_points_are_integrated_and_not_placed():
    graph = otp.Graph([("f", "g"), ("g", "h"), ("h", "count")])
    structure = Structure.bind(graph, {"f": m.Normal(), "g": m.Normal(), "h": m.Normal(), "count": m.Poisson()})
    made = plan(Kind((0, 1, 2), (0, 1, 2, 3)), describe_families(structure), lambda _: 20)
    assert made.placed == (2,)
    assert made.clusters[0].coordinates == ((0, 0), (1, 0))


def test_more_than_sixteen_linear_unknowns_are_no_limit():
    names = [f"f{i}" for i in range(60)]
    nodes = {n: m.Normal() for n in names} | {"x" + n: m.Normal() for n in names}
    edges = [(names[i], names[i + 1]) for i in range(59)] + [(n, "x" + n) for n in names]
    structure, naturals, batch = make_world(nodes, edges, np.random.default_rng(0), rows=5, gaps=0.2, hidden=names)
    from scipy.stats import multivariate_normal

    from tests.likelihood.elimination.worlds import linear_moments

    mean, covariance, at = linear_moments(structure, naturals)
    found = log_evidence(naturals, lay_out(structure, batch))
    for row in range(5):
        seen = [n for n in at if n in batch.mask and bool(batch.mask[n][0, row, 0])]
        index = [at[n].start for n in seen]
        values = [float(batch.values[n][0, row, 0]) for n in seen]
        truth = multivariate_normal.logpdf(values, mean[index], covariance[np.ix_(index, index)])
        assert float(found[0, row]) == pytest.approx(truth, rel=1e-9)


def test_tables_that_differ_between_replicas_are_refused():
    structure = Structure.bind(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    batch = Batch({"x": torch.zeros(2, 3, 1).double()}, {"x": torch.ones(1, 3, 1).bool()}, torch.ones(1, 3).double())
    with pytest.raises(DataError, match="node 'x' has 2 different tables"):
        lay_out(structure, batch)


def test_a_table_without_gaps_is_its_complete_families():
    structure, naturals, batch = make_world(
        {"z": m.Bernoulli(), "x": m.Normal(), "k": m.Poisson()},
        [("z", "x"), ("x", "k")],
        np.random.default_rng(0),
        gaps=0.0,
    )
    layout = lay_out(structure, batch)
    truth = sum(
        mechanism.log_prob(naturals[n], batch.values[n], structure.parents(n, batch.values))
        for n, mechanism in structure.mechanisms.items()
    )
    torch.testing.assert_close(log_evidence(naturals, layout), truth)
    torch.testing.assert_close(total_evidence(naturals, layout), (batch.weight * truth).sum(-1))


def test_a_family_seen_in_no_row_has_no_gradient():
    structure, naturals, batch = make_world(
        {"z": m.Bernoulli(), "x": m.Normal()}, [("z", "x")], np.random.default_rng(0), gaps=0.0
    )
    batch.mask["x"][:] = False
    own = {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in naturals.items()}
    total_evidence(own, lay_out(structure, batch)).sum().backward()
    assert float(own["x"]["loc"].grad.abs().sum()) == 0.0
    assert float(own["z"]["probs"].grad.abs().sum()) > 0.0


def test_naturals_shared_by_all_replicas_broadcast():
    structure, naturals, batch = make_world(
        {"z": m.Bernoulli(), "x": m.Normal()}, [("z", "x")], np.random.default_rng(0), gaps=0.3, hidden=("z",)
    )
    many = random_naturals(structure, np.random.default_rng(1), replicas=3)
    mixed = {"z": naturals["z"], "x": many["x"]}
    layout = lay_out(structure, batch)
    found = log_evidence(mixed, layout)
    for replica in range(3):
        one = {"z": naturals["z"], "x": {k: v[replica : replica + 1] for k, v in many["x"].items()}}
        torch.testing.assert_close(found[replica], log_evidence(one, layout)[0])


def test_points_of_other_replicas_are_refused():
    structure, naturals, batch = make_world(
        {"f": m.Normal(), "k": m.Poisson()}, [("f", "k")], np.random.default_rng(0), gaps=0.0, hidden=("f",), replicas=3
    )
    layout = moved(naturals, lay_out(structure, batch))
    one = {n: {k: v[:1] for k, v in p.items()} for n, p in naturals.items()}
    with pytest.raises(ModelError, match="another number of replicas than 1"):
        log_evidence(one, layout)


def test_covariates_are_conditioned_on():
    graph = otp.Graph([("c", "x"), ("d", "x"), ("x", "y")])
    nodes = {"c": m.Given(Real(1)), "d": m.Given(Discrete(2)), "x": m.Normal(), "y": m.Normal()}
    structure = Structure.bind(graph, nodes)
    naturals = random_naturals(structure, np.random.default_rng(0))
    rows = 6
    values = {
        "c": torch.linspace(-1, 1, rows).double().reshape(1, rows, 1),
        "d": torch.eye(2).double()[torch.arange(rows) % 2].unsqueeze(0),
        "x": torch.ones(1, rows, 1).double(),
        "y": torch.ones(1, rows, 1).double(),
    }
    mask = {n: torch.ones(1, rows, 1).bool() for n in values}
    mask["x"] = torch.zeros(1, rows, 1).bool()
    batch = Batch(values, mask, torch.ones(1, rows).double())
    found = log_evidence(naturals, lay_out(structure, batch))
    x, y = naturals["x"], naturals["y"]
    mean = x["loc"][0, torch.arange(rows) % 2, 0] + x["weight"][0, 0, 0] * values["c"][0, :, 0]
    mean = y["loc"][0, 0, 0] + y["weight"][0, 0, 0] * mean
    variance = y["scale"][0, 0, 0] ** 2 + (y["weight"][0, 0, 0] * x["scale"][0, torch.arange(rows) % 2, 0]) ** 2
    torch.testing.assert_close(
        found[0], torch.distributions.Normal(mean, variance.sqrt()).log_prob(values["y"][0, :, 0])
    )


@pytest.mark.parametrize(
    ("wide", "size", "has_origin", "outgrown"),
    [(5, 40, True, False), (6, 40, True, True), (6, 96, True, False), (6, 40, False, False)],
)
def test_points_are_outgrown_where_one_row_in_twenty_has_counts_without_a_point(wide, size, has_origin, outgrown):
    spread = torch.ones(1, 100).double()
    spread[:, :wide] = 500.0
    placement = Placement("n", Count(), torch.arange(100), size, torch.full((1, 100), 5.0).double(), spread)
    block = SimpleNamespace(origin=object() if has_origin else None, placements={(0, size): placement})
    planner = SimpleNamespace(options=SimpleNamespace(count_points=96))
    layout = SimpleNamespace(planner=planner, blocks=[block])
    assert Layout.is_outgrown.fget(layout) == outgrown
    # a node of few rows does not make all be laid anew
    few = Placement("m", Count(), torch.arange(2), size, torch.full((1, 2), 5.0).double(), spread[:, :2])
    block.placements[1, size] = few
    block.placements[0, size] = replace(placement, spread=torch.ones(1, 100).double())
    assert not Layout.is_outgrown.fget(layout)


# -- blocks of rows: pieces alike are one, and how rows are cut into blocks changes nothing ---------------------------


def test_equal_pieces_of_different_rows_are_one():
    graph = otp.Graph([("a", "b"), ("b", "c"), ("c", "d"), ("d", "e")])
    structure = Structure.bind(graph, {n: m.Bernoulli() for n in "abcde"})
    rows = 400
    rng = np.random.default_rng(0)
    values = {n: torch.eye(2).double()[torch.as_tensor(rng.integers(2, size=rows))].unsqueeze(0) for n in "abcde"}
    batch = gappy(structure, values, rng, 0.0)
    batch.mask["b"][0, ::2] = False  # b unknown: a and c tell of it, whatever e shows or lacks
    batch.mask["e"][0, ::3] = False
    layout = lay_out(structure, batch)
    assert layout.pieces == 200
    assert sum(block.distinct for block in layout.blocks) == 4


def test_blocks_of_rows_change_nothing():
    rng = np.random.default_rng(0)
    nodes, edges = mixed_nodes()
    structure, naturals, batch = make_world(nodes, edges, rng, rows=200, gaps=0.2)
    whole = moved(naturals, lay_out(structure, batch))
    parts = moved(naturals, lay_out(structure, batch, EliminationOptions(memory=2**16)))
    assert len(parts.blocks) > len(whole.blocks)
    torch.testing.assert_close(log_evidence(naturals, parts), log_evidence(naturals, whole))
    torch.testing.assert_close(total_evidence(naturals, parts), total_evidence(naturals, whole))


# -- what sums may cost ------------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_says_what_sums_would_take():
    structure, _, batch = lattice(4, 0.5)
    with pytest.raises(ModelError, match="a table of 32 entries for one row; at most 8 are summed"):
        lay_out_within(structure, batch, EliminationOptions(largest_table=8))


def test_larger_tables_are_tried_where_no_coarser_points_serve(monkeypatch):
    structure, _, batch = lattice(4, 0.5)
    monkeypatch.setattr("otpdag.likelihood.elimination.layout.USUAL_TABLE", 8)
    assert lay_out_within(structure, batch, EliminationOptions(largest_table=32)).largest_table == 32
    with pytest.raises(ModelError, match="at most 31 are summed"):
        lay_out_within(structure, batch, EliminationOptions(largest_table=31))


@dataclass(frozen=True)
class RowsOf:
    """Rows of a plan, each with so many entries."""

    rows: range
    each: int

    @property
    def plan(self):
        return SimpleNamespace(kind=SimpleNamespace(families=(self.each,)), entries=lambda families: self.each)

    def at(self, place):
        return replace(self, rows=self.rows[place])


@pytest.mark.parametrize("entries", [10, 100, 1000])
def test_parts_that_are_laid_out_together_fit_into_memory_and_are_as_many_as_do(entries):
    planner = SimpleNamespace(options=SimpleNamespace(memory=8 * entries), families=())
    parts = [RowsOf(range(7), 3), RowsOf(range(7, 20), 12), RowsOf(range(20, 64), 5)]
    together = list(fitting(planner, parts))
    sizes = [[part.each * len(part.rows) for part in some] for some in together]
    assert sorted(row for some in together for part in some for row in part.rows) == list(range(64))
    assert all(
        sum(own) <= entries or [len(part.rows) for part in some] == [1]
        for own, some in zip(sizes, together, strict=True)
    )
    assert all(sum(own) + following[0] > entries for own, following in pairwise(sizes))
