"""Simulators: their contract, and fits of models whose densities nobody knows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.mechanisms.simulator import Between
from otpdag.spaces import Count, Real


def g_and_k(parents, noise, a, b, g, k):
    return a + b * (1 + 0.8 * torch.tanh(0.5 * g * noise)) * (1 + noise**2) ** k * noise


def queue(parents, noise, low, width, rate):
    """Times between departures from a queue that begins empty (M/G/1)."""
    steps = noise.shape[-1] // 2
    service = low + width * noise[..., :steps]
    arrival = (-torch.log1p(-noise[..., steps:]) / rate).cumsum(-1)
    left, between = torch.zeros_like(arrival[..., 0]), []
    for step in range(steps):
        done = service[..., step] + torch.maximum(arrival[..., step], left)
        between.append(done - left)
        left = done
    return torch.stack(between, -1)


def alone(mechanism, node="x"):
    return otp.Model(otp.Graph([], nodes=[node]), {node: mechanism})


def drawn(function, truth, rows, noise, seed, sampler=torch.randn):
    u = sampler(1, rows, noise, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return function({}, u, **{name: torch.full((1, 1, 1), value).double() for name, value in truth.items()})[0].numpy()


@pytest.mark.slow
def test_g_and_k_is_recovered_without_a_density_and_has_intervals():
    truth = {"a": 3.0, "b": 1.0, "g": 2.0, "k": 0.5}
    x = drawn(g_and_k, truth, 1000, 1, 5)
    starts = {"a": otp.start(0.0), "b": otp.start(2.0), "g": otp.start(0.5), "k": otp.start(0.2)}
    model = alone(m.Simulator(g_and_k, starts, bounds={"b": (0, None), "k": (0, None)}))
    result = otp.fit(model, {"x": x})
    assert result.method.name == "transport"
    found = {name: float(value) for name, value in model.params()["x"].items()}
    assert np.mean([abs(found[name] - truth[name]) for name in truth]) < 0.12
    intervals = result.intervals(draws=10, level=0.9)
    wide = intervals["upper"] - intervals["lower"]
    assert ((wide > 0.02) & (wide < 1.5)).all()


@pytest.mark.slow
def test_one_path_of_a_queue_tells_its_parameters():
    truth, bounds = {"low": 4.0, "width": 3.0, "rate": 0.15}, {"low": (0, 10), "width": (0, 10), "rate": (0, 1 / 3)}
    y = drawn(queue, truth, 1, 100, 7, torch.rand)
    node = m.Simulator(queue, dict.fromkeys(truth), Real(50), noise=100, uniform=True, bounds=bounds, path=True)
    model = alone(node, "y")
    result = otp.fit(model, {"y": y})
    found = model.params()["y"]
    assert abs(found["low"] - 4.0) < 0.8
    assert abs(found["low"] + found["width"] - 7.0) < 1.2
    assert abs(found["rate"] - 0.15) < 0.08
    with pytest.raises(otp.ModelError, match="a bootstrap resamples rows, and there is one"):
        result.intervals(draws=10)


def test_values_that_jump_are_differentiated_by_differences_and_the_result_says_so():
    def counted(parents, noise, rate):  # no torch inside: waiting times until their sum exceeds one
        waits = -np.log1p(-np.asarray(noise)) / np.asarray(rate.detach())
        return torch.as_tensor((waits.cumsum(-1) < 1).sum(-1, keepdims=True).astype(float))

    x = np.random.default_rng(3).poisson(4.0, 2000).astype(float)
    model = alone(m.Simulator(counted, {"rate": None}, Count(1), noise=24, uniform=True, bounds={"rate": (0, 12)}))
    result = otp.fit(model, {"x": x})
    assert float(model.params()["x"]["rate"]) == pytest.approx(x.mean(), abs=0.1)
    assert any("by differences" in note for note in result.notes)


@pytest.mark.slow
def test_a_pendulum_without_noise_is_found_from_readings_with_gaps():
    def pendulum(parents, noise, period, damping):
        time = parents["time"]
        return torch.exp(-damping * time) * torch.cos(2 * torch.pi * time / period)

    time = np.sort(np.random.default_rng(0).uniform(0, 6, 400))
    angle = np.exp(-0.3 * time) * np.cos(2 * np.pi * time / 2.5)
    angle[np.random.default_rng(1).random(400) < 0.3] = np.nan
    bounds = {"period": (0.5, 10), "damping": (0, 2)}
    node = m.Simulator(pendulum, dict.fromkeys(bounds), noise=0, bounds=bounds)
    model = otp.Model(otp.Graph([("time", "angle")]), {"time": m.Given(), "angle": node})
    result = otp.fit(model, pd.DataFrame({"time": time, "angle": angle}))
    assert float(model.params()["angle"]["period"]) == pytest.approx(2.5, abs=0.02)
    assert float(model.params()["angle"]["damping"]) == pytest.approx(0.3, abs=0.02)
    assert any("rows with gaps" in note for note in result.notes)


@pytest.mark.slow
def test_two_simulators_share_a_hidden_cause():
    def bent(parents, noise, slope, scale):
        return torch.sinh(slope * parents["cause"]) + scale * noise

    rng = np.random.default_rng(2)
    cause = rng.normal(size=3000)
    table = {n: np.sinh(s * cause) + w * rng.normal(size=3000) for n, s, w in (("a", 0.8, 0.3), ("b", 0.5, 0.2))}
    bounds = {"slope": (0, 2), "scale": (0, 1)}
    nodes = {n: m.Simulator(bent, dict.fromkeys(bounds), bounds=bounds) for n in table}
    graph = otp.Graph([("cause", "a"), ("cause", "b")], hidden=["cause"])
    model = otp.Model(graph, {"cause": m.Normal(loc=0.0, scale=1.0), **nodes})
    otp.fit(model, table)
    found = [float(model.params()[n][name]) for n in "ab" for name in ("slope", "scale")]
    np.testing.assert_allclose(found, [0.8, 0.3, 0.5, 0.2], atol=0.06)


def test_an_archive_holds_all_but_the_function(tmp_path):
    model = alone(m.Simulator(g_and_k, {"a": otp.start(0.0), "b": 1.0, "g": 0.0, "k": 0.0}))
    x = np.random.default_rng(0).normal(2.0, 1.0, 500)
    otp.fit(model, {"x": x})
    model.save(tmp_path / "model.otpdag")
    with pytest.raises(otp.ModelError, match="node 'x': the 'function' of Simulator is code and was not saved; pass"):
        otp.load(tmp_path / "model.otpdag")
    again = otp.load(tmp_path / "model.otpdag", functions={"x": g_and_k})
    assert again.params()["x"]["a"] == model.params()["x"]["a"]
    pd.testing.assert_frame_equal(again.sample(5, seed=1), model.sample(5, seed=1))


@pytest.mark.parametrize("unit", [1.0, 1e6])
def test_a_number_on_the_real_line_is_found_whatever_its_unit(unit):
    x = unit * np.random.default_rng(6).normal(3.0, 1.0, 400)
    model = alone(m.Simulator(lambda parents, noise, a: a + unit * noise, {"a": otp.start(2.0 * unit)}))
    assert otp.fit(model, {"x": x}).status.converged
    assert float(model.params()["x"]["a"]) == pytest.approx(x.mean(), abs=0.05 * unit)
    # a step of descent, of order one, is a step in units of where it started
    assert float(model.mechanisms["x"].declared()["a"].unit) == 2.0 * unit


def fitted_by(function, method="auto"):
    return otp.fit(alone(m.Simulator(function, {"a": otp.start(0.0)})), {"x": [1.0, 2.0, 3.0]}, method=method)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: m.Simulator(3), "`function` must be callable; got 3"),
        (lambda: m.Simulator(g_and_k, {"a": None}), "parameter 'a' needs a place to start"),
        (lambda: m.Simulator(g_and_k, {}, bounds={"z": (0, 1)}), "`bounds` name 'z', which is none"),
        (lambda: m.Simulator(g_and_k, {"a": None}, bounds={"a": (1, 0)}), "bounds of 'a' must be in order"),
        (
            lambda: alone(m.Simulator(g_and_k, {"a": 2.0}, bounds={"a": (0, 1)})),
            "parameter 'a' of node 'x' must be a number above 0 and below 1; got 2",
        ),
        (
            lambda: otp.fit(
                alone(m.Simulator(lambda p, u, a: a + u[..., 0], {"a": otp.start(0.0)})), {"x": [1.0, 2, 3]}
            ),
            r"node 'x': its function must return \(\.\.\., \d+, 1\), a row for each row .*; got \(\d+, 1, \d+\)",
        ),
        (lambda: fitted_by(lambda p, u, a: torch.log(u - 9) + a), "node 'x': 100% of its simulated values are not"),
        (lambda: fitted_by(lambda p, u, a: a + torch.rand_like(u)), "node 'x': the same noise must give the same"),
        (lambda: fitted_by(lambda p, u, a: a + u.mul_(2)), "node 'x': the same noise must give the same"),
        (lambda: fitted_by(lambda p, u, a: a + u, method="likelihood"), "node 'x': Simulator has no density; use"),
    ],
)
def test_what_makes_no_sense_is_named(made, message):
    with pytest.raises(otp.ModelError, match=message):
        made()


def test_an_error_of_the_function_says_whose_it_is_and_what_it_was_given():
    with pytest.raises(RuntimeError) as raised:
        fitted_by(lambda p, u, a: a.expand_as(u))
    said = raised.value.__notes__[0]
    assert said.startswith("this was the function of node 'x', called with tensors of sizes {'noise': (1, ")
    assert "'a': (16, 1, 1)" in said


@pytest.mark.parametrize("bounds", [(2.0, 4.0), (2.0, None), (None, 4.0)])
def test_bounds_are_bijections(bounds):
    support, raw = Between(*bounds), torch.linspace(-3, 3, 7).double()
    natural = support.natural(raw)
    assert bool(support.holds(natural).all())
    torch.testing.assert_close(support.raw(natural), raw)
