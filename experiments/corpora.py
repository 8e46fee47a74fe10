"""Topic corpora in the format of OCTIS: 20 Newsgroups, BBC News, DBLP, or one's own."""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from scipy import sparse

from experiments.published_files import checked, fetch
from otpdag.errors import DataError

Partition = Literal["train", "val", "test"]

_PARTITIONS = ("train", "val", "test")
_ORIGIN = "https://raw.githubusercontent.com/MIND-Lab/OCTIS/master/preprocessed_datasets"  # MIT licence
_FILES = ("corpus.tsv", "vocabulary.txt")


class _Published(NamedTuple):
    """A corpus that OCTIS publishes: what to call it, how large it is, and the SHA-256 of its files."""

    title: str
    documents: int
    checksums: tuple[str, str]


_PUBLISHED = {
    "20NewsGroup": _Published(
        "20 Newsgroups", 16309, ("", "7c8b996f88501ef09b9f7841c6982ebd40f035d3fb804e76ba7be9e62f24acae")
    ),
    "BBC_News": _Published(
        "BBC News",
        2225,
        (
            "f76c715babb4b1decbe0d929454d1f2fd902c67d118cecaf7fbf39f1b376c624",
            "7aaf24bf24073a3eeb6b255dac054a40c5b3deda3dbcb0317e502e8b9f2ec8aa",
        ),
    ),
    "DBLP": _Published(
        "DBLP",
        54595,
        (
            "4f45f91db9795324d876317e9b8e63d4f792059c9291a0a1af1aecd82c98c883",
            "a32a86e91fc7dfa18ea38b34c861664dc79cc19401e77947093a77b9af16a0b9",
        ),
    ),
}
"""No checksum of the corpus of 20 Newsgroups is known to us: it is used where it lies, and never downloaded."""


@dataclass(frozen=True)
class Corpus:
    """Documents with the vocabulary that they are written in.

    Attributes:
        title: What to call it.
        documents: The words of each document, in order.
        vocabulary: All words; the columns of ``counts``.
        partitions: "train", "val" or "test" for each document; empty where the file has none.
        labels: The class of each document; empty where the file has none.
        source: The folder that it was read from.
        rebuilt: Whether this is a reconstruction, close to the published corpus but not equal to it.
    """

    title: str
    documents: tuple[tuple[str, ...], ...]
    vocabulary: tuple[str, ...]
    partitions: tuple[str, ...]
    labels: tuple[str, ...]
    source: str
    rebuilt: bool = False

    def __len__(self) -> int:
        return len(self.documents)

    @cached_property
    def counts(self) -> sparse.csr_array:
        """How often each document has each word, (documents, vocabulary), sparse."""
        column = {word: at for at, word in enumerate(self.vocabulary)}
        columns = np.array([column[word] for document in self.documents for word in document], dtype=np.int64)
        lengths = np.array([len(document) for document in self.documents], dtype=np.int64)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        ones = np.ones(len(columns), dtype=np.int64)
        return sparse.csr_array((ones, (rows, columns)), shape=(len(lengths), len(column)))

    def select(self, partition: Partition) -> "Corpus":
        """Keep the documents of one partition; the vocabulary stays.

        Raises:
            DataError: The partition is unknown, or the corpus has none.
        """
        if partition not in _PARTITIONS:
            raise DataError(f"`partition` must be one of {', '.join(_PARTITIONS)}; got '{partition}'")
        if partition not in self.partitions:
            raise DataError(f"{self.title} has no document in partition '{partition}'")
        kept = [at for at, name in enumerate(self.partitions) if name == partition]
        documents = tuple(self.documents[at] for at in kept)
        partitions = tuple(self.partitions[at] for at in kept)
        labels = tuple(self.labels[at] for at in kept if self.labels)
        return replace(self, documents=documents, partitions=partitions, labels=labels)


def corpus(
    name: str,
    partition: Partition | None = None,
    *,
    folder: str | Path | None = None,
    download: bool = True,
) -> Corpus:
    """Read one of the topic corpora that OCTIS publishes.

    It is looked for in ``folder`` (``octis/<name>`` under it), then in the user's cache, and else downloaded there.
    Checksums are verified. 20 Newsgroups, whose checksum is not known to us, is only read locally; a reconstruction in
    ``octis/20NewsGroup_rebuilt`` is accepted in its place, and says so in ``rebuilt`` and ``title``.

    Args:
        name: "20NewsGroup", "BBC_News" or "DBLP".
        partition: "train", "val" or "test"; all documents if left out.
        folder: The folder of data sets; by default the one that ``OTPDAG_DATA`` names, if any.
        download: Fetch published files that are missing.

    Returns:
        The documents.

    Raises:
        DataError: The name is unknown, or files are missing and cannot be fetched (the message says where to put them)
            or are not the published ones.
    """
    if name not in _PUBLISHED:
        raise DataError(f"`name` must be one of {', '.join(_PUBLISHED)}; got '{name}'")
    if partition is not None and partition not in _PARTITIONS:
        raise DataError(f"`partition` must be one of {', '.join(_PARTITIONS)}; got '{partition}'")
    corpus = _find(name, folder) or _fetch(name, folder, download)
    return corpus if partition is None else corpus.select(partition)


