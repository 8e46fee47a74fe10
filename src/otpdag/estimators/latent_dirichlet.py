"""Topics of documents with scikit-learn's conventions: a thin face on the graph ``theta -> words``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pandas as pd
import scipy as sp
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.feature_extraction.text import CountVectorizer

from otpdag.data import Documents
from otpdag.engine import EM, FitResult, SearchSchedule, fit
from otpdag.engine.document_data import DocumentData
from otpdag.engine.method import current_name
from otpdag.engine.monitor import Callback
from otpdag.engine.search import Searcher, search
from otpdag.errors import ConvergenceWarning, DataError, ModelError, check_choice, told_as
from otpdag.estimators._contract import ModelEstimator, RandomState, drawn_seed
from otpdag.graph import Graph
from otpdag.likelihood.topic_problem import PairProblem, TopicProblem, Topics
from otpdag.likelihood.topic_shares import SMALLEST, Cells, Shares, batches, even_shares, infer_shares
from otpdag.mechanisms import Dirichlet, Multinomial
from otpdag.model import Model
from otpdag.numerics import Array, at_work

Counts = sp.sparse.csr_array

TOPIC_PRIOR = 0.1  # concentration of the prior on words, where topics have a distribution: sparse, as topics are


@dataclass(eq=False, repr=False)
class LatentDirichletAllocation(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ModelEstimator):
    r"""Topics of documents, each a distribution over words, and the shares that they have in each document.

    .. math:: \theta_d \sim \mathrm{Dirichlet}(\alpha), \qquad
              x_d \mid \theta_d \sim \mathrm{Multinomial}(n_d, \theta_d^\top \gamma)

    The words' assignments to topics are summed out. It is the graph ``theta -> words`` with ``theta`` hidden;
    ``model_`` is that model.

    **Methods.** ``"likelihood"`` is entropic transport, eps = 1, with the backward map in closed form: maximum
    likelihood up to the map's approximation, the method of choice where the model holds. ``"pairs"`` compares data
    and model directly, by the distribution of two words of one document: topics of words that occur together, the
    choice for texts, long and short; concentrations are then estimated at these topics. It needs one pass over the
    documents. ``"auto"`` (default) asks whether documents repeat words as often as the model does, which draws them
    independently: entropic if so, pairs if not, as in texts; ``result_.method`` and ``result_.notes`` tell.
    ``"paper"`` is the published practice (an encoder of documents, relaxed topics and words, Wasserstein penalty), for
    comparison: it finds the bars, at a distance that its relaxation leaves.

    **Background.** Where documents do not repeat words as the model does, ``"pairs"`` lets four of five words come from
    one distribution that all documents share, ``background_``. A document about topic k alone then has words
    :math:`(1 - \lambda) \gamma_k + \lambda b`, which is what ``model_`` holds: the same LDA. ``components_`` are the
    topics' own words, :math:`\gamma`.

    **Documents** are a matrix of counts (documents, words), sparse or not; a list of strings; or a list of lists of
    words. Counts need not be whole: fractions weigh words. Documents without words are left out of the fit, and their
    shares are the prior's. Negative numbers, a vocabulary of one word, and fewer documents (with words) than topics are
    refused.

    Args:
        n_components: Number of topics.
        method: ``"auto"``, ``"likelihood"``, ``"pairs"`` or ``"paper"``.
        topics: ``"fixed"``, topics are parameters; ``"dirichlet"``, each topic has a Dirichlet distribution with
            log-concentrations ``beta_``, which are learned. Not with ``"pairs"``.
        alpha: Known concentrations, one for all topics or one for each; left out, they are learned.
        n_init: Starts of which the best after short runs goes on; by default 6 for entropic fits, 4 for pairs, both
            data-driven, and 12 random ones for the paper's way.
        max_iter: Most sweeps over the documents, updates or, of the paper's way, epochs; by default 100 for entropic
            fits, 1,000 for the paper's with Dirichlet topics, else 300.
        batch_size: Documents that are taken at a time, and made dense unless nearly all of their counts are zero.
        vectorizer: What turns raw documents into counts; scikit-learn's ``CountVectorizer()`` if left out.
        callbacks: Called with each record of the history; returning True stops the fit.
        random_state: Seed or generator.

    Attributes:
        components_: Word probabilities (topics, words); **rows sum to one**, topics are in order of falling share.
        background_: Probabilities (words,) of words that no topic explains; zeros if all are explained.
        background_share_: Their share in a document, 0 or 0.8.
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

    n_components: int = 10
    _: KW_ONLY
    method: Literal["auto", "likelihood", "pairs", "paper"] = "auto"
    topics: Literal["fixed", "dirichlet"] = "fixed"
    alpha: ArrayLike | None = None
    n_init: int | None = None
    max_iter: int | None = None
    batch_size: int = 2048
    vectorizer: Any = None
    callbacks: Sequence[Callback] = ()
    random_state: RandomState = 0

    reads: ClassVar[Mapping[str, bool]] = {"sparse": True, "positive_only": True}

    # -- fit ------------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> Self:
        """Estimate topics and concentrations.

        Args:
            X: Counts (documents, words), strings, or lists of words.
            y: Ignored.
        """
        self._check()
        counts = self._read(X, first=True)
        if counts.shape[1] < 2:
            raise DataError(f"the vocabulary must have at least 2 words; got {counts.shape[1]} feature(s)")
        self._words: Array = np.asarray(counts.sum(0), dtype=np.float64).ravel()
        self.model_ = self._model(counts)
        kind = DocumentData.of(self.model_, Documents(counts))
        self._seen = float(kind.rows)
        prior = TOPIC_PRIOR if self.topics == "dirichlet" else None
        method = kind.named(current_name(self.method), prior=prior, batch=int(self.batch_size), steps=self.max_iter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # told below, in the words of this estimator
            self.result_: FitResult = fit(
                self.model_,
                kind,
                method=method,
                seed=drawn_seed(self.random_state),
                restarts=self.n_init,
                progress=False,
                callbacks=self.callbacks,
            )
        if self.result_.status.advice and self.method != "paper":
            text = f"not converged: {self.result_.status.reason} (raise max_iter)"
            warnings.warn(text, ConvergenceWarning, stacklevel=2)
        kept = next(one for one in self.result_.restarts if one.kept)
        self._problem: object = self.result_.problem
        self._read_topics(self._topics_of(kept.point.unsqueeze(0)))
        self.n_iter_ = max(1, len(self.result_.history))
        return self

    def _topics_of(self, point: torch.Tensor) -> Topics:
        if isinstance(self._problem, TopicProblem | PairProblem):
            return self._problem.topics(point)
        params = self.model_.params()
        concentration = params["theta"]["concentration"].reshape(-1)
        logs = torch.log(torch.from_numpy(params["words"]["topics"]).clamp(min=SMALLEST))
        return Topics(logs, torch.from_numpy(concentration).float())

    def _model(self, counts: Counts) -> Model:
        """The graph ``theta -> words``."""
        length = max(1, round(float(counts.sum()) / max(1, int((np.diff(counts.indptr) > 0).sum()))))
        theta = Dirichlet(self.n_components, concentration=self._given_alpha())
        words = Multinomial(counts.shape[1], total=length)
        return Model(Graph([("theta", "words")], hidden=["theta"]), {"theta": theta, "words": words})

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Take in more documents: a step of stochastic natural gradients, or more pairs and some updates from all.

        The first call fits the documents that it is given, of which there must be as many as topics; the vocabulary is
        theirs.
        """
        if not hasattr(self, "components_"):
            return self.fit(X)
        self._check()
        if self.method == "paper":
            raise ModelError("method='paper' has no partial_fit; use 'likelihood' or 'pairs'")
        counts = self._read(X, first=False)
        counts = counts[np.flatnonzero(np.diff(counts.indptr))]
        if not counts.shape[0]:
            return self
        self._words = self._words + np.asarray(counts.sum(0)).ravel()
        before, self._seen = self._seen, self._seen + counts.shape[0]
        with at_work(1):
            if isinstance(self._problem, PairProblem):
                self._read_topics(self._with_pairs(self._problem, counts))
            elif isinstance(self._problem, TopicProblem):
                self._read_topics(self._online(self._problem, counts, before))
        self.n_iter_ += 1
        return self

    def _with_pairs(self, problem: PairProblem, counts: Counts, updates: int = 20) -> Topics:
        """Some updates from the pairs of all documents so far, and alpha from the new ones."""
        grown = problem.resumed(counts, int(self._seen))
        course = SearchSchedule(short_steps=0, moves=0)
        ended = search(grown, grown.point(problem.own(self._state)), course, Searcher(EM(steps=updates)))
        self._problem, topics = grown.concluded(grown.topics(ended.point))
        return topics

    def _online(
        self, problem: TopicProblem, counts: Counts, before: float, steps: int = 40, forgetting: float = 0.7
    ) -> Topics:
        """One step of stochastic natural gradients (Hoffman, Blei & Bach 2010): a batch in place of all documents.

        The expected counts of a batch stand for those of all documents seen so far. Its weight is the share of its
        documents among them, to a power below one: old batches, whose topics were worse, are forgotten slowly.
        """
        many, prior = counts.shape[0], problem.sweeps.prior or 0.0
        pace = (many / self._seen) ** forgetting
        sweeps = replace(problem.sweeps, share_steps=steps)
        swept, _ = replace(problem, documents=counts, sweeps=sweeps).swept(self._state)
        old, new = (torch.exp(one.log_counts.double()) - prior for one in (self._state, swept))
        mixed = (1 - pace) * old * (self._seen / max(before, many)) + pace * new * (self._seen / many)
        alpha = self._state.alpha + pace * (swept.alpha - self._state.alpha)
        return Topics(torch.log((mixed + prior).clamp(min=SMALLEST)), alpha)

    def _check(self) -> None:
        self._check_counts("n_components", "batch_size", "n_init", "max_iter")
        check_choice("method", self.method, ("auto", "likelihood", "pairs", "paper", "entropic", "transport"))
        check_choice("topics", self.topics, ("fixed", "dirichlet"))
        if self.topics == "dirichlet" and self.method in ("pairs", "transport"):
            raise ModelError("topics='dirichlet' needs 'likelihood' or 'paper': pairs of words only show the mean")

    def _given_alpha(self) -> Array | None:
        if self.alpha is None:
            return None
        given = np.asarray(self.alpha, dtype=np.float64)
        if given.shape not in ((), (self.n_components,)) or not (np.isfinite(given).all() and (given > 0).all()):
            raise ModelError(f"alpha must be a positive number, or {self.n_components} of them; got {self.alpha!r}")
        return np.array(np.broadcast_to(given, self.n_components))

    def _read_topics(self, topics: Topics) -> None:
        """Topics in order of falling share, also in the model."""
        self._state: Topics = topics.ordered()
        whole = self._state.probabilities.double().numpy()
        own, common = self._state, None
        if isinstance(self._problem, PairProblem):
            own, common = self._problem.own(self._state), self._problem.common
        probabilities = own.probabilities.double().numpy()
        self.components_: Array = probabilities / probabilities.sum(1, keepdims=True)
        shared = np.zeros(whole.shape[1]) if common is None else common.double().numpy()
        self.background_share_ = float(shared.sum())
        self.background_: Array = shared / max(self.background_share_, 1e-300)
        self.alpha_: Array = self._state.alpha.double().numpy()
        self.word_probability_: Array = self._words / self._words.sum()
        if self.topics == "dirichlet":
            self.beta_: Array = self._state.log_counts.double().numpy()
        shares = whole / whole.sum(1, keepdims=True)
        self.model_.set_params({"theta": {"concentration": self.alpha_}, "words": {"topics": shares}})

    # -- use ------------------------------------------------------------------------------------------------------

    def transform(self, X: Any) -> Array:
        """Expected shares of the topics in each document (documents, topics); rows sum to one."""
        _ = self._fitted
        parts = [shares.mean.double().numpy() for _, shares in self._shares(self._read(X, first=False))]
        shares = np.concatenate(parts) if parts else np.zeros((0, self.n_components))
        return np.asarray(shares / shares.sum(1, keepdims=True))

    def score(self, X: Any, y: Any = None) -> float:
        """A lower bound on the log-likelihood of all documents, words in their order."""
        _ = self._fitted
        alpha = torch.from_numpy(self.alpha_).float()
        parts = self._shares(self._read(X, first=False))
        return -sum(float(shares.cost(counts, alpha)) for counts, shares in parts)

    def perplexity(self, X: Any) -> float:
        """Exponential of minus the bound by word; smaller is better."""
        _ = self._fitted
        words = float(self._read(X, first=False).sum())
        if not words:
            raise DataError("perplexity needs documents with words; found none")
        return float(np.exp(-self.score(X) / words))

    def top_words(
        self, n: int = 10, *, relevance: float = 0.6, vocabulary: Sequence[str] | None = None
    ) -> list[list[str]]:
        r"""The words that tell a topic best, the best first, by their relevance (Sievert & Shirley 2014).

        .. math:: r(w \mid k) = \lambda \log \gamma_{kw} + (1 - \lambda) \log \frac{\gamma_{kw}}{p(w)}

        One ranks by probability, zero by how much more likely the topic makes a word. The default of 0.6 is that of
        Sievert & Shirley, at which readers recognised topics best.

        Args:
            n: Number of words.
            relevance: The weight :math:`\lambda`.
            vocabulary: The words of the columns, if they are not known from the documents.
        """
        _ = self._fitted
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

    def _shares(
        self, counts: Counts, steps: int = 200, tolerance: float = 1e-3
    ) -> Iterable[tuple[torch.Tensor | Cells, Shares]]:
        """Batches of documents with their shares, which are inferred to the end."""
        prior = self._problem.sweeps.prior if isinstance(self._problem, TopicProblem) else None
        potentials, alpha = self._state.potentials(prior), torch.from_numpy(self.alpha_).float()
        with at_work(1):
            for batch in batches(counts, self.batch_size):
                start = even_shares(batch, alpha)
                yield batch, infer_shares(batch, potentials, alpha, start, steps=steps, tolerance=tolerance)

    @property
    def _n_features_out(self) -> int:
        return int(self.n_components)

    # -- documents ------------------------------------------------------------------------------------------------

    def _read(self, X: Any, *, first: bool) -> Counts:
        """Documents of any kind as sparse counts."""
        texts = _texts(X)
        if texts is not None:
            return self._vectorized(texts, first)
        checked = self._checked(X, first=first, accept_sparse="csr", ensure_non_negative=True)
        if first:
            names = getattr(self, "feature_names_in_", None)
            self.vocabulary_: list[str] | None = None if names is None else [str(name) for name in names]
            self._vectorizer: Any = None
        return Documents(checked).counts

    def _vectorized(self, texts: list[Any], first: bool) -> Counts:
        if first:
            are_words = not isinstance(texts[0], str)
            vectorizer = CountVectorizer(analyzer=list) if are_words else self.vectorizer or CountVectorizer()
            with told_as(DataError, "the documents hold no words", ValueError):
                counts = vectorizer.fit_transform(texts)
            self._vectorizer = vectorizer
            self.vocabulary_ = [str(word) for word in vectorizer.get_feature_names_out()]
            self.n_features_in_ = counts.shape[1]
        elif self._vectorizer is None:
            raise DataError("X must be a matrix of counts, as in fit: the words of its columns are not known")
        else:
            counts = self._vectorizer.transform(texts)
        return sp.sparse.csr_array(counts.astype(np.float64))


def _texts(documents: Any) -> list[Any] | None:
    """Texts, or lists of words, in a list or a column; None of anything else."""
    if not isinstance(documents, list | tuple | pd.Series | np.ndarray) or getattr(documents, "ndim", 1) != 1:
        return None
    texts = list(documents)
    if any(isinstance(document, str) for document in texts):
        for number, document in enumerate(texts):
            if not isinstance(document, str):
                raise DataError(f"documents must be texts, all of them; document {number} is {document!r}")
        return texts
    return texts if texts and all(_is_words(document) for document in texts) else None


def _is_words(document: object) -> bool:
    return isinstance(document, list | tuple) and all(isinstance(word, str) for word in document)
