r"""Fit topics to documents: sparse counts, a batch of which is made dense at a time.

Two methods of the one objective. ``entropic`` is marginal noise and eps = 1 with the closed-form backward map of
:mod:`otpdag.backward.documents`; topics and concentrations have closed-form or Newton updates, so that no gradient is
needed. ``transport`` is the direct term on the simplest thing that shows a topic, two words of one document
(:class:`otpdag.objective.documents.WordPairs`), with the Kullback-Leibler divergence as D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import svds
from torch import Tensor

from otpdag.backward.documents import Cells, drawn_topic_counts, even_shares, infer_shares
from otpdag.engine.monitor import Monitor
from otpdag.objective.documents import WordPairs, document_terms
from otpdag.objective.terms import LossTerms

__all__ = [
    "DocumentOptions",
    "TopicState",
    "alpha_at_topics",
    "fit_entropic",
    "fit_transport",
    "newton_concentration",
    "update_online",
]

Array = NDArray[np.float64]
Documents = sparse.csr_array

FIRST_SWEEPS = 10  # in which alpha is held
SHARE_STEPS, ONLINE_STEPS = 10, 40
FIRST_DOCUMENTS, DOCUMENTS_A_TOPIC = 1000, 40  # starts are compared on a part
ALPHA_CELLS, ALPHA_BURN, ALPHA_SWEEPS = 30_000, 15, 45
SHORT_RUN = 30
DENSE = 0.05  # a share of filled cells below which matrix products cost more than indices
PACE_GROWTH, LONGEST_PACE = 1.1, 4.0
SMALLEST = 1e-30
ALPHA_RANGE = (1e-4, 1e3)


@dataclass(frozen=True)
class DocumentOptions:
    """Settings of a fit of documents.

    Attributes:
        topics: Number of topics K.
        prior: Concentration of the prior on the topics' words; None makes the topics plain parameters.
        alpha: Fixed concentrations (K,); None learns them.
        steps: Most sweeps over the documents, or updates from the pairs.
        tolerance: Relative change of the loss, for three sweeps in a row, at which a fit ends.
        batch: Documents that are made dense at a time.
        restarts: Starts; short runs decide.
    """

    topics: int
    prior: float | None = None
    alpha: Array | None = None
    steps: int = 100
    tolerance: float = 1e-6
    batch: int = 2048
    restarts: int = 1


@dataclass
class TopicState:
    """Where a fit stands: expected counts of words by topic (K, words), which sum to anything, and alpha (K,)."""

    counts: Tensor
    alpha: Tensor
    prior: float | None = None
    loss: float = float("inf")
    converged: bool = False
    steps: int = 0
    seen: float = 0.0
    restart_losses: tuple[float, ...] = ()
    kept: int = 0

    @property
    def topics(self) -> Tensor:
        """Word probabilities (K, words), rows sum to one."""
        counts = self.counts if self.prior is None else self.counts + self.prior
        return counts / counts.sum(-1, keepdim=True)

    @property
    def potentials(self) -> Tensor:
        r"""What the backward map multiplies by: the topics, or :math:`\exp E \log \gamma` where they have a prior."""
        if self.prior is None:
            return self.topics
        concentration = self.counts + self.prior
        return torch.exp(torch.digamma(concentration) - torch.digamma(concentration.sum(-1, keepdim=True)))

    def prior_cost(self) -> float:
        """Divergence of the topics' Dirichlet distributions from their prior; zero for plain topics."""
        if self.prior is None:
            return 0.0
        posterior = torch.distributions.Dirichlet(self.counts.double() + self.prior)
        prior = torch.distributions.Dirichlet(torch.full_like(self.counts, self.prior, dtype=torch.float64))
        return float(torch.distributions.kl_divergence(posterior, prior).sum())


# --- starts ----------------------------------------------------------------------------------------------------------


