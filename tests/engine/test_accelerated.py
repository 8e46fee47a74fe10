"""Accelerated updates end where plain ones do, sooner, and go on from a snapshot as if they had never stopped."""

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine.optimiser import Acceleration, Rivalry, Run, _Accelerated, accelerated_updates, climbed
from otpdag.numerics import correction
from otpdag.problem import LossTerms, Problem, Updates

RATES = torch.tensor([0.99, 0.9, 0.5, 0.1], dtype=torch.float64)


@dataclass(frozen=True)
class Contraction(Problem):
    """Updates that come closer to a goal by a rate of their own in each coordinate; the loss falls with them."""

    goal: torch.Tensor

    @property
    def rows(self):
        return 1

    def update(self, point):
        loss = ((1 - RATES) * (point - self.goal) ** 2).sum(-1)
        return self.goal + RATES * (point - self.goal), LossTerms.of(loss, reconstruction=loss)


def run(steps=200):
    goal = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    return Run(Contraction(goal), torch.zeros(3, 4, dtype=torch.float64), steps)


def test_a_slow_contraction_ends_in_few_steps():
    outcome = accelerated_updates(run(), 1e-14, lambda progress: False)
    assert bool(outcome.converged.all())
    assert outcome.steps < 20  # plain updates would need two thousand
    torch.testing.assert_close(outcome.point, run().problem.goal.expand(3, -1), atol=1e-5, rtol=0)


def test_every_step_is_andersons():
    """Type II acceleration (Walker and Ni 2011) by least squares; steps that raise the loss are checked below."""
    problem, start = run().problem, torch.tensor([[0.0, 5.0, -2.0, 1.0]], dtype=torch.float64)
    seen = []
    accelerated_updates(Run(problem, start, 5), 0.0, lambda one: seen.append((one.points.clone(), one.losses.clone())))
    trial, moves, changes, last = start[0].numpy(), [], [], None
    for points, _ in seen:
        np.testing.assert_allclose(points[0], trial, rtol=1e-5, atol=1e-6)
        image = problem.update(torch.as_tensor(trial)[None])[0][0].numpy()
        change = image - trial
        if last is not None:
            moves, changes = (
                [*moves, trial - last[0]][-Acceleration.remembered :],
                [*changes, change - last[1]][-Acceleration.remembered :],
            )
        last, trial = (trial, change), image
        if moves:
            share = np.linalg.lstsq(np.stack(changes, 1), change, rcond=None)[0]
            trial = image - (np.stack(moves, 1) + np.stack(changes, 1)) @ share
    assert all(later <= earlier for (_, earlier), (_, later) in itertools.pairwise(seen))


@dataclass(frozen=True)
class Walled(Contraction):
    """The same, with a loss that is high, or not a number, beyond a wall: a step too far must be taken back."""

    beyond: float = torch.inf

    def update(self, point):
        image, terms = super().update(point)
        loss = torch.where(point[:, 0] > 0.5, self.beyond, terms.total)
        return image, LossTerms.of(loss, reconstruction=loss)


@pytest.mark.parametrize("beyond", [1e3, torch.nan])
def test_a_step_that_raises_the_loss_is_replaced_by_the_plain_one(beyond):
    goal = run().problem.goal
    start = torch.zeros(2, 4, dtype=torch.float64)
    seen = []
    problem = Walled(goal, beyond)
    accelerated_updates(Run(problem, start, 12), 0.0, lambda one: seen.append((one.points.clone(), one.losses.clone())))
    for (_, higher), (after, lower) in itertools.pairwise(seen):
        assert (lower <= higher).all()
        assert (after[:, 0] <= 0.5).all()
    points = torch.stack([points[0] for points, _ in seen])
    assert any(torch.equal(one, two) for one, two in itertools.pairwise(points))
    # after a refusal the update of the last good point comes next
    refused = next(at for at, (one, two) in enumerate(itertools.pairwise(points)) if torch.equal(one, two))
    torch.testing.assert_close(points[refused + 2], problem.update(points[refused][None])[0][0])


