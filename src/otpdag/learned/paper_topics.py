r"""The paper's own way to topics (Section 4.1 and Appendix C.1).

An encoder gives a document **one distribution over topics**, from which a relaxed one-hot vector :math:`\tilde z` is
drawn. The document's words are rebuilt by :math:`\mathrm{Cat\text{-}Concrete}(\mathrm{softmax}(\tilde z^\top \gamma))`
at the cost of their cross-entropy. The push-forward term is the exact Wasserstein distance between the draws of a batch
and draws of the softmax-Gaussian that approximates :math:`\mathrm{Dir}(\alpha)`. With a Dirichlet distribution of the
topics, :math:`\gamma` is drawn anew at every step from the softmax-Gaussian with log-concentrations :math:`\beta`.

The cost of a document's words is linear in their counts, so that counts serve as well as one-hot sequences, and are
much faster; ``reads="words"`` is the encoder as printed, an LSTM over the words, in random order where a matrix of
counts has none. Logits are normalised over a batch (decided by what works; docs/methods.md has the list).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy as sp
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from otpdag.backward import apply_network, network_parameters
from otpdag.data.documents import shuffled_words
from otpdag.errors import check_choice
from otpdag.layers import gumbel_softmax
from otpdag.learned.algorithm import Algorithm1, Family, Step
from otpdag.learned.image_networks import seeded
from otpdag.likelihood.topic_problem import topic_nodes
from otpdag.mechanisms.dirichlet import laplace_moments
from otpdag.noise import Streams
from otpdag.settings import Objective
from otpdag.structure import Shapes, Structure, Theta


@dataclass(frozen=True)
class PaperTopics:
    """The evaluation of Appendix C.1, for Adam.

    Args:
        drawn: Whether topics have a Dirichlet distribution, and are drawn anew at every step.
        temperature: Of the relaxed draws, tau.
        batch_size: Documents in a step.
        reads: What the encoder sees of a document: its ``"counts"``, or its ``"words"`` one after another.
        hidden: Units of the encoder.
    """

    drawn: bool = False
    temperature: float = 1.0
    batch_size: int = 50
    reads: Literal["counts", "words"] = "counts"
    hidden: int = 50

    def __post_init__(self) -> None:
        """Refuse encoders that are not there."""
        check_choice("reads", self.reads, ("counts", "words"))


class DocumentEncoder(nn.Module):
    """Logits of a document's topics: words embedded, read by an LSTM or not, averaged, and two linear layers.

    Logits have mean zero and a learned spread over a batch: without it some topics are never drawn, and never learned.

    Args:
        words: Size of the vocabulary.
        topics: Number of topics.
        settings: Sizes, and what is read.
    """

    def __init__(self, words: int, topics: int, settings: PaperTopics) -> None:
        super().__init__()
        self.embed = nn.Linear(words, settings.hidden)
        self.recur = nn.LSTM(settings.hidden, settings.hidden, batch_first=True) if settings.reads == "words" else None
        self.head = nn.Linear(settings.hidden, topics)
        self.spread = nn.Parameter(torch.ones(topics))

    def forward(self, documents: Tensor) -> Tensor:
        """Of counts (documents, words), or numbers of words (documents, longest), -1 behind the end."""
        if self.recur is None:
            read = self.embed(documents.shape[1] * documents / documents.sum(1, keepdim=True))
        else:
            there = (documents >= 0).unsqueeze(-1)
            states = self.recur(self.embed.weight.T[documents.clamp(min=0)] + self.embed.bias)[0]
            read = (states * there).sum(1) / there.sum(1)
        logits = self.head(softplus(read))
        centred = logits - logits.mean(0)
        return self.spread * centred / (centred.square().mean(0) + 1e-5).sqrt()


@dataclass(frozen=True)
class PaperTopicsProblem(Algorithm1):
    """The paper's loss of a minibatch of documents.

    Attributes:
        words: The words of each document (documents, longest), -1 behind the end, where they are read one after
            another.
    """

    structure: Structure
    counts: sp.sparse.csr_array
    words: Tensor | None
    encoder: DocumentEncoder
    shapes: Shapes
    objective: Objective
    settings: PaperTopics

    @property
    def rows(self) -> int:
        """Documents."""
        return int(self.counts.shape[0])

    def steps(self, theta: Theta, phi: Theta, streams: Streams, progress: float) -> Iterator[Step]:
        """Documents rebuilt from relaxed topics; these beside shares that the prior draws."""
        shares_node, words_node = topic_nodes(self.structure)
        gammas = theta[self.structure.keys[words_node]["topics"]]
        rows = streams.rows(self.rows, self.settings.batch_size)
        encoders = [{key: value[[replica]] for key, value in phi.items()} for replica in range(len(streams))]
        each = zip(rows, gammas, encoders, streams.generators, strict=True)
        rebuilt = [self._rebuilt(*one) for one in each]
        topics, costs = (torch.stack(parts) for parts in zip(*rebuilt, strict=True))
        alpha = self.structure.naturals(theta)[shares_node]["concentration"].flatten(1).to(gammas)
        yield Step(costs, self._families(topics, alpha, streams))

    def _rebuilt(self, rows: Tensor, gamma: Tensor, phi: Theta, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Relaxed topics of one replica's documents, and the mean cost of the words that are rebuilt from them."""
        counts = torch.from_numpy(self.counts[rows.numpy()].toarray()).to(gamma)
        read = counts if self.words is None else self.words[rows]
        log_q = torch.log_softmax(apply_network(self.encoder, phi, read), -1)
        topics = gumbel_softmax(log_q, torch.rand(log_q.shape, generator=generator), self.settings.temperature)
        return topics, self._reconstruction(topics, counts, gamma, generator)

    def _families(self, topics: Tensor, alpha: Tensor, streams: Streams) -> Iterator[Family]:
        each = zip(alpha, streams.generators, strict=True)
        drawn = [_softmax_gaussian(torch.log(own), generator, topics.shape[1]) for own, generator in each]
        yield Family(topics, torch.softmax(torch.stack(drawn), -1))

    def _reconstruction(self, topics: Tensor, counts: Tensor, gamma: Tensor, generator: torch.Generator) -> Tensor:
        """Mean cross-entropy of words that are rebuilt from relaxed topics, with relaxed noise of their own.

        The noise is the same for all words of a document, which changes nothing in the mean.
        """
        logits = _softmax_gaussian(gamma, generator, gamma.shape[-2]) if self.settings.drawn else gamma
        rebuilt = torch.log_softmax(topics @ logits, -1)
        uniform = torch.rand(rebuilt.shape, generator=generator).clamp(1e-9, 1 - 1e-7)
        line = torch.log_softmax((rebuilt - torch.log(-torch.log(uniform))) / self.settings.temperature, -1)
        return -((counts * line).sum(1) / counts.sum(1)).mean()


