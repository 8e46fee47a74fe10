"""Topic models of others behind our interface."""

import time

import numpy as np
import pytest
import torch
from sklearn.decomposition import LatentDirichletAllocation

from baselines import prodlda, topics
from baselines.base import Estimate
from experiments.metrics import patterns_recovered, topic_errors
from otpdag.datasets import bars


@pytest.fixture(scope="module")
def easy():
    """Four bars on a grid of two by two, in documents about nearly one topic each."""
    return bars(4, 300, 60, alpha=0.1, seed=101)


@pytest.mark.parametrize(
    ("name", "options"),
    [("em", {}), ("svi", {"learning_method": "online", "batch_size": 50})],
)
def test_iterations_are_those_of_scikit_learn(name, options, easy):
    found = topics.METHODS[name](easy.counts, topics=4, seed=3, iterations=6)
    peer = LatentDirichletAllocation(4, max_iter=6, random_state=3, **options).fit(easy.counts)
    expected = peer.components_ / peer.components_.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.params["topics"], expected, rtol=1e-9)
    np.testing.assert_allclose(found.params["alpha"], 0.25)
    assert found.objective[0] == pytest.approx(peer.score(easy.counts))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["em", "svi", "prodlda"])
def test_a_tolerance_ends_a_fit_where_more_changes_little(name, easy, monkeypatch):
    monkeypatch.setattr(prodlda, "STRETCH", 200)
    run, tolerance = topics.METHODS[name], {"prodlda": 0.05}.get(name, 1e-4)
    ended = run(easy.counts, topics=4, seed=3, iterations=3000, tolerance=tolerance, keep=True)
    passes = len(ended.history["topics"])
    assert passes < 3000
    assert passes % (200 // 2 if name == "prodlda" else 10) == 0  # two batches to a pass: stretches of 200 steps
    more = run(easy.counts, topics=4, seed=3, iterations=passes + 10)
    assert topic_errors(more.params["topics"], ended.params["topics"])["hellinger"] < {"prodlda": 0.05}.get(name, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [("em", {"iterations": 40}, 0.05), ("svi", {"iterations": 40}, 0.05), ("prodlda", {"iterations": 100}, 0.35)],
)
def test_an_easy_truth_is_recovered(name, options, limit, easy):
    began = time.process_time()
    found = topics.METHODS[name](easy.counts, topics=4, seed=101, alpha=0.1, **options)
    took = time.process_time() - began
    assert patterns_recovered(easy.topics, found.params["topics"]) == 1.0
    assert topic_errors(easy.topics, found.params["topics"])["hellinger"] < limit
    assert 0 < found.seconds <= took


def test_gibbs_sampling_recovers_topics_and_alpha():
    pytest.importorskip("tomotopy")
    drawn = bars(4, 1000, 60, alpha=0.3, seed=101)
    wider = drawn.counts.copy()
    wider.resize((1000, 6))  # two words that no document has
    found = topics.METHODS["tomotopy"](wider, topics=4, seed=101, iterations=200, alpha=0.1)
    assert found.params["topics"].shape == (4, 6)
    np.testing.assert_allclose(found.params["topics"].sum(axis=1), 1.0)
    truth = np.pad(drawn.topics, ((0, 0), (0, 2)))
    assert topic_errors(truth, found.params["topics"])["hellinger"] < 0.1
    np.testing.assert_allclose(found.params["alpha"], 0.3, rtol=0.2)


@pytest.mark.parametrize("name", ["em", "svi", "prodlda", "tomotopy"])
def test_a_kept_history_ends_at_the_estimate_and_changes_nothing(name, easy):
    if name == "tomotopy":
        pytest.importorskip("tomotopy")
    iterations = 30 if name == "tomotopy" else 3
    run = topics.METHODS[name]
    kept = run(easy.counts, topics=4, seed=5, iterations=iterations, keep=True)
    plain = run(easy.counts, topics=4, seed=5, iterations=iterations)
    assert kept.history["topics"].shape == (3, 4, 4)
    np.testing.assert_allclose(kept.history["topics"][-1], kept.params["topics"])
    np.testing.assert_allclose(kept.params["topics"], plain.params["topics"])
    assert (np.diff(kept.history["seconds"]) > 0).all()
    assert kept.history["seconds"][-1] <= kept.seconds
    assert plain.history == {}


def test_time_to_a_given_error():
    truth = np.eye(2)
    course = np.stack([np.full((2, 2), 0.5), [[0.1, 0.9], [0.9, 0.1]], truth])
    history = {"topics": course, "seconds": np.array([1.0, 2.0, 3.0])}
    estimate = Estimate({"topics": truth}, np.zeros(1), history)
    errors = topics.hellinger_course(truth, estimate)
    np.testing.assert_allclose(errors, [np.sqrt(1 - np.sqrt(0.5)), np.sqrt(1 - np.sqrt(0.9)), 0.0])
    assert topics.seconds_to(truth, estimate, 0.3) == 2.0
    assert topics.seconds_to(truth, estimate, 0.0) == 3.0
    assert topics.seconds_to(truth, estimate, -1.0) == np.inf


def test_the_prior_of_prodlda_is_the_laplace_approximation():
    """Equation 2 of Srivastava & Sutton for a Dirichlet of five concentrations that are alike."""
    network = prodlda._ProdLDA(words=7, topics=5, alpha=0.2)
    alpha = np.full(5, 0.2)
    variance = (1 - 2 / 5) / alpha + (1 / alpha).sum() / 25
    np.testing.assert_allclose(network.prior_variance.numpy(), variance, rtol=1e-6)
    np.testing.assert_allclose(network.prior_mean.numpy(), np.log(alpha) - np.log(alpha).mean())
    mean, log_variance = torch.randn(3, 5), torch.randn(3, 5)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(
        normal(mean, torch.exp(0.5 * log_variance)), normal(network.prior_mean, network.prior_variance.sqrt())
    ).sum(-1)
    torch.testing.assert_close(network.divergence(mean, log_variance), expected)


def test_prodlda_leaves_the_global_generator_alone(easy):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    prodlda.fit(easy.counts, topics=4, seed=1, iterations=1)
    torch.testing.assert_close(torch.rand(3), expected)
