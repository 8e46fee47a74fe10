"""Rows and units that lie apart, against what was put there, and their weights on losses that are known."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.spatial.distance import cdist

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.engine import RobustOptions, SearchSchedule, search
from otpdag.engine import robust as robust_module
from otpdag.engine.robust import (
    ApartOptions,
    CappedProblem,
    _has_room,
    apart_groups,
    apart_sides,
    central_rows,
    dense_rows,
    joined_rows,
    near_rows,
    standard_columns,
    tail_weights,
)
from otpdag.problem import Units

# -- rows that lie apart, against what was put there ------------------------------------------------------------------


RNG = np.random.default_rng(0)
OPTIONS = ApartOptions()


def test_rows_beyond_a_gap_or_far_out_are_apart_on_their_side():
    bulk = RNG.uniform(-1.5, 1.5, (200, 2))
    columns = np.concatenate([bulk, [[3.0, 0.0]] * 10, [[0.0, -8.0]]])
    apart = apart_sides(columns, OPTIONS)
    assert apart.shape == (211, 4)
    np.testing.assert_array_equal(np.flatnonzero(apart[:, 0]), np.arange(200, 210))
    np.testing.assert_array_equal(np.flatnonzero(apart[:, 3]), [210])
    assert not apart[:, 1:3].any()


def test_too_many_rows_behind_a_gap_are_no_outliers():
    column = np.concatenate([RNG.uniform(-1.5, 1.5, 100), np.full(60, 3.0)])[:, None]
    assert not apart_sides(column, OPTIONS).any()


def test_groups_are_rows_apart_in_the_same_columns_the_largest_first():
    apart = np.zeros((100, 4), dtype=bool)
    apart[:5, 0], apart[10:20, 2], apart[50, 1] = True, True, True
    first, second = apart_groups(apart, OPTIONS)
    np.testing.assert_array_equal(first, np.arange(10, 20))
    np.testing.assert_array_equal(second, np.arange(5))
    assert apart_groups(np.zeros((10, 4), dtype=bool), OPTIONS) == []


def test_central_rows_are_nearest_to_the_middle():
    columns = RNG.normal(size=(40, 3))
    kept = central_rows(columns)
    assert len(kept) == 30
    others = np.setdiff1d(np.arange(40), kept)
    assert np.abs(columns[kept]).max(1).max() <= np.abs(columns[others]).max(1).min()


def test_dense_rows_have_near_neighbours():
    columns = RNG.normal(size=(60, 2))
    kept = dense_rows(columns, np.random.default_rng(1))
    tenth = np.sort(cdist(columns, columns), axis=1)[:, 9]  # of all rows, itself among them
    assert len(kept) == 48
    assert tenth[kept].max() <= np.delete(tenth, kept).min() + 1e-4


def test_an_isolated_group_is_left_out_of_the_joined_rows():
    columns = np.concatenate([RNG.normal(size=(300, 2)), 0.1 * RNG.normal(size=(30, 2)) + 40.0])
    kept = joined_rows(columns, np.random.default_rng(2))
    assert not (kept >= 300).any()
    assert len(kept) >= 0.75 * 330


def test_rows_as_the_model_makes_them_keep_their_weight_and_an_excess_does_not():
    model = torch.from_numpy(RNG.exponential(size=20_000))
    clean = torch.from_numpy(RNG.exponential(size=4_000))
    tails = (0.1, 0.02, 0.004)
    assert float(tail_weights(clean, model, RobustOptions(tails=tails)).mean()) > 0.99
    low, high = (float(model.quantile(1 - tail)) for tail in (0.02, 0.004))
    excess = torch.full((400,), 0.5 * (low + high), dtype=torch.float64)
    weights = tail_weights(torch.cat([clean, excess]), model, RobustOptions(tails=tails))
    inside = torch.cat([clean, excess]).ge(low) & torch.cat([clean, excess]).lt(high)
    allowed = 1.25 * (0.02 - 0.004)
    assert float((weights * inside).sum()) / 4400 == pytest.approx(allowed, rel=1e-6)


def test_where_too_much_would_be_left_out_the_likeliest_rows_are_kept():
    model, losses = torch.linspace(0, 1, 1001), torch.tensor([0.1, 0.2, 9.0, 8.0])
    assert tail_weights(losses, model, RobustOptions(tails=(0.1, 0.01))).tolist() == [1.0, 1.0, 0.0, 1.0]


# -- rows that lie apart: a component of the model is kept, a group of outliers is not --------------------------------


CENTRES = np.array([[0.0, 0.0], [5.0, 0.0], [10.0, 12.0]])


def blobs(weights, seed, rows=1000):
    """Three groups of points, the last one apart."""
    rng = np.random.default_rng(seed)
    group = rng.choice(3, rows, p=weights)
    return pd.DataFrame(CENTRES[group] + rng.normal(size=(rows, 2)), columns=["x.0", "x.1"]), group


def mixture(components):
    graph = otp.Graph([("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(components), "x": m.Normal(2)})


def near(frame, losses):
    model = mixture(2)
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=["z"])
    return near_rows(model.structure, batch, ApartOptions(), losses, np.random.default_rng(0)).numpy()


def equal_losses(part):
    return np.zeros(part.rows), 5


def test_rows_beyond_a_gap_are_apart_and_their_price_decides():
    frame, group = blobs([0.55, 0.35, 0.1], seed=1)

    def costly(part):
        return np.full(part.rows, 1.0 if part.rows == len(frame) else 0.0), 5

    assert set(group[near(frame, costly)]) == {0, 1}
    assert len(near(frame, equal_losses)) == len(frame)


def test_scattered_rows_are_apart_without_a_test():
    frame, _ = blobs([0.6, 0.4, 0.0], seed=2)
    rng = np.random.default_rng(3)
    frame.iloc[:40] = rng.uniform(-1, 1, (40, 2)) * rng.choice([40.0, 90.0], (40, 2)) + 60.0 * rng.choice(
        [-1, 1], (40, 2)
    )
    kept = near(frame, equal_losses)
    assert np.mean(kept < 40) < 0.01


def test_nothing_is_apart_where_too_much_would_be():
    frame, _ = blobs([0.5, 0.2, 0.3], seed=4)
    assert len(near(frame, equal_losses)) == len(frame)


@pytest.mark.slow
@pytest.mark.parametrize(("components", "left_out"), [(3, False), (2, True)])
def test_a_robust_fit_keeps_a_component_that_it_has_room_for(components, left_out):
    frame, group = blobs([0.55, 0.35, 0.1], seed=5)
    result = otp.fit(mixture(components), frame, seed=0, robust=True, restarts=8)
    share = np.isin(np.flatnonzero(group == 2), result.dropped).mean()
    assert share > 0.9 if left_out else share < 0.1
    assert np.isin(np.flatnonzero(group != 2), result.dropped).mean() < 0.02


def room(near_rows_, group, losses, **options):
    frame, _ = blobs([0.6, 0.4, 0.0], seed=0, rows=60)
    model = mixture(2)
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=["z"])
    options = replace(ApartOptions(), **options)
    return _has_room(batch, np.array(near_rows_), np.array(group), options, losses, np.random.default_rng(0))


def test_the_price_of_a_group_is_what_the_others_lose_but_for_its_share():
    """Forty rows beside twenty: the others' losses fall by log(2/3) each, since they are not of the group."""
    share = 40 * np.log(40 / 60)

    def losing(together):
        return lambda part: (np.full(part.rows, together / 40 if part.rows == 60 else 0.0), 3)

    near_rows_, group = range(40), range(40, 60)
    assert room(near_rows_, group, losing(3 - share - 1e-6))
    assert not room(near_rows_, group, losing(3 - share + 1e-6))


