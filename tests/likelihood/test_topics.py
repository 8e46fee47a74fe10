"""Objectives of documents, beside exact likelihoods where topics share no word, and sums over all pairs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import sparse, special

import otpdag as otp
from experiments.metrics import topic_errors
from otpdag import mechanisms as m
from otpdag.datasets import bars
from otpdag.engine import EM, Layout
from otpdag.engine.document_data import topic_method
from otpdag.engine.optimiser import Run
from otpdag.likelihood.topic_problem import (
    PairProblem,
    TopicProblem,
    Topics,
    TopicSweeps,
    WordPairs,
    pair_concentration,
)
from otpdag.likelihood.topic_shares import newton_concentration


def topic_model(topics, words):
    graph = otp.Graph([("shares", "words")], hidden=["shares"])
    return otp.Model(graph, {"shares": m.Dirichlet(topics), "words": m.Multinomial(words)})


def test_the_loss_falls_and_every_start_is_reported():
    drawn = bars(6, 300, 50, seed=101)
    method = topic_method("likelihood", documents=300, steps=60)
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
    outcome = EM(steps=500, tolerance=0.0).run(Run(problem, point, 500), lambda progress: False)
    assert float(outcome.loss[0]) == pytest.approx(-(exact * np.log(exact)).sum(), abs=1e-5)


# -- whole documents --------------------------------------------------------------------------------------------------

DISJOINT = np.array([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]])
COUNTS = np.array([[3.0, 1.0, 2.0, 0.0], [0.0, 2.0, 0.0, 5.0], [1.0, 0.0, 0.0, 1.0]])
ALPHA = np.array([0.2, 0.7])


def topic_problem(sweeps, documents=COUNTS, **kwargs):
    structure = topic_model(2, documents.shape[1]).structure
    return TopicProblem(structure, sparse.csr_array(documents), Layout.of(structure).shapes, sweeps, 0, **kwargs)


def log_beta(a):
    return special.gammaln(a).sum(-1) - special.gammaln(a.sum(-1))


@pytest.mark.parametrize("batch", [2048, 2])
def test_where_topics_share_no_word_the_loss_is_the_likelihood_and_updates_are_counts(batch):
    problem = topic_problem(TopicSweeps(batch=batch, share_steps=60))
    before = Topics(torch.log(torch.as_tensor(DISJOINT) + 1e-30), torch.as_tensor(ALPHA).float())
    after, terms = problem.swept(before)
    by_topic = np.stack([COUNTS[:, :2].sum(1), COUNTS[:, 2:].sum(1)], 1)
    known = DISJOINT.sum(0)  # the only topic that has a word
    likelihood = log_beta(ALPHA + by_topic) - log_beta(ALPHA) + COUNTS @ np.log(known)
    assert terms.total.item() == pytest.approx(-likelihood.mean(), rel=1e-5)
    posterior = ALPHA + by_topic
    logs = special.digamma(posterior) - special.digamma(posterior.sum(1, keepdims=True))
    cost = -((by_topic * logs).sum() + (COUNTS @ np.log(known)).sum()) / 3
    assert terms.reconstruction.item() == pytest.approx(cost, rel=1e-5)
    np.testing.assert_allclose(torch.exp(after.log_counts[0, :2]), COUNTS[:, :2].sum(0), rtol=1e-5)
    np.testing.assert_allclose(torch.exp(after.log_counts[1, 2:]), COUNTS[:, 2:].sum(0), rtol=1e-5)
    expected = newton_concentration(torch.as_tensor(ALPHA), torch.as_tensor(logs.mean(0)))
    np.testing.assert_allclose(after.alpha, expected, rtol=1e-4)
    held, _ = replace(problem, holds_alpha=True).swept(before)
    torch.testing.assert_close(held.alpha, before.alpha)


def test_a_prior_of_topics_adds_its_divergence_and_its_counts():
    counts = np.array([[2.0, 3.0, 0.4], [1.0, 0.5, 4.0]])
    topics = Topics(torch.log(torch.as_tensor(counts)), torch.tensor([0.5, 0.5]))
    prior = 0.3
    moved = (counts - prior) * (special.digamma(counts) - special.digamma(counts.sum(1, keepdims=True)))
    expected = (log_beta(np.full((2, 3), prior)) - log_beta(counts) + moved.sum(1)).sum()
    assert topics.prior_cost(prior) == pytest.approx(expected, rel=1e-9)
    assert topics.prior_cost(None) == 0.0
    logs = special.digamma(counts) - special.digamma(counts.sum(1, keepdims=True))
    np.testing.assert_allclose(topics.potentials(prior), np.exp(logs), rtol=1e-5)
    np.testing.assert_allclose(topics.potentials(None), counts / counts.sum(1, keepdims=True), rtol=1e-5)
    documents = np.array([[4.0, 1.0, 0.0], [0.0, 2.0, 6.0]])
    plain, with_prior = (topic_problem(TopicSweeps(prior=p), documents).swept(topics) for p in (None, prior))
    assert torch.exp(plain[0].log_counts).sum().item() == pytest.approx(13.0, rel=1e-5)
    assert torch.exp(with_prior[0].log_counts).sum().item() == pytest.approx(13.0 + 6 * prior, rel=1e-5)
    # the entropic term has the topics' share of a document
    shares = with_prior[1].entropic.item() - expected / 2
    assert 0 < shares < 3


def test_a_topic_that_no_word_came_from_stays_where_it_was_at_a_low_level():
    problem = topic_problem(TopicSweeps(), np.array([[4.0, 1.0, 0.0, 0.0]]))
    before = Topics(torch.log(torch.as_tensor(DISJOINT).clamp(min=1e-300)), torch.tensor([0.5, 0.5]))
    after, _ = problem.swept(before)
    np.testing.assert_allclose(after.probabilities[1].numpy(), DISJOINT[1], atol=1e-12)
    assert torch.exp(after.log_counts[1]).sum().item() == pytest.approx(1e-6)


def test_starts_are_compared_on_some_documents_with_concentrations_held():
    rng = np.random.default_rng(0)
    many = topic_problem(TopicSweeps(), rng.poisson(1.0, (1005, 3)).astype(float))
    part = many.subset(1)
    assert (part.rows, part.holds_alpha) == (1000, True)
    few = topic_problem(TopicSweeps(), COUNTS)
    assert few.subset(1).rows == 3


def test_many_topics_are_compared_on_forty_documents_each():
    structure = topic_model(26, 3).structure
    documents = sparse.csr_array(np.random.default_rng(0).poisson(1.0, (1045, 3)).astype(float))
    problem = TopicProblem(structure, documents, Layout.of(structure).shapes, TopicSweeps(), 0)
    part = problem.subset(1).documents.toarray()
    assert part.shape == (1040, 3)
    # some of the documents, in their order
    rows, at = documents.toarray(), 0
    for row in part:
        while not np.array_equal(rows[at], row):
            at += 1
        at += 1


def test_concentrations_at_given_topics_are_swept_on_a_part_and_then_drawn_exactly():
    rng = np.random.default_rng(1)
    problem = topic_problem(TopicSweeps(), rng.poisson(1.5, (40, 4)).astype(float))
    topics = Topics(torch.log(torch.as_tensor(rng.dirichlet(np.ones(4), 2))), torch.tensor([3.0, 4.0]))
    alpha = torch.full((2,), 0.5)
    for _ in range(10):
        alpha = problem.swept(Topics(topics.log_counts, alpha))[0].alpha
    expected = problem.with_exact_alpha(Topics(topics.log_counts, alpha))
    found = problem.at_topics(topics)
    torch.testing.assert_close(found.alpha, expected.alpha, rtol=1e-6, atol=0)
    assert torch.equal(found.log_counts, topics.log_counts)


# -- pairs with a background ------------------------------------------------------------------------------------------


def pair_problem(background, documents=None):
    rng = np.random.default_rng(3)
    documents = sparse.csr_array(rng.poisson(1.0, (40, 5)).astype(float)) if documents is None else documents
    structure = topic_model(2, 5).structure
    sweeps = TopicSweeps(pairs=True, background=background)
    pairs = WordPairs.of(documents)
    return PairProblem(structure, documents, Layout.of(structure).shapes, sweeps, 0, pairs)


def test_pairs_with_a_background_are_updated_as_by_em():
    problem, share = pair_problem(0.3), 0.3
    seen = problem.pairs.counts.toarray() / problem.pairs.total
    rng = np.random.default_rng(5)
    topics, alpha = rng.dirichlet(np.ones(5), 2), np.array([0.4, 0.9])
    counts = 0.5 * topics * np.array([[0.6], [0.4]])  # topics gave half of all words
    left = np.clip(seen.sum(0) - counts.sum(0), 0, None)
    common = share * left / left.sum()
    whole = (1 - share) * topics + common
    among = (np.outer(alpha, alpha) + np.diag(alpha)) / (alpha.sum() * (alpha.sum() + 1))
    joint = np.einsum("kl,kv,lw->klvw", among, whole, whole)
    given = joint / joint.sum((0, 1))
    point = problem.point(Topics(torch.log(torch.as_tensor(counts)), torch.as_tensor(alpha)))
    after, terms = problem.update(point)
    assert terms.direct.item() == pytest.approx(-(seen * np.log(joint.sum((0, 1)))).sum(), rel=1e-5)
    assert terms.total.item() == pytest.approx(terms.direct.item())
    moved = problem.topics(after)
    expected = np.einsum("klvw,vw->kv", given, seen) * (1 - share) * topics / whole
    np.testing.assert_allclose(torch.exp(moved.log_counts), expected, rtol=1e-3)
    met = np.einsum("klvw,vw->kl", given, seen)
    np.testing.assert_allclose(moved.alpha, pair_concentration(torch.as_tensor(met)), rtol=1e-3)


def test_a_concluded_fit_holds_whole_topics_and_knows_their_own_words():
    problem = pair_problem(0.3)
    rng = np.random.default_rng(5)
    topics = rng.dirichlet(np.ones(5), 2)
    held = Topics(torch.log(torch.as_tensor(0.7 * topics * [[0.6], [0.4]])), torch.tensor([0.4, 0.9]))
    left = np.clip(problem.pairs.words.numpy() - 0.7 * ([0.6, 0.4] @ topics), 0, None)
    ended, whole = problem.concluded(held)
    np.testing.assert_allclose(ended.common, 0.3 * left / left.sum(), rtol=1e-5)
    np.testing.assert_allclose(whole.probabilities, 0.7 * topics + 0.3 * left / left.sum(), rtol=1e-5)
    levels = torch.exp(whole.log_counts).sum(-1)
    np.testing.assert_allclose(levels, [0.42, 0.28], rtol=1e-5)
    assert ended.sweeps.background == 0.0
    own = ended.own(whole)
    np.testing.assert_allclose(own.probabilities, topics, rtol=1e-4)
    np.testing.assert_allclose(torch.exp(own.log_counts).sum(-1), [0.7 * 0.6, 0.7 * 0.4], rtol=1e-4)
    more = ended.resumed(problem.documents, 4)
    assert (more.common, more.seed) == (None, 4)
    assert more.sweeps.background == pytest.approx(0.3)
    assert more.pairs.total == 2 * problem.pairs.total
    # without any background nothing is taken apart
    plain = pair_problem(0.0)
    same, kept = plain.concluded(held)
    assert same is plain
    torch.testing.assert_close(kept.log_counts, held.log_counts)
    assert plain.own(held) is held
    assert plain.resumed(plain.documents, 0).sweeps.background == 0.0


def test_where_topics_leave_nothing_the_background_is_all_words():
    problem = pair_problem(0.3)
    much = Topics(torch.zeros(2, 5).double(), torch.tensor([0.4, 0.9]))
    np.testing.assert_allclose(problem._background(much), 0.3 * problem.pairs.words, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"background": 0.2}, "background must be a share below one, of pairs of words; got 0.2"),
        ({"background": 1.0, "pairs": True}, "background must be a share below one"),
        ({"background": -0.1, "pairs": True}, "background must be a share below one"),
        ({"prior": 0.1, "pairs": True}, "leave prior out"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, message):
    with pytest.raises(otp.ModelError, match=message):
        TopicSweeps(**options)


@pytest.mark.slow
def test_sweeps_with_shares_integrated_out_leave_hardly_any_stray_words():
    """Of bars: the distance to the true topics falls in each data set, concentrations stay as near."""
    errors = []
    for seed in range(4):
        drawn = bars(10, 1000, 100, seed=seed)
        structure = topic_model(10, 25).structure
        problem = TopicProblem(structure, drawn.counts, Layout.of(structure).shapes, TopicSweeps(), 0)
        topics = Topics(torch.log(torch.tensor(drawn.topics).clamp(min=1e-3)), torch.full((10,), 0.1))
        for _ in range(40):
            topics, _ = problem.swept(topics)
        after, (end, ended) = problem.collapsed(topics), problem.concluded(topics)
        assert end is problem  # bars are given back: nothing is drawn
        distances = (
            topic_errors(drawn.topics, one.probabilities.numpy())["hellinger"] for one in (topics, after, ended)
        )
        errors.append(tuple(distances))
        assert torch.equal(after.alpha, topics.alpha)
        assert float(ended.alpha.mean()) == pytest.approx(0.1, rel=0.1)
    before, once, at_end = np.array(errors).T
    assert (once < before).all()
    assert (at_end < before).all()
    assert at_end.mean() < 0.75 * before.mean()


def overlapping(seed, documents=600):
    """Documents about topics that have every word, and the problem of finding them."""
    rng = np.random.default_rng(seed)
    truth, shares = rng.dirichlet(np.ones(30), 4), rng.dirichlet(np.full(4, 0.2), documents)
    counts = sparse.csr_array(np.stack([rng.multinomial(80, one @ truth) for one in shares]).astype(float))
    structure = topic_model(4, 30).structure
    problem = TopicProblem(structure, counts, Layout.of(structure).shapes, TopicSweeps(), 0)
    return truth, problem, Topics(torch.log(torch.tensor(truth)), torch.full((4,), 0.2))


@pytest.mark.slow
def test_topics_that_sweeps_do_not_give_back_are_drawn():
    """Sweeps leave the truth; draws from where these end come back to it, concentrations too."""
    truth, problem, topics = overlapping(0)
    assert not problem.gives_back(topics)
    swept = problem.collapsed(topics)
    ended, drawn = problem.concluded(topics)
    left, kept = (topic_errors(truth, one.probabilities.numpy())["hellinger"] for one in (swept, drawn))
    assert kept < 0.6 * left
    assert float(drawn.alpha.mean()) == pytest.approx(0.2, abs=0.04)
    assert ended.drawn_prior == pytest.approx(1.0, rel=0.3)
    assert float(torch.exp(drawn.log_counts).sum()) == pytest.approx(problem.documents.sum())


def test_of_many_documents_some_are_drawn_before_all(monkeypatch):
    rows, windows = [], []

    def drawn(documents, start, *, generator, learns_alpha, is_over, sweeps=25, most=5):
        assert learns_alpha
        rows.append(documents.shape[0])
        windows.append((sweeps, most))
        return replace(start, prior=0.5 * len(rows))

    monkeypatch.setattr("otpdag.likelihood.topic_problem.drawn_topics", drawn)
    _, problem, topics = overlapping(0, documents=1001)
    assert problem.drawn(topics)[0].drawn_prior == 1.0
    _, few, topics = overlapping(0, documents=1000)
    assert few.drawn(topics)[0].drawn_prior == 1.5
    assert rows == [1000, 1001, 1000]
    assert windows == [(25, 5), (10, 4), (25, 5)]


def test_fractions_of_words_and_a_single_topic_cannot_be_drawn():
    _, problem, _ = overlapping(0, documents=20)
    assert problem.can_be_drawn
    assert not replace(problem, documents=problem.documents / 2).can_be_drawn
    structure = topic_model(1, 30).structure
    alone = TopicProblem(structure, problem.documents, Layout.of(structure).shapes, TopicSweeps(), 0)
    assert not alone.can_be_drawn


def test_topics_with_a_distribution_are_concluded_as_they_are():
    drawn = bars(4, 60, 40, seed=0)
    structure = topic_model(4, drawn.topics.shape[1]).structure
    problem = TopicProblem(structure, drawn.counts, Layout.of(structure).shapes, TopicSweeps(prior=0.5), 0)
    topics = Topics(torch.log(torch.tensor(drawn.topics).clamp(min=1e-3)), torch.full((4,), 0.25))
    assert torch.equal(problem.concluded(topics)[1].log_counts, topics.log_counts)


@pytest.mark.parametrize("looks", [0, 3])
def test_sweeps_at_the_end_stop_when_somebody_wants_the_end(looks):
    drawn = bars(4, 60, 40, seed=0)
    structure = topic_model(4, drawn.topics.shape[1]).structure
    problem = TopicProblem(structure, drawn.counts, Layout.of(structure).shapes, TopicSweeps(), 0)
    topics = Topics(torch.log(torch.tensor(drawn.topics).clamp(min=1e-3)), torch.full((4,), 0.25))
    asked = []

    def is_over():
        asked.append(len(asked))
        return len(asked) > looks

    ended = problem.concluded(topics, is_over)[1]
    assert looks + 1 <= len(asked) <= looks + 2  # the round may ask once more, after the sweep that was not begun
    assert torch.equal(ended.log_counts, topics.log_counts) is (looks == 0)