def start_topics(documents: Documents, size: int, generator: np.random.Generator, *, first: bool) -> Tensor:
    """Topics of the documents that are most unlike each other, each averaged with its neighbours.

    Documents about one topic are the corners of the simplex of all. Successive projection finds them among rank-K
    projections of the word frequencies (Gillis & Vavasis 2014): the longest residual is a corner; it is projected out.
    Further starts look at a random half of the documents.
    """
    rows = documents.shape[0]
    chosen = np.arange(rows) if first or rows < 4 * size else np.sort(generator.choice(rows, rows // 2, replace=False))
    part = documents[chosen].astype(np.float64)
    lengths = np.maximum(np.asarray(part.sum(1)).ravel(), 1e-12)
    overall = np.asarray(part.sum(0)).ravel()
    overall = overall / overall.sum()
    shares = sparse.csr_array(sparse.diags_array(1 / lengths) @ part)
    # a share's variance is that of its word's frequency; a short document's is larger
    scaled = sparse.diags_array(np.sqrt(np.minimum(lengths / lengths.mean(), 1))) @ shares
    scaled = sparse.csr_array(scaled @ sparse.diags_array(1 / np.sqrt(np.maximum(overall, 1e-12))))
    places = _project(scaled, min(size, min(scaled.shape)), generator)
    near = max(1, min(len(chosen), max(5, len(chosen) // (20 * size))))
    found, residual = [], places.copy()
    for _ in range(places.shape[1]):
        corner = residual[(residual**2).sum(1).argmax()]
        members = np.argpartition(-(residual @ corner), near - 1)[:near]
        direction = residual[members].mean(0)
        direction = direction / max(float(np.linalg.norm(direction)), 1e-12)
        residual = residual - np.outer(residual @ direction, direction)
        found.append(np.asarray(shares[members].mean(0)).ravel())
    for _ in range(size - len(found)):
        found.append(np.asarray(shares[[generator.integers(len(chosen))]].mean(0)).ravel())
    topics = 0.9 * np.stack(found) + 0.1 * overall
    return torch.from_numpy((topics / topics.sum(1, keepdims=True)).astype(np.float32))


def _project(matrix: Documents, rank: int, generator: np.random.Generator) -> Array:
    """Coordinates of the rows along the leading right singular vectors."""
    if rank < min(matrix.shape):
        vectors = svds(matrix, k=rank, v0=generator.standard_normal(min(matrix.shape)))[2]
    else:
        vectors = np.linalg.svd(matrix.toarray(), full_matrices=False)[2][:rank]
    return np.asarray(matrix @ vectors.T)


# --- entropic --------------------------------------------------------------------------------------------------------


def batches(documents: Documents, size: int) -> Iterator[Tensor | Cells]:
    """Documents some at a time: dense, or by cells where few are filled."""
    few = documents.nnz < DENSE * documents.shape[0] * documents.shape[1]
    for start in range(0, documents.shape[0], size):
        part = slice(start, min(start + size, documents.shape[0]))
        yield Cells.of(documents[part]) if few else torch.from_numpy(documents[part].toarray().astype(np.float32))


def fit_entropic(
    documents: Documents,
    options: DocumentOptions,
    generator: np.random.Generator,
    monitor: Monitor,
    start: TopicState | None = None,
) -> TopicState:
    """Minimise the entropic objective: the best of several starts on a part, then sweeps over everything."""
    if start is not None:
        state, losses = start, start.restart_losses
    else:
        part = _part(documents, max(FIRST_DOCUMENTS, DOCUMENTS_A_TOPIC * options.topics), generator)
        first = min(FIRST_SWEEPS, options.steps)
        runs = []
        for number in range(options.restarts):
            topics = start_topics(part, options.topics, generator, first=number == 0)
            state = TopicState(topics * float(part.sum()) / options.topics, _first_alpha(options), options.prior)
            monitor.stage(f"start {number + 1}", first, (number,))
            runs.append(_first_sweeps(part, state, options, first, monitor))
        losses = tuple(run.loss for run in runs)
        state = runs[int(np.argmin(losses))]
        state = replace(state, counts=state.counts * float(documents.sum() / part.sum()))
    kept = int(np.argmin(losses)) if losses else 0
    state = _sweeps(documents, replace(state, restart_losses=losses, kept=kept), options, monitor)
    if options.alpha is None:
        state.alpha = exact_alpha(documents, state, generator)
    return state


def _part(documents: Documents, most: int, generator: np.random.Generator) -> Documents:
    if documents.shape[0] <= most:
        return documents
    return documents[np.sort(generator.choice(documents.shape[0], most, replace=False))]


def _first_alpha(options: DocumentOptions) -> Tensor:
    if options.alpha is not None:
        return torch.from_numpy(options.alpha.astype(np.float32))
    return torch.full((options.topics,), 1 / options.topics)


def _first_sweeps(
    documents: Documents, state: TopicState, options: DocumentOptions, sweeps: int, monitor: Monitor
) -> TopicState:
    """Sweeps with alpha held where it is."""
    for sweep in range(sweeps):
        state, terms = _sweep(documents, state, options, SHARE_STEPS, learn_alpha=False)
        monitor.record("start", sweep, terms.as_floats(0), keep=False, losses=[state.loss])
    return replace(state, steps=sweeps)


def _sweeps(documents: Documents, state: TopicState, options: DocumentOptions, monitor: Monitor) -> TopicState:
    monitor.stage("fit", options.steps, (state.kept,))
    small, pace = 0, 1.0
    for step in range(state.steps, options.steps):
        before, topics = state.loss, state.topics
        state, terms = _sweep(documents, state, options, SHARE_STEPS, learn_alpha=options.alpha is None)
        pace = _next_pace(pace, before, state.loss)
        state.counts = state.counts if state.prior is not None else _stretched(topics, state.counts, pace)
        state.steps = step + 1
        small = small + 1 if abs(before - state.loss) <= options.tolerance * (1 + abs(state.loss)) else 0
        state.converged = small >= 3
        if monitor.record("fit", step, terms.as_floats(0), keep=True, losses=[state.loss]) or state.converged:
            break
    return state


def _sweep(
    documents: Documents, state: TopicState, options: DocumentOptions, steps: int, *, learn_alpha: bool
) -> tuple[TopicState, LossTerms]:
    """Infer the shares of all documents, then set topics and alpha to the best for them; losses by document.

    The steps of each document start afresh from even shares, in every sweep. Going on from the last sweep's would lower
    the loss a little and ruin the topics: a document's shares then stay with the topics that its words once seemed to
    come from.
    """
    topics, alpha = state.potentials, state.alpha
    found, logs = torch.zeros_like(topics), torch.zeros(len(alpha), dtype=torch.float64)
    terms = LossTerms.of(torch.zeros(1, dtype=torch.float64))
    for counts in batches(documents, options.batch):
        shares = infer_shares(counts, topics, alpha, even_shares(counts, alpha), steps=steps)
        found += shares.expected_counts(counts, topics)
        logs += torch.log(shares.weights).sum(0).double()
        terms = terms + document_terms(counts, shares, alpha)
    rows = documents.shape[0]
    total = LossTerms.of(
        terms.total, reconstruction=terms.reconstruction / rows,
        entropic=(terms.entropic + state.prior_cost()) / rows,
    )  # fmt: skip
    learned = newton_concentration(alpha, logs / rows) if learn_alpha else alpha
    loss = float(total.total)
    return replace(state, counts=_alive(found, state.counts), alpha=learned, loss=loss), total


def _alive(found: Tensor, before: Tensor) -> Tensor:
    """A topic that no word came from stays as it was."""
    return torch.where(found.sum(-1, keepdim=True) > 0, found, before * 1e-6)


def _next_pace(pace: float, before: float, loss: float) -> float:
    return min(PACE_GROWTH * pace, LONGEST_PACE) if loss <= before else 1.0


def _stretched(topics: Tensor, counts: Tensor, pace: float) -> Tensor:
    r"""Go further where the closed-form update points (Salakhutdinov & Roweis 2003).

    .. math:: \gamma' \propto \gamma \, (\hat\gamma / \gamma)^{\mathrm{pace}}.

    Words that a topic does not have fall to zero slowly otherwise. A pace that raised the loss is given up.
    """
    total = counts.sum(-1, keepdim=True)
    line, target = torch.log(topics.clamp(min=SMALLEST)), torch.log((counts / total).clamp(min=SMALLEST))
    return torch.softmax(line + pace * (target - line), -1) * total


def newton_concentration(alpha: Tensor, mean_logs: Tensor, steps: int = 8) -> Tensor:
    """Concentrations that are likeliest for these mean logarithms of shares, by Newton's method (Minka 2000)."""
    a, logs = alpha.double(), mean_logs.double()
    for _ in range(steps):
        gradient = torch.digamma(a.sum()) - torch.digamma(a) + logs
        curvature, common = -torch.polygamma(1, a), torch.polygamma(1, a.sum())
        shift = (gradient / curvature).sum() / (1 / common + (1 / curvature).sum())
        moved = a - (gradient - shift) / curvature
        a = torch.where(moved > 0, moved, a / 2).clamp(*ALPHA_RANGE)
    return a.to(alpha)


def exact_alpha(documents: Documents, state: TopicState, generator: np.random.Generator) -> Tensor:
    """Concentrations that are likeliest at the topics found, by draws from the exact distribution of the assignments.

    The closed-form backward map is too sharp in short documents, which makes concentrations too small: 8 % for a
    hundred words of ten topics. Stochastic EM on some documents removes that. Counts that are not whole cannot be
    drawn; their concentrations stay as they are.
    """
    if not np.equal(documents.data, np.floor(documents.data)).all():
        return state.alpha
    filled = np.flatnonzero(np.diff(documents.indptr))
    cells = max(1.0, documents.nnz / max(1, len(filled)))
    many = min(len(filled), max(200, int(ALPHA_CELLS / cells)))
    part = documents[np.sort(generator.choice(filled, many, replace=False))]
    alpha = state.alpha.double().numpy().copy()
    logs, kept = None, []
    sweeps = drawn_topic_counts(part, state.topics.double().numpy(), alpha, generator, ALPHA_BURN + ALPHA_SWEEPS)
    for number, found in enumerate(sweeps):
        if number < ALPHA_BURN:
            continue
        shape = torch.from_numpy(alpha + found)
        now = (torch.digamma(shape) - torch.digamma(shape.sum(-1, keepdim=True))).mean(0)
        logs = now if logs is None else 0.8 * logs + 0.2 * now
        alpha[:] = newton_concentration(torch.from_numpy(alpha), logs).numpy()
        if number >= ALPHA_BURN + ALPHA_SWEEPS // 2:
            kept.append(alpha.copy())
    return torch.from_numpy(np.mean(kept, 0)).to(state.alpha)


def alpha_at_topics(
    documents: Documents, state: TopicState, options: DocumentOptions, generator: np.random.Generator
) -> Tensor:
    """Concentrations that are likeliest at given topics: those of the closed-form map on a part, then exact ones."""
    part = _part(documents, max(FIRST_DOCUMENTS, DOCUMENTS_A_TOPIC * options.topics), generator)
    found = replace(state, alpha=_first_alpha(options))
    for _ in range(FIRST_SWEEPS):
        swept, _ = _sweep(part, found, options, SHARE_STEPS, learn_alpha=True)
        found = replace(found, alpha=swept.alpha)
    return exact_alpha(documents, found, generator)


def update_online(documents: Documents, state: TopicState, options: DocumentOptions) -> TopicState:
    """One step of stochastic natural gradients (Hoffman, Blei & Bach 2010): a batch in place of all documents.

    The expected counts of a batch stand for those of all documents seen so far. Its weight is the share of its
    documents among them, to the power 0.7: old batches, whose topics were worse, are forgotten slowly.
    """
    seen = state.seen + documents.shape[0]
    pace = (documents.shape[0] / seen) ** 0.7
    found, _ = _sweep(documents, state, options, ONLINE_STEPS, learn_alpha=options.alpha is None)
    before = state.counts * (seen / max(state.seen, documents.shape[0]))
    counts = (1 - pace) * before + pace * found.counts * (seen / documents.shape[0])
    alpha = state.alpha + pace * (found.alpha - state.alpha)
    return replace(found, counts=counts, alpha=alpha, seen=seen, steps=state.steps + 1)


# --- transport -------------------------------------------------------------------------------------------------------


def fit_transport(
    pairs: WordPairs,
    starts: Callable[[int], Tensor],
    options: DocumentOptions,
    monitor: Monitor,
    start: TopicState | None = None,
) -> TopicState:
    """Minimise the divergence between the data's word pairs and the model's: short runs from each start, then the best.

    Args:
        pairs: The pairs of the data.
        starts: Topics of the start of a given number.
        options: Settings.
        monitor: Where to report.
        start: A state to go on from.
    """
    state = start
    if state is None:
        runs = []
        for number in range(options.restarts):
            monitor.stage(f"start {number + 1}", SHORT_RUN, (number,), objective=pairs)
            first = TopicState(starts(number), _first_alpha(options))
            runs.append(_follow(pairs, first, options, min(SHORT_RUN, options.steps), monitor, keep=False))
        losses = tuple(run.loss for run in runs)
        state = replace(runs[int(np.argmin(losses))], restart_losses=losses, kept=int(np.argmin(losses)))
    monitor.stage("fit", options.steps, (state.kept,), objective=pairs)
    return _follow(pairs, state, options, options.steps, monitor, keep=True)


def _follow(
    pairs: WordPairs, state: TopicState, options: DocumentOptions, steps: int, monitor: Monitor, *, keep: bool
) -> TopicState:
    small, pace = 0, 1.0
    for step in range(state.steps, steps):
        loss, counts, among = pairs.expected(state.topics, state.alpha)
        alpha = state.alpha if options.alpha is not None else _pair_concentration(among)
        small = small + 1 if abs(state.loss - loss) <= options.tolerance * (1 + abs(loss)) else 0
        pace = _next_pace(pace, state.loss, loss)
        counts = _stretched(state.topics, _alive(counts, state.counts), pace)
        state = replace(state, counts=counts, alpha=alpha, loss=loss, steps=step + 1, converged=small >= 3)
        entry = LossTerms.of(torch.zeros(1), direct=torch.tensor([loss])).as_floats(0)
        if monitor.record("fit", step, entry, keep=keep, losses=[loss]) or state.converged:
            break
    return state


def _pair_concentration(among: Tensor) -> Tensor:
    r"""Concentrations under which topics meet as often as in these shares of pairs of topics (K, K).

    A pair has one topic twice with probability :math:`(1 + s \sum \pi_k^2) / (1 + s)`, where :math:`\alpha = s \pi`.
    """
    share = among.double().sum(-1) / among.double().sum()
    twice, by_chance = among.double().trace() / among.double().sum(), (share**2).sum()
    total = (1 - twice) / (twice - by_chance).clamp(min=1e-9)
    return (share * total).clamp(*ALPHA_RANGE).to(among)
