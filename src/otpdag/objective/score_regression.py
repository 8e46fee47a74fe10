"""How well features tell the scores of parameters, over rows of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ScoreRegression", "inverse_root"]

FLAT = 1e-6
"""Share of the largest variance below which there is none: what nothing tells has no direction."""


@dataclass(frozen=True, eq=False)
class ScoreRegression:
    """Scores (N, P) of the model's rows, explained by features (N, J), all less their means.

    Attributes:
        features: The features.
        scores: The scores.
        slopes: Of each score on the features (J, P).

    >>> features = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> scores = torch.stack([features[:, 0] + features[:, 1], features[:, 2] ** 3], -1)
    >>> whitening = torch.linalg.inv(torch.linalg.cholesky(torch.cov(features.T))).T
    >>> ScoreRegression.of(features, scores, whitening).unexplained.round(decimals=1)
    tensor([0.0000, 0.4000], dtype=torch.float64)
    """

    features: Tensor
    scores: Tensor
    slopes: Tensor

    @classmethod
    def of(cls, features: Tensor, scores: Tensor, whitening: Tensor) -> ScoreRegression:
        """Regress scores on features that a matrix (J, rank) whitens."""
        features, scores = features - features.mean(0), scores - scores.mean(0)
        whitened = features @ whitening.to(features)
        return cls(features, scores, whitening.to(features) @ (whitened.T @ scores) / len(features))

    @property
    def information(self) -> Tensor:
        """Covariance of the scores (P, P)."""
        return self.scores.T @ self.scores / len(self.scores)

    @property
    def unexplained(self) -> Tensor:
        """Share of each score's variance that the features do not tell (P,); none where it does not vary."""
        left = (self.scores - self.features @ self.slopes).square().mean(0)
        whole = self.scores.square().mean(0)
        return torch.where(whole > FLAT * whole.amax(), left / whole.clamp(min=torch.finfo(whole.dtype).tiny), 0.0)

    def least_share(self, seen: Tensor, weight: Tensor) -> Tensor:
        """Least share, in any direction, of complete rows' information that scores (N, P) of what is seen have."""
        centred = seen - (weight @ seen) / weight.sum()
        ours = (centred.T * weight) @ centred / weight.sum()
        root = inverse_root(self.information)
        return torch.linalg.eigvalsh(root.T @ ours @ root).amin().clamp(0.0, 1.0)

    def along(self, untold: Tensor) -> Tensor:
        """A whitening (J + K, rank) of features and the K untold scores: of each score told, or of itself if untold."""
        own = torch.eye(len(untold)).to(self.slopes)[untold]
        compared = torch.cat([self.slopes * ~untold, own])
        values = self.features @ compared[: len(self.slopes)] + self.scores * untold
        return compared @ inverse_root(values.T @ values / len(values))


def inverse_root(covariance: Tensor) -> Tensor:
    """A matrix W (P, rank) with W' C W = 1, without what does not vary."""
    unit = covariance.diagonal().clamp(min=torch.finfo(covariance.dtype).tiny).rsqrt()
    lengths, vectors = torch.linalg.eigh(covariance * unit * unit.unsqueeze(-1))
    varies = lengths > FLAT * lengths[-1]
    return unit.unsqueeze(-1) * vectors[:, varies] * lengths[varies].rsqrt()
