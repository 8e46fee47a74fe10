"""Topics start at documents that are most unlike each other."""

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import linear_sum_assignment

from otpdag.datasets import bars
from otpdag.likelihood.word_pairs import CORNER_SHARE, start_topics


def overlap(found, topics):
    """Probability that each topic shares with the truth that it is matched to."""
    shared = np.minimum(found[:, None], topics[None]).sum(-1)
    rows, columns = linear_sum_assignment(-shared)
    return shared[rows, columns]


@pytest.mark.parametrize("first", [True, False])
def test_bars_are_found_as_far_as_corners_tell(first):
    """All rows together are all columns together: of K bars, K - 1 are independent, and one corner is in their span."""
    drawn = bars(6, 400, 60, seed=3)
    assert np.linalg.matrix_rank(drawn.topics) == 5
    found = start_topics(drawn.counts, 6, np.random.default_rng(0), first=first).numpy()
    np.testing.assert_allclose(found.sum(1), 1.0, rtol=1e-5)
    assert np.sort(overlap(found, drawn.topics))[1:].min() > 0.75


@pytest.mark.parametrize("first", [True, False])
def test_independent_bars_are_all_found(first):
    rng, topics = np.random.default_rng(1), bars(6, 1, 1, seed=0).topics[:5]
    shares = rng.dirichlet(np.full(5, 0.2), size=400)
    counts = sparse.csr_array(rng.multinomial(60, shares @ topics))
    found = start_topics(counts, 5, np.random.default_rng(0), first=first).numpy()
    assert overlap(found, topics).min() > 0.75
    random = counts.toarray()[rng.choice(400, 5, replace=False)]
    assert overlap(found, topics).mean() > overlap(random / random.sum(1, keepdims=True), topics).mean()


def test_no_word_that_occurs_starts_at_zero():
    counts = sparse.csr_array(np.kron(np.eye(2), np.full((10, 3), 4.0)))
    found = start_topics(counts, 2, np.random.default_rng(0), first=True).numpy()
    # corners are pure; the rest of each topic is the even frequency of all words
    expected = CORNER_SHARE * np.kron(np.eye(2), np.full((1, 3), 1 / 3)) + (1 - CORNER_SHARE) / 6
    np.testing.assert_allclose(found[np.argsort(-found[:, 0])], expected, rtol=1e-5)


def test_lengths_of_documents_do_not_matter_to_their_shares():
    """Doubling every count is the same corpus."""
    counts = bars(4, 100, 40, seed=1).counts
    once, twice = (start_topics(one, 4, np.random.default_rng(0), first=True).numpy() for one in (counts, 2 * counts))
    np.testing.assert_allclose(once, twice, atol=1e-5)


def test_further_starts_look_at_other_halves():
    counts = bars(6, 400, 60, seed=3).counts
    first, same, other = (
        start_topics(counts, 6, np.random.default_rng(seed), first=False).numpy() for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 1e-3
