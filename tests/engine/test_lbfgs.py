"""L-BFGS over replicas, against scipy and one replica at a time, and the coordinates in which it descends."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import optimize
from sklearn.datasets import make_classification

from otpdag.engine import Deterministic
from otpdag.engine.optimiser import Coordinates, Run, _direction, _line_search, _remember, _shrink, minimise
from otpdag.problem import LossTerms, Problem, Updates

# -- l-BFGS over replicas, against scipy and against itself one replica at a time -------------------------------------


def rosenbrock(point):
    x, y = point[:, :-1], point[:, 1:]
    return (100 * (y - x**2) ** 2 + (1 - x) ** 2).sum(-1)


def logistic():
    x, y = make_classification(200, 8, random_state=0)
    x, sign = torch.tensor(x), torch.tensor(2.0 * y - 1)

    def loss(point):
        return torch.nn.functional.softplus(-sign * (point @ x.T)).mean(-1) + 1e-3 * point.square().sum(-1)

    return loss


def scipy_minimum(loss, start):
    def value_and_gradient(x):
        leaf = torch.tensor(x, requires_grad=True)
        value = loss(leaf[None])[0]
        return value.item(), torch.autograd.grad(value, leaf)[0].numpy()

    return optimize.minimize(
        value_and_gradient, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-14, "gtol": 1e-9}
    )


@pytest.mark.parametrize("size", [2, 6])
def test_rosenbrock_reaches_the_minimum_of_scipy(size):
    start = torch.full((1, size), -1.2, dtype=torch.float64)
    state = minimise(rosenbrock, start, steps=400)
    peer = scipy_minimum(rosenbrock, start[0].numpy())
    assert bool(state.converged)
    assert not bool(state.failed)
    # scipy may end in the local minimum near -1 that the six-dimensional function has
    assert state.loss.item() <= peer.fun + 1e-8
    assert state.evaluations < 3 * peer.nfev + 30


def test_logistic_regression_equals_scipys():
    loss = logistic()
    state = minimise(loss, torch.zeros(1, 8, dtype=torch.float64), steps=300, tolerance=1e-14)
    peer = scipy_minimum(loss, np.zeros(8))
    np.testing.assert_allclose(state.point[0], peer.x, atol=1e-5)
    assert state.loss.item() == pytest.approx(peer.fun, rel=1e-10)
    assert state.evaluations < 3 * peer.nfev + 30


def starts():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("steps", [3, 200])
def test_rows_together_equal_rows_apart(steps):
    together = minimise(rosenbrock, starts(), steps=steps)
    for row in range(5):
        apart = minimise(rosenbrock, starts()[row : row + 1], steps=steps)
        np.testing.assert_allclose(together.point[row], apart.point[0], rtol=1e-9, atol=1e-12)
        assert together.converged[row] == apart.converged[0]


def test_a_row_that_converges_early_waits_for_the_others():
    points = starts()
    points[2] = 1.0  # the minimum itself
    state = minimise(rosenbrock, points, steps=300)
    assert state.converged.all()
    assert torch.equal(state.point[2], points[2])
    others = [0, 1, 3, 4]
    alone = minimise(rosenbrock, points[others], steps=300)
    np.testing.assert_allclose(state.point[others], alone.point, rtol=1e-9)


def broken_at(threshold):
    def loss(point):
        value = rosenbrock(point)
        return torch.where(point[:, 0] > threshold, torch.nan, value)

    return loss


def test_a_row_that_starts_at_a_loss_that_is_not_finite_is_flagged_and_stays():
    points = starts()
    points[1, 0] = 30.0
    state = minimise(broken_at(20.0), points, steps=300)
    assert state.failed.tolist() == [False, True, False, False, False]
    assert torch.equal(state.point[1], points[1])
    others = [0, 2, 3, 4]
    alone = minimise(rosenbrock, points[others], steps=300)
    np.testing.assert_allclose(state.point[others], alone.point, rtol=1e-9)


def test_trial_steps_into_infinity_are_taken_back():
    """log is not defined left of zero: the line search must not go there, nor stop."""

    def loss(point):
        return (point - torch.log(point)).sum(-1)

    state = minimise(loss, torch.full((2, 3), 0.01, dtype=torch.float64), steps=200)
    assert not state.failed.any()
    np.testing.assert_allclose(state.point, 1.0, atol=1e-4)


def test_all_rows_failed():
    state = minimise(lambda point: point.sum(-1) * torch.nan, torch.zeros(2, 3, dtype=torch.float64))
    assert state.failed.all()
    assert not state.converged.any()
    assert state.steps == 0


def test_too_few_steps_do_not_count_as_converged():
    state = minimise(rosenbrock, torch.full((1, 4), -1.2, dtype=torch.float64), steps=4)
    assert state.steps == 4
    assert not bool(state.converged)


def test_losses_never_rise_and_callbacks_can_stop():
    losses = []

    def on_step(step, state):
        losses.append(state.loss.clone())
        return step == 9

    state = minimise(rosenbrock, starts(), steps=300, on_step=on_step)
    assert state.steps == len(losses) == 10
    assert (torch.stack(losses).diff(dim=0) <= 1e-10).all()


def test_a_constant_loss_is_converged_at_once():
    state = minimise(lambda point: 0 * point.sum(-1) + 3, torch.ones(1, 2, dtype=torch.float64))
    assert bool(state.converged)
    assert torch.equal(state.point, torch.ones(1, 2, dtype=torch.float64))


def test_three_small_changes_in_a_row_make_an_end():
    start = torch.full((1, 4), -1.2, dtype=torch.float64)
    state = minimise(rosenbrock, start, steps=50, tolerance=1e9, gradient_tolerance=0.0)
    assert state.steps == 3
    assert bool(state.converged.all())
    cut = minimise(rosenbrock, start, steps=2, tolerance=1e9, gradient_tolerance=0.0)
    assert not bool(cut.converged.any())


def test_a_large_change_starts_the_count_of_small_ones_anew():
    losses = []
    start = torch.full((1, 4), -1.2, dtype=torch.float64)
    minimise(rosenbrock, start, steps=200, on_step=lambda step, state: losses.append(float(state.loss)))
    falls = -np.diff([float(rosenbrock(start)), *losses]) / (1 + np.abs(losses))
    # a tolerance between falls: below it are single ones on the way, three in a row come later
    for tolerance in np.sort(falls[5:-5]):
        small = falls <= tolerance
        three = np.flatnonzero(small[2:] & small[1:-1] & small[:-2]) + 3
        if small.any() and len(three) and np.flatnonzero(small)[2] + 1 < three[0]:
            break
    else:
        raise AssertionError("no such tolerance")
    state = minimise(rosenbrock, start, steps=200, tolerance=float(tolerance), gradient_tolerance=0.0)
    assert state.steps == three[0]


def textbook(loss, start, steps):
    """Nocedal and Wright's algorithm 7.5 for one row, with matrices in place of the two loops: all points.

    The first step is no longer than one; a step is taken if the loss falls by 1e-4 of what the slope promises, else cut
    to the lowest point of the parabola through what is known, between a tenth and a half.
    """

    def evaluate(x):
        leaf = torch.tensor(x, requires_grad=True)
        value = loss(leaf[None])[0]
        return value.item(), torch.autograd.grad(value, leaf)[0].numpy()

    x = np.array(start)
    height, gradient = evaluate(x)
    pairs, points = [], []
    for _ in range(steps):
        inverse = np.eye(len(x))
        for s, y in pairs[-1:]:
            inverse *= (s @ y) / (y @ y)
        for s, y in pairs:
            turn = np.eye(len(x)) - np.outer(y, s) / (s @ y)
            inverse = turn.T @ inverse @ turn + np.outer(s, s) / (s @ y)
        direction = -inverse @ gradient
        slope, step = direction @ gradient, 1.0 if pairs else 1.0 / max(1.0, np.linalg.norm(gradient))
        while True:
            trial, new_gradient = evaluate(x + step * direction)
            if trial <= height + 1e-4 * step * slope:
                break
            lowest = -slope * step / (2 * (trial - height - step * slope))
            step *= min(max(lowest, 0.1), 0.5)
        pairs = [*pairs, (step * direction, new_gradient - gradient)][-12:]
        x, height, gradient = x + step * direction, trial, new_gradient
        points.append(x)
    return np.stack(points)


@pytest.mark.parametrize("start", [-1.2, 0.3])
def test_every_step_is_the_textbooks(start):
    begin = torch.full((1, 5), start, dtype=torch.float64)
    begin[0, 2] = -0.4
    seen = []
    minimise(rosenbrock, begin, steps=18, on_step=lambda _, state: seen.append(state.point[0].clone()))
    np.testing.assert_allclose(torch.stack(seen), textbook(rosenbrock, begin[0].numpy(), 18), rtol=1e-6, atol=1e-8)


def test_pairs_without_curvature_do_not_count_and_only_the_last_twelve_are_kept():
    state = minimise(rosenbrock, starts(), steps=1)
    for _ in range(20):
        _remember(state, starts(), starts())
    assert len(state.moves) == len(state.changes) == len(state.rho) == 12
    _remember(state, starts(), -starts())
    assert state.rho[-1].tolist() == [0.0] * 5
    norm = starts().square().sum(-1)
    torch.testing.assert_close(state.rho[-2], 1 / norm)
    # curvature is one along the pairs, and elsewhere what the last pair that tells has: s.y / y.y
    torch.testing.assert_close(_direction(state), -state.gradient)


@dataclass(frozen=True)
class Halving(Problem):
    """Updates in closed form that halve the way to zero, and a loss whose slope descent can follow."""

    settles: bool = True
    asked: list = field(default_factory=list)

    @property
    def rows(self):
        return 1

    updates = Updates()

    def update(self, point):
        self.asked.append("update")
        loss = point.square().sum(-1)
        # without an end: the loss falls by as much in every step
        fallen = loss if self.settles else -torch.full_like(loss, float(len(self.asked)))
        return 0.5 * point, LossTerms.of(fallen, reconstruction=fallen)

    def loss(self, point):
        self.asked.append("descent")
        loss = (point.exp() - 2.0 * point).sum(-1)
        return LossTerms.of(loss, reconstruction=loss)


def run_halving(problem, steps, resume=None):
    kept = []

    def watch(progress):
        kept.append(progress.snapshot())
        return False

    outcome = Deterministic(steps=steps).run(Run(problem, torch.ones(1, 3).double(), steps), watch, resume)
    return outcome, kept


def test_updates_that_settle_are_the_end():
    problem = Halving()
    outcome, _ = run_halving(problem, 200)
    assert set(problem.asked) == {"update"}
    assert outcome.converged.tolist() == [True]
    assert outcome.steps < Deterministic.alone


def test_updates_that_do_not_settle_are_left_to_descent_which_goes_on_as_descent():
    few = Halving(settles=False)
    outcome, _ = run_halving(few, Deterministic.alone)
    assert few.asked == ["update"] * Deterministic.alone
    assert outcome.converged.tolist() == [False]
    problem = Halving(settles=False)
    outcome, kept = run_halving(problem, Deterministic.alone + 50)
    assert problem.asked.count("update") == Deterministic.alone
    assert problem.asked[-1] == "descent"
    assert outcome.converged.tolist() == [True]
    again = Halving(settles=False)
    run_halving(again, 50, kept[Deterministic.alone])
    assert set(again.asked) == {"descent"}


def test_a_rise_by_rounding_is_no_rise():
    """Of a loss of 5, a step that raises it by half of 1e-13 of itself is taken, one by twice as much is not."""
    for rise, taken in ((0.5, True), (2.0, False)):
        begin = torch.zeros(1, 1).double()
        gradient = torch.full((1, 1), 1e-9).double()
        state = SimpleNamespace(
            point=begin,
            loss=torch.tensor([5.0]).double(),
            gradient=gradient,
            rho=torch.zeros(0, 1).double(),
            converged=torch.tensor([False]),
            failed=torch.tensor([False]),
            evaluations=0,
        )

        def evaluate(point, rise=rise):
            return 5.0 * (1 + rise * 1e-13) + 1e-9 * (point - point.detach()).sum(-1)

        point, loss, _ = _line_search(evaluate, state, -gradient)
        assert bool((point != begin).any()) is taken
        assert bool(loss > 5.0) is taken
        assert state.converged.item() is not taken
        assert state.evaluations == (1 if taken else 20)


def test_a_step_shrinks_to_the_lowest_point_of_a_parabola_within_limits():
    loss, slope = torch.zeros(5).double(), torch.tensor([-1.0, -1.0, -1.0, -1.0, -4.0]).double()
    step = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5]).double()
    trial = torch.tensor([1.0, 100.0, -0.9, torch.nan, 2.0]).double()
    finite = torch.tensor([True, True, True, False, True])
    expected = [0.25, 0.1, 0.5, 0.1, 0.25]  # 1/(2(1 + 1)), below a tenth, above a half, unknown, 2/(2(2 + 2))
    torch.testing.assert_close(_shrink(loss, slope, step, trial, finite), torch.tensor(expected).double())


@pytest.mark.parametrize(("fall", "taken"), [(0.05, True), (2e-4, True), (5e-5, False)])
def test_a_step_must_gain_a_ten_thousandth_of_what_its_slope_promises(fall, taken):
    state = SimpleNamespace(
        point=torch.zeros(1, 1).double(),
        loss=torch.tensor([1.0]).double(),
        gradient=torch.ones(1, 1).double(),
        rho=torch.zeros(0, 1).double(),
        converged=torch.tensor([False]),
        failed=torch.tensor([False]),
        evaluations=0,
    )

    def evaluate(point):
        return 1.0 - fall * (point.detach() == -1.0).double().sum(-1) + 0.0 * point.sum(-1)

    point, loss, _ = _line_search(evaluate, state, -state.gradient)
    assert (point.item() == -1.0) is taken
    assert (state.evaluations == 1) is taken
    assert (loss.item() < 1.0) is taken


class Told:
    """A problem whose updates go to the number of the call, and whose losses are told."""

    updates = Updates(suffice=False)

    def __init__(self, losses):
        self.losses, self.asked = losses, 0

    def update(self, point):
        self.asked += 1
        loss = torch.tensor(self.losses[self.asked - 1]).double()
        return torch.full_like(point, float(self.asked)), LossTerms.of(loss, reconstruction=loss)


def ascended(problem, rows, steps=100, **options):
    """Where descent begins."""
    return Deterministic().run(Run(problem, torch.zeros(rows, 2).double(), steps, **options), lambda progress: False)


def test_updates_before_descent_end_where_all_rows_gain_little(monkeypatch):
    monkeypatch.setattr("otpdag.engine.optimiser.descended", lambda run, *others: run.points)
    gain = Deterministic.little * 6.0
    for share, asked in ((0.9, 2), (1.2, 3)):
        problem = Told([[5.0 + share * gain, 5.0 + 0.5 * gain], [5.0, 5.0], [5.0, 5.0]])
        ascended(problem, 2)
        assert problem.asked == asked
    problem = Told([[float(-call)] for call in range(100)])
    ascended(problem, 1)
    assert problem.asked == Deterministic.first == 40
    over = Told([[3.0], [2.0]])
    ascended(over, 1, is_over=lambda: True)
    assert over.asked == 1
    none = Told([])
    none.updates = None
    assert ascended(none, 2).tolist() == [[0.0, 0.0]] * 2
    assert none.asked == 0


class BrokenSlope(torch.autograd.Function):
    """The value as it is; its gradient is no number near the lowest point."""

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return torch.where((value - 3.0).abs() < 0.5, torch.nan, gradient)


def test_points_without_a_slope_are_not_taken_though_their_loss_is_lowest():
    state = minimise(lambda point: (BrokenSlope.apply(point) - 3.0).square().sum(-1), torch.zeros(1, 1).double())
    assert torch.isfinite(state.gradient).all()
    assert abs(state.point.item() - 3.0) >= 0.5
    assert state.loss.item() < 9.0


@pytest.mark.parametrize("level", [-1000.0, 1000.0])
def test_changes_are_small_beside_the_size_of_the_loss_whatever_its_sign(level):
    def loss(point):
        return level + 0.25 * point.pow(4).sum(-1)

    state = minimise(loss, torch.full((1, 1), 0.9).double(), tolerance=1e-3, gradient_tolerance=0.0)
    assert (state.steps, bool(state.converged)) == (3, True)


# -- coordinates in which a loss is round, of losses whose curvature is known -----------------------------------------


@dataclass(frozen=True)
class Quadric(Problem):
    """Half of x' A x, for each replica the same A."""

    curvature: torch.Tensor
    pays: bool = True
    structure: object = None
    shapes: dict = field(default_factory=dict)

    @property
    def rows(self):
        return 1

    def loss(self, point):
        loss = 0.5 * torch.einsum("ri,ij,rj->r", point, self.curvature, point)
        return LossTerms.of(loss, reconstruction=loss)

    def metric(self, points):
        return self.curvature.expand(len(points), -1, -1) if self.pays and len(self.curvature) else None


