"""Documents: sparse counts of words, fitted by the graph ``shares -> words``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy as sp
import torch
from torch import Tensor

from otpdag.backward import network_parameters
from otpdag.costs import KL
from otpdag.data import Documents
from otpdag.divergences import Wasserstein
from otpdag.engine.adam import Adam
from otpdag.engine.data_kind import DataKind, Layout
from otpdag.engine.method import Method
from otpdag.engine.optimiser import EM
from otpdag.engine.search import Searcher, SearchResult, SearchSchedule, restart_seed
from otpdag.errors import DataError, ModelError
from otpdag.learned.paper_topics import (
    PaperTopics,
    PaperTopicsProblem,
    document_encoder,
    paper_topics_problem,
    paper_topics_start,
)
from otpdag.likelihood.topic_problem import (
    PairProblem,
    Repeats,
    TopicProblem,
    Topics,
    TopicSweeps,
    WordPairs,
    repeats,
    start_topics,
    topic_nodes,
)
from otpdag.likelihood.topic_shares import SMALLEST
from otpdag.model import Model
from otpdag.problem import Problem, split_theta
from otpdag.schedules import Constant
from otpdag.settings import Objective, PushForward
from otpdag.structure import unpack

# updates of plain pairs after which repeats of words are compared: they change by less than 0.02 afterwards
REPEAT_UPDATES = 60

# words that no topic explains, of pairs of words of texts (decision 0032 has the corpora that it was chosen on)
BACKGROUND = 0.8


@dataclass(frozen=True)
class DocumentData(DataKind):
    """Documents that have words."""

    model: Model
    counts: sp.sparse.csr_array

    @classmethod
    def of(cls, model: Model, documents: Documents) -> DocumentData:
        """Check documents against the model, put them in an order of their own; those without words are left out."""
        shares, words = (model.structure.mechanisms[node].space.width for node in topic_nodes(model.structure))
        counts = documents.counts
        if counts.shape[1] != words:
            raise DataError(f"the model has {words} words; the documents have {counts.shape[1]} columns")
        order = documents.canonical_order
        if len(order) < shares:
            raise DataError(
                f"there must be at least as many documents with words as topics, {shares}; got {len(order)} "
                f"(n_samples = {counts.shape[0]})"
            )
        return cls(model, counts[order])

    @property
    def rows(self) -> int:
        """Documents with words."""
        return int(self.counts.shape[0])

    @cached_property
    def repeats(self) -> Repeats | None:
        """How often documents repeat words, over how often LDA would; None if no document has two words.

        LDA draws words independently given a document's shares. Its likelihood is the best use of data for which this
        holds; texts repeat words much more often, and titles less, and their likelihood bends topics to explain that.
        """
        pairs = WordPairs.of(self.counts)
        if pairs.total <= 0:
            return None
        layout = Layout.of(self.model.structure)
        problem = PairProblem(layout.structure, self.counts, layout.shapes, TopicSweeps(pairs=True), 0, pairs)
        point = self.starts(layout, problem, 0, [0])
        for _ in range(REPEAT_UPDATES):
            point, _ = problem.update(point)
        topics = problem.topics(point)
        return repeats(self.counts, topics.probabilities.float(), topics.alpha)

    @property
    def holds(self) -> bool:
        """Whether documents repeat words as the model does, or cannot tell; one topic is how often words occur."""
        topics = self.model.structure.mechanisms[topic_nodes(self.model.structure)[0]].space.width
        return topics < 2 or self.repeats is None or self.repeats.as_modelled

    def named(self, name: str, *, prior: float | None = None, batch: int = 2048, steps: int | None = None) -> Method:
        """``"auto"`` is entropic where documents repeat words as the model does, else pairs of words.

        A prior on the topics needs whole documents. Of pairs, no topic explains some words where the model does not
        hold.
        """
        if name == "transport":
            text = "method='transport' of topics compares pairs of words and moves none: it is called 'pairs' now"
            warnings.warn(text, DeprecationWarning, stacklevel=4)
            name = "pairs"
        if name == "auto":
            name = "likelihood" if prior is not None or self.holds else "pairs"
        background = BACKGROUND if name == "pairs" and not self.holds else 0.0
        return topic_method(name, documents=self.rows, prior=prior, batch=batch, steps=steps, background=background)

    def notes(self, ended: SearchResult) -> list[str]:
        """What the choice of the method was made from, and whether topics were drawn."""
        notes, read = [], self.__dict__.get("repeats")
        if read is not None:
            notes.append(
                f"documents repeat words {read.ratio:.2f} times as often as topics alone would (± {read.error:.2f})"
            )
        prior = getattr(ended.problem, "drawn_prior", None)
        if prior is not None:
            notes.append(
                "many words could be of several topics: topics are the centre of draws from their distribution, with a "
                f"learned Dirichlet prior of concentration {prior:.2g}"
            )
        return notes

    def check(self, method: Method) -> None:
        """Refuse evaluations of other data."""
        if not isinstance(method.evaluation, TopicSweeps | PaperTopics):
            raise ModelError(
                f"documents are evaluated by TopicSweeps or PaperTopics; got {type(method.evaluation).__name__}"
            )

    def restarts(self, method: Method) -> int:
        """Several, of which the best after short runs goes on.

        Of bars, entropic fits lost one in fifty from three starts, none from six; pairs of words have fewer optima. The
        paper's way lost a bar in ten or more from four of seven starts, which its objective shows early.
        """
        if not isinstance(method.evaluation, TopicSweeps):
            return 12
        return 4 if method.evaluation.pairs else 6

    def course(self, method: Method) -> SearchSchedule:
        """Short runs of all starts, the best alone goes on."""
        pairs = isinstance(method.evaluation, TopicSweeps) and method.evaluation.pairs
        return SearchSchedule(short_steps=min(30 if pairs else 10, method.steps), halving=False, finalists=1, moves=0)

    def lay_out(self, method: Method, seed: int) -> Layout:
        """The model's parameters, and those of the paper's encoder."""
        structure = self.model.structure
        if isinstance(method.evaluation, PaperTopics):
            return Layout.of(structure, network_parameters(document_encoder(structure, method.evaluation, seed)))
        return Layout.of(structure)

    def problem(self, layout: Layout, method: Method, seed: int) -> Problem:
        """Documents, pairs of their words, or what the paper's encoder reads."""
        structure, shapes, evaluation = layout.structure, layout.shapes, method.evaluation
        if isinstance(evaluation, PaperTopics):
            return paper_topics_problem(structure, self.counts, shapes, method.objective, evaluation, seed)
        assert isinstance(evaluation, TopicSweeps), "checked before"
        if not evaluation.pairs:
            return TopicProblem(structure, self.counts, shapes, evaluation, seed)
        pairs = WordPairs.of(self.counts)
        if pairs.total <= 0:
            raise DataError("method='pairs' needs documents of at least two words; found none")
        return PairProblem(structure, self.counts, shapes, evaluation, seed, pairs)

    def starts(
        self, layout: Layout, problem: Problem, seed: int, numbers: Sequence[int], units: Tensor | None = None
    ) -> Tensor:
        """Documents that are most unlike each other; the paper's way starts anywhere."""
        structure = layout.structure
        if isinstance(problem, PaperTopicsProblem):
            drawn = [paper_topics_start(structure, problem.settings, restart_seed(seed, number)) for number in numbers]
            return torch.cat([layout.pack(theta) for theta in drawn])
        reader = TopicProblem(structure, self.counts, layout.shapes, TopicSweeps(), seed)
        part = self.counts if isinstance(problem, PairProblem) else reader.subset(0).documents
        size = structure.mechanisms[topic_nodes(structure)[0]].space.width
        points = []
        for number in numbers:
            generator = np.random.default_rng([seed, number])
            topics = start_topics(part, size, generator, first=number == 0).double()
            total = float(self.counts.sum()) if not isinstance(problem, PairProblem) else 1 - problem.sweeps.background
            level = topics * total / size
            points.append(reader.point(Topics(torch.log(level.clamp(min=SMALLEST)), torch.full((size,), 1 / size))))
        return torch.cat(points)

    def concluded(self, ended: SearchResult, searcher: Searcher) -> SearchResult:
        """Concentrations as the exact distribution of the assignments has them, topics in order of falling share."""
        problem = ended.problem
        if not isinstance(problem, TopicProblem | PairProblem):
            return ended
        problem, topics = problem.concluded(problem.topics(ended.point), lambda: searcher.monitor.stopped)
        point = problem.point(topics.ordered())
        restarts = tuple(replace(one, point=point[0]) if one.kept else one for one in ended.restarts)
        return replace(ended, problem=problem, point=point, restarts=restarts)

    def adopt(self, layout: Layout, ended: SearchResult) -> None:
        """Topics and concentrations."""
        theta = split_theta(unpack(ended.point.double(), layout.shapes))[0]
        self.model.adopt(layout.structure, theta)


