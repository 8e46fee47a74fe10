"""First guesses of what a table or sequences do not show."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.data import Schema, encode
from otpdag.data.sequences import Sequences, encode_sequences
from otpdag.likelihood import starts as guessed_rows
from otpdag.likelihood.starts import (
    _clusters,
    _components,
    _leaning_right,
    _residual,
    complete_steps,
    complete_table,
    row_weights,
    step_weights,
)
from tests.dynamic_models import linear_series, state_space

ROWS = 300


def batch_of(model, table, weights=None):
    return encode(table, Schema.of(model.spaces, model.graph, table), hidden=model.graph.hidden, weights=weights)


def completed(model, table, *, seed=0, first=True, weights=None):
    batch = batch_of(model, table, weights)
    return batch, complete_table(model.structure, batch, np.random.default_rng(seed), first=first)


def started(structure, batch, values):
    """Natural parameters without replica axis."""
    naturals = structure.start(values, row_weights(structure, batch))
    return {node: {name: value[0] for name, value in own.items()} for node, own in naturals.items()}


def agreement(labels, truth, size):
    """Share of rows that are labelled right, under the best names."""
    return max(np.mean(np.array(names)[labels] == truth) for names in itertools.permutations(range(size)))


def clusters(rng):
    truth = rng.integers(0, 3, ROWS)
    return truth, pd.DataFrame({"x": 6.0 * truth, "y": 5.0 * (truth == 1)}) + rng.normal(size=(ROWS, 2))


def mixture():
    graph = otp.Graph([("z", "x"), ("z", "y")], hidden=["z"])
    return otp.Model(graph, {"z": m.Categorical(3), "x": m.Normal(), "y": m.Normal()})


def test_well_separated_classes_are_found():
    truth, table = clusters(np.random.default_rng(0))
    _, guess = completed(mixture(), table)
    assert guess["z"].shape == (ROWS, 3)
    torch.testing.assert_close(guess["z"].sum(-1), torch.ones(ROWS, dtype=torch.float64))
    assert guess["z"].min() > 0  # a table that starts with zeros would keep them
    assert agreement(guess["z"].argmax(-1).numpy(), truth, 3) > 0.97


def test_mechanisms_start_at_the_moments_of_the_classes():
    truth, table = clusters(np.random.default_rng(0))
    model = mixture()
    batch, guess = completed(model, table)
    naturals = started(model.structure, batch, guess)
    order = naturals["x"]["loc"][:, 0].argsort()
    share = 0.9 * np.eye(3)[truth] + 0.1 / 3  # soft labels, a tenth of them even, draw the means together
    means = share.T @ table["x"] / share.sum(0)
    np.testing.assert_allclose(naturals["x"]["loc"][order, 0], means, atol=0.15)
    np.testing.assert_allclose(naturals["z"]["probs"][0, order], np.bincount(truth) / ROWS, atol=0.03)


def factor_table(rng):
    u = rng.normal(size=ROWS)
    names = ["a", "b", "c", "d"]
    loadings = np.array([1.0, -2.0, 0.7, 1.5])
    return u, pd.DataFrame(u[:, None] * loadings + 0.5 * rng.normal(size=(ROWS, 4)), columns=names)


def factor():
    graph = otp.Graph([("u", name) for name in "abcd"], hidden=["u"])
    return otp.Model(graph, {"u": m.Normal(), **{name: m.Normal() for name in "abcd"}})


@pytest.mark.parametrize("first", [True, False])
def test_a_hidden_number_goes_with_the_truth(first):
    u, table = factor_table(np.random.default_rng(1))
    _, guess = completed(factor(), table, first=first)
    correlation = abs(np.corrcoef(guess["u"][:, 0], u)[0, 1])
    assert correlation > 0.9
    if first:
        component = np.linalg.svd(
            (table / table.std(ddof=0)).to_numpy() - (table / table.std(ddof=0)).mean().to_numpy()
        )[0][:, 0]
        assert abs(np.corrcoef(guess["u"][:, 0], component)[0, 1]) > 0.98
        assert guess["u"].std(correction=0).item() == pytest.approx(1.0)


def test_what_one_hidden_node_explains_is_removed_before_the_next():
    rng = np.random.default_rng(2)
    label, u = rng.integers(0, 2, ROWS), rng.normal(size=ROWS)
    table = pd.DataFrame(
        {n: 8.0 * label + s * u + 0.3 * rng.normal(size=ROWS) for n, s in (("a", 1), ("b", -1), ("c", 1))}
    )
    edges = [(hidden, seen) for hidden in "uz" for seen in "abc"]
    graph = otp.Graph(edges, hidden=["u", "z"])
    model = otp.Model(graph, {"u": m.Normal(), "z": m.Categorical(2), **{name: m.Normal() for name in "abc"}})
    _, guess = completed(model, table)
    assert agreement(guess["z"].argmax(-1).numpy(), label, 2) > 0.97
    assert abs(np.corrcoef(guess["u"][:, 0], u)[0, 1]) > 0.9


def test_missing_cells_are_filled_from_seen_ones():
    rng = np.random.default_rng(3)
    table = pd.DataFrame({"k": rng.choice(["p", "q"], ROWS, p=[0.2, 0.8]), "x": rng.normal(size=ROWS)})
    gaps = rng.random(table.shape) < 0.3
    model = otp.Model(otp.Graph([("k", "x")]), {"k": m.Categorical(2), "x": m.Normal()})
    batch, filled = completed(model, table.mask(gaps))
    assert torch.equal(filled["x"][~gaps[:, 1]], batch.values["x"][0][~gaps[:, 1]])
    seen = set(batch.values["x"][0][~gaps[:, 1], 0].tolist())
    assert {value in seen for value in filled["x"][gaps[:, 1], 0].tolist()} == {True}
    assert torch.equal(filled["k"].sum(-1), torch.ones(ROWS).double())  # whole categories, none half
    drawn = filled["k"][gaps[:, 0]].mean(0)
    assert float(drawn.max()) == pytest.approx(0.8, abs=0.12)


def test_starts_read_seen_cells_alone():
    """The frequencies of what is seen, smoothed by one row; filled cells do not count."""
    table = pd.DataFrame({"k": [0.0] * 30 + [1.0] * 10 + [np.nan] * 60})
    model = otp.Model(otp.Graph([], nodes=["k"]), {"k": m.Categorical(2)})
    batch, filled = completed(model, table)
    found = started(model.structure, batch, filled)["k"]["probs"][0].numpy()
    smoothed = np.array([30.0, 10.0]) + np.array([31.0, 11.0]) / 42.0
    np.testing.assert_allclose(found, smoothed / smoothed.sum())


def test_units_are_those_of_the_column():
    """A point of zeros means the column's own centre and spread, whatever its units."""
    rng = np.random.default_rng(4)
    table = pd.DataFrame({"x": 5000.0 + 80.0 * rng.normal(size=ROWS)})
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    batch, filled = completed(model, table)
    scaled = model.structure.scaled_to(filled, row_weights(model.structure, batch))
    zeros = {key: torch.zeros(1, *parameter.shape).double() for key, parameter in scaled.parameters().items()}
    naturals = scaled.naturals(zeros)["x"]
    assert naturals["loc"].item() == pytest.approx(table["x"].mean(), abs=10.0)
    assert naturals["scale"].item() == pytest.approx(80.0, rel=0.5)


