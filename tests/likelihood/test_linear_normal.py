"""Moments of rows, and structural equations: density, gradient and information of the covariance that they imply."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import multivariate_normal

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Batch
from otpdag.engine import Deterministic
from otpdag.engine.fit import recognise
from otpdag.engine.optimiser import Run
from otpdag.likelihood import linear_normal
from otpdag.likelihood.linear_normal import Scored, StructuralEquations, _cholesky
from otpdag.likelihood.row_problem import by_moments, row_problem
from otpdag.problem import RowObjective, loss_and_gradient
from otpdag.settings import ClosedForm, Objective
from otpdag.structure import Structure, pack
from tests.likelihood.elimination.worlds import linear_moments, make_world, random_edges

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
def test_the_gradient_is_that_of_the_rows(gaps):
    _, _, problem, points = laid_out(*factors(gaps))
    scored = problem.equations.scored(points.numpy())
    rows = problem.in_rows(problem.batch, 0).laid_out_for(points)
    leaf = points.clone().requires_grad_(True)
    loss = rows.loss(leaf).total
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
    scored = problem.equations.scored(point.numpy())
    information = torch.from_numpy(scored.slope.T * scored.information[0] * scored.slope)
    torch.testing.assert_close(information, curvature, rtol=1e-6, atol=1e-8)


def test_the_curvature_is_that_of_the_loss():
    _, _, problem, points = laid_out(*factors(gaps=True))
    rows = problem.in_rows(problem.batch, 0)
    steps = 1e-5 * torch.eye(points.shape[1]).double()
    ahead, behind = (loss_and_gradient(rows.loss, points[:1] + by)[1] for by in (steps, -steps))
    known = (ahead - behind) / 2e-5
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


# -- beside plain versions --------------------------------------------------------------------------------------------


def about(structure):
    shapes = {key: parameter.shape for key, parameter in structure.parameters().items()}
    return RowObjective(structure, shapes, Objective(eps=1.0), ClosedForm())


def grouped():
    """Equations of numbers, one of them a vector and one with a given slope, in groups of rows with gaps."""
    rng = np.random.default_rng(3)
    nodes = {"x": m.Normal(floor=0.2), "y": m.Normal(2), "z": m.Normal(weight=[[0.5], [np.nan]])}
    rows = 50
    widths = {"x": 1, "y": 2, "z": 1}
    values = {n: torch.as_tensor(5 + rng.normal(size=(1, rows, width))) for n, width in widths.items()}
    mask = {n: torch.as_tensor(rng.random((1, rows, width)) < 0.7) for n, width in widths.items()}
    batch = Batch(values, mask, torch.ones(1, rows).double())
    structure = Structure.bind(otp.Graph([("x", "y"), ("y", "z")]), nodes)
    problem = by_moments(about(structure), batch, 0)
    point = 0.3 * torch.as_tensor(rng.normal(size=(2, about(structure).size)))
    return problem.reweighted(torch.as_tensor(rng.uniform(0.5, 2.0, (2, rows)))), point


def test_moments_of_a_group_are_sums_over_its_rows_about_the_centre():
    problem, _ = grouped()
    weighted, batch = problem.batch.weight.numpy(), problem.batch
    alike = problem.groups.second_moments(
        replace(batch, weight=torch.tensor([[2.0] * 50]).double()), problem.equations.shift
    )
    numbers, seen = (torch.cat([held[name][0] for name in "xyz"], -1).numpy() for held in (batch.values, batch.mask))
    assert problem.groups.cells == (("x", 0), ("y", 0), ("y", 1), ("z", 0))
    centre = np.array([numbers[seen[:, c], c].mean() for c in range(4)])
    np.testing.assert_allclose(problem.equations.shift, centre)
    assert len(problem.groups.members) == len({tuple(row) for row in seen}) > 8
    for number, rows in enumerate(problem.groups.members):
        assert (seen[rows] == problem.groups.shown[number]).all()
        columns = np.column_stack([np.where(seen[rows], numbers[rows] - centre, 0.0), np.ones(len(rows))])
        np.testing.assert_allclose(alike[0, number], 2 * columns.T @ columns, atol=1e-10)
        for replica, weight in enumerate(weighted):
            expected = (columns * weight[rows, None]).T @ columns
            np.testing.assert_allclose(problem.equations.second[replica, number], expected, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_linear_normal_rows_with_gaps_and_hidden_numbers_have_their_density(seed):
    rng = np.random.default_rng(seed)
    names = [f"v{i}" for i in range(4)]
    edges = random_edges(rng, names, 0.8)
    world = make_world({n: m.Normal() for n in names}, edges, rng, rows=25, gaps=0.3, hidden=["v1"])
    structure, naturals, batch = world
    raw = structure.raw(naturals)
    mean, covariance, at = linear_moments(structure, structure.naturals(raw), 0)
    point = pack({key: raw[key] for key in structure.parameters()})
    problem = by_moments(about(structure), batch, 0)
    each = np.zeros(batch.rows)
    for row in range(batch.rows):
        shown = [n for n in structure.graph.observed if bool(batch.mask[n][0, row].all())]
        places, values = [at[n].start for n in shown], [float(batch.values[n][0, row, 0]) for n in shown]
        if shown:
            each[row] = multivariate_normal(mean[places], covariance[np.ix_(places, places)]).logpdf(values)
    weight = batch.weight[0].numpy()
    assert float(problem.loss(point).total) == pytest.approx(-weight @ each / weight.sum(), rel=1e-9)
    middle, spread = problem.equations.moments(point.numpy())
    order = [at[node].start for node, _ in problem.groups.cells]
    np.testing.assert_allclose(middle, mean[order], atol=1e-9)
    np.testing.assert_allclose(spread, covariance[np.ix_(order, order)], atol=1e-9)


@pytest.mark.parametrize(
    ("deviation", "route"),
    [(2e-60, "moments"), (5e-61, "graph"), (5e59, "moments"), (2e60, "graph"), (0.0, "moments"), (1.0, "moments")],
)
def test_columns_whose_fourth_powers_lose_digits_are_left_to_rows(deviation, route):
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    assert laid_out(model, pd.DataFrame({"x": [deviation, -deviation] * 4}))[2].route == route


def route(nodes, edges, rows, **options):
    world = make_world(nodes, edges, np.random.default_rng(7), rows=rows, **options)
    return row_problem(about(world[0]), world[2], 0).route


def test_models_and_gaps_that_do_not_add_up_are_left_to_rows():
    ten, two = [f"v{i}" for i in range(10)], [f"v{i}" for i in range(2)]
    assert route({"x": m.Normal(), "n": m.Poisson()}, [("x", "n")], 10) == "graph"
    assert route({n: m.Normal() for n in ten}, [], 3 * 512, gaps=0.5) == "graph"  # more than 512 sets of cells
    assert route({n: m.Normal() for n in two}, [], 3, gaps=0.5) == "moments"  # 4 * 3 rows // (2 columns + 1) groups
    assert route({n: m.Normal() for n in ten}, [], 5, gaps=0.5) == "graph"
    assert route({"x": m.Normal(), "y": m.Normal(weight=0.5)}, [("x", "y")], 10) == "moments"
    assert route({"x": m.Normal(), "y": m.Normal(network=[3])}, [("x", "y")], 10) == "graph"
    assert route({"x": m.Normal(), "y": m.MultivariateNormal(1)}, [("x", "y")], 10) == "graph"
    assert route({"k": m.Categorical(2), "y": m.Normal()}, [("k", "y")], 10) == "graph"


def test_more_parameters_than_can_be_scored_are_left_to_descent(monkeypatch):
    _, _, problem, points = laid_out(*factors())
    assert problem.updates is not None
    known = problem.update(points)[1].total
    monkeypatch.setattr(linear_normal, "MOST_SCORED", 10)
    assert problem.updates is None
    torch.testing.assert_close(problem.loss(points).total, known)


def test_groups_of_rows_have_loss_and_gradient_of_their_density():
    problem, point = grouped()
    equations, leaf = problem.equations, point.clone().requires_grad_(True)
    loss = problem.in_rows(problem.batch, 0).loss(leaf).total
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    at = point.numpy()
    np.testing.assert_allclose(equations.loss(at), loss.detach(), rtol=1e-9)
    np.testing.assert_allclose(equations.loss_and_gradient(at)[1], gradient, rtol=1e-7, atol=1e-9)
    scored = equations.scored(at)
    np.testing.assert_allclose(scored.loss, loss.detach(), rtol=1e-9)
    np.testing.assert_allclose(scored.gradient * scored.slope, gradient, rtol=1e-7, atol=1e-9)
    # plain parameters and what they change by, with the root of the sum of squares of scales and floors
    step = 1e-6
    ahead, behind = (equations.scored(at + sign * step).plain for sign in (1, -1))
    np.testing.assert_allclose(scored.slope, (ahead - behind) / (2 * step), rtol=1e-6)
    floor = np.where(equations.is_positive, equations.floor, 0.0)
    expected = np.where(equations.is_positive, np.sqrt(np.exp(2 * at) + floor**2), at)
    np.testing.assert_allclose(scored.plain, expected)
    assert set(np.unique(equations.floor)) == {0.0, 0.2}


def test_information_is_that_of_means_and_covariances():
    """By differences: dm' W dm and half the trace of W dS W dS, over the groups."""
    problem, point = grouped()
    equations, at = problem.equations, point.numpy()
    count = equations.second[..., -1, -1]
    scored, share = equations.scored(at), count / count.sum(-1, keepdims=True)
    here = equations._implied(scored.plain).fit
    moves = []
    for place in range(at.shape[1]):
        step = np.zeros(at.shape[1])
        step[place] = 1e-5
        ahead, behind = (equations._implied(scored.plain + sign * step) for sign in (1, -1))
        moves.append(((ahead.mean - behind.mean) / 2e-5, (ahead.covariance - behind.covariance) / 2e-5))
    for i, j in [(0, 0), (1, 3), (2, 2), *((n, n) for n in range(3, at.shape[1])), (4, 9), (5, 7), (7, 8)]:
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
    problem, point = grouped()
    at, second = np.concatenate([point.numpy(), point.numpy()[:1]]), problem.equations.second
    equations = replace(problem.equations, second=np.concatenate([second, second[:1]]))
    scored = equations.scored(at)
    step = scored.direction(np.ones_like(at, dtype=bool))
    told = scored.loss[None] + np.array([[-1.0, 1.0, 1.0], [5.0, 1.0, 1.0], [5.0, -1.0, 1.0], *[[5.0, 5.0, 1.0]] * 20])
    asked = iter(told)
    monkeypatch.setattr(StructuralEquations, "loss", lambda self, point: next(asked))
    found = equations.improved(scored)

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
    problem, point = grouped()
    equations, at = problem.equations, point.numpy().copy()
    floored = np.flatnonzero(equations.floor > 0)
    at[:, floored] = -30.0
    scored = equations.scored(at)
    np.testing.assert_allclose(scored.plain[:, floored], 0.2)
    for sign in (1.0, -1.0):
        gradient = scored.gradient.copy()
        gradient[:, floored] = sign
        told = Scored(scored.loss, gradient, scored.information, scored.plain, scored.slope)
        found = equations._off_logarithm(equations.improved(told))[:, floored]
        if sign > 0:
            np.testing.assert_allclose(found, 0.2, rtol=1e-5)
        else:
            assert (found > 0.2 * 1.0001).any()


def test_a_factor_that_does_not_exist_is_no_number():
    matrices = np.array([[[2.0, 0.5], [0.5, 1.0]], [[1.0, 2.0], [2.0, 1.0]]])
    found = _cholesky(matrices)
    np.testing.assert_allclose(found[0], np.linalg.cholesky(matrices[0]))
    assert np.isnan(found[1]).all()
