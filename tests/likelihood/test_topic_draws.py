"""Topics drawn from their distribution, beside sums over all assignments of few words."""

import itertools

import numpy as np
import pytest
import torch
from scipy import optimize, sparse, special, stats

from otpdag.likelihood import topic_shares
from otpdag.likelihood.topic_problem import pair_concentration
from otpdag.likelihood.topic_shares import (
    ALPHA_RANGE,
    AssignmentDraws,
    DrawnTopics,
    drawn_topics,
    exact_alpha,
    mean_draw,
    newton_concentration,
    simulated_documents,
    topic_draws,
    word_concentration,
)


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
    monkeypatch.setattr(topic_shares, "word_concentration", lambda counts, prior: prior)
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
    draws = topic_draws(
        sparse.csr_array(documents), start(np.full((2, 3), 1 / 3), alpha), np.random.default_rng(0), learns_alpha=False
    )
    drawn = mean_draw(draws, 8_000, never)
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

    def window(draws, sweeps, is_over):
        asked.append(sweeps)
        return DrawnTopics(np.full((2, 2), next(places)), np.ones(2), np.ones(2))

    monkeypatch.setattr(topic_shares, "mean_draw", window)
    documents = sparse.csr_array(np.ones((3, 2), dtype=int))
    last = drawn_topics(
        documents, start(np.full((2, 2), 0.5), np.ones(2)), np.random.default_rng(0), learns_alpha=True, is_over=never
    )
    assert asked == [25, 50, 100, 200, 400][:windows]
    assert last.roots[0, 0] == list(turns)[windows - 1]


def test_windows_are_fewer_and_shorter_where_draws_begin_near(monkeypatch):
    asked = []

    def window(draws, sweeps, is_over):
        asked.append(sweeps)
        return DrawnTopics(np.full((2, 2), float(len(asked))), np.ones(2), np.ones(2))

    monkeypatch.setattr(topic_shares, "mean_draw", window)
    documents, begin = sparse.csr_array(np.ones((3, 2), dtype=int)), start(np.full((2, 2), 0.5), np.ones(2))
    drawn_topics(documents, begin, np.random.default_rng(0), learns_alpha=True, is_over=never, sweeps=10, most=4)
    assert asked == [10, 20, 40, 80]


def test_somebody_who_wants_the_end_gets_it_after_a_sweep(monkeypatch):
    sweeps = []
    swept = AssignmentDraws.sweep
    monkeypatch.setattr(AssignmentDraws, "sweep", lambda *held: (sweeps.append(1), swept(*held))[1])
    documents = sparse.csr_array(np.ones((3, 2), dtype=int))
    begin = start(np.full((2, 2), 0.5), np.ones(2))
    drawn = drawn_topics(documents, begin, np.random.default_rng(0), learns_alpha=True, is_over=lambda: True)
    assert len(sweeps) == 6  # five of the shares alone
    assert np.isfinite(drawn.topics).all()


def test_averages_are_those_of_every_part():
    one = DrawnTopics(np.array([[1.0, 0.0]]), np.array([2.0]), np.array([0.5]), 0.1)
    other = DrawnTopics(np.array([[0.0, 1.0]]), np.array([4.0]), np.array([1.5]), 0.3)
    both = one.averaged_with(other, 2)
    assert (both.roots.tolist(), both.words.tolist(), both.alpha.tolist()) == ([[0.5, 0.5]], [3.0], [1.0])
    assert both.prior == pytest.approx(0.2)
    assert both.topics.tolist() == [[0.5, 0.5]]
    assert both.averaged_with(one, 3).words.tolist() == [pytest.approx(8 / 3)]


# -- assignments -------------------------------------------------------------------------------------------------------


def last_of(draws, topics, alpha, sweeps):
    for _ in range(sweeps):
        counts = draws.sweep(topics, alpha)
    return counts


@pytest.mark.parametrize("at_a_time", [100, 200_000])
def test_draws_have_the_exact_distribution(at_a_time):
    # two topics, one word of each kind: the number of words of the first topic by enumeration
    topics = np.array([[0.8, 0.2], [0.3, 0.7]])
    alpha = np.array([0.5, 1.5])
    counts = sparse.csr_array(np.tile([[2, 1]], (4000, 1)))
    by_document, _ = last_of(AssignmentDraws(counts, 2, np.random.default_rng(0), at_a_time), topics, alpha, 30)
    weights = np.zeros(4)
    for assigned in np.ndindex(2, 2, 2):
        n = np.array([assigned.count(0), assigned.count(1)])
        words = np.prod([topics[k, v] for k, v in zip(assigned, (0, 0, 1), strict=True)])
        weights[n[0]] += words * np.exp(special.gammaln(alpha + n).sum())
    found = np.bincount(by_document[:, 0].astype(int), minlength=4) / 4000
    assert found == pytest.approx(weights / weights.sum(), abs=0.025)
    assert (by_document.sum(1) == 3).all()


@pytest.mark.parametrize("at_a_time", [1, 3, 200_000])
def test_every_word_is_counted_once_by_document_and_by_kind(at_a_time):
    counts = np.array([[0, 0, 0], [1, 2, 0], [0, 0, 0], [4, 0, 1], [0, 3, 0]])
    draws = AssignmentDraws(sparse.csr_array(counts), 2, np.random.default_rng(0), at_a_time)
    by_document, by_word = last_of(draws, np.full((2, 3), 1 / 3), np.ones(2), 3)
    assert by_document.sum(1).tolist() == counts.sum(1).tolist()
    assert by_word.sum(0).tolist() == counts.sum(0).tolist()
    assert by_document.sum(0).tolist() == by_word.sum(1).tolist()