def symmetric(values, seed=0):
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return turn @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ turn.T


def points(size, replicas=2):
    return torch.randn(replicas, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_curvature_becomes_one_up_to_its_sign():
    problem = Quadric(symmetric([100.0, 1.0, 0.01, -4.0]))
    coordinates = Coordinates.of(problem, points(4))
    assert coordinates.matrix.shape == (2, 4, 4)
    for replica in range(2):

        def loss(y, replica=replica):
            every = torch.zeros(2, 4, dtype=torch.float64).index_put((torch.tensor(replica),), y)
            return problem.loss(coordinates.point(every)).total[replica]

        hessian = torch.autograd.functional.hessian(loss, torch.zeros(4, dtype=torch.float64))
        torch.testing.assert_close(hessian.diagonal().sort().values, torch.tensor([-1.0, 1.0, 1.0, 1.0]).double())
        torch.testing.assert_close(hessian, torch.diag(hessian.diagonal()), atol=1e-9, rtol=0)


def test_a_step_of_steepest_descent_reaches_the_minimum_of_a_bowl():
    problem, start = Quadric(symmetric([50.0, 2.0, 0.1])), points(3)
    coordinates = Coordinates.of(problem, start)
    y = torch.zeros_like(start, requires_grad=True)
    (slope,) = torch.autograd.grad(problem.loss(coordinates.point(y)).total.sum(), y)
    torch.testing.assert_close(coordinates.point(-slope), torch.zeros_like(start), atol=1e-9, rtol=0)


def test_the_origin_is_where_the_curvature_was_taken():
    start = points(3)
    for problem in (Quadric(symmetric([5.0, 2.0, 1.0])), Quadric(symmetric([5.0, 2.0, 1.0]), pays=False)):
        coordinates = Coordinates.of(problem, start)
        assert torch.equal(coordinates.point(torch.zeros_like(start)), start)


@pytest.mark.parametrize("largest", [1.0, -1.0])
def test_flat_directions_are_not_stretched_without_end(largest):
    coordinates = Coordinates.of(Quadric(symmetric([largest, 0.0])), points(2))
    lengths = torch.linalg.svdvals(coordinates.matrix)
    torch.testing.assert_close(lengths, torch.tensor([[1e-7**-0.5, 1.0]] * 2).double())


def test_where_it_does_not_pay_coordinates_are_shifts():
    start = points(3)
    coordinates = Coordinates.of(Quadric(torch.eye(3).double(), pays=False), start)
    assert coordinates.matrix is None
    torch.testing.assert_close(coordinates.point(torch.ones_like(start)), start + 1)


def test_a_curvature_that_is_not_finite_counts_as_round():
    coordinates = Coordinates.of(Quadric(torch.full((2, 2), torch.nan).double()), points(2))
    torch.testing.assert_close(coordinates.matrix @ coordinates.matrix.mT, torch.eye(2).double().expand(2, 2, 2))


@dataclass(frozen=True)
class Informed(Quadric):
    """Says what a row tells of each parameter."""

    def metric(self, points):
        return torch.tensor([[4.0, 0.25, 1.0]] * len(points)).double()


def test_where_curvature_does_not_pay_scales_are_what_rows_tell():
    start = points(3)
    coordinates = Coordinates.of(Informed(torch.eye(3).double(), pays=False), start)
    y = torch.tensor([[1.0, 2.0, 3.0]] * 2).double()
    torch.testing.assert_close(coordinates.point(y), start + torch.tensor([0.5, 4.0, 3.0]).double())
    assert coordinates.matrix is None
    assert Coordinates.of(Quadric(torch.eye(3).double()), start).scale is None


def test_without_parameters_there_is_no_curvature():
    assert Coordinates.of(Quadric(torch.eye(0).double()), torch.zeros(2, 0).double()).matrix is None