@dataclass(frozen=True)
class Hiccup(Contraction):
    """The same, with a loss that is infinite once."""

    calls: list = field(default_factory=list)

    def update(self, point):
        image, terms = super().update(point)
        self.calls.append(point)
        loss = terms.total + (torch.inf if len(self.calls) == 4 else 0.0)
        return image, LossTerms.of(loss, reconstruction=loss)


def test_after_a_refusal_differences_are_gathered_anew():
    problem, start = Hiccup(run().problem.goal), torch.tensor([[0.0, 5.0, -2.0, 1.0]], dtype=torch.float64)
    accelerated_updates(Run(problem, start, 7), 0.0, lambda progress: False)
    kept, _, plain, next_one = (one[0].numpy() for one in problem.calls[2:6])
    image = problem.goal[0].numpy() + RATES.numpy() * (kept - problem.goal[0].numpy())
    np.testing.assert_allclose(plain, image, rtol=1e-9)
    after = problem.goal[0].numpy() + RATES.numpy() * (plain - problem.goal[0].numpy())
    move, change = plain - kept, (after - plain) - (image - kept)
    share = (change @ (after - plain)) / (change @ change)  # of the one difference that there is
    np.testing.assert_allclose(next_one, after - (move + change) * share, rtol=1e-5)


def test_it_goes_on_from_a_snapshot():
    whole = accelerated_updates(run(9), 1e-14, lambda progress: False)
    kept = {}

    def stop(progress):
        kept.update({name: value.clone() for name, value in progress.snapshot().items()})
        return progress.step == 4

    accelerated_updates(run(9), 1e-14, stop)
    resumed = accelerated_updates(run(9), 1e-14, lambda progress: False, resume=kept)
    torch.testing.assert_close(resumed.point, whole.point, rtol=0, atol=0)
    torch.testing.assert_close(resumed.loss, whole.loss, rtol=0, atol=0)


@dataclass(frozen=True)
class Counted(Contraction):
    """The same, which counts the replicas of every update, and may update some of them alone."""

    apart: bool
    replicas: list = field(default_factory=list)

    @property
    def updates(self):
        return Updates(apart=self.apart)

    def update(self, point):
        self.replicas.append(len(point))
        return super().update(point)


def test_settled_replicas_are_left_out_of_updates():
    goal = run().problem.goal
    start = torch.cat([goal, torch.zeros(2, 4, dtype=torch.float64)])
    together, apart = (Counted(goal, apart) for apart in (False, True))
    seen = {}
    for problem in (together, apart):
        steps = seen[problem.apart] = []
        accelerated_updates(Run(problem, start, 200), 1e-14, lambda one, steps=steps: steps.append(one.terms.total))
    assert set(together.replicas) == {3}
    assert len(apart.replicas) == len(together.replicas)
    assert apart.replicas[-1] == 2
    torch.testing.assert_close(torch.stack(seen[True]), torch.stack(seen[False]))


def test_a_run_that_goes_on_mixes_what_the_one_before_had_seen():
    first = accelerated_updates(run(5), 1e-14, lambda progress: False)
    again, on = (
        accelerated_updates(replace(run(), points=first.point, memory=memory), 1e-14, lambda progress: False)
        for memory in ({}, first.memory)
    )
    assert on.steps < again.steps
    torch.testing.assert_close(on.point, run().problem.goal.expand(3, -1), atol=1e-5, rtol=0)


def test_a_replica_that_gives_up_stays_where_it_is():
    start = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64).expand(-1, 4)
    seen = {}
    for name, second in (("all", False), ("some", True)):
        gives_up = lambda progress, fall, second=second: torch.tensor([False, second and progress.step == 3, False])  # noqa: E731
        steps = seen[name] = []
        outcome = accelerated_updates(
            replace(run(12), points=start, gives_up=gives_up), 1e-14, lambda one, steps=steps: steps.append(one.points)
        )
    whole, some = torch.stack(seen["all"]), torch.stack(seen["some"])
    assert bool(outcome.converged[[0, 2]].all())
    assert not bool(outcome.converged[1])
    torch.testing.assert_close(some[:, [0, 2]], whole[: len(some), [0, 2]])
    torch.testing.assert_close(some[3:, 1], whole[3, 1].expand(len(some) - 3, -1))
    assert not torch.equal(whole[4, 1], whole[3, 1])


