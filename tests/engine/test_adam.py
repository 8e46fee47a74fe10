"""Adam on the sampled objective: noise modes, scopes, alternation, schedules, replicas."""

import math
import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward import AmortizedMap, RowCode
from otpdag.data import Schema, encode
from otpdag.divergences import AbstractDivergence, Energy
from otpdag.engine import Adam, Run
from otpdag.objective import Drawn
from otpdag.problem import LossTerms, Pace, Problem, split_theta
from otpdag.settings import Objective, PushForward
from otpdag.structure import unpack
from tests.table_problems import lay_out_rows, starts_of, table_problem

RNG = np.random.default_rng(8)


def factor():
    z = RNG.normal(size=(150, 1))
    table = pd.DataFrame(z * [1.0, -0.7, 0.5] + RNG.normal(size=(150, 3)) * 0.7, columns=["a", "b", "c"])
    graph = otp.Graph([("z", n) for n in table], hidden=["z"])
    return otp.Model(graph, {"z": m.Normal(), **{n: m.Normal() for n in table}}), table


def mixture():
    z = RNG.integers(0, 2, 150)
    table = pd.DataFrame({"x": np.where(z, 3.0, -3.0) + RNG.normal(size=150), "n": RNG.poisson(np.where(z, 6.0, 1.0))})
    graph = otp.Graph([("z", n) for n in table], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal(), "n": m.Poisson()}), table


PROBLEMS = {"factor": factor(), "mixture": mixture()}


def method_of(*, eta=0.5, eps=0.3, divergence=None, reconstruction=1.0, direct=None, **changes):
    """Settings of all three parts of a method at once."""
    optimiser = {key: changes.pop(key) for key in ("steps", "averaging", "alternating") if key in changes}
    push = PushForward(eta, divergence or Energy()) if eta else None
    return otp.Method(
        "test",
        Objective(reconstruction, eps, push, direct),
        Drawn(**{"noise": "sampled", "batch_size": 64, "hidden_layers": (4,), **changes}),
        Adam(**{"steps": 60, "learning_rate": 0.03, **optimiser}),
    )


def problem_of(name, method, restarts=1, seed=0):
    model, table = PROBLEMS[name]
    batch = encode(table, Schema.of(model.spaces, model.graph, table), hidden=model.graph.hidden)
    layout = lay_out_rows(model.structure, batch, method, seed)
    return table_problem(layout, batch, method, seed), starts_of(layout, batch, range(restarts), seed=seed)


def descend(adam, problem, points, seeds, steps=None, watch=lambda progress: False):
    return adam.run(Run(problem, points, steps or adam.steps, seeds=seeds), watch)


def run(method, problem, points, seeds):
    losses = []

    def watch(progress):
        losses.append(progress.losses.clone())
        return False

    outcome = descend(method.optimiser, problem, points, seeds, watch=watch)
    return outcome, torch.stack(losses)


