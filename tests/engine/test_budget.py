"""Fits within a budget of entries and memory."""

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.settings import SumSizes

SIZE, ROWS = 4, 300


def lattice(rng):
    """Binaries on a square lattice, each a noisy vote of its neighbours above and to the left, with gaps."""
    names = [f"v{i}{j}" for i in range(SIZE) for j in range(SIZE)]
    edges = [(f"v{i}{j}", f"v{i + 1}{j}") for i in range(SIZE - 1) for j in range(SIZE)]
    edges += [(f"v{i}{j}", f"v{i}{j + 1}") for i in range(SIZE) for j in range(SIZE - 1)]
    graph = otp.Graph(edges, nodes=names)
    table = {}
    for name in names:
        votes = sum((2 * table[parent] - 1 for parent in graph.parents(name)), start=np.zeros(ROWS))
        table[name] = (rng.random(ROWS) < 1 / (1 + np.exp(-0.8 * votes))).astype(float)
    frame = pd.DataFrame(table)[names]
    return otp.Model(graph, {name: m.Bernoulli() for name in names}), frame.mask(rng.random(frame.shape) < 0.4)


def test_a_fit_beyond_its_budget_is_refused():
    model, frame = lattice(np.random.default_rng(0))
    with pytest.raises(otp.ModelError, match="joint states"):
        otp.fit(model, frame, method=otp.entropic(sums=SumSizes(largest_table=4)), seed=0)


@pytest.mark.parametrize("name", ["largest_table", "memory"])
def test_a_budget_of_nothing_is_refused(name):
    with pytest.raises(otp.ModelError, match=f"{name} must be a whole number of at least 1; got 0"):
        SumSizes(**{name: 0})


@pytest.mark.filterwarnings("ignore::otpdag.ConvergenceWarning")
def test_less_memory_changes_nothing():
    model, frame = lattice(np.random.default_rng(1))
    little, _ = lattice(np.random.default_rng(1))
    otp.fit(model, frame, seed=0, steps=3)
    otp.fit(little, frame, method=otp.entropic(sums=SumSizes(memory=2**16), steps=3), seed=0)
    for node in frame:
        np.testing.assert_allclose(little.params()[node]["probs"], model.params()[node]["probs"], atol=1e-6)
