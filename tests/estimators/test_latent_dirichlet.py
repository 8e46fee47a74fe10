import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn import exceptions
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.utils.estimator_checks import parametrize_with_checks

import otpdag as otp
from experiments.metrics import patterns_recovered, topic_errors
from otpdag.data import Documents
from otpdag.datasets import bars
from otpdag.engine.document_data import topic_method
from otpdag.errors import ConvergenceWarning, DataError, ModelError, NotFittedError
from otpdag.estimators import LatentDirichletAllocation
from otpdag.schedules import Constant


@pytest.fixture(scope="module")
def documents():
    return bars(10, 600, 100, seed=101)


@pytest.fixture(scope="module")
def fitted(documents):
    return LatentDirichletAllocation(10, random_state=1).fit(documents.counts)


@pytest.fixture(scope="module")
def paired(documents):
    return LatentDirichletAllocation(10, method="pairs", random_state=1).fit(documents.counts)


def test_bars_are_recovered_from_a_single_fit(documents, fitted):
    assert patterns_recovered(documents.topics, fitted.components_) == 1.0
    assert topic_errors(documents.topics, fitted.components_)["hellinger"] < 0.03


def test_alpha_is_that_of_the_truth(fitted):
    assert fitted.alpha_.mean() == pytest.approx(0.1, rel=0.1)


@pytest.mark.slow
def test_an_uneven_alpha_is_found_topic_by_topic():
    alpha = np.array([0.05, 0.2] * 5)
    drawn = bars(10, 1500, 100, alpha=alpha, seed=102)
    lda = LatentDirichletAllocation(10, random_state=0).fit(drawn.counts)
    order = [int(np.argmax(lda.components_ @ topic)) for topic in drawn.topics]
    assert lda.alpha_[order] == pytest.approx(alpha, rel=0.25)


def test_topics_are_distributions_in_order_of_their_share(documents, fitted):
    assert fitted.components_.sum(1) == pytest.approx(np.ones(10))
    shares = fitted.transform(documents.counts)
    assert shares.sum(1) == pytest.approx(np.ones(600))
    assert (np.diff(shares.mean(0)) < 0.01).all()


def test_shares_are_near_the_true_ones(documents, fitted):
    order = [int(np.argmax(fitted.components_ @ topic)) for topic in documents.topics]
    errors = np.abs(fitted.transform(documents.counts)[:, order] - documents.theta)
    assert errors.mean() < 0.02


def test_the_score_is_near_the_likelihood_under_the_truth(documents, fitted):
    # the bound lies below the likelihood, which lies below that at the true shares
    words = documents.counts.toarray()
    best = (words * np.log(np.maximum(documents.theta @ documents.topics, 1e-300))).sum()
    assert best * 1.05 < fitted.score(documents.counts) < best
    assert fitted.perplexity(documents.counts) == pytest.approx(np.exp(-fitted.score(documents.counts) / words.sum()))


def test_it_is_a_model_with_a_hidden_node(documents, fitted):
    params = fitted.model_.params()
    assert params["words"]["topics"] == pytest.approx(fitted.components_)
    assert params["theta"]["concentration"].ravel() == pytest.approx(fitted.alpha_)
    drawn = fitted.model_.sample(50, seed=0)
    assert (drawn.filter(like="words").sum(axis=1) == 100).all()


def test_a_seed_determines_the_fit(documents, fitted):
    again = LatentDirichletAllocation(10, random_state=1).fit(documents.counts)
    assert np.array_equal(again.components_, fitted.components_)
    assert np.array_equal(again.alpha_, fitted.alpha_)


def test_batches_change_nothing_but_memory(documents, fitted):
    small = LatentDirichletAllocation(10, random_state=1, batch_size=97).fit(documents.counts)
    assert small.components_ == pytest.approx(fitted.components_, abs=1e-3)


