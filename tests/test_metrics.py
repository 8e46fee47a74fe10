"""Coherence beside gensim's, and counted by hand; diversity."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from otpdag.metrics import npmi_coherence, topic_diversity


def corpus(rng, documents, longest, words=12):
    """Documents of all lengths from one word on, with many repeats."""
    return [[f"w{word}" for word in rng.integers(words, size=rng.integers(1, longest + 1))] for _ in range(documents)]


def gensim_coherence(topics, documents, topk=10, window=None):
    models = pytest.importorskip("gensim.models")
    from gensim.corpora.dictionary import Dictionary

    model = models.CoherenceModel(
        topics=topics,
        texts=documents,
        dictionary=Dictionary(documents),
        coherence="c_npmi",
        processes=1,
        topn=topk,
        window_size=window,
    )
    return np.array(model.get_coherence_per_topic())


def slid_by_hand(topics, documents, window):
    """NPMI with windows as sets, one by one."""
    windows = [set(d[at : at + window]) for d in documents for at in range(max(len(d) - window + 1, 1))]
    total = []
    for words in topics:
        values = []
        for v, w in itertools.combinations(words, 2):
            p, q = (sum(word in held for held in windows) / len(windows) for word in (v, w))
            both = sum(v in held and w in held for held in windows) / len(windows) + 1e-12
            values.append(np.log(both / (p * q)) / -np.log(both))
        total.append(np.mean(values))
    return np.array(total)


def test_four_documents_by_hand():
    # windows: {a,b}, {a,b,c}, {a}, {c}: P(a)=3/4, P(b)=1/2, P(c)=1/2, P(ab)=1/2, P(ac)=1/4, P(bc)=1/4
    documents = [["a", "b"], ["b", "c", "a"], ["a"], ["c"]]
    ab = np.log(0.5 / (0.75 * 0.5)) / -np.log(0.5)  # 0.415037
    ac = np.log(0.25 / (0.75 * 0.5)) / -np.log(0.25)  # -0.292481
    bc = 0.0
    found = npmi_coherence([["a", "b", "c"], ["b", "a", "c"]], documents, topk=3)
    np.testing.assert_allclose(found, (ab + ac + bc) / 3, atol=1e-9)
    assert found[0] == pytest.approx(0.0408521, abs=1e-7)


def test_gensim_forgets_a_word_whose_first_occurrence_has_left_the_window():
    """A stored value of gensim 4.4 for a word that is repeated in a window, so that it is held where gensim is not."""
    documents = [["a", "b", "a", "c", "d", "c", "a"], ["b", "c", "b"], ["d"]]
    # windows of three: aba, (b)ac without a, acd, cdc, (d)ca without c; bcb; d
    windows = [{"a", "b"}, {"b", "c"}, {"c", "d"}, {"c", "d"}, {"d", "a"}, {"b", "c"}, {"d"}]
    expected = []
    for v, w in (("a", "b"), ("b", "c"), ("c", "d")):
        p, q = (np.mean([word in held for held in windows]) for word in (v, w))
        both = np.mean([v in held and w in held for held in windows]) + 1e-12
        expected.append(np.log(both / (p * q)) / -np.log(both))
    topics = [["a", "b"], ["b", "c"], ["c", "d"]]
    np.testing.assert_allclose(npmi_coherence(topics, documents, topk=2, window=3), expected, atol=1e-9)


def test_without_windows_documents_are_counted():
    rng = np.random.default_rng(101)
    documents = corpus(rng, 40, 8)
    topics = [["w0", "w1", "w2"]]
    by_hand = slid_by_hand(topics, documents, window=100)
    np.testing.assert_allclose(npmi_coherence(topics, documents, topk=3, window=None), by_hand, atol=1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [101, 102, 103])
@pytest.mark.parametrize("window", [3, 10])
def test_coherence_is_gensim_s(seed, window):
    rng = np.random.default_rng(seed)
    documents = corpus(rng, 60, 40)
    topics = [[f"w{word}" for word in rng.permutation(12)[:5]] for _ in range(4)]
    found = npmi_coherence(topics, documents, topk=5, window=window)
    np.testing.assert_allclose(found, gensim_coherence(topics, documents, 5, window), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_coherence_of_a_real_corpus_is_gensim_s(data_folder):
    lines = (Path(data_folder) / "octis" / "BBC_News" / "corpus.tsv").read_text(encoding="utf-8").splitlines()
    documents = [line.split("\t")[0].split() for line in lines]
    frequent = sorted({word for document in documents[:50] for word in document})
    topics = [list(words) for words in np.random.default_rng(101).choice(frequent, size=(10, 10), replace=False)]
    topics.append(["win", "play", "game", "player", "good", "back", "match", "team", "final", "side"])
    found = npmi_coherence(topics, documents)
    np.testing.assert_allclose(found, gensim_coherence(topics, documents), atol=1e-6)
    assert found[-1] > found[:-1].max()


def test_diversity_is_the_share_of_distinct_words():
    assert topic_diversity([["a", "b", "x"], ["c", "d", "x"]], topk=2) == 1.0
    assert topic_diversity([["a", "b", "x"], ["a", "d", "x"]], topk=3) == pytest.approx(4 / 6)
    assert topic_diversity([["a", "b"]] * 4, topk=2) == 0.25


def test_what_cannot_be_measured_is_refused():
    documents = [["a", "b"]]
    with pytest.raises(ValueError, match=r"every word of `topics` must occur in `documents`; 'z' does not"):
        npmi_coherence([["a", "z"]], documents, topk=2)
    with pytest.raises(ValueError, match=r"at least `topk` = 10 words; got one with 2"):
        npmi_coherence([["a", "b"]], documents)
    with pytest.raises(ValueError, match=r"at least `topk` = 3 words; got one with 2"):
        topic_diversity([["a", "b"]], topk=3)
    with pytest.raises(ValueError, match="`documents` must hold at least one document"):
        npmi_coherence([["a", "b"]], [], topk=2)
    with pytest.raises(ValueError, match="`topics` must hold at least one topic"):
        topic_diversity([])
    with pytest.raises(ValueError, match="`window` must be a whole number of at least 1"):
        npmi_coherence([["a", "b"]], documents, topk=2, window=0)
