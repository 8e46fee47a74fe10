"""Sequences with hidden numbers, beside a Kalman filter."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag.engine.fit import recognise
from otpdag.engine.optimiser import minimise
from otpdag.learned.sequence_problem import NumberProblem, given_draws
from otpdag.problem import split_point
from tests.dynamic_models import kalman, known_state_space, linear_series, switching_model, switching_series

TRUTH = (0.85, 0.7, 0.5, 2.0)


def made(model, data):
    kind = recognise(model, data, weights=None, device="cpu", every_row=False)
    layout = kind.lay_out(otp.entropic(), 0)
    problem = kind.problem(layout, otp.entropic(), 0)
    assert type(problem) is NumberProblem
    return problem, layout, kind.starts(layout, problem, 0, [0])


def series(missing):
    x, _ = linear_series(0, sequences=8, length=25)
    x[np.random.default_rng(1).random(x.shape) < missing] = np.nan
    return x


def at_truth(model, problem, layout, start):
    """The model's own parameters, and the map's where the start has them: which coordinates are the map's."""
    _, phi = split_point(start, problem.shapes)
    raw = {key: value for key, value in layout.structure.raw(model.fitted.naturals).items() if key in layout.shapes}
    point = layout.pack({**raw, **phi})
    own = torch.cat([torch.full((int(np.prod(s)),), k.startswith("phi.")) for k, s in layout.shapes.items()])
    return point, own


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_with_the_best_map_the_loss_is_the_likelihood_of_a_kalman_filter(missing):
    x, model = series(missing), known_state_space()
    problem, layout, start = made(model, x)
    point, own = at_truth(model, problem, layout, start)
    exact = -kalman(TRUTH, x)[0].sum() / x.size

    def loss(free):
        return problem.loss(torch.where(own, torch.zeros_like(point).masked_scatter(own, free), point)).total

    ended = minimise(loss, point[:, own], steps=300, tolerance=1e-12)
    assert problem.loss(point).total.item() > exact + 1e-3  # the start is not it
    assert ended.loss.item() == pytest.approx(exact, abs=2e-3)


def test_noise_is_fixed_with_its_mirror_image():
    problem, _, start = made(known_state_space(), series(0.0))
    noise = problem.noise
    half = noise.shape[1] // 2
    assert torch.equal(noise[:, :half], -noise[:, half:])
    assert problem.loss(start).total.item() == problem.loss(start).total.item()
    again, _, _ = made(known_state_space(), series(0.0))
    assert torch.equal(again.noise, noise)


def test_a_part_is_whole_sequences():
    problem, _, start = made(known_state_space(), series(0.0))
    part = problem.subset(torch.tensor([2, 5]))
    assert part.rows == 50
    assert torch.isfinite(part.loss(start).total).all()
    assert problem.subset(10**6) is problem


def test_categories_are_read_now_and_one_step_later():
    data, _, _ = switching_series(0, 4, 12)
    problem, _, start = made(switching_model(), data)
    read = problem.refine(start).problem.steps
    assert read.features.shape == problem.steps.features.shape
    torch.testing.assert_close(read.features[..., :-4], problem.steps.features[..., :-4])
    now, later = read.features[0, :, -4:-2].reshape(12, 4, 2), read.features[0, :, -2:].reshape(12, 4, 2)
    torch.testing.assert_close(now.sum(-1), torch.ones(12, 4).double())
    torch.testing.assert_close(later[:-1], now[1:])
    assert later[-1].abs().sum() == 0
    moved = problem.refine(start)
    assert moved.problem.readings == problem.readings + 1
    assert moved.problem.last_loss == pytest.approx(problem.loss(start).total.item())
    same = moved.problem.refine(moved.point)  # read again at once, only if the first reading helped
    fall = problem.loss(start).total.item() - moved.problem.loss(start).total.item()
    assert (same is None) == (fall < problem.small_fall)


def test_draws_are_many_for_few_steps_and_fewer_beside_categories():
    """Eight draws and their mirror images, four beside categories; fewer where there would be too many in all."""
    assert made(known_state_space(), series(0.0))[0].noise.shape[1] == 2 * 8
    assert made(switching_model(), switching_series(0, 4, 12)[0])[0].noise.shape[1] == 2 * 4
    assert made(known_state_space(), linear_series(0, sequences=90, length=25)[0])[0].noise.shape[1] == 2 * 3


