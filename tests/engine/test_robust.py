"""Robust fits: outliers are left out and reported, clean data are left alone."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import datasets
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.datasets import poisson_chain
from otpdag.engine import SearchSchedule
from otpdag.engine import robust as robust_module
from otpdag.engine.outlying_rows import RobustOptions
from otpdag.engine.robust import CappedProblem
from otpdag.engine.search import search
from otpdag.problem import Units


def mixture_model():
    return otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal(2)})


def clean_rows(generator, rows=600):
    state = generator.integers(0, 2, rows)
    points = np.array([[0.0, 0.0], [4.0, 2.0]])[state] + generator.standard_normal((rows, 2))
    return pd.DataFrame(points, columns=["x.0", "x.1"])


@pytest.fixture(scope="module")
def spoilt():
    generator = np.random.default_rng(0)
    return datasets.replace_rows(clean_rows(generator), 0.1, "cluster", generator)


def test_outliers_are_left_out_and_reported(spoilt):
    frame, rows = spoilt
    model = mixture_model()
    result = otp.fit(model, frame, seed=0, robust=True, restarts=6)
    np.testing.assert_allclose(model.params()["x"]["loc"], [[0, 0], [4, 2]], atol=0.3)
    assert set(rows) <= set(result.dropped.tolist())
    assert len(result.dropped) < len(rows) + 12
    assert result.rows_used == len(frame)
    assert f"left out {len(result.dropped)} of 600 rows" in result.notes[0]


def test_without_robustness_the_same_outliers_ruin_the_fit(spoilt):
    model = mixture_model()
    result = otp.fit(model, spoilt[0], seed=0, restarts=6)
    assert np.abs(model.params()["x"]["loc"] - [[0, 0], [4, 2]]).max() > 1
    assert result.row_weights is None
    assert len(result.dropped) == 0


def test_clean_data_are_left_alone():
    frame = clean_rows(np.random.default_rng(1))
    plain, robust = mixture_model(), mixture_model()
    otp.fit(plain, frame, seed=0, restarts=6)
    result = otp.fit(robust, frame, seed=0, robust="outliers", restarts=6)
    assert result.row_weights.mean() > 0.97
    np.testing.assert_allclose(robust.params()["x"]["loc"], plain.params()["x"]["loc"], atol=0.1)


def test_never_more_than_a_quarter_is_left_out():
    generator = np.random.default_rng(2)
    frame, _ = datasets.replace_rows(clean_rows(generator), 0.45, "box", generator)
    result = otp.fit(mixture_model(), frame, seed=0, robust=True, restarts=4)
    assert 1 - result.row_weights.mean() <= 0.25 + 1e-9


@pytest.mark.parametrize(("most", "least"), [(0.1, 0.0), (0.4, 0.3)])
def test_options_say_how_much_is_left_out_at_most(most, least):
    generator = np.random.default_rng(2)
    frame, _ = datasets.replace_rows(clean_rows(generator), 0.45, "box", generator)
    options = otp.RobustOptions(most_dropped=most)
    result = otp.fit(mixture_model(), frame, seed=0, robust=options, restarts=4)
    assert least < 1 - result.row_weights.mean() <= most + 1e-9


def test_missing_cells_are_allowed(spoilt):
    frame = datasets.delete_cells(spoilt[0], 0.1, np.random.default_rng(3))
    model = mixture_model()
    otp.fit(model, frame, seed=0, robust=True, restarts=6)
    np.testing.assert_allclose(model.params()["x"]["loc"], [[0, 0], [4, 2]], atol=0.4)


def test_misfit_survives_a_wrong_fixed_scale():
    generator = np.random.default_rng(4)
    state = generator.random(800) < 0.6
    points = np.where(state[:, None], [0.0, 0.0], [1.8, 1.2]) + generator.standard_normal((800, 2))
    frame = pd.DataFrame(points, columns=["x.0", "x.1"])
    errors = {}
    for robust in (False, "misfit"):
        wrong = {"z": m.Categorical(2, probs=[0.6, 0.4]), "x": m.Normal(2, scale=1.35)}
        model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), wrong)
        otp.fit(model, frame, seed=0, robust=robust, restarts=6)
        found = model.params()["x"]["loc"]
        truth = np.array([[0.0, 0.0], [1.8, 1.2]])
        errors[robust] = min(np.abs(found - truth).mean(), np.abs(found[::-1] - truth).mean())
    assert errors["misfit"] < errors[False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"robust": "strong"}, "'outliers', 'misfit' or an otp.RobustOptions; got 'strong'"),
        ({"robust": True, "method": "transport"}, "robust='outliers' needs the likelihood; got 'transport'"),
        ({"robust": "misfit", "method": "likelihood"}, "leave method at 'auto'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(otp.ModelError, match=message):
        otp.fit(mixture_model(), clean_rows(np.random.default_rng(0), 60), **arguments)


# -- sequences --------------------------------------------------------------------------------------------------------


def chain_model():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.StayOrMove(4), "x": m.Poisson()})


@pytest.fixture(scope="module")
def foreign():
    """Sixty sequences, six of which come from another process: far more counts, that move at every step."""
    counts, _, truth = poisson_chain(60, 40, np.random.default_rng(0))
    spoilt = np.array([4, 11, 23, 37, 45, 58])
    levels = np.random.default_rng(1).choice([25, 70, 130], (6, 40))
    counts[spoilt] = levels + np.random.default_rng(2).poisson(3, (6, 40))
    return counts, spoilt, np.exp(truth["x"]["log_rate"])


def test_sequences_of_another_process_are_left_out(foreign):
    counts, spoilt, rates = foreign
    found = {}
    for robust in (False, True):
        model = chain_model()
        result = otp.fit(model, counts, seed=0, restarts=4, robust=robust)
        found[robust] = np.abs(np.exp(model.params()["x"]["log_rate"]) - rates).mean(), result
    error, result = found[True]
    assert set(spoilt) <= set(result.dropped.tolist())
    assert len(result.dropped) <= len(spoilt) + 5
    assert result.row_weights.shape == (60,)
    assert error < 0.5 * found[False][0]
    assert error < 1.0
    assert f"left out {len(result.dropped)} of 60" in result.notes[0]
    assert found[False][1].row_weights is None


def test_a_robust_chain_is_close_to_the_fit_of_its_clean_sequences(foreign):
    counts, spoilt, _ = foreign
    robust, clean = chain_model(), chain_model()
    otp.fit(robust, counts, seed=0, restarts=4, robust="outliers")
    otp.fit(clean, np.delete(counts, spoilt, 0), seed=0, restarts=4)
    np.testing.assert_allclose(robust.params()["x"]["log_rate"], clean.params()["x"]["log_rate"], atol=0.03)
    assert float(robust.params()["z"]["stay"]) == pytest.approx(float(clean.params()["z"]["stay"]), abs=0.03)


def test_clean_sequences_are_left_alone():
    """Over ten data sets, as little is left out as of clean tables."""
    weights, gaps = [], []
    for seed in range(3, 13):
        counts, _, _ = poisson_chain(60, 40, np.random.default_rng(seed))
        plain, robust = chain_model(), chain_model()
        otp.fit(plain, counts, seed=0, restarts=4)
        weights.append(otp.fit(robust, counts, seed=0, restarts=4, robust=True).row_weights.mean())
        gaps.append(np.abs(robust.params()["x"]["log_rate"] - plain.params()["x"]["log_rate"]).mean())
    assert np.mean(gaps) < 0.05
    assert np.mean(weights) > 0.97


# -- weights of units, on losses that are known -----------------------------------------------------------------------


@dataclass(frozen=True)
class Distances(Units):
    """Units whose loss is their distance from a point; the model's own lie evenly between zero and one."""

    units: torch.Tensor
    weights: torch.Tensor | None = None

    @property
    def rows(self):
        return len(self.units)

    @property
    def weight(self):
        return torch.ones_like(self.units)[None]

    def unit_losses(self, points):
        return (self.units - points[:, :1]).abs()

    def simulated(self, point, size, seed):
        return Distances(point[0, 0] + torch.linspace(0, 1, size).double())

    def reweighted(self, factors):
        return replace(self, weights=factors)


