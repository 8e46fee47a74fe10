"""Trees of binomial splits by sums over categories, and topics at given shares beside plain updates."""

import numpy as np
import pytest
import torch
from scipy import stats

from otpdag.mechanisms.multinomial import TOPIC_STEPS, _fit_topics, _Tree

GENERATOR = np.random.default_rng(2)


def halves(leaves):
    """Splits (first, before, end) of the tree, by number: the split before category j has number j - 1."""
    found = {}

    def cut(first, width):
        if width > 1 and first < leaves:
            if first + width // 2 < leaves:
                found[first + width // 2 - 1] = (first, first + width // 2, min(first + width, leaves))
            cut(first, width // 2)
            cut(first + width // 2, width // 2)

    cut(0, 1 << (leaves - 1).bit_length())
    return found


@pytest.mark.parametrize("leaves", [2, 3, 4, 5, 7, 8, 11])
def test_splits_are_sums_to_the_left_and_of_both_sides(leaves):
    values = torch.as_tensor(GENERATOR.uniform(size=(4, leaves)))
    left, both = _Tree(leaves).splits(values)
    splits = halves(leaves)
    assert sorted(splits) == list(range(leaves - 1))
    for number, (first, before, end) in splits.items():
        torch.testing.assert_close(left[:, number], values[:, first:before].sum(-1))
        torch.testing.assert_close(both[:, number], values[:, first:end].sum(-1))


@pytest.mark.parametrize("leaves", [2, 3, 5, 8])
def test_draws_are_divided_by_binomial_quantiles(leaves):
    probs, noise = GENERATOR.dirichlet(np.ones(leaves), 6), GENERATOR.uniform(size=(6, leaves - 1))
    probs[0, 0], probs[1, -1] = 0.0, 0.0
    probs /= probs.sum(-1, keepdims=True)
    total = GENERATOR.integers(0, 30, (6, 1)).astype(float)
    counts = _Tree(leaves).divide(noise, probs, total)
    np.testing.assert_array_equal(counts.sum(-1), total[:, 0])
    for number, (first, before, end) in halves(leaves).items():
        reach, part = counts[:, first:end].sum(-1), counts[:, first:before].sum(-1)
        share = probs[:, first:before].sum(-1) / probs[:, first:end].sum(-1)
        np.testing.assert_array_equal(part, stats.binom.ppf(noise[:, number], reach, np.minimum(share, 1)).clip(min=0))


def test_topics_at_given_shares_are_expectation_maximisation():
    shares = torch.as_tensor(GENERATOR.dirichlet(np.ones(2), 30))
    counts = torch.as_tensor(GENERATOR.poisson(2.0, (30, 5))).double()
    overall = counts.sum(0) / counts.sum()
    theta, n, base = shares.numpy(), counts.numpy(), overall.numpy()
    topics = theta.T @ n + base
    topics /= topics.sum(1, keepdims=True)
    for _ in range(TOPIC_STEPS):
        new = np.zeros_like(topics)
        for row in range(30):
            for word in range(5):
                new[:, word] += n[row, word] * theta[row] * topics[:, word] / (theta[row] @ topics[:, word])
        topics = new + 1e-3 * base
        topics /= topics.sum(1, keepdims=True)
    np.testing.assert_allclose(_fit_topics(shares, counts, overall), topics, rtol=1e-9)