def test_a_given_alpha_is_kept(documents):
    lda = LatentDirichletAllocation(10, alpha=0.3, random_state=0, n_init=1, max_iter=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        lda.fit(documents.counts)
    assert lda.alpha_ == pytest.approx(np.full(10, 0.3))


@pytest.mark.slow
def test_topics_that_share_all_words_are_found_and_the_result_says_how(fitted):
    """As near as complete data would tell, within a factor; what was drawn is said, and not of bars."""
    rng = np.random.default_rng(7)
    truth, shares = rng.dirichlet(np.ones(30), 4), rng.dirichlet(np.full(4, 0.2), 600)
    counts = sparse.csr_array(np.stack([rng.multinomial(80, one @ truth) for one in shares]))
    found = LatentDirichletAllocation(4, method="likelihood", random_state=0).fit(counts)
    assert topic_errors(truth, found.components_)["hellinger"] < 0.06
    assert found.alpha_ == pytest.approx(0.2, abs=0.06)
    assert any("centre of draws" in note for note in found.result_.notes)
    assert not any("centre of draws" in note for note in fitted.result_.notes)


def test_topics_may_have_distributions(documents):
    lda = LatentDirichletAllocation(10, topics="dirichlet", random_state=0).fit(documents.counts)
    concentrations = np.exp(lda.beta_)
    assert lda.components_ == pytest.approx(concentrations / concentrations.sum(1, keepdims=True), abs=1e-6)
    assert patterns_recovered(documents.topics, lda.components_) == 1.0


def test_partial_fit_learns_from_a_stream():
    drawn = bars(10, 3000, 100, seed=103)
    lda = LatentDirichletAllocation(10, random_state=0).fit(drawn.counts[:300])
    before = topic_errors(drawn.topics, lda.components_)["hellinger"]
    for start in range(300, 3000, 300):
        lda.partial_fit(drawn.counts[start : start + 300])
    assert topic_errors(drawn.topics, lda.components_)["hellinger"] < before
    assert patterns_recovered(drawn.topics, lda.components_) == 1.0
    assert lda.alpha_.mean() == pytest.approx(0.1, rel=0.25)


def test_the_pairs_of_words_are_matched(documents, paired):
    # the objective is the cross-entropy of pairs, least where the model's pairs are the data's
    counts = documents.counts.toarray().astype(float)
    pairs = counts.T @ counts - np.diag(counts.sum(0))
    pairs /= pairs.sum()
    entropy = -(pairs * np.log(pairs)).sum()
    assert entropy < paired.result_.loss < entropy + 2e-3
    shares = paired.transform(documents.counts)
    again = (shares @ paired.components_).T @ (shares @ paired.components_) / len(shares)
    assert np.abs(again - pairs).sum() < 0.15


def test_what_was_called_transport_is_called_pairs(documents, paired):
    with pytest.warns(DeprecationWarning, match="called 'pairs' now"):
        old = LatentDirichletAllocation(10, method="transport", random_state=1).fit(documents.counts)
    np.testing.assert_array_equal(old.components_, paired.components_)


def test_pairs_take_in_more_documents(documents):
    whole = LatentDirichletAllocation(10, method="pairs", random_state=0).fit(documents.counts)
    parts = LatentDirichletAllocation(10, method="pairs", random_state=0).fit(documents.counts[:300])
    parts.partial_fit(documents.counts[300:])
    assert parts.word_probability_ == pytest.approx(whole.word_probability_)
    assert parts._problem.pairs.total == whole._problem.pairs.total


def test_pairs_separate_texts_that_share_a_common_word():
    drawn = np.random.default_rng(0)
    themes = [["cat", "dog", "bird", "fish"], ["bond", "stock", "bank", "fund"], ["goal", "team", "match", "coach"]]
    texts = [[*drawn.choice(theme, 4), "say", "say"] for theme in themes for _ in range(60)]
    lda = LatentDirichletAllocation(3, method="pairs", random_state=0).fit(texts)
    assert {frozenset(words) for words in lda.top_words(4)} == {frozenset(theme) for theme in themes}


def test_the_default_reads_how_often_words_repeat(fitted):
    """Bars are what the model makes; texts whose words come once each are not, and have words in common."""
    assert fitted.result_.method.name == "likelihood"
    assert "repeat words 1.0" in fitted.result_.notes[0]
    drawn = np.random.default_rng(1)
    themes = np.arange(30).reshape(3, 10)
    counts = np.zeros((300, 36))
    for row in range(300):
        counts[row, drawn.choice(themes[row % 3], 4, replace=False)] = 1
        counts[row, 30 + drawn.choice(6, 4, replace=False)] = 1
    lda = LatentDirichletAllocation(3, random_state=0).fit(counts)
    assert lda.result_.method.name == "pairs"
    assert lda.background_share_ == pytest.approx(0.8)
    assert lda.background_.sum() == pytest.approx(1)
    assert lda.background_[30:].sum() > 0.5
    assert {frozenset(row) for row in np.argsort(-lda.components_, axis=1)[:, :10]} == {frozenset(t) for t in themes}
    whole = (1 - lda.background_share_) * lda.components_ + lda.background_share_ * lda.background_
    np.testing.assert_allclose(lda.model_.params()["words"]["topics"], whole, atol=1e-6)
    named = LatentDirichletAllocation(3, method="pairs", random_state=0).fit(counts)
    np.testing.assert_array_equal(named.components_, lda.components_)
    before = lda.components_
    lda.partial_fit(counts[:150])
    assert topic_errors(before, lda.components_)["hellinger"] < 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.errors.ConvergenceWarning")
def test_the_papers_encoders_of_counts_and_of_words_agree():
    """The cost of a document is linear in its counts, which say as much as its words one after another."""
    drawn = bars(4, 150, 20, seed=106)
    found = {}
    for reads in ("counts", "words"):
        model = LatentDirichletAllocation(4)._model(drawn.counts)
        method = topic_method("paper", documents=150, steps=60)
        adam = replace(method.optimiser, learning_rate=Constant(1e-2))
        method = replace(method, evaluation=replace(method.evaluation, reads=reads, hidden=16), optimiser=adam)
        otp.fit(model, Documents(drawn.counts), method=method, seed=0, restarts=3, progress=False)
        found[reads] = model.params()["words"]["topics"]
        assert patterns_recovered(drawn.topics, found[reads], mass=0.0) == 1.0
    assert topic_errors(found["counts"], found["words"])["hellinger"] < 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otpdag.errors.ConvergenceWarning")
@pytest.mark.parametrize("reads", ["counts", "words"])
def test_the_papers_way_finds_bars_whatever_its_encoder_reads(reads):
    """Its settings as printed, but for fewer epochs of fewer documents."""
    drawn, kept = bars(10, 400, 60, seed=104), []
    model = LatentDirichletAllocation(10)._model(drawn.counts)
    method = topic_method("paper", documents=400, steps=250 if reads == "counts" else 120)
    method = replace(method, evaluation=replace(method.evaluation, reads=reads))
    if reads == "words":  # which takes ten times as long
        method = replace(method, optimiser=replace(method.optimiser, learning_rate=Constant(4e-3)))
    starts = 12 if reads == "counts" else 4
    otp.fit(
        model,
        Documents(drawn.counts),
        method=method,
        seed=0,
        restarts=starts,
        progress=False,
        callbacks=[kept.append],
    )
    found = model.params()["words"]["topics"]
    assert patterns_recovered(drawn.topics, found, mass=0.0) >= 0.9
    assert {"reconstruction", "divergence"} <= set(kept[0])


@pytest.mark.parametrize("topics", ["fixed", "dirichlet"])
def test_the_papers_way_runs_in_both_forms(topics):
    drawn = bars(4, 60, 10, seed=105)
    lda = LatentDirichletAllocation(4, method="paper", topics=topics, max_iter=2, random_state=0).fit(drawn.counts)
    assert lda.components_.sum(1) == pytest.approx(np.ones(4))
    with pytest.raises(ModelError, match="no partial_fit"):
        lda.partial_fit(drawn.counts)


# --- documents of every kind --------------------------------------------------------------------------------------

TEXTS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "dogs chase cats",
    "the cat and the dog sleep",
    "stocks fell on monday",
    "the market and the stocks rose",
    "bond market news",
    "stocks and bonds",
]