def chain(kind):
    rng = np.random.default_rng(3)
    states = (rng.random((6, 150)) < 0.1).cumsum(1) % 2
    x = rng.poisson(2.0 + 3.0 * states) if kind == "counts" else 1.5 * states + rng.normal(size=states.shape)
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "x": m.Poisson() if kind == "counts" else m.Normal()}), x.astype(
        float
    )


@pytest.mark.parametrize("kind", ["counts", "numbers"])
def test_chains_end_where_descent_ends(kind):
    model, x = chain(kind)
    result = otp.fit(model, x, seed=0, restarts=2)
    assert result.problem.updates.suffice
    point = next(one for one in result.restarts if one.kept).point.unsqueeze(0).requires_grad_(True)
    (gradient,) = torch.autograd.grad(result.problem.loss(point).total.sum(), point)
    assert float(gradient.abs().max()) < 1e-4
    losses, at = [], point.detach()
    for _ in range(100):
        at, terms = result.problem.update(at)
        losses.append(float(terms.total))
    assert result.loss == pytest.approx(min(losses), abs=1e-6)


@dataclass(frozen=True)
class Valleys(Problem):
    """Replicas that come to rest at losses of their own, each at a speed of its own."""

    floors: torch.Tensor
    rates: torch.Tensor

    @property
    def rows(self):
        return 1

    def update(self, point):
        loss = self.floors + (point**2).sum(-1)
        return self.rates * point, LossTerms.of(loss, reconstruction=loss)


@dataclass(frozen=True)
class Runaway(Contraction):
    """The same, but the last coordinate moves on for ever, and nothing depends on it."""

    @property
    def updates(self):
        return Updates(stretched=torch.tensor([True, True, True, False]))

    def update(self, point):
        image, _ = super().update(point)
        loss = ((1 - RATES) * (point - self.goal) ** 2)[:, :3].sum(-1)
        return torch.cat([image[:, :3], point[:, 3:] + 7.0], -1), LossTerms.of(loss, reconstruction=loss)


RIVALS = Rivalry(margin=0.01, same=1e-4)


def competing(floors, rates, steps=40):
    """Replicas in valleys of their own, once to their own ends and once only until one of them is chosen."""
    problem = Valleys(torch.tensor(floors).double(), torch.stack(rates).double())
    one = Run(problem, torch.full((len(floors), 40), 0.1).double(), steps)
    return [accelerated_updates(replace(one, rivalry=how), 1e-9, lambda progress: False) for how in (None, RIVALS)]


@pytest.mark.parametrize(("floor", "waits"), [(5.0, False), (0.005, True)])
def test_a_start_that_stays_behind_is_not_waited_for(floor, waits):
    """One that is slow, and above the best by more than it could fall; or by so little that it might still win."""
    alone, together = competing([0.0, floor], [torch.full((40,), 0.01), torch.linspace(0.5, 0.999, 40)])
    assert (together.steps == alone.steps) == waits
    assert int(together.loss.argmin()) == 0
    assert bool(together.converged[0]) or not waits


def test_the_best_alone_need_not_settle():
    """Once no other may win, the choice is made, however far the best still has to go."""
    alone, together = competing([0.0, 5.0], [torch.linspace(0.5, 0.999, 40), torch.full((40,), 0.01)])
    assert together.steps < alone.steps
    assert not bool(together.converged[0])


@pytest.mark.parametrize(("floor", "waits"), [(0.0, False), (1e-3, True)])
def test_starts_that_come_to_the_same_end_are_not_both_waited_for(floor, waits):
    alone, together = competing([0.0, floor], [torch.linspace(0.1, end, 40) for end in (0.6, 0.62)])
    assert (together.steps == alone.steps) == waits


