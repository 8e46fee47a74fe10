"""Rows and units that lie apart, against what was put there, and their weights on losses that are known."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import cdist

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.engine import RobustOptions, SearchSchedule, search
from otpdag.engine import robust as robust_module
from otpdag.engine.robust import CappedProblem, beaten_by, clean_guesses, standard_columns, tail_weights
from otpdag.problem import Units

# -- rows that lie apart, against what was put there ------------------------------------------------------------------


RNG = np.random.default_rng(0)


def test_rows_as_the_model_makes_them_keep_their_weight_and_an_excess_does_not():
    model = torch.from_numpy(RNG.exponential(size=20_000))
    clean = torch.from_numpy(RNG.exponential(size=4_000))
    tails = (0.1, 0.02, 0.004)
    assert float(tail_weights(clean, model, RobustOptions(tails=tails)).mean()) > 0.99
    low, high = (float(model.quantile(1 - tail)) for tail in (0.02, 0.004))
    excess = torch.full((400,), 0.5 * (low + high), dtype=torch.float64)
    weights = tail_weights(torch.cat([clean, excess]), model, RobustOptions(tails=tails))
    inside = torch.cat([clean, excess]).ge(low) & torch.cat([clean, excess]).lt(high)
    mass, share = 0.02 - 0.004, float(inside.double().mean())
    stays = mass + (0.25 * mass) ** 2 / (share - mass)
    assert float((weights * inside).sum()) / 4400 == pytest.approx(stays, rel=1e-6)
    assert stays < 1.02 * mass


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


@pytest.mark.slow
@pytest.mark.parametrize(("components", "left_out"), [(3, False), (2, True)])
def test_a_robust_fit_keeps_a_component_that_it_has_room_for(components, left_out):
    frame, group = blobs([0.55, 0.35, 0.1], seed=5)
    result = otp.fit(mixture(components), frame, seed=0, robust=True, restarts=8)
    share = np.isin(np.flatnonzero(group == 2), result.dropped).mean()
    assert share > 0.9 if left_out else share < 0.1
    assert np.isin(np.flatnonzero(group != 2), result.dropped).mean() < 0.02


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
    return CappedProblem(Distances(UNITS), None, RobustOptions(sample=1001), 0, **options)


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
    problem = CappedProblem(base, None, RobustOptions(sample=1001), 0, trimmings=2)._with_weights(POINTS)
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


def test_who_keeps_more_rows_pays_nothing_for_them():
    """With or without a third component, the others are explained alike; two of them merged are not."""
    rng = np.random.default_rng(4)
    rows = torch.from_numpy(np.concatenate([rng.normal(0, 1, 600), rng.normal(8, 1, 600), rng.normal(30, 0.1, 200)]))

    def loss(weights, locs, scales):
        each = torch.distributions.Normal(torch.tensor(locs), torch.tensor(scales)).log_prob(rows.unsqueeze(-1))
        return -(torch.tensor(weights).log() + each).logsumexp(-1)

    whole, others = (
        loss([3 / 7, 3 / 7, 1 / 7], [0.0, 8.0, 30.0], [1.0, 1.0, 0.1]),
        loss([0.5, 0.5], [0.0, 8.0], [1.0, 1.0]),
    )
    merged = loss([6 / 7, 1 / 7], [4.0, 30.0], [4.1, 0.1])
    near = torch.stack(
        [torch.arange(1400).repeat(3), torch.arange(1200).repeat(4)[:4200], torch.arange(1400).repeat(3)]
    )
    few = (torch.arange(1400) < 1200).double()
    weights = torch.stack([torch.ones(1400).double(), few, torch.ones(1400).double()])
    found = beaten_by(torch.stack([whole, others, merged]), weights, near, 6)
    assert found[0] < 0.01
    assert found[1] < 0.01
    assert found[2] > 200


def test_a_component_around_a_few_equal_rows_gains_no_more_than_two_nats_by_each():
    """Its likelihood has no bound: forty rows at a density of 1e9 are 700 nats, and are no better explained."""
    rng = np.random.default_rng(5)
    rows = np.concatenate([rng.normal(size=1000), np.full(40, 0.3)])
    each = stats.norm.logpdf(rows[:, None], [0.0, 0.3], [1.0, 4e-10])
    plain, spike = -each[:, 0], -np.logaddexp(each[:, 0] + np.log(0.96), each[:, 1] + np.log(0.04))
    assert (plain - spike).sum() > 650
    found = beaten_by(
        torch.from_numpy(np.stack([plain, spike])), torch.ones(2, 1040).double(), torch.arange(1040).expand(2, -1), 5
    )
    assert found[0] < 2 * 40


def test_a_cluster_along_a_factor_is_left_out():
    """Its rows are likely one by one, under the factor's tail; there are only too many of them."""
    rng = np.random.default_rng(12)
    loadings = np.array([0.6, 0.9, 0.9, 1.3])
    values = rng.normal(size=(2000, 1)) * loadings + np.array([0.7, 0.75, 0.45, 0.9]) * rng.normal(size=(2000, 4))
    values[:200] = 2.4 * loadings + 0.1 * rng.normal(size=(200, 4))
    names = ["a", "b", "c", "d"]
    graph = otp.Graph([("f", name) for name in names], hidden=["f"])
    model = otp.Model(graph, {"f": m.Normal(loc=0.0, scale=1.0)} | {name: m.Normal() for name in names})
    result = otp.fit(model, pd.DataFrame(values, columns=names), robust="outliers", seed=1)
    assert (np.asarray(result.row_weights)[:200] == 0).mean() > 0.9
    assert np.asarray(result.row_weights)[200:].mean() > 0.95
    found = np.abs([float(np.squeeze(model.params()[name]["weight"])) for name in names])
    np.testing.assert_allclose(found, loadings, atol=0.12)


