"""Particles, beside a Kalman filter and smoother, and beside one dense normal distribution of all steps."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema
from otpdag.data.sequences import Sequences, encode_sequences
from otpdag.errors import ModelError
from otpdag.likelihood.particles import draw_paths, filter_particles
from tests.dynamic_models import kalman, kalman_smoother, known_state_space, linear_series

LENGTHS = (5, 2, 4, 1)


def test_particles_give_the_kalman_likelihood_and_smoother():
    model = known_state_space()
    x, _ = linear_series(3, sequences=3, length=25)
    x[0, 5:8] = np.nan
    truth = (0.85, 0.7, 0.5, 2.0)
    assert model.score(x, kind="likelihood") * x.size == pytest.approx(kalman(truth, x)[0].sum(), abs=0.6)
    draws = model.posterior(x, draws=200, seed=0)["z"].to_numpy().reshape(3, 25, 200)
    np.testing.assert_allclose(draws.mean(-1), kalman_smoother(truth, x), atol=0.25)


class Equations:
    """Linear equations of hidden numbers with normal errors: their posterior, and the integral over all of them."""

    def __init__(self, many):
        self.precision, self.pull, self.constant = np.zeros((many, many)), np.zeros(many), many / 2 * np.log(2 * np.pi)

    def add(self, slopes, target, scale):
        """The sum of slopes times numbers is the target, up to an error of this scale."""
        row = np.zeros(len(self.pull))
        for at, slope in slopes.items():
            row[at] += slope
        self.precision += np.outer(row, row) / scale**2
        self.pull += row * target / scale**2
        self.constant -= 0.5 * np.log(2 * np.pi * scale**2) + 0.5 * target**2 / scale**2

    @property
    def mean(self):
        return np.linalg.solve(self.precision, self.pull)

    @property
    def covariance(self):
        return np.linalg.inv(self.precision)

    @property
    def log_integral(self):
        return self.constant + 0.5 * self.pull @ self.mean - 0.5 * np.linalg.slogdet(self.precision)[1]


def batch_of(model, frames):
    schema = Schema.of(model.spaces, model.graph)
    return encode_sequences(Sequences(frames), schema, hidden=model.graph.hidden, partial=True)


def series(seed):
    rng = np.random.default_rng(seed)
    frames = [pd.DataFrame(rng.normal(size=(length, 3)), columns=["u", "x", "y"]) for length in LENGTHS]
    frames[0].loc[2, "x"] = np.nan
    frames[2].loc[1, "y"] = np.nan
    return frames


def driven_model():
    """Numbers that earlier observations drive, seen by a series of its own past and by one of their own past."""
    edges = [otp.lag("z", "z"), otp.lag("u", "z"), ("u", "x"), ("z", "x"), otp.lag("x", "x", by=2)]
    graph = otp.Graph([*edges, ("z", "y"), otp.lag("z", "y")], hidden=["z"])
    model = otp.Model(graph, {"u": m.Given(), "z": m.Normal(), "x": m.Normal(), "y": m.Normal()})
    return model.set_params(
        {
            "z": {"loc": 0.3, "weight": [[0.8], [-0.5]], "scale": 0.7},
            "z[0]": {"loc": -0.4, "scale": 1.3},
            "x": {"loc": 0.2, "weight": [[0.6], [0.9], [0.4]], "scale": 0.8},
            "y": {"loc": -0.1, "weight": [[0.5], [-0.7]], "scale": 0.9},
        }
    )


def driven_equations(frame):
    u, x, y = (frame[name] for name in ("u", "x", "y"))
    equations = Equations(len(x))
    for t in range(len(x)):
        if t == 0:
            equations.add({0: 1.0}, -0.4, 1.3)
        else:
            equations.add({t: 1.0, t - 1: -0.8}, 0.3 - 0.5 * u[t - 1], 0.7)
            if not np.isnan(y[t]):
                equations.add({t: 0.5, t - 1: -0.7}, y[t] + 0.1, 0.9)
        if t >= 2 and not np.isnan(x[t]) and not np.isnan(x[t - 2]):  # the first two are conditioned on
            equations.add({t: 0.9}, x[t] - 0.2 - 0.6 * u[t] - 0.4 * x[t - 2], 0.8)
    return equations


def test_numbers_that_earlier_observations_drive():
    model, frames = driven_model(), series(1)
    batch, structure, naturals = batch_of(model, frames), model.structure, model.fitted.naturals
    truth = [driven_equations(frame) for frame in frames]
    generator = torch.Generator().manual_seed(0)
    many = filter_particles(structure, naturals, batch, 4000, generator)
    np.testing.assert_allclose(many.log_likelihood, [one.log_integral for one in truth], atol=0.05)
    particles = filter_particles(structure, naturals, batch, 1000, generator)
    paths = draw_paths(structure, naturals, batch, particles, 600, generator)["z"][..., 0].split(LENGTHS)
    for path, one in zip(paths, truth, strict=True):
        np.testing.assert_allclose(path.mean(1), one.mean, atol=0.15)
        np.testing.assert_allclose(np.cov(path.numpy(), bias=True), one.covariance, atol=0.2)


def test_the_weight_of_a_particle_is_the_density_of_what_is_seen_over_the_sum_of_all():
    model, frames = known_state_space(), [frame[["x"]] for frame in series(2)]
    batch = batch_of(model, frames)
    particles = filter_particles(model.structure, model.fitted.naturals, batch, 50, torch.Generator().manual_seed(3))
    order = [0, 2, 1, 3]  # of the lengths, the longest first
    for step, (values, weight) in enumerate(zip(particles.values, particles.log_weight, strict=True)):
        longer = [frames[sequence]["x"] for sequence in order if LENGTHS[sequence] > step]
        assert values["z"].shape == (len(longer), 50, 1)
        for place, x in enumerate(longer):
            z = values["z"][place, :, 0].numpy()
            density = np.ones(50) if np.isnan(x[step]) else stats.norm.pdf(x[step], 2.0 + 0.7 * z, 0.5)
            np.testing.assert_allclose(weight[place].exp(), density / density.sum())


def test_numbers_that_depend_on_two_steps_ago():
    graph = otp.Graph([otp.lag("z", "z"), otp.lag("z", "z", by=2), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Normal(), "x": m.Normal()}).set_params(
        {
            "z": {"loc": 0.1, "weight": [[0.5], [-0.6]], "scale": 0.8},
            "z[0]": {"loc": 0.5, "scale": 1.2},
            "x": {"loc": 0.3, "weight": 0.9, "scale": 0.6},
        }
    )
    frames = [frame[["x"]] for frame in series(4)]
    truth = []
    for frame in frames:
        truth.append(Equations(len(frame["x"])))
        for t, x in enumerate(frame["x"]):
            earlier = {t - 1: -0.5, t - 2: 0.6} if t >= 2 else {}
            truth[-1].add({t: 1.0, **earlier}, 0.1 if t >= 2 else 0.5, 0.8 if t >= 2 else 1.2)
            if not np.isnan(x):
                truth[-1].add({t: 0.9}, x - 0.3, 0.6)
    batch, generator = batch_of(model, frames), torch.Generator().manual_seed(1)
    particles = filter_particles(model.structure, model.fitted.naturals, batch, 8000, generator)
    np.testing.assert_allclose(particles.log_likelihood, [one.log_integral for one in truth], atol=0.05)
    with pytest.raises(ModelError, match="lags of one step"):
        draw_paths(model.structure, model.fitted.naturals, batch, particles, 2, generator)
