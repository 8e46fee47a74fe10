"""The loss of parts is that of all rows, and so is its gradient."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.engine import table_data
from otpdag.engine.lbfgs import Coordinates
from otpdag.engine.partitioned_data import PartitionedData
from otpdag.engine.table_data import TableData, table_problem
from otpdag.errors import ModelError
from otpdag.likelihood import partitioned_problem
from otpdag.likelihood.partitioned_problem import PartitionedProblem
from otpdag.likelihood.row_problem import RowProblem
from otpdag.numerics import bounded_threads
from otpdag.problem import LossTerms, Refinement
from otpdag.settings import Direct, Objective, PushForward

pytest.importorskip("pyarrow")

METHOD = otp.entropic()


def laid_out(tmp_path, graph, nodes, frame):
    frame.to_parquet(tmp_path / "table.parquet", row_group_size=70)
    data = otp.Partitioned(tmp_path / "table.parquet", block_rows=90, held_rows=100)
    kind = PartitionedData.of(otp.Model(graph, nodes), data)
    layout = kind.lay_out(METHOD, 0)
    whole = TableData.of(otp.Model(graph, nodes), frame)
    parts = kind.problem(layout, METHOD, 0)
    return parts, table_problem(layout, whole.batch, METHOD, 0), kind.starts(layout, parts, 0, [0, 1])


def with_gradient(problem, points):
    leaf = points.clone().requires_grad_(True)
    loss = problem.loss(leaf).total
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


def classes(rows=400):
    rng = np.random.default_rng(2)
    frame = pd.DataFrame(rng.normal(size=(rows, 3)), columns=["x", "y", "w"])
    frame["k"] = rng.poisson(3.0, rows).astype(float)
    frame = frame.mask(rng.random(frame.shape) < 0.1)
    graph = otp.Graph([("z", "x"), ("z", "k"), ("x", "y"), ("k", "w")], hidden=["z"])
    nodes = {"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal(), "w": m.Normal(), "k": m.Poisson()}
    return graph, nodes, frame


def bent_factor(rows=400):
    """A hidden number behind counts, whose points follow the posterior."""
    rng = np.random.default_rng(3)
    u = rng.normal(size=rows)
    frame = pd.DataFrame({name: rng.poisson(np.exp(0.5 + 0.6 * u)) for name in "abc"})
    nodes = {"u": m.Normal(loc=0.0, scale=1.0), **{name: m.Poisson() for name in "abc"}}
    return otp.Graph([("u", name) for name in "abc"], hidden=["u"]), nodes, frame


def test_loss_and_gradient_of_parts_are_those_of_all_rows(tmp_path):
    parts, whole, points = laid_out(tmp_path, *classes())
    for ours, theirs in zip(with_gradient(parts, points), with_gradient(whole, points), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(parts.loss(points).total, whole.loss(points).total, rtol=1e-12)


def test_points_of_hidden_numbers_are_placed_in_all_parts(tmp_path):
    parts, whole, points = laid_out(tmp_path, *bent_factor())
    point = points[:1]
    placed, whole = parts.laid_out_for(point, precisely=True), whole.laid_out_for(point, precisely=True)
    moved = placed.refine(point)
    placed = placed if moved is None else moved.problem
    for ours, theirs in zip(with_gradient(placed, point), with_gradient(whole, point), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_part_of_the_rows_is_at_hand(tmp_path):
    parts, _, _ = laid_out(tmp_path, *classes())
    assert parts.rows == 400
    assert parts.subset(10**6).rows == 100
    assert parts.subset(30).rows == 30
    with pytest.raises(ModelError, match="not at hand"):
        parts.subset(torch.arange(5))


def test_rows_at_hand_suggest_where_else_to_look(tmp_path):
    graph, nodes, frame = classes()
    parts, _, points = laid_out(tmp_path, graph, {**nodes, "z": m.Categorical(3)}, frame)
    ours, theirs = (one.proposals(points[:1]) for one in (parts, parts.base))
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours.points, theirs.points)
    assert ours.part.rows == parts.base.rows == 100


def test_many_rows_in_memory_are_worked_on_in_blocks(monkeypatch):
    graph, nodes, frame = classes()
    whole = TableData.of(otp.Model(graph, nodes), frame)
    layout = whole.lay_out(METHOD, 0)
    plain = whole.problem(layout, METHOD, 0)
    for name, size in {"HELD_ROWS": 100, "FROM_ROWS": 200, "BLOCK_ROWS": 90}.items():
        monkeypatch.setattr(partitioned_problem, name, size)
    graph, nodes = otp.Graph([("z", "x"), ("x", "y")], hidden=["z"]), {k: nodes[k] for k in ("z", "x", "y")}
    whole = TableData.of(otp.Model(graph, nodes), frame[["x", "y"]])
    layout = whole.lay_out(METHOD, 0)
    blocks = whole.problem(layout, METHOD, 0)
    points = whole.starts(layout, blocks, 0, [0, 1])
    assert isinstance(blocks, partitioned_problem.PartitionedProblem)
    assert not isinstance(plain, partitioned_problem.PartitionedProblem)
    for ours, theirs in zip(with_gradient(blocks, points), with_gradient(blocks.in_units(), points), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)
    assert blocks.weight.shape == (1, 400)
    assert blocks.unit_losses(points).shape == (2, 400)
    assert blocks.subset(torch.arange(7)).rows == 7
    assert torch.allclose(blocks.reweighted(torch.ones(1, 400)).loss(points).total, blocks.loss(points).total)


def small_sizes(monkeypatch):
    """Blocks of few rows."""
    for name, size in {"HELD_ROWS": 100, "FROM_ROWS": 200, "BLOCK_ROWS": 90}.items():
        monkeypatch.setattr(partitioned_problem, name, size)
    monkeypatch.setattr(table_data, "FROM_ROWS", 200)


def with_category(rows=400):
    """Categories beside numbers around a hidden class, with gaps."""
    rng = np.random.default_rng(4)
    z = rng.integers(0, 2, rows)
    frame = pd.DataFrame({"x": rng.normal(3.0 * z), "y": rng.normal(size=rows)})
    frame["k"] = np.where(rng.random(rows) < 0.2 + 0.6 * z, "a", "b")
    frame["y"] += 0.5 * frame["x"]
    frame = frame.mask(rng.random(frame.shape) < 0.05)
    graph = otp.Graph([("z", "x"), ("z", "k"), ("x", "y")], hidden=["z"])
    return graph, {"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal(), "k": m.Categorical(2)}, frame


def test_a_table_that_keeps_bytes_for_categories_is_fitted_alike(monkeypatch):
    graph, nodes, frame = with_category()
    plain = otp.fit(otp.Model(graph, nodes), frame, restarts=2)
    small_sizes(monkeypatch)
    kind = TableData.of(otp.Model(graph, nodes), frame)
    assert kind.batch.values["k"].dtype == torch.uint8
    narrow = otp.fit(otp.Model(graph, nodes), frame, restarts=2)
    assert isinstance(narrow.problem, partitioned_problem.PartitionedProblem)
    assert narrow.loss == pytest.approx(plain.loss, abs=1e-8)
    assert narrow.problem.in_units().batch.values["k"].dtype == torch.float64
    assert len(narrow.standard_errors()) == len(plain.standard_errors())


def test_two_threads_find_what_one_finds_to_the_last_digit(monkeypatch):
    small_sizes(monkeypatch)
    graph, nodes, frame = with_category()
    kind = TableData.of(otp.Model(graph, nodes), frame)
    layout = kind.lay_out(METHOD, 0)
    blocks = kind.problem(layout, METHOD, 0)
    points = kind.starts(layout, blocks, 0, [0, 1])
    found, threads = {}, torch.get_num_threads()
    for number in (1, 2):
        torch.set_num_threads(number)
        try:
            with bounded_threads(1):
                found[number] = (*with_gradient(blocks, points), Coordinates.of(blocks, points).matrix)
        finally:
            torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(found[1], found[2], strict=True))


class Bowl:
    """A problem of one part whose loss is a parabola, and which notes what it is asked for."""

    def __init__(self, weight, middle):
        self.weight, self.middle, self.asked, self.placed = torch.tensor([weight]).double(), middle, [], []

    def loss(self, point):
        self.asked.append(len(point))
        gap = (point - self.middle).square().sum(-1)
        return LossTerms.of(gap, reconstruction=gap)

    def laid_out_for(self, points, *, precisely):
        assert precisely
        self.placed.append(points)
        return self


def of_bowls(bowls, **options):
    parts = SimpleNamespace(each=lambda work, *given: [work(one, number, *given) for number, one in enumerate(bowls)])
    return PartitionedProblem(options.pop("base", SimpleNamespace()), parts, 12, **options)


def test_parts_are_weighed_and_evaluated_for_few_replicas_at_a_time():
    bowls = [Bowl([1.0, 2.0], 1.0), Bowl([4.0], -2.0)]
    problem = of_bowls(bowls)
    point = torch.arange(18.0).double().reshape(9, 2).requires_grad_()
    loss = problem.loss(point).total
    expected = (3 * (point - 1).square().sum(-1) + 4 * (point + 2).square().sum(-1)) / 7
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad((2 * loss).sum(), point)
    torch.testing.assert_close(gradient, 2 * torch.autograd.grad(expected.sum(), point)[0])
    assert bowls[0].asked == [4, 4, 1]
    assert bowls[0].placed == []
    loss, gradient = problem.gathered(point.detach(), slope=False)
    torch.testing.assert_close(loss, expected.detach())
    assert not gradient.any()
    for rows, asked in ((1, [4, 4, 1]), (9, [9])):
        bowls[0].asked.clear()
        of_bowls(bowls, placed=torch.zeros(rows, 2)).gathered(point.detach(), slope=True)
        assert bowls[0].asked == asked
        assert len(bowls[0].placed[-1]) == rows


@pytest.mark.parametrize(("to", "kept"), [(0.9, True), (1.3, False)])
def test_a_point_that_rows_at_hand_move_to_must_be_better_on_all(to, kept):
    base = SimpleNamespace()
    base.refine = lambda point: Refinement(base, torch.full_like(point, to), "swapped", torch.zeros(1))
    problem = of_bowls([Bowl([3.0], 0.0)], base=base)
    found = problem.refine(torch.ones(1, 2).double())
    assert (found is not None) == kept
    if kept:
        assert found.problem is problem
        assert found.loss.item() == pytest.approx(2 * 0.81)
    base.refine = lambda point: None
    assert problem.refine(torch.ones(1, 2).double()) is None
    other = of_bowls([Bowl([3.0], 0.0)])
    base.refine = lambda point: Refinement(other, point + 1, "moved grids")
    found = problem.refine(torch.ones(1, 2).double())
    assert found.problem.base is other
    assert found.problem.placed.tolist() == [[2.0, 2.0]]


def test_rows_that_are_not_at_hand_have_no_weights():
    problem = of_bowls([Bowl([3.0], 0.0)])
    assert problem.rows == 12
    assert problem.unit_mass.tolist() == [[12.0]]
    with pytest.raises(ModelError, match="rows of a partitioned table are not at hand"):
        _ = problem.weight
    whole = SimpleNamespace(weight=torch.ones(1, 12))
    assert of_bowls([], whole=lambda: whole).unit_mass is whole.weight


@pytest.mark.parametrize(
    ("rows", "replicas", "objective", "in_blocks"),
    [
        (200, 1, Objective(eps=1.0), True),
        (199, 1, Objective(eps=1.0), False),
        (200, 2, Objective(eps=1.0), False),
        (200, 1, Objective(eps=1.0, direct=Direct()), False),
        (200, 1, Objective(eps=1.0, push_forward=PushForward()), False),
    ],
)
def test_few_rows_many_tables_and_terms_that_compare_all_rows_stay_whole(
    rows, replicas, objective, in_blocks, monkeypatch
):
    small_sizes(monkeypatch)
    laid = []

    class Laid(RowProblem):
        def __init__(self, batch):
            laid.append(batch.rows)

    monkeypatch.setattr(partitioned_problem, "row_problem", lambda about, batch, seed: Laid(batch))
    x = torch.zeros(replicas, rows, 1).double()
    batch = Batch({"x": x}, {"x": torch.ones_like(x).bool()}, torch.ones(replicas, rows).double())
    problem = partitioned_problem.rows_in_blocks(SimpleNamespace(weights=objective), batch, 0)
    assert isinstance(problem, PartitionedProblem) is in_blocks
    assert laid == ([100] if in_blocks else [rows])
    if in_blocks:
        assert problem.rows == 200
        assert list(problem.problems.each(lambda one, number: laid[-1])) == [90, 90, 20]
