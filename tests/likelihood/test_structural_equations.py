"""Structural equations have gradient and information of the covariance that they imply, and find its optimum."""

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.engine import Deterministic
from otpdag.engine.data_kind import one_start
from otpdag.engine.fit import recognise
from otpdag.engine.optimiser import Run
from otpdag.likelihood.elimination.families import describe_families
from otpdag.likelihood.row_moments import moments_of
from otpdag.likelihood.structural_equations import (
    Scored,
    StructuralEquations,
    _cholesky,
    _is_plain,
    structural_equations,
)
from otpdag.spaces import Discrete
from otpdag.structure import Structure

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
    loss = problem.loss(leaf).total
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
    known = torch.autograd.functional.hessian(lambda flat: problem.loss(flat.unsqueeze(0)).total[0], points[0])
    torch.testing.assert_close(problem.curvature(points[:1]), known, rtol=1e-5, atol=1e-5)


def two_free_factors(seed):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(400, 2)) @ rng.normal(size=(2, 5)) + 0.6 * rng.normal(size=(400, 5))
    frame = pd.DataFrame(table, columns=[f"x{i}" for i in range(5)])
    graph = otp.Graph([(factor, name) for factor in "fg" for name in frame], hidden=["f", "g"])
    return otp.Model(graph, {name: m.Normal() for name in graph.nodes}), frame


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])  # scales at their floors, and directions that the data do not tell
def test_scoring_ends_no_higher_than_descent(seed):
    _, _, problem, points = laid_out(*two_free_factors(seed))
    scored = Deterministic(400).run(Run(problem, points, 400), lambda progress: False)
    below = problem.in_rows(batch=problem.batch, seed=0).laid_out_for(points)
    descended = Deterministic(400).run(Run(below, points, 400), lambda progress: False)
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


# -- beside plain versions --------------------------------------------------------------------------------------------


def grouped():
    """Equations of numbers, one of them a vector, below a category that is given, in groups of rows with gaps."""
    rng = np.random.default_rng(3)
    nodes = {"k": m.Given(Discrete(2)), "x": m.Normal(floor=0.2), "y": m.Normal(2), "z": m.Normal(shared_scale=True)}
    graph = otp.Graph([("k", "x"), ("x", "y"), ("k", "y"), ("y", "z"), ("k", "z")])
    rows = 50
    k = torch.eye(2).double()[torch.as_tensor(rng.integers(0, 2, rows))][None]
    widths = {"x": 1, "y": 2, "z": 1}
    values = {n: torch.as_tensor(5 + rng.normal(size=(1, rows, width))) for n, width in widths.items()} | {"k": k}
    mask = {n: torch.as_tensor(rng.random((1, rows, width)) < 0.7) for n, width in widths.items()}
    batch = Batch(values, mask | {"k": torch.ones(1, rows, 1).bool()}, torch.ones(1, rows).double())
    structure = Structure.bind(graph, nodes)
    shapes = {key: parameter.shape for key, parameter in structure.parameters().items()}
    moments = moments_of(structure, batch, shapes).reweighted(torch.as_tensor(rng.uniform(0.5, 2.0, (2, rows))))
    point = 0.3 * torch.as_tensor(rng.normal(size=(2, sum(int(np.prod(shape)) for shape in shapes.values()))))
    return structural_equations(moments.linear, ~moments.unseen), moments, point


def test_groups_of_rows_have_loss_and_gradient_of_their_density():
    equations, moments, point = grouped()
    assert len(moments.unseen) > 8
    leaf, second = point.clone().requires_grad_(True), moments.second.numpy()
    count = moments.batch.weight.sum(-1)
    loss = -moments.log_likelihood(leaf) / count
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    at = point.numpy()
    np.testing.assert_allclose(equations.loss(at, second), loss.detach(), rtol=1e-9)
    np.testing.assert_allclose(equations.gradient(at, second), gradient, rtol=1e-7, atol=1e-9)
    scored = equations.scored(at, second)
    np.testing.assert_allclose(scored.loss, loss.detach(), rtol=1e-9)
    np.testing.assert_allclose(scored.gradient * scored.slope, gradient, rtol=1e-7, atol=1e-9)
    # plain parameters and what they change by, with the root of the sum of squares of scales and floors
    step = 1e-6
    ahead, behind = (equations.scored(at + sign * step, second).plain for sign in (1, -1))
    np.testing.assert_allclose(scored.slope, (ahead - behind) / (2 * step), rtol=1e-6)
    floor = np.where(equations.is_positive, equations.floor, 0.0)
    expected = np.where(equations.is_positive, np.sqrt(np.exp(2 * at) + floor**2), at)
    np.testing.assert_allclose(scored.plain, expected)
    assert set(np.unique(equations.floor)) == {0.0, 0.2}


def test_information_is_that_of_means_and_covariances():
    """By differences: dm' W dm and half the trace of W dS W dS, over the groups."""
    equations, moments, point = grouped()
    at, second = point.numpy(), moments.second.numpy()
    scored = equations.scored(at, second)
    share = second[..., -1, -1] / second[..., -1, -1].sum(-1, keepdims=True)
    here = equations._implied(scored.plain, second)
    moves = []
    for place in range(at.shape[1]):
        step = np.zeros(at.shape[1])
        step[place] = 1e-5
        ahead, behind = (equations._implied(scored.plain + sign * step, second) for sign in (1, -1))
        moves.append(((ahead.mean - behind.mean) / 2e-5, (ahead.covariance - behind.covariance) / 2e-5))
    for i, j in [(0, 0), (1, 3), (2, 2), *((n, n) for n in range(3, at.shape[1])), (4, 9), (5, 12), (7, 13)]:
        (mean, spread), (other, wide) = moves[i], moves[j]
        told = (mean.swapaxes(-1, -2) @ here.inverse @ other)[..., 0, 0]
        told = told + 0.5 * np.trace(here.inverse @ spread @ here.inverse @ wide, axis1=-2, axis2=-1)
        np.testing.assert_allclose(scored.information[:, i, j], (share * told).sum(-1), rtol=1e-5, atol=1e-7)


