"""Fit one structure to many data sets at once, as replicas of one optimisation.

The replica axis holds every start of every data set; one evaluation serves them all, and each data set keeps its best
start. Values that differ between data sets but are not estimated (a known weight, a known variance) are frozen: they
are parameters like the others, whose gradient is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.data import Batch
from otpdag.engine.data_kind import Layout, lay_out_rows, one_start, table_problem
from otpdag.engine.method import Method, entropic
from otpdag.engine.search import Searcher, SearchSchedule, restart_seed, search
from otpdag.errors import ModelError
from otpdag.noise import Streams
from otpdag.numerics import at_work
from otpdag.problem import LossTerms, Minibatched, Problem, WrappedProblem, split_theta
from otpdag.settings import ClosedForm
from otpdag.structure import Structure, columns_of, pack, unpack

Values = Mapping[str, Mapping[str, ArrayLike | Tensor]]
Naturals = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class FittedSets:
    """Estimates of S data sets.

    Attributes:
        naturals: Natural parameters by node and name: (S, ...).
        loss: The objective at the end: (S,).
        kept: Which start each data set kept: (S,).
        failed: Data sets none of whose starts stayed finite: (S,).
        history: Natural parameters of the kept starts after 0, 1, 2, ... steps: (steps + 1, S, ...).
    """

    naturals: Naturals
    loss: Tensor
    kept: Tensor
    failed: Tensor
    history: Naturals = field(repr=False)


@dataclass(frozen=True)
class HeldProblem(WrappedProblem):
    """A problem some of whose parameters stay where they are: their columns of the point have no gradient."""

    free: Tensor

    def loss(self, point: Tensor) -> LossTerms:
        """Terms without gradients of what is held."""
        return self.base.loss(self._held(point))

    def sampled(self, point: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Terms without gradients of what is held."""
        assert isinstance(self.base, Minibatched), "asked of what is drawn"
        return self.base.sampled(self._held(point), streams, progress)

    def laid_out_for(self, points: Tensor) -> Self:
        """Points are placed once, for all starts."""
        return replace(self, base=self.base.laid_out_for(points))

    def _held(self, point: Tensor) -> Tensor:
        return torch.where(self.free, point, point.detach())


@dataclass(frozen=True)
class SetsProblem(WrappedProblem):
    """Data sets of their own in closed form, each with as many starts as others: the first is ``base``."""

    sets: tuple[Problem, ...]

    def loss(self, point: Tensor) -> LossTerms:
        """Of each start on its own data set."""
        each = [one.loss(own) for one, own in zip(self.sets, point.chunk(len(self.sets)), strict=True)]
        starts = len(point) // len(self.sets)
        return LossTerms(
            *(torch.cat([getattr(terms, f.name).expand(starts) for terms in each]) for f in fields(LossTerms))
        )

    def laid_out_for(self, points: Tensor) -> SetsProblem:
        """Points are placed for the starts of each data set."""
        parts = zip(self.sets, points.chunk(len(self.sets)), strict=True)
        sets = tuple(one.laid_out_for(own) for one, own in parts)
        return replace(self, base=sets[0], sets=sets)


def start_data_sets(structure: Structure, batch: Batch, *, seed: int = 0, restarts: int = 1) -> Naturals:
    """Data-driven starts of every data set in natural units, (S, restarts, ...): where :func:`fit_data_sets` begins."""
    layout = lay_out_rows(structure, batch, entropic(), seed)
    points = _starts(layout, batch, seed, restarts)
    return {
        node: {name: value.unflatten(0, (batch.replicas, restarts)) for name, value in values.items()}
        for node, values in _naturals(layout, points).items()
    }


