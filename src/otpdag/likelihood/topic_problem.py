r"""The objective of documents: topics :math:`\gamma`, concentrations :math:`\alpha`, the graph ``shares -> words``.

Two evaluations, both with closed-form updates. :class:`TopicProblem` is the reconstruction and the entropic term
(eps = 1) with the backward map of :mod:`otpdag.likelihood.topic_shares`: minus the variational bound on the likelihood.
:class:`PairProblem` is the direct term on the simplest thing that shows a topic, two words of one document
(:class:`WordPairs`), with the Kullback-Leibler divergence as D:

.. math:: P_\theta(v, w) = \sum_{k, l} A_{kl} \gamma_{kv} \gamma_{lw}, \qquad
          A_{kl} = \frac{\alpha_k (\alpha_l + [k = l])}{\alpha_\cdot (\alpha_\cdot + 1)}.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import numpy as np
import scipy as sp
import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.likelihood.topic_shares import (
    ALPHA_RANGE,
    SMALLEST,
    Documents,
    DrawnTopics,
    are_whole,
    batches,
    cell_batches,
    drawn_topics,
    even_shares,
    exact_alpha,
    infer_assignments,
    infer_shares,
    newton_concentration,
    simulated_documents,
)
from otpdag.numerics import Array
from otpdag.problem import LossTerms, Problem, Updates
from otpdag.settings import Direct, Objective
from otpdag.structure import Shapes, Structure, columns_of, pack, unpack


def _never() -> bool:
    return False


@dataclass(frozen=True)
class TopicSweeps:
    """Sweeps over documents with closed-form updates, an evaluation for :class:`~otpdag.engine.optimiser.EM`.

    Args:
        pairs: Compare pairs of words (the direct term) instead of whole documents (the entropic objective).
        prior: Concentration of a Dirichlet prior on the topics' words; None makes the topics plain parameters.
        batch: Documents that are taken at a time, and made dense unless nearly all of their counts are zero.
        share_steps: Steps of the shares of a document in a sweep, from even shares: more lower the loss little.
        background: Of pairs: the share of a document's words that no topic explains; they come from one distribution
            for all documents, which is learned.
    """

    pairs: bool = False
    prior: float | None = None
    batch: int = 2048
    share_steps: int = 10
    background: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a prior where only means are compared, and a background where all words count."""
        if not 0 <= self.background < 1 or (self.background and not self.pairs):
            raise ModelError(f"background must be a share below one, of pairs of words; got {self.background!r}")
        if self.pairs and self.prior is not None:
            raise ModelError("pairs of words only show the mean of the topics: leave prior out")

    @property
    def objective(self) -> Objective:
        """What sweeps minimise: they have closed forms for no other terms or weights."""
        return Objective(reconstruction=0.0, direct=Direct()) if self.pairs else Objective(eps=1.0)


def topic_nodes(structure: Structure) -> tuple[str, str]:
    """The hidden node with the shares of the topics, and the observed one with the words; anything else is refused."""
    graph = structure.graph
    if len(graph.observed) == 1 and len(graph.hidden) == 1 and graph.parents(graph.observed[0]) == tuple(graph.hidden):
        shares, words = graph.hidden[0], graph.observed[0]
        if (
            "concentration" in structure.mechanisms[shares].declared()
            and "topics" in structure.mechanisms[words].declared()
        ):
            return shares, words
    raise ModelError("documents are fitted by the graph shares -> words, with m.Dirichlet hidden and m.Multinomial")


