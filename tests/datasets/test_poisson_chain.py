"""Counts of a chain have the moments of its truth."""

import numpy as np
import pytest

from otpdag.datasets import poisson_chain


def test_states_stay_and_move_and_counts_follow_their_rates():
    counts, states, truth = poisson_chain(300, 80, np.random.default_rng(4))
    assert counts.shape == states.shape == (300, 80)
    stay = float(truth["z"]["stay"])
    assert 0.8 <= stay <= 0.9
    assert (states[:, 1:] == states[:, :-1]).mean() == pytest.approx(stay, abs=0.01)
    moved = (states[:, 1:] - states[:, :-1])[states[:, 1:] != states[:, :-1]] % 4
    assert (np.bincount(moved, minlength=4)[1:] / len(moved)).tolist() == pytest.approx([1 / 3] * 3, abs=0.03)
    assert (np.bincount(states[:, 0], minlength=4) / 300).tolist() == pytest.approx([0.25] * 4, abs=0.08)
    for state, rate in enumerate(np.exp(truth["x"]["log_rate"])):
        own = counts[states == state]
        assert own.mean() == pytest.approx(rate, rel=0.01)
        assert own.var() == pytest.approx(rate, rel=0.1)