@pytest.mark.parametrize("eps", [1.0, 0.3])
def test_terms_are_sums_of_densities_at_the_draws(eps):
    """First steps have a mechanism of their own, others follow the same sequence's step before; gaps say nothing."""
    x = series(0.3)
    problem, layout, start = made(known_state_space(), x)
    problem = replace(problem, eps=eps)
    theta, phi = split_point(start, problem.shapes)
    steps, naturals = problem.steps, layout.structure.naturals(theta)
    drawn = problem.backward.draw(phi, steps.block, steps.features, problem.noise)
    z = drawn.values["z"][0, :, :, 0].numpy().reshape(-1, 25, 8)
    now, seen = steps.values["x"][0, :, 0].numpy(), steps.mask["x"][0, :, 0].numpy()
    own = {node: {name: float(value) for name, value in naturals[node].items()} for node in ("x", "z", "z[0]")}
    cost = prior = 0.0
    for t in range(25):
        for s in range(8):
            at, row = z[:, t, s], t * 8 + s
            if seen[row]:
                law = own["x"]
                cost -= stats.norm.logpdf(now[row], law["loc"] + law["weight"] * at, law["scale"]).mean()
            law = own["z"] if t else own["z[0]"]
            before = law["weight"] * z[:, t - 1, s] if t else 0.0
            prior += stats.norm.logpdf(at, law["loc"] + before, law["scale"]).mean()
    terms = problem.loss(start)
    assert terms.reconstruction.item() == pytest.approx(cost / x.size)
    entropic = eps * (drawn.log_prob.sum(-1).mean().item() - prior) / x.size
    assert terms.entropic.item() == pytest.approx(entropic)
    assert terms.total.item() == pytest.approx(cost / x.size + entropic)
    assert problem.pace.steps is None
    assert problem.refine(start) is None


def test_categories_are_read_anew_eight_times_after_a_hundred_steps_each():
    data, _, _ = switching_series(0, 4, 12)
    problem, _, start = made(switching_model(), data)
    assert (problem.most_readings, problem.pace.steps, problem.last_loss) == (8, 100, float("inf"))
    first = problem.refine(start)
    assert first.what == "map reads 1"
    again = replace(first.problem, last_loss=first.problem.last_loss + 1.0).refine(start)
    assert (again.what, again.problem.readings) == ("map reads 2", 2)
    assert replace(problem, readings=8).refine(start) is None
    loss = problem.loss(start).total.item()
    assert replace(problem, last_loss=loss + 0.9 * problem.small_fall).refine(start) is None
    assert replace(problem, last_loss=loss + 1.1 * problem.small_fall).refine(start) is not None


def test_categories_are_summed_over_exactly_given_the_numbers():
    known = switching_model()
    known.set_params(
        {
            "s": {"probs": [[0.8, 0.2], [0.3, 0.7]]},
            "s[0]": {"probs": [0.6, 0.4]},
            "z": {"loc": [-1.0, 1.0], "weight": 0.5, "scale": [1.0, 0.7]},
            "z[0]": {"loc": [0.0, 0.5], "scale": [1.0, 2.0]},
            "x": {"loc": 0.3, "weight": 0.5, "scale": 0.4},
            "y": {"loc": 0.0, "weight": -1.0, "scale": 0.8},
        }
    )
    data, _, _ = switching_series(1, sequences=1, length=4)
    problem, _, start = made(known, data)
    drawn = problem.backward.draw(
        split_point(start, problem.shapes)[1], problem.steps.block, problem.steps.features, problem.noise
    )
    cost, _ = given_draws(known.fitted.naturals, problem.steps, drawn, problem.chain)
    expected = np.mean([log_joint(data, path) for path in drawn.values["z"][0, :, :, 0].detach().numpy()])
    assert cost.item() == pytest.approx(-expected, rel=1e-6)


def log_joint(data, z):
    """Log-density of numbers and indicators, regimes enumerated."""
    moves, total = np.array([[0.8, 0.2], [0.3, 0.7]]), -np.inf
    seen = normal(data["x"][0], 0.3 + 0.5 * z, 0.4).sum() + normal(data["y"][0], -z, 0.8).sum()
    for path in itertools.product(range(2), repeat=4):
        found = np.log([0.6, 0.4])[path[0]] + normal(z[0], [0.0, 0.5][path[0]], [1.0, 2.0][path[0]])
        for t in range(1, 4):
            mean = [-1.0, 1.0][path[t]] + 0.5 * z[t - 1]
            found += np.log(moves[path[t - 1], path[t]]) + normal(z[t], mean, [1.0, 0.7][path[t]])
        total = np.logaddexp(total, found)
    return total + seen


def normal(value, mean, scale):
    return -0.5 * ((value - mean) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)
