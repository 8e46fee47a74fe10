"""Scores as features: against differentiated densities of torch, and means that are known."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.engine.table_data import lay_out_rows, one_start
from otpdag.likelihood.row_problem import each_row_problem
from otpdag.likelihood.rows import RowObjective
from otpdag.matching.completion import complete_rows
from otpdag.matching.score_features import ScoreFeatures, mean_scores, points_beside, scores
from otpdag.settings import ClosedForm, Direct, Objective
from otpdag.simulation import ancestral

ROWS = 60


@pytest.fixture(scope="module")
def problem():
    """A normal x with a count n behind it, of which every third is missing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=ROWS)
    frame = pd.DataFrame({"x": x, "n": rng.poisson(np.exp(0.3 + 0.5 * x))}, dtype=float)
    frame.loc[::3, "n"] = np.nan
    model = otp.Model(otp.Graph([("x", "n")]), {"x": m.Normal(), "n": m.Poisson()})
    batch = encode(frame, Schema.of(model.spaces, model.graph), hidden=())
    layout = lay_out_rows(model.structure, batch, otp.transport(), 0)
    about = RowObjective(layout.structure, layout.shapes, Objective(reconstruction=0.0, direct=Direct()), ClosedForm())
    return each_row_problem(about, batch, 0), one_start(layout, batch, 0, 0, first=True)


def everywhere(problem, point):
    return points_beside(problem.naturals, point, torch.arange(point.shape[-1]))


def test_points_beside_others_are_moved_in_each_direction_and_against_it(problem):
    problem, start = problem
    beside = points_beside(problem.naturals, torch.cat([start, start + 1]), torch.tensor([2, 0]))
    steps = torch.zeros(4, start.shape[-1]).double()
    steps[[0, 2], 2], steps[[1, 3], 0] = torch.tensor([1e-4, -1e-4]).double(), torch.tensor([1e-4, -1e-4]).double()
    expected = problem.naturals(torch.cat([start + steps, start + 1 + steps]))
    assert beside.directions.tolist() == [2, 0]
    assert beside.step == 1e-4
    for node, params in expected.items():
        for name, value in params.items():
            torch.testing.assert_close(beside.naturals[node][name], value)


def log_density(naturals, x, n):
    own, count = naturals["x"], naturals["n"]
    rate = torch.exp(count["log_rate"].flatten() + count["weight"].flatten() * x)
    normal = torch.distributions.Normal(own["loc"].flatten(), own["scale"].flatten())
    return normal.log_prob(x) + torch.distributions.Poisson(rate).log_prob(n)


def slopes_of(problem, point, x, n):
    """Of each row's log-density in every parameter, by automatic differentiation."""
    point = point.detach().clone().requires_grad_()
    each = log_density(problem.naturals(point), x, n)
    return torch.stack([torch.autograd.grad(one, point, retain_graph=True)[0][0] for one in each])


def test_scores_are_slopes_of_the_log_density(problem):
    problem, point = problem
    values = {"x": torch.tensor([[[0.3], [-1.2]]]).double(), "n": torch.tensor([[[2.0], [0.0]]]).double()}
    ours = scores(problem.structure, everywhere(problem, point), values)
    truth = slopes_of(problem, point, torch.tensor([0.3, -1.2]).double(), torch.tensor([2.0, 0.0]).double())
    torch.testing.assert_close(ours[0], truth, rtol=1e-6, atol=1e-6)


def test_some_directions_are_those_of_all(problem):
    problem, point = problem
    values = {"x": torch.tensor([[[0.3], [-1.2]]]).double(), "n": torch.tensor([[[2.0], [0.0]]]).double()}
    every = everywhere(problem, point)
    chosen = torch.tensor([True, False, True, False])
    some = every.only(chosen)
    assert some.directions.tolist() == [0, 2]
    torch.testing.assert_close(
        scores(problem.structure, some, values), scores(problem.structure, every, values)[..., chosen]
    )


def test_each_replica_has_scores_of_its_own(problem):
    problem, point = problem
    both = torch.cat([point, point + 0.2])
    values = {"x": torch.randn(2, 5, 1).double(), "n": torch.ones(2, 5, 1).double()}
    ours = scores(problem.structure, points_beside(problem.naturals, both, torch.tensor([3, 0])), values, replicas=2)
    for number in range(2):
        own = {node: value[number : number + 1] for node, value in values.items()}
        alone = scores(
            problem.structure, points_beside(problem.naturals, both[number : number + 1], torch.tensor([3, 0])), own
        )
        torch.testing.assert_close(ours[number], alone[0])