def test_rows_without_weight_do_not_move_a_start():
    rng = np.random.default_rng(5)
    kept = rng.normal(size=50)
    table = pd.DataFrame({"x": np.concatenate([kept, np.full(50, 1e4)])})
    model = otp.Model(otp.Graph([], nodes=["x"]), {"x": m.Normal()})
    batch, filled = completed(model, table, weights=np.repeat([1.0, 1e-300], 50))
    found = started(model.structure, batch, filled)["x"]
    assert found["loc"].item() == pytest.approx(kept.mean(), abs=1e-6)


def test_restarts_differ_and_seeds_repeat():
    _, table = factor_table(np.random.default_rng(1))
    guesses = [completed(factor(), table, seed=seed, first=False)[1]["u"] for seed in (1, 1, 2)]
    assert torch.equal(guesses[0], guesses[1])
    assert not torch.allclose(guesses[0], guesses[2])


def test_first_components_are_standardised_and_those_that_are_missing_are_drawn():
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(200, 3)) @ np.diag([5.0, 2.0, 0.5]) + 7
    found = _components(columns, 2, np.random.default_rng(1), first=True)
    assert found.shape == (200, 2)
    np.testing.assert_allclose(found.std(0), 1.0)
    np.testing.assert_allclose(found.mean(0), 0.0, atol=1e-10)
    _, vectors = np.linalg.eigh(np.cov(columns.T))
    leading = (columns - columns.mean(0)) @ vectors[:, ::-1][:, :2]
    for at in range(2):
        assert abs(np.corrcoef(found[:, at], leading[:, at])[0, 1]) == pytest.approx(1, abs=1e-9)
    more = _components(columns, 5, np.random.default_rng(1), first=True)
    assert more.shape == (200, 5)
    np.testing.assert_allclose(np.abs(more[:, :2]), np.abs(found), rtol=1e-8)
    assert np.abs(np.corrcoef(more.T) - np.eye(5)).max() < 0.25
    flat = _components(np.ones((50, 2)), 1, np.random.default_rng(1), first=True)
    np.testing.assert_allclose(flat, 0.0, atol=1e-10)