UNITS = torch.cat([torch.linspace(0, 1, 90), torch.full((10,), 50.0)]).double()
POINTS = torch.tensor([[0.0], [50.0]]).double()


def capped(**options):
    return CappedProblem(Distances(UNITS), Distances(UNITS), RobustOptions(sample=1001), 0, **options)


def test_trimming_keeps_three_quarters_the_likeliest_of_each_start():
    problem = capped(trimmings=3)._with_weights(POINTS)
    kept = Distances(UNITS).unit_losses(POINTS)
    for row in range(2):
        expected = kept[row] <= np.quantile(kept[row], 0.75)
        assert problem.weights[row].tolist() == expected.double().tolist()
    assert torch.equal(problem.weighted.weights, problem.weights)
    free = capped(trimmings=3, untrimmed=torch.tensor([False, True]))._with_weights(POINTS)
    assert torch.equal(free.weights[0], problem.weights[0])
    assert free.weights[1].tolist() == [1.0] * 100


def test_weights_are_found_anew_until_they_hardly_change():
    problem = capped(trimmings=2)._with_weights(POINTS[:1])
    for left in (1, 0):
        moved = problem.refine(POINTS[:1])
        assert moved.problem.trimmings == left
        problem = moved.problem
    # weights are capped by now: of the ten units far off hardly any is left
    assert problem.weights[0, 90:].max() < 0.2
    assert problem.weights[0, :85].min() > 0.9
    assert problem.refine(POINTS[:1]) is None
    shifted = replace(problem, weights=problem.weights.roll(30, -1))
    assert shifted.refine(POINTS[:1]) is not None


