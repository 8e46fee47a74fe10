"""Answers about sequences beside sums over all paths of their hidden states."""

from itertools import pairwise, product

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import otpdag as otp
from otpdag import mechanisms as m

BEGUN, MOVES = np.array([0.5, 0.3, 0.2]), np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.05, 0.15, 0.8]])
LOC, SCALE = np.array([-1.0, 0.5, 1.5]), np.array([1.0, 0.6, 0.8])
SHARES = np.array([[0.8, 0.2], [0.4, 0.6], [0.1, 0.9]])


def model():
    graph = otp.Graph([otp.lag("z", "z"), ("z", "x"), ("z", "c")], hidden=["z"])
    made = otp.Model(graph, {"z": m.Categorical(3), "x": m.Normal(), "c": m.Categorical(2)})
    params = {
        "z": {"probs": MOVES},
        "z[0]": {"probs": BEGUN},
        "x": {"loc": LOC, "scale": SCALE},
        "c": {"probs": SHARES},
    }
    return made.set_params(params)


def ragged():
    """Sequences of one to six steps, with gaps, one of them without a value."""
    rng = np.random.default_rng(0)
    made = []
    for length in (4, 1, 6, 5, 2):
        one = pd.DataFrame({"x": rng.normal(0.5, 1.2, length), "c": rng.integers(0, 2, length).astype(float)})
        made.append(one.mask(rng.random((length, 2)) < 0.25))
    made.append(pd.DataFrame({"x": [np.nan] * 3, "c": [np.nan] * 3}))
    return made


def paths_of(sequence):
    """All paths (P, T) and their joint probabilities with what a sequence shows (P,)."""
    paths = list(product(range(3), repeat=len(sequence)))
    chances = []
    for path in paths:
        chance = BEGUN[path[0]] * np.prod([MOVES[i, j] for i, j in pairwise(path)])
        for state, x, c in zip(path, sequence["x"], sequence["c"], strict=True):
            chance *= 1.0 if np.isnan(x) else stats.norm.pdf(x, LOC[state], SCALE[state])
            chance *= 1.0 if np.isnan(c) else SHARES[state, int(c)]
        chances.append(chance)
    return np.array(paths), np.array(chances)


def test_answers_are_sums_over_paths():
    own, data = model(), ragged()
    decoded, probs = own.decode(data), own.predict_proba(data, "z").to_numpy()
    draws = own.posterior(data, draws=2000, seed=1)["z"].to_numpy().astype(int).reshape(-1, 2000)
    scores = own.log_likelihood(data, per_row=True).to_numpy()
    begin = 0
    for sequence, score in zip(data, scores, strict=True):
        paths, chances = paths_of(sequence)
        part = slice(begin, begin := begin + len(sequence))
        assert score == pytest.approx(np.log(chances.sum()), abs=1e-9)
        assert decoded["z"].to_numpy()[part].astype(int).tolist() == paths[chances.argmax()].tolist()
        chances /= chances.sum()
        each = np.array(
            [[chances[paths[:, step] == state].sum() for state in range(3)] for step in range(len(sequence))]
        )
        np.testing.assert_allclose(probs[part], each, atol=1e-9)
        # whole paths, not only their steps, are drawn as often as they are likely
        codes, code = (own @ 3 ** np.arange(len(sequence)) for own in (paths, draws[part].T))
        drawn = np.array([(code == one).mean() for one in codes])
        assert np.abs(drawn - chances).max() < 4.5 * np.sqrt(0.25 / 2000)
        assert 0.5 * np.abs(drawn - chances).sum() < 0.5 * np.sqrt(2 * len(paths) / (np.pi * 2000)) + 0.05


def test_gaps_are_filled_by_sums_over_paths():
    own, data = model(), ragged()
    filled = own.impute(data, draws=4000, seed=2)
    begin = 0
    for sequence in data:
        paths, chances = paths_of(sequence)
        part, chances = slice(begin, begin := begin + len(sequence)), chances / chances.sum()
        mean, share = LOC[paths].T @ chances, SHARES[paths][..., 1].T @ chances
        found = filled.iloc[part]
        gap = sequence["x"].isna().to_numpy()
        np.testing.assert_allclose(found["x"].to_numpy(dtype=float)[gap], mean[gap], atol=0.08)
        np.testing.assert_allclose(found["x"].to_numpy(dtype=float)[~gap], sequence["x"][~gap])
        clear = sequence["c"].isna().to_numpy() & (np.abs(share - 0.5) > 0.03)
        assert found["c"].to_numpy()[clear].astype(int).tolist() == (share[clear] > 0.5).astype(int).tolist()


def test_forecasts_are_powers_of_the_transitions():
    own, data = model(), ragged()
    told = own.forecast(data, 3, level=0.8, draws=20_000, seed=3)
    for number, sequence in enumerate(data):
        paths, chances = paths_of(sequence)
        law = np.bincount(paths[:, -1], chances / chances.sum(), minlength=3)
        for step in range(1, 4):
            law = law @ MOVES
            line = told.loc[(number, step)]
            assert line["x"] == pytest.approx(law @ LOC, abs=0.05)
            for name, level in (("x.lower", 0.1), ("x.upper", 0.9)):
                assert law @ stats.norm.cdf(line[name], LOC, SCALE) == pytest.approx(level, abs=0.015)
            share = law @ SHARES
            assert int(line["c"]) == share.argmax() or abs(share[0] - 0.5) < 0.02
            assert line["c.probability"] == pytest.approx(share.max(), abs=0.02)