def test_a_word_that_one_topic_has_is_of_that_topic():
    topics = np.array([[1.0, 0.0], [0.0, 1.0]])
    counts = sparse.csr_array(np.array([[5, 2], [0, 7]]))
    by_document, by_word = AssignmentDraws(counts, 2, np.random.default_rng(1)).sweep(topics, np.full(2, 0.3))
    assert by_document.tolist() == [[5, 2], [0, 7]]
    assert by_word.tolist() == [[5, 0], [0, 9]]


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


# -- concentrations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truth", [[0.3, 0.3], [0.1, 2.0, 7.0], [40.0, 1.0, 5.0, 0.5]])
def test_newtons_method_finds_the_likeliest_concentrations(truth):
    logs = np.log(np.random.default_rng(0).dirichlet(truth, 400) + 1e-300).mean(0)

    def cost(log_a):
        a = np.exp(log_a)
        return -(special.gammaln(a.sum()) - special.gammaln(a).sum() + (a - 1) @ logs)

    best = np.exp(optimize.minimize(cost, np.zeros(len(truth)), tol=1e-12).x)
    for begin in (0.05, 1.0, 30.0):
        start = torch.full((len(truth),), begin).double()
        np.testing.assert_allclose(newton_concentration(start, torch.as_tensor(logs), steps=60), best, rtol=1e-4)
    # what is likeliest at its own expected logarithms is where it is
    a = torch.tensor(truth).double()
    own = torch.digamma(a) - torch.digamma(a.sum())
    torch.testing.assert_close(newton_concentration(a, own, steps=1), a)


def test_concentrations_stay_within_bounds():
    even = torch.full((3,), 1 / 3).double().log()
    assert newton_concentration(torch.ones(3).double(), even, steps=60).tolist() == [ALPHA_RANGE[1]] * 3
    sharp = newton_concentration(torch.ones(2).double(), torch.full((2,), -1e6).double(), steps=60)
    assert sharp.tolist() == [ALPHA_RANGE[0]] * 2


@pytest.mark.parametrize("alpha", [[0.2, 0.5, 1.3], [3.0, 3.0, 3.0]])
def test_pairs_of_topics_tell_the_concentrations(alpha):
    alpha = np.array(alpha)
    total = alpha.sum()
    among = (np.outer(alpha, alpha) + np.diag(alpha)) / (total * (total + 1))  # E[shares shares'] of a Dirichlet
    np.testing.assert_allclose(pair_concentration(torch.as_tensor(17.0 * among)), alpha, rtol=1e-9)


def test_pairs_without_any_excess_are_of_even_shares():
    share = torch.tensor([0.25, 0.75]).double()
    found = pair_concentration(torch.outer(share, share))
    assert found[1].item() == ALPHA_RANGE[1]


def test_exact_concentrations_are_those_that_made_the_documents():
    rng = np.random.default_rng(1)
    alpha, topics = np.array([0.2, 0.6]), rng.dirichlet(np.full(30, 0.2), 2)
    shares = rng.dirichlet(alpha, 500)
    counts = sparse.csr_array(np.stack([rng.multinomial(60, share @ topics) for share in shares]).astype(float))
    found = exact_alpha(counts, torch.as_tensor(topics), torch.tensor([1.0, 1.0]).double(), np.random.default_rng(0))
    logs = np.log(shares + 1e-300).mean(0)
    best = newton_concentration(torch.ones(2).double(), torch.as_tensor(logs), steps=60).numpy()
    np.testing.assert_allclose(found, best, rtol=0.1)  # as well as from the shares themselves
    same = exact_alpha(counts / 2.0, torch.as_tensor(topics), torch.tensor([0.75, 0.5]), rng)
    assert same.tolist() == [0.75, 0.5]


def test_the_density_at_the_optimum_is_that_of_scipy():
    """Guards the cost above: the mean log-density of a Dirichlet in its mean logarithms."""
    a, x = np.array([0.5, 2.0]), np.array([0.3, 0.7])
    own = special.gammaln(a.sum()) - special.gammaln(a).sum() + (a - 1) @ np.log(x)
    assert own == pytest.approx(stats.dirichlet.logpdf(x, a))


@pytest.mark.parametrize("truth", [0.02, 0.3, 4.0])
def test_the_concentration_of_words_is_the_likeliest(truth):
    rng = np.random.default_rng(4)
    counts = np.stack([rng.multinomial(3000, rng.dirichlet(np.full(60, truth))) for _ in range(8)]).astype(float)

    def cost(log_a):
        a = np.exp(log_a)
        own = (special.gammaln(counts + a) - special.gammaln(a)).sum()
        return -own - (special.gammaln(60 * a) - special.gammaln(60 * a + counts.sum(1))).sum()

    best = np.exp(optimize.minimize_scalar(cost, bounds=(-8, 4), method="bounded", options={"xatol": 1e-8}).x)
    assert word_concentration(counts, 0.1, steps=2000) == pytest.approx(best, rel=1e-4)
    assert best == pytest.approx(truth, rel=0.3)


def test_the_concentration_of_words_stays_within_bounds():
    even = np.full((2, 50), 100.0)
    assert word_concentration(even, 1.0, steps=5000) == 1e2
    single = np.zeros((2, 50))
    single[:, 0] = 1000
    assert word_concentration(single, 1.0, steps=5000) == 1e-4