def test_strings_and_word_lists_and_counts_agree():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        vectorizer = CountVectorizer()
        counts = vectorizer.fit_transform(TEXTS)
        words = [vectorizer.build_analyzer()(text) for text in TEXTS]
        fits = [LatentDirichletAllocation(2, random_state=0).fit(X) for X in (counts, TEXTS, words)]
    for lda in fits[1:]:
        assert lda.components_ == pytest.approx(fits[0].components_)
        assert lda.vocabulary_ == list(vectorizer.get_feature_names_out())
    assert fits[1].transform(["a cat"]).shape == (1, 2)
    assert fits[2].transform([["cat", "unheard"]]) == pytest.approx(fits[2].transform([["cat"]]))


def test_top_words_by_probability_and_by_relevance():
    counts = sparse.csr_array(np.array([[9, 8, 0, 0]] * 20 + [[9, 0, 0, 8]] * 20 + [[9, 0, 8, 0]] * 20))
    lda = LatentDirichletAllocation(2, method="likelihood", random_state=0, max_iter=300).fit(counts)
    names = ["common", "a", "b", "c"]
    by_probability = lda.top_words(1, relevance=1.0, vocabulary=names)
    assert any(words == ["common"] for words in by_probability)
    assert all(words != ["common"] for words in lda.top_words(1, relevance=0.0, vocabulary=names))
    assert lda.top_words(2)[0][0] in "0123"


