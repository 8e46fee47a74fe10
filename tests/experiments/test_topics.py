"""The tables and figures of topic models run on little data, and say what was measured."""

import time

import numpy as np
import pandas as pd
import pytest

from baselines.base import Estimate
from experiments import bars, figure_convergence, figure_topics, table1, table2, topic_models
from experiments.corpora import Corpus
from experiments.metrics import top_words
from experiments.registry import Run, Scale, registered
from otpdag.errors import DataError, ModelError
from otpdag.estimators import LatentDirichletAllocation

SMALL = bars.Setting(4, 60, 20)


def truth_finder(counts, *, topics, seed, **_):
    """Stand in for a method: the true topics in another order, and the true alpha."""
    order = np.random.default_rng(seed).permutation(topics)
    true = SMALL.draw(0).topics[order]
    history = {"topics": np.stack([np.full_like(true, 1 / true.shape[1]), true]), "seconds": np.array([0.5, 1.5])}
    return Estimate({"topics": true, "alpha": np.full(topics, 1 / topics)}, np.zeros(1), history, seconds=2.0)


def flat(counts, *, topics, seed, **_):
    """Stand in for a method that learns nothing."""
    words = counts.shape[1]
    even = np.full((topics, words), 1 / words)
    history = {"topics": even[None], "seconds": np.array([1.0])}
    return Estimate({"topics": even, "alpha": np.ones(topics)}, np.zeros(1), history, seconds=1.0)


@pytest.fixture
def two_methods(monkeypatch):
    def chosen(quick=False):
        return {"ours": truth_finder, "em": flat}

    for module in (bars, table2, figure_convergence):
        monkeypatch.setattr(module, "methods", chosen)
    monkeypatch.setattr(bars, "QUICK", (SMALL,))


def test_the_settings_are_the_paper_s():
    assert [(s.topics, s.documents, s.words) for s in bars.SETTINGS] == [
        (10, 1000, 100),
        (20, 5000, 200),
        (30, 10000, 300),
    ]
    np.testing.assert_allclose(bars.SETTINGS[0].draw(0).alpha, 0.1)
    assert {"table1", "table2", "figure-topics", "figure-convergence"} <= set(registered())


def test_measures_of_a_perfect_estimate(two_methods):
    drawn = SMALL.draw(0)
    found = bars.measure(drawn, truth_finder(drawn.counts, topics=4, seed=3))
    assert found["hellinger"] == pytest.approx(0.0, abs=1e-9)
    assert found["wasserstein"] == pytest.approx(0.0, abs=1e-9)
    assert (found["patterns"], found["alpha_error"], found["seconds"]) == (1.0, 0.0, 2.0)
    # the paper's protocol does not line topics up, and cannot tell the truth from a flat estimate
    assert found["published_kl"] == pytest.approx(np.log(2), abs=0.15)


def test_table_1_is_written_and_can_be_resumed(two_methods, tmp_path, monkeypatch):
    table1.table1(Run(tmp_path, seed=0, scale=Scale.QUICK))
    rows = pd.read_csv(tmp_path / "table1.csv")
    assert set(zip(rows["method"], rows["start"], strict=True)) == {("ours", 0), ("ours", 1), ("em", 0), ("em", 1)}
    text = (tmp_path / "table1.md").read_text()
    assert "| otpdag | 2 of 2 | 0.0000 ± 0.0000 |" in text
    assert topic_models.HASTE in text
    assert (tmp_path / "table1.png").stat().st_size > 5000
    assert "as the paper prints it" not in table1.page(tmp_path).text  # a quick run has no setting of the paper's
    assert table1.page(tmp_path).text.startswith("# Table 1")
    monkeypatch.setattr(bars, "methods", lambda quick: {"ours": None, "em": None})  # would fail if called
    table1.table1(Run(tmp_path, seed=0, scale=Scale.QUICK, resume=True))
    assert (tmp_path / "table1.md").read_text() == text