def test_steps_are_damped_and_leave_out_what_rests():
    rng = np.random.default_rng(0)
    root, gradient = rng.normal(size=(2, 4, 4)), rng.normal(size=(2, 4))
    information = root @ root.swapaxes(-1, -2)
    scored = Scored(np.zeros(2), gradient, information, np.zeros((2, 4)), np.ones((2, 4)))
    free = np.array([[True, True, False, True], [True, True, True, True]])
    found = scored.direction(free)
    for replica in range(2):
        own = free[replica]
        part, g = information[replica][np.ix_(own, own)], gradient[replica, own]
        ridge = 1e-12 * (1 + max(np.abs(part).max(), 1.0 if not own.all() else 0.0))
        expected = -np.linalg.solve(part + (0.3 * np.linalg.norm(g) + ridge) * np.eye(own.sum()), g)
        np.testing.assert_allclose(found[replica, own], expected)
        np.testing.assert_allclose(found[replica, ~own], 0.0, atol=1e-12)
    # without any curvature a step is as long as the damping allows
    flat = Scored(np.zeros(1), gradient[:1], np.zeros((1, 4, 4)), np.zeros((1, 4)), np.ones((1, 4)))
    assert np.linalg.norm(flat.direction(np.ones((1, 4), dtype=bool))) == pytest.approx(1 / 0.3, rel=1e-6)


def test_steps_are_halved_replica_by_replica_until_the_loss_falls(monkeypatch):
    equations, moments, point = grouped()
    second, at = moments.second.numpy(), np.concatenate([point.numpy(), point.numpy()[:1]])
    second = np.concatenate([second, second[:1]])
    scored = equations.scored(at, second)
    step = scored.direction(np.ones_like(at, dtype=bool))
    told = scored.loss[None] + np.array([[-1.0, 1.0, 1.0], [5.0, 1.0, 1.0], [5.0, -1.0, 1.0], *[[5.0, 5.0, 1.0]] * 20])
    asked = iter(told)
    monkeypatch.setattr(StructuralEquations, "loss", lambda self, point, second: next(asked))
    found = equations.improved(scored, second)

    def moved(replica, share):
        plain = scored.plain[replica] + share * step[replica]
        old = scored.plain[replica]
        lowest = np.maximum(0.5 * old, (1 + 1e-6) * equations.floor)
        plain = np.where(equations.is_positive, np.clip(plain, lowest, 2 * old), plain)
        above = np.maximum(plain**2 - equations.floor**2, 1e-6 * plain**2)
        return np.where(equations.is_positive, 0.5 * np.log(np.maximum(above, 1e-300)), plain)

    np.testing.assert_allclose(found[0], moved(0, 1.0))
    np.testing.assert_allclose(found[1], moved(1, 0.25))
    np.testing.assert_allclose(found[2], at[2], atol=1e-9)  # no step of ten halvings lowers it
    assert len(list(asked)) == len(told) - 10


def test_scales_at_their_floors_rest_unless_they_would_rise():
    equations, moments, point = grouped()
    at, second = point.numpy().copy(), moments.second.numpy()
    floored = np.flatnonzero(equations.floor > 0)
    at[:, floored] = -30.0
    scored = equations.scored(at, second)
    np.testing.assert_allclose(scored.plain[:, floored], 0.2)
    for sign in (1.0, -1.0):
        gradient = scored.gradient.copy()
        gradient[:, floored] = sign
        told = Scored(scored.loss, gradient, scored.information, scored.plain, scored.slope)
        found = equations._off_logarithm(equations.improved(told, second))[:, floored]
        if sign > 0:
            np.testing.assert_allclose(found, 0.2, rtol=1e-5)
        else:
            assert (found > 0.2 * 1.0001).any()


def test_a_factor_that_does_not_exist_is_no_number():
    matrices = np.array([[[2.0, 0.5], [0.5, 1.0]], [[1.0, 2.0], [2.0, 1.0]]])
    found = _cholesky(matrices)
    np.testing.assert_allclose(found[0], np.linalg.cholesky(matrices[0]))
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize(
    ("node", "plain"),
    [
        (m.Normal(), True),
        (m.Normal(floor=0.1), True),
        (m.Normal(weight=[[0.5], [np.nan]]), False),
        (m.Normal(weight=[[0.5], [0.5]]), True),
        (m.StudentT(), False),
        (m.MultivariateNormal(1), False),
    ],
)
def test_only_normal_nodes_are_equations(node, plain):
    graph = otp.Graph([("a", "x"), ("b", "x")])
    structure = Structure.bind(graph, {"a": m.Normal(), "b": m.Normal(), "x": node})
    family = next(one for one in describe_families(structure) if one.node == "x")
    assert _is_plain(family) is plain


@pytest.mark.parametrize("more", [0, 1])
def test_so_many_parameters_are_scored(more):
    equations, moments, point = grouped()
    entries, groups, total = len(equations.row), len(moments.unseen), point.shape[1]
    linear, shown = moments.linear, ~moments.unseen
    assert (structural_equations(linear, shown, most=groups * entries**2 - more) is None) == bool(more)
    assert (structural_equations(linear, shown[:1], most=total**2 - more) is None) == bool(more or entries > total)
