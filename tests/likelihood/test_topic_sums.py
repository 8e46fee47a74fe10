"""Shares of topics beside one document at a time, pairs of words beside sums over all of them, and starts."""

import itertools

import numpy as np
import pytest
import torch
from scipy import sparse, special
from scipy.optimize import linear_sum_assignment

from otpdag.datasets import bars
from otpdag.likelihood.topic_problem import WordPairs, repeats, start_topics, topic_pairs
from otpdag.likelihood.topic_shares import (
    AssignmentDraws,
    Cells,
    batches,
    cell_batches,
    even_shares,
    infer_assignments,
    infer_shares,
)


def test_with_topics_that_share_no_word_the_map_is_exact():
    # every word tells its topic, so that the posterior is Dirichlet(alpha + counts by topic)
    topics = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]], dtype=torch.float64)
    counts = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    alpha = torch.tensor([0.2, 0.7], dtype=torch.float64)
    shares = infer_shares(counts, topics, alpha, even_shares(counts, alpha), steps=50)
    assert shares.concentration.numpy() == pytest.approx(np.array([[4.2, 2.7], [0.2, 0.7]]))
    assert shares.expected_counts(counts, topics).numpy() == pytest.approx(np.array([[3, 1, 0, 0], [0, 0, 2, 0]]))


def test_the_divergence_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 5, (7, 6), generator=generator).double()
    topics = torch.softmax(torch.randn(3, 6, generator=generator, dtype=torch.float64), -1)
    alpha = torch.tensor([0.3, 0.1, 2.0], dtype=torch.float64)
    shares = infer_shares(counts, topics, alpha, even_shares(counts, alpha), steps=5)
    true = torch.distributions.kl_divergence(
        torch.distributions.Dirichlet(shares.concentration), torch.distributions.Dirichlet(alpha.expand(7, 3))
    )
    assert shares.kl(alpha).numpy() == pytest.approx(true.numpy())


def test_steps_never_lower_the_bound():
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 4, (20, 8), generator=generator).double()
    topics = torch.softmax(torch.randn(3, 8, generator=generator, dtype=torch.float64), -1)
    alpha = torch.full((3,), 0.4, dtype=torch.float64)
    bounds = []
    for steps in range(1, 8):
        shares = infer_shares(counts, topics, alpha, even_shares(counts, alpha), steps=steps)
        bounds.append(((counts * torch.log(shares.words)).sum(-1) - shares.kl(alpha)).numpy())
    assert (np.diff(np.array(bounds), axis=0) > -1e-9).all()


def test_cells_give_what_the_dense_matrix_gives():
    generator = torch.Generator().manual_seed(2)
    counts = torch.randint(0, 3, (9, 12), generator=generator).float()
    counts[4] = 0
    topics = torch.softmax(torch.randn(3, 12, generator=generator), -1)
    alpha = torch.tensor([0.3, 0.1, 2.0])
    cells = Cells.of(sparse.csr_array(counts.numpy()))
    dense, few = (infer_shares(c, topics, alpha, even_shares(c, alpha), steps=8) for c in (counts, cells))
    assert few.concentration.numpy() == pytest.approx(dense.concentration.numpy(), rel=1e-4)
    assert float(few.log_prob(cells)) == pytest.approx(float(dense.log_prob(counts)), rel=1e-5)
    same = dense.expected_counts(counts, topics).numpy()
    assert few.expected_counts(cells, topics).numpy() == pytest.approx(same, rel=1e-3)


