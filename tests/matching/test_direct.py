"""The direct term of rows, where its value is known, and what becomes of it as estimates are found."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.matching.mean_features import feature_columns, mean_features, mean_over_many
from otpdag.objective import Direct, Objective
from otpdag.simulation import batch_of
from tests.table_problems import point_of, problem_of

ROWS = 40


def method_of(features=30, kappa=1.0, refinements=1, reconstruction=0.0):
    """Compared directly, or beside the likelihood."""
    direct = Direct(kappa, otp.divergences.WhitenedFeatures(features=features), refinements=refinements)
    plain = otp.entropic() if reconstruction else otp.transport()
    eps = 1.0 if reconstruction else 0.0
    return replace(plain, objective=Objective(reconstruction=reconstruction, eps=eps, direct=direct))


def categories(rows=80, gaps=0.0, **options):
    """``a -> b``, and ``a -> n`` if there are gaps, compared; also the table."""
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2, rows)
    frame = pd.DataFrame({"a": a, "b": (a + rng.integers(0, 2, rows)) % 3}, dtype=float)
    mechanisms = {"a": m.Categorical(2), "b": m.Categorical(3)}
    if gaps:
        frame["n"] = rng.poisson(2.0 + 3 * a)
        frame, mechanisms = frame.mask(rng.random(frame.shape) < gaps), mechanisms | {"n": m.Poisson()}
    model = otp.Model(otp.Graph([("a", name) for name in mechanisms if name != "a"]), mechanisms)
    return problem_of(model, frame, method_of(**options))[0], frame


def frequencies(frame):
    """Natural parameters of ``a -> b`` that are the table's own."""
    counts = np.zeros((2, 3))
    np.add.at(counts, (frame["a"].astype(int), frame["b"].astype(int)), 1.0)
    return {"a": {"probs": counts.sum(1) / counts.sum()}, "b": {"probs": counts / counts.sum(1, keepdims=True)}}


def test_a_model_that_is_the_data_is_at_distance_zero():
    problem, frame = categories()
    params = frequencies(frame)
    assert problem.loss(point_of(problem, params)).total.item() == pytest.approx(0.0, abs=1e-12)
    other = params | {"a": {"probs": [0.9, 0.1]}}
    assert problem.loss(point_of(problem, other)).total.item() > 0.1


def test_the_distance_is_that_of_whitened_mean_features():
    """Summed over the six cells of the table, each by its probability."""
    problem, _ = categories(kappa=2.5)
    a, b = np.repeat(np.eye(2), 3, 0), np.tile(np.eye(3), (2, 1))
    cells = {"a": torch.as_tensor(a)[None], "b": torch.as_tensor(b)[None]}
    below = np.array([[0.2, 0.3, 0.5], [0.6, 0.1, 0.3]])
    point = point_of(problem, {"a": {"probs": [0.3, 0.7]}, "b": {"probs": below}})
    weight = torch.as_tensor(np.array([[0.3], [0.7]]) * below).reshape(1, 6)
    structure, features = problem.structure, problem.features
    gap = features.mean - features.mean_of(feature_columns(structure, batch_of(structure, cells)), weight)
    terms = problem.loss(point)
    assert terms.total.item() == pytest.approx(2.5 * float((gap @ features.whitening[0]).square().sum()))
    assert terms.direct.item() == terms.total.item()
    assert terms.reconstruction.item() == 0.0


@pytest.mark.parametrize("gaps", [0.0, 0.2])
def test_weights_are_repetitions(gaps):
    problem, _ = categories(gaps=gaps)
    often = np.random.default_rng(1).integers(0, 4, problem.rows)
    found = problem.reweighted(torch.as_tensor(often).double()[None])
    repeated = problem.batch.take(torch.as_tensor(np.repeat(np.arange(problem.rows), often)))
    expected = problem.features.mean_of(feature_columns(problem.structure, repeated), repeated.weight)
    torch.testing.assert_close(found.features.mean, expected)
    assert not torch.allclose(problem.features.mean, expected)
    again = found.reweighted(torch.full((1, problem.rows), 3.0).double())
    torch.testing.assert_close(again.features.mean, expected)  # the level of weights does not matter
    assert torch.equal(found.features.whitening, problem.features.whitening)


# -- beside other terms -----------------------------------------------------------------------------------------------


def test_beside_the_likelihood_terms_are_those_of_both():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=60), "y": rng.normal(size=60)})
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    both, point = problem_of(model, frame, method_of(kappa=0.7, reconstruction=1.0))
    likelihood, _ = problem_of(model, frame, otp.entropic())
    direct, _ = problem_of(model, frame, method_of(kappa=0.7))
    torch.testing.assert_close(both.loss(point).total, likelihood.loss(point).total + direct.loss(point).total)
    assert both.loss(point).direct.item() == pytest.approx(direct.loss(point).total.item())
    assert not both.is_likelihood
    for change in (
        lambda one: one.subset(20),
        lambda one: one.simulated(point, 30, 5),
        lambda one: one.reweighted(torch.arange(60.0).double().unsqueeze(0)),
    ):
        expected = change(likelihood).loss(point).total + change(direct).loss(point).total
        torch.testing.assert_close(change(both).loss(point).total, expected)
        assert not torch.allclose(expected, both.loss(point).total)
    moved = both.refine(point)
    assert moved.what == "refined weights"
    torch.testing.assert_close(
        moved.problem.loss(point).total, likelihood.loss(point).total + direct.refine(point).problem.loss(point).total
    )


