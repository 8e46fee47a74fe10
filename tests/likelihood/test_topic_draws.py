"""Topics drawn from their distribution, beside sums over all assignments of few words."""

import itertools

import numpy as np
import pytest
from scipy import sparse, special

from otpdag.likelihood import topic_draws
from otpdag.likelihood.topic_draws import DrawnTopics, TopicChain, drawn_topics


def never():
    return False


def start(topics, alpha, prior=0.5):
    return DrawnTopics(np.sqrt(topics), np.ones(len(topics)), np.asarray(alpha, dtype=float), prior)


def log_dirichlet(counts, concentration):
    """Logarithm of how likely words in their order are, drawn from a Dirichlet's draw."""
    counts, concentration = np.asarray(counts, dtype=float), np.broadcast_to(concentration, np.shape(counts))
    whole = special.gammaln(concentration.sum()) - special.gammaln(concentration.sum() + counts.sum())
    return whole + (special.gammaln(concentration + counts) - special.gammaln(concentration)).sum()


def test_topics_are_drawn_from_their_exact_distribution(monkeypatch):
    monkeypatch.setattr(topic_draws, "word_concentration", lambda counts, prior: prior)
    documents, alpha, prior = np.array([[2, 1, 0], [0, 1, 2]]), np.array([0.4, 1.2]), 0.5
    words = [(d, v) for d, v in np.ndindex(2, 3) for _ in range(documents[d, v])]
    chances, roots, given = [], [], []
    for assigned in itertools.product((0, 1), repeat=len(words)):
        by_document, by_word = np.zeros((2, 2)), np.zeros((2, 3))
        for (d, v), k in zip(words, assigned, strict=True):
            by_document[d, k] += 1
            by_word[k, v] += 1
        parts = [log_dirichlet(one, alpha) for one in by_document] + [log_dirichlet(one, prior) for one in by_word]
        chances.append(np.exp(sum(parts)))
        root = np.exp(special.gammaln(by_word + prior + 0.5) - special.gammaln(by_word + prior))
        roots.append(root / np.linalg.norm(root, axis=1, keepdims=True))
        given.append(by_word.sum(1))
    exact = np.average(roots, axis=0, weights=chances)
    chain = TopicChain(
        sparse.csr_array(documents), start(np.full((2, 3), 1 / 3), alpha), np.random.default_rng(0), learns_alpha=False
    )
    drawn = chain.window(8_000, never)
    np.testing.assert_allclose(drawn.roots, exact, atol=0.03)
    np.testing.assert_allclose(drawn.words, np.average(given, axis=0, weights=chances), atol=0.12)
    np.testing.assert_allclose(drawn.alpha, alpha)
    assert drawn.prior == pytest.approx(prior)


def test_concentrations_are_learned_with_the_topics():
    rng = np.random.default_rng(3)
    topics, shares = rng.dirichlet(np.full(40, 0.4), 4), rng.dirichlet(np.full(4, 0.3), 800)
    documents = sparse.csr_array(np.stack([rng.multinomial(80, one @ topics) for one in shares]))
    drawn = drawn_topics(
        documents, start(topics, np.ones(4), 0.1), np.random.default_rng(1), learns_alpha=True, is_over=never
    )
    np.testing.assert_allclose(drawn.alpha, 0.3, atol=0.07)
    assert drawn.prior == pytest.approx(0.4, rel=0.3)
    assert drawn.topics.sum(1) == pytest.approx(1.0)
    distance = np.linalg.norm(np.sqrt(drawn.topics) - np.sqrt(topics), axis=1)
    assert distance.max() < 0.1
    assert drawn.words.sum() == pytest.approx(documents.sum())


@pytest.mark.parametrize(("turns", "windows"), [((1.0, 2.0, 1.5), 3), ((1.0, 2.0, 3.0, 2.0), 4), (range(5), 5)])
def test_windows_grow_until_topics_turn_back(monkeypatch, turns, windows):
    asked, places = [], iter(turns)

    def window(self, sweeps, is_over):
        asked.append(sweeps)
        return DrawnTopics(np.full((2, 2), next(places)), np.ones(2), np.ones(2))

    monkeypatch.setattr(TopicChain, "window", window)
    documents = sparse.csr_array(np.ones((3, 2), dtype=int))
    last = drawn_topics(
        documents, start(np.full((2, 2), 0.5), np.ones(2)), np.random.default_rng(0), learns_alpha=True, is_over=never
    )
    assert asked == [25, 50, 100, 200, 400][:windows]
    assert last.roots[0, 0] == list(turns)[windows - 1]


def test_windows_are_fewer_and_shorter_where_draws_begin_near(monkeypatch):
    asked = []

    def window(self, sweeps, is_over):
        asked.append(sweeps)
        return DrawnTopics(np.full((2, 2), float(len(asked))), np.ones(2), np.ones(2))

    monkeypatch.setattr(TopicChain, "window", window)
    documents, begin = sparse.csr_array(np.ones((3, 2), dtype=int)), start(np.full((2, 2), 0.5), np.ones(2))
    drawn_topics(documents, begin, np.random.default_rng(0), learns_alpha=True, is_near=True, is_over=never)
    assert asked == [10, 20, 40, 80]


def test_somebody_who_wants_the_end_gets_it_after_a_sweep(monkeypatch):
    sweeps = []
    learned = TopicChain._learn
    monkeypatch.setattr(TopicChain, "_learn", lambda self, counts: (sweeps.append(1), learned(self, counts)))
    documents = sparse.csr_array(np.ones((3, 2), dtype=int))
    begin = start(np.full((2, 2), 0.5), np.ones(2))
    drawn = drawn_topics(documents, begin, np.random.default_rng(0), learns_alpha=True, is_over=lambda: True)
    assert len(sweeps) == 1
    assert np.isfinite(drawn.topics).all()


def test_averages_are_those_of_every_part():
    one = DrawnTopics(np.array([[1.0, 0.0]]), np.array([2.0]), np.array([0.5]), 0.1)
    other = DrawnTopics(np.array([[0.0, 1.0]]), np.array([4.0]), np.array([1.5]), 0.3)
    both = one.averaged_with(other, 2)
    assert (both.roots.tolist(), both.words.tolist(), both.alpha.tolist()) == ([[0.5, 0.5]], [3.0], [1.0])
    assert both.prior == pytest.approx(0.2)
    assert both.topics.tolist() == [[0.5, 0.5]]
    assert both.averaged_with(one, 3).words.tolist() == [pytest.approx(8 / 3)]