def fit_data_sets(
    structure: Structure,
    batch: Batch,
    method: Method,
    *,
    seed: int = 0,
    restarts: int = 1,
    begin: Values | None = None,
    frozen: Values | None = None,
) -> FittedSets:
    """Fit every data set of a batch, all starts at once and to the end.

    Args:
        structure: The model.
        batch: Data sets as replicas: values (S, N, width).
        method: How; its ``steps`` are the most that are done.
        seed: Fully determines the run.
        restarts: Starts of each data set.
        begin: Starting values (S, restarts, ...) of some parameters by node and name, instead of data-driven ones.
        frozen: Values (S, ...) of parameters that are known for each data set and not estimated.

    Returns:
        Estimates, losses and the course of the kept starts; hidden labels are those of the starts.

    Raises:
        ModelError: If ``begin`` or ``frozen`` name a parameter that is not learned, or have another shape.
    """
    sets = batch.replicas
    owners = torch.arange(sets).repeat_interleave(restarts)
    layout = lay_out_rows(structure, batch, method, seed)
    points = _starts(layout, batch, seed, restarts)
    points = _overwrite(layout, points, begin, torch.arange(sets * restarts), (sets, restarts))
    points = _overwrite(layout, points, frozen, owners, (sets,))
    problem = HeldProblem(_problem(layout, batch, method, seed, owners), _free_columns(layout, frozen))
    own = sum(math.prod(shape) for shape in split_theta(layout.shapes)[0].values())
    visited = [points[:, :own]]
    with at_work(batch.rows * len(owners)):
        searcher = Searcher(method.optimiser, seed, trace=lambda point: visited.append(point[:, :own].clone()))
        ended = search(problem, points, SearchSchedule(short_steps=0, moves=0), searcher, owners.tolist())
    visited[-1] = torch.stack([one.point[:own] for one in ended.restarts])  # the last steps may have been averaged
    return FittedSets(
        naturals=_naturals(layout, ended.point),
        loss=ended.loss,
        kept=ended.kept - torch.arange(sets) * restarts,
        failed=ended.failed,
        history=_stacked([_naturals(layout, point[ended.kept]) for point in visited]),
    )


def for_replicas(batch: Batch, owners: Tensor) -> Batch:
    """Data sets as replicas in this order, perhaps repeated; what all share stays shared."""

    def own(tensor: Tensor) -> Tensor:
        return tensor if len(tensor) == 1 else tensor[owners]

    values, mask = ({node: own(one) for node, one in held.items()} for held in (batch.values, batch.mask))
    return Batch(values, mask, own(batch.weight))


def _problem(layout: Layout, batch: Batch, method: Method, seed: int, owners: Tensor) -> Problem:
    """All data sets side by side where they are drawn; one after the other in closed form."""
    if not isinstance(method.evaluation, ClosedForm):
        return table_problem(layout, for_replicas(batch, owners), method, seed)
    numbers = torch.arange(batch.replicas)
    sets = tuple(table_problem(layout, for_replicas(batch, n), method, seed) for n in numbers.split(1))
    return SetsProblem(sets[0], sets)


def _starts(layout: Layout, batch: Batch, seed: int, restarts: int) -> Tensor:
    pairs = [(owner, number) for owner in torch.arange(batch.replicas).split(1) for number in range(restarts)]
    own = [one_start(layout, for_replicas(batch, owner), restart_seed(seed, n), first=n == 0) for owner, n in pairs]
    return torch.cat(own)


def _naturals(layout: Layout, point: Tensor) -> Naturals:
    """Natural parameters at points, whose columns for the maps may be missing."""
    theta = unpack(point, split_theta(layout.shapes)[0])
    return {
        node: {name: value.expand(len(point), *value.shape[1:]) for name, value in values.items()}
        for node, values in layout.structure.naturals(theta).items()
    }


def _stacked(naturals: list[Naturals]) -> Naturals:
    first, *_ = naturals  # all have the same names
    return {node: {name: torch.stack([n[node][name] for n in naturals]) for name in first[node]} for node in first}


def _overwrite(layout: Layout, points: Tensor, values: Values | None, rows: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Put natural values (*leading, ...) into points, whose rows read them in the order ``rows``."""
    if not values:
        return points
    naturals = _naturals(layout, points)
    for node, name in _named(layout, values):
        wanted = (*leading, *naturals[node][name].shape[1:])
        given = torch.as_tensor(values[node][name]).to(points)
        if given.shape[: len(leading)] != leading or given.numel() != math.prod(wanted):
            raise ModelError(f"parameter {name!r} of node {node!r} must have shape {wanted}; got {tuple(given.shape)}")
        naturals[node][name] = given.reshape(-1, *wanted[len(leading) :])[rows]
    raw = unpack(points, layout.shapes) | layout.structure.raw(naturals)
    return pack({key: raw[key] for key in layout.shapes})


def _named(layout: Layout, values: Values) -> list[tuple[str, str]]:
    names = [(node, name) for node, given in values.items() for name in given]
    for node, name in names:
        if name not in layout.structure.keys.get(node, {}):
            raise ModelError(f"node {node!r} has no learned parameter {name!r}")
    return names


def _free_columns(layout: Layout, frozen: Values | None) -> Tensor:
    """Which columns of a point may move (P,)."""
    held = {layout.structure.keys[node][name] for node, name in _named(layout, frozen or {})}
    return ~columns_of(layout.shapes, held)