def test_quick_falls_foretell_the_end():
    """Each fall is a ten-thousandth of the one before: four tell that nothing is left, three small ones do not need
    to be seen as well.
    """
    problem = Valleys(torch.zeros(1).double(), torch.full((1, 4), 0.01).double())
    outcome = accelerated_updates(Run(problem, torch.ones(1, 4).double(), 50), 1e-9, lambda progress: False)
    assert bool(outcome.converged[0])
    assert outcome.steps == 5
    assert float(outcome.loss) < 1e-9


def test_a_slow_rest_is_not_foretold_away():
    """What falls quickly at first hides what falls slowly; it is not the end yet."""
    rates = torch.tensor([[0.01, 0.01, 0.01, 0.95]]).double()
    start = torch.tensor([[1.0, 1.0, 1.0, 0.01]]).double()
    problem = Valleys(torch.zeros(1).double(), rates)
    outcome = accelerated_updates(Run(problem, start, 50), 1e-9, lambda progress: False)
    assert bool(outcome.converged[0])
    assert float(outcome.loss) < 1e-8  # of the 1e-4 that the slow one had


def test_coordinates_that_are_not_stretched_follow_their_updates():
    """One that runs away, as the logits of a probability of zero do, neither misleads the others nor goes further."""
    problem = Runaway(run().problem.goal)
    seen = []
    outcome = accelerated_updates(
        Run(problem, torch.zeros(1, 4).double(), 200), 1e-14, lambda one: seen.append(one.points[0, 3].item())
    )
    assert bool(outcome.converged[0])
    assert outcome.steps < 20
    torch.testing.assert_close(outcome.point[:, :3], problem.goal[:, :3], atol=1e-5, rtol=0)
    assert set(np.diff(seen)) <= {0.0, 7.0}


@dataclass(frozen=True)
class Rounding(Contraction):
    """The same at rest, with a loss that is large and rises in every call."""

    rise: float = 0.0
    calls: list = field(default_factory=list)

    def update(self, point):
        self.calls.append(point)
        loss = torch.full((len(point),), 1e6 + self.rise * len(self.calls), dtype=torch.float64)
        return point + 1e-3, LossTerms.of(loss, reconstruction=loss)


@pytest.mark.parametrize(("rise", "ends"), [(1e-6, True), (1e-4, False)])
def test_a_rise_that_is_rounding_at_the_size_of_the_loss_is_a_small_change(rise, ends):
    problem = Rounding(run().problem.goal, rise)
    outcome = accelerated_updates(Run(problem, torch.zeros(1, 4).double(), 12), 1e-9, lambda progress: False)
    assert bool(outcome.converged.all()) is ends
    assert (outcome.steps < 12) is ends
    assert outcome.loss.item() == 1e6 + rise  # the lowest, all the same


def plain_climb(problem, point, little):
    """Updates one after the other until one gains little."""
    before, steps = torch.inf, 0
    while True:
        point, terms = problem.update(point)
        loss, steps = float(terms.total.max()), steps + 1
        if before - loss <= little * (1 + loss):
            return point, steps
        before = loss


def counted(problem):
    """The problem, and the losses at all points at which it was updated."""
    losses = []

    class Counted(type(problem)):
        def update(self, point):
            image, terms = super().update(point)
            losses.append(terms.total)
            return image, terms

    return Counted(**vars(problem)), losses


def test_a_climb_comes_nearer_in_fewer_updates_than_plain_ones():
    problem, losses = counted(run().problem)
    start, little = torch.zeros(3, 4, dtype=torch.float64), 1e-5
    reached = climbed(Run(problem, start, 400), little)
    plainly, steps = plain_climb(run().problem, start, little)
    assert len(losses) < steps / 10
    assert float((reached - problem.goal).abs().max()) < 0.5 * float((plainly - problem.goal).abs().max())
    gains = -torch.stack(losses).cummin(0).values.diff(dim=0).amax(-1)
    assert bool((gains[:-1] > little).all())  # the first update that gains little is the last
    assert float(gains[-1]) <= little * 2