def topic_method(
    name: str,
    *,
    documents: int,
    prior: float | None = None,
    batch: int = 2048,
    steps: int | None = None,
    background: float = 0.0,
) -> Method:
    """The methods that topics are fitted by.

    Args:
        name: ``"likelihood"``, ``"pairs"`` or ``"paper"``.
        documents: How many there are; the paper counts epochs.
        prior: Concentration of a Dirichlet prior on the topics' words; None makes the topics plain parameters.
        batch: Documents that are taken at a time.
        steps: Most sweeps, updates or, of the paper's way, epochs.
        background: Share of words that no topic explains, of pairs.
    """
    if name == "likelihood":
        growth = 1.1 if prior is None else 1.0
        sweeps = TopicSweeps(prior=prior, batch=batch)
        return Method("likelihood", sweeps.objective, sweeps, EM(steps=steps or 100, growth=growth))
    if name == "pairs":
        sweeps = TopicSweeps(pairs=True, prior=prior, batch=batch, background=background)
        return Method("pairs", sweeps.objective, sweeps, EM(steps=steps or 300))
    if name != "paper":
        raise ModelError(f"method must be 'auto', 'likelihood', 'pairs' or 'paper' for topics; got {name!r}")
    # as the paper's Appendix C.1 has it, for fixed topics and for topics with a distribution
    eta, temperature, epochs = (1e-4, 1.0, 300) if prior is None else (1e-1, 2.0, 1000)
    settings = PaperTopics(drawn=prior is not None, temperature=temperature, batch_size=50)
    in_turn = 2 * (steps or epochs) * -(-documents // settings.batch_size)  # encoder and topics, each on its own
    adam = Adam(steps=in_turn, learning_rate=Constant(1e-3), averaging=0.0, alternating=True)
    return Method("paper", Objective(push_forward=PushForward(eta, Wasserstein(KL()))), settings, adam)
