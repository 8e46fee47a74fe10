"""Optimisers on toy problems whose steps are known, and what they tell on their way."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import EM, Adam, Deterministic, Run
from otpdag.errors import ModelError
from otpdag.problem import LossTerms, Problem, Updates

# -- what optimisers remember, as named tensors -----------------------------------------------------------------------


STRUCTURE = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()}).structure
SHAPES = {"x.loc": (1,), "phi.x": (1,)}


@dataclass(frozen=True)
class Bowl(Problem):
    """A bowl whose steepness is a tensor with a gradient of its own, as that of a user's module has."""

    steepness: torch.Tensor
    structure = STRUCTURE
    shapes = SHAPES

    @property
    def rows(self):
        return 10

    def loss(self, point):
        loss = (self.steepness * (point - 1).square()).sum(-1)
        return LossTerms.of(loss, reconstruction=loss)

    def sampled(self, point, streams, progress):
        return self.loss(point)

    def update(self, point):
        return point + 0.5 * self.steepness / self.steepness * (1 - point), self.loss(point)


@dataclass(frozen=True)
class Updated(Bowl):
    """One whose closed-form updates are to be followed."""

    updates = Updates()


def run(points, kind=Bowl):
    return Run(kind(torch.tensor([1.0, 3.0]).double().requires_grad_(True)), points, 5, seeds=[0, 1])


RUNS = {
    "Deterministic": Deterministic(steps=5).run,
    "Adam": Adam(steps=5).run,
    "Adam in turn": Adam(steps=5, alternating=True).run,
    "EM": EM(steps=5).run,
    "accelerated": Deterministic(steps=5).run,
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_told_of_a_leg_has_no_gradients(name):
    """Else the history of a fit would hold every step that was ever evaluated."""
    start = torch.tensor([[3.0, -2.0], [0.0, 5.0]]).double()
    told = []

    def watch(progress):
        told.extend([progress.losses, progress.points, *progress.snapshot().values()])
        return False

    outcome = RUNS[name](run(start, Updated if name == "accelerated" else Bowl), watch)
    told += [outcome.point, outcome.loss, outcome.converged, outcome.failed, *outcome.memory.values()]
    assert len(told) > 10
    assert not [one for one in told if one.requires_grad]
    assert torch.equal(start, torch.tensor([[3.0, -2.0], [0.0, 5.0]]).double())  # it is not worked upon


@pytest.mark.parametrize("name", ["Adam", "Adam in turn", "EM", "accelerated"])
def test_a_start_that_asks_for_gradients_is_only_read(name):
    start = torch.tensor([[3.0, -2.0], [0.0, 5.0]]).double().requires_grad_(True)
    kind = Updated if name == "accelerated" else Bowl
    outcome = RUNS[name](run(start, kind), lambda progress: False)
    assert not outcome.point.requires_grad
    plain = RUNS[name](run(start.detach(), kind), lambda progress: False)
    torch.testing.assert_close(outcome.point, plain.point)


# -- expectation-maximisation on toy problems whose updates are known -------------------------------------------------


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
    with pytest.raises(ModelError, match="steps must be a whole number of at least 1; got 0"):
        EM(steps=0)


def test_three_small_changes_in_a_row_make_an_end():
    """The first step compares with nothing; one step that happens to change little is no end."""
    outcome, points, _ = trail(EM(), Pulled(at(2.0, -1.0)), at([10.0, -1.0]), 50, tolerance=1e9)
    assert len(points) == outcome.steps == 4
    assert bool(outcome.converged.all())
    cut, _, _ = trail(EM(), Pulled(at(2.0, -1.0)), at([10.0, -1.0]), 3, tolerance=1e9)
    assert not bool(cut.converged.any())


@dataclass(frozen=True)
class Scripted(Pulled):
    """Updates and losses that are told beforehand, replica by replica in each step."""

    script: list = field(default_factory=list)

    def update(self, point):
        update, loss = self.script.pop(0)
        return torch.as_tensor(update)[None], LossTerms.of(torch.tensor([loss]), reconstruction=torch.tensor([loss]))


@pytest.mark.parametrize("stretched", [None, torch.tensor([True, False, True])])
def test_every_replica_follows_its_own_losses(stretched):
    """Losses of either sign that fall, rest, rise and are no numbers, beside one replica at a time."""
    rng = np.random.default_rng(0)
    tolerance, start = 1e-2, rng.normal(size=(4, 3))
    level, told = np.array([5.0, -5.0, 0.1, -300.0]), []
    for _ in range(30):
        level = level - rng.choice([0.5, 1e-3, 3e-2, 0.0, -0.4], 4)
        loss = np.where(rng.random(4) < 0.1, np.nan, level)
        updates = rng.normal(size=(4, 3))
        updates[rng.random(4) < 0.1] = np.nan
        told.append((updates, loss))
    script = [(updates[one], loss[one]) for updates, loss in told for one in range(4)]
    problem = Scripted(at(0.0), mask=stretched, script=script)
    em = EM(growth=1.5, longest=3.0)
    _, seen, snapshots = trail(em, problem, torch.as_tensor(start), 30, tolerance=tolerance)
    assert len(seen) == 30
    points, losses, paces, small = list(start), [np.inf] * 4, [1.0] * 4, [0] * 4
    for number, (updates, loss) in enumerate(told):
        for one in range(4):
            near = abs(losses[one] - loss[one]) <= tolerance * (1 + abs(loss[one]))
            small[one] = small[one] + 1 if near else 0
            paces[one] = min(1.5 * paces[one], 3.0) if loss[one] <= losses[one] else 1.0
            if np.isfinite(loss[one]) and np.isfinite(updates[one]).all():
                pace = paces[one] if stretched is None else np.where(stretched, paces[one], 1.0)
                points[one] = points[one] + pace * (updates[one] - points[one])
            losses[one] = loss[one]
        np.testing.assert_allclose(seen[number], points)
        np.testing.assert_allclose(snapshots[number]["pace"], paces)
        np.testing.assert_array_equal(snapshots[number]["small"], small)
        np.testing.assert_array_equal(snapshots[number]["loss"], loss)
