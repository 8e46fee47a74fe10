"""Topics of documents with scikit-learn's conventions: a thin face on the graph ``theta -> words``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from otpdag.backward.documents import Cells, Shares, even_shares, infer_shares
from otpdag.engine import FitResult, Method, Restart, Status, entropic, paper, transport
from otpdag.engine.documents import (
    DocumentOptions,
    TopicState,
    alpha_at_topics,
    batches,
    fit_entropic,
    fit_transport,
    start_topics,
    update_online,
)
from otpdag.engine.monitor import Callback, Monitor
from otpdag.engine.paper_documents import PaperOptions, fit_paper
from otpdag.errors import ConvergenceWarning, DataError, ModelError
from otpdag.graph import Graph
from otpdag.mechanisms import Dirichlet, Multinomial
from otpdag.model import Model
from otpdag.objective.documents import WordPairs, document_terms
from otpdag.threads import bounded_threads

__all__ = ["LatentDirichletAllocation"]

Array = NDArray[np.float64]
Documents = sparse.csr_array

METHODS: dict[str, Callable[[], Method]] = {"entropic": entropic, "transport": transport, "paper": paper}
STEPS = {"entropic": 100, "transport": 300, "paper": 300}
STARTS = {"entropic": 6, "transport": 4, "paper": 1}
TOLERANCE = {"entropic": 1e-6, "transport": 1e-6, "paper": 0.0}
TOPIC_PRIOR = 0.1  # concentration of the Dirichlet prior of a topic's words, where topics="dirichlet" asks for one
RELEVANCE = 0.4  # between a word's lift (0) and its probability (1)
SHARE_STEPS, SHARE_TOLERANCE = 200, 1e-3  # of the shares of a document's topics, as scikit-learn stops its own at 1e-3
ONLINE_UPDATES = 20  # of the topics, after each batch of documents in partial_fit


class LatentDirichletAllocation(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    r"""Topics of documents, each a distribution over words, and the shares that they have in each document.

    .. math:: \theta_d \sim \mathrm{Dirichlet}(\alpha), \qquad
              x_d \mid \theta_d \sim \mathrm{Multinomial}(n_d, \theta_d^\top \gamma)

    The words' assignments to topics are summed out. It is the graph ``theta -> words`` with ``theta`` hidden;
    ``model_`` is that model.

    **Methods.** ``"entropic"`` (default) is entropic transport, eps = 1, with the backward map in closed form: maximum
    likelihood up to the map's approximation, the method of choice where the model holds. ``"transport"`` compares data
    and model directly, by the distribution of two words of one document: topics of words that occur together, the
    choice for topics to be read, and for short texts; concentrations are then estimated at these topics. It needs one
    pass over the documents. ``"paper"`` is the
    published practice (a recurrent encoder, relaxed assignments of words, Wasserstein penalty): slow, for comparison.

    **Documents** are a matrix of counts (documents, words), sparse or not; a list of strings; or a list of lists of
    words. Counts need not be whole: fractions weigh words. Documents without words are left out of the fit, and their
    shares are the prior's. Negative numbers, a vocabulary of one word, and fewer documents (with words) than topics are
    refused.

    Args:
        n_components: Number of topics.
        method: ``"entropic"``, ``"transport"`` or ``"paper"``.
        topics: ``"fixed"``, topics are parameters; ``"dirichlet"``, each topic has a Dirichlet distribution with
            log-concentrations ``beta_``, which are learned. Not with ``"transport"``.
        alpha: Known concentrations, one for all topics or one for each; left out, they are learned.
        n_init: Data-driven starts of which the best is kept; by default 6 for entropic fits, 4 for transport.
        max_iter: Most sweeps over the documents, or updates; by default 100 for entropic fits, else 300.
        batch_size: Documents that are taken at a time, and made dense unless nearly all of their counts are zero.
        vectorizer: What turns raw documents into counts; scikit-learn's ``CountVectorizer()`` if left out.
        callbacks: Called with each record of the history; returning True stops the fit.
        random_state: Seed or generator.

    Attributes:
        components_: Word probabilities (topics, words); **rows sum to one**, topics are in order of falling share.
        alpha_: Concentrations of the topics in a document (topics,).
        beta_: Log-concentrations of the topics' words, with ``topics="dirichlet"``.
        vocabulary_: The words of the columns, None if the documents were a matrix without names.
        word_probability_: How often each word was in the documents, as a share of all words.
        n_iter_: Sweeps or updates done.
        model_: The fitted :class:`otpdag.Model`.
        result_: The :class:`otpdag.FitResult`.

    >>> from otpdag.datasets import bars
    >>> documents = bars(10, 500, 100, seed=0)  # each topic is five words
    >>> lda = LatentDirichletAllocation(10, random_state=0).fit(documents.counts)
    >>> (lda.components_ > 0.1).sum(1), lda.transform(documents.counts).shape
    (array([5, 5, 5, 5, 5, 5, 5, 5, 5, 5]), (500, 10))
    """

    def __init__(
        self,
        n_components: int = 10,
        *,
        method: Literal["entropic", "transport", "paper"] = "entropic",
        topics: Literal["fixed", "dirichlet"] = "fixed",
        alpha: ArrayLike | None = None,
        n_init: int | None = None,
        max_iter: int | None = None,
        batch_size: int = 2048,
        vectorizer: Any = None,
        callbacks: Sequence[Callback] = (),
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.n_components = n_components
        self.method = method
        self.topics = topics
        self.alpha = alpha
        self.n_init = n_init
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.vectorizer = vectorizer
        self.callbacks = callbacks
        self.random_state = random_state

    # -- fit ------------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> Self:
        """Estimate topics and concentrations.

        Args:
            X: Counts (documents, words), strings, or lists of words.
            y: Ignored.
        """
        began = time.perf_counter()
        self._check()
        counts = self._filled(self._read(X, first=True))
        self._restart(counts)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        generator = np.random.default_rng(seed)
        options = self._options()
        with bounded_threads(1), Monitor(show=False, callbacks=self.callbacks) as monitor:
            if self.method == "paper":
                state = fit_paper(counts, options, PaperOptions(), generator, monitor)
            elif self.method == "transport":
                state = self._fit_pairs(counts, options, generator, monitor)
            else:
                state = fit_entropic(counts, options, generator, monitor)
        state.seen = float(counts.shape[0])
        self._adopt(state)
        self._report(state, monitor, counts.shape[0], time.perf_counter() - began, seed)
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Take in more documents: a step of stochastic natural gradients, or more pairs and some updates from all.

        The first call fits the documents that it is given, of which there must be as many as topics; the vocabulary is
        theirs.
        """
        if not hasattr(self, "components_"):
            return self.fit(X)
        self._check()
        if self.method == "paper":
            raise ModelError("method='paper' has no partial_fit; use 'entropic' or 'transport'")
        counts = self._read(X, first=False)
        counts = counts[np.flatnonzero(np.diff(counts.indptr))]
        if not counts.shape[0]:
            return self
        self._words = self._words + np.asarray(counts.sum(0)).ravel()
        state, options = self._state, self._options()
        with bounded_threads(1), Monitor(show=False) as monitor:
            if self.method == "transport":
                self._pairs = self._pairs + WordPairs.of(counts)
                state.steps, state.seen = 0, state.seen + counts.shape[0]
                few = DocumentOptions(options.topics, alpha=options.alpha, steps=ONLINE_UPDATES)
                state = fit_transport(self._pairs, lambda _: state.topics, few, monitor, state)
                state = self._with_alpha(counts, state, few, np.random.default_rng(int(state.seen)))
            else:
                state = update_online(counts, state, options)
        self._adopt(state)
        return self

    def _fit_pairs(
        self, counts: Documents, options: DocumentOptions, generator: np.random.Generator, monitor: Monitor
    ) -> TopicState:
        self._pairs = WordPairs.of(counts)
        if self._pairs.total <= 0:
            raise DataError("method='transport' needs documents of at least two words; found none")

        def start(number: int) -> torch.Tensor:
            return start_topics(counts, self.n_components, generator, first=number == 0)

        state = fit_transport(self._pairs, start, options, monitor)
        return self._with_alpha(counts, state, options, generator)

    def _with_alpha(
        self, counts: Documents, state: TopicState, options: DocumentOptions, generator: np.random.Generator
    ) -> TopicState:
        """Topics from pairs hold one alpha or another equally well: documents decide."""
        if options.alpha is None:
            state.alpha = alpha_at_topics(counts, state, options, generator)
        return state

    def _check(self) -> None:
        for name in ("n_components", "batch_size", "n_init", "max_iter"):
            value = getattr(self, name)
            least = 2 if name == "n_components" else 1
            optional = name in ("n_init", "max_iter")
            if (value is None and optional) or (isinstance(value, Integral) and int(value) >= least):
                continue
            raise ModelError(f"{name} must be a whole number of at least {least}; got {value!r}")
        if self.method not in METHODS:
            raise ModelError(f"method must be 'entropic', 'transport' or 'paper'; got {self.method!r}")
        if self.topics not in ("fixed", "dirichlet"):
            raise ModelError(f"topics must be 'fixed' or 'dirichlet'; got {self.topics!r}")
        if self.topics == "dirichlet" and self.method == "transport":
            raise ModelError("topics='dirichlet' needs method='entropic' or 'paper': pairs of words only show the mean")

    def _options(self) -> DocumentOptions:
        return DocumentOptions(
            topics=self.n_components,
            prior=TOPIC_PRIOR if self.topics == "dirichlet" else None,
            alpha=self._given_alpha(),
            steps=STEPS[self.method] if self.max_iter is None else self.max_iter,
            tolerance=TOLERANCE[self.method],
            batch=self.batch_size,
            restarts=STARTS[self.method] if self.n_init is None else self.n_init,
        )

    def _given_alpha(self) -> Array | None:
        if self.alpha is None:
            return None
        given = np.asarray(self.alpha, dtype=np.float64)
        if given.shape not in ((), (self.n_components,)) or not (np.isfinite(given).all() and (given > 0).all()):
            raise ModelError(
                f"alpha must be a positive number, or one for each of {self.n_components} topics; got {self.alpha!r}"
            )
        return np.array(np.broadcast_to(given, self.n_components))

    def _restart(self, counts: Documents) -> None:
        self._words = np.asarray(counts.sum(0), dtype=np.float64).ravel()

    def _filled(self, counts: Documents) -> Documents:
        """The documents that have words."""
        filled = np.flatnonzero(np.diff(counts.indptr))
        if counts.shape[1] < 2:
            raise DataError(f"the vocabulary must have at least 2 words; got {counts.shape[1]} feature(s)")
        if len(filled) < self.n_components:
            raise DataError(
                f"there must be at least as many documents with words as topics, {self.n_components}; got "
                f"{len(filled)} (n_samples = {counts.shape[0]})"
            )
        return counts if len(filled) == counts.shape[0] else counts[filled]

    def _adopt(self, state: TopicState) -> None:
        order = np.argsort(-state.counts.sum(-1).numpy(), kind="stable")
        state.counts, state.alpha = state.counts[order], state.alpha[order]
        self._state = state
        topics = state.topics.double().numpy()
        self.components_: Array = topics / topics.sum(1, keepdims=True)
        self.alpha_: Array = state.alpha.double().numpy()
        self.word_probability_: Array = self._words / self._words.sum()
        self.n_iter_ = state.steps
        if state.prior is not None:
            self.beta_: Array = np.log(state.counts.double().numpy() + state.prior)
        length = max(1, round(float(self._words.sum()) / max(1.0, state.seen)))
        graph = Graph([("theta", "words")], hidden=["theta"])
        nodes = {"theta": Dirichlet(self.n_components), "words": Multinomial(self.components_.shape[1], total=length)}
        self.model_ = Model(graph, nodes).set_params(
            {"theta": {"concentration": self.alpha_}, "words": {"topics": self.components_}}
        )

    def _report(self, state: TopicState, monitor: Monitor, rows: int, seconds: float, seed: int) -> None:
        if state.converged:
            status = Status(True, "the loss stopped changing")
        elif monitor.stopped:
            status = Status(False, f"a callback stopped the fit after {state.steps} steps")
        else:
            status = Status(False, f"the loss was still falling after {state.steps} steps", "raise max_iter")
            if self.method != "paper":
                warnings.warn(str(status), ConvergenceWarning, stacklevel=3)
        losses = state.restart_losses or (state.loss,)
        restarts = tuple(
            Restart(
                number, seed, loss, state.loss if number == state.kept else loss, number == state.kept, torch.empty(0)
            )
            for number, loss in enumerate(losses)
        )
        self.result_ = FitResult(
            self.model_,
            METHODS[self.method](),
            status,
            state.loss,
            tuple(monitor.history),
            restarts,
            rows,
            seconds,
            seed,
            stages=tuple(monitor.stages),
        )

    # -- use ------------------------------------------------------------------------------------------------------

    def transform(self, X: Any) -> Array:
        """Expected shares of the topics in each document (documents, topics); rows sum to one."""
        check_is_fitted(self, "components_")
        parts = [shares.mean.double().numpy() for _, shares in self._shares(self._read(X, first=False))]
        shares = np.concatenate(parts) if parts else np.zeros((0, self.n_components))
        return np.asarray(shares / shares.sum(1, keepdims=True))

    def score(self, X: Any, y: Any = None) -> float:
        """A lower bound on the log-likelihood of all documents, words in their order."""
        check_is_fitted(self, "components_")
        alpha = torch.from_numpy(self.alpha_).float()
        parts = self._shares(self._read(X, first=False))
        return -sum(float(document_terms(counts, shares, alpha).total) for counts, shares in parts)

    def perplexity(self, X: Any) -> float:
        """Exponential of minus the bound by word; smaller is better."""
        check_is_fitted(self, "components_")
        words = float(self._read(X, first=False).sum())
        if not words:
            raise DataError("perplexity needs documents with words; found none")
        return float(np.exp(-self.score(X) / words))

    def top_words(
        self, n: int = 10, *, relevance: float = RELEVANCE, vocabulary: Sequence[str] | None = None
    ) -> list[list[str]]:
        r"""The words that tell a topic best, the best first, by their relevance (Sievert & Shirley 2014).

        .. math:: r(w \mid k) = \lambda \log \gamma_{kw} + (1 - \lambda) \log \frac{\gamma_{kw}}{p(w)}

        One ranks by probability, zero by how much more likely the topic makes a word. The default of 0.4 keeps words
        that are frequent everywhere out of the lists.

        Args:
            n: Number of words.
            relevance: The weight :math:`\lambda`.
            vocabulary: The words of the columns, if they are not known from the documents.
        """
        check_is_fitted(self, "components_")
        names = self._names(vocabulary)
        if not 1 <= n <= len(names):
            raise ModelError(f"n must be from 1 to the {len(names)} words; got {n!r}")
        if not 0 <= relevance <= 1:
            raise ModelError(f"relevance must be between 0 and 1; got {relevance!r}")
        with np.errstate(divide="ignore"):
            line, lift = np.log(self.components_), np.log(np.maximum(self.word_probability_, 1e-300))
        order = np.argsort(-(line - (1 - relevance) * lift), axis=1, kind="stable")[:, :n]
        return [[names[word] for word in row] for row in order]

    def _names(self, vocabulary: Sequence[str] | None) -> list[str]:
        known = self.vocabulary_ if vocabulary is None else list(vocabulary)
        width = self.components_.shape[1]
        if known is None:
            return [str(number) for number in range(width)]
        if len(known) != width:
            raise ModelError(f"vocabulary must have {width} words, one for each column; got {len(known)}")
        return list(known)

    def _shares(self, counts: Documents) -> Iterable[tuple[torch.Tensor | Cells, Shares]]:
        potentials, alpha = self._state.potentials, torch.from_numpy(self.alpha_).float()
        with bounded_threads(1):
            for batch in batches(counts, self.batch_size):
                begin = even_shares(batch, alpha)
                yield (
                    batch,
                    infer_shares(batch, potentials, alpha, begin, steps=SHARE_STEPS, tolerance=SHARE_TOLERANCE),
                )

    _words: Array
    _pairs: WordPairs

    @property
    def _n_features_out(self) -> int:
        return int(self.n_components)

    # -- documents ------------------------------------------------------------------------------------------------

    def _read(self, X: Any, *, first: bool) -> Documents:
        """Documents of any kind as sparse counts."""
        if isinstance(X, (list, tuple)) and X and all(isinstance(document, str) for document in X):
            return self._vectorized(X, self.vectorizer or CountVectorizer(), first)
        if isinstance(X, (list, tuple)) and X and all(_is_tokens(document) for document in X):
            return self._vectorized(X, CountVectorizer(analyzer=_as_they_are), first)
        checked = validate_data(self, X, reset=first, accept_sparse="csr", dtype=np.float64, ensure_min_samples=1)
        if first:
            names = getattr(self, "feature_names_in_", None)
            self.vocabulary_: list[str] | None = None if names is None else [str(name) for name in names]
            self._vectorizer: Any = None
        counts = sparse.csr_array(checked)
        counts.sum_duplicates()
        if counts.nnz and counts.data.min() < 0:
            raise DataError(
                "Negative values in data passed to LatentDirichletAllocation: counts must be at least 0; "
                f"found {counts.data.min():g}"
            )
        counts.eliminate_zeros()
        return counts

    def _vectorized(self, X: Any, vectorizer: Any, first: bool) -> Documents:
        if first:
            try:
                counts = vectorizer.fit_transform(X)
            except ValueError as error:
                raise DataError(f"the documents hold no words: {error}") from error
            self._vectorizer = vectorizer
            self.vocabulary_ = [str(word) for word in vectorizer.get_feature_names_out()]
            self.n_features_in_ = counts.shape[1]
        elif self._vectorizer is None:
            raise DataError("X must be a matrix of counts, as in fit: the words of its columns are not known")
        else:
            counts = self._vectorizer.transform(X)
        return sparse.csr_array(counts.astype(np.float64))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.positive_only = True
        return tags


def _is_tokens(document: object) -> bool:
    return isinstance(document, (list, tuple)) and all(isinstance(word, str) for word in document)


def _as_they_are(words: list[str]) -> list[str]:
    return words