def _softmax_gaussian(log_concentrations: Tensor, generator: torch.Generator, many: int) -> Tensor:
    """Logits (many, n) of the softmax-Gaussian that approximates a Dirichlet distribution."""
    mean, variance = laplace_moments(torch.exp(log_concentrations))
    return mean + torch.sqrt(variance) * torch.randn(many, mean.shape[-1], generator=generator)


def paper_topics_start(structure: Structure, settings: PaperTopics, seed: int) -> dict[str, Tensor]:
    """Random topics, even shares, and the encoder's own parameters: (1, ...).

    Log-concentrations of topics that are drawn have a level, which changes nothing but how far draws are from their
    mean: exp(-2) where it is 4. At zero draws are off by one, and topics of texts never part.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = structure.parameters()
    topics = structure.keys[topic_nodes(structure)[1]]["topics"]
    theta = {key: torch.zeros(1, *parameter.shape) for key, parameter in parameters.items()}
    level = 4.0 if settings.drawn else 0.0
    theta[topics] = level + 0.1 * torch.randn(1, *parameters[topics].shape, generator=generator)
    return theta | network_parameters(document_encoder(structure, settings, seed))


def document_encoder(structure: Structure, settings: PaperTopics, seed: int) -> DocumentEncoder:
    """The encoder of a structure's documents."""
    shares, words = (structure.mechanisms[node].space.width for node in topic_nodes(structure))
    return seeded(lambda: DocumentEncoder(words, shares, settings), seed)


def paper_topics_problem(
    structure: Structure,
    documents: sp.sparse.csr_array,
    shapes: Shapes,
    objective: Objective,
    settings: PaperTopics,
    seed: int,
) -> PaperTopicsProblem:
    """Counts of documents, and words in random order for an encoder that reads them."""
    words, encoder = None, document_encoder(structure, settings, seed)
    if settings.reads == "words":
        words = nn.utils.rnn.pad_sequence(shuffled_words(documents, np.random.default_rng([seed, 9])), True, -1)
    return PaperTopicsProblem(structure, documents, words, encoder, shapes, objective, settings)
