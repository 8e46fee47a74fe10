r"""Rows with gaps, filled in by the backward map, for a comparison with the model.

The distribution of completed rows is that of what is seen, pushed through the backward map at some parameters,

.. math:: \hat P_\theta(x) = \frac1N \sum_i P_\theta(x \mid x_{i, seen}),

and equals the model's own on average if the parameters are right and gaps depend on what is seen only. Joint draws
stand for each row. A mean over few draws has noise, and a fixed point at which estimates and completed rows agree
multiplies it by how little of the information is seen: where a single cell is unknown, points stand for it that lie
evenly over all it may hold, weighed by their density, which is its integral without chance. At other parameters nearby
the same points serve with other weights, the densities' ratio, so that the mean of any feature is a smooth function of
the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.divergences.whitened import FittedFeatures
from otpdag.likelihood.row_posterior import Fitted, posterior_draws
from otpdag.matching.mean_features import feature_columns
from otpdag.settings import Completion
from otpdag.simulation import batch_of
from otpdag.structure import Naturals, Structure


@dataclass(frozen=True, eq=False)
class EvenPoints:
    """Points of one node in rows that miss one of its cells and nothing else."""

    node: str
    rows: Tensor
    values: Tensor
    """(R, n, points, width)."""
    log_volume: Tensor
    """(R, n, points)."""


def single_gaps(
    structure: Structure, batch: Batch, draws: Mapping[str, Tensor], generator: torch.Generator
) -> Iterator[EvenPoints]:
    """Points for all rows that miss one cell, cell by cell of the table; hidden nodes are missing in every row.

    Args:
        structure: Graph and mechanisms.
        batch: Rows with gaps.
        draws: Joint draws of every node (R, N, points, width), which tell where a cell's values are.
        generator: Shifts the points of each row.
    """
    graph = structure.graph
    if any(graph.observed_descendants(node) for node in graph.hidden):
        return
    missing = sum((~mask[0]).sum(-1) for mask in batch.mask.values())
    for node in graph.observed:
        space = structure.mechanisms[node].space
        for cell in range(space.cells):
            rows = torch.nonzero((missing == 1) & ~batch.mask[node][0, :, cell])[:, 0]
            if not len(rows):
                continue
            values = draws[node][:, rows]
            own = space.cell_of(values, cell)
            phase = torch.rand(len(rows), 1, generator=generator, dtype=torch.float64)
            evenly = space.around(own, phase)
            if evenly is not None:
                own.copy_(evenly[0])
                yield EvenPoints(node, rows, values, evenly[1])


def can_be_completed(structure: Structure, batch: Batch) -> bool:
    """Whether the backward map is known: every node that bears on what is observed has a density."""
    shared = all(len(value) == 1 for value in batch.values.values())
    mechanisms = (structure.mechanisms[node] for node in _relevant(structure))
    return shared and all(one.has_density or one.is_given for one in mechanisms)


def _relevant(structure: Structure) -> list[str]:
    graph = structure.graph
    return [node for node in graph.order if node in graph.observed or graph.observed_descendants(node)]


@dataclass(frozen=True, eq=False)
class CompletedRows:
    """A table whose rows with gaps have several points each.

    Attributes:
        structure: Graph and mechanisms.
        batch: The table.
        complete: Numbers of the rows without gaps.
        gaps: Numbers of the rows with gaps (G,); a row that stands for many may occur several times.
        repeats: How often each of them occurs in ``gaps`` (G,).
        values: Points of every node (R or 1, G, points, width): draws, or evenly spread ones.
        log_prob: Log-density that each point came from (R or 1, G, points): the joint one where it was drawn.
        drawn: One draw of every node (R or 1, G, width).
        first_shares: Weights of the points of a row (R or 1, G, points) where they were made.
        shares: The same at the last parameters; they sum to one.
        made: Features of complete rows and of points, where they are kept.
    """

    structure: Structure
    batch: Batch
    complete: Tensor
    gaps: Tensor
    repeats: Tensor
    values: Mapping[str, Tensor]
    log_prob: Tensor
    drawn: Mapping[str, Tensor]
    first_shares: Tensor
    shares: Tensor
    made: tuple[Tensor, ...] = ()

    @property
    def effective(self) -> float:
        """The share of the points that still count where they did at first, in the replica that has fewest."""
        ratio = torch.where(self.shares > 0, self.shares.square() / self.first_shares, 0.0).sum(-1)
        return float((1 / ratio).mean(-1).min())

    def weighed_for(self, naturals: Naturals) -> CompletedRows:
        """The same points with the weights that they have at other parameters (R, ...)."""
        return replace(self, shares=_shares(self.structure, naturals, self.values, self.log_prob))

    def one_each(self) -> Batch:
        """Every row once, with a draw in its gaps."""
        values = {node: value.clone() for node, value in self.batch.values.items()}
        for node, filled in values.items():
            filled[:, self.gaps] = self.drawn[node][:1].to(filled)
        return batch_of(self.structure, values, self.batch.weight[:1])

    def mean_features(self, features: FittedFeatures, at_once: int = 2_000_000) -> Tensor:
        """Mean features of the completed rows (R, J); where they are not kept, so many numbers are made at a time."""
        total = torch.zeros(1, features.size).to(self.batch.weight)
        for number, (values, weight) in enumerate(self._parts()):
            step = max(1, at_once // (features.size * len(self.log_prob)))
            for at in torch.arange(weight.shape[1]).split(weight.shape[1] if self.made else step):
                made = self.made[number] if self.made else self._features(features, values, at)
                total = total + (weight[:, at].unsqueeze(-2) @ made).squeeze(-2)
        return total / self.batch.weight.sum(-1, keepdim=True)

    def keeping(self, features: FittedFeatures, most: int = 20_000_000) -> CompletedRows:
        """The same with all features kept, if they are at most so many numbers: other weights then cost little."""
        points = self.shares.shape[-1] * len(self.gaps) * len(self.log_prob)
        if (len(self.complete) + points) * features.size > most:
            return replace(self, made=())
        return replace(self, made=tuple(self._features(features, values, ...) for values, _ in self._parts()))

    def _parts(self) -> Iterator[tuple[Mapping[str, Tensor], Tensor]]:
        """Values (R or 1, n, width) of the observed nodes, and weights (R or 1, n): of complete rows, and of points."""
        yield self.batch.take(self.complete).values, self.batch.weight[:, self.complete]
        own = self.batch.weight[:, self.gaps] / self.repeats
        points = {node: self.values[node].flatten(1, 2) for node in self.batch.values}
        yield points, (own.unsqueeze(-1) * self.shares).flatten(1)

    def _features(self, features: FittedFeatures, values: Mapping[str, Tensor], at: Tensor | EllipsisType) -> Tensor:
        some = batch_of(self.structure, {node: value[:, at] for node, value in values.items()})
        with torch.no_grad():
            return features.of(feature_columns(self.structure, some))


def complete_rows(
    structure: Structure, naturals: Naturals, batch: Batch, seed: int, sizes: Completion
) -> CompletedRows:
    """Fill in the gaps of every row by joint draws of the backward map at the parameters (R, ...).

    Args:
        structure: Graph and mechanisms.
        naturals: Natural parameters, each replica of which draws for itself.
        batch: A table with gaps that all replicas share.
        seed: Determines the draws, so that nearby parameters have nearby draws.
        sizes: How many.
    """
    seen = torch.stack([mask[0].all(-1) for mask in batch.mask.values()]).all(0)
    complete, gaps = torch.nonzero(seen)[:, 0], torch.nonzero(~seen)[:, 0]
    repeats = _repeats(batch.weight.mean(0)[gaps])
    gaps, repeats = torch.repeat_interleave(gaps, repeats), torch.repeat_interleave(repeats, repeats)
    points = min(sizes.draws[1], max(sizes.draws[0], sizes.drawn_rows // len(gaps)))
    ranges = structure.count_ranges(batch.values)
    replicas = max(len(value) for params in naturals.values() for value in params.values())
    shared = replace(batch, weight=batch.weight[:1])
    drawn = []
    for replica in range(replicas):
        own = {n: {k: v[replica % len(v)].detach()[None] for k, v in p.items()} for n, p in naturals.items()}
        fitted = Fitted(structure, own, {}, None, ranges)
        drawn.append(posterior_draws(fitted, shared.take(gaps), points, seed, stratified=True))
    values = {node: torch.stack([one[node] for one in drawn]).to(batch.weight) for node in drawn[0]}
    first = {node: value[..., 0, :].clone() for node, value in values.items()}
    with torch.no_grad():
        log_prob = joint_log_prob(structure, naturals, values)
    for evenly in single_gaps(structure, shared.take(gaps), values, torch.Generator().manual_seed(seed)):
        log_prob = _spread_evenly(structure, naturals, values, log_prob, evenly)
    shares = _shares(structure, naturals, values, log_prob)
    return CompletedRows(structure, batch, complete, gaps, repeats, values, log_prob, first, shares, shares)


def _spread_evenly(
    structure: Structure, naturals: Naturals, values: Mapping[str, Tensor], log_prob: Tensor, evenly: EvenPoints
) -> Tensor:
    """Put evenly spread points in the place of draws, where some of them have a density; the log-density they have."""
    own = {node: value[:, evenly.rows] for node, value in values.items()} | {evenly.node: evenly.values}
    with torch.no_grad():
        weight = (joint_log_prob(structure, naturals, own) + evenly.log_volume).logsumexp(-1)
    usable = torch.isfinite(weight).all(0)
    rows = evenly.rows[usable]
    values[evenly.node][:, rows] = evenly.values[:, usable]
    log_prob = log_prob.clone()
    log_prob[:, rows] = -evenly.log_volume[:, usable]
    return log_prob


def _shares(structure: Structure, naturals: Naturals, values: Mapping[str, Tensor], log_prob: Tensor) -> Tensor:
    """Weights (R, G, points) of the points of each row at these parameters."""
    with torch.no_grad():
        ratio = joint_log_prob(structure, naturals, values) - log_prob
        return torch.softmax(ratio.nan_to_num(nan=-torch.inf), -1)


def _repeats(weight: Tensor, most: int = 20_000) -> Tensor:
    """How many rows each row with a gap stands for: as its weight says, but of all together ``most`` drawn apart."""
    total = float(weight.sum())
    wanted = min(max(total, float(len(weight))), float(max(len(weight), most)))
    return (weight * (wanted / max(total, 1e-300))).round().clamp(min=1).long()


def joint_log_prob(structure: Structure, naturals: Naturals, values: Mapping[str, Tensor]) -> Tensor:
    """Log-density of all nodes together (R, G, draws)."""
    total: Tensor = next(iter(values.values())).new_zeros(1)
    for node in _relevant(structure):
        mechanism = structure.mechanisms[node]
        if not mechanism.is_given:
            parents = structure.parents(node, values)
            total = total + mechanism.log_prob(naturals[node], values[node], parents)
    return total