def test_a_part_of_table_1_is_reported_as_such(two_methods, tmp_path):
    table1.table1(Run(tmp_path, seed=0, scale=Scale.QUICK, only="K4-em-*"))
    table1.table1(Run(tmp_path, seed=0, scale=Scale.QUICK, resume=True, only="K4-ours-1"))
    text = (tmp_path / "table1.md").read_text()
    assert "| otpdag | 1 of 2 | 0.0000 ± 0.0000 |" in text
    assert "| batch EM (scikit-learn) | 2 of 2 |" in text
    with pytest.raises(ModelError, match="'K9-\\*' names no part"):
        table1.table1(Run(tmp_path / "empty", seed=0, scale=Scale.QUICK, only="K9-*"))


def test_what_a_baseline_had_halfway_is_measured(two_methods):
    drawn = SMALL.draw(0)
    found = bars.measure(drawn, truth_finder(drawn.counts, topics=4, seed=3))
    assert found["hellinger_halfway"] > 0.5  # the even topics of its course, not the true ones at its end
    ended = Estimate({"topics": drawn.topics, "alpha": drawn.alpha}, np.zeros(1), seconds=1.0)
    assert np.isnan(bars.measure(drawn, ended)["hellinger_halfway"])


def test_the_paper_s_figures_are_labelled_as_its_own():
    rows = pd.DataFrame(
        [
            {"topics": 10, "method": "em", "start": 0, **dict.fromkeys(table1.MEASURES, 0.5)}
            | {f"published_{name}": 0.1 for name in ("kl", "hellinger", "wasserstein")}
        ]
    )
    text = table1.report(rows, bars.SETTINGS[:1])
    assert "| *Batch EM, as the paper prints it* | 2.807 ± 0.189 | 1.634 ± 0.022 | 0.058 ± 0.000 |" in text
    assert "| batch EM (scikit-learn) (this run) | 0.100 ± 0.000 |" in text


def test_topics_are_drawn_in_the_order_of_the_truth(two_methods, tmp_path):
    figure_topics.figure_topics(Run(tmp_path, seed=0, scale=Scale.QUICK))
    rows = pd.read_csv(tmp_path / "figure_topics_4.csv")
    truth, ours = (rows[rows["method"] == name].filter(like="word_").to_numpy() for name in ("truth", "ours"))
    np.testing.assert_allclose(ours, truth)
    assert rows.groupby("method")["recovered"].sum().to_dict() == {"truth": 4, "ours": 4, "em": 0}
    assert (tmp_path / "figure_topics_4.png").stat().st_size > 5000
    assert "| otpdag | 4 of 4 |" in (tmp_path / "figure_topics.md").read_text()


def test_convergence_is_followed(two_methods, tmp_path, monkeypatch):
    monkeypatch.setattr(topic_models, "ours", truth_finder)
    figure_convergence.figure_convergence(Run(tmp_path, seed=0, scale=Scale.QUICK))
    rows = pd.read_csv(tmp_path / "figure_convergence.csv")
    ours = rows[rows["method"] == "ours"]
    assert {100, 200, 300} <= set(ours["iteration"])
    np.testing.assert_allclose(ours["bars"], 1.0)
    assert rows.loc[rows["method"] == "em", "bars"].tolist() == [0.0]
    assert (tmp_path / "figure_convergence.png").stat().st_size > 5000
    assert SMALL.title in figure_convergence.page(tmp_path).text
    assert (tmp_path / "figure_convergence_patterns.png").stat().st_size > 2000


@pytest.fixture
def texts(monkeypatch):
    """Three corpora of a few documents about two subjects."""
    subjects = [tuple("abcdefghij"), tuple("klmnopqrst")]
    rng = np.random.default_rng(101)
    documents = tuple(tuple(rng.choice(subjects[at % 2], size=12)) for at in range(60))
    words = tuple("abcdefghijklmnopqrst")

    def corpus(name):
        return Corpus(name, documents, words, (), (), "made up", rebuilt=name == "20NewsGroup")

    monkeypatch.setattr(table2, "corpus", corpus)
    monkeypatch.setattr(table2, "shortened", lambda text, _: text)
    return corpus


