"""What topics look like to a reader: do the top words of one belong together, and do topics differ?"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

Array = NDArray[np.float64]
Words = Sequence[Sequence[Hashable]]


def top_words(topics: ArrayLike, vocabulary: Sequence[str], n: int = 10) -> list[list[str]]:
    """List the likeliest words of each topic, the likeliest first.

    Args:
        topics: Word probabilities or weights, a row per topic.
        vocabulary: The words of the columns.
        n: How many words of each topic.

    Example:
        >>> top_words([[0.1, 0.6, 0.3]], ["the", "cat", "sat"], n=2)
        [['cat', 'sat']]
    """
    matrix = np.asarray(topics, dtype=float)
    if matrix.ndim != 2 or matrix.shape[1] != len(vocabulary):
        raise ValueError(f"`topics` must have a column for each of {len(vocabulary)} words; got shape {matrix.shape}")
    if not 1 <= n <= len(vocabulary):
        raise ValueError(f"`n` must be between 1 and the {len(vocabulary)} words of the vocabulary; got {n}")
    return [[vocabulary[word] for word in row] for row in np.argsort(-matrix, axis=1, kind="stable")[:, :n]]


def topic_diversity(topics: Words, *, topk: int = 10) -> float:
    """Measure the share of distinct words among the top words of all topics, as OCTIS does.

    Args:
        topics: The words of each topic, the likeliest first: see :func:`top_words`.
        topk: How many words of each topic count; OCTIS's own default, and the paper's number.

    Example:
        >>> topic_diversity([["cat", "dog"], ["cat", "fish"]], topk=2)
        0.75
    """
    chosen = _first(topics, topk)
    return len({word for words in chosen for word in words}) / (topk * len(chosen))


def npmi_coherence(
    topics: Words,
    documents: Iterable[Sequence[Hashable]],
    *,
    topk: int = 10,
    window: int | None = 10,
    repeats: Literal["gensim", "exact"] = "gensim",
) -> Array:
    r"""Measure how much the top words of each topic occur together: the mean NPMI over pairs of words.

    .. math:: \mathrm{NPMI}(v, w) = \log \frac{P(v, w) + \epsilon}{P(v) P(w)} \Big/ -\log (P(v, w) + \epsilon)

    Probabilities are shares of the windows of ``window`` words that slide over the documents; a shorter document is one
    window; ε is 1e-12. The defaults are those of gensim's ``c_npmi``, which OCTIS and the paper use. Its mean over
    topics is ``npmi_coherence(...).mean()``.

    Args:
        topics: The words of each topic, the likeliest first: see :func:`top_words`.
        documents: The words of each document, in order.
        topk: How many words of each topic count.
        window: How many words a window has; None makes each document one window.
        repeats: What a window holds if a word occurs twice in it. gensim forgets the word as soon as its first
            occurrence leaves the window; "exact" keeps it as long as it is there.

    Returns:
        The coherence of each topic, from -1 to 1.

    Raises:
        ValueError: There are fewer than ``topk`` words, or a word that no document has.

    Example:
        >>> documents = [["cat", "purrs"], ["cat", "purrs", "loudly"], ["dog", "barks"], ["dog", "runs"]]
        >>> npmi_coherence([["cat", "purrs"], ["cat", "dog"]], documents, topk=2).round(2)
        array([ 1.  , -0.95])
    """
    chosen = _first(topics, topk)
    if topk < 2:
        raise ValueError(f"`topk` must be at least 2, for coherence is that of pairs; got {topk}")
    if window is not None and window < 1:
        raise ValueError(f"`window` must be at least 1, or None for whole documents; got {window}")
    if repeats not in ("gensim", "exact"):
        raise ValueError(f"`repeats` must be 'gensim' or 'exact'; got {repeats!r}")
    number = {word: at for at, word in enumerate(dict.fromkeys(word for words in chosen for word in words))}
    together, windows = _joint_counts(number, documents, window, repeats)
    missing = [word for word, at in number.items() if together[at, at] == 0]
    if missing:
        raise ValueError(f"every word of `topics` must occur in `documents`; {missing[0]!r} does not")
    npmi = _npmi(together / windows)
    pairs = ~np.eye(topk, dtype=bool)
    places = [[number[word] for word in words] for words in chosen]
    return np.array([npmi[np.ix_(place, place)][pairs].mean() for place in places])


def _first(topics: Words, topk: int) -> list[list[Hashable]]:
    chosen = [list(words[:topk]) for words in topics]
    if not chosen:
        raise ValueError("`topics` must hold at least one topic; got none")
    short = min(len(words) for words in chosen)
    if topk < 1 or short < topk:
        raise ValueError(f"every topic must have at least `topk` = {topk} words; got one with {short}")
    return chosen


def _npmi(joint: Array, epsilon: float = 1e-12) -> Array:
    """NPMI of every two words from their joint probabilities, with gensim's epsilon; the diagonal is not used."""
    single = joint.diagonal()
    # a pair that shares every window gets -1, as in gensim
    return np.asarray(np.log((joint + epsilon) / np.outer(single, single)) / -np.log(joint + epsilon))


def _joint_counts(
    number: dict[Hashable, int], documents: Iterable[Sequence[Hashable]], window: int | None, repeats: str
) -> tuple[Array, int]:
    """In how many windows each two words are, and how many windows there are."""
    words, places, lengths = _occurrences(number, documents)
    counts = np.ones_like(lengths) if window is None else np.maximum(lengths - window + 1, 1)
    if not len(words):
        return np.zeros((len(number), len(number))), int(counts.sum())
    document = places[:, 0]
    first, last = _spans(words, places, counts[document], window, repeats)
    # rows of the incidence matrix are windows, numbered through all documents
    offset = (np.cumsum(counts) - counts)[document]
    size = last - first + 1
    within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
    rows, columns = np.repeat(offset + first, size) + within, np.repeat(words, size)
    incidence = sparse.csr_array(
        (np.ones(len(rows), dtype=np.int64), (rows, columns)), shape=(int(counts.sum()), len(number))
    )
    incidence.data[:] = 1  # a window that two occurrences put a word in holds it once
    return np.asarray((incidence.T @ incidence).toarray(), dtype=float), int(counts.sum())


def _occurrences(
    number: dict[Hashable, int], documents: Iterable[Sequence[Hashable]]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The word of each occurrence, its document and position, sorted by word; and the lengths of the documents."""
    occurrences: list[tuple[int, int, int]] = []
    lengths: list[int] = []
    for index, document in enumerate(documents):
        lengths.append(len(document))
        occurrences.extend((number[word], index, at) for at, word in enumerate(document) if word in number)
    if not lengths:
        raise ValueError("`documents` must hold at least one document; got none")
    table = np.array(sorted(occurrences), dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1:], np.array(lengths, dtype=np.int64)


def _spans(
    words: NDArray[np.int64],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
    window: int | None,
    repeats: str,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last window, within its document, that each occurrence puts its word in."""
    position = places[:, 1]
    first = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
    last = position
    if repeats == "gensim" and window is not None:
        # the word is forgotten when the first of its occurrences in the window that it enters has left
        width = int(position.max()) + 2
        key = (words * (int(places[:, 0].max()) + 1) + places[:, 0]) * width
        last = position[np.searchsorted(key + position, key + first)]
    return first, np.minimum(last, counts - 1)
