"""Which way rows are summed, and what is read from moments alone."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.engine.data_kind import lay_out_rows, one_start
from otpdag.engine.fit import recognise
from otpdag.likelihood.linear_normal import MomentProblem
from otpdag.likelihood.row_problem import GraphProblem, row_problem, rows_along_graph
from otpdag.problem import RowObjective
from otpdag.settings import ClosedForm, Objective, PushForward

# -- which way rows are summed, what such a problem says of itself, and the parts of it that stand for the whole ------


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
    start = one_start(layout, batch, 0, first=True)
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
        start = one_start(layout, batch, 0, first=True)
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


# -- moments of rows give the loss, the gradient and the estimates that the rows themselves give ----------------------


MANY = 120


def factor(rng):
    graph = otp.Graph([("u", name) for name in "abc"] + [("a", "d")], hidden=["u"])
    u = rng.normal(size=MANY)
    frame = pd.DataFrame({name: 100.0 + (1 + i) * u + rng.normal(size=MANY) for i, name in enumerate("abc")})
    return otp.Model(graph, {name: m.Normal() for name in "uabcd"}), frame.assign(d=frame.a + rng.normal(size=MANY))


def gappy(rng):
    model, frame = factor(rng)
    frame.iloc[:20, 0], frame.iloc[10:40, 2] = np.nan, np.nan
    return model, frame


WORLDS = {one.__name__: one for one in (factor, gappy)}


def read_from_moments(name, weights=None):
    model, frame = WORLDS[name](np.random.default_rng(3))
    kind = recognise(model, frame, weights=weights, device="cpu", every_row=False)
    layout = kind.lay_out(otp.entropic(), 0)
    problem = kind.problem(layout, otp.entropic(), 0)
    assert type(problem) is MomentProblem
    start = kind.starts(layout, problem, 0, [0])
    noise = torch.randn(3, start.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return problem, start + 0.1 * noise


def gradient(problem, points):
    leaf = points.clone().requires_grad_(True)
    return torch.autograd.grad(problem.loss(leaf).total.sum(), leaf)[0]


@pytest.mark.parametrize("name", WORLDS)
def test_loss_and_gradient_are_those_of_the_rows(name):
    problem, points = read_from_moments(name, weights=np.random.default_rng(0).random(MANY))
    rows = problem.in_rows(batch=problem.batch, seed=0).laid_out_for(points)
    torch.testing.assert_close(problem.loss(points).total, rows.loss(points).total, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient(problem, points), gradient(rows, points), rtol=1e-6, atol=1e-8)


def test_a_factor_has_the_density_of_its_covariance():
    problem, points = read_from_moments("factor")
    theta = problem.naturals(points[:1])
    slopes = np.array([float(theta[name]["weight"]) for name in "abc"])
    loc = np.array([float(theta[name]["loc"]) for name in "abc"])
    scale = np.array([float(theta[name]["scale"]) for name in "abcd"])
    slope, middle = float(theta["d"]["weight"]), float(theta["d"]["loc"])
    covariance = np.zeros((4, 4))
    covariance[:3, :3] = np.outer(slopes, slopes) + np.diag(scale[:3] ** 2)
    covariance[3, :3] = covariance[:3, 3] = slope * covariance[0, :3]
    covariance[3, 3] = slope**2 * covariance[0, 0] + scale[3] ** 2
    mean = np.append(loc, middle + slope * loc[0])
    table = np.stack([problem.batch.values[name][0, :, 0].numpy() for name in "abcd"], 1)
    known = -stats.multivariate_normal(mean, covariance).logpdf(table).mean()
    assert float(problem.loss(points[:1]).total) == pytest.approx(known, rel=1e-10)


def test_weights_are_repetitions():
    problem, points = read_from_moments("gappy")
    counts = torch.randint(0, 3, (2, MANY), generator=torch.Generator().manual_seed(2)).double()
    weighted = problem.reweighted(counts).loss(points[:2]).total
    for replica in range(2):
        rows = torch.arange(MANY).repeat_interleave(counts[replica].long())
        repeated = problem.subset(rows).loss(points[replica : replica + 1]).total
        torch.testing.assert_close(weighted[replica : replica + 1], repeated)


def test_losses_of_single_rows_average_the_loss():
    problem, points = read_from_moments("gappy")
    torch.testing.assert_close(problem.unit_losses(points).mean(-1), problem.loss(points).total)


def test_a_part_that_is_no_cheaper_is_the_whole():
    problem, _ = read_from_moments("gappy")
    assert problem.subset(30) is problem
    assert problem.subset(torch.arange(50)).rows == 50


def test_it_can_be_sent_to_another_process_and_simulated():
    problem, points = read_from_moments("gappy")
    other = pickle.loads(pickle.dumps(problem))
    torch.testing.assert_close(other.loss(points).total, problem.loss(points).total)
    assert other.simulated(points[:1], 70, 1).rows == 70


@pytest.mark.parametrize("mechanism", [m.StudentT(), m.Normal(network=[3])], ids=["heavy tails", "network"])
def test_other_models_go_by_rows(mechanism):
    model, frame = factor(np.random.default_rng(3))
    other = otp.Model(model.graph, {**{name: m.Normal() for name in "uabc"}, "d": mechanism})
    kind = recognise(other, frame, weights=None, device="cpu", every_row=False)
    layout = kind.lay_out(otp.entropic(), 0)
    assert type(kind.problem(layout, otp.entropic(), 0)) is not MomentProblem
    assert type(kind.problem(layout, otp.entropic(eps=0.7), 0)) is not MomentProblem
