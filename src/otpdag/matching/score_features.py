r"""How well features tell the scores of parameters, over rows of the model.

Scores of parameters as features of rows: for what no other feature tells of them.

A score is the slope of a row's log-density in a parameter. Its mean over rows that the model completed, at the
parameters that it is taken at, is zero where the likelihood of what is seen is largest; under the model it is zero at
those parameters, and elsewhere

.. math:: E_\theta[s_\vartheta] = E_\vartheta\Bigl[\frac{p_\theta}{p_\vartheta}\, s_\vartheta\Bigr],

which a sample of the model tells, weighed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.matching.completion import CompletedRows, joint_log_prob
from otpdag.structure import Naturals, Structure

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


BESIDE = 1e-4
"""Half the distance of the points whose difference is a slope: 1e-8 are lost by curvature, and 1e-12 by digits."""

SAMPLE = 4096
"""Rows of the model that tell how mean scores change. They decide how quickly an estimate is found, not which."""


@dataclass(frozen=True, eq=False)
class Beside:
    """Parameters of each of R replicas, moved by a little in K directions: the K moved ahead, then those behind.

    Attributes:
        naturals: Parameters (R * 2 K, ...), replica by replica.
        directions: Which parameters were moved (K,).
        step: How far each was moved.
    """

    naturals: Naturals
    directions: Tensor
    step: float

    def only(self, some: Tensor) -> Beside:
        """Those moved in some of the directions (K,) of a single replica."""
        both = some.repeat(2)
        naturals = {
            node: {name: value if len(value) == 1 else value[both] for name, value in params.items()}
            for node, params in self.naturals.items()
        }
        return replace(self, naturals=naturals, directions=self.directions[some])

    def of_replica(self, number: int) -> dict[str, dict[str, Tensor]]:
        """Those of one replica (2 K, ...)."""
        many = 2 * len(self.directions)
        own = slice(number * many, (number + 1) * many)
        return {
            node: {name: value if len(value) == 1 else value[own] for name, value in params.items()}
            for node, params in self.naturals.items()
        }


def points_beside(naturals: Callable[[Tensor], Naturals], points: Tensor, directions: Tensor) -> Beside:
    """Points (R, P), each moved by a little in some directions and, after all of these, against them."""
    steps = BESIDE * torch.eye(points.shape[-1]).to(points)[directions]
    moved = points.unsqueeze(1) + torch.cat([steps, -steps])
    return Beside(naturals(moved.flatten(0, 1)), directions, BESIDE)


def scores(structure: Structure, beside: Beside, values: Mapping[str, Tensor], replicas: int = 1) -> Tensor:
    """Slopes of the log-density of all nodes together, at values (1 or R, ..., width): (R, ..., K)."""
    each = []
    with torch.no_grad():
        for number in range(replicas):
            rows = {node: value[number % len(value)].unsqueeze(0) for node, value in values.items()}
            ahead, behind = joint_log_prob(structure, beside.of_replica(number), rows).chunk(2)
            each.append(((ahead - behind) / (2 * beside.step)).movedim(0, -1))
    return torch.stack(each)


@dataclass(frozen=True, eq=False)
class ScoreFeatures:
    """Scores of some parameters at an estimate, of the model's rows and of completed ones.

    Attributes:
        directions: Which parameters (K,).
        sample: Rows of the model (1, N, width).
        log_prob: Their log-density where they were drawn (1, N).
        of_sample: Their scores at the estimate (R, N, K).
        by_chance: The weighed mean of these at the estimate (R, K), where it should be zero.
        of_rows: Mean scores of each row of the data, over what it may miss (R, rows, K).
    """

    directions: Tensor
    sample: Mapping[str, Tensor]
    log_prob: Tensor
    of_sample: Tensor
    by_chance: Tensor
    of_rows: Tensor

    @classmethod
    def at(
        cls, structure: Structure, naturals: Naturals, beside: Beside, sample: Mapping[str, Tensor], rows: CompletedRows
    ) -> ScoreFeatures:
        """Scores at an estimate (1, ...), of whose model a sample was drawn."""
        sample = {node: value[:, :SAMPLE] for node, value in sample.items()}
        with torch.no_grad():
            log_prob = joint_log_prob(structure, naturals, sample)
        unknown = log_prob.new_zeros(1, 0)
        first = cls(beside.directions, sample, log_prob, unknown, unknown, unknown)
        return first.told_at(structure, naturals, beside, rows)

    def told_at(self, structure: Structure, naturals: Naturals, beside: Beside, rows: CompletedRows) -> ScoreFeatures:
        """The same scores at another estimate (R, ...), at which rows were completed."""
        replicas = len(rows.shares)
        of_sample = scores(structure, beside, self.sample, replicas)
        with torch.no_grad():
            by_chance = self._mean(structure, naturals, of_sample)
        of_rows = mean_scores(structure, beside, rows)
        return replace(self, of_sample=of_sample, by_chance=by_chance, of_rows=of_rows)

    def gap(self, structure: Structure, naturals: Naturals, weight: Tensor) -> Tensor:
        """Mean scores of completed rows, weighed (R or 1, rows), less those of the model at parameters (R, ...)."""
        completed = (weight.unsqueeze(-2) @ self.of_rows).squeeze(-2) / weight.sum(-1, keepdim=True)
        return completed - (self._mean(structure, naturals, self.of_sample) - self.by_chance)

    def _mean(self, structure: Structure, naturals: Naturals, of_sample: Tensor) -> Tensor:
        ratio = joint_log_prob(structure, naturals, self.sample) - self.log_prob
        return (torch.softmax(ratio, -1).unsqueeze(-2) @ of_sample).squeeze(-2)


def mean_scores(structure: Structure, beside: Beside, rows: CompletedRows) -> Tensor:
    """Scores of each row of the data, averaged over what stands for its gaps: (R, rows, K)."""
    replicas = len(rows.shares)
    seen = {node: value[:, rows.complete] for node, value in rows.batch.values.items()}
    of_rows = torch.zeros(replicas, rows.batch.rows, len(beside.directions)).to(rows.shares)
    if len(rows.complete):
        of_rows[:, rows.complete] = scores(structure, beside, seen, replicas)
    of_points = scores(structure, beside, rows.values, replicas)
    weighed = torch.where(rows.shares.unsqueeze(-1) > 0, of_points, 0.0) * rows.shares.unsqueeze(-1)
    return of_rows.index_add(1, rows.gaps, weighed.sum(-2) / rows.repeats.reshape(-1, 1))
