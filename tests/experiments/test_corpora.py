"""Corpora."""

import hashlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest

from experiments import corpora
from experiments.corpora import corpus, read_corpus
from otpdag.errors import DataError

TEXT = "cat dog cat\ttrain\tpets\nfish\tval\tsea\ndog fish whale\ttrain\tsea\nwhale cat\ttest\tsea\n"
WORDS = "whale\ncat\ndog\nfish\n"


def put(folder, text=TEXT, words=WORDS):
    folder.mkdir(parents=True)
    (folder / "corpus.tsv").write_text(text)
    if words is not None:
        (folder / "vocabulary.txt").write_text(words)
    return folder


class Quiet(SimpleHTTPRequestHandler):
    requests: list[str]

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.asked.append(self.path)
        super().do_GET()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user without data sets, with an empty cache, for whom a tiny text is what BBC News is."""
    monkeypatch.delenv("OTPDAG_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sums = [hashlib.sha256(text.encode()).hexdigest() for text in (TEXT, WORDS)]
    monkeypatch.setitem(corpora._PUBLISHED, "BBC_News", corpora._Published("BBC News", 4, tuple(sums)))
    return tmp_path


@pytest.fixture
def web(home, monkeypatch):
    """A server on this machine that publishes the files."""
    put(home / "web" / "BBC_News")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(home / "web")))
    server.asked = []
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(corpora, "_ORIGIN", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def test_a_corpus_is_read_in_the_format_of_octis(tmp_path):
    found = read_corpus(put(tmp_path / "mine"))
    assert found.title == "mine"
    assert found.documents == (("cat", "dog", "cat"), ("fish",), ("dog", "fish", "whale"), ("whale", "cat"))
    assert found.vocabulary == ("whale", "cat", "dog", "fish")
    assert found.labels == ("pets", "sea", "sea", "sea")
    assert not found.rebuilt
    np.testing.assert_array_equal(found.counts.toarray(), [[0, 2, 1, 0], [0, 0, 0, 1], [1, 0, 1, 1], [1, 1, 0, 0]])


def test_documents_alone_are_enough(tmp_path):
    found = read_corpus(put(tmp_path / "plain", "b a b\n\nc\n", words=None), "Plain")
    assert (found.title, found.vocabulary) == ("Plain", ("a", "b", "c"))
    assert (found.partitions, found.labels) == ((), ())
    np.testing.assert_array_equal(found.counts.toarray(), [[1, 2, 0], [0, 0, 0], [0, 0, 1]])


def test_a_partition_keeps_the_vocabulary(tmp_path):
    found = read_corpus(put(tmp_path / "mine")).select("train")
    assert found.documents == (("cat", "dog", "cat"), ("dog", "fish", "whale"))
    assert (found.partitions, found.labels) == (("train", "train"), ("pets", "sea"))
    assert found.counts.shape == (2, 4)


def test_lines_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(DataError, match=r"corpus\.tsv, line 3: 'whale' is not in vocabulary\.txt"):
        read_corpus(put(tmp_path / "strange", words="cat\ndog\nfish\n"))
    with pytest.raises(DataError, match=r"corpus\.tsv: only 1 of 2 lines have a partition"):
        read_corpus(put(tmp_path / "half", "cat\ttrain\ndog\n"))
    with pytest.raises(DataError, match=r"corpus\.tsv is missing"):
        read_corpus(tmp_path / "nowhere")
    with pytest.raises(DataError, match="half2 has no document in partition 'test'"):
        read_corpus(put(tmp_path / "half2", "cat\ttrain\n")).select("test")


def test_the_folder_of_data_sets_comes_first(home, web, monkeypatch):
    put(home / "data" / "octis" / "BBC_News")
    monkeypatch.setenv("OTPDAG_DATA", str(home / "data"))
    assert corpus("BBC_News").source == str(home / "data" / "octis" / "BBC_News")
    assert corpus("BBC_News", "val").documents == (("fish",),)
    assert web.asked == []


def test_what_is_missing_is_downloaded_once(home, web):
    first, again = corpus("BBC_News"), corpus("BBC_News")
    assert first.documents == again.documents == read_corpus(home / "web" / "BBC_News").documents
    assert (first.title, first.rebuilt) == ("BBC News", False)
    assert sorted(web.asked) == ["/BBC_News/corpus.tsv", "/BBC_News/vocabulary.txt"]
    assert first.source == str(home / "cache" / "otpdag" / "octis" / "BBC_News")


def test_a_download_with_another_checksum_is_refused_and_not_kept(home, web):
    (home / "web" / "BBC_News" / "corpus.tsv").write_text(TEXT + "cat\ttrain\tpets\n")
    with pytest.raises(DataError, match=r"BBC News was not found: what http.*corpus\.tsv sent is not the published"):
        corpus("BBC_News")
    assert not (home / "cache" / "otpdag" / "octis" / "BBC_News" / "corpus.tsv").exists()


def test_a_local_file_with_another_checksum_is_refused(home):
    put(home / "octis" / "BBC_News", TEXT.replace("fish", "cat"))
    with pytest.raises(DataError, match=r"corpus\.tsv is not the published file.*`read_corpus` reads it anyway"):
        corpus("BBC_News", folder=home)


def test_without_a_network_the_error_says_where_to_put_the_files(home, monkeypatch):
    monkeypatch.setattr(corpora, "_ORIGIN", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot download .*put corpus\.tsv and vocabulary\.txt from .*cache"):
        corpus("BBC_News")
    with pytest.raises(DataError, match=rf"into {home}/mine/octis/BBC_News$"):
        corpus("BBC_News", folder=home / "mine")
    with pytest.raises(DataError, match=r"BBC News was not found; put corpus\.tsv"):
        corpus("BBC_News", download=False)


def test_20_newsgroups_is_never_downloaded_without_a_checksum(home, web):
    with pytest.raises(DataError, match=r"not downloaded, for its checksum is not known; put .*20NewsGroup into"):
        corpus("20NewsGroup")
    assert web.asked == []


def test_a_reconstruction_says_that_it_is_one(home):
    put(home / "octis" / "20NewsGroup_rebuilt")
    found = corpus("20NewsGroup", "train", folder=home)
    assert found.rebuilt
    assert found.title == "20 Newsgroups (rebuilt)"
    assert len(found) == 2


def test_an_original_goes_before_a_reconstruction_and_must_be_whole(home):
    put(home / "octis" / "20NewsGroup_rebuilt")
    put(home / "octis" / "20NewsGroup")
    with pytest.raises(DataError, match=r"vocabulary\.txt is not the published file"):
        corpus("20NewsGroup", folder=home)
    words = hashlib.sha256(WORDS.encode()).hexdigest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(corpora._PUBLISHED, "20NewsGroup", corpora._Published("20 Newsgroups", 16309, ("", words)))
        with pytest.raises(DataError, match="must hold the 16309 documents that OCTIS publishes; got 4"):
            corpus("20NewsGroup", folder=home)


def test_unknown_names_are_refused():
    with pytest.raises(DataError, match="`name` must be one of 20NewsGroup, BBC_News, DBLP; got 'bbc'"):
        corpus("bbc")
    with pytest.raises(DataError, match="`partition` must be one of train, val, test; got 'dev'"):
        corpus("DBLP", "dev")


@pytest.mark.parametrize(
    ("name", "documents", "words", "train", "labels"),
    [
        ("BBC_News", 2225, 2949, 1556, 5),
        ("DBLP", 54595, 1513, 38215, 4),
        ("20NewsGroup", 16309, 1612, 11415, 20),
    ],
)
def test_published_corpora_have_their_published_size(name, documents, words, train, labels, data_folder):
    found = corpus(name, folder=data_folder, download=False)
    assert found.counts.shape == (documents, words)
    assert len(found.select("train")) == train
    assert len(set(found.labels)) == labels
    assert found.counts.sum() == sum(map(len, found.documents))
    assert found.rebuilt == found.source.endswith("_rebuilt")
