import numpy as np
import pytest
import torch
from scipy import sparse

from otpdag.likelihood import word_pairs as objective
from otpdag.likelihood.word_pairs import WordPairs, repeats, topic_pairs


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


def test_the_loss_is_the_cross_entropy_and_blocks_change_nothing(monkeypatch):
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
    monkeypatch.setattr(objective, "BLOCK_CELLS", 30)
    monkeypatch.setattr(objective, "KEPT_CELLS", 0)
    small = pairs.expected(topics, alpha)
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