def read_corpus(folder: str | Path, title: str | None = None) -> Corpus:
    """Read a corpus in the format of OCTIS.

    ``corpus.tsv`` has a document a line, its words separated by spaces, and after tabs, if at all, a partition and a
    label. ``vocabulary.txt`` has a word a line; without that file the vocabulary is that of the documents, sorted.

    Args:
        folder: The folder that holds the files.
        title: What to call the corpus; the name of the folder if left out.

    Raises:
        DataError: A file is missing, or a line does not fit; the message says which.
    """
    path = Path(folder)
    if not (path / _FILES[0]).is_file():
        raise DataError(f"{path / _FILES[0]} is missing")
    words_of = path / _FILES[1]
    known = {word: word for word in _lines(words_of) if word} if words_of.is_file() else None
    documents, partitions, labels = [], [], []
    for number, line in enumerate(_lines(path / _FILES[0]), start=1):
        text, *rest = line.split("\t")
        words = text.split()
        if known is not None:
            strange = next((word for word in words if word not in known), None)
            if strange is not None:
                raise DataError(f"{path / _FILES[0]}, line {number}: '{strange}' is not in {_FILES[1]}")
            words = [known[word] for word in words]  # one string for each word, however often it occurs
        documents.append(tuple(words))
        partitions.extend(rest[:1])
        labels.extend(rest[1:2])
    vocabulary = sorted({word for document in documents for word in document}) if known is None else known
    for what, values in (("a partition", partitions), ("a label", labels)):
        if values and len(values) != len(documents):
            raise DataError(f"{path / _FILES[0]}: only {len(values)} of {len(documents)} lines have {what}")
    return Corpus(title or path.name, tuple(documents), tuple(vocabulary), tuple(partitions), tuple(labels), str(path))


def _lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [line.rstrip("\r\n") for line in file]


def _find(name: str, folder: str | Path | None) -> Corpus | None:
    """The corpus in the folder of data sets or in the cache; a reconstruction only where the original is nowhere."""
    places = [place / name for place in _places(folder)]
    for place in places:
        if all((place / file).is_file() for file in _FILES):
            return _verified(name, place)
    for place in places:
        rebuilt = place.with_name(f"{place.name}_rebuilt")
        if (rebuilt / _FILES[0]).is_file():
            corpus = read_corpus(rebuilt, f"{_PUBLISHED[name].title} (rebuilt)")
            return replace(corpus, rebuilt=True)
    return None


def _places(folder: str | Path | None) -> list[Path]:
    """Folders that may hold ``<name>/corpus.tsv``, the first being where to put files by hand."""
    root = folder or os.environ.get("OTPDAG_DATA")
    return [Path(root) / "octis", _cache()] if root else [_cache()]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "otpdag" / "octis"


def _verified(name: str, place: Path) -> Corpus:
    published = _PUBLISHED[name]
    for file, checksum in zip(_FILES, published.checksums, strict=True):
        if checksum:
            checked(place / file, checksum, hint="; `read_corpus` reads it anyway")
    corpus = read_corpus(place, published.title)
    if len(corpus) != published.documents:
        raise DataError(
            f"{place} must hold the {published.documents} documents that OCTIS publishes; got {len(corpus)}"
        )
    return corpus


def _fetch(name: str, folder: str | Path | None, download: bool) -> Corpus:
    published, place = _PUBLISHED[name], _cache() / name
    by_hand = f"put {' and '.join(_FILES)} from {_ORIGIN}/{name} into {_places(folder)[0] / name}"
    if not download:
        raise DataError(f"{published.title} was not found; {by_hand}")
    if not all(published.checksums):
        raise DataError(
            f"{published.title} was not found, and is not downloaded, for its checksum is not known; {by_hand}"
        )
    try:
        for file, checksum in zip(_FILES, published.checksums, strict=True):
            fetch(f"{_ORIGIN}/{name}/{file}", checksum, place)
    except DataError as error:
        raise DataError(f"{published.title} was not found: {error}; or {by_hand}") from None
    return _verified(name, place)
