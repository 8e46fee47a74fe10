r"""The paper's own way to topics (Section 5.1 and Appendix C.1), kept as it is written.

An LSTM reads the words of a document and gives each a distribution over topics, from which a relaxed assignment
:math:`\tilde z` is drawn; the word is rebuilt by :math:`\mathrm{Cat\text{-}Concrete}(\mathrm{softmax}(\tilde z^\top
\gamma))` at a cross-entropy cost. The push-forward term is the exact Wasserstein distance between the documents' mean
assignments and draws of the softmax-Gaussian that approximates :math:`\mathrm{Dir}(\alpha)`, with the Kullback-Leibler
divergence as ground cost. With a Dirichlet distribution of the topics, :math:`\gamma` is drawn anew at every step from
the softmax-Gaussian with log-concentrations :math:`\beta`. Adam with a learning rate of 1e-3 and batches of 50, as
published. A matrix of counts has no order of words: they come in random order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from otpdag.costs import KL
from otpdag.divergences import Wasserstein
from otpdag.engine.documents import DocumentOptions, TopicState
from otpdag.engine.monitor import Monitor
from otpdag.mechanisms.dirichlet import laplace_moments
from otpdag.nn import gumbel_softmax
from otpdag.objective.terms import LossTerms

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


class _Topics(nn.Module):
    """Backward map and parameters."""

    def __init__(self, words: int, topics: int, hidden: int, *, drawn: bool) -> None:
        super().__init__()
        self.read = nn.Embedding(words, hidden)  # a linear layer of one-hot words
        self.recur = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, topics)
        self.gamma = nn.Parameter(0.1 * torch.randn(topics, words))
        self.log_alpha = nn.Parameter(torch.zeros(topics))
        self.drawn = drawn

    def assignments(self, words: Tensor) -> Tensor:
        """Log-probabilities of the topics of each word (documents, words, K)."""
        return torch.log_softmax(self.head(self.recur(self.read(words))[0]), -1)

    def logits(self) -> Tensor:
        """Topics in the paper's scale: parameters, or drawn at log-concentrations."""
        if not self.drawn:
            return self.gamma
        mean, variance = laplace_moments(torch.exp(self.gamma))
        return mean + torch.sqrt(variance) * torch.randn_like(mean)

    def prior(self, many: int) -> Tensor:
        """Shares drawn from the softmax-Gaussian with concentrations alpha."""
        mean, variance = laplace_moments(torch.exp(self.log_alpha))
        return torch.softmax(mean + torch.sqrt(variance) * torch.randn(many, len(mean)), -1)

    def topics(self) -> Tensor:
        """Word probabilities: the softmax of the topics' logits, or of their mean."""
        mean = laplace_moments(torch.exp(self.gamma))[0] if self.drawn else self.gamma
        return torch.softmax(mean, -1)


def fit_paper(
    documents: Documents,
    options: DocumentOptions,
    settings: PaperOptions,
    generator: np.random.Generator,
    monitor: Monitor,
) -> TopicState:
    """Run Algorithm 1 for ``options.steps`` epochs; the global generator of torch is left as it was."""
    drawn = options.prior is not None
    sequences = _sequences(documents, generator)
    divergence = Wasserstein(KL())
    monitor.stage("fit", options.steps)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator.integers(2**31)))
        network = _Topics(documents.shape[1], options.topics, settings.hidden, drawn=drawn)
        if options.alpha is not None:
            network.log_alpha = nn.Parameter(torch.from_numpy(np.log(options.alpha)).float(), requires_grad=False)
        optimiser = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=settings.learning_rate)
        loss, steps = float("inf"), 0
        for epoch in range(options.steps):
            found = [
                _step(network, optimiser, [sequences[at] for at in rows], settings, divergence)
                for rows in torch.randperm(len(sequences)).split(settings.batch)
            ]
            terms = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
            loss, steps = terms["loss"], epoch + 1
            if monitor.record("fit", epoch, terms, keep=True, losses=[loss]):
                break
        topics, alpha = network.topics().detach(), torch.exp(network.log_alpha).detach()
    return TopicState(topics, alpha, loss=loss, steps=steps)


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


def _step(
    network: _Topics,
    optimiser: torch.optim.Adam,
    batch: list[Tensor],
    settings: PaperOptions,
    divergence: Wasserstein,
) -> dict[str, float]:
    temperature, eta = settings.at(drawn=network.drawn)
    words = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    there = nn.utils.rnn.pad_sequence([torch.ones(len(one)) for one in batch], batch_first=True)
    log_q = network.assignments(words)
    relaxed = gumbel_softmax(log_q, torch.rand_like(log_q), temperature)
    rebuilt = torch.log_softmax(relaxed @ network.logits(), -1)
    noise = -torch.log(-torch.log(torch.rand_like(rebuilt).clamp(1e-9, 1 - 1e-7)))
    line = torch.log_softmax((rebuilt + noise) / temperature, -1)
    cost = -(line.gather(-1, words.unsqueeze(-1)).squeeze(-1) * there).sum() / there.sum()
    shares = (torch.exp(log_q) * there.unsqueeze(-1)).sum(1) / there.sum(1, keepdim=True)
    apart = divergence(shares.unsqueeze(0), network.prior(len(shares)).unsqueeze(0)).sum()
    loss = cost + eta * apart
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    terms = LossTerms.of(
        loss.detach().reshape(1), reconstruction=cost.detach().reshape(1), divergence=eta * apart.detach().reshape(1)
    )
    return terms.as_floats(0)
