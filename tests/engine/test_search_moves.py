"""Where a search goes when a run has ended: problems that move, ways out beside an optimum, and when that ends."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from otpdag.engine import Deterministic, Monitor, Outcome, Searcher, SearchSchedule, search
from otpdag.engine.optimiser import carried
from otpdag.engine.search import _Field, _Gains, _spoilt
from otpdag.problem import LossTerms, Pace, Problem, Proposals, Refinement
from tests.bowls import SHAPES, STRUCTURE, Bowls, at, quiet

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
    def pace(self):
        return Pace(steps=self.most)

    def loss(self, point):
        gap = (point - self.centre).square().sum(-1)
        return LossTerms.of(gap, reconstruction=gap)

    def refine(self, point):
        if not self.left:
            return None
        return Refinement(replace(self, centre=self.centre + 1, left=self.left - 1), point, f"move {self.left}")


def test_a_problem_is_followed_until_it_moves_no_more():
    searcher = quiet()
    ended = search(Wandering(at(0.0, 0.0), left=3), at([5.0, 5.0]), SearchSchedule(), searcher)
    assert [stage.name for stage in searcher.monitor.stages] == ["best start", "move 3", "move 2", "move 1"]
    torch.testing.assert_close(ended.point, at([3.0, 3.0]))
    assert ended.problem.left == 0
    assert len({stage.objective for stage in searcher.monitor.stages}) == 4


def test_no_more_moves_than_the_course_allows():
    searcher = quiet()
    ended = search(Wandering(at(0.0, 0.0), left=3), at([5.0, 5.0]), SearchSchedule(moves=1), searcher)
    torch.testing.assert_close(ended.point, at([1.0, 1.0]))
    assert ended.problem.left == 2


def test_a_problem_may_want_to_be_moved_before_it_has_converged():
    searcher = quiet()
    ended = search(Wandering(at(0.0, 0.0), left=2, most=2), at([5.0, 5.0]), SearchSchedule(), searcher)
    assert [len(stage.losses) <= 2 for stage in searcher.monitor.stages] == [True] * 3
    assert ended.converged.tolist() == [True]  # it moves no more


def test_a_callback_that_stops_ends_the_moves():
    monitor = Monitor(show=False, callbacks=[lambda record: True])
    ended = search(
        Wandering(at(0.0, 0.0), left=3),
        at([5.0, 5.0]),
        SearchSchedule(),
        Searcher(Deterministic(steps=60), monitor=monitor),
    )
    assert len(monitor.history) == 1
    assert ended.problem.left == 3


# -- alternatives: where else to look ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside(Bowls):
    """Two bowls that tell where the other one is; on a part of the rows one may look deeper than it is."""

    suggested: tuple[tuple[float, float], ...] = ()
    on_few: tuple[float, float] = (0.0, 0.0)

    def proposals(self, point):
        part = replace(self, floors=self.on_few, rows_seen=20)
        return Proposals(part, at(*self.suggested)) if len(self.suggested) else None


def stages_beside(problem, optimiser=None, **course):
    searcher = quiet(optimiser)
    ended = search(problem, at([-3.0, 0.5]), SearchSchedule(**course), searcher)
    return ended, [stage.name for stage in searcher.monitor.stages]


def test_a_lower_optimum_beside_is_gone_to():
    both = {"floors": (0.5, 0.0), "on_few": (0.5, 0.0)}
    problem = Beside(at(2.0, 1.0), suggested=((2.1, 1.1), (-1.9, 0.9)), **both)
    ended, names = stages_beside(problem)
    torch.testing.assert_close(ended.point, at([2.0, 1.0]), rtol=0.0, atol=1e-4)
    assert names[:5] == ["best start", *["alternatives"] * 3, "best alternative"]
    assert ended.loss.tolist() == pytest.approx([0.0], abs=1e-8)
    assert ended.kept.tolist() == [0]
    assert len(ended.restarts) == 1


@pytest.mark.parametrize(
    ("floors", "on_few", "runs"),
    [
        ((0.0, 0.5), (0.0, 0.5), 1),  # far above after the first steps
        ((0.0, 0.005), (0.0, 0.005), 3),  # near, but above after the last
        ((0.0, 0.5), (0.5, 0.0), 4),  # below on a part of the rows, above on all
    ],
)
def test_an_optimum_is_kept_where_none_beside_is_lower(floors, on_few, runs):
    ended, names = stages_beside(Beside(at(2.0, 1.0), floors=floors, on_few=on_few, suggested=((2.1, 1.1),)))
    torch.testing.assert_close(ended.point, at([-2.0, 1.0]), rtol=0.0, atol=1e-4)
    assert names == ["best start", *["alternatives"] * 3, "best alternative"][: 1 + runs]
    assert bool(ended.converged)


def test_alternatives_are_not_asked_for_where_a_problem_may_not_move():
    problem = Beside(at(2.0, 1.0), floors=(0.5, 0.0), on_few=(0.5, 0.0), suggested=((2.1, 1.1),))
    _, names = stages_beside(problem, moves=0)
    assert names == ["best start"]


def test_of_many_alternatives_the_lowest_few_go_on():
    both = {"floors": (0.5, 0.0), "on_few": (0.5, 0.0)}
    suggested = (*((-2.0 + 0.01 * number, 1.0) for number in range(5)), (2.1, 1.1))
    searcher = quiet()
    ended = search(Beside(at(2.0, 1.0), suggested=suggested, **both), at([-3.0, 0.5]), SearchSchedule(), searcher)
    tried = [len(stage.starts) for stage in searcher.monitor.stages if stage.name == "alternatives"]
    assert tried[:3] == [7, 4, 4]  # the optimum goes along
    torch.testing.assert_close(ended.point, at([2.0, 1.0]), rtol=0.0, atol=1e-4)


# -- patience ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Impatient(Bowls):
    """A bowl that can be left for the other one, if it is asked."""

    after: int | None = 2
    leaves: bool = True

    @property
    def pace(self):
        return Pace(patience=self.after)

    def refine(self, point):
        self.asked.append(point)
        across = torch.where(point < 0, -point, point)
        return Refinement(self, across, "across") if self.leaves and bool((point < 0).any()) else None


def test_a_long_leg_is_asked_once_whether_it_moves_already():
    left, kept, waited = (
        Impatient(at(2.0, 1.0), floors=(0.5, 0.0), **how) for how in ({}, {"leaves": False}, {"after": None})
    )
    names, ends, first = {}, {}, {}
    for name, problem in (("left", left), ("kept", kept), ("waited", waited)):
        searcher = quiet()
        ends[name] = search(problem, at([-3.0, 0.5]), SearchSchedule(), searcher)
        names[name] = [(stage.name, len(stage.losses)) for stage in searcher.monitor.stages]
        first[name] = problem.asked[0]
    assert names["left"][0] == ("best start", 2)
    assert [name for name, _ in names["left"]] == ["best start", "across"]  # begun where it moved to, it stays there
    assert [name for name, _ in names["kept"]] == ["best start", "best start"]  # and goes on to its end
    assert names["kept"][0][1] == 2
    assert names["waited"][0][1] > 2
    assert float((first["left"].abs() - at(2.0, 1.0)).abs().max()) > 1e-3  # long before its end
    for name, side in (("left", 2.0), ("kept", -2.0), ("waited", 2.0)):
        torch.testing.assert_close(ends[name].point, at([side, 1.0]), rtol=0.0, atol=1e-4)
        assert bool(ends[name].converged)


@pytest.mark.parametrize("starts", [[[-3.0, 0.5]], [[-3.0, 0.5], [-2.5, 0.7]]], ids=["may not", "several"])
def test_a_leg_is_not_asked_where_it_may_not_move_or_others_would_wait(starts):
    problem, searcher = Impatient(at(2.0, 1.0), floors=(0.5, 0.0)), quiet()
    course = SearchSchedule(short_steps=0, moves=0 if len(starts) == 1 else 12)
    search(problem, at(*starts), course, searcher, list(range(len(starts))))
    first = searcher.monitor.stages[0]
    assert len(first.losses) > 2
    assert first.name == "best start"


# -- moves that gain nothing ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Circling(Bowls):
    """A problem that is laid out anew without end, and tells a loss each time."""

    told: tuple[float, ...] = ()
    number: int = 0

    def refine(self, point):
        loss = None if self.number >= len(self.told) else at(self.told[self.number])
        return Refinement(replace(self, number=self.number + 1), point + self.number, f"move {self.number}", loss)


def moves_of(told, **options):
    searcher = quiet()
    ended = search(Circling(at(2.0, 1.0), told=told), at([3.0, 0.5]), SearchSchedule(**options), searcher)
    return ended, [stage.name for stage in searcher.monitor.stages]


def test_two_moves_in_a_row_without_a_gain_make_an_end_at_the_best():
    ended, stages = moves_of((12.865, 12.863, 12.8629, 12.864, 12.80))
    assert stages == ["best start", "move 0", "move 1", "move 2"]
    assert ended.loss.tolist() == [12.8629]
    assert ended.converged.tolist() == [True]
    torch.testing.assert_close(ended.point, at([4.0, 3.0]))  # where the third move was made, not where a run ended
    assert ended.problem.number == 3


def test_moves_go_on_as_long_as_one_of_two_gains():
    falling = tuple(12.0 - 0.01 * step for step in range(20))
    _, stages = moves_of(falling)
    assert len(stages) == 1 + SearchSchedule().moves
    _, stages = moves_of((12.0, 12.1, 11.9, 12.1, 11.8, 12.1, 12.1))
    assert len(stages) == 1 + 6
    _, stages = moves_of(falling, small_gain=0.01)  # a hundredth of 1 + 12 is more than each gains
    assert len(stages) == 1 + 2


def test_losses_that_do_not_compare_make_no_end():
    _, stages = moves_of(())
    assert len(stages) == 1 + SearchSchedule().moves


def test_moves_end_after_two_in_a_row_without_a_gain_and_the_best_is_kept():
    problem = Bowls(torch.zeros(1, 2).double())

    def moved(loss):
        return Refinement(problem, torch.full((1, 2), loss).double(), "moved", torch.tensor([loss]).double())

    assert not moved(1.0).curved_alike  # unless it is said, what was learned of the curvature is forgotten
    gains = _Gains(0.01)
    assert not gains.have_ended(
        Refinement(problem, torch.zeros(1, 2), "moved")
    )  # without a loss there is nothing to say
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

        def refine(self, point):
            if not self.left:
                return None
            return Refinement(replace(self, left=self.left - 1, centre=self.centre + 1), point, "moved", None, alike)

    memories, original = [], Deterministic.run

    def noted(self, run, *others):
        memories.append(dict(run.memory))
        return original(self, run, *others)

    monkeypatch.setattr(Deterministic, "run", noted)
    ended = search(Moving(at(2.0, 1.0)), at([3.0, 0.5]), SearchSchedule(short_steps=0, moves=5), quiet())
    torch.testing.assert_close(ended.point, at([4.0, 3.0]), rtol=0, atol=1e-4)
    assert [bool(memory) for memory in memories] == [False, alike, alike]


def test_gains_of_several_data_sets_are_counted_on_average():
    gains = _Gains(0.01)
    for losses, ended in (((3.0, 1.0), False), ((1.0, 2.99), False), ((2.0, 2.0), True)):
        assert gains.have_ended(Refinement(None, at(0.0), "", at(*losses))) is ended
    assert gains.best.loss.tolist() == [1.0, 2.99]
    assert not _Gains(0.01).have_ended(Refinement(None, at(0.0), ""))


def test_what_was_learned_is_carried_to_another_point_in_its_own_coordinates():
    point, origin = at(3.0, 8.0), at(1.0, 2.0)
    assert carried({"point": origin}, point) == {}
    assert carried({"axes.origin": origin, "axes.matrix": at(1.0)}, point) == {}
    found = carried({"axes.origin": origin, "point": origin, "more": at(7.0)}, point)
    assert found["point"].tolist() == [2.0, 6.0]
    assert found["more"].item() == 7.0
    scaled = carried({"axes.origin": origin, "axes.scale": at(2.0, 3.0)}, point)
    assert scaled["point"].tolist() == [1.0, 2.0]


# -- which starts go on -----------------------------------------------------------------------------------------------


def test_losses_of_opposite_sign_are_different_optima():
    """Of starts in the two bowls, one at -0.5 and one at 0.5, both are finalists; of two in the same, one is."""
    problem = Bowls(at(1.0, 1.0), floors=(-0.5, 0.5))
    field_ = _Field(problem, SearchSchedule(), quiet(), torch.zeros(4, 2).double(), None)
    order, judged = torch.tensor([2, 0, 1, 3]), at(0.5, 0.50005, -0.5, 0.9)
    assert field_._distinct(order, judged, 3, math.inf).tolist() == [2, 0, 3]
    assert field_._distinct(order, judged, 2, math.inf).tolist() == [2, 0]
    assert field_._distinct(order, judged, 3, 1.2).tolist() == [2, 0]  # the last is 1.4 above the best


def test_losses_of_failed_starts_are_infinite():
    found = _spoilt(at(1.0, 2.0, torch.nan, torch.inf), torch.tensor([False, True, False, False]))
    assert found.tolist() == [1.0] + [torch.inf] * 3


@pytest.mark.parametrize("seed", range(5))
def test_starts_are_chosen_data_set_by_data_set(seed):
    """The lowest of each, failed ones last; of finalists those that differ, and are not far above the best."""
    rng = np.random.default_rng(seed)
    owners = rng.integers(0, 3, 14).tolist()
    losses = np.round(rng.normal(size=14), 1) * rng.choice([1.0, 1.00005], 14)
    failed = rng.random(14) < 0.2
    course = SearchSchedule(same_loss=1e-3)
    starts = _Field(None, course, None, torch.zeros(14, 2), owners)
    alive = torch.as_tensor(np.flatnonzero(rng.random(14) < 0.9))
    judged, spoilt = torch.as_tensor(losses), torch.as_tensor(failed)
    own = np.where(failed, np.inf, losses)
    for many in (1, 2, 14):
        expected = []
        for owner in sorted(set(owners)):
            mine = [n for n in alive.tolist() if owners[n] == owner]
            expected += sorted(mine, key=lambda n: own[n])[:many]
        assert starts._best(alive, judged[alive], spoilt[alive], many).tolist() == expected
    starts = _Field(None, course, None, torch.zeros(14, 2), None)  # finalists are of one data set
    order = starts._best(alive, judged[alive], None, 14)
    for many, most in ((2, np.inf), (3, 0.5), (1, 0.1)):
        chosen = []
        for start in order.tolist():
            same = [n for n in chosen if abs(losses[n] - losses[start]) <= 1e-3 * (1 + abs(losses[start]))]
            too_far = bool(chosen) and losses[start] - losses[chosen[0]] > most
            if not same and not too_far and len(chosen) < many:
                chosen.append(start)
        assert starts._distinct(order, judged, many, most).tolist() == chosen
