"""Which way rows are summed, what such a problem says of itself, and the parts of it that stand for the whole."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.engine.table_data import lay_out_rows, one_start
from otpdag.likelihood.graph_problem import GraphProblem, rows_along_graph
from otpdag.likelihood.moment_problem import MomentProblem
from otpdag.likelihood.route import row_problem
from otpdag.likelihood.rows import RowObjective
from otpdag.settings import ClosedForm, Objective, PushForward

ROWS = 40


def made(objective):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=ROWS), "n": rng.poisson(2, ROWS)})
    graph = otp.Graph([("u", "x"), ("u", "n")], hidden=["u"])
    model = otp.Model(graph, {"u": m.Normal(), "x": m.Normal(), "n": m.Poisson()})
    batch = encode(frame, Schema.of(model.spaces, model.graph), hidden=["u"])
    layout = lay_out_rows(model.structure, batch, otp.entropic(), 0)
    return row_problem(RowObjective(layout.structure, layout.shapes, objective, ClosedForm()), batch, 0)


@pytest.mark.parametrize(
    ("objective", "likelihood", "total"),
    [
        (Objective(eps=1.0), True, True),
        (Objective(eps=0.5), False, True),
        (Objective(reconstruction=2.0, eps=2.0), False, True),
        (Objective(eps=1.0, push_forward=PushForward()), False, False),
    ],
)
def test_a_likelihood_is_the_loss_at_temperature_one(objective, likelihood, total):
    problem = made(objective)
    assert problem.is_likelihood is likelihood
    assert problem.is_sum is total


def test_losses_of_rows_stand_in_the_order_of_the_table_and_take_its_weights():
    """Rows are grouped by what they miss: what is told of them, and given to them, must come back to each."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.integers(0, 2, ROWS), "b": rng.normal(size=ROWS), "x": rng.poisson(2, ROWS)})
    frame = frame.astype(float).mask(rng.random((ROWS, 3)) < 0.4)
    model = otp.Model(otp.Graph([("a", "x"), ("b", "x")]), {"a": m.Categorical(2), "b": m.Normal(), "x": m.Poisson()})
    batch = encode(frame, Schema.of(model.spaces, model.graph), hidden=())
    layout = lay_out_rows(model.structure, batch, otp.entropic(), 0)
    start = one_start(layout, batch, 0, 0, first=True)
    about = RowObjective(layout.structure, layout.shapes, Objective(eps=1.0), ClosedForm())
    placed = row_problem(about, batch, 0).laid_out_for(start)
    losses = placed.unit_losses(start)[0]
    alone = [placed.subset(torch.tensor([row])).laid_out_for(start).loss(start).total for row in range(ROWS)]
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
        (Objective(eps=0.5), "model", GraphProblem),
        (Objective(reconstruction=2.0, eps=2.0), "model", GraphProblem),
        (Objective(eps=1.0), "uniform", GraphProblem),
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
        alone = rows_along_graph(about, batch, 0)
        torch.testing.assert_close(problem.loss(start).total, alone.loss(start).total, rtol=1e-8, atol=1e-10)
        assert problem.rows == alone.rows == 60


@pytest.mark.parametrize(
    ("nodes", "edges", "hidden", "gaps", "route"),
    [
        ({"x": m.Normal(), "y": m.Normal()}, [("x", "y")], [], False, "moments"),
        ({"x": m.Normal(), "y": m.Normal()}, [("x", "y")], [], True, "moments"),
        ({"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal()}, [("z", "x"), ("z", "y")], ["z"], True, "states"),
        ({"z": m.Categorical(2), "x": m.Normal(), "y": m.Normal()}, [("z", "x"), ("x", "y")], ["z"], False, "graph"),
        ({"x": m.StudentT(), "y": m.Normal()}, [("x", "y")], [], True, "graph"),
    ],
)
def test_a_result_says_which_way_rows_were_summed(nodes, edges, hidden, gaps, route):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 2)), columns=["x", "y"])
    if gaps:
        frame.iloc[:8, 0], frame.iloc[5:12, 1] = np.nan, np.nan
    assert otp.fit(otp.Model(otp.Graph(edges, hidden=hidden), nodes), frame, restarts=1, seed=0).route == route
