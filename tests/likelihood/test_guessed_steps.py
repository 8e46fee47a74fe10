"""Guesses of hidden steps, beside what they were."""

import itertools

import numpy as np
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema
from otpdag.data.sequences import Sequences, encode_sequences
from otpdag.likelihood.starts import complete_steps, step_weights
from tests.dynamic_models import linear_series, state_space


def encoded(model, data):
    schema = Schema.of(model.spaces, model.graph)
    return encode_sequences(Sequences(data), schema, hidden=model.graph.hidden, partial=True)


def started(model, data, *, seed=0, first=True):
    batch = encoded(model, data)
    weights = step_weights(model.structure, batch)
    plain = complete_steps(model.structure, batch, np.random.default_rng([seed, 2**20]), first=True)
    structure = model.structure.scaled_to(plain, weights)
    reach = 1 if first else 1 + seed % 4
    completed = complete_steps(structure, batch, np.random.default_rng(seed), first=first, reach=reach)
    theta = structure.filled(structure.raw(structure.start(completed, weights)), torch.Generator().manual_seed(seed))
    return structure, theta, completed


def chain(rng, sequences=20, length=60):
    """Two states that last, far apart; every sequence begins in the first."""
    states = np.zeros((sequences, length), dtype=int)
    for t in range(1, length):
        states[:, t] = np.where(rng.random(sequences) < 0.9, states[:, t - 1], 1 - states[:, t - 1])
    return states, 10.0 * states + rng.normal(size=states.shape)


def test_states_and_their_moves_are_found():
    states, x = chain(np.random.default_rng(0))
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"])
    model = otp.Model(graph, {"z": m.Categorical(2), "x": m.Normal()})
    structure, theta, completed = started(model, x)
    labels = completed["z"].argmax(-1).numpy()
    right = {names: np.mean(np.array(names)[labels] == states.ravel()) for names in itertools.permutations((0, 1))}
    names = max(right, key=right.get)
    assert right[names] > 0.98
    naturals = structure.naturals(theta)
    moves = np.zeros((2, 2))
    np.add.at(moves, (states[:, :-1], states[:, 1:]), 1.0)
    moves /= moves.sum(1, keepdims=True)
    found = naturals["z"]["probs"][0].numpy()[np.ix_(names, names)]
    # labels are soft, a tenth of them even, on both sides of a move
    np.testing.assert_allclose(found, moves, atol=0.12)
    first = naturals["z[0]"]["probs"][0, 0].numpy()[list(names)]
    assert first[0] > 0.85


def test_first_steps_are_not_read_as_moves():
    """Observed numbers: the start is least squares on the past, over the steps that have one."""
    rng = np.random.default_rng(1)
    x = np.zeros((30, 20))
    x[:, 0] = 50.0 + rng.normal(size=30)
    for t in range(1, 20):
        x[:, t] = 1.0 + 0.6 * x[:, t - 1] + rng.normal(size=30)
    graph = otp.Graph([otp.lag("x", "x")])
    model = otp.Model(graph, {"x": m.Normal()})
    structure, theta, _ = started(model, x)
    naturals = structure.naturals(theta)
    design = np.column_stack([np.ones(30 * 19), x[:, :-1].ravel()])
    level, slope = np.linalg.lstsq(design, x[:, 1:].ravel(), rcond=None)[0]
    assert naturals["x"]["weight"].item() == pytest.approx(slope, abs=1e-3)
    assert naturals["x"]["loc"].item() == pytest.approx(level, abs=0.02)
    assert naturals["x"]["scale"].item() == pytest.approx(1.0, abs=0.1)


def averaged(x, reach):
    """Each step with so many before and after it; beyond an end, the end is repeated."""
    padded = np.pad(x, ((0, 0), (reach, reach)), mode="edge")
    return np.mean([padded[:, k : k + x.shape[1]] for k in range(2 * reach + 1)], 0)


@pytest.mark.parametrize(("first", "reach"), [(True, 1), (False, 4)])
def test_a_hidden_number_is_what_its_child_shows_averaged_over_time(first, reach):
    x, z = linear_series(0)
    structure, theta, completed = started(state_space(), x, seed=3, first=first)
    guess = completed["z"][:, 0].numpy()
    correlation = abs(np.corrcoef(guess, averaged(x, reach).ravel())[0, 1])
    assert correlation > (0.9999 if first else 0.97)  # restarts add noise
    assert abs(np.corrcoef(guess, z.ravel())[0, 1]) > (0.9 if first else 0.8)
    # so it leaves noise to what it explains, and its own fresh noise has spread one
    naturals = structure.naturals(theta)
    assert naturals["x"]["scale"].item() > 0.1 * x.std()
    assert naturals["z"]["scale"].item() == 1.0
    mean = guess.reshape(x.shape)
    slope = (mean[:, 1:] * mean[:, :-1]).sum() / (mean[:, :-1] ** 2).sum()
    assert (mean[:, 1:] - slope * mean[:, :-1]).std() == pytest.approx(1.0, rel=0.02)
    assert naturals["z"]["weight"].item() == pytest.approx(slope, abs=0.05)


def test_every_parameter_has_a_start():
    x, _ = linear_series(0, sequences=5, length=10)
    x[0, 3] = np.nan
    structure, theta, _ = started(state_space(), x)
    assert set(theta) == set(structure.parameters())
    for key, parameter in structure.parameters().items():
        assert theta[key].shape == (1, *parameter.shape)
        assert torch.isfinite(theta[key]).all()


@pytest.mark.parametrize("made", [m.Normal(), m.Poisson(), m.Gamma()], ids=lambda made: type(made).__name__)
def test_units_do_not_depend_on_guessed_categories(made):
    states, _ = chain(np.random.default_rng(0))
    x = np.random.default_rng(1).poisson(2.0 + 8.0 * states) + 1.0
    model = otp.Model(otp.Graph([otp.lag("z", "z"), ("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": made})
    batch = encoded(model, x)
    weights, units = step_weights(model.structure, batch), []
    for even in (True, False):
        completed = complete_steps(model.structure, batch, np.random.default_rng(0), first=True, even_categories=even)
        units.append(model.structure.scaled_to(completed, weights).mechanisms["x"].buffers())
    assert units[0].keys() == units[1].keys()
    assert units[0]
    for key, value in units[0].items():
        torch.testing.assert_close(value, units[1][key], rtol=0, atol=0)