def some_documents(seed=3, rows=7, words=6):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(0.8, (rows, words)).astype(float)
    counts[2] = 0.0
    return counts, rng.dirichlet(np.ones(words), 3), np.array([0.3, 0.1, 2.0])


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("by_cells", [False, True])
def test_steps_are_those_of_each_document(steps, by_cells):
    counts, topics, alpha = some_documents()
    given = Cells.of(sparse.csr_array(counts)) if by_cells else torch.as_tensor(counts)
    kind = torch.float32 if by_cells else torch.float64
    tensors = torch.as_tensor(topics).to(kind), torch.as_tensor(alpha).to(kind)
    found = infer_shares(given, *tensors, even_shares(given, tensors[1]), steps=steps)
    costs, explained = 0.0, np.zeros_like(topics)
    for row, own in enumerate(counts):
        g = alpha + own.sum() / 3
        for _ in range(steps):
            weights = np.exp(special.digamma(g) - special.digamma(g.sum()))
            g = alpha + weights * (topics @ (own / (weights @ topics)))
        weights = np.exp(special.digamma(g) - special.digamma(g.sum()))
        rel = 1e-3 if by_cells else 1e-9
        np.testing.assert_allclose(found.concentration[row], g, rtol=rel)
        np.testing.assert_allclose(found.weights[row], weights, rtol=rel)
        np.testing.assert_allclose(found.mean[row], g / g.sum(), rtol=rel)
        explained += topics * weights[:, None] * own / (weights @ topics)
        log_beta = special.gammaln(g).sum() - special.gammaln(g.sum())
        prior = special.gammaln(alpha).sum() - special.gammaln(alpha.sum())
        costs += prior - log_beta + (g - alpha) @ np.log(weights) - own @ np.log(weights @ topics)
    rel = 1e-3 if by_cells else 1e-9
    np.testing.assert_allclose(found.expected_counts(given, tensors[0]), explained, rtol=rel, atol=1e-9)
    assert found.cost(given, tensors[1]).item() == pytest.approx(costs, rel=rel)


def test_a_tolerance_is_asked_for_at_every_fourth_step():
    counts, topics, alpha = (torch.as_tensor(one) for one in some_documents())
    start = even_shares(counts, alpha)
    courses = [infer_shares(counts, topics, alpha, start, steps=steps).concentration for steps in range(13)]
    changes = [(after - before).abs().mean(-1).max().item() for before, after in itertools.pairwise(courses)]
    for asked, steps in ((changes[3] * 1.01, 4), (changes[3] * 0.99, 8), (changes[7] * 0.99, 12)):
        found = infer_shares(counts, topics, alpha, start, steps=12, tolerance=asked)
        torch.testing.assert_close(found.concentration, courses[steps], rtol=1e-12, atol=0)


def test_documents_come_some_at_a_time_and_by_cells_where_few_are_filled():
    counts, _, _ = some_documents(rows=10, words=8)
    parts = list(batches(sparse.csr_array(counts), 4))
    assert [len(part) for part in parts] == [4, 4, 2]
    np.testing.assert_array_equal(torch.cat(parts), counts)
    few = np.zeros((10, 50))
    few[np.arange(10), np.arange(10)] = 3.0
    few[1, 4] = 2.0
    first, last = batches(sparse.csr_array(few), 6)
    assert isinstance(first, Cells)
    assert (first.shape, last.shape) == ((6, 50), (4, 50))
    assert first.lengths.flatten().tolist() == few[:6].sum(1).tolist()
    for cells, rows in ((first, few[:6]), (last, few[6:])):
        again = np.zeros(cells.shape)
        np.add.at(again, (cells.rows.numpy(), cells.columns.numpy()), cells.values.numpy())
        np.testing.assert_array_equal(again, rows)
    for filled, by_cells in ((19, True), (20, False)):
        flat = np.zeros(400)
        flat[:filled] = 1.0
        assert isinstance(next(batches(sparse.csr_array(flat.reshape(20, 20)), 100)), Cells) is by_cells


# -- shares integrated out --------------------------------------------------------------------------------------------


def few_documents(seed=0):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(0.8, (6, 5))
    counts[2] = 0
    topics, alpha = rng.dirichlet(np.ones(5), 3), np.array([0.2, 0.5, 1.5])
    return counts, topics, alpha