def completed(problem, point):
    return complete_rows(problem.structure, problem.naturals(point), problem.batch, {"n": 60.0}, 3)


def test_rows_with_gaps_have_the_expectation_of_their_scores(problem):
    """Over all counts that a row may miss, by their probabilities."""
    problem, point = problem
    rows = completed(problem, point)
    ours = mean_scores(problem.structure, everywhere(problem, point), rows)[0]
    counts = torch.arange(60.0).double()
    seen = problem.batch.mask["n"][0, :, 0]
    for row in (0, 1, 2, 3):
        x, n = problem.batch.values["x"][0, row, 0], problem.batch.values["n"][0, row, 0]
        if bool(seen[row]):
            truth = slopes_of(problem, point, x.reshape(1), n.reshape(1))[0]
        else:
            share = torch.softmax(log_density(problem.naturals(point), x.expand(60), counts), 0)
            truth = share @ slopes_of(problem, point, x.expand(60), counts)
        torch.testing.assert_close(ours[row], truth, rtol=1e-4, atol=1e-4)


def test_a_row_that_stands_for_several_counts_once(problem):
    problem, point = problem
    rows = completed(problem, point)
    twice = replace(
        rows,
        gaps=rows.gaps.repeat(2),
        repeats=2 * torch.ones(2 * len(rows.gaps)),
        values={node: value.repeat(1, 2, 1, 1) for node, value in rows.values.items()},
        shares=rows.shares.repeat(1, 2, 1),
    )
    beside = everywhere(problem, point)
    torch.testing.assert_close(
        mean_scores(problem.structure, beside, twice), mean_scores(problem.structure, beside, rows)
    )


def told(problem, point, rows=4000):
    naturals = problem.naturals(point)
    sample = ancestral(problem.structure, naturals, rows, torch.Generator().manual_seed(1))
    beside = everywhere(problem, point)
    return ScoreFeatures.at(problem.structure, naturals, beside, sample, completed(problem, point))


def test_under_the_model_scores_have_no_mean_where_they_are_taken(problem):
    problem, point = problem
    ours, weight = told(problem, point), torch.ones(1, ROWS).double()
    gap = ours.gap(problem.structure, problem.naturals(point), weight)
    torch.testing.assert_close(gap, ours.of_rows.mean(1), rtol=1e-12, atol=1e-12)


def test_beside_it_their_mean_is_the_information_times_the_way(problem):
    """For the location of a normal column that is the way over the variance, exactly."""
    problem, point = problem
    ours, weight = told(problem, point), torch.ones(1, ROWS).double()
    places = [p for p in range(4) if not torch.equal(_moved(problem, point, p)["x"]["loc"], _at(problem, point, "loc"))]
    (place,) = places
    there = point.clone()
    there[0, place] += 0.1
    scale = float(_at(problem, point, "scale"))
    way = float(_moved(problem, point, place, 0.1)["x"]["loc"] - _at(problem, point, "loc"))
    change = ours.gap(problem.structure, problem.naturals(point), weight) - ours.gap(
        problem.structure, problem.naturals(there), weight
    )
    assert float(change[0, place]) == pytest.approx(way / 0.1 * way / scale**2, rel=4 / math.sqrt(2000))


def _moved(problem, point, place, by=0.1):
    there = point.clone()
    there[0, place] += by
    return problem.naturals(there)


def _at(problem, point, name):
    return problem.naturals(point)["x"][name]


def test_told_again_where_they_were_they_are_the_same(problem):
    problem, point = problem
    ours = told(problem, point)
    again = ours.told_at(
        problem.structure, problem.naturals(point), everywhere(problem, point), completed(problem, point)
    )
    torch.testing.assert_close(again.of_rows, ours.of_rows)
    torch.testing.assert_close(again.by_chance, ours.by_chance)


def test_weights_of_rows_are_repetitions(problem):
    problem, point = problem
    ours, naturals = told(problem, point), problem.naturals(point)
    weight = torch.ones(1, ROWS).double()
    weight[0, :10] = 3.0
    repeated = replace(ours, of_rows=torch.cat([ours.of_rows, *[ours.of_rows[:, :10]] * 2], 1))
    torch.testing.assert_close(
        ours.gap(problem.structure, naturals, weight),
        repeated.gap(problem.structure, naturals, torch.ones(1, ROWS + 20).double()),
    )
