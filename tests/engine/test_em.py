"""Expectation-maximisation on toy problems whose updates are known."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from otpdag.engine.optimiser import Run
from otpdag.engine.updates import EM, _EMState
from otpdag.errors import ModelError
from otpdag.problem import LossTerms, Problem, Updates


def at(*rows):
    return torch.tensor(rows, dtype=torch.float64)


@dataclass(frozen=True)
class Pulled(Problem):
    """A round bowl; an update goes a share of the way to its centre."""

    centre: torch.Tensor
    share: float = 0.5
    mask: torch.Tensor | None = None
    structure: object = None
    shapes: dict = field(default_factory=dict)

    @property
    def rows(self):
        return 1

    @property
    def updates(self):
        return Updates(stretched=self.mask)

    def loss(self, point):
        loss = (point - self.centre).square().sum(-1)
        return LossTerms.of(loss, reconstruction=loss)

    def update(self, point):
        return point + self.share * (self.centre - point), self.loss(point)


def trail(em, problem, start, steps, resume=None, tolerance=0.0):
    """Points and snapshots after every step."""
    points, snapshots = [], []

    def watch(progress):
        points.append(progress.points.clone())
        snapshots.append({name: value.clone() for name, value in progress.snapshot().items()})
        return False

    outcome = em.run(Run(problem, start, steps, tolerance), watch, resume)
    return outcome, points, snapshots


def test_plain_updates_shrink_the_distance_by_a_half_each():
    outcome, points, _ = trail(EM(growth=1.0), Pulled(at(2.0, -1.0)), at([10.0, -1.0], [2.0, 3.0]), 5)
    distances = [(one - at([2.0, -1.0])).norm(dim=-1) for one in points]
    torch.testing.assert_close(torch.stack(distances), torch.outer(0.5 ** torch.arange(1.0, 6).double(), at(8.0, 4.0)))
    assert outcome.steps == 5
    assert not outcome.converged.any()
    # the loss is that of the point before the last update
    torch.testing.assert_close(outcome.loss, at(8.0, 4.0).square() * 0.25**4)


def test_it_ends_at_the_fixed_point():
    outcome, _, _ = trail(EM(tolerance=1e-12), Pulled(at(2.0, -1.0)), at([10.0, -1.0]), 200, tolerance=None)
    assert outcome.converged.all()
    assert not outcome.failed.any()
    torch.testing.assert_close(outcome.point, at([2.0, -1.0]), atol=1e-5, rtol=0)


def test_the_pace_grows_while_the_loss_falls_and_no_further_than_the_longest():
    _, _, snapshots = trail(EM(growth=1.5, longest=3.0), Pulled(at(0.0), share=0.05), at([1.0]), 6)
    expected = [1.5, 1.5**2, 3.0, 3.0, 3.0, 3.0]
    torch.testing.assert_close(torch.cat([one["pace"] for one in snapshots]), at(*expected))


def test_the_pace_is_one_again_when_the_loss_rises():
    # an update that ends at the centre: a pace above two goes further away than it came from
    outcome, points, snapshots = trail(EM(growth=1.5, longest=4.0), Pulled(at(0.0), share=1.0), at([1.0]), 4)
    paces = torch.cat([one["pace"] for one in snapshots])
    torch.testing.assert_close(paces, at(1.5, 2.25, 1.0, 1.5))
    torch.testing.assert_close(torch.cat(points)[:, 0], at(-0.5, 0.625, 0.0, 0.0))
    assert outcome.loss.item() == 0.0


def test_replicas_have_paces_of_their_own():
    problem = Pulled(at(0.0), share=1.0)
    together = trail(EM(growth=1.5), problem, at([1.0], [0.0]), 3)[1][-1]
    apart = [trail(EM(growth=1.5), problem, at([start]), 3)[1][-1] for start in (1.0, 0.0)]
    torch.testing.assert_close(together, torch.cat(apart))


def test_only_stretched_coordinates_go_further():
    problem = Pulled(at(0.0, 0.0), share=0.25, mask=torch.tensor([True, False]))
    _, points, _ = trail(EM(growth=2.0), problem, at([1.0, 1.0]), 1)
    torch.testing.assert_close(points[0], at([0.5, 0.75]))


@dataclass(frozen=True)
class Broken(Pulled):
    """No finite loss right of five."""

    def loss(self, point):
        loss = torch.where(point[:, 0] > 5, torch.nan, super().loss(point).total)
        return LossTerms.of(loss, reconstruction=loss)


def test_a_loss_that_is_not_finite_moves_nothing_and_is_flagged():
    outcome, _, _ = trail(EM(), Broken(at(2.0)), at([9.0], [3.0]), 50, tolerance=1e-9)
    assert outcome.failed.tolist() == [True, False]
    assert outcome.point[0].item() == 9.0
    assert outcome.point[1].item() == pytest.approx(2.0, abs=1e-3)


def test_a_resumed_leg_ends_where_the_whole_does():
    em, problem, start = EM(growth=1.3), Pulled(at(2.0, -1.0), share=0.7), at([10.0, 4.0], [-3.0, 0.0])
    whole, points, snapshots = trail(em, problem, start, 12)
    resumed, rest, _ = trail(em, problem, start, 12, resume=snapshots[4])
    assert len(rest) == 7
    assert torch.equal(torch.stack(rest), torch.stack(points[5:]))
    assert torch.equal(resumed.point, whole.point)
    assert torch.equal(resumed.loss, whole.loss)
    assert resumed.steps == whole.steps == 12


def test_a_watch_may_stop_it():
    outcome = EM().run(Run(Pulled(at(0.0)), at([1.0]), 50, 0.0), lambda progress: progress.step == 2)
    assert outcome.steps == 3


def test_no_steps_are_refused():
    with pytest.raises(ModelError, match="steps must be at least 1; got 0"):
        EM(steps=0)


def test_three_small_changes_in_a_row_make_an_end():
    """The first step compares with nothing; one step that happens to change little is no end."""
    outcome, points, _ = trail(EM(), Pulled(at(2.0, -1.0)), at([10.0, -1.0]), 50, tolerance=1e9)
    assert len(points) == outcome.steps == 4
    assert bool(outcome.converged.all())
    cut, _, _ = trail(EM(), Pulled(at(2.0, -1.0)), at([10.0, -1.0]), 3, tolerance=1e9)
    assert not bool(cut.converged.any())


@pytest.mark.parametrize("stretched", [None, torch.tensor([True, False, True])])
def test_every_replica_follows_its_own_losses(stretched):
    """Losses of either sign that fall, rest, rise and are no numbers, beside one replica at a time."""
    rng = np.random.default_rng(0)
    em, tolerance = EM(growth=1.5, longest=3.0), 1e-2
    start = rng.normal(size=(4, 3))
    state = _EMState.of(torch.as_tensor(start))
    points, losses, paces, small = list(start), [np.inf] * 4, [1.0] * 4, [0] * 4
    level = np.array([5.0, -5.0, 0.1, -300.0])
    for number in range(30):
        level = level - rng.choice([0.5, 1e-3, 3e-2, 0.0, -0.4], 4)
        loss = np.where(rng.random(4) < 0.1, np.nan, level)
        updates = rng.normal(size=(4, 3))
        updates[rng.random(4) < 0.1] = np.nan
        state.follow(em, torch.as_tensor(updates), torch.as_tensor(loss), tolerance, stretched)
        for one in range(4):
            near = abs(losses[one] - loss[one]) <= tolerance * (1 + abs(loss[one]))
            small[one] = small[one] + 1 if near else 0
            paces[one] = min(1.5 * paces[one], 3.0) if loss[one] <= losses[one] else 1.0
            if np.isfinite(loss[one]) and np.isfinite(updates[one]).all():
                pace = paces[one] if stretched is None else np.where(stretched, paces[one], 1.0)
                points[one] = points[one] + pace * (updates[one] - points[one])
            losses[one] = loss[one]
            np.testing.assert_allclose(state.point[one], points[one])
            assert state.pace[one].item() == pytest.approx(paces[one])
            assert state.small_changes[one].item() == small[one]
        np.testing.assert_array_equal(state.loss, loss)
        assert state.step == number + 1