def test_assignments_count_all_other_words_of_their_document():
    counts, topics, alpha = few_documents()
    cells = Cells.of(sparse.csr_array(counts))
    start = np.full((6, 3), 0.4)
    chances, given = infer_assignments(
        cells, torch.tensor(topics).float(), torch.tensor(alpha).float(), torch.tensor(start).float(), steps=3
    )
    for document in range(6):
        words = np.flatnonzero(counts[document])
        own = [topics[:, word] * (start[document] + alpha) for word in words]
        own = [one / one.sum() for one in own]
        told = start[document]
        for _ in range(3):
            told = sum((counts[document, word] * one for word, one in zip(words, own, strict=True)), np.zeros(3))
            own = [topics[:, word] * (told - one + alpha) for word, one in zip(words, own, strict=True)]
            own = [one / one.sum() for one in own]
        np.testing.assert_allclose(given[document], told, rtol=1e-4, atol=1e-6)
        here = (cells.rows == document).numpy()
        assert cells.columns[here].tolist() == words.tolist()
        np.testing.assert_allclose(chances[here], np.reshape(own, (-1, 3)), rtol=1e-4, atol=1e-6)


def test_the_topic_of_a_documents_only_word_is_told_exactly():
    """Nothing else is there to count: the posterior is topics times the prior's mean."""
    topics, alpha = np.array([[0.1, 0.9], [0.6, 0.4]]), np.array([0.3, 0.7])
    cells = Cells.of(sparse.csr_array(np.array([[1, 0], [0, 1]])))
    start = torch.full((2, 2), 0.5)
    chances, _ = infer_assignments(cells, torch.tensor(topics).float(), torch.tensor(alpha).float(), start, steps=200)
    exact = topics.T * alpha
    np.testing.assert_allclose(chances, exact / exact.sum(1, keepdims=True), rtol=1e-5)


def test_expected_words_are_nearer_to_exact_ones_than_those_of_sharper_shares():
    """Beside draws from the exact distribution, on documents of few words."""
    rng = np.random.default_rng(3)
    topics, alpha = rng.dirichlet(np.ones(8), 3), np.array([0.3, 0.3, 0.3])
    shares = rng.dirichlet(alpha, 40)
    counts = sparse.csr_array(np.array([rng.multinomial(12, one @ topics) for one in shares]))
    draws = AssignmentDraws(counts, 3, rng)
    exact = np.mean([draws.sweep(topics, alpha)[0] for _ in range(3000)][200:], axis=0)
    cells, told, of_alpha = Cells.of(counts), torch.tensor(topics).float(), torch.tensor(alpha).float()
    _, collapsed = infer_assignments(cells, told, of_alpha, even_shares(cells, torch.zeros(3)), steps=50)
    sharper = infer_shares(cells, told, of_alpha, even_shares(cells, of_alpha), steps=50).concentration - of_alpha
    errors = [float(np.abs(one.numpy() - exact).mean()) for one in (collapsed, sharper)]
    assert errors[0] < 0.7 * errors[1]


def test_batches_of_cells_hold_every_document_once():
    counts = sparse.csr_array(few_documents()[0])
    parts = list(cell_batches(counts, 4))
    assert [part.shape for part in parts] == [(4, 5), (2, 5)]
    assert sum(float(part.values.sum()) for part in parts) == counts.sum()


def test_a_fraction_of_a_word_leaves_itself_out_and_no_more():
    """A document of half a word has no others: the posterior is topics times the prior's mean, as for a whole one."""
    topics, alpha = torch.tensor([[0.1, 0.9], [0.6, 0.4]]), torch.tensor([0.3, 0.7])
    halves = Cells.of(sparse.csr_array(np.array([[0.5, 0.0], [0.5, 0.5]])))
    chances, given = infer_assignments(halves, topics, alpha, torch.full((2, 2), 0.25), steps=200)
    exact = topics[:, 0] * alpha
    np.testing.assert_allclose(chances[0], exact / exact.sum(), rtol=1e-5)
    other = 0.5 * chances[2]  # the second document's other half
    told = topics[:, 0] * (alpha + other)
    np.testing.assert_allclose(chances[1], told / told.sum(), rtol=1e-4)
    np.testing.assert_allclose(given.sum(-1), [0.5, 1.0], rtol=1e-5)


# -- pairs of words ---------------------------------------------------------------------------------------------------


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
