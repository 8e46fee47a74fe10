import numpy as np
import pytest
import torch
from scipy import sparse

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.backward.topic_concentrations import newton_concentration, pair_concentration
from otpdag.datasets import bars
from otpdag.document_corners import start_topics
from otpdag.engine import EM, Layout
from otpdag.engine.kinds.document_data import topic_method
from otpdag.engine.optimiser import Leg
from otpdag.inference.word_pairs import WordPairs, topic_pairs
from otpdag.objective.topics import PairProblem, Topics, TopicSweeps


def topic_model(topics, words):
    graph = otp.Graph([("shares", "words")], hidden=["shares"])
    return otp.Model(graph, {"shares": m.Dirichlet(topics), "words": m.Multinomial(words)})


def test_newton_finds_the_maximum_of_the_dirichlet_likelihood():
    alpha = torch.tensor([0.1, 2.0, 0.7], dtype=torch.float64)
    logs = torch.digamma(alpha) - torch.digamma(alpha.sum())
    found = newton_concentration(torch.ones(3, dtype=torch.float64), logs, steps=30)
    assert found.numpy() == pytest.approx(alpha.numpy())


def test_starts_are_the_corners():
    # documents about one topic each, with as many others between them
    rng = np.random.default_rng(0)
    topics = np.kron(np.eye(3), np.full((1, 4), 0.25))
    shares = np.concatenate([np.repeat(np.eye(3), 30, 0), np.full((60, 3), 1 / 3)])
    counts = sparse.csr_array(np.stack([rng.multinomial(80, share @ topics) for share in shares]))
    found = start_topics(counts, 3, rng, first=True).numpy()
    masses = found.reshape(3, 3, 4).sum(-1)
    assert sorted(masses.argmax(1)) == [0, 1, 2]
    assert masses.max(1).min() > 0.85


def test_more_topics_than_words_still_start():
    rng = np.random.default_rng(0)
    counts = sparse.csr_array(rng.poisson(2.0, (20, 3)))
    found = start_topics(counts, 5, rng, first=True)
    assert found.shape == (5, 3)
    assert found.sum(-1).numpy() == pytest.approx(np.ones(5))


def test_the_loss_falls_and_every_start_is_reported():
    drawn = bars(6, 300, 50, seed=101)
    method = topic_method("entropic", documents=300, steps=60)
    model = topic_model(6, drawn.counts.shape[1])
    result = otp.fit(model, otp.Documents(drawn.counts), method=method, restarts=3, seed=0)
    losses = [record["loss"] for record in result.history]
    assert losses[-1] < losses[0]
    short_losses = [restart.short_loss for restart in result.restarts]
    assert len(short_losses) == 3
    assert [restart.kept for restart in result.restarts].index(True) == int(np.argmin(short_losses))
    assert [stage.name for stage in result.stages] == ["3 short starts", "best start"]
    assert result.stages[0].starts == (0, 1, 2)


def test_pairs_made_by_a_model_are_matched():
    # the cross-entropy of two distributions is least where they are equal, and then an entropy
    alpha = np.array([0.3, 0.9])
    among = (np.outer(alpha, alpha) + np.diag(alpha)) / (1.2 * 2.2)
    topics = np.kron(np.eye(2), np.full((1, 3), 1 / 3))
    exact = topics.T @ among @ topics
    start = torch.from_numpy(0.8 * topics + 0.2 / 6).float()
    structure = topic_model(2, 6).structure
    pairs = WordPairs(sparse.csr_array(1e6 * exact), 1e6)
    documents = sparse.csr_array(np.ones((1, 6)))
    problem = PairProblem(structure, documents, Layout.of(structure).shapes, TopicSweeps(pairs=True), 0, pairs)
    point = problem.point(Topics(torch.log(start.double()), torch.full((2,), 0.5)))
    outcome = EM(steps=500, tolerance=0.0).run(Leg(problem, point, 500), lambda progress: False)
    assert float(outcome.loss[0]) == pytest.approx(-(exact * np.log(exact)).sum(), abs=1e-5)


def test_at_known_topics_pairs_give_the_concentrations():
    alpha = torch.tensor([0.3, 0.9, 0.1])
    assert pair_concentration(topic_pairs(alpha)).numpy() == pytest.approx(alpha.numpy(), rel=1e-4)
