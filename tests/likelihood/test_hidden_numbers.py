"""Sequences with hidden numbers, beside a Kalman filter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag.engine.lbfgs import minimise
from otpdag.engine.resolve import recognise
from otpdag.likelihood import number_problem as hidden_numbers
from otpdag.likelihood.number_problem import SMALL_FALL, NumberProblem, padded_features, read_states, smoother_terms
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
    noise = problem.steps.noise
    half = noise.shape[1] // 2
    assert torch.equal(noise[:, :half], -noise[:, half:])
    assert problem.loss(start).total.item() == problem.loss(start).total.item()
    again, _, _ = made(known_state_space(), series(0.0))
    assert torch.equal(again.steps.noise, noise)


def test_steps_are_laid_out_by_time_and_earlier_values_are_the_sequences_own():
    x = series(0.0)
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x"), otp.lag("x", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": otp.mechanisms.Normal(), "x": otp.mechanisms.Normal()})
    problem, _, _ = made(model, x)
    steps = problem.steps
    assert steps.times.tolist() == sorted(steps.times.tolist())
    now, before = steps.values["x"][0, 0, :, 0].numpy(), steps.values["x[-1]"][0, 0, :, 0].numpy()
    np.testing.assert_allclose(before.reshape(25, 8)[1:], now.reshape(25, 8)[:-1])
    assert {tuple(column) for column in now.reshape(25, 8).T} == {tuple(row) for row in x}


def test_a_part_is_whole_sequences():
    problem, _, start = made(known_state_space(), series(0.0))
    part = problem.subset(torch.tensor([2, 5]))
    assert part.rows == 50
    assert torch.isfinite(part.loss(start).total).all()
    assert problem.subset(10**6) is problem


def test_hidden_nodes_are_told_apart():
    structure = switching_model().structure
    assert (structure.hidden_numbers, structure.hidden_categories) == (("z",), ("s",))
    features = torch.ones(1, 7, 3)
    padded = padded_features(structure, features)
    assert padded.shape == (1, 7, 3 + 2 * 2)
    assert padded[..., 3:].abs().sum() == 0
    assert padded_features(known_state_space().structure, features).shape == features.shape


def test_categories_are_read_now_and_one_step_later():
    data, _, _ = switching_series(0, 4, 12)
    problem, _, start = made(switching_model(), data)
    theta, phi = split_point(start, problem.shapes)
    naturals = problem.structure.naturals(theta)
    read = read_states(naturals, phi, problem.backward, problem.steps, problem.chain)
    assert read.features.shape == problem.steps.features.shape
    torch.testing.assert_close(read.features[..., :-4], problem.steps.features[..., :-4])
    now, later = read.features[0, :, -4:-2].reshape(12, 4, 2), read.features[0, :, -2:].reshape(12, 4, 2)
    torch.testing.assert_close(now.sum(-1), torch.ones(12, 4).double())
    torch.testing.assert_close(later[:-1], now[1:])
    assert later[-1].abs().sum() == 0
    moved = problem.refine(start)
    assert moved.problem.readings == problem.readings - 1
    assert moved.problem.last_loss == pytest.approx(problem.loss(start).total.item())
    same = moved.problem.refine(moved.point)  # read again at once, only if the first reading helped
    fall = problem.loss(start).total.item() - moved.problem.loss(start).total.item()
    assert (same is None) == (fall < SMALL_FALL)


def test_draws_are_many_for_few_steps_and_fewer_beside_categories(monkeypatch):
    """Eight draws and their mirror images, four beside categories; fewer where there would be too many in all."""
    x, (data, _, _) = series(0.0), switching_series(0, 4, 12)
    assert made(known_state_space(), x)[0].steps.noise.shape[1] == 2 * 8
    assert made(switching_model(), data)[0].steps.noise.shape[1] == 2 * 4
    for most, draws in ((799, 3), (800, 4), (100, 1)):
        monkeypatch.setattr(hidden_numbers, "DRAWN", most)
        assert made(known_state_space(), x)[0].steps.noise.shape[1] == 2 * draws


@pytest.mark.parametrize("eps", [1.0, 0.3])
def test_terms_are_sums_of_densities_at_the_draws(eps):
    """First steps have a mechanism of their own, others follow the same sequence's step before; gaps say nothing."""
    x = series(0.3)
    problem, layout, start = made(known_state_space(), x)
    theta, phi = split_point(start, problem.shapes)
    steps, naturals = problem.steps, layout.structure.naturals(theta)
    drawn = problem.backward.draw(phi, steps.block, steps.features, steps.noise)
    z = drawn.values["z"][0, :, :, 0].numpy().reshape(-1, 25, 8)
    now, seen = steps.values["x"][0, 0, :, 0].numpy(), steps.mask["x"][0, 0, :, 0].numpy()
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
    terms = smoother_terms(naturals, phi, problem.backward, steps, eps=eps)
    assert terms.reconstruction.item() == pytest.approx(cost / x.size)
    entropic = eps * (drawn.log_prob.sum(-1).mean().item() - prior) / x.size
    assert terms.entropic.item() == pytest.approx(entropic)
    assert terms.total.item() == pytest.approx(cost / x.size + entropic)
    assert problem.pace.steps is None
    assert problem.refine(start) is None


def test_categories_are_read_anew_eight_times_after_a_hundred_steps_each():
    data, _, _ = switching_series(0, 4, 12)
    problem, _, start = made(switching_model(), data)
    assert (problem.readings, problem.pace.steps, problem.last_loss) == (8, 100, float("inf"))
    first = problem.refine(start)
    assert first.what == "categories read 1"
    again = replace(first.problem, last_loss=first.problem.last_loss + 1.0).refine(start)
    assert (again.what, again.problem.readings) == ("categories read 2", 6)
    assert replace(problem, readings=0).refine(start) is None
    loss = problem.loss(start).total.item()
    assert replace(problem, last_loss=loss + 0.9 * SMALL_FALL).refine(start) is None
    assert replace(problem, last_loss=loss + 1.1 * SMALL_FALL).refine(start) is not None