@dataclass(frozen=True)
class Topics:
    """Where a fit of topics stands.

    Attributes:
        log_counts: Logarithms of the expected counts of words by topic (K, words), with the prior's; their level tells
            how many words a topic gave.
        alpha: Concentrations (K,).
    """

    log_counts: Tensor
    alpha: Tensor

    @property
    def probabilities(self) -> Tensor:
        """Word probabilities (K, words), rows sum to one."""
        return torch.softmax(self.log_counts, -1)

    def potentials(self, prior: float | None) -> Tensor:
        r"""What the backward map multiplies by: the topics, or :math:`\exp E \log \gamma` where they have a prior."""
        if prior is None:
            return self.probabilities.float()
        concentration = torch.exp(self.log_counts)
        logs = torch.digamma(concentration) - torch.digamma(concentration.sum(-1, keepdim=True))
        return torch.exp(logs).float()

    def ordered(self) -> Topics:
        """The same in order of falling share."""
        order = torch.argsort(torch.exp(self.log_counts).sum(-1), descending=True, stable=True)
        return Topics(self.log_counts[order], self.alpha[order])

    def prior_cost(self, prior: float | None) -> float:
        """Divergence of the topics' Dirichlet distributions from their prior; zero for plain topics."""
        if prior is None:
            return 0.0
        posterior = torch.distributions.Dirichlet(torch.exp(self.log_counts.double()))
        flat = torch.distributions.Dirichlet(torch.full_like(self.log_counts, prior, dtype=torch.float64))
        return float(torch.distributions.kl_divergence(posterior, flat).sum())


@dataclass(frozen=True)
class _Documents(Problem):
    """What both problems share: how a point holds topics and concentrations."""

    structure: Structure
    documents: Documents
    shapes: Shapes
    sweeps: TopicSweeps
    seed: int

    @property
    def rows(self) -> int:
        """Documents."""
        return int(self.documents.shape[0])

    @property
    def topics_key(self) -> str:
        """The name of the topics among the parameters."""
        return self.structure.keys[topic_nodes(self.structure)[1]]["topics"]

    @property
    def alpha_key(self) -> str | None:
        """The name of the concentrations; None if they are given."""
        return self.structure.keys[topic_nodes(self.structure)[0]].get("concentration")

    def topics(self, point: Tensor) -> Topics:
        """What a point (1, P) says."""
        raw = unpack(point.detach(), self.shapes)
        shares, _ = topic_nodes(self.structure)
        alpha = self.structure.naturals(raw)[shares]["concentration"][0].reshape(-1)
        return Topics(raw[self.topics_key][0], alpha.float())

    def point(self, topics: Topics) -> Tensor:
        """The point (1, P) of topics and concentrations."""
        raw = {self.topics_key: topics.log_counts.unsqueeze(0)}
        if self.alpha_key is not None:
            shape = self.shapes[self.alpha_key]
            raw[self.alpha_key] = torch.log(topics.alpha.double()).reshape(1, *shape)
        return pack({key: raw[key].to(torch.float64) for key in self.shapes})

    @property
    def updates(self) -> Updates:
        """Topics may be over-relaxed; words that a topic does not have fall to zero slowly otherwise."""
        return Updates(stretched=columns_of(self.shapes, {self.topics_key}))

    def _part(self, generator: np.random.Generator, least: int = 1000, each: int = 40) -> Documents:
        """Some documents, on which starts are compared (decision 0009): so many, or so many for each topic."""
        most = max(least, each * self.shapes[self.topics_key][-2])
        if self.rows <= most:
            return self.documents
        return self.documents[np.sort(generator.choice(self.rows, most, replace=False))]

    @abstractmethod
    def with_exact_alpha(self, topics: Topics) -> Topics:
        """The same topics with the concentrations that are likeliest at them."""

    def concluded(self, topics: Topics, is_over: Callable[[], bool] = _never) -> tuple[Self, Topics]:
        """Where a fit ends: the problem that its point belongs to, and topics with the likeliest concentrations.

        What takes sweeps asks before each ``is_over`` whether somebody wants the end.
        """
        return self, self.with_exact_alpha(topics)


