"""Fit one structure to many data sets at once, as replicas of one optimisation.

The replica axis holds every start of every data set; one evaluation serves them all, and each data set keeps its best
start. Values that differ between data sets but are not estimated (a known weight, a known variance) are frozen: they
are parameters like the others, whose gradient is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.data import Batch
from otpdag.engine.adam import descend
from otpdag.engine.lbfgs import LBFGSState, minimise
from otpdag.engine.method import Method
from otpdag.engine.problem import Problem, build_problem
from otpdag.engine.search import Layout, initial_points, prepare, restart_seed
from otpdag.errors import ModelError
from otpdag.objective import LossTerms, Streams
from otpdag.structure import Structure, pack, unpack
from otpdag.threads import bounded_threads

__all__ = ["Many", "fit_many", "start_many"]

Values = Mapping[str, Mapping[str, ArrayLike | Tensor]]
Naturals = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Many:
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


@dataclass
class _HeldProblem(Problem):
    """A problem some of whose parameters stay where they are: their columns of the point have no gradient.

    It remembers the points of drawn steps, which Adam visits once each.
    """

    free: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.bool))
    kept_columns: int = 0
    visited: list[Tensor] = field(default_factory=list)

    def terms(self, flat: Tensor, progress: float = 1.0) -> LossTerms:
        return super().terms(self._hold(flat), progress)

    def sampled(self, flat: Tensor, streams: Streams, progress: float) -> LossTerms:
        self.visited.append(flat.detach()[:, : self.kept_columns].clone())
        return super().sampled(self._hold(flat), streams, progress)

    def _hold(self, flat: Tensor) -> Tensor:
        return torch.where(self.free, flat, flat.detach())


@dataclass
class _Course:
    """Where a run ended, and all points on its way."""

    point: Tensor
    loss: Tensor
    failed: Tensor
    points: list[Tensor]


def start_many(structure: Structure, batch: Batch, *, seed: int = 0, restarts: int = 1) -> Naturals:
    """Data-driven starts of every data set in natural units, (S, restarts, ...): what :func:`fit_many` begins with."""
    layout = prepare(structure, batch, Method("start", eps=1.0), seed)
    points = _starts(layout, batch, seed, restarts)
    found = _naturals(layout, points)
    return {
        node: {name: value.unflatten(0, (batch.replicas, restarts)) for name, value in values.items()}
        for node, values in found.items()
    }


def fit_many(
    structure: Structure,
    batch: Batch,
    method: Method,
    *,
    seed: int = 0,
    restarts: int = 1,
    begin: Values | None = None,
    frozen: Values | None = None,
) -> Many:
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
    layout = prepare(structure, batch, method, seed)
    points = _starts(layout, batch, seed, restarts)
    points = _overwrite(layout, points, begin, torch.arange(sets * restarts), (sets, restarts))
    points = _overwrite(layout, points, frozen, owners, (sets,))
    built = build_problem(layout.structure, _repeat(batch, owners), method, layout.shapes, seed, layout.maps)
    parts = {part.name: getattr(built, part.name) for part in fields(Problem)}
    sizes = [math.prod(shape) for shape in _theta_shapes(layout).values()]
    problem = _HeldProblem(**parts, free=_free_columns(layout, frozen), kept_columns=sum(sizes))
    with bounded_threads(batch.rows * len(owners)):
        course = _run(problem, points, [restart_seed(seed, number) for number in range(len(owners))])
    judged = torch.where(course.failed | ~torch.isfinite(course.loss), torch.inf, course.loss)
    kept = judged.reshape(sets, restarts).argmin(-1)
    rows = torch.arange(sets) * restarts + kept
    return Many(
        _naturals(layout, course.point[rows]), course.loss[rows], kept, course.failed[rows],
        _stacked([_naturals(layout, point[rows]) for point in course.points]),
    )  # fmt: skip


def _starts(layout: Layout, batch: Batch, seed: int, restarts: int) -> Tensor:
    owners = [owner for owner in range(batch.replicas) for _ in range(restarts)]
    return initial_points(layout, batch, seed, list(range(restarts)) * batch.replicas, owners)


def _repeat(batch: Batch, owners: Tensor) -> Batch:
    """Each data set as often as it has starts; what all share stays shared."""

    def pick(value: Tensor) -> Tensor:
        return value if len(value) == 1 else value[owners]

    return Batch(
        {node: pick(value) for node, value in batch.values.items()},
        {node: pick(value) for node, value in batch.mask.items()},
        pick(batch.weight),
    )


def _theta_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """The model's own parameters, which come before those of its maps."""
    return {key: shape for key, shape in layout.shapes.items() if not key.startswith("phi.")}


def _naturals(layout: Layout, point: Tensor) -> Naturals:
    """Natural parameters at points, whose columns for the maps may be missing."""
    theta = unpack(point, _theta_shapes(layout))
    return {
        node: {name: value.expand(len(point), *value.shape[1:]) for name, value in values.items()}
        for node, values in layout.structure.naturals(theta).items()
    }


def _stacked(naturals: list[Naturals]) -> Naturals:
    first = naturals[0]
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
    parts = {key: torch.full((1, *shape), key not in held) for key, shape in layout.shapes.items()}
    return pack(parts)[0].bool()


def _run(problem: _HeldProblem, points: Tensor, seeds: list[int]) -> _Course:
    if problem.method.optimiser == "adam":
        outcome = descend(problem, points, Streams(seeds), steps=problem.method.steps)
        return _Course(outcome.point, outcome.loss, outcome.failed, [*problem.visited, outcome.point])
    course = [points]

    def on_step(step: int, state: LBFGSState) -> bool:
        course.append(state.point)
        return False

    state = minimise(problem.loss, points, steps=problem.method.steps, on_step=on_step)
    return _Course(state.point, state.loss, state.failed, course)
