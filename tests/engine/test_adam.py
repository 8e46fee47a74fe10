"""Adam on the sampled objective: noise modes, scopes, alternation, schedules, replicas."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag import schedules
from otpdag.backward import AmortizedMap, RowCode
from otpdag.data import Schema, encode
from otpdag.divergences import AbstractDivergence, Energy
from otpdag.engine import search
from otpdag.engine.adam import FEWEST_STEPS, _has_settled, descend
from otpdag.engine.problem import build_problem
from otpdag.objective import Streams, split_theta
from otpdag.structure import unpack

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
BASE = otp.Method(
    "test",
    noise="sampled",
    eta=0.5,
    eps=0.3,
    optimiser="adam",
    steps=60,
    batch_size=64,
    hidden_layers=(4,),
    learning_rate=0.03,
)


def problem_of(name, method, restarts=1, seed=0):
    model, table = PROBLEMS[name]
    batch = encode(table, Schema.of(model.spaces, model.graph, table), hidden=model.graph.hidden)
    layout = search.prepare(model.structure, batch, method, seed)
    points = search.initial_points(layout, batch, seed, range(restarts))
    return build_problem(layout.structure, batch, method, layout.shapes, seed, layout.maps), points


def run(problem, points, seeds, steps=None):
    losses = []

    def on_step(step, terms):
        losses.append(terms.total.detach())
        return False

    outcome = descend(problem, points, Streams(seeds), steps=steps or problem.method.steps, on_step=on_step)
    return outcome, torch.stack(losses)


@pytest.mark.parametrize("noise", ["sampled", "abducted", "marginal"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("scope", ["joint", "local"])
def test_every_mode_lowers_the_loss(name, noise, scope):
    problem, points = problem_of(name, replace(BASE, noise=noise, scope=scope))
    generator = torch.Generator().manual_seed(0)
    points = points + 0.5 * torch.randn(points.shape, generator=generator, dtype=points.dtype)
    outcome, losses = run(problem, points, [1])
    assert not outcome.failed.any()
    assert torch.isfinite(outcome.point).all()
    assert losses[-15:].mean() < losses[:5].mean() - 1e-3


@pytest.mark.parametrize("noise", ["sampled", "abducted"])
def test_replicas_together_equal_replicas_apart(noise):
    method = replace(BASE, noise=noise, steps=8, extra_masking=0.1, alternating=True)
    problem, points = problem_of("mixture", method, restarts=3)
    together, _ = run(problem, points, [1, 2, 3])
    for r in range(3):
        apart, _ = run(problem, points[r : r + 1], [1 + r])
        np.testing.assert_allclose(together.point[r], apart.point[0], rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(together.loss[r], apart.loss[0], rtol=1e-8)


def test_a_replica_that_fails_does_not_disturb_the_others_and_keeps_its_last_good_point():
    problem, points = problem_of("factor", replace(BASE, eta=0.0, steps=8), restarts=3)
    broken = points.clone()
    broken[1] = torch.nan
    together, _ = run(problem, broken, [1, 2, 3])
    assert together.failed.tolist() == [False, True, False]
    assert together.settled.tolist() == [False] * 3
    alone, _ = run(problem, points[[0, 2]], [1, 3])
    np.testing.assert_allclose(together.point[[0, 2]], alone.point, rtol=1e-9)
    outcome = descend(problem, broken[1:2], Streams([2]), steps=8)
    assert outcome.failed.all()
    assert outcome.steps == 0


def test_alternating_updates_move_one_half_at_a_time():
    problem, points = problem_of("factor", replace(BASE, alternating=True, averaging=0.0))
    theta_size = sum(v.numel() for v in split_theta(unpack(points, problem.shapes))[0].values())
    previous = points
    for steps in range(1, 6):
        # the cosine's length is part of the step sizes: give it all steps, stop by the callback
        outcome = descend(
            problem, points, Streams([1]), steps=50, on_step=lambda step, terms, last=steps: step + 1 == last
        )
        change = (outcome.point - previous)[0].abs()
        model_moved, map_moved = bool(change[:theta_size].any()), bool(change[theta_size:].any())
        assert (model_moved, map_moved) == ((True, False) if steps % 2 == 1 else (False, True))
        previous = outcome.point


def test_joint_updates_move_both():
    problem, points = problem_of("factor", replace(BASE, averaging=0.0))
    outcome = descend(problem, points, Streams([1]), steps=1)
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
    problem, points = problem_of("mixture", replace(BASE, **recorders, steps=4))
    for recorder in recorders.values():
        recorder.seen.clear()
    run(problem, points, [1])
    for recorder in recorders.values():
        assert recorder.seen == [0.0, 0.25, 0.5, 0.75]
    varied, _ = run(*problem_of("mixture", replace(BASE, temperature=schedules.Exponential(1.0, 0.1), steps=8)), [1])
    plain, _ = run(*problem_of("mixture", replace(BASE, temperature=1.0, steps=8)), [1])
    assert not torch.allclose(varied.point, plain.point)


def test_averaging_is_the_mean_of_the_last_iterates():
    problem, points = problem_of("factor", replace(BASE, averaging=0.5, steps=4))
    ends = []
    for last in range(1, 5):
        bare = replace(problem, method=replace(problem.method, averaging=0.0))
        ends.append(
            descend(bare, points, Streams([1]), steps=4, on_step=lambda step, terms, last=last: step + 1 == last).point
        )
    averaged = descend(problem, points, Streams([1]), steps=4).point
    torch.testing.assert_close(averaged, torch.stack(ends[2:]).mean(0))


def test_options_of_categories_costs_and_divergences_reach_the_objective():
    class Flat(AbstractDivergence):
        def forward(self, x, y, a, b, generator):
            return (x.mean((-1, -2)) - y.mean((-1, -2))) ** 2

    base, _ = run(*problem_of("mixture", replace(BASE, steps=5)), [1])
    variants = {
        "straight_through": replace(BASE, steps=5, straight_through=True),
        "extra_masking": replace(BASE, steps=5, extra_masking=0.5),
        "cost": replace(BASE, steps=5, costs={"x": lambda x, y: (x - y).abs().sum(-1)}),
        "divergence": replace(BASE, steps=5, divergence=Flat()),
        "reconstruction": replace(BASE, steps=5, reconstruction=2.0),
    }
    for name, method in variants.items():
        outcome, losses = run(*problem_of("mixture", method), [1])
        assert torch.isfinite(losses).all(), name
        assert not torch.allclose(outcome.point, base.point), name


def test_a_direct_term_can_be_added_to_a_sampled_objective():
    method = replace(BASE, kappa=1.0, features=otp.divergences.WhitenedFeatures(features=20), steps=3)
    problem, points = problem_of("mixture", method)
    terms = problem.sampled(points, Streams([1]), 0.0)
    assert terms.direct.item() > 0
    assert terms.total.item() == pytest.approx(
        (terms.reconstruction + terms.divergence + terms.entropic + terms.direct).item()
    )


def test_fully_observed_graphs_have_no_map_to_learn():
    table = pd.DataFrame({"x": RNG.normal(size=80)})
    table["y"] = 2 * table["x"] + RNG.normal(size=80)
    model = otp.Model(otp.Graph([("x", "y")]), {"x": m.Normal(), "y": m.Normal()})
    result = otp.fit(model, table, method=replace(BASE, noise="marginal", steps=60, alternating=True, batch_size=80))
    assert model.params()["y"]["weight"].item() == pytest.approx(np.polyfit(table["x"], table["y"], 1)[0], abs=0.1)
    assert len(result.history) == 60


@pytest.mark.parametrize(
    ("losses", "settled"),
    [
        (np.exp(-np.arange(200) / 15), True),
        (np.exp(-np.arange(200) / 150), False),
        (np.linspace(1, 0, 200), False),
        (0.01 * RNG.normal(size=200), True),
        (np.exp(-np.arange(FEWEST_STEPS - 1)), False),
    ],
    ids=["flat by the middle", "still falling", "straight line", "noise about zero", "too few steps to tell"],
)
def test_what_counts_as_settled(losses, settled):
    assert _has_settled(torch.tensor(losses)[:, None]).tolist() == [settled]


def test_the_energy_distance_is_the_default_of_a_method():
    assert otp.Method("plain").divergence == Energy()


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
        otp.fit(model, frame, method=replace(otp.paper(), backward=build, steps=400), restarts=1)
    assert len(built) == 1
    np.testing.assert_allclose([model.params()[name]["weight"][0] for name in frame], 1.0, atol=0.25)
    with pytest.raises(otp.ModelError, match="learned with optimiser='adam'"):
        replace(otp.entropic(), backward=build)