@dataclass(frozen=True)
class TopicProblem(_Documents):
    """Documents whose shares of topics have a closed-form map; losses are by document.

    Attributes:
        holds_alpha: Whether concentrations stay where they are, as they do while starts are compared.
        drawn_prior: Concentration of the topics' prior with which a concluded fit has drawn them; None if it has not.
    """

    holds_alpha: bool = False

    drawn_prior: float | None = None

    def update(self, point: Tensor) -> tuple[Tensor, LossTerms]:
        """Infer the shares of all documents, then the best topics and alpha for them."""
        after, terms = self.swept(self.topics(point))
        return self.point(after), terms

    def swept(self, before: Topics) -> tuple[Topics, LossTerms]:
        """One sweep: the best topics and alpha for the shares at ``before``, and the terms there.

        The steps of each document start afresh from even shares, in every sweep. Going on from the last sweep's would
        lower the loss a little and ruin the topics: a document's shares then stay with the topics that its words once
        seemed to come from.
        """
        prior, potentials, alpha = self.sweeps.prior, before.potentials(self.sweeps.prior), before.alpha
        counts, logs = torch.zeros_like(potentials), torch.zeros(len(alpha), dtype=torch.float64)
        cost, divergence = torch.zeros(2, 1, dtype=torch.float64)
        for part in batches(self.documents, self.sweeps.batch):
            shares = infer_shares(part, potentials, alpha, even_shares(part, alpha), steps=self.sweeps.share_steps)
            counts += shares.expected_counts(part, potentials)
            logs += torch.log(shares.weights).sum(0).double()
            cost -= shares.log_prob(part).double()
            divergence += shares.kl(alpha).sum().double()
        entropic = (divergence + before.prior_cost(prior)) / self.rows
        terms = LossTerms.of(cost, reconstruction=cost / self.rows, entropic=entropic)
        if self.alpha_key is not None and not self.holds_alpha:
            alpha = newton_concentration(alpha, logs / self.rows)
        return Topics(_log_counts(counts, before, prior), alpha), terms

    def subset(self, rows: int | Tensor, *, coarse: bool = False) -> TopicProblem:
        """Enough documents to compare starts, alpha held."""
        part = self._part(np.random.default_rng([self.seed, 3]))
        return replace(self, documents=part, holds_alpha=True)

    def concluded(
        self, topics: Topics, is_over: Callable[[], bool] = _never, *, rounds: int = 6, same: float = 0.05
    ) -> tuple[Self, Topics]:
        """Plain topics once more without what the map of shares does to them; those with a prior as they are.

        Where sweeps with shares integrated out would give topics back that are known, these end the fit, in turn with
        alpha until it changes by no more than the share ``same``, at most so many rounds; otherwise topics are drawn.
        """
        topics = self.with_exact_alpha(topics)
        if self.sweeps.prior is not None or is_over():
            return self, topics
        for number in range(rounds):
            before = topics.alpha.mean()
            topics = self.with_exact_alpha(self.collapsed(topics, is_over))
            if is_over():
                break
            if number == 0 and self.can_be_drawn and not self.gives_back(topics):
                return self.drawn(topics, is_over)
            if float((topics.alpha.mean() - before).abs()) <= same * float(before):
                break
        return self, topics

    @property
    def can_be_drawn(self) -> bool:
        """Whether words can be assigned one by one: their numbers are whole, and there is more than one topic."""
        return are_whole(self.documents) and self.shapes[self.topics_key][-2] > 1

    def gives_back(self, topics: Topics, sweeps: int = 40) -> bool:
        """Whether documents that these topics would make let sweeps with shares integrated out find them.

        It shows after forty where sweeps lead (decision 0054). What they make of such documents is compared with what
        the words' own topics would tell: its distance from there must be at most that of the latter from the truth,
        which is no matter of the map.
        """
        generator = np.random.default_rng([self.seed, 7])
        part = self._part(generator)
        lengths, truth = np.asarray(part.sum(axis=1), dtype=np.int64), topics.probabilities.double().numpy()
        documents, told = simulated_documents(lengths, truth, topics.alpha.double().numpy(), generator)
        swept = replace(self, documents=documents).collapsed(topics, sweeps=sweeps).probabilities.double().numpy()
        told /= told.sum(1, keepdims=True).clip(min=1)
        return bool(_hellinger(swept, told) <= _hellinger(told, truth))

    def drawn(self, topics: Topics, is_over: Callable[[], bool] = _never) -> tuple[Self, Topics]:
        """Topics, concentrations and a prior of the topics from draws: of some documents, then of all."""
        generator = np.random.default_rng([self.seed, 9])
        words = torch.exp(topics.log_counts.double()).sum(-1).numpy()
        drawn = DrawnTopics(np.sqrt(topics.probabilities.double().numpy()), words, topics.alpha.double().numpy())
        draw = partial(drawn_topics, generator=generator, learns_alpha=self.alpha_key is not None, is_over=is_over)
        part = self._part(generator)
        drawn = draw(part, drawn)
        if part.shape[0] < self.rows:
            drawn = draw(self.documents, drawn, sweeps=10, most=4)  # it is near, and each sweep takes long
        log_counts = np.log(drawn.topics.clip(min=SMALLEST)) + np.log(drawn.words.clip(min=1))[:, None]
        ended = Topics(torch.from_numpy(log_counts), torch.from_numpy(drawn.alpha).to(topics.alpha))
        return replace(self, drawn_prior=drawn.prior), ended

    def collapsed(
        self,
        topics: Topics,
        is_over: Callable[[], bool] = _never,
        *,
        sweeps: int = 60,
        steps: tuple[int, int] = (20, 3),
        end: float = 2e-5,
    ) -> Topics:
        """Topics after sweeps in which each word is told by all others of its document (decision 0053).

        Args:
            topics: Where they are.
            is_over: Whether somebody wants the end.
            sweeps: At most; stray words of topics of bars fall by a tenth in each.
            steps: Of a document in the first sweep, and in later ones.
            end: The probability that a topic's words exchange in a sweep at which they end.
        """
        given: dict[int, Tensor] = {}
        for sweep in range(sweeps):
            if is_over():
                break
            probabilities = topics.probabilities.float()
            counts = torch.zeros_like(probabilities)
            for number, part in enumerate(cell_batches(self.documents, self.sweeps.batch)):
                start = given.get(number, even_shares(part, torch.zeros_like(topics.alpha)))
                made = infer_assignments(part, probabilities, topics.alpha, start, steps=steps[sweep > 0])
                chances, given[number] = made
                counts += part.by_word(part.values.unsqueeze(-1) * chances).T
            topics = replace(topics, log_counts=_log_counts(counts, topics, None))
            if float((topics.probabilities.float() - probabilities).abs().sum(-1).max()) < end:
                break
        return topics

    def with_exact_alpha(self, topics: Topics) -> Topics:
        """Concentrations from draws of the exact distribution of the assignments."""
        if self.alpha_key is None:
            return topics
        generator = np.random.default_rng([self.seed, 5])
        return replace(topics, alpha=exact_alpha(self.documents, topics.probabilities, topics.alpha, generator))

    def at_topics(self, topics: Topics, sweeps: int = 10) -> Topics:
        """The same topics with concentrations learned from documents: by the map on a part, then exactly."""
        if self.alpha_key is None:
            return topics
        part = self._part(np.random.default_rng(self.seed))
        few = replace(self, documents=part)
        learned = replace(topics, alpha=torch.full_like(topics.alpha, 1 / len(topics.alpha)))
        for _ in range(sweeps):
            learned = replace(learned, alpha=few.swept(learned)[0].alpha)
        return self.with_exact_alpha(learned)


