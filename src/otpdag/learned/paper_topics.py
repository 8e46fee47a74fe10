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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, log_softmax, nn

from otpdag.backward import apply_network, network_parameters
from otpdag.data.documents import shuffled_words
from otpdag.layers import gumbel_softmax
from otpdag.learned.algorithm import Algorithm1, Family, Step
from otpdag.learned.image_networks import seeded
from otpdag.likelihood.topic_problem import topic_nodes
from otpdag.mechanisms.dirichlet import laplace_moments
from otpdag.noise import Streams
from otpdag.settings import Objective
from otpdag.structure import Structure, Theta


class WordEncoder:
    """An LSTM over the words of a document (Appendix C.1 of the paper).

    Args:
        words: Size of the vocabulary.
        topics: Number of topics.
        hidden: Units of the LSTM.
        seed: Of its parameters as they start.
    """

    def __init__(self, words: int, topics: int, hidden: int, seed: int) -> None:
        self.module = seeded(lambda: _Reader(words, topics, hidden), seed)

    def init(self) -> dict[str, Tensor]:
        """The network's own parameters, with a replica axis of one."""
        return network_parameters(self.module)

    def log_probs(self, phi: Theta, words: Tensor) -> Tensor:
        """Log-probabilities of the topics of each word (documents, words, K)."""
        return apply_network(self.module, phi, words)


class _Reader(nn.Module):
    def __init__(self, words: int, topics: int, hidden: int) -> None:
        super().__init__()
        self.read = nn.Embedding(words, hidden)  # a linear layer of one-hot words
        self.recur = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, topics)

    def forward(self, words: Tensor) -> Tensor:
        return log_softmax(self.head(self.recur(self.read(words))[0]), -1)


@dataclass(frozen=True)
class PaperTopics:
    """The evaluation of Appendix C.1, for Adam.

    Args:
        drawn: Whether topics have a Dirichlet distribution, and are drawn anew at every step.
        temperature: Of the relaxed draws, tau.
        batch_size: Documents in a step.
        hidden: Units of the LSTM.
    """

    drawn: bool = False
    temperature: float = 1.0
    batch_size: int = 50
    hidden: int = 64


@dataclass(frozen=True)
class PaperTopicsProblem(Algorithm1):
    """The paper's loss of a minibatch of documents."""

    structure: Structure
    documents: Sequence[Tensor]
    encoder: WordEncoder
    shapes: Mapping[str, tuple[int, ...]]
    objective: Objective
    settings: PaperTopics

    @property
    def rows(self) -> int:
        """Documents."""
        return len(self.documents)

    def steps(self, theta: Theta, phi: Theta, streams: Streams, progress: float) -> Iterator[Step]:
        """Words rebuilt from relaxed topics; mean assignments of documents beside shares that the prior draws."""
        shares_node, words_node = topic_nodes(self.structure)
        gamma = theta[self.structure.keys[words_node]["topics"]][0]
        words, there = self._batch(streams)
        log_q = self.encoder.log_probs(phi, words)
        cost = self._reconstruction(log_q, words, there, gamma, streams.generators[0]).reshape(1)
        alpha = self.structure.naturals(theta)[shares_node]["concentration"][0].reshape(-1).to(gamma)
        shares = (torch.exp(log_q) * there.unsqueeze(-1)).sum(1) / there.sum(1, keepdim=True)
        yield Step(cost, self._families(shares, alpha, streams.generators[0]))

    def _families(self, shares: Tensor, alpha: Tensor, generator: torch.Generator) -> Iterator[Family]:
        prior = torch.softmax(_softmax_gaussian(torch.log(alpha), generator, len(shares)), -1)
        yield Family(shares.unsqueeze(0), prior.unsqueeze(0))

    def _batch(self, streams: Streams) -> tuple[Tensor, Tensor]:
        rows = streams.rows(len(self.documents), self.settings.batch_size)[0].tolist()
        chosen = [self.documents[row] for row in rows]
        there = [torch.ones(len(one)) for one in chosen]
        pad = nn.utils.rnn.pad_sequence
        return pad(chosen, batch_first=True), pad(there, batch_first=True)

    def _reconstruction(
        self, log_q: Tensor, words: Tensor, there: Tensor, gamma: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Cross-entropy of words that are rebuilt from relaxed assignments with relaxed noise of their own.

        Places behind the end of shorter documents are left out: each would take as many draws as there are words.
        """
        temperature, seen = self.settings.temperature, there > 0
        log_q, words = log_q[seen], words[seen]
        relaxed = gumbel_softmax(log_q, torch.rand(log_q.shape, generator=generator), temperature)
        logits = _softmax_gaussian(gamma, generator, gamma.shape[-2]) if self.settings.drawn else gamma
        rebuilt = torch.log_softmax(relaxed @ logits, -1)
        uniform = torch.rand(rebuilt.shape, generator=generator).clamp(1e-9, 1 - 1e-7)
        line = torch.log_softmax((rebuilt - torch.log(-torch.log(uniform))) / temperature, -1)
        return -line.gather(-1, words.unsqueeze(-1)).mean()


def _softmax_gaussian(log_concentrations: Tensor, generator: torch.Generator, many: int) -> Tensor:
    """Logits (many, n) of the softmax-Gaussian that approximates a Dirichlet distribution."""
    mean, variance = laplace_moments(torch.exp(log_concentrations))
    return mean + torch.sqrt(variance) * torch.randn(many, mean.shape[-1], generator=generator)


def paper_topics_start(structure: Structure, settings: PaperTopics, seed: int) -> dict[str, Tensor]:
    """Random topics, even shares, and the encoder's own parameters: (1, ...)."""
    generator = torch.Generator().manual_seed(seed)
    parameters = structure.parameters()
    topics = structure.keys[topic_nodes(structure)[1]]["topics"]
    theta = {key: torch.zeros(1, *parameter.shape) for key, parameter in parameters.items()}
    theta[topics] = 0.1 * torch.randn(1, *parameters[topics].shape, generator=generator)
    return theta | word_encoder(structure, settings, seed).init()


def word_encoder(structure: Structure, settings: PaperTopics, seed: int) -> WordEncoder:
    """The encoder of the words of a structure's documents."""
    shares, words = (structure.mechanisms[node].space.width for node in topic_nodes(structure))
    return WordEncoder(words, shares, settings.hidden, seed)


def paper_topics_problem(
    structure: Structure,
    documents: sparse.csr_array,
    shapes: Mapping[str, tuple[int, ...]],
    objective: Objective,
    settings: PaperTopics,
    seed: int,
) -> PaperTopicsProblem:
    """Documents as words in random order."""
    encoder = word_encoder(structure, settings, seed)
    words = shuffled_words(documents, np.random.default_rng([seed, 9]))
    return PaperTopicsProblem(structure, words, encoder, shapes, objective, settings)
