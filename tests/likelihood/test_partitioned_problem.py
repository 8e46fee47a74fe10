"""The loss of parts is that of all rows, and so is its gradient."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import data_kind
from otpdag.engine.data_kind import TableData, table_problem
from otpdag.errors import ModelError
from otpdag.likelihood.partitioned_problem import PartitionedProblem
from otpdag.problem import LossTerms, Refinement

pytest.importorskip("pyarrow")

METHOD = otp.entropic()


def laid_out(tmp_path, graph, nodes, frame):
    frame.to_parquet(tmp_path / "table.parquet", row_group_size=70)
    data = otp.Partitioned(tmp_path / "table.parquet", block_rows=90, held_rows=100)
    kind = TableData.in_parts(otp.Model(graph, nodes), data)
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
    placed, whole = parts.laid_out_for(point), whole.laid_out_for(point)
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
    monkeypatch.setattr(data_kind, "FROM_ROWS", 200)
    kind = TableData.of(otp.Model(graph, nodes), frame)
    assert kind.batch.values["k"].dtype == torch.uint8
    narrow = otp.fit(otp.Model(graph, nodes), frame, restarts=2)
    assert narrow.loss == pytest.approx(plain.loss, abs=1e-8)
    assert narrow.problem.batch.values["k"].dtype == torch.float64
    assert len(narrow.standard_errors()) == len(plain.standard_errors())


def test_the_metric_of_parts_is_the_curvature_of_rows_at_hand(tmp_path):
    parts, _, points = laid_out(tmp_path, *with_category())
    found = parts.metric(points)
    assert parts.pace.renews_curvature
    step = 1e-3 * torch.eye(points.shape[1]).double()
    sides = [[parts.base.loss(points + a * one).total for a in (1, 0, -1)] for one in step]
    diagonal = torch.stack([(up - 2 * here + down) / 1e-6 for up, here, down in sides], -1)
    torch.testing.assert_close(found.diagonal(dim1=1, dim2=2), diagonal, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found, found.mT, rtol=1e-4, atol=1e-6)


class Bowl:
    """A problem of one part whose loss is a parabola, and which notes what it is asked for."""

    def __init__(self, weight, middle):
        self.weight, self.middle, self.asked, self.placed = torch.tensor([weight]).double(), middle, [], []

    def loss(self, point):
        self.asked.append(len(point))
        gap = (point - self.middle).square().sum(-1)
        return LossTerms.of(gap, reconstruction=gap)

    def laid_out_for(self, points):
        self.placed.append(points)
        return self


def of_bowls(bowls, **options):
    parts = SimpleNamespace(each=lambda work, *given: [work(one, number, *given) for number, one in enumerate(bowls)])
    structure = SimpleNamespace(penalty=lambda naturals: 0.0, naturals=dict)
    return PartitionedProblem(
        options.pop("base", SimpleNamespace(structure=structure, shapes={})), parts, 12, **options
    )


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


def test_what_rows_at_hand_are_moved_to_all_are_moved_to():
    base = SimpleNamespace()
    problem = of_bowls([Bowl([3.0], 0.0)], base=base)
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