# -- pairs of words ---------------------------------------------------------------------------------------------------


def topic_pairs(alpha: Tensor) -> Tensor:
    """Probabilities that two words of a document come from two topics (K, K)."""
    total = alpha.sum()
    return (torch.outer(alpha, alpha) + torch.diag(alpha)) / (total * (total + 1))


@dataclass
class WordPairs:
    """How often two words are together in a document, counted once and kept sparse.

    Attributes:
        counts: Ordered pairs of different words of one document (words, words).
        total: Number of all pairs.
        at_once: Pairs that are made dense at a time: 16 MB.
        kept: Pairs that are kept dense: 100 MB.
    """

    counts: sp.sparse.csr_array
    total: float
    at_once: int = 4_000_000
    kept: int = 25_000_000
    _kept: list[tuple[slice, Tensor]] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def of(cls, documents: Documents) -> WordPairs:
        """Count the pairs of sparse documents; a word that is there n times makes n (n - 1) pairs with itself."""
        documents = documents.astype(np.float64)
        pairs = sp.sparse.csr_array(documents.T @ documents)
        with_itself = documents.copy()
        with_itself.data = np.minimum(with_itself.data, with_itself.data**2)
        pairs = sp.sparse.csr_array(pairs - sp.sparse.diags_array(np.asarray(with_itself.sum(0)).ravel()))
        pairs.eliminate_zeros()
        return cls(pairs, float(pairs.sum()))

    @property
    def words(self) -> Tensor:
        """How often each word is in a pair, as a share (words,)."""
        return torch.from_numpy(np.asarray(self.counts.sum(0), dtype=np.float64).ravel() / self.total)

    def __add__(self, other: WordPairs) -> WordPairs:
        """Pairs of both sets of documents."""
        return WordPairs(sp.sparse.csr_array(self.counts + other.counts), self.total + other.total)

    def blocks(self) -> Iterable[tuple[slice, Tensor]]:
        """Shares of the pairs, dense, some rows at a time; of a small vocabulary they are kept for the next time."""
        if self.counts.shape[0] ** 2 > self.kept:
            return self._blocks()
        self._kept = self._kept or list(self._blocks())
        return self._kept

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        words = self.counts.shape[0]
        rows = max(1, min(words, self.at_once // words))
        for start in range(0, words, rows):
            part = slice(start, min(start + rows, words))
            yield part, torch.from_numpy((self.counts[part].toarray() / self.total).astype(np.float32))

    def expected(self, topics: Tensor, alpha: Tensor, smallest: float = 1e-20) -> tuple[float, Tensor, Tensor]:
        r"""Cross-entropy :math:`-\sum P_{data} \log P_\theta`, and expected counts of the latent topics.

        The second result is how often a topic gave a word (K, words), the third how often two topics met (K, K);
        each sums to one. No probability is below ``smallest``, which keeps logarithms finite in single precision.
        """
        among = topic_pairs(alpha)
        mixed = among @ topics
        ratios = torch.zeros_like(topics)
        loss = 0.0
        for part, seen in self.blocks():
            model = topics[:, part].T @ mixed + smallest
            loss -= float((seen * torch.log(model)).sum())
            ratios[:, part] = topics @ (seen / model).T
        # the pairs are symmetric, so that the product from one side serves both
        return loss, topics * (among @ ratios), among * (ratios @ topics.T)


def pair_concentration(among: Tensor) -> Tensor:
    r"""Concentrations under which topics meet as often as in these shares of pairs of topics (K, K).

    A pair has one topic twice with probability :math:`(1 + s \sum \pi_k^2) / (1 + s)`, where :math:`\alpha = s \pi`.
    """
    share = among.double().sum(-1) / among.double().sum()
    twice, by_chance = among.double().trace() / among.double().sum(), (share**2).sum()
    total = (1 - twice) / (twice - by_chance).clamp(min=1e-9)
    return (share * total).clamp(*ALPHA_RANGE).to(among)


@dataclass(frozen=True)
class PairProblem(_Documents):
    r"""Pairs of words of one document, in the data and in the model.

    With a background, a document about one topic has words :math:`\gamma'_k = (1 - \lambda) \gamma_k + \lambda b`: the
    same LDA, whose topics share what is said everywhere. A point holds how often each topic gave each word itself, so
    that :math:`b` is what the topics leave of the words' frequencies, as EM would update it.

    Attributes:
        common: Background words times their share (words,), where points hold whole topics: those of a concluded fit.
    """

    pairs: WordPairs
    common: Tensor | None = None

    def update(self, point: Tensor) -> tuple[Tensor, LossTerms]:
        """Expected counts of the latent topics of pairs, and concentrations under which topics meet as often."""
        before = self.topics(point)
        own = (1 - self.sweeps.background) * before.probabilities.float()
        whole = own + self._background(before)
        loss, counts, among = self.pairs.expected(whole, before.alpha)
        alpha = before.alpha if self.alpha_key is None else pair_concentration(among)
        terms = LossTerms.of(torch.zeros(1, dtype=torch.float64), direct=torch.tensor([loss], dtype=torch.float64))
        counts = counts * (own / whole.clamp(min=SMALLEST)) if self.sweeps.background else counts
        return self.point(Topics(_log_counts(counts, before, None), alpha)), terms

    def _background(self, topics: Topics) -> Tensor:
        """Words that no topic explains times their share in a document (words,): what topics leave of all words."""
        if not self.sweeps.background:
            return torch.zeros(1)
        left = (self.pairs.words - torch.exp(topics.log_counts.double()).sum(0)).clamp(min=0)
        left = left if float(left.sum()) > 0 else self.pairs.words
        return (self.sweeps.background * left / left.sum()).float()

    def concluded(self, topics: Topics, is_over: Callable[[], bool] = _never) -> tuple[Self, Topics]:
        """The topics of whole documents, which a point then holds, and their concentrations."""
        if not self.sweeps.background:
            return super().concluded(topics, is_over)
        common = self._background(topics)
        whole = (1 - self.sweeps.background) * topics.probabilities.float() + common
        level = torch.logsumexp(topics.log_counts.double(), -1, keepdim=True)
        ended = replace(self, common=common, sweeps=replace(self.sweeps, background=0.0))
        return ended, ended.with_exact_alpha(Topics(level + torch.log(whole.double()), topics.alpha))

    def own(self, topics: Topics) -> Topics:
        """What whole topics have of their own, at a level that leaves the background its share."""
        if self.common is None:
            return topics
        level = torch.softmax(torch.logsumexp(topics.log_counts.double(), -1), 0).unsqueeze(-1)
        counts = level * (topics.probabilities.double() - self.common.double()).clamp(min=SMALLEST)
        return Topics(torch.log(counts), topics.alpha)

    def resumed(self, documents: Documents, seed: int) -> PairProblem:
        """More documents, before a fit is concluded: a point holds what topics have of their own."""
        share = 0.0 if self.common is None else float(self.common.sum())
        pairs, sweeps = self.pairs + WordPairs.of(documents), replace(self.sweeps, background=share)
        return replace(self, documents=documents, pairs=pairs, seed=seed, sweeps=sweeps, common=None)

    def with_exact_alpha(self, topics: Topics) -> Topics:
        """Topics from pairs hold one alpha or another equally well: documents decide."""
        sweeps = replace(self.sweeps, pairs=False, background=0.0)
        whole = TopicProblem(self.structure, self.documents, self.shapes, sweeps, self.seed)
        return whole.at_topics(topics)


@dataclass(frozen=True)
class Repeats:
    """How often documents repeat a word, over how often a model does that draws words independently given shares.

    Attributes:
        ratio: One where the model holds; texts are bursty (above one), titles avoid repeats (below one).
        error: Its standard error, over documents.
        missed: What estimated topics may miss: those of bars, which LDA made, missed 0 to 0.02, and texts 0.15 to 8.
    """

    ratio: float
    error: float
    missed: float = 0.1

    @property
    def as_modelled(self) -> bool:
        """Whether the ratio is one, up to its error and to what estimated topics may miss."""
        return abs(self.ratio - 1) <= max(self.missed, 2 * self.error)


def repeats(documents: Documents, topics: Tensor, alpha: Tensor) -> Repeats:
    r"""Compare pairs of a word with itself in documents with those of the model.

    .. math:: \frac{\sum_d \sum_w x_{dw} (x_{dw} - 1)}{\sum_d n_d (n_d - 1) \, \sum_w P_\theta(w, w)}
    """
    again = documents.copy().astype(np.float64)
    again.data = np.maximum(again.data * (again.data - 1), 0.0)
    seen = np.asarray(again.sum(1)).ravel()
    length = np.asarray(documents.sum(1)).ravel()
    chance = float((topics * (topic_pairs(alpha).to(topics) @ topics)).sum())
    expected = np.maximum(length * (length - 1), 0.0) * chance
    total = max(float(expected.sum()), 1e-300)
    ratio = float(seen.sum()) / total
    error = float(np.sqrt(((seen - ratio * expected) ** 2).sum())) / total
    return Repeats(ratio, error)


# -- starts -----------------------------------------------------------------------------------------------------------


def start_topics(
    documents: Documents, size: int, generator: np.random.Generator, *, first: bool, corner: float = 0.9
) -> Tensor:
    """Topics of the documents that are most unlike each other, each averaged with its neighbours.

    Documents about one topic are the corners of the simplex of all. Successive projection finds them among rank-K
    projections of the word frequencies (Gillis & Vavasis 2014): the longest residual is a corner; it is projected out.
    Further starts look at a random half of the documents. The share ``corner`` of a start is the corner's; the rest is
    the frequency of words, so that no word starts at zero.
    """
    rows = documents.shape[0]
    chosen = np.arange(rows) if first or rows < 4 * size else np.sort(generator.choice(rows, rows // 2, replace=False))
    part = documents[chosen].astype(np.float64)
    lengths = np.maximum(np.asarray(part.sum(1)).ravel(), 1e-12)
    overall = np.asarray(part.sum(0)).ravel()
    overall = overall / overall.sum()
    shares = sp.sparse.csr_array(sp.sparse.diags_array(1 / lengths) @ part)
    # a share's variance is that of its word's frequency; a short document's is larger
    scaled = sp.sparse.diags_array(np.sqrt(np.minimum(lengths / lengths.mean(), 1))) @ shares
    scaled = sp.sparse.csr_array(scaled @ sp.sparse.diags_array(1 / np.sqrt(np.maximum(overall, 1e-12))))
    residual = _project(scaled, min(size, min(scaled.shape)), generator)
    near = max(1, min(len(chosen), max(5, len(chosen) // (20 * size))))
    corners = []
    for _ in range(residual.shape[1]):
        longest = residual[(residual**2).sum(1).argmax()]
        members = np.argpartition(-(residual @ longest), near - 1)[:near]
        direction = residual[members].mean(0)
        direction = direction / max(float(np.linalg.norm(direction)), 1e-12)
        residual = residual - np.outer(residual @ direction, direction)
        corners.append(np.asarray(shares[members].mean(0)).ravel())
    for _ in range(size - len(corners)):
        corners.append(np.asarray(shares[[generator.integers(len(chosen))]].mean(0)).ravel())
    topics = corner * np.stack(corners) + (1 - corner) * overall
    return torch.from_numpy((topics / topics.sum(1, keepdims=True)).astype(np.float32))


def _project(matrix: Documents, rank: int, generator: np.random.Generator) -> Array:
    """Coordinates of the rows along the leading right singular vectors."""
    from scipy.sparse.linalg import svds  # slow to import

    if rank < min(matrix.shape):
        vectors = svds(matrix, k=rank, v0=generator.standard_normal(min(matrix.shape)))[2]
    else:
        vectors = np.linalg.svd(matrix.toarray(), full_matrices=False)[2][:rank]
    return np.asarray(matrix @ vectors.T)


def _log_counts(counts: Tensor, before: Topics, prior: float | None) -> Tensor:
    """Logarithms of the counts and the prior; a topic that no word came from stays as it was, at a low level."""
    level = counts.double() if prior is None else counts.double() + prior
    alive = counts.sum(-1, keepdim=True) > 0
    lost = before.log_counts.double() + np.log(1e-6)
    return torch.where(alive, torch.log(level.clamp(min=SMALLEST)), lost)


def _hellinger(some: Array, others: Array) -> float:
    """Median distance of topics, each with its own: a single one with a stray word tells nothing of the others."""
    return float(np.median(np.linalg.norm(np.sqrt(some) - np.sqrt(others), axis=1)))