def test_an_empty_document_has_the_shares_of_the_prior(documents):
    counts = sparse.csr_array(sparse.vstack([documents.counts, sparse.csr_array((3, 25), dtype=int)]))
    lda = LatentDirichletAllocation(10, random_state=1).fit(counts)
    assert lda.transform(counts)[-1] == pytest.approx(lda.alpha_ / lda.alpha_.sum(), abs=1e-6)
    assert lda.result_.rows_used == 600


def test_a_documents_shares_do_not_depend_on_the_others(documents, fitted):
    shares = fitted.transform(documents.counts)
    order = np.random.default_rng(0).permutation(600)
    assert fitted.transform(documents.counts[order])[:10] == pytest.approx(shares[order[:10]], abs=1e-4)


def test_fractions_weigh_words(documents, fitted):
    half = LatentDirichletAllocation(10, random_state=1).fit(documents.counts.astype(float) * 0.5)
    assert patterns_recovered(documents.topics, half.components_) == 1.0


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.array([[1, -1], [2, 3], [1, 1]]), "Negative values in data passed to X in LatentDirichletAllocation"),
        (np.ones((5, 1)), "vocabulary must have at least 2 words; got 1"),
        (np.ones((1, 6)), "at least as many documents with words as topics, 2; got 1"),
        (np.zeros((5, 6)), "at least as many documents with words as topics, 2; got 0"),
        ([[], []], "hold no words"),
        (["", "..."], "hold no words"),
    ],
)
def test_bad_documents_are_refused(X, message):
    with pytest.raises(DataError, match=message):
        LatentDirichletAllocation(2).fit(X)


def test_missing_counts_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        LatentDirichletAllocation(2).fit(np.array([[1.0, np.nan], [2.0, 3.0]]))