def test_restarts_rotate_the_leading_components_and_add_noise():
    columns = np.random.default_rng(0).normal(size=(4000, 3)) @ np.diag([5.0, 4.0, 0.1])
    first = _components(columns, 2, np.random.default_rng(1), first=True)
    found = [_components(columns, 2, np.random.default_rng(seed), first=False) for seed in (2, 3)]
    for one in found:
        fit, *_ = np.linalg.lstsq(first, one, rcond=None)
        noise = one - first @ fit
        np.testing.assert_allclose(noise.std(0), 0.3, rtol=0.1)
        np.testing.assert_allclose(fit.T @ fit, np.eye(2), atol=0.1)
    assert np.abs(np.corrcoef(found[0][:, 0], found[1][:, 0])[0, 1]) < 0.9


def test_skewed_guesses_lean_to_the_right():
    rng = np.random.default_rng(0)
    scores = np.stack([rng.exponential(size=500), -rng.exponential(size=500)], 1)
    scores -= scores.mean(0)
    found = _leaning_right(scores, rng, first=True)
    np.testing.assert_allclose(found, scores * [1.0, -1.0])
    signs = {tuple(np.sign(_leaning_right(scores, rng, first=False)[0] * scores[0])) for _ in range(40)}
    assert len(signs) == 4


def test_what_is_explained_is_removed_and_the_rest_standardised():
    rng = np.random.default_rng(0)
    explained = rng.normal(size=(300, 2))
    rest = rng.normal(size=(300, 2))
    matrix = np.c_[explained @ [[1.0, 2.0], [3.0, -1.0]] + 4 + 0.5 * rest, explained[:, 0]]
    found = _residual(matrix, explained)
    design = np.c_[explained, np.ones(300)]
    left = matrix - design @ np.linalg.lstsq(design, matrix, rcond=None)[0]
    np.testing.assert_allclose(found[:, :2], left[:, :2] / left[:, :2].std(0), rtol=1e-8)
    np.testing.assert_allclose(found[:, 2], 0.0, atol=1e-9)  # nothing is left, and nothing divided by it


def test_labels_are_soft_by_a_tenth():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, 90)
    columns = np.eye(3)[truth] * 20 + rng.normal(size=(90, 3))
    found = _clusters(columns, np.full(90, 1 / 90), 3, rng, first=True)
    np.testing.assert_allclose(np.sort(found, 1), np.tile([0.1 / 3, 0.1 / 3, 0.9 + 0.1 / 3], (90, 1)))
    assert agreement(found.argmax(1), truth, 3) == 1.0


def test_the_first_labels_are_those_of_the_best_of_three_runs_of_k_means(monkeypatch):
    columns, share = np.array([[0.0], [1.0], [9.0], [10.0]]), np.full(4, 0.25)
    runs = [(np.array([[0.0], [1.0]]), 3.0), (np.array([[0.5], [9.5]]), 1.0), (np.array([[0.0], [9.0]]), 2.0)]
    calls = []

    def told(sample, size, generator):
        calls.append(len(sample))
        return runs[(len(calls) - 1) % 3]

    monkeypatch.setattr(guessed_rows, "k_means", told)
    labels = _clusters(columns, share, 2, np.random.default_rng(0), first=True)
    assert calls == [4, 4, 4]
    assert labels.argmax(1).tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(labels.min(1), guessed_rows.SOFTNESS / 2)
    np.testing.assert_allclose(labels.sum(1), 1.0)
    calls.clear()
    for seed in range(6):
        _clusters(columns, share, 2, np.random.default_rng(seed), first=False, lasts=True)
    assert 1 <= len(calls) < 6  # once for a restart, unless it looks at random directions


def encoded(model, data):
    schema = Schema.of(model.spaces, model.graph)
    return encode_sequences(Sequences(data), schema, hidden=model.graph.hidden, partial=True)


def started_steps(model, data, *, seed=0, first=True):
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
    structure, theta, completed = started_steps(model, x)
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
    structure, theta, _ = started_steps(model, x)
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
    structure, theta, completed = started_steps(state_space(), x, seed=3, first=first)
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
    structure, theta, _ = started_steps(state_space(), x)
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
