r"""The paper's own way to topics (Section 5.1 and Appendix C.1), kept as it is written.

An LSTM reads the words of a document and gives each a distribution over topics, from which a relaxed assignment
:math:`\tilde z` is drawn; the word is rebuilt by :math:`\mathrm{Cat\text{-}Concrete}(\mathrm{softmax}(\tilde z^\top
\gamma))` at a cross-entropy cost. The push-forward term is the exact Wasserstein distance between the documents' mean
assignments and draws of the softmax-Gaussian that approximates :math:`\mathrm{Dir}(\alpha)`, with the Kullback-Leibler
divergence as ground cost. With a Dirichlet distribution of the topics, :math:`\gamma` is drawn anew at every step from
the softmax-Gaussian with log-concentrations :math:`\beta`. Adam with a learning rate of 1e-3 and batches of 50, as
published, falling to zero along a cosine. A matrix of counts has no order of words: they come in random order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn
from torch.func import functional_call

from otpdag.costs import KL
from otpdag.divergences import Wasserstein
from otpdag.engine.adam import descend
from otpdag.engine.documents import DocumentOptions, TopicState
from otpdag.engine.method import Method
from otpdag.engine.monitor import Monitor
from otpdag.image_networks import seeded
from otpdag.layers import gumbel_softmax
from otpdag.mechanisms.dirichlet import laplace_moments
from otpdag.objective import Streams
from otpdag.objective.terms import LossTerms
from otpdag.structure import pack, unpack

__all__ = ["PaperOptions", "fit_paper"]

Documents = sparse.csr_array


@dataclass(frozen=True)
class PaperOptions:
    """Settings of Appendix C.1; temperature and eta are those of fixed topics and of topics with a distribution.

    Attributes:
        temperatures: Of the relaxed draws, tau.
        etas: Weights of the push-forward term.
        learning_rate: Of Adam.
        batch: Documents in a step.
        hidden: Units of the LSTM.
    """

    temperatures: tuple[float, float] = (1.0, 2.0)
    etas: tuple[float, float] = (1e-4, 1e-1)
    learning_rate: float = 1e-3
    batch: int = 50
    hidden: int = 64

    def at(self, *, drawn: bool) -> tuple[float, float]:
        """Temperature and eta."""
        return self.temperatures[drawn], self.etas[drawn]


class _Encoder(nn.Module):
    """The backward map: an LSTM over the words of a document."""

    def __init__(self, words: int, topics: int, hidden: int) -> None:
        super().__init__()
        self.read = nn.Embedding(words, hidden)  # a linear layer of one-hot words
        self.recur = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, topics)

    def forward(self, words: Tensor) -> Tensor:
        """Log-probabilities of the topics of each word (documents, words, K)."""
        return torch.log_softmax(self.head(self.recur(self.read(words))[0]), -1)


@dataclass
class _PaperProblem:
    """The paper's loss of a minibatch of documents, as :func:`otpdag.engine.adam.descend` minimises it."""

    documents: Sequence[Tensor]
    encoder: _Encoder
    method: Method
    drawn: bool
    alpha: Tensor | None
    """Concentrations that the user gave."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def start(self, words: int, topics: int, streams: Streams) -> Tensor:
        """Random topics, even shares, and the encoder's own parameters."""
        gamma = 0.1 * torch.randn(1, topics, words, generator=streams.generators[0])
        theta = {"topics.gamma": gamma}
        if self.alpha is None:
            theta["shares.log_alpha"] = torch.zeros(1, topics)
        phi = {f"phi.{name}": value.detach().unsqueeze(0) for name, value in self.encoder.named_parameters()}
        self.shapes = {key: tuple(value.shape[1:]) for key, value in (theta | phi).items()}
        return pack(theta | phi)

    def sampled(self, flat: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Reconstruction and push-forward terms."""
        found = {name: value[0] for name, value in unpack(flat, self.shapes).items()}
        words, there = self._batch(streams)
        encoder = {name.removeprefix("phi."): value for name, value in found.items() if name.startswith("phi.")}
        log_q = functional_call(self.encoder, encoder, (words,))
        cost = self._reconstruction(log_q, words, there, found["topics.gamma"], streams.generators[0])
        shares = (torch.exp(log_q) * there.unsqueeze(-1)).sum(1) / there.sum(1, keepdim=True)
        prior = self._prior(self.concentrations(found), len(shares), streams.generators[0])
        apart = self.method.divergence(shares.unsqueeze(0), prior.unsqueeze(0), generator=streams.shared)
        cost = cost.reshape(1)
        return LossTerms.of(cost, reconstruction=cost, divergence=self.method.at("eta", progress) * apart)

    def _batch(self, streams: Streams) -> tuple[Tensor, Tensor]:
        rows = streams.rows(len(self.documents), self.method.batch_size)[0].tolist()
        chosen = [self.documents[row] for row in rows]
        there = [torch.ones(len(one)) for one in chosen]
        pad = nn.utils.rnn.pad_sequence
        return pad(chosen, batch_first=True), pad(there, batch_first=True)

    def _reconstruction(
        self, log_q: Tensor, words: Tensor, there: Tensor, gamma: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Cross-entropy of words that are rebuilt from relaxed assignments with relaxed noise of their own."""
        temperature = self.method.at("temperature", 0.0)
        relaxed = gumbel_softmax(log_q, torch.rand(log_q.shape, generator=generator), temperature)
        rebuilt = torch.log_softmax(relaxed @ self.logits(gamma, generator), -1)
        uniform = torch.rand(rebuilt.shape, generator=generator).clamp(1e-9, 1 - 1e-7)
        line = torch.log_softmax((rebuilt - torch.log(-torch.log(uniform))) / temperature, -1)
        return -(line.gather(-1, words.unsqueeze(-1)).squeeze(-1) * there).sum() / there.sum()

    def logits(self, gamma: Tensor, generator: torch.Generator) -> Tensor:
        """Topics in the paper's scale: parameters, or drawn at log-concentrations."""
        return _softmax_gaussian(gamma, generator, gamma.shape[-2]) if self.drawn else gamma

    def topics(self, gamma: Tensor) -> Tensor:
        """Word probabilities: the softmax of the topics' logits, or of their mean."""
        return torch.softmax(laplace_moments(torch.exp(gamma))[0] if self.drawn else gamma, -1)

    def concentrations(self, found: dict[str, Tensor]) -> Tensor:
        """Alpha, learned or given."""
        return torch.exp(found["shares.log_alpha"]) if self.alpha is None else self.alpha

    def _prior(self, alpha: Tensor, many: int, generator: torch.Generator) -> Tensor:
        """Shares drawn from the softmax-Gaussian with concentrations alpha."""
        return torch.softmax(_softmax_gaussian(torch.log(alpha), generator, many), -1)


def _softmax_gaussian(log_concentrations: Tensor, generator: torch.Generator, many: int) -> Tensor:
    """Logits (many, n) of the softmax-Gaussian that approximates a Dirichlet distribution."""
    mean, variance = laplace_moments(torch.exp(log_concentrations))
    return mean + torch.sqrt(variance) * torch.randn(many, mean.shape[-1], generator=generator)


def fit_paper(
    documents: Documents,
    options: DocumentOptions,
    settings: PaperOptions,
    generator: np.random.Generator,
    monitor: Monitor,
) -> TopicState:
    """Run Algorithm 1 for ``options.steps`` epochs."""
    drawn, rounds = options.prior is not None, math.ceil(documents.shape[0] / settings.batch)
    temperature, eta = settings.at(drawn=drawn)
    method = Method(
        "paper", noise="sampled", eta=eta, temperature=temperature, divergence=Wasserstein(KL()), optimiser="adam",
        steps=options.steps * rounds, learning_rate=settings.learning_rate, batch_size=settings.batch, averaging=0.0,
    )  # fmt: skip
    seed = int(generator.integers(2**31))
    encoder = seeded(lambda: _Encoder(documents.shape[1], options.topics, settings.hidden), seed)
    alpha = None if options.alpha is None else torch.from_numpy(options.alpha).float()
    problem = _PaperProblem(_sequences(documents, generator), encoder, method, drawn, alpha)
    streams = Streams([seed])
    monitor.stage("fit", options.steps)
    recent: list[dict[str, float]] = []

    def on_step(step: int, terms: LossTerms) -> bool:
        recent.append(terms.as_floats(0))
        if len(recent) < rounds:
            return False
        means = {name: float(np.mean([one[name] for one in recent])) for name in recent[0]}
        recent.clear()
        return monitor.record("fit", step // rounds, means, keep=True, losses=[means["loss"]])

    start = problem.start(documents.shape[1], options.topics, streams)
    outcome = descend(problem, start, streams, steps=method.steps, on_step=on_step)
    found = {name: value[0] for name, value in unpack(outcome.point, problem.shapes).items()}
    topics = problem.topics(found["topics.gamma"])
    return TopicState(
        topics, problem.concentrations(found), loss=float(outcome.loss[0]), steps=outcome.steps // rounds,
        converged=bool(outcome.settled[0]),
    )  # fmt: skip


def _sequences(documents: Documents, generator: np.random.Generator) -> list[Tensor]:
    """Word numbers of each document, in random order; fractions are rounded, and no document is left empty."""
    found = []
    for at in range(documents.shape[0]):
        part = slice(documents.indptr[at], documents.indptr[at + 1])
        often = np.maximum(np.rint(documents.data[part]), 1).astype(np.int64)
        found.append(
            torch.from_numpy(generator.permutation(np.repeat(documents.indices[part], often)).astype(np.int64))
        )
    return found
