"""The course of a search, on problems that are small enough to know what must happen."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

import otpdag as otp
import otpdag.engine.search as search_module
from otpdag import mechanisms as m
from otpdag.engine import EM, LBFGS, Adam, Course
from otpdag.engine.checkpoint import Journal
from otpdag.engine.monitor import Monitor
from otpdag.engine.optimiser import Leg, Outcome
from otpdag.engine.search import Searcher, _Gains, restart_seed, search
from otpdag.errors import ModelError
from otpdag.objective import LossTerms, Moved, Problem
from otpdag.objective.problem import Alternatives

STRUCTURE = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()}).structure
SHAPES = {"x.loc": (1,), "x.scale": (1,)}
ALL = Course(short_steps=0, moves=0)


@dataclass(frozen=True)
class Bowls(Problem):
    """One bowl for each replica, whose floor depends on the side of the first coordinate from which it is entered.

    The lowest point is at ``centre``; ``floors`` are added where the first coordinate is negative, and positive.
    """

    centre: torch.Tensor
    floors: tuple[float, float] = (0.0, 0.0)
    rows_seen: int = 1000
    asked: list = field(default_factory=list)
    structure = STRUCTURE
    shapes = SHAPES

    @property
    def rows(self):
        return self.rows_seen

    def terms(self, point):
        gap = ((point.abs() - self.centre).square() * at(1.0, 20.0)).sum(-1)
        floor = torch.where(point[:, 0] < 0, *self.floors).to(point)
        return LossTerms.of(gap, reconstruction=gap + floor)

    def on_part(self, rows, *, coarse=False):
        self.asked.append((rows, coarse))
        return replace(self, rows_seen=min(rows, self.rows_seen))


def at(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def quiet(optimiser=None, **options):
    return Searcher(optimiser or LBFGS(steps=60), monitor=Monitor(show=False), **options)


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

        def terms(self, point):
            plain = super().terms(point)
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
    ended = search(problem, at([-3.0, 0.5], [4.0, 0.1]), Course(), quiet(), owners=[0, 1])
    assert ended.kept.tolist() == [0, 1]
    assert all(np.isnan(one.short_loss) for one in ended.restarts)  # without rivals there are no short runs


def test_starts_that_fail_come_last_and_never_win():
    class Cliff(Bowls):
        def terms(self, point):
            plain = super().terms(point)
            lost = torch.where(point[:, 1] > 5, torch.nan, 0.0).to(point)
            return plain + LossTerms.of(plain.total, direct=lost)

    problem = Cliff(at(2.0, 1.0), floors=(0.5, 0.0))
    starts = at([2.0, 6.0], [-3.0, 0.5], [2.1, 7.0])
    for course in (ALL, Course(short_steps=6)):
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
    search(problem, starts, Course(short_rows=700, short_steps=4, finalists=2), searcher)
    assert problem.asked == [(700, True)]
    names = [stage.name for stage in searcher.monitor.stages]
    assert names == ["8 short starts", "better 4 starts", "best 2 on all rows", "best start"]
    first, second, third, last = searcher.monitor.stages
    assert (len(first.losses), len(second.losses)) == (2, 2)
    order = np.argsort(first.losses[-1])
    assert set(second.starts) == set(order[:4].tolist())
    assert set(last.starts) < set(third.starts) < set(second.starts)
    assert first.objective == second.objective
    assert third.objective != first.objective


def test_short_runs_of_many_starts_see_fewer_rows_but_never_fewer_than_three_hundred():
    course = Course(short_rows=600, short_elements=10_000)
    assert [course.rows_for(points) for points in (1, 20, 1000)] == [600, 500, 300]


def test_starts_that_reached_the_same_loss_are_one_finalist():
    problem = Bowls(at(2.0, 1.0), floors=(0.5, 0.0))
    starts = at([2.1, 1.1], [1.9, 0.9], [2.2, 0.8], [-2.1, 1.1])
    searcher = quiet()
    search(problem, starts, Course(short_steps=20, halving=False, finalists=3), searcher)
    finalists = next(stage for stage in searcher.monitor.stages if stage.name.startswith("best 2"))
    assert 3 in finalists.starts  # the other bowl is worth a look, three times the same one is not
    ended = search(problem, starts, Course(short_steps=20, finalists=3), quiet())
    assert int(ended.kept[0]) != 3


def test_a_part_is_settled_on_before_all_rows_are_seen():
    problem = Bowls(at(2.0, 1.0), rows_seen=5000)
    searcher = quiet()
    search(problem, at([3.0, 3.0]), Course(part_rows=1000), searcher)
    assert [stage.name for stage in searcher.monitor.stages] == ["best start, part", "best start"]
    assert problem.asked == [(1000, False)]
    assert len(searcher.monitor.history) == len(searcher.monitor.stages[1].losses)  # parts are no history
    other = quiet()
    search(problem, at([3.0, 3.0]), Course(part_rows=6000), other)
    assert [stage.name for stage in other.monitor.stages] == ["best start"]


def test_a_stochastic_search_keeps_one_start_of_its_short_runs():
    @dataclass(frozen=True)
    class Noisy(Bowls):
        def sampled(self, point, streams, progress):
            return self.terms(point)

    searcher = quiet(Adam(steps=40, learning_rate=0.05))
    starts = at([-2.0, 1.0], [2.1, 1.0], [-2.3, 0.4])
    ended = search(Noisy(at(2.0, 1.0), floors=(0.5, 0.0)), starts, Course(short_share=0.25), searcher)
    assert [(stage.name, len(stage.losses)) for stage in searcher.monitor.stages] == [
        ("3 short starts", 10),
        ("best start", 40),
    ]
    assert ended.kept.tolist() == [1]


# -- problems that move -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wandering(Problem):
    """A bowl whose lowest point is moved on, some times."""

    centre: torch.Tensor
    left: int
    most: int | None = None
    structure = STRUCTURE
    shapes = SHAPES

    @property
    def rows(self):
        return 10

    @property
    def steps_before_move(self):
        return self.most

    def terms(self, point):
        gap = (point - self.centre).square().sum(-1)
        return LossTerms.of(gap, reconstruction=gap)

    def moved(self, point):
        if not self.left:
            return None
        return Moved(replace(self, centre=self.centre + 1, left=self.left - 1), point, f"move {self.left}")


def test_a_problem_is_followed_until_it_moves_no_more():
    searcher = quiet()
    ended = search(Wandering(at(0.0, 0.0), left=3), at([5.0, 5.0]), Course(), searcher)
    assert [stage.name for stage in searcher.monitor.stages] == ["best start", "move 3", "move 2", "move 1"]
    torch.testing.assert_close(ended.point, at([3.0, 3.0]))
    assert ended.problem.left == 0
    assert len({stage.objective for stage in searcher.monitor.stages}) == 4


def test_no_more_moves_than_the_course_allows():
    searcher = quiet()
    ended = search(Wandering(at(0.0, 0.0), left=3), at([5.0, 5.0]), Course(moves=1), searcher)
    torch.testing.assert_close(ended.point, at([1.0, 1.0]))
    assert ended.problem.left == 2


def test_a_problem_may_want_to_be_moved_before_it_has_converged():
    searcher = quiet()
    ended = search(Wandering(at(0.0, 0.0), left=2, most=2), at([5.0, 5.0]), Course(), searcher)
    assert [len(stage.losses) <= 2 for stage in searcher.monitor.stages] == [True] * 3
    assert ended.converged.tolist() == [True]  # it moves no more


def test_a_callback_that_stops_ends_the_moves():
    monitor = Monitor(show=False, callbacks=[lambda record: True])
    ended = search(
        Wandering(at(0.0, 0.0), left=3), at([5.0, 5.0]), Course(), Searcher(LBFGS(steps=60), monitor=monitor)
    )
    assert len(monitor.history) == 1
    assert ended.problem.left == 3


# -- what searches share ----------------------------------------------------------------------------------------------


def test_a_trace_sees_every_step_of_every_start():
    seen = []
    starts = at([-3.0, 0.5], [4.0, 0.1])
    searcher = quiet(LBFGS(steps=3), trace=lambda points: seen.append(points.clone()))
    ended = search(Bowls(at(2.0, 1.0)), starts, ALL, searcher)
    assert [points.shape for points in seen] == [(2, 2)] * ended.steps
    torch.testing.assert_close(seen[-1][ended.kept], ended.point)


def test_seeds_of_restarts_do_not_depend_on_how_many_there_are():
    few = search(Bowls(at(2.0, 1.0)), at([1.0, 1.0], [3.0, 1.0]), ALL, quiet(seed=5))
    assert [one.seed for one in few.restarts] == [restart_seed(5, 0), restart_seed(5, 1)]
    assert restart_seed(5, 0) != restart_seed(6, 0)


def test_expectation_maximisation_needs_updates_and_follows_them():
    @dataclass(frozen=True)
    class Halving(Bowls):
        def updated(self, point):
            return 0.5 * (point + self.centre), self.terms(point)

    problem = Halving(at(2.0, 1.0))
    outcome = EM(steps=200, growth=1.0).run(Leg(problem, at([5.0, 3.0], [1.0, 1.0]), 200), lambda progress: False)
    torch.testing.assert_close(outcome.point, at([2.0, 1.0], [2.0, 1.0]), atol=1e-3, rtol=0)
    assert outcome.converged.all()
    paced = EM(steps=200, growth=1.1).run(Leg(problem, at([5.0, 3.0]), 200), lambda progress: False)
    assert paced.steps < outcome.steps
    with pytest.raises(ModelError, match="Bowls has no closed-form updates"):
        EM().run(Leg(Bowls(at(2.0, 1.0)), at([5.0, 3.0]), 5), lambda progress: False)
    with pytest.raises(ModelError, match=r"Bowls is evaluated in closed form: use otp.engine.LBFGS"):
        Adam().run(Leg(Bowls(at(2.0, 1.0)), at([5.0, 3.0]), 5, seeds=[0]), lambda progress: False)


def test_courses_that_make_no_sense_are_refused():
    for settings, message in (
        ({"finalists": 0}, "finalists must be at least 1; got 0"),
        ({"short_rows": 0}, "short_rows must be at least 1; got 0"),
        ({"moves": -1}, "moves must not be negative; got -1"),
    ):
        with pytest.raises(ModelError, match=message):
            Course(**settings)


# -- alternatives: where else to look ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside(Bowls):
    """Two bowls that tell where the other one is; on a part of the rows one may look deeper than it is."""

    suggested: tuple[tuple[float, float], ...] = ()
    on_few: tuple[float, float] = (0.0, 0.0)

    def alternatives(self, point):
        part = replace(self, floors=self.on_few, rows_seen=20)
        return Alternatives(part, at(*self.suggested)) if len(self.suggested) else None


def stages_beside(problem, optimiser=None, **course):
    searcher = quiet(optimiser)
    ended = search(problem, at([-3.0, 0.5]), Course(**course), searcher)
    return ended, [stage.name for stage in searcher.monitor.stages]


def test_a_lower_optimum_beside_is_gone_to():
    both = {"floors": (0.5, 0.0), "on_few": (0.5, 0.0)}
    problem = Beside(at(2.0, 1.0), suggested=((2.1, 1.1), (-1.9, 0.9)), **both)
    ended, names = stages_beside(problem)
    torch.testing.assert_close(ended.point, at([2.0, 1.0]), rtol=0.0, atol=1e-4)
    assert names[:4] == ["best start", "alternatives", "alternatives", "best alternative"]
    assert ended.loss.tolist() == pytest.approx([0.0], abs=1e-8)
    assert ended.kept.tolist() == [0]
    assert len(ended.restarts) == 1


@pytest.mark.parametrize(
    ("floors", "on_few", "legs"),
    [
        ((0.0, 0.5), (0.0, 0.5), 1),  # far above after the first steps
        ((0.0, 0.005), (0.0, 0.005), 2),  # near, but above after the second
        ((0.0, 0.5), (0.5, 0.0), 3),  # below on a part of the rows, above on all
    ],
)
def test_an_optimum_is_kept_where_none_beside_is_lower(floors, on_few, legs):
    ended, names = stages_beside(Beside(at(2.0, 1.0), floors=floors, on_few=on_few, suggested=((2.1, 1.1),)))
    torch.testing.assert_close(ended.point, at([-2.0, 1.0]), rtol=0.0, atol=1e-4)
    assert names == ["best start", "alternatives", "alternatives", "best alternative"][: 1 + legs]
    assert bool(ended.converged)


def test_alternatives_are_not_asked_for_where_a_problem_may_not_move():
    problem = Beside(at(2.0, 1.0), floors=(0.5, 0.0), on_few=(0.5, 0.0), suggested=((2.1, 1.1),))
    _, names = stages_beside(problem, moves=0)
    assert names == ["best start"]


# -- moves that gain nothing ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Circling(Bowls):
    """A problem that is laid out anew without end, and tells a loss each time."""

    told: tuple[float, ...] = ()
    number: int = 0

    def moved(self, point):
        loss = None if self.number >= len(self.told) else at(self.told[self.number])
        return Moved(replace(self, number=self.number + 1), point + self.number, f"move {self.number}", loss)


def moves_of(told, **options):
    searcher = quiet()
    ended = search(Circling(at(2.0, 1.0), told=told), at([3.0, 0.5]), Course(**options), searcher)
    return ended, [stage.name for stage in searcher.monitor.stages]


def test_two_moves_in_a_row_without_a_gain_make_an_end_at_the_best():
    ended, stages = moves_of((12.865, 12.863, 12.8629, 12.864, 12.80))
    assert stages == ["best start", "move 0", "move 1", "move 2"]
    assert ended.loss.tolist() == [12.8629]
    assert ended.converged.tolist() == [True]
    torch.testing.assert_close(ended.point, at([4.0, 3.0]))  # where the third move was made, not where a leg ended
    assert ended.problem.number == 3


def test_moves_go_on_as_long_as_one_of_two_gains():
    falling = tuple(12.0 - 0.01 * step for step in range(20))
    _, stages = moves_of(falling)
    assert len(stages) == 1 + Course().moves
    _, stages = moves_of((12.0, 12.1, 11.9, 12.1, 11.8, 12.1, 12.1))
    assert len(stages) == 1 + 6
    _, stages = moves_of(falling, small_gain=0.01)  # a hundredth of 1 + 12 is more than each gains
    assert len(stages) == 1 + 2


def test_losses_that_do_not_compare_make_no_end():
    _, stages = moves_of(())
    assert len(stages) == 1 + Course().moves


def test_moves_end_after_two_in_a_row_without_a_gain_and_the_best_is_kept():
    problem = Bowls(torch.zeros(1, 2).double())

    def moved(loss):
        return Moved(problem, torch.full((1, 2), loss).double(), "moved", torch.tensor([loss]).double())

    assert not moved(1.0).curved_alike  # unless it is said, what was learned of the curvature is forgotten
    gains = _Gains(0.01)
    assert not gains.have_ended(Moved(problem, torch.zeros(1, 2), "moved"))  # without a loss there is nothing to say
    ended = [gains.have_ended(moved(loss)) for loss in (5.0, 4.0, 3.984375, 3.0, 3.5, 2.984375)]
    # 3.98 is lower, but by less than a hundredth of 1 + 3.98; so is 2.98, and it follows 3.5
    assert ended == [False, False, False, False, False, True]
    assert gains.best.loss.item() == 2.984375
    _, end = gains.end(Outcome(torch.ones(1, 2), torch.ones(1), torch.tensor([False]), torch.tensor([False]), 7))
    assert (end.point[0, 0].item(), end.loss.item(), end.converged.item(), end.steps) == (2.984375, 2.984375, True, 7)


@pytest.mark.parametrize("alike", [True, False])
def test_an_optimiser_goes_on_with_its_curvature_only_where_a_move_leaves_it_alike(monkeypatch, alike):
    @dataclass(frozen=True)
    class Moving(Bowls):
        left: int = 2

        def moved(self, point):
            if not self.left:
                return None
            return Moved(replace(self, left=self.left - 1, centre=self.centre + 1), point, "moved", None, alike)

    memories, run = [], Journal.run

    def noted(self, leg, *others):
        memories.append(dict(leg.memory))
        return run(self, leg, *others)

    monkeypatch.setattr(Journal, "run", noted)
    ended = search(Moving(at(2.0, 1.0)), at([3.0, 0.5]), Course(short_steps=0, moves=5), quiet())
    torch.testing.assert_close(ended.point, at([4.0, 3.0]), rtol=0, atol=1e-4)
    assert [bool(memory) for memory in memories] == [False, alike, alike]


def test_losses_of_opposite_sign_are_different_optima():
    """Of starts in the two bowls, one at -0.5 and one at 0.5, both are finalists; of two in the same, one is."""
    problem = Bowls(at(1.0, 1.0), floors=(-0.5, 0.5))
    field_ = search_module._Field(problem, Course(), quiet(), torch.zeros(4, 2).double(), None)
    order, judged = torch.tensor([2, 0, 1, 3]), at(0.5, 0.50005, -0.5, 0.9)
    assert field_._distinct(order, judged, 3, math.inf).tolist() == [2, 0, 3]
    assert field_._distinct(order, judged, 2, math.inf).tolist() == [2, 0]
    assert field_._distinct(order, judged, 3, 1.2).tolist() == [2, 0]  # the last is 1.4 above the best
    owned = search_module._Field(problem, Course(), quiet(), torch.zeros(4, 2).double(), [0, 1, 0, 1])
    assert owned._distinct(torch.tensor([2, 0, 1, 3]), at(0.5, 0.50005, -0.5, 0.50006), 1, math.inf).tolist() == [2, 1]


def test_gains_of_several_data_sets_are_counted_on_average():
    gains = _Gains(0.01)
    for losses, ended in (((3.0, 1.0), False), ((1.0, 2.99), False), ((2.0, 2.0), True)):
        assert gains.have_ended(Moved(None, at(0.0), "", at(*losses))) is ended
    assert gains.best.loss.tolist() == [1.0, 2.99]
    assert not _Gains(0.01).have_ended(Moved(None, at(0.0), ""))


def test_what_was_learned_is_carried_to_another_point_in_its_own_coordinates():
    point, origin = at(3.0, 8.0), at(1.0, 2.0)
    assert search_module._carried({"point": origin}, point) == {}
    assert search_module._carried({"axes.origin": origin, "axes.matrix": at(1.0)}, point) == {}
    found = search_module._carried({"axes.origin": origin, "point": origin, "more": at(7.0)}, point)
    assert found["point"].tolist() == [2.0, 6.0]
    assert found["more"].item() == 7.0
    scaled = search_module._carried({"axes.origin": origin, "axes.scale": at(2.0, 3.0)}, point)
    assert scaled["point"].tolist() == [1.0, 2.0]


def test_losses_of_failed_starts_are_infinite():
    found = search_module._spoilt(at(1.0, 2.0, torch.nan, torch.inf), torch.tensor([False, True, False, False]))
    assert found.tolist() == [1.0] + [torch.inf] * 3


@pytest.mark.parametrize("seed", range(5))
def test_starts_are_chosen_data_set_by_data_set(seed):
    """The lowest of each, failed ones last; of finalists those that differ, and are not far above the best."""
    rng = np.random.default_rng(seed)
    owners = rng.integers(0, 3, 14).tolist()
    losses = np.round(rng.normal(size=14), 1) * rng.choice([1.0, 1.00005], 14)
    failed = rng.random(14) < 0.2
    course = Course(same_loss=1e-3)
    starts = search_module._Field(None, course, None, torch.zeros(14, 2), owners)
    alive = torch.as_tensor(np.flatnonzero(rng.random(14) < 0.9))
    judged, spoilt = torch.as_tensor(losses), torch.as_tensor(failed)
    own = np.where(failed, np.inf, losses)
    for many in (1, 2, 14):
        expected = []
        for owner in sorted(set(owners)):
            mine = [n for n in alive.tolist() if owners[n] == owner]
            expected += sorted(mine, key=lambda n: own[n])[:many]
        assert starts._best(alive, judged[alive], spoilt[alive], many).tolist() == expected
    order = starts._best(alive, judged[alive], None, 14)
    for many, most in ((2, np.inf), (3, 0.5), (1, 0.1)):
        chosen = []
        for start in order.tolist():
            rivals = [n for n in chosen if owners[n] == owners[start]]
            same = [n for n in rivals if abs(losses[n] - losses[start]) <= 1e-3 * (1 + abs(losses[start]))]
            too_far = bool(rivals) and losses[start] - losses[rivals[0]] > most
            if not same and not too_far and len(rivals) < many:
                chosen.append(start)
        assert starts._distinct(order, judged, many, most).tolist() == chosen


@pytest.mark.parametrize(("rows", "many"), [(None, False), (4999, True), (5000, False), (6000, False)])
def test_finalists_meet_many_rows_or_all(rows, many):
    problem = Bowls(at(2.0, 1.0), floors=(0.5, 0.0), rows_seen=5000)
    starts = at([2.1, 1.1], [-2.1, 1.1], [2.3, 0.7], [-1.8, 0.9])
    searcher = quiet()
    course = Course(short_rows=700, short_steps=20, halving=False, finalists=2, finalist_rows=rows)
    search(problem, starts, course, searcher)
    names = [stage.name for stage in searcher.monitor.stages]
    assert names == ["4 short starts", f"best 2 on {'many' if many else 'all'} rows", "best start"]
    assert problem.asked == [(700, True), *([(rows, False)] if many else [])]