def test_a_climb_takes_no_more_updates_than_it_may():
    problem, losses = counted(run().problem)
    climbed(Run(problem, torch.zeros(3, 4, dtype=torch.float64), 3), 0.0)
    assert len(losses) == 3


@pytest.mark.parametrize("beyond", [1e3, torch.nan])
def test_a_refused_step_is_no_end_of_a_climb(beyond):
    problem, losses = counted(Walled(run().problem.goal, beyond=beyond))
    reached = climbed(Run(problem, torch.zeros(2, 4, dtype=torch.float64), 30), 1e-7)
    refusals = [number for number, loss in enumerate(losses) if not bool((loss < 1e2).all())]
    assert refusals
    assert refusals[0] < len(losses) - 1
    assert bool((reached[:, 0] <= 0.51).all())
    at_first = losses[refusals[0] - 1]
    assert bool((problem.update(reached)[1].total < at_first).all())


@dataclass(frozen=True)
class Overshooting(Contraction):
    """Updates that go downhill, but in the first of two replicas eleven times too far."""

    def update(self, point):
        too_far = torch.tensor([[11.0], [1.0]], dtype=torch.float64)
        loss = (point - self.goal).square().sum(-1)
        return point + too_far * (self.goal - point), LossTerms.of(loss, reconstruction=loss)


def overshooting():
    goal = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    return Overshooting(goal), torch.zeros(2, 4, dtype=torch.float64), float(goal.square().sum())


def test_an_update_that_raises_the_loss_is_shortened():
    problem, start, at_first = overshooting()
    seen = []
    outcome = accelerated_updates(Run(problem, start, 40), 1e-12, lambda one: seen.append(one.losses.clone()))
    assert bool((torch.stack(seen).diff(dim=0) <= 0).all())
    shorter = [float(one[0]) for one in seen[:4]]  # 11, 11 / 4 and 11 / 16 of the way: the first two go too far
    assert shorter == pytest.approx([at_first, at_first, at_first, at_first * (1 - 11 / 16) ** 2])
    assert bool(outcome.converged.all())
    torch.testing.assert_close(outcome.point, problem.goal.expand(2, -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 30])
def test_a_climb_never_ends_where_it_has_seen_a_higher_loss(steps):
    problem, start, at_first = overshooting()
    reached = climbed(Run(problem, start, steps), 1e-7)
    loss = problem.update(reached)[1].total
    if steps == 1:
        assert float(loss[0]) > at_first  # nothing has been tried yet
        return
    assert bool((loss <= at_first).all())
    assert float(loss[1]) == pytest.approx(0.0, abs=1e-12)
    if steps == 30:
        assert float(loss[0]) < 1e-3 * at_first


# -- beside one replica at a time -------------------------------------------------------------------------------------


class Plain:
    """A replica that keeps or refuses one trial after another, step by step."""

    def __init__(self, start):
        self.point = self.trial = self.plain = start
        self.loss, self.change, self.pairs = np.inf, np.zeros_like(start), [None] * 8
        self.small, self.fall, self.rest, self.quick_falls, self.step = 0, 0.0, np.inf, 0, 0
        self.share = 1.0

    def follow(self, update, loss, tolerance, mixed):
        change, move = (update - self.trial) * mixed, (self.trial - self.point) * mixed
        slot, self.step = self.step % 8, self.step + 1
        fallen = self.loss - loss
        ended = self.small >= 3
        sound = np.isfinite(loss) and np.isfinite(change).all() and not ended
        level = sound and fallen >= -1e-11 * (1 + abs(loss))
        small_fall = tolerance * (1 + abs(loss))
        if level:
            near = abs(fallen) <= small_fall
            still = np.abs(change).max() <= 1e-8
            self.small = 0 if not near else 3 if still else self.small + 1
        kept = level and loss <= self.loss
        if not kept:
            self.pairs, self.quick_falls = [None] * 8, 0
            self.trial = self.plain
            self.share *= 1.0 if ended else 0.25
            if self.share < 1:
                self.trial = self.point + self.share * (self.plain - self.point)
            return
        known = np.isfinite(self.loss)
        falling = fallen <= 0.09 * self.fall
        quick = known and (falling or np.abs(change).max() <= 0.3 * np.abs(self.change).max())
        self.quick_falls = self.quick_falls + 1 if falling else 0
        self.rest = fallen**2 / (self.fall - fallen) if fallen < self.fall else np.inf
        if self.quick_falls >= 2 and self.rest <= 1e-3 * small_fall:
            self.small = 3
        self.fall = fallen if known else self.fall
        self.pairs[slot] = (move, change - self.change) if known else None
        self.plain, self.point, self.change, self.loss = update, self.trial, change, loss
        self.trial, self.share = self.plain, 1.0
        if not quick:
            zero = (np.zeros_like(change), np.zeros_like(change))
            moves, changes = (np.stack([(pair or zero)[side] for pair in self.pairs]) for side in (0, 1))
            step = correction(*(torch.from_numpy(one[None]) for one in (change, moves, changes)))[0].numpy()
            if np.isfinite(step).all():
                self.trial, self.share = self.plain - step, 4.0 if step.any() else 1.0


