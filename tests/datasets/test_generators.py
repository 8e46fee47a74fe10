"""Generators: rows, truths, documents about bars."""

import numpy as np
import pytest
from scipy import stats

from experiments.small_models import poisson_chain
from otpdag.datasets import bars


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


def test_topics_are_the_rows_and_columns_of_a_grid():
    drawn = bars(10, 5, 20, seed=101)
    grids = drawn.topics.reshape(10, 5, 5)
    assert drawn.side == 5
    for line in range(5):
        np.testing.assert_allclose(grids[line], np.eye(5)[:, [line]] @ np.ones((1, 5)) / 5)
        np.testing.assert_allclose(grids[5 + line], np.ones((5, 1)) @ np.eye(5)[[line]] / 5)


def test_documents_have_their_length_and_are_sparse():
    drawn = bars(20, 2500, 30, seed=101)
    assert drawn.counts.shape == (2500, 100)
    assert drawn.counts.format == "csr"
    assert drawn.counts.nnz <= 2500 * 30
    np.testing.assert_array_equal(drawn.counts.sum(axis=1), 30)


def test_shares_are_dirichlet_and_words_follow_them():
    drawn = bars(4, 40_000, 1, alpha=[0.5, 1.0, 2.0, 0.5], seed=101)
    np.testing.assert_allclose(drawn.theta.mean(axis=0), drawn.alpha / 4, atol=0.005)
    total = drawn.alpha.sum()
    variance = drawn.alpha / total * (1 - drawn.alpha / total) / (total + 1)
    np.testing.assert_allclose(drawn.theta.var(axis=0), variance, atol=0.002)
    expected = (drawn.theta @ drawn.topics).sum(axis=0)
    assert stats.chisquare(np.asarray(drawn.counts.sum(axis=0)), expected).pvalue > 0.01


def test_words_of_a_document_share_its_topics():
    drawn = bars(10, 4000, 50, seed=102)
    expected = 50 * drawn.theta @ drawn.topics
    difference = drawn.counts.toarray() - expected
    spread = np.sqrt(expected * (1 - expected / 50)).mean()
    assert np.abs(difference.mean()) < 1e-9
    assert difference.std() == pytest.approx(np.sqrt((expected * (1 - expected / 50)).mean()), rel=0.02)
    assert spread > 0.1


def test_alpha_is_one_over_the_topics_if_left_out():
    np.testing.assert_allclose(bars(20, 1, 1, seed=0).alpha, 0.05)


def test_the_seed_determines_the_draw():
    first, again, other = (bars(4, 50, 10, seed=seed) for seed in (7, np.random.default_rng(7), 8))
    assert (first.counts != again.counts).nnz == 0
    assert (first.counts != other.counts).nnz > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": 5}, "`topics` must be an even number of at least 4; got 5"),
        ({"topics": 2}, "`topics` must be an even number of at least 4; got 2"),
        ({"documents": 0}, "`documents` must be a whole number of at least 1; got 0"),
        ({"words": 0}, "`words` must be a whole number of at least 1; got 0"),
        ({"alpha": -1.0}, "`alpha` must be positive; got -1"),
        ({"alpha": [0.1, 0.2]}, r"one for each of 4 topics; got shape \(2,\)"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bars(**{"topics": 4, "documents": 3, "words": 5, "seed": 0, **options})