def test_a_group_has_no_room_where_there_is_nothing_to_compare():
    assert not room(range(40), [], equal_losses)
    assert not room([], range(40), equal_losses)


def test_few_rows_stand_for_many():
    seen = []

    def counted(part):
        seen.append(part.rows)
        return np.zeros(part.rows), 5

    assert room(range(40), range(40, 60), counted, rows=30)
    assert seen[0] == 30
    assert 10 < seen[1] < 30
    seen.clear()
    room(range(40), range(40, 60), counted, rows=60)
    assert seen == [60, 40]


@pytest.mark.parametrize("unit", [1e-7, 1.0, 1e6])
def test_columns_are_compared_in_robust_units_whatever_their_own(unit):
    """Numbers by median and deviation, counts by their roots, categories as they are; gaps lie in the middle."""
    rng = np.random.default_rng(0)
    x, n, k = rng.normal(size=40), rng.poisson(9.0, 40).astype(float), rng.integers(0, 3, 40)
    x[5] = np.nan
    frame = pd.DataFrame({"x": unit * (x + 4.0), "n": n, "k": k})
    model = otp.Model(otp.Graph([], nodes=list("xnk")), {"x": m.Normal(), "n": m.Poisson(), "k": m.Categorical(3)})
    batch = encode(frame, Schema.of(model.spaces, model.graph, frame), hidden=[])
    found = standard_columns(model.structure, batch)

    def standard(values):
        low = np.sort(values[~np.isnan(values)])[
            (np.sum(~np.isnan(values)) - 1) // 2
        ]  # the lower median, as torch has it
        gaps = np.sort(np.abs(values[~np.isnan(values)] - low))
        return np.nan_to_num((values - low) / (1.4826 * gaps[(len(gaps) - 1) // 2]))

    np.testing.assert_allclose(found[:, 0], standard(x), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found[:, 1], standard(np.sqrt(n)), rtol=1e-9)
    np.testing.assert_array_equal(found[:, 2:], np.eye(3)[k])


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

        def laid_out_for(self, points):
            return replace(self, precise=True) if bool((points > 100.0).all()) else self

    base = Placed(UNITS)
    problem = CappedProblem(base, base, RobustOptions(sample=1001), 0, trimmings=2)._with_weights(POINTS)
    assert problem.laid_out_for(POINTS) is problem
    precise = problem.laid_out_for(POINTS + 200.0)
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
