"""A problem: one data set laid out for one method, as functions of a flat parameter matrix (R, P)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from otpdag.backward.amortized import AmortizedMap
from otpdag.backward.closed_form import RowGroup, group_rows
from otpdag.backward.placed_points import adapted
from otpdag.data import Batch
from otpdag.divergences.whitened import FittedFeatures
from otpdag.engine.method import Method
from otpdag.errors import ModelError
from otpdag.inference.ancestral import ancestral
from otpdag.objective import (
    LossTerms,
    Streams,
    build_maps,
    direct_term,
    gibbs_terms,
    sampled_terms,
    split_theta,
)
from otpdag.objective.mean_features import Measure, feature_columns, lay_out
from otpdag.objective.sampled import SampledOptions
from otpdag.structure import Naturals, Structure, unpack

__all__ = ["Problem", "build_problem", "complete_batch", "maps_for", "sampled_options"]

WHITENING_ROWS = 8000


@dataclass
class Problem:
    """What an optimiser needs to evaluate the objective; :meth:`loss` keeps the last terms for the history."""

    structure: Structure
    batch: Batch
    method: Method
    shapes: Mapping[str, tuple[int, ...]]
    groups: list[RowGroup] = field(default_factory=list)
    features: FittedFeatures | None = None
    measure: Measure | None = None
    maps: tuple[AmortizedMap, ...] = ()
    last: LossTerms | None = None

    def terms(self, flat: Tensor, progress: float = 1.0) -> LossTerms:
        """Loss terms of every replica with fixed points."""
        theta, _ = split_theta(unpack(flat, self.shapes))
        naturals = self.structure.naturals(theta)
        found: LossTerms | None = None
        if self.method.reconstruction:
            found = gibbs_terms(
                self.structure, naturals, self.groups, reconstruction=self.method.reconstruction,
                eps=self.method.at("eps", progress), eta=self.method.at("eta", progress),
                divergence=self.method.divergence, reference=self.method.reference,
                split=flat.shape[0] == 1,
            )  # fmt: skip
        if self.features is not None and self.measure is not None:
            direct = direct_term(self.structure, naturals, self.measure, self.features, self.method.kappa)
            found = direct if found is None else found + direct
        if found is None:
            raise RuntimeError(f"method {self.method.name!r} has no terms")
        return found

    def loss(self, flat: Tensor) -> Tensor:
        """Total loss of every replica."""
        if any(not group.serves(len(flat)) for group in self.groups):
            self.groups = self.placed(flat).groups
        self.last = self.terms(flat)
        return self.last.total.expand(flat.shape[0])

    def sampled(self, flat: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Loss terms of every replica on a fresh minibatch with fresh noise."""
        theta, phi = split_theta(unpack(flat, self.shapes))
        batch = self.batch
        if self.method.batch_size < batch.rows:
            batch = batch.take(streams.rows(batch.rows, self.method.batch_size))
        found = sampled_terms(
            self.structure, self.maps, theta, phi, batch, streams, sampled_options(self.method, progress)
        )
        if self.features is not None and self.measure is not None:
            naturals = self.structure.naturals(theta)
            found = found + direct_term(self.structure, naturals, self.measure, self.features, self.method.kappa)
        return found

    def adapted(self, points: Tensor) -> Problem:
        """The same problem with the points of unknown numbers where their posteriors at ``points`` (R, P) are."""
        naturals = self._naturals(points)
        return replace(self, groups=[adapted(self.structure, naturals, group) for group in self.groups])

    def placed(self, points: Tensor) -> Problem:
        """The same for several unknown numbers, for which points from the prior would be few that count."""
        if all(group.base is None for group in self.groups):
            return self
        naturals = self._naturals(points)
        placed = [g if g.base is None else adapted(self.structure, naturals, g) for g in self.groups]
        return replace(self, groups=placed)

    def _naturals(self, points: Tensor) -> Naturals:
        return self.structure.naturals(split_theta(unpack(points.detach(), self.shapes))[0])

    @property
    def has_numbers(self) -> bool:
        """Whether there are points of unknown numbers to adapt."""
        return any(group.noise and not group.quadratic for group in self.groups)

    def refined(self, point: Tensor, seed: int) -> Problem:
        """The same problem with its features whitened by the covariance under the model at ``point`` (1, P)."""
        if self.features is None:
            return self
        theta, _ = split_theta(unpack(point.detach(), self.shapes))
        naturals = self.structure.naturals(theta)
        generator = torch.Generator().manual_seed(seed)
        given = {node: _recycled(self.batch.values[node][:1], WHITENING_ROWS) for node in self.structure.given}
        values = ancestral(self.structure, naturals, WHITENING_ROWS, generator, do=given)
        sample = complete_batch(self.structure, values)
        columns = feature_columns(self.structure, sample)
        features = self.features.rewhitened(columns, sample.weight, self.method.features.model_ridge)
        return replace(self, features=features)