def test_beside_a_likelihood_with_grids_these_move_first():
    rng = np.random.default_rng(0)
    rate = np.exp(5 + rng.normal(size=ROWS))
    frame = pd.DataFrame({"x": rng.poisson(rate), "n": rng.poisson(rate)})
    graph = otp.Graph([("u", "x"), ("u", "n")], hidden=["u"])
    model = otp.Model(graph, {"u": m.Normal(), "x": m.Poisson(), "n": m.Poisson()})
    method = method_of(reconstruction=1.0)
    problem, point = problem_of(model, frame, method)
    moved = problem.refine(point)
    assert moved.what == "moved grids"
    torch.testing.assert_close(moved.loss, moved.problem.loss(moved.point).total)
    result = otp.fit(model, frame, method=method, seed=0)
    assert result.stages[-1].name == "refined weights"
    assert result.history[-1]["direct"] > 0


# -- estimates --------------------------------------------------------------------------------------------------------


def causes(gaps, refinements=2):
    """Two normal causes of a third, compared by features: few points stand for the causes in each step."""
    rng = np.random.default_rng(4)
    x, z = rng.normal(size=ROWS), 2 + 0.5 * rng.normal(size=ROWS)
    frame = pd.DataFrame({"x": x, "z": z, "y": 1 + x - z + 0.4 * rng.normal(size=ROWS)})
    if gaps:
        frame = frame.mask(rng.random(frame.shape) < 0.2)
    model = otp.Model(otp.Graph([("x", "y"), ("z", "y")]), {name: m.Normal() for name in "xzy"})
    return problem_of(model, frame, method_of(20, 1.5, refinements), seed=3)


def distance_over_many(problem, point):
    """The squared distance of the data's mean features to the model's, over many points, by the inverse."""
    features, naturals = problem.features, problem.naturals(point)
    gap = (features.mean - mean_over_many(problem.many, naturals, features))[0]
    weights = features.whitening[0] @ features.whitening[0].mT
    return (gap @ weights @ gap).item()


def test_weights_of_features_are_refined_as_often_as_asked_each_time_by_the_model():
    problem, start = causes(gaps=False)
    assert (problem.refinements, problem.pace.refinements, problem.completing) == (2, 0, None)
    assert problem.points.size < problem.many.size
    for left, seed in ((1, 3), (0, 4)):
        naturals = problem.naturals(start)
        expected = problem.whitened_by_model(naturals, seed).features
        assert torch.equal(expected.mean, problem.features.mean)
        moved = problem.refine(start)
        assert (moved.what, moved.problem.refinements) == ("refined weights", left)
        problem = moved.problem
        assert torch.equal(problem.features.whitening, expected.whitening)
        lacking = mean_over_many(problem.many, naturals, problem.features)
        few = mean_features(problem.points, naturals, problem.features)
        torch.testing.assert_close(problem.lacking, lacking - few)
        assert problem.loss(start).total.item() == pytest.approx(1.5 * distance_over_many(problem, start), rel=1e-9)
    assert problem.refine(start) is None
    assert problem.notes(start) == ()


def test_gaps_are_completed_until_estimates_settle_and_then_compared_by_other_weights():
    problem, start = causes(gaps=True, refinements=1)
    assert problem.pace.refinements == 40
    assert "rows with gaps could not be completed" in problem.notes(start)[0]
    first = problem.refine(start)
    assert (first.what, first.curved_alike) == ("completed rows", False)
    problem = first.problem
    assert torch.equal(problem.completing.begin, start)
    assert problem.notes(start) == ()
    torch.testing.assert_close(problem.features.mean, problem.completed.mean_features(problem.features))
    # how far a point may be off, in squared standard errors, before rows are completed anew
    beside = start.clone()
    beside[0, 0] += 1e-3
    change = problem.change(problem.naturals(start), problem.naturals(beside)).item()
    old, new = (mean_features(problem.points, problem.naturals(one), problem.features) for one in (start, beside))
    gap = (old - new) @ problem.features.whitening[0]
    assert change == pytest.approx(float(gap.square().sum()) * ROWS, rel=1e-6)

    def off(squared):
        point = start.clone()
        point[0, 0] += 1e-3 * (squared / change) ** 0.5
        return point

    for limit, refinements, is_resampled in ((0.01, 1, False), (1e-5, 0, False), (0.03, 0, True)):
        own = replace(problem, refinements=refinements, is_resampled=is_resampled)
        within, beyond = own.refine(off(0.8 * limit)), own.refine(off(1.25 * limit))
        assert within is None if not refinements else within.what == "refined weights"
        assert (beyond.what, beyond.curved_alike) == ("completed rows", True)
        torch.testing.assert_close(beyond.problem.completing.points[0], start)
        torch.testing.assert_close(beyond.point, off(1.25 * limit))  # of a single image it is the image
    refined = problem.refine(start).problem
    assert [torch.equal(one, start) for one in refined.completing.points] == [True]
    assert refined.completing.images == ()
    assert refined.loss(start).total.item() == pytest.approx(1.5 * distance_over_many(refined, start), rel=1e-8)
    resampled = refined.reweighted(torch.ones(1, ROWS).double())
    assert resampled.is_resampled
    assert resampled.completing.images == ()
    assert resampled.loss(start).total.item() == pytest.approx(refined.loss(start).total.item(), rel=1e-9)


def test_the_first_weights_of_features_are_left_after_few_completions():
    problem, start = causes(gaps=True, refinements=1)
    what = []
    for far in (0.0, 0.3, 0.6, 0.9, 1.2):
        moved = problem.refine(start + far)
        what.append(moved.what)
        problem = moved.problem
    assert what == ["completed rows"] * 4 + ["refined weights"]
