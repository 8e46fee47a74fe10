r"""ProdLDA (Srivastava & Sutton 2017, https://arxiv.org/abs/1703.01488): an autoencoder of word counts.

A document's topics are a softmax of Gaussians that an encoder gives; its words come from a product of experts,
:math:`\mathrm{softmax}(\mathrm{norm}(\theta \beta))` and not the mixture of LDA. The prior is the Laplace approximation
of a Dirichlet distribution in the softmax basis. Two layers of 100 softplus units, batch normalisation without gain,
dropout of 0.2, Adam with a first moment of 0.99 and a learning rate of 0.002, batches of 200: as published.
"""

from math import ceil

import numpy as np
import torch
from torch import Tensor, nn

from baselines.base import Array, Estimate
from baselines.course import Course

HIDDEN, DROPOUT = 100, 0.2
RATE, MOMENTS = 2e-3, (0.99, 0.999)
STRETCH = 1000  # steps


def fit(
    counts,
    *,
    topics: int,
    seed: int,
    iterations: int = 200,
    alpha: float | None = None,
    batch: int = 200,
    tolerance: float | None = None,
    keep: bool = False,
) -> Estimate:
    """Maximise the evidence lower bound.

    Args:
        counts: Words of each document (documents, words), sparse; batches are made dense.
        topics: Number of topics, K.
        seed: Determines everything; the global generator of torch is left as it was.
        iterations: Passes over the documents; all are done unless there is a tolerance.
        alpha: Concentration of the prior, fixed; 1 if left out, as in the published experiments.
        batch: Documents in a batch.
        tolerance: Relative gain of the loss at which to stop, between the means of two stretches of 1,000 steps.
        keep: Keep the topics after each pass.

    Returns:
        As topics the words that the decoder gives to a document about one topic only; the objective is minus the loss
        of a document in the last pass.
    """
    rows = counts.tocsr().astype(np.float32)
    concentration = 1.0 if alpha is None else alpha
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _ProdLDA(rows.shape[1], topics, concentration)
        optimiser = torch.optim.Adam(network.parameters(), lr=RATE, betas=MOMENTS, fused=True)
        course = Course(keep)  # after the first optimiser of a process, for which torch imports seconds of modules
        losses = []
        passes = ceil(STRETCH / ceil(rows.shape[0] / batch))
        for _ in range(iterations):
            losses.append(_epoch(network, optimiser, rows, batch))
            course.look(network.topics)
            if tolerance is not None and _has_settled(losses, passes, tolerance):
                break
        seconds = course.seconds
    params = {"topics": network.topics(), "alpha": np.full(topics, concentration)}
    return Estimate(params, np.array([-losses[-1]]), course.history, seconds=seconds)


def _has_settled(losses: list[float], passes: int, tolerance: float) -> bool:
    """Whether the last stretch of passes gained little over the one before."""
    if len(losses) % passes or len(losses) < 2 * passes:
        return False
    before, now = np.mean(losses[-2 * passes : -passes]), np.mean(losses[-passes:])
    return bool(before - now < tolerance * abs(before))


def _epoch(network: "_ProdLDA", optimiser: torch.optim.Adam, rows, batch: int) -> float:
    network.train()
    losses = []
    for chosen in torch.randperm(rows.shape[0]).split(batch):
        if len(chosen) == 1:  # has no spread to normalise by
            continue
        loss = network(torch.from_numpy(rows[chosen.numpy()].toarray()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return float(np.mean(losses))


class _ProdLDA(nn.Module):
    prior_mean: Tensor
    prior_variance: Tensor

    def __init__(self, words: int, topics: int, alpha: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(words, HIDDEN), nn.Softplus(), nn.Linear(HIDDEN, HIDDEN), nn.Softplus(), nn.Dropout(DROPOUT)
        )
        self.mean = nn.Sequential(nn.Linear(HIDDEN, topics), nn.BatchNorm1d(topics, affine=False))
        self.log_variance = nn.Sequential(nn.Linear(HIDDEN, topics), nn.BatchNorm1d(topics, affine=False))
        self.drop = nn.Dropout(DROPOUT)
        self.beta = nn.Parameter(nn.init.xavier_uniform_(torch.empty(topics, words)))
        self.norm = nn.BatchNorm1d(words, affine=False)
        # mean log α_k - mean log α is zero where all are alike
        self.register_buffer("prior_mean", torch.zeros(topics))
        variance = (1 - 2 / topics) / alpha + 1 / (topics * alpha)
        self.register_buffer("prior_variance", torch.full((topics,), variance))

    def forward(self, words: Tensor) -> Tensor:
        """Loss of a batch of documents: reconstruction and divergence from the prior, mean over documents."""
        hidden = self.encoder(words)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        drawn = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        rebuilt = self.decode(self.drop(torch.softmax(drawn, -1)))
        return (self.divergence(mean, log_variance) - (words * rebuilt).sum(-1)).mean()

    def decode(self, theta: Tensor) -> Tensor:
        """Log-probabilities of words."""
        return torch.log_softmax(self.norm(theta @ self.beta), -1)

    def divergence(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        """Kullback-Leibler divergence of the encoder's Gaussians from the prior's."""
        ratio = torch.exp(log_variance) / self.prior_variance
        distance = (mean - self.prior_mean) ** 2 / self.prior_variance
        return 0.5 * (ratio + distance - torch.log(ratio) - 1).sum(-1)

    @torch.no_grad()
    def topics(self) -> Array:
        """Words of documents about one topic each."""
        self.eval()
        return torch.exp(self.decode(torch.eye(len(self.beta)))).double().numpy()