def run_on(name, method):
    return run(method, *problem_of(name, method), [1])


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["sampled", "abducted", "marginal"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("scope", ["joint", "local"])
def test_every_mode_lowers_the_loss(name, noise, scope):
    method = method_of(noise=noise, scope=scope)
    problem, points = problem_of(name, method)
    generator = torch.Generator().manual_seed(0)
    points = points + 0.5 * torch.randn(points.shape, generator=generator, dtype=points.dtype)
    outcome, losses = run(method, problem, points, [1])
    assert not outcome.failed.any()
    assert torch.isfinite(outcome.point).all()
    assert losses[-15:].mean() < losses[:5].mean() - 1e-3


@pytest.mark.parametrize("noise", ["sampled", "abducted"])
def test_replicas_together_equal_replicas_apart(noise):
    method = method_of(noise=noise, steps=8, alternating=True)
    problem, points = problem_of("mixture", method, restarts=3)
    together, _ = run(method, problem, points, [1, 2, 3])
    for r in range(3):
        apart, _ = run(method, problem, points[r : r + 1], [1 + r])
        np.testing.assert_allclose(together.point[r], apart.point[0], rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(together.loss[r], apart.loss[0], rtol=1e-8)


def test_a_replica_that_fails_does_not_disturb_the_others_and_keeps_its_last_good_point():
    method = method_of(eta=0.0, steps=8)
    problem, points = problem_of("factor", method, restarts=3)
    broken = points.clone()
    broken[1] = torch.nan
    together, _ = run(method, problem, broken, [1, 2, 3])
    assert together.failed.tolist() == [False, True, False]
    assert together.converged.tolist() == [False] * 3
    alone, _ = run(method, problem, points[[0, 2]], [1, 3])
    np.testing.assert_allclose(together.point[[0, 2]], alone.point, rtol=1e-9)
    outcome = descend(method.optimiser, problem, broken[1:2], [2])
    assert outcome.failed.all()
    assert outcome.steps == 0


def test_alternating_updates_move_one_half_at_a_time():
    method = method_of(alternating=True, averaging=0.0)
    problem, points = problem_of("factor", method)
    theta_size = sum(v.numel() for v in split_theta(unpack(points, problem.shapes))[0].values())
    previous = points
    for steps in range(1, 6):
        # the cosine's length is part of the step sizes: give it all steps, stop by the callback
        outcome = descend(
            method.optimiser, problem, points, [1], 50, watch=lambda progress, last=steps: progress.step + 1 == last
        )
        change = (outcome.point - previous)[0].abs()
        model_moved, map_moved = bool(change[:theta_size].any()), bool(change[theta_size:].any())
        assert (model_moved, map_moved) == ((True, False) if steps % 2 == 1 else (False, True))
        previous = outcome.point


def test_joint_updates_move_both():
    method = method_of(averaging=0.0)
    problem, points = problem_of("factor", method)
    outcome = descend(method.optimiser, problem, points, [1], 1)
    theta_size = sum(v.numel() for v in split_theta(unpack(points, problem.shapes))[0].values())
    change = (outcome.point - points)[0].abs()
    assert change[:theta_size].any()
    assert change[theta_size:].any()


def test_schedules_are_read_at_every_step():
    class Recorder:
        def __init__(self):
            self.seen = []

        def __call__(self, progress):
            self.seen.append(progress)
            return 0.5

    recorders = {name: Recorder() for name in ("eta", "eps", "temperature")}
    method = method_of(**recorders, steps=4)
    problem, points = problem_of("mixture", method)
    for recorder in recorders.values():
        recorder.seen.clear()
    run(method, problem, points, [1])
    for recorder in recorders.values():
        assert list(dict.fromkeys(recorder.seen)) == [0.0, 0.25, 0.5, 0.75]  # in this order, however often
    varied, _ = run_on("mixture", method_of(temperature=lambda progress: 0.1**progress, steps=8))
    plain, _ = run_on("mixture", method_of(temperature=1.0, steps=8))
    assert not torch.allclose(varied.point, plain.point)


def test_averaging_is_the_mean_of_the_last_iterates():
    method = method_of(averaging=0.5, steps=4)
    problem, points = problem_of("factor", method)
    ends = []
    for last in range(1, 5):
        bare = replace(method.optimiser, averaging=0.0)
        ends.append(
            descend(bare, problem, points, [1], watch=lambda progress, last=last: progress.step + 1 == last).point
        )
    averaged = descend(method.optimiser, problem, points, [1]).point
    torch.testing.assert_close(averaged, torch.stack(ends[2:]).mean(0))


def test_options_of_categories_costs_and_divergences_reach_the_objective():
    class Flat(AbstractDivergence):
        def forward(self, x, y, a, b, generator):
            return (x.mean((-1, -2)) - y.mean((-1, -2))) ** 2

    base, _ = run_on("mixture", method_of(steps=5))
    variants = {
        "cost": method_of(steps=5, costs={"x": lambda x, y: (x - y).abs().sum(-1)}),
        "divergence": method_of(steps=5, divergence=Flat()),
        "reconstruction": method_of(steps=5, reconstruction=2.0),
    }
    for name, method in variants.items():
        outcome, losses = run_on("mixture", method)
        assert torch.isfinite(losses).all(), name
        assert not torch.allclose(outcome.point, base.point), name


def test_fully_observed_graphs_have_no_map_to_learn():
    table = pd.DataFrame({"x": RNG.normal(size=80)})
    table["y"] = 2 * table["x"] + RNG.normal(size=80)
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    result = otp.fit(model, table, method=method_of(noise="marginal", steps=60, alternating=True, batch_size=80))
    assert model.params()["y"]["weight"].item() == pytest.approx(np.polyfit(table["x"], table["y"], 1)[0], abs=0.1)
    assert len(result.history) == 60


def test_a_span_without_a_step_leaves_its_starts_where_they_are():
    """A warm-up of a share of two steps, for instance, may have none."""

    class Brief:
        def __init__(self, problem):
            self.problem, self.pace = problem, Pace(span=(0.0, 0.2))

        def __getattr__(self, name):
            return getattr(self.problem, name)

        def sampled(self, point, streams, progress):
            return self.problem.sampled(point, streams, progress)

    problem, points = problem_of("factor", method_of(), restarts=2)
    outcome = descend(Adam(steps=2), Brief(problem), points, [1, 2])
    assert outcome.steps == 0
    assert torch.equal(outcome.point, points)
    assert not outcome.failed.any()


def test_steps_run_through_the_part_of_the_schedule_that_a_problem_spans():
    class Middle:
        pace = Pace(span=(0.25, 0.75))

        def __init__(self, problem):
            self.problem, self.progress = problem, []

        def __getattr__(self, name):
            return getattr(self.problem, name)

        def sampled(self, point, streams, progress):
            self.progress.append(progress)
            return self.problem.sampled(point, streams, progress)

    problem, points = problem_of("factor", method_of(), restarts=2)
    middle = Middle(problem)
    outcome = descend(Adam(steps=8), middle, points, [1, 2])
    assert outcome.steps == 4
    assert middle.progress == [0.25, 0.375, 0.5, 0.625]


class Told(Problem):
    """Losses of each step and replica that are told beforehand, whatever the point."""

    structure = None
    shapes: ClassVar = {"a": (1,)}
    rows = 10

    def __init__(self, losses):
        self.losses = iter(torch.as_tensor(losses))

    def sampled(self, point, streams, progress):
        loss = next(self.losses) + 0 * point[:, 0]
        return LossTerms.of(loss, reconstruction=loss)


def ended(losses):
    """The end of a run that meets losses (steps, replicas)."""
    steps, replicas = np.shape(losses)
    start = torch.zeros(replicas, 1, dtype=torch.float64)
    return descend(Adam(steps=steps), Told(losses), start, list(range(replicas)))


@pytest.mark.parametrize(
    ("losses", "settled"),
    [
        (np.exp(-np.arange(200) / 15), True),
        (np.exp(-np.arange(200) / 150), False),
        (np.linspace(1, 0, 200), False),
        (0.01 * RNG.normal(size=200), True),
        (np.exp(-np.arange(50 - 1)), False),
    ],
    ids=["flat by the middle", "still falling", "straight line", "noise about zero", "too few steps to tell"],
)
def test_what_counts_as_settled(losses, settled):
    assert ended(losses[:, None]).converged.tolist() == [settled]


def test_the_energy_distance_is_the_default_of_a_method():
    assert PushForward().divergence == Energy()
    assert otp.entropic(eta=1.0).objective.push_forward.divergence == Energy()


def test_a_map_of_the_users_own_is_learned():
    generator = np.random.default_rng(0)
    factor = generator.standard_normal(300)
    frame = pd.DataFrame({name: factor + 0.5 * generator.standard_normal(300) for name in ("a", "b", "c")})
    built = []

    class RowMap(AmortizedMap):
        def outputs(self, phi, node, row, values):
            return row @ phi[self.key(node, "linear")] + phi[self.key(node, "bias")].unsqueeze(1)

    def build(structure, batch):
        code = RowCode.of(structure, batch, structure.graph.observed)
        nodes = structure.graph.hidden, structure.graph.observed
        built.append(RowMap(structure, code, targets=nodes[0], explains=nodes[1], hidden=()))
        return built[-1:]

    nodes = {"f": m.Normal()} | {name: m.Normal() for name in frame}
    model = otp.Model(otp.Graph([("f", name) for name in frame], hidden=["f"]), nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", otp.ConvergenceWarning)
        method = otp.paper(steps=250)
        method = replace(method, evaluation=replace(method.evaluation, backward=build))
        otp.fit(model, frame, method=method, restarts=1)
    assert len(built) == 1
    np.testing.assert_allclose([model.params()[name]["weight"][0] for name in frame], 1.0, atol=0.25)
    with pytest.raises(otp.ModelError, match="what is Drawn is minimised by Adam; got Deterministic"):
        replace(otp.entropic(), evaluation=Drawn(backward=build))


@dataclass(frozen=True)
class Valley(Problem):
    """A steep and a flat direction, the same in every step."""

    structure = None
    shapes: ClassVar = {"a": (1,), "b": (1,)}
    rows = 10

    def sampled(self, point, streams, progress):
        loss = 300 * point[:, 0].square() + (point[:, 1] - 2).abs()
        return LossTerms.of(loss, reconstruction=loss)


def test_steps_are_those_of_torchs_adam_under_a_cosine_with_gradients_of_bounded_length():
    start = torch.tensor([[1.0, 0.0], [1e-3, 5.0]], dtype=torch.float64)
    outcome = descend(Adam(steps=40, learning_rate=0.1, averaging=0.0), Valley(), start, [1, 2])
    for row in range(2):
        point = start[row].clone().requires_grad_(True)
        optimiser, losses = torch.optim.Adam([point], lr=0.1), []
        for step in range(40):
            loss = 300 * point[0].square() + (point[1] - 2).abs()
            (gradient,) = torch.autograd.grad(loss, point)
            length = gradient.norm().item()
            point.grad = gradient * min(1.0, Adam.largest_gradient / length)
            optimiser.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / 40))
            optimiser.step()
            losses.append(loss.item())
        np.testing.assert_allclose(outcome.point[row], point.detach(), rtol=1e-9)
        assert outcome.loss[row].item() == pytest.approx(np.mean(losses[-4:]))  # the last tenth
    assert Adam.largest_gradient < 600  # so that the first gradient was cut


def test_a_leg_that_was_cut_short_has_not_converged():
    start = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    whole = descend(Adam(steps=60), Valley(), start, [1])
    assert whole.converged.tolist() == [True]
    cut = descend(Adam(steps=60), Valley(), start, [1], watch=lambda progress: progress.step == 58)
    assert cut.converged.tolist() == [False]
    assert cut.steps == 59


@pytest.mark.parametrize("steps", [1, 9, 10, 30, 39])
def test_the_loss_of_an_end_is_the_mean_of_a_tenth_of_its_steps_and_of_one_at_least(steps):
    losses = np.arange(float(steps))
    assert ended(losses[:, None]).loss.item() == pytest.approx(losses[-max(1, steps // 10) :].mean())


def plainly_settled(losses):
    """By the definition, for the losses of one replica."""
    n = len(losses)
    if n < 50:
        return False
    first, middle, late = losses[: n // 10], losses[2 * n // 5 : 3 * n // 5], losses[4 * n // 5 :]
    noise = math.sqrt(np.var(middle, ddof=1) / len(middle) + np.var(late, ddof=1) / len(late))
    fall, all_of_it = np.mean(middle) - np.mean(late), np.mean(first) - np.mean(late)
    return fall <= max(3 * noise, 0.1 * all_of_it, 0.02 * (1 + abs(np.mean(late))))


@pytest.mark.parametrize("level", [-3.0, 0.0, 5.0])
def test_losses_have_settled_by_the_definition(level):
    """Many falls near the limits: exponential ones of all sizes and speeds, with little and with much noise."""
    rng = np.random.default_rng(int(10 + level))
    counted = 0
    for _ in range(20):
        steps = int(rng.integers(45, 130))
        time, losses = np.arange(steps) / steps, []
        for _ in range(20):
            shape = np.exp(-time * rng.uniform(0.3, 8.0)) if rng.random() < 0.5 else 1 - time ** rng.uniform(0.3, 4)
            losses.append(level + 10 ** rng.uniform(-2, 1) * shape + 10 ** rng.uniform(-4, 0) * rng.normal(size=steps))
        expected = [plainly_settled(one) for one in losses]
        counted += sum(expected)
        assert ended(np.stack(losses, -1)).converged.tolist() == expected
    assert 40 < counted < 360


def test_what_is_kept_of_a_run_carries_no_gradient():
    method = method_of(steps=3)
    problem, points = problem_of("factor", method)
    kept = []
    descend(method.optimiser, problem, points, [1], watch=lambda progress: kept.append(progress.snapshot()) or False)
    assert len(kept) == 3
    assert not any(value.requires_grad for snapshot in kept for value in snapshot.values())
    assert [int(snapshot["step"]) for snapshot in kept] == [1, 2, 3]