def test_weights_that_are_known_for_as_many_points_are_kept():
    """An optimiser that goes on is not given other weights; other points are."""
    problem = capped(trimmings=2)._with_weights(POINTS)
    assert problem.laid_out_for(POINTS + 5.0) is problem
    fresh = problem.laid_out_for(POINTS[1:])
    assert torch.equal(fresh.weights, capped(trimmings=2)._with_weights(POINTS[1:]).weights)


def test_weights_that_are_known_go_to_the_problem_as_it_is_laid_out():
    """Grids are placed anew for the points; the weights of units stay what they are."""

    @dataclass(frozen=True)
    class Placed(Distances):
        precise: bool = False

        def laid_out_for(self, points, *, precisely=False):
            return replace(self, precise=True) if precisely else self

    base = Placed(UNITS)
    problem = CappedProblem(base, base, RobustOptions(sample=1001), 0, trimmings=2)._with_weights(POINTS)
    assert problem.laid_out_for(POINTS) is problem
    precise = problem.laid_out_for(POINTS, precisely=True)
    assert (precise.base.precise, precise.weighted.precise, problem.weighted.precise) == (True, True, False)
    assert torch.equal(precise.weights, problem.weights)
    assert torch.equal(precise.weighted.weights, problem.weights)


def test_starts_are_compared_by_losses_cut_at_the_models_tail():
    found = capped().judged(POINTS)
    cap = 1 - 0.004  # of losses that lie evenly between zero and one
    losses = Distances(UNITS).unit_losses(POINTS).numpy()
    np.testing.assert_allclose(found, np.minimum(losses, cap).mean(1), rtol=1e-6)


def test_the_search_has_the_stages_that_the_options_say(monkeypatch):
    """Short runs that trim and cap in turn, rounds of fit and weights, and a last run that moves no more."""
    seen = {}

    def recorded(problem, points, course, searcher):
        seen.update(problem=problem, points=points, course=course)
        return search(problem, points, course, searcher)

    monkeypatch.setattr(robust_module, "search", recorded)
    rng = np.random.default_rng(3)
    table = pd.DataFrame({"x": rng.normal(size=90)})
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    result = otp.fit(model, table, robust=True, restarts=5, seed=2)
    course, plain = seen["course"], SearchSchedule()
    assert (course.short_steps, course.short_moves) == (plain.short_steps // 2, 5)
    assert course.short_rows == seen["problem"].judge.rows == len(seen["problem"].near)
    assert (course.finalist_steps, course.finalist_moves, course.moves) == (15, 7, 0)
    assert (course.halving, course.finalist_rows, course.part_rows) == (False, None, None)
    assert course.short_elements == plain.short_elements
    assert seen["problem"].untrimmed.tolist() == [True, False, False, False, True]
    assert len(seen["points"]) == 5
    assert result.row_weights.shape == (90,)


def test_starts_come_from_four_guesses_of_the_clean_rows_and_from_halves_of_them():
    rows = []

    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    table = pd.DataFrame({"x": np.random.default_rng(0).normal(size=40)})

    class Kind:
        batch = encode(table, Schema.of(model.spaces, model.graph, table), hidden=frozenset())

        def starts(self, layout, problem, seed, numbers, near):
            rows.append((numbers, near.tolist()))
            return torch.full((1, 1), float(numbers[0]))

    near = torch.arange(5, 35)
    points = robust_module._trimmed_starts(Kind(), SimpleNamespace(structure=model.structure), None, near, 0, 9)
    assert points.flatten().tolist() == list(range(9))
    assert rows[0] == ([0], near.tolist())
    for number, (own, taken) in enumerate(rows):
        assert own == [number]
        assert taken == sorted(set(taken))
        assert set(taken) <= set(near.tolist())
        whole = rows[number % 4][1]
        if number >= 4:
            assert len(taken) == len(whole) // 2
            assert set(taken) <= set(whole)
    assert len(rows[2][1]) < 30


def test_a_part_is_of_units_that_lie_together_and_begins_with_trimming():
    @dataclass(frozen=True)
    class Parts(Distances):
        def subset(self, rows, *, coarse=False):
            return replace(self, units=self.units[:rows] if isinstance(rows, int) else self.units[rows])

    problem = CappedProblem(Parts(UNITS), Parts(UNITS), RobustOptions(sample=1001), 0, near=torch.arange(20, 60))
    part = problem.subset(10)
    assert torch.equal(part.base.units, UNITS[20:30])
    assert part.judge is part.base
    assert (part.trimmings, part.options.sample, part.near) == (3, 333, None)
    everyone = replace(problem, near=None).subset(10)
    assert torch.equal(everyone.base.units, UNITS[:10])
