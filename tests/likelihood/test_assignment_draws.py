"""Draws of assignments and shares, beside enumeration; and documents drawn from topics."""

import numpy as np
import pytest
from scipy import sparse, special

from otpdag.likelihood import topic_draws as assignment_draws
from otpdag.likelihood.topic_draws import AssignmentDraws, simulated_documents


def last_of(draws, topics, alpha, sweeps):
    for _ in range(sweeps):
        counts = draws.sweep(topics, alpha)
    return counts


@pytest.mark.parametrize("at_a_time", [100, 200_000])
def test_draws_have_the_exact_distribution(monkeypatch, at_a_time):
    # two topics, one word of each kind: the number of words of the first topic by enumeration
    monkeypatch.setattr(assignment_draws, "CELLS_AT_A_TIME", at_a_time)
    topics = np.array([[0.8, 0.2], [0.3, 0.7]])
    alpha = np.array([0.5, 1.5])
    counts = sparse.csr_array(np.tile([[2, 1]], (4000, 1)))
    drawn = last_of(AssignmentDraws(counts, 2, np.random.default_rng(0)), topics, alpha, 30)
    weights = np.zeros(4)
    for assigned in np.ndindex(2, 2, 2):
        n = np.array([assigned.count(0), assigned.count(1)])
        words = np.prod([topics[k, v] for k, v in zip(assigned, (0, 0, 1), strict=True)])
        weights[n[0]] += words * np.exp(special.gammaln(alpha + n).sum())
    found = np.bincount(drawn.by_document[:, 0].astype(int), minlength=4) / 4000
    assert found == pytest.approx(weights / weights.sum(), abs=0.025)
    assert (drawn.by_document.sum(1) == 3).all()


@pytest.mark.parametrize("at_a_time", [1, 3, 200_000])
def test_every_word_is_counted_once_by_document_and_by_kind(monkeypatch, at_a_time):
    monkeypatch.setattr(assignment_draws, "CELLS_AT_A_TIME", at_a_time)
    counts = np.array([[0, 0, 0], [1, 2, 0], [0, 0, 0], [4, 0, 1], [0, 3, 0]])
    draws = AssignmentDraws(sparse.csr_array(counts), 2, np.random.default_rng(0))
    drawn = last_of(draws, np.full((2, 3), 1 / 3), np.ones(2), 3)
    assert drawn.by_document.sum(1).tolist() == counts.sum(1).tolist()
    assert drawn.by_word.sum(0).tolist() == counts.sum(0).tolist()
    assert drawn.by_document.sum(0).tolist() == drawn.by_word.sum(1).tolist()


def test_a_word_that_one_topic_has_is_of_that_topic():
    topics = np.array([[1.0, 0.0], [0.0, 1.0]])
    counts = sparse.csr_array(np.array([[5, 2], [0, 7]]))
    drawn = AssignmentDraws(counts, 2, np.random.default_rng(1)).sweep(topics, np.full(2, 0.3))
    assert drawn.by_document.tolist() == [[5, 2], [0, 7]]
    assert drawn.by_word.tolist() == [[5, 0], [0, 9]]


def test_simulated_documents_are_those_of_the_model():
    rng = np.random.default_rng(2)
    topics, alpha = rng.dirichlet(np.ones(6), 3), np.array([0.2, 0.5, 1.0])
    lengths = rng.integers(0, 40, 5000)
    documents, by_word = simulated_documents(lengths, topics, alpha, rng)
    assert documents.sum(axis=1).tolist() == lengths.tolist()
    np.testing.assert_array_equal(by_word.sum(0), documents.sum(axis=0))
    told = by_word / by_word.sum(1, keepdims=True)
    np.testing.assert_allclose(told, topics, atol=0.01)
    np.testing.assert_allclose(by_word.sum(1) / by_word.sum(), alpha / alpha.sum(), atol=0.02)
    # words of one document share its topics: two of them meet more often than by chance
    dense = documents.toarray()
    pairs = dense.T @ dense - np.diag(dense.sum(0))
    total = alpha.sum()
    among = (np.outer(alpha, alpha) + np.diag(alpha)) / (total * (total + 1))
    np.testing.assert_allclose(pairs / pairs.sum(), topics.T @ among @ topics, atol=0.01)
