"""Structural equations have gradient and information of the covariance that they imply, and find its optimum."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import LBFGS
from otpdag.engine.kinds.recognise import recognise
from otpdag.engine.kinds.table_data import one_start
from otpdag.engine.optimiser import Leg

ROWS = 200


def factors(gaps=False):
    rng = np.random.default_rng(5)
    u, v = rng.normal(size=(2, ROWS))
    frame = pd.DataFrame({f"x{i}": 30 + (1 + i) * u + rng.normal(size=ROWS) for i in range(3)})
    frame = frame.assign(y=frame.x0 - v + rng.normal(size=ROWS), z=0.01 * (v + rng.normal(size=ROWS)))
    if gaps:
        frame.iloc[:30, 0], frame.iloc[20:60, 3] = np.nan, np.nan
    graph = otp.Graph([*(("u", f"x{i}") for i in range(3)), ("x0", "y"), ("v", "y"), ("v", "z")], hidden=["u", "v"])
    made = {name: m.Normal() for name in graph.nodes}
    return otp.Model(graph, made | {"x2": m.Normal(floor=0.1), "z": m.Normal(weight=0.01)}), frame


def laid_out(model, frame):
    kind = recognise(model, frame, weights=None, device="cpu", every_row=False)
    layout = kind.lay_out(otp.entropic(), 0)
    problem = kind.problem(layout, otp.entropic(), 0)
    return kind, layout, problem, kind.starts(layout, problem, 0, range(3))


def implied(problem, point):
    """Mean and covariance of what is seen, by propagation along the graph."""
    theta, graph = problem.naturals(point), problem.structure.graph
    effects, mean, noise = {}, {}, list(graph.order)
    for node in graph.order:
        own = torch.stack([theta[node]["scale"][0, 0, 0] * float(node == other) for other in noise])
        level = theta[node]["loc"][0, 0, 0]
        slopes = theta[node].get("weight", torch.zeros(1, 0, 1))[0, :, 0]
        for slope, parent in zip(slopes, graph.parents(node), strict=True):
            own, level = own + slope * effects[parent], level + slope * mean[parent]
        effects[node], mean[node] = own, level
    half = torch.stack([effects[node] for node in graph.observed])
    return torch.stack([mean[node] for node in graph.observed]), half @ half.T


@pytest.mark.parametrize("gaps", [False, True])
def test_the_gradient_is_that_of_the_precision(gaps):
    _, _, problem, points = laid_out(*factors(gaps))
    scored = problem.moments.structural.scored(points.numpy(), problem.moments.second.numpy())
    leaf = points.clone().requires_grad_(True)
    loss = problem.loss(leaf)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    np.testing.assert_allclose(scored.loss, loss.detach(), rtol=1e-10)
    np.testing.assert_allclose(scored.gradient * scored.slope, gradient, atol=1e-8)


def test_the_information_is_the_curvature_where_data_are_as_the_model_says():
    _, _, problem, points = laid_out(*factors())
    point = points[1:2]
    mean, covariance = (one.detach() for one in implied(problem, point))

    def loss(flat):
        middle, spread = implied(problem, flat.unsqueeze(0))
        around = covariance + torch.outer(middle - mean, middle - mean)
        return 0.5 * (torch.logdet(spread) + torch.trace(torch.linalg.solve(spread, around)))

    curvature = torch.autograd.functional.hessian(loss, point[0])
    scored = problem.moments.structural.scored(point.numpy(), problem.moments.second.numpy())
    information = torch.from_numpy(scored.slope.T * scored.information[0] * scored.slope)
    torch.testing.assert_close(information, curvature, rtol=1e-6, atol=1e-8)


def test_the_curvature_is_that_of_the_loss():
    _, _, problem, points = laid_out(*factors(gaps=True))
    known = torch.autograd.functional.hessian(lambda flat: problem.loss(flat.unsqueeze(0))[0], points[0])
    torch.testing.assert_close(problem.curvature(points[:1]), known, rtol=1e-5, atol=1e-5)


def two_free_factors(seed):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(400, 2)) @ rng.normal(size=(2, 5)) + 0.6 * rng.normal(size=(400, 5))
    frame = pd.DataFrame(table, columns=[f"x{i}" for i in range(5)])
    graph = otp.Graph([(factor, name) for factor in "fg" for name in frame], hidden=["f", "g"])
    return otp.Model(graph, {name: m.Normal() for name in graph.nodes}), frame


@pytest.mark.parametrize("seed", [0, 1])  # scales at their floors, and directions that the data do not tell
def test_scoring_ends_no_higher_than_descent(seed):
    _, _, problem, points = laid_out(*two_free_factors(seed))
    scored = LBFGS(400).run(Leg(problem, points, 400), lambda progress: False)
    below = problem.in_rows(batch=problem.batch, seed=0).laid_out_for(points)
    descended = LBFGS(400).run(Leg(below, points, 400), lambda progress: False)
    assert bool(scored.converged.all())
    assert bool((scored.loss <= descended.loss + 1e-6).all())


def test_a_guess_from_moments_is_that_from_rows():
    model, frame = factors()
    graph = otp.Graph([("u", f"x{i}") for i in range(3)], hidden=["u"])
    one = otp.Model(graph, {name: m.Normal() for name in graph.nodes})
    kind, layout, _, points = laid_out(one, frame[["x0", "x1", "x2"]])
    from_rows = one_start(layout, kind.batch, 0, 0, first=True)
    torch.testing.assert_close(points[:1].abs(), from_rows.abs(), atol=0.05, rtol=0)
    assert laid_out(model, factors(gaps=True)[1])[2].guessed(0, first=True) is None