@pytest.mark.slow
def test_table_2_is_written_and_can_be_resumed(texts, tmp_path, monkeypatch):
    def two_subjects(counts, *, topics, seed):
        found = np.full((topics, 20), 1e-3)
        found[::2, :10] += 0.1
        found[1::2, 10:] += 0.1
        return Estimate({"topics": found / found.sum(1, keepdims=True)}, np.zeros(1), seconds=1.0)

    monkeypatch.setattr(table2, "methods", lambda quick: {"ours": two_subjects, "em": flat})
    monkeypatch.setattr(table2, "WITH_PAPER_MODE", ())
    table2.table2(Run(tmp_path, seed=0))
    rows = pd.read_csv(tmp_path / "table2.csv")
    assert len(rows) == 3 * 2 * table2.STARTS
    assert set(rows["diversity"]) == {20.0, 10.0}  # two and one distinct lists of ten
    assert rows.loc[rows["method"] == "ours", "coherence"].min() > 0
    text = (tmp_path / "table2.md").read_text()
    assert "A reconstruction of the corpus" in text
    assert topic_models.HASTE not in text
    assert "| *OTP-DAG, as the paper prints it* | | 10.45 ± 0.56 | 92.00 ± 2.65 | | | |" in text
    assert "1. a, b, c, d, e, f, g, h, i, j" in text
    assert text.count("Words ranked by relevance:") == 3
    assert (tmp_path / "table2.png").stat().st_size > 5000
    page = table2.page(tmp_path)
    assert page.text.startswith(text)
    assert len(page.pictures) == 1
    monkeypatch.setattr(table2, "methods", lambda quick: {"ours": None, "em": None})  # would fail if called
    table2.table2(Run(tmp_path, seed=0, resume=True))
    assert (tmp_path / "table2.md").read_text() == text


def test_a_corpus_that_is_missing_is_left_out_and_said_to_be(texts, monkeypatch):
    def only_dblp(name):
        if name != "DBLP":
            raise DataError(f"{name} was not found; put it somewhere")
        return texts(name)

    monkeypatch.setattr(table2, "corpus", only_dblp)
    found, missing = table2.available(["BBC_News", "DBLP"])
    assert list(found) == ["DBLP"]
    assert missing == ["BBC_News was not found; put it somewhere"]
    with pytest.raises(DataError, match="BBC_News was not found; put it somewhere"):
        table2.available(["BBC_News"])


def test_relevance_is_the_estimator_s(texts):
    """The ranking that all methods get is that of otpdag's own `top_words`."""
    text = texts("DBLP")
    model = LatentDirichletAllocation(2, random_state=101).fit(text.counts)
    ranked = top_words(table2.relevance(model.components_, text), text.vocabulary, 10)
    assert ranked == model.top_words(10, vocabulary=text.vocabulary)


def test_a_shortened_corpus_has_the_words_that_it_uses():
    text = Corpus("Pets", (("cat", "dog"), ("fish",)), ("cat", "dog", "fish"), (), (), "made up")
    short = table2.shortened(text, 1)
    assert (short.documents, short.vocabulary) == ((("cat", "dog"),), ("cat", "dog"))
    assert short.title == "Pets (first 1)"


def test_ours_is_the_estimator_as_it_comes():
    drawn = SMALL.draw(1)
    began = time.process_time()
    found = topic_models.ours(drawn.counts, topics=4, seed=1)
    took = time.process_time() - began
    assert found.params["topics"].shape == (4, 4)
    np.testing.assert_allclose(found.params["topics"].sum(axis=1), 1.0)
    assert found.params["alpha"].shape == (4,)
    assert 0 < found.seconds <= took
