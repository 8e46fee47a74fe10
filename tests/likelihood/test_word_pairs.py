"""Pairs of words against sums over all of them, and starts at documents that are most unlike each other."""

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.optimize import linear_sum_assignment

from otpdag.datasets import bars
from otpdag.likelihood.word_pairs import WordPairs, repeats, start_topics, topic_pairs


def test_pairs_are_those_of_different_words_of_one_document():
    texts = [[0, 0, 1], [2, 1], [2]]
    counts = np.zeros((3, 3))
    expected = np.zeros((3, 3))
    for row, text in enumerate(texts):
        for i, left in enumerate(text):
            counts[row, left] += 1
            for j, right in enumerate(text):
                expected[left, right] += i != j
    pairs = WordPairs.of(sparse.csr_array(counts))
    assert pairs.counts.toarray() == pytest.approx(expected)
    assert pairs.total == expected.sum()
    both = WordPairs.of(sparse.csr_array(counts[:1])) + WordPairs.of(sparse.csr_array(counts[1:]))
    assert both.counts.toarray() == pytest.approx(expected)


def test_pairs_of_topics_are_moments_of_the_dirichlet():
    alpha = torch.tensor([0.3, 1.2, 0.5])
    shares = torch.distributions.Dirichlet(alpha).sample((200_000,))
    assert topic_pairs(alpha).numpy() == pytest.approx((shares.T @ shares / len(shares)).numpy(), abs=3e-3)


def test_the_loss_is_the_cross_entropy_and_blocks_change_nothing():
    rng = np.random.default_rng(0)
    pairs = WordPairs.of(sparse.csr_array(rng.poisson(0.5, (30, 12))))
    topics = torch.from_numpy(rng.dirichlet(np.ones(12), 3)).float()
    alpha = torch.tensor([0.3, 1.2, 0.5])
    model = (topics.T @ topic_pairs(alpha) @ topics).double().numpy()
    seen = pairs.counts.toarray() / pairs.total
    loss, words, among = pairs.expected(topics, alpha)
    assert loss == pytest.approx(-(seen * np.log(model)).sum(), rel=1e-5)
    assert float(words.sum()) == pytest.approx(1, abs=1e-5)
    assert float(among.sum()) == pytest.approx(1, abs=1e-5)
    small = WordPairs(pairs.counts, pairs.total, at_once=30, kept=0).expected(topics, alpha)
    assert small[0] == pytest.approx(loss, rel=1e-6)
    assert small[1].numpy() == pytest.approx(words.numpy(), abs=1e-6)


def test_expected_counts_are_the_gradient_of_the_loss():
    # of a mixture: d loss / d log gamma_kv is minus twice the share of pairs that topic k and word v are part of
    rng = np.random.default_rng(1)
    pairs = WordPairs.of(sparse.csr_array(rng.poisson(0.7, (20, 6))))
    alpha = torch.tensor([0.4, 0.9])
    line = torch.log(torch.from_numpy(rng.dirichlet(np.ones(6), 2))).requires_grad_(True)
    model = torch.exp(line).T @ topic_pairs(alpha).double() @ torch.exp(line)
    seen = torch.from_numpy(pairs.counts.toarray() / pairs.total)
    (gradient,) = torch.autograd.grad(-(seen * torch.log(model)).sum(), line)
    _, words, _ = pairs.expected(torch.exp(line.detach()).float(), alpha)
    assert 2 * words.numpy() == pytest.approx(-gradient.numpy(), abs=1e-5)


def test_words_repeat_as_often_as_the_model_says_where_it_holds():
    rng = np.random.default_rng(0)
    topics = np.kron(np.eye(2), np.full((1, 3), 1 / 3))
    drawn = sparse.csr_array(rng.multinomial(20, rng.dirichlet([0.5, 0.5], 2000) @ topics))
    alpha = torch.full((2,), 0.5)
    read = repeats(drawn, torch.from_numpy(topics), alpha)
    assert read.ratio == pytest.approx(1, abs=3 * read.error)
    assert read.as_modelled
    bursts = repeats(sparse.csr_array(2 * drawn), torch.from_numpy(topics), alpha)
    assert bursts.ratio > 1.05
    once = repeats(sparse.csr_array((drawn.toarray() > 0).astype(float)), torch.from_numpy(topics), alpha)
    assert once.ratio == 0
    assert not once.as_modelled


# -- starts ------------------------------------------------------------------------------------------------------------


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
    expected = 0.9 * np.kron(np.eye(2), np.full((1, 3), 1 / 3)) + 0.1 / 6
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


def test_more_topics_than_words_still_start():
    rng = np.random.default_rng(0)
    counts = sparse.csr_array(rng.poisson(2.0, (20, 3)))
    found = start_topics(counts, 5, rng, first=True)
    assert found.shape == (5, 3)
    assert found.sum(-1).numpy() == pytest.approx(np.ones(5))
