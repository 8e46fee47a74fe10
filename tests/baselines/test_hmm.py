"""hmmlearn behind our interface."""

import numpy as np
import pytest

from experiments.small_models import poisson_chain

pytest.importorskip("hmmlearn")

from baselines import hmm


def test_densities_from_a_table_change_nothing():
    counts, _, _ = poisson_chain(10, 60, np.random.default_rng(0))
    options = {"states": 4, "starts": 2, "steps": 15, "tolerance": -np.inf, "seed": 0}
    quick = hmm.fit(counts, [60] * 10, **options)
    plain = hmm.fit(counts, [60] * 10, quick=False, **options)
    np.testing.assert_allclose(quick.params["rates"], plain.params["rates"], rtol=1e-9)
    np.testing.assert_allclose(quick.params["transitions"], plain.params["transitions"], atol=1e-9)
    assert quick.history["rates"].shape == (2, 4)


def test_known_transitions_stay():
    counts, _, truth = poisson_chain(10, 60, np.random.default_rng(0))
    stay = float(truth["z"]["stay"])
    known = np.full((4, 4), (1 - stay) / 3)
    np.fill_diagonal(known, stay)
    found = hmm.fit(counts, [60] * 10, states=4, starts=3, transitions=known, seed=0)
    np.testing.assert_allclose(found.params["transitions"], known)
    assert float(found.params["stay"]) == pytest.approx(stay)
