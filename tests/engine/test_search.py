"""Searches: how much work each stage does, which starts go on, and where they end."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from otpdag.engine import EM, Adam, Deterministic, Run, SearchSchedule, search
from otpdag.engine.search import _unfinished
from otpdag.errors import ModelError
from otpdag.problem import LossTerms
from tests.bowls import ALL, Bowls, at, quiet

# -- how much work each stage of a search does ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "rows"),
    [
        (1, 600),  # cheap rows: as many as are wanted
        (250, 600),  # 600 * 250 is all that is allowed
        (300, 500),
        (499, 300),
        (100_000, 300),  # never fewer
    ],
)
def test_rows_fall_with_the_points_of_a_row(points, rows):
    assert SearchSchedule().rows_for(points) == rows


def test_no_more_rows_than_are_asked_for():
    few = SearchSchedule(short_rows=50)
    assert few.rows_for(1) == few.rows_for(10**9) == 50
    assert 300 > 50


@pytest.mark.parametrize("name", ["short_rows", "short_elements", "finalists", "finalist_steps", "alternatives_kept"])
def test_stages_of_nothing_are_refused(name):
    with pytest.raises(ModelError, match=f"{name} must be a whole number of at least 1; got 0"):
        SearchSchedule(**{name: 0})


@pytest.mark.parametrize("name", ["short_steps", "short_moves", "finalist_moves", "moves"])
def test_stages_that_may_be_left_out_are_not_negative(name):
    assert getattr(SearchSchedule(**{name: 0}), name) == 0
    with pytest.raises(ModelError, match=f"{name} must be a whole number of at least 0; got -1"):
        SearchSchedule(**{name: -1})


def test_alternatives_take_at_least_a_step():
    with pytest.raises(ModelError, match="alternative_steps must be a number of at least 1; got 0"):
        SearchSchedule(alternative_steps=(3, 6, 0))


# -- the course of a search, on problems that are small enough to know what must happen -------------------------------


def test_a_run_without_time_for_its_first_step_is_where_it_began_and_knows_no_loss():
    began = _unfinished(Run(Bowls(2), at(1.0, 2.0), 5), [])
    assert torch.equal(began.point, at(1.0, 2.0))
    assert bool(torch.isnan(began.loss).all())
    assert not began.converged.any()
    assert not began.failed.any()
    assert began.steps == 0


# -- the best is kept -------------------------------------------------------------------------------------------------


def test_of_all_starts_the_one_with_the_lowest_end_is_kept():
    problem = Bowls(at(2.0, 1.0), floors=(0.5, 0.0))
    starts = at([-3.0, 0.5], [-1.0, 2.0], [4.0, 0.1], [-2.5, 3.0])
    ended = search(problem, starts, ALL, quiet())
    assert ended.kept.tolist() == [2]
    torch.testing.assert_close(ended.point, at([2.0, 1.0]))
    assert [one.kept for one in ended.restarts] == [False, False, True, False]
    np.testing.assert_allclose([one.loss for one in ended.restarts], [0.5, 0.5, 0.0, 0.5], atol=1e-8)
    assert ended.converged.tolist() == [True]


def test_each_data_set_keeps_its_own_best():
    """Starts of two data sets compete with those of their own data set only, although one set is far worse."""

    @dataclass(frozen=True)
    class Two(Bowls):
        owners: torch.Tensor = field(default_factory=lambda: torch.tensor([0, 0, 1, 1]))

        def loss(self, point):
            plain = super().loss(point)
            own = torch.where(self.owners[: len(point)] == 1, 100.0, 0.0).to(point)
            return plain + LossTerms.of(plain.total, direct=own)

    problem = Two(at(2.0, 1.0), floors=(0.5, 0.0))
    starts = at([-3.0, 0.5], [4.0, 0.1], [3.0, 3.0], [-2.5, 3.0])
    ended = search(problem, starts, ALL, quiet(), owners=[0, 0, 1, 1])
    assert ended.kept.tolist() == [1, 2]
    np.testing.assert_allclose(ended.loss, [0.0, 100.0], atol=1e-8)
    assert ended.point.shape == (2, 2)
    single = search(problem, starts, ALL, quiet())
    assert single.kept.tolist() == [1]


def test_a_data_set_with_one_start_keeps_it():
    problem = Bowls(at(2.0, 1.0), floors=(0.5, 0.0))
    ended = search(problem, at([-3.0, 0.5], [4.0, 0.1]), SearchSchedule(), quiet(), owners=[0, 1])
    assert ended.kept.tolist() == [0, 1]
    assert all(np.isnan(one.short_loss) for one in ended.restarts)  # without rivals there are no short runs


def test_starts_that_fail_come_last_and_never_win():
    class Cliff(Bowls):
        def loss(self, point):
            plain = super().loss(point)
            lost = torch.where(point[:, 1] > 5, torch.nan, 0.0).to(point)
            return plain + LossTerms.of(plain.total, direct=lost)

    problem = Cliff(at(2.0, 1.0), floors=(0.5, 0.0))
    starts = at([2.0, 6.0], [-3.0, 0.5], [2.1, 7.0])
    for course in (ALL, SearchSchedule(short_steps=6)):
        ended = search(problem, starts, course, quiet())
        assert ended.kept.tolist() == [1]
        assert ended.failed.tolist() == [False]
        torch.testing.assert_close(ended.point, at([-2.0, 1.0]), atol=1e-6, rtol=0)
    lost = search(problem, starts[[0, 2]], ALL, quiet())
    assert lost.failed.tolist() == [True]
    torch.testing.assert_close(lost.point, starts[:1])  # where it was good last
    assert not lost.converged.any()


# -- stages -----------------------------------------------------------------------------------------------------------


def test_short_runs_see_a_part_and_half_of_the_starts_go_on():
    problem = Bowls(at(2.0, 1.0), floors=(0.5, 0.0), rows_seen=5000)
    generator = torch.Generator().manual_seed(0)
    starts = 3 * torch.randn(8, 2, generator=generator, dtype=torch.float64)
    searcher = quiet()
    search(problem, starts, SearchSchedule(short_rows=700, short_steps=4, finalists=2), searcher)
    assert problem.asked == [(700, True)]
    names = [stage.name for stage in searcher.monitor.stages]
    assert names == ["8 short starts", "better 4 starts", "better 2 starts", "best 2 on all rows", "best start"]
    first, second, third, fourth, last = searcher.monitor.stages
    assert [len(stage.losses) for stage in (first, second, third)] == [1, 1, 2]
    order = np.argsort(first.losses[-1])
    assert set(second.starts) == set(order[:4].tolist())
    assert set(last.starts) < set(fourth.starts) == set(third.starts) < set(second.starts)
    assert first.objective == second.objective == third.objective
    assert fourth.objective != first.objective


def test_starts_of_several_data_sets_all_run_to_their_ends():
    problem = Bowls(at(2.0, 1.0), floors=(0.5, 0.0), rows_seen=5000)
    starts, searcher = at([-2.1, 1.1], [2.1, 1.1], [-2.3, 0.9], [-1.9, 1.1]), quiet()
    ended = search(problem, starts, SearchSchedule(short_rows=700, short_steps=4), searcher, [0, 0, 1, 1])
    assert [stage.name for stage in searcher.monitor.stages] == ["best start"]
    assert (int(ended.kept[0]), int(ended.kept[1]) in (2, 3)) == (1, True)
    np.testing.assert_allclose(ended.loss, [0.0, 0.5], atol=1e-6)


def test_short_runs_of_many_starts_see_fewer_rows_but_never_fewer_than_three_hundred():
    course = SearchSchedule(short_rows=600, short_elements=10_000)
    assert [course.rows_for(points) for points in (1, 20, 1000)] == [600, 500, 300]


def test_starts_that_reached_the_same_loss_are_one_finalist():
    problem = Bowls(at(2.0, 1.0), floors=(0.5, 0.0))
    starts = at([2.1, 1.1], [1.9, 0.9], [2.2, 0.8], [-2.1, 1.1])
    searcher = quiet()
    search(problem, starts, SearchSchedule(short_steps=20, halving=False, finalists=3), searcher)
    finalists = next(stage for stage in searcher.monitor.stages if stage.name.startswith("best 2"))
    assert 3 in finalists.starts  # the other bowl is worth a look, three times the same one is not
    ended = search(problem, starts, SearchSchedule(short_steps=20, finalists=3), quiet())
    assert int(ended.kept[0]) != 3


def test_a_part_is_settled_on_before_all_rows_are_seen():
    problem = Bowls(at(2.0, 1.0), rows_seen=5000)
    searcher = quiet()
    search(problem, at([3.0, 3.0]), SearchSchedule(part_rows=1000), searcher)
    assert [stage.name for stage in searcher.monitor.stages] == ["best start, part", "best start"]
    assert problem.asked == [(1000, False)]
    assert len(searcher.monitor.history) == len(searcher.monitor.stages[1].losses)  # parts are no history
    other = quiet()
    search(problem, at([3.0, 3.0]), SearchSchedule(part_rows=6000), other)
    assert [stage.name for stage in other.monitor.stages] == ["best start"]


def test_a_stochastic_search_keeps_one_start_of_its_short_runs():
    @dataclass(frozen=True)
    class Noisy(Bowls):
        def sampled(self, point, streams, progress):
            return self.loss(point)

    searcher = quiet(Adam(steps=40, learning_rate=0.05))
    starts = at([-2.0, 1.0], [2.1, 1.0], [-2.3, 0.4])
    ended = search(Noisy(at(2.0, 1.0), floors=(0.5, 0.0)), starts, SearchSchedule(short_share=0.25), searcher)
    assert [(stage.name, len(stage.losses)) for stage in searcher.monitor.stages] == [
        ("3 short starts", 10),
        ("best start", 40),
    ]
    assert ended.kept.tolist() == [1]


# -- what searches share ----------------------------------------------------------------------------------------------


def test_a_trace_sees_every_step_of_every_start():
    seen = []
    starts = at([-3.0, 0.5], [4.0, 0.1])
    searcher = quiet(Deterministic(steps=3), trace=lambda points: seen.append(points.clone()))
    ended = search(Bowls(at(2.0, 1.0)), starts, ALL, searcher)
    assert [points.shape for points in seen] == [(2, 2)] * ended.steps
    torch.testing.assert_close(seen[-1][ended.kept], ended.point)


def test_seeds_of_restarts_do_not_depend_on_how_many_there_are():
    starts = at([1.0, 1.0], [3.0, 1.0], [2.0, 2.0])
    few, many, other = (
        [one.seed for one in search(Bowls(at(2.0, 1.0)), starts[:number], ALL, quiet(seed=seed)).restarts]
        for number, seed in ((2, 5), (3, 5), (3, 6))
    )
    assert few == many[:2]
    assert len({*many, *other}) == 6


def test_expectation_maximisation_needs_updates_and_follows_them():
    @dataclass(frozen=True)
    class Halving(Bowls):
        def update(self, point):
            return 0.5 * (point + self.centre), self.loss(point)

    problem = Halving(at(2.0, 1.0))
    outcome = EM(steps=200, growth=1.0).run(Run(problem, at([5.0, 3.0], [1.0, 1.0]), 200), lambda progress: False)
    torch.testing.assert_close(outcome.point, at([2.0, 1.0], [2.0, 1.0]), atol=1e-3, rtol=0)
    assert outcome.converged.all()
    paced = EM(steps=200, growth=1.1).run(Run(problem, at([5.0, 3.0]), 200), lambda progress: False)
    assert paced.steps < outcome.steps
    with pytest.raises(ModelError, match="Bowls has no closed-form updates"):
        EM().run(Run(Bowls(at(2.0, 1.0)), at([5.0, 3.0]), 5), lambda progress: False)
    with pytest.raises(ModelError, match=r"Bowls is evaluated in closed form: use otp.engine.Deterministic"):
        Adam().run(Run(Bowls(at(2.0, 1.0)), at([5.0, 3.0]), 5, seeds=[0]), lambda progress: False)


def test_courses_that_make_no_sense_are_refused():
    for settings, message in (
        ({"finalists": 0}, "finalists must be a whole number of at least 1; got 0"),
        ({"short_rows": 0}, "short_rows must be a whole number of at least 1; got 0"),
        ({"moves": -1}, "moves must be a whole number of at least 0; got -1"),
    ):
        with pytest.raises(ModelError, match=message):
            SearchSchedule(**settings)


@pytest.mark.parametrize(("rows", "many"), [(None, False), (4999, True), (5000, False), (6000, False)])
def test_finalists_meet_many_rows_or_all(rows, many):
    problem = Bowls(at(2.0, 1.0), floors=(0.5, 0.0), rows_seen=5000)
    starts = at([2.1, 1.1], [-2.1, 1.1], [2.3, 0.7], [-1.8, 0.9])
    searcher = quiet()
    course = SearchSchedule(short_rows=700, short_steps=20, halving=False, finalists=2, finalist_rows=rows)
    search(problem, starts, course, searcher)
    names = [stage.name for stage in searcher.monitor.stages]
    assert names == ["4 short starts", f"best 2 on {'many' if many else 'all'} rows", "best start"]
    assert problem.asked == [(700, True), *([(rows, False)] if many else [])]
