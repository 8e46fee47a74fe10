"""What topics look like to a reader: do the top words of one belong together, and do topics differ?"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from otpdag.errors import check_count

Array = NDArray[np.float64]
Words = Sequence[Sequence[Hashable]]


def topic_diversity(topics: Words, *, topk: int = 10) -> float:
    """Measure the share of distinct words among the top words of all topics, as OCTIS does.

    Args:
        topics: The words of each topic, the likeliest first, as ``LatentDirichletAllocation.top_words`` lists them.
        topk: How many words of each topic count; OCTIS's own default, and the paper's number.

    Example:
        >>> topic_diversity([["cat", "dog"], ["cat", "fish"]], topk=2)
        0.75
    """
    chosen = _first(topics, topk)
    return len({word for words in chosen for word in words}) / (topk * len(chosen))


def npmi_coherence(
    topics: Words, documents: Iterable[Sequence[Hashable]], *, topk: int = 10, window: int | None = 10
) -> Array:
    r"""Measure how much the top words of each topic occur together: the mean NPMI over pairs of words.

    .. math:: \mathrm{NPMI}(v, w) = \log \frac{P(v, w) + \epsilon}{P(v) P(w)} \Big/ -\log (P(v, w) + \epsilon)

    Probabilities are shares of the windows of ``window`` words that slide over the documents; a shorter document is one
    window; ε is 1e-12. The defaults are those of gensim's ``c_npmi``, which OCTIS and the paper use, and so is what a
    window holds of a repeated word: it is forgotten as soon as its first occurrence has left the window. The mean over
    topics is ``npmi_coherence(...).mean()``.

    Args:
        topics: The words of each topic, the likeliest first, as ``LatentDirichletAllocation.top_words`` lists them.
        documents: The words of each document, in order.
        topk: How many words of each topic count.
        window: How many words a window has; None makes each document one window.

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
    check_count("`topk`", topk, 2)  # coherence is that of pairs
    check_count("`window`", 1 if window is None else window)
    number = {word: at for at, word in enumerate(dict.fromkeys(word for words in chosen for word in words))}
    holds = _windows(number, documents, window)
    together = (holds.T @ holds).toarray()
    missing = [word for word, at in number.items() if together[at, at] == 0]
    if missing:
        raise ValueError(f"every word of `topics` must occur in `documents`; {missing[0]!r} does not")
    joint, epsilon = together / holds.shape[0], 1e-12  # gensim's: a pair that shares every window gets -1
    single = joint.diagonal()
    npmi = np.log((joint + epsilon) / np.outer(single, single)) / -np.log(joint + epsilon)
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


def _windows(
    number: dict[Hashable, int], documents: Iterable[Sequence[Hashable]], window: int | None
) -> sp.sparse.csr_array:
    """Which words the windows of all documents hold, (windows, words): ones and zeros."""
    rows: list[int] = []
    columns: list[int] = []
    begin = 0
    for document in documents:
        width = len(document) if window is None else window
        count = max(len(document) - width + 1, 1)
        places = defaultdict(list)
        for at, word in enumerate(document):
            if word in number:
                places[word].append(at)
        for word, own in places.items():
            held: set[int] = set()
            for at in own:
                first = max(at - width + 1, 0)
                leaves = own[bisect_left(own, first)]  # the first occurrence in the window that this one enters
                held.update(range(first, min(leaves + 1, count)))
            rows.extend(begin + place for place in held)
            columns.extend([number[word]] * len(held))
        begin += count
    if not begin:
        raise ValueError("`documents` must hold at least one document; got none")
    return sp.sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=(begin, len(number)))
