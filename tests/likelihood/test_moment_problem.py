"""Moments of rows give the loss, the gradient and the estimates that the rows themselves give."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine.fit import recognise
from otpdag.likelihood.moment_problem import MomentProblem

ROWS = 120


def factor(rng):
    graph = otp.Graph([("u", name) for name in "abc"] + [("a", "d")], hidden=["u"])
    u = rng.normal(size=ROWS)
    frame = pd.DataFrame({name: 100.0 + (1 + i) * u + rng.normal(size=ROWS) for i, name in enumerate("abc")})
    return otp.Model(graph, {name: m.Normal() for name in "uabcd"}), frame.assign(d=frame.a + rng.normal(size=ROWS))


def gappy(rng):
    model, frame = factor(rng)
    frame.iloc[:20, 0], frame.iloc[10:40, 2] = np.nan, np.nan
    return model, frame


def by_category(rng):
    graph = otp.Graph([("g", "h"), ("g", "x"), ("h", "x"), ("u", "x"), ("u", "y"), ("t", "y")], hidden=["u"])
    g, u, t = rng.integers(0, 3, ROWS), rng.normal(size=ROWS), rng.normal(size=ROWS)
    frame = pd.DataFrame({"g": g, "h": rng.integers(0, 2, ROWS), "t": t, "x": g + u + rng.normal(size=ROWS)})
    frame = frame.assign(y=u - t + rng.normal(size=ROWS))
    frame.iloc[:15, 3] = np.nan
    made = {"g": m.Categorical(3), "h": m.Bernoulli(), "t": m.Given(), "u": m.Normal(), "x": m.Normal()}
    return otp.Model(graph, made | {"y": m.Normal(scale=otp.tie("s"))}), frame


def vectors(rng):
    graph = otp.Graph([("u", "x"), ("x", "y")], hidden=["u"])
    x = rng.normal(size=(ROWS, 1)) @ rng.normal(size=(1, 3)) + rng.normal(size=(ROWS, 3))
    frame = pd.DataFrame(x, columns=["x.0", "x.1", "x.2"]).assign(y=x.sum(1) + rng.normal(size=ROWS))
    frame.iloc[5:25, :3], frame.iloc[30:40, 3] = np.nan, np.nan
    return otp.Model(graph, {"u": m.Normal(), "x": m.MultivariateNormal(3), "y": m.Normal()}), frame


WORLDS = {one.__name__: one for one in (factor, gappy, by_category, vectors)}


def made(name, weights=None):
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
    problem, points = made(name, weights=np.random.default_rng(0).random(ROWS))
    rows = problem.in_rows(batch=problem.batch, seed=0).laid_out_for(points)
    torch.testing.assert_close(problem.loss(points).total, rows.loss(points).total, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient(problem, points), gradient(rows, points), rtol=1e-6, atol=1e-8)


def test_a_factor_has_the_density_of_its_covariance():
    problem, points = made("factor")
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


@pytest.mark.parametrize("name", ["gappy", "by_category"])
def test_weights_are_repetitions(name):
    problem, points = made(name)
    counts = torch.randint(0, 3, (2, ROWS), generator=torch.Generator().manual_seed(2)).double()
    weighted = problem.reweighted(counts).loss(points[:2]).total
    for replica in range(2):
        rows = torch.arange(ROWS).repeat_interleave(counts[replica].long())
        repeated = problem.subset(rows).loss(points[replica : replica + 1]).total
        torch.testing.assert_close(weighted[replica : replica + 1], repeated)


def test_losses_of_single_rows_average_the_loss():
    problem, points = made("gappy")
    torch.testing.assert_close(problem.unit_losses(points).mean(-1), problem.loss(points).total)


def test_a_part_that_is_no_cheaper_is_the_whole():
    problem, _ = made("gappy")
    assert problem.subset(30) is problem
    assert problem.subset(torch.arange(50)).rows == 50


def test_it_can_be_sent_to_another_process_and_simulated():
    problem, points = made("gappy")
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