def test_the_search_has_the_stages_that_the_options_say(monkeypatch):
    """Short runs that trim and cap in turn, rounds of fit and weights, and a last run that moves no more."""
    seen = {}

    def recorded(problem, points, course, searcher, owners=None):
        seen.update(problem=problem, points=points, course=course)
        return search(problem, points, course, searcher, owners)

    monkeypatch.setattr(robust_module, "search", recorded)
    table = pd.DataFrame({"x": np.random.default_rng(3).normal(size=90)})
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    result = otp.fit(model, table, robust=True, restarts=5, seed=2)
    course, plain = seen["course"], SearchSchedule()
    assert (course.short_steps, course.short_moves) == (plain.short_steps // 2, 5)
    assert (course.finalist_steps, course.finalist_moves, course.moves) == (15, 7, 0)
    assert (course.halving, course.finalist_rows, course.part_rows) == (False, None, None)
    assert seen["problem"].untrimmed.tolist() == [True] + [False] * (len(seen["points"]) - 1)
    assert len(seen["points"]) >= 5
    assert result.row_weights.shape == (90,)


def test_guesses_of_the_clean_rows_are_all_central_and_dense_ones_and_all_but_a_group():
    columns = np.concatenate([RNG.normal(size=(300, 2)), 0.1 * RNG.normal(size=(30, 2)) + 8.0])
    everyone, joined, dense, central, sparse, *others = clean_guesses(columns, np.random.default_rng(2), most=0.25)
    assert everyone.tolist() == list(range(330))
    assert set(joined) == set(range(300))
    assert (len(dense), len(central)) == (264, 247)
    assert len(set(sparse) & set(range(300, 330))) < 10
    left_out = np.setdiff1d(everyone, central)
    assert np.abs(columns[central]).max(1).max() <= np.abs(columns[left_out]).max(1).min()
    tenth = np.sort(cdist(columns, columns), axis=1)[:, 9]  # of all rows, itself among them
    assert tenth[dense].max() <= tenth[np.setdiff1d(everyone, dense)].min() + 1e-4
    assert all(len(rows) >= 0.75 * 330 for rows in others)


def test_a_part_begins_with_trimming():
    @dataclass(frozen=True)
    class Parts(Distances):
        def subset(self, rows, *, coarse=False):
            return replace(self, units=self.units[:rows])

    part = CappedProblem(Parts(UNITS), None, RobustOptions(sample=1001), 0).subset(10)
    assert torch.equal(part.base.units, UNITS[:10])
    assert (part.trimmings, part.options.sample) == (3, 333)


@pytest.mark.parametrize("unmatched", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("most", [0.3, 0.4])
def test_rows_that_take_no_part_count_among_those_that_are_left_out(most, unmatched):
    """Of a thousand rows 500 are far in the tails, and partial transport has left out some already."""
    rows = 1000
    losses = torch.cat([torch.linspace(0, 1, rows // 2), 50 + torch.arange(rows // 2)])[None].double()
    model = SimpleNamespace(unit_losses=lambda points: torch.linspace(0, 1, 400)[None].double())
    base = SimpleNamespace(
        unit_losses=lambda points: losses,
        simulated=lambda point, size, seed: model,
        laid_out_for=lambda points: base,
        reweighted=lambda weights: None,
    )
    judge = SimpleNamespace(explained=lambda points: torch.arange(rows)[None] >= unmatched * rows)
    problem = CappedProblem(base, judge, RobustOptions(most_dropped=most), 0).laid_out_for(torch.zeros(1, 2).double())
    assert float(1 - problem.weights.mean()) == pytest.approx(most, abs=2e-3)