@pytest.mark.parametrize("stretched", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_replica_goes_its_own_way(seed, stretched):
    """Losses that fall, rest, rise by rounding, rise and are no numbers, in random order."""
    rng = np.random.default_rng(seed)
    start, tolerance = rng.normal(size=(5, 4)), 1e-3
    mixed = np.array([1.0, 1.0, 0.0, 1.0]) if stretched else np.ones(4)
    state = _Accelerated.of(torch.as_tensor(start))
    replicas = [Plain(one.copy()) for one in start]
    lowest = np.array([10.0, -10.0, 3.0, -200.0, 0.2])
    met = set()
    for _ in range(25):
        names = ["falls", "rests", "same", "rounding", "rises", "nan"]
        kinds = rng.choice(names, 5, p=[0.35, 0.2, 0.1, 0.15, 0.1, 0.1])
        drop = {"falls": 10.0 ** rng.uniform(-9, -1), "rests": 5e-4, "same": 0.0, "rises": -0.1}
        drop |= {"rounding": -1e-11 * rng.uniform(1.0, 3.0)}
        loss = np.array([low - drop.get(kind, np.nan) for low, kind in zip(lowest, kinds, strict=True)])
        lowest = np.where(loss <= lowest, loss, lowest)
        size = 10.0 ** rng.uniform(-10, 0, (5, 1))
        updates = state.trial + size * rng.normal(size=(5, 4))
        updates[rng.random(5) < 0.05] = np.nan
        state.follow(updates, loss, tolerance, mixed if stretched else None)
        for number, one in enumerate(replicas):
            one.follow(updates[number], loss[number], tolerance, mixed)
            for name in ("point", "plain", "change", "trial"):
                np.testing.assert_allclose(
                    getattr(state, name)[number], getattr(one, name), rtol=1e-6, atol=1e-12, err_msg=name
                )
            for name in ("loss", "small", "fall", "rest", "quick_falls", "share", "step"):
                found = getattr(state, name) if name == "step" else getattr(state, name)[number]
                assert found == pytest.approx(getattr(one, name), rel=1e-9), name
            met.add((one.small, one.quick_falls > 0))
        assert state.have_ended(None, 5) == all(one.small >= 3 for one in replicas)
        for margin, same, left in ((0.01, 1e-4, 3), (1e-6, 1e-2, 0)):
            best = min(range(5), key=lambda number: replicas[number].loss)
            low, last = replicas[best].loss, replicas[best].rest
            beaten = [
                number == best
                or one.loss - low > margin + left * 10 * one.fall
                or one.loss - low + one.rest + last <= same * (1 + abs(one.loss))
                for number, one in enumerate(replicas)
            ]
            settled = [one.small >= 3 for one in replicas]
            over = all(beaten) or (settled[best] and all(a or b for a, b in zip(settled, beaten, strict=True)))
            expected = over if state.step >= 2 else all(settled)
            assert state.have_ended(Rivalry(margin, same), left) == expected
    assert len(met) > 4
