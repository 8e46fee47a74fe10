"""What a problem of rows says of itself, and the parts of it that stand for the whole."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.engine.table_data import lay_out_rows, one_start
from otpdag.likelihood.enumeration import SumSizes
from otpdag.likelihood.moment_problem import MomentProblem
from otpdag.likelihood.row_problem import RowProblem, each_row_problem, row_problem
from otpdag.likelihood.rows import RowObjective
from otpdag.settings import ClosedForm, Objective

ROWS = 40


def made(objective):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=ROWS), "n": rng.poisson(2, ROWS)})
    graph = otp.Graph([("u", "x"), ("u", "n")], hidden=["u"])
    model = otp.Model(graph, {"u": m.Normal(), "x": m.Normal(), "n": m.Poisson()})
    batch = encode(frame, Schema.of(model.spaces, model.graph), hidden=["u"])
    layout = lay_out_rows(model.structure, batch, otp.entropic(), 0)
    closed = ClosedForm(sums=SumSizes(grid=16))
    problem = each_row_problem(RowObjective(layout.structure, layout.shapes, objective, closed), batch, 0)
    assert type(problem) is RowProblem
    return problem, one_start(layout, batch, 0, 0, first=True)


@pytest.mark.parametrize(
    ("objective", "likelihood", "total"),
    [
        (Objective(eps=1.0), True, True),
        (Objective(eps=0.5), False, True),
        (Objective(reconstruction=2.0, eps=2.0), False, False),
    ],
)
def test_a_likelihood_is_the_loss_at_temperature_one(objective, likelihood, total):
    problem, _ = made(objective)
    assert problem.is_likelihood is likelihood
    assert problem.is_sum is total


def test_the_curvature_is_taken_on_a_part_of_many_rows_only(monkeypatch):
    problem, start = made(Objective(eps=1.0))
    assert problem.metric(start) is None
    monkeypatch.setattr("otpdag.likelihood.row_problem.CURVED_FROM", 20)
    monkeypatch.setattr("otpdag.likelihood.row_problem.CURVED_ROWS", 12)
    found = problem.metric(start)
    few = torch.autograd.functional.hessian(lambda at: problem.subset(12).loss(at[None]).total.sum(), start[0])
    torch.testing.assert_close(found[0], few)


def test_a_part_has_fewer_rows_and_coarse_ones_half_the_points():
    problem, _ = made(Objective(eps=1.0))
    part = problem.subset(10)
    assert (part.rows, part.closed.sums.grid) == (10, 16)
    assert problem.subset(10, coarse=True).closed.sums.grid == 8


def test_losses_of_rows_stand_in_the_order_of_the_table_and_take_its_weights():
    """Rows are grouped by what they miss: what is told of them, and given to them, must come back to each."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.integers(0, 2, ROWS), "b": rng.normal(size=ROWS), "x": rng.poisson(2, ROWS)})
    frame = frame.astype(float).mask(rng.random((ROWS, 3)) < 0.4)
    model = otp.Model(otp.Graph([("a", "x"), ("b", "x")]), {"a": m.Categorical(2), "b": m.Normal(), "x": m.Poisson()})
    batch = encode(frame, Schema.of(model.spaces, model.graph), hidden=())
    layout = lay_out_rows(model.structure, batch, otp.entropic(), 0)
    start = one_start(layout, batch, 0, 0, first=True)
    closed = ClosedForm(sums=SumSizes(grid=16, easy_states=10**6, patterns=1000))
    problem = each_row_problem(RowObjective(layout.structure, layout.shapes, Objective(eps=1.0), closed), batch, 0)
    assert type(problem) is RowProblem
    placed = problem.laid_out_for(start, precisely=True)
    assert len(placed.groups) > 2
    assert torch.cat([group.rows for group in placed.groups]).tolist() != list(range(ROWS))
    losses = placed.unit_losses(start)[0]
    alone = [
        placed.subset(torch.tensor([row])).laid_out_for(start, precisely=True).loss(start).total for row in range(ROWS)
    ]
    torch.testing.assert_close(losses, torch.cat(alone), rtol=1e-5, atol=1e-6)
    factors = torch.rand(1, ROWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weighted = placed.reweighted(factors)
    torch.testing.assert_close(
        weighted.loss(start).total, (factors * losses).sum(-1) / factors.sum(-1), rtol=1e-6, atol=1e-8
    )
    torch.testing.assert_close(weighted.weight, placed.weight * factors)


@pytest.mark.parametrize(
    ("objective", "reference", "kind"),
    [
        (Objective(eps=1.0), "model", MomentProblem),
        (Objective(eps=0.5), "model", RowProblem),
        (Objective(reconstruction=2.0, eps=2.0), "model", RowProblem),
        (Objective(eps=1.0), "uniform", RowProblem),
    ],
)
def test_only_a_plain_likelihood_is_summed_up_in_moments(objective, reference, kind):
    """Of complete rows of numbers, whose moments tell all: any other objective reads the rows one by one."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=60), "y": rng.normal(size=60)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    batch = encode(frame, Schema.of(model.spaces, model.graph), hidden=[])
    layout = lay_out_rows(model.structure, batch, otp.entropic(), 0)
    about = RowObjective(layout.structure, layout.shapes, objective, ClosedForm(reference=reference))
    problem = row_problem(about, batch, 0)
    assert isinstance(problem, kind)
    if objective.reconstruction == 1.0:
        start = one_start(layout, batch, 0, 0, first=True)
        alone = each_row_problem(about, batch, 0)
        torch.testing.assert_close(problem.loss(start).total, alone.loss(start).total, rtol=1e-8, atol=1e-10)
        assert problem.rows == alone.rows == 60


def test_points_of_several_numbers_are_placed_before_a_search_and_a_grid_is_left_where_it_is():
    one, start = made(Objective(eps=1.0))
    assert one.laid_out_for(start) is one
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({name: rng.poisson(3, 12).astype(float) for name in "abc"})
    graph = otp.Graph([(hidden, name) for hidden in "uv" for name in "abc"], hidden=["u", "v"])
    model = otp.Model(graph, {"u": m.Normal(), "v": m.Normal(), **{name: m.Poisson() for name in "abc"}})
    batch = encode(frame, Schema.of(model.spaces, model.graph), hidden=["u", "v"])
    layout = lay_out_rows(model.structure, batch, otp.entropic(), 0)
    start = one_start(layout, batch, 0, 0, first=True)
    about = RowObjective(layout.structure, layout.shapes, Objective(eps=1.0), ClosedForm())
    problem = each_row_problem(about, batch, 0)
    assert [group.serves(1) for group in problem.groups] == [False]
    placed = problem.laid_out_for(start)
    assert [group.serves(1) for group in placed.groups] == [True]
    assert problem.pace.points_per_row == problem.groups[0].base.shape[-2]
    assert placed.laid_out_for(start, precisely=True).loss(start).total.item() == pytest.approx(
        placed.loss(start).total.item(), abs=1e-3
    )
    # several at once have points of their own
    both = problem.laid_out_for(torch.cat([start, start + 0.1]))
    assert [group.serves(2) for group in both.groups] == [True]