def test_documents_of_one_word_have_no_pairs():
    with pytest.raises(DataError, match="at least two words"):
        LatentDirichletAllocation(2, method="pairs").fit(np.eye(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 0}, "n_components must be a whole number of at least 1; got 0"),
        (
            {"method": "em"},
            "method must be one of 'auto', 'likelihood', 'pairs', 'paper', 'entropic', 'transport'; got 'em'",
        ),
        ({"topics": "free"}, "topics must be one of 'fixed', 'dirichlet'; got 'free'"),
        ({"method": "pairs", "topics": "dirichlet"}, "topics='dirichlet' needs"),
        ({"alpha": -1.0}, "alpha must be a positive number"),
        ({"alpha": [0.1, 0.2]}, "a positive number, or 10 of them"),
        ({"max_iter": 0}, "max_iter must be a whole number of at least 1"),
        ({"batch_size": 0.5}, "batch_size must be"),
    ],
)
def test_bad_options_are_refused(documents, options, message):
    with pytest.raises(ModelError, match=message):
        LatentDirichletAllocation(**{"n_components": 10, **options}).fit(documents.counts)


def test_bad_questions_are_refused(fitted):
    with pytest.raises(ModelError, match="n must be from 1 to the 25 words; got 26"):
        fitted.top_words(26)
    with pytest.raises(ModelError, match="relevance must be between 0 and 1; got 2"):
        fitted.top_words(5, relevance=2)
    with pytest.raises(ModelError, match="vocabulary must have 25 words"):
        fitted.top_words(5, vocabulary=["a"])
    with pytest.raises(DataError, match="matrix of counts, as in fit"):
        fitted.transform(["a text"])


def test_a_fit_that_is_cut_short_says_so(documents):
    with pytest.warns(ConvergenceWarning, match="raise max_iter"):
        LatentDirichletAllocation(10, max_iter=3, n_init=1).fit(documents.counts)


def test_a_callback_stops_the_fit(documents):
    lda = LatentDirichletAllocation(10, n_init=1, callbacks=[lambda record: True]).fit(documents.counts)
    assert "callback" in lda.result_.status.reason


@pytest.mark.filterwarnings("ignore::otpdag.errors.ConvergenceWarning")
@parametrize_with_checks([LatentDirichletAllocation(2, max_iter=20, n_init=1)])
def test_scikit_learn_contract(estimator, check):
    check(estimator)


def test_one_topic_is_how_often_words_occur(documents):
    lda = LatentDirichletAllocation(1).fit(documents.counts)
    total = np.asarray(documents.counts.sum(0), dtype=float).ravel()
    np.testing.assert_allclose(lda.components_[0], total / total.sum(), atol=1e-6)
    assert (lda.transform(documents.counts) == 1).all()


def test_set_output_and_an_error_that_is_scikit_learns_too(documents):
    lda = LatentDirichletAllocation(2, max_iter=5, n_init=1, random_state=None).set_output(transform="pandas")
    with pytest.raises(exceptions.NotFittedError, match="this LatentDirichletAllocation is not fitted yet"):
        lda.transform(documents.counts)
    with pytest.raises(NotFittedError):
        lda.transform(documents.counts)
    with pytest.warns(ConvergenceWarning):
        shares = lda.fit_transform(documents.counts)
    assert list(shares.columns) == ["latentdirichletallocation0", "latentdirichletallocation1"]


@pytest.mark.parametrize("form", [pd.Series, np.array, lambda texts: np.array(texts, dtype=object)])
def test_a_column_or_array_of_texts_is_read_as_a_list_of_them(form):
    texts = ["cats purr", "dogs bark", "cats sleep", "dogs run", "cats purr loudly", "dogs bark"]
    listed, column = (LatentDirichletAllocation(2, n_init=1, random_state=0) for _ in range(2))
    np.testing.assert_array_equal(listed.fit_transform(texts), column.fit_transform(form(texts)))
    assert column.vocabulary_ == listed.vocabulary_
    words = pd.Series([text.split() for text in texts])
    assert LatentDirichletAllocation(2, n_init=1).fit(words).vocabulary_ == listed.vocabulary_


def test_a_column_with_a_missing_text_is_refused():
    with pytest.raises(DataError, match="documents must be texts, all of them; document 1 is nan"):
        LatentDirichletAllocation(2).fit(pd.Series(["cats purr", np.nan, "dogs bark"]))