def sampled_options(method: Method, progress: float) -> SampledOptions:
    """What the objective with draws reads of a method, at a share of its steps."""
    return SampledOptions(
        method.noise, method.reconstruction, method.at("eta", progress), method.at("eps", progress),
        method.at("temperature", progress), method.divergence, method.straight_through, method.extra_masking,
        method.scope, method.costs,
    )  # fmt: skip


def _recycled(values: Tensor, rows: int) -> Tensor:
    return values[:, torch.arange(rows) % values.shape[1]]


def complete_batch(structure: Structure, values: Mapping[str, Tensor]) -> Batch:
    """Sampled values (1, N, width) as a batch in which every cell is seen."""
    observed = structure.graph.observed
    rows = values[observed[0]].shape[1]
    seen = {n: torch.ones(1, rows, structure.mechanisms[n].space.cells, dtype=torch.bool) for n in observed}
    return Batch({n: values[n] for n in observed}, seen, torch.ones(1, rows, dtype=torch.float64))


def count_ranges(structure: Structure, batch: Batch) -> dict[str, float]:
    """How far the support of each count must reach."""
    counts = [n for n in structure.graph.observed if structure.mechanisms[n].space.support == "count"]
    return {node: 1.3 * float(batch.values[node].max()) + 5 for node in counts}


def maps_for(structure: Structure, batch: Batch, method: Method) -> tuple[AmortizedMap, ...]:
    """The backward maps that a method learns: none where the closed form serves."""
    if method.optimiser == "lbfgs":
        return ()
    if isinstance(method.backward, str):
        raise ModelError(f"backward={method.backward!r} is for graphs with lagged edges; this one has none")
    if method.backward is not None:
        return tuple(method.backward(structure, batch))
    return build_maps(structure, batch, scope=method.scope, hidden_layers=method.hidden_layers)


def build_problem(
    structure: Structure,
    batch: Batch,
    method: Method,
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    maps: tuple[AmortizedMap, ...],
) -> Problem:
    """Lay out points and features once; the same seed lays them out alike."""
    unknown = [node for node in method.costs if node not in structure.graph]
    if unknown:
        raise ModelError(f"costs name nodes that are not in the graph: {', '.join(map(repr, unknown))}")
    generator = torch.Generator().manual_seed(seed)
    problem = Problem(structure, batch, method, shapes, maps=maps)
    ranges = count_ranges(structure, batch)
    if method.kappa:
        features = method.features.fit(feature_columns(structure, batch), batch.weight, generator)
        measure = lay_out(structure, batch, ranges, generator=generator)
        problem = replace(problem, features=features, measure=measure)
    if method.reconstruction and method.optimiser == "lbfgs":
        exact = isinstance(method.eps, int | float) and method.eps > 0 and not method.eta
        groups = group_rows(
            structure, batch, generator=generator, options=method.gibbs, count_range=ranges, exact=exact
        )
        problem = replace(problem, groups=groups)
    return problem
