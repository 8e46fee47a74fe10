r"""Rows that miss a single cell: points that lie evenly over all that it may hold.

A mean over few draws has noise, and a fixed point at which estimates and completed rows agree multiplies it by how
little of the information is seen. One unknown cell has an integral in one dimension, which as many evenly spread points
give to many digits.

Rows with gaps, filled in by the backward map, for a comparison with the model.

The distribution of completed rows is that of what is seen, pushed through the backward map at some parameters,

.. math:: \hat P_\theta(x) = \frac1N \sum_i P_\theta(x \mid x_{i, seen}),

and equals the model's own on average if the parameters are right and gaps depend on what is seen only. Joint draws
stand for each row; where a single cell is unknown, points stand for it that lie evenly over all it may hold, weighed by
their density, which is its integral without chance. At other parameters nearby the same points serve with other
weights, the densities' ratio, so that the mean of any feature is a smooth function of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.divergences.whitened import FeatureColumn, FittedFeatures
from otpdag.likelihood.row_posterior import Fitted, posterior_draws
from otpdag.matching.mean_features import node_columns
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


DRAWS = (8, 16)  # of a row: at least, at most
DRAWN_ROWS = 32_000  # draws of all rows, between these
ROWS_APART = 20_000  # rows with gaps that are drawn apart although they show the same
BLOCK_ELEMENTS = 2_000_000  # features of draws that are evaluated at a time
KEPT_ELEMENTS = 20_000_000  # and that are kept, so that other weights cost little


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
    """A table whose rows with gaps have several draws each.

    Attributes:
        batch: The table.
        complete: Numbers of the rows without gaps.
        gaps: Numbers of the rows with gaps (G,); a row that stands for many may occur several times.
        repeats: How often each of them occurs in ``gaps`` (G,).
        values: Points of every node (R or 1, G, points, width): draws, or evenly spread ones.
        log_prob: Log-density that each point came from (R or 1, G, points): the joint one where it was drawn.
        drawn: One draw of every node (R or 1, G, width).
        first_shares: Weights of the points of a row (R or 1, G, points) where they were made.
        shares: The same at the last parameters; they sum to one.
        made: Features of all rows and draws, where they are kept.
    """

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

    def weighed_for(self, structure: Structure, naturals: Naturals) -> CompletedRows:
        """The same draws with the weights that they have at other parameters (R, ...)."""
        return replace(self, shares=_shares(structure, naturals, self.values, self.log_prob))

    def with_weights(self, batch: Batch) -> CompletedRows:
        """The same rows with the weights of another batch."""
        return replace(self, batch=batch)

    def one_each(self, structure: Structure) -> Batch:
        """Every row once, with a draw in its gaps."""
        values = {}
        for node in structure.graph.observed:
            filled = self.batch.values[node].clone()
            filled[:, self.gaps] = self.drawn[node][:1].to(filled)
            values[node] = filled
        seen = {node: torch.ones_like(mask) for node, mask in self.batch.mask.items()}
        return Batch(values, seen, self.batch.weight[:1])

    def mean_features(self, structure: Structure, features: FittedFeatures) -> Tensor:
        """Mean features of the completed rows (R, J)."""
        total: Tensor | float = 0.0
        with torch.no_grad():
            for made, weight in zip(self._made(structure, features), self._weights(features.size), strict=True):
                total = total + (weight.unsqueeze(-2) @ made).squeeze(-2)
            if not isinstance(total, Tensor):
                raise RuntimeError("there are no rows to be completed")
            return total / self.batch.weight.sum(-1, keepdim=True)

    def keeping(self, structure: Structure, features: FittedFeatures) -> CompletedRows:
        """The same with the features of all draws kept, if they are not too many."""
        draws = self.shares.shape[-1] * len(self.gaps) * len(self.log_prob)
        if (len(self.complete) + draws) * features.size > KEPT_ELEMENTS:
            return replace(self, made=())
        with torch.no_grad():
            return replace(self, made=tuple(replace(self, made=())._made(structure, features)))

    def _made(self, structure: Structure, features: FittedFeatures) -> Iterable[Tensor]:
        """Features (R or 1, n, J) of blocks of rows."""
        return self.made or (_features(structure, features, values) for values in self._values(features.size))

    def _values(self, width: int) -> Iterator[Mapping[str, Tensor]]:
        """Values (R or 1, n, width) of the observed nodes, block by block."""
        for rows in self._blocks(self.complete, width, 1):
            yield self.batch.take(rows).values
        for at in self._blocks(torch.arange(len(self.gaps)), width, self.shares.shape[-1]):
            yield {node: self.values[node][:, at].flatten(1, 2) for node in self.batch.values}

    def _weights(self, width: int) -> Iterator[Tensor]:
        """Weights (R or 1, n) of the same."""
        for rows in self._blocks(self.complete, width, 1):
            yield self.batch.weight[:, rows]
        for at in self._blocks(torch.arange(len(self.gaps)), width, self.shares.shape[-1]):
            own = self.batch.weight[:, self.gaps[at]] / self.repeats[at]
            yield (own.unsqueeze(-1) * self.shares[:, at]).flatten(1)

    def _blocks(self, rows: Tensor, width: int, draws: int) -> tuple[Tensor, ...]:
        return rows.split(max(1, BLOCK_ELEMENTS // (width * draws * len(self.log_prob))))


def complete_rows(
    structure: Structure, naturals: Naturals, batch: Batch, count_range: Mapping[str, float], seed: int
) -> CompletedRows:
    """Fill in the gaps of every row by joint draws of the backward map at the parameters (R, ...).

    Args:
        structure: Graph and mechanisms.
        naturals: Natural parameters, each replica of which draws for itself.
        batch: A table with gaps that all replicas share.
        count_range: How far counts reach.
        seed: Determines the draws, so that nearby parameters have nearby draws.
    """
    seen = torch.stack([mask[0].all(-1) for mask in batch.mask.values()]).all(0)
    complete, gaps = torch.nonzero(seen)[:, 0], torch.nonzero(~seen)[:, 0]
    repeats = _repeats(batch.weight.mean(0)[gaps])
    gaps, repeats = torch.repeat_interleave(gaps, repeats), torch.repeat_interleave(repeats, repeats)
    least, most = DRAWS
    draws = min(most, max(least, DRAWN_ROWS // len(gaps)))
    replicas = max(len(value) for params in naturals.values() for value in params.values())
    shared = replace(batch, weight=batch.weight[:1])
    drawn = []
    for replica in range(replicas):
        own = {n: {k: v[replica % len(v)].detach()[None] for k, v in p.items()} for n, p in naturals.items()}
        fitted = Fitted(structure, own, {}, None, count_range)
        drawn.append(posterior_draws(fitted, shared.take(gaps), draws, seed, stratified=True))
    values = {node: torch.stack([one[node] for one in drawn]).to(batch.weight) for node in drawn[0]}
    first = {node: value[..., 0, :].clone() for node, value in values.items()}
    with torch.no_grad():
        log_prob = joint_log_prob(structure, naturals, values)
    for evenly in single_gaps(structure, shared.take(gaps), values, torch.Generator().manual_seed(seed)):
        log_prob = _spread_evenly(structure, naturals, values, log_prob, evenly)
    shares = _shares(structure, naturals, values, log_prob)
    return CompletedRows(batch, complete, gaps, repeats, values, log_prob, first, shares, shares)


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


def _repeats(weight: Tensor) -> Tensor:
    """How many rows each row with a gap stands for: as its weight says, within reason."""
    total = float(weight.sum())
    wanted = min(max(total, float(len(weight))), float(max(len(weight), ROWS_APART)))
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


def _features(structure: Structure, features: FittedFeatures, values: Mapping[str, Tensor]) -> Tensor:
    columns: list[FeatureColumn] = []
    for node in structure.graph.observed:
        space = structure.mechanisms[node].space
        seen = torch.ones(*values[node].shape[:-1], space.cells, dtype=torch.bool)
        columns += node_columns(space, values[node], seen)
    return features.combine([kernel(one.values) for kernel, one in zip(features.kernels, columns, strict=True)])
