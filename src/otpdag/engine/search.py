"""The course of a fit: data-driven starts, short runs of all of them at once, the best continued to the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from otpdag.backward.amortized import AmortizedMap
from otpdag.data import Batch
from otpdag.engine.adam import AdamOutcome, descend
from otpdag.engine.lbfgs import LBFGSState, minimise
from otpdag.engine.method import Method
from otpdag.engine.monitor import Monitor
from otpdag.engine.problem import Problem, build_problem, maps_for
from otpdag.engine.starts import complete_table, scale_to, start_naturals
from otpdag.objective import LossTerms, Streams
from otpdag.structure import Structure, pack

__all__ = [
    "Course",
    "Layout",
    "Restart",
    "Trained",
    "best_of",
    "distinct",
    "initial_points",
    "prepare",
    "restart_reports",
    "train",
]


SAME_LOSS = 2e-4
SAME_SUM = 1e-6
MOST_ADAPTATIONS = 12


@dataclass(frozen=True)
class Course:
    """How much work each stage does.

    Args:
        short_rows: Most rows in the short runs.
        short_elements: Most starts times rows times points in the short runs; fewer than 300 rows are never taken.
        short_steps: Steps of the short runs; after half of them only the better half of the starts goes on.
        short_grid: Points for one unknown number in the short runs.
        finalists: How many continue on all rows.
        finalist_steps: For how many steps, before the best alone goes on.
        short_share: Share of Adam's steps that the short runs take.
    """

    short_rows: int = 600
    short_elements: int = 150_000
    short_steps: int = 24
    short_grid: int = 24
    finalists: int = 3
    finalist_steps: int = 15
    short_share: float = 0.15


@dataclass(frozen=True)
class Restart:
    """What became of one start."""

    number: int
    seed: int
    short_loss: float
    loss: float
    kept: bool
    point: Tensor


@dataclass(frozen=True)
class Layout:
    """A structure in the data's units with the maps and parameter shapes of a fit."""

    structure: Structure
    maps: tuple[AmortizedMap, ...]
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Trained:
    """The end of a fit: parameters (1, P), how it ended, and all restarts."""

    layout: Layout
    problem: Problem
    point: Tensor
    loss: float
    converged: bool
    failed: bool
    steps: int
    restarts: tuple[Restart, ...]


def restart_seed(seed: int, number: int) -> int:
    """The seed of one restart, the same whether it runs alone or together with others."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def prepare(structure: Structure, batch: Batch, method: Method, seed: int) -> Layout:
    """Adopt the data's units and declare all parameters."""
    generator = np.random.default_rng([seed, 2**20])
    scaled = scale_to(structure, batch, complete_table(structure, batch, 0, generator, first=True))
    maps = maps_for(scaled, batch, method)
    shapes = {key: parameter.shape for key, parameter in scaled.parameters().items()}
    for backward in maps:
        drawn = backward.init(1, torch.Generator().manual_seed(0))
        shapes |= {key: tuple(value.shape[1:]) for key, value in drawn.items()}
    return Layout(scaled, maps, shapes)


def initial_points(
    layout: Layout, batch: Batch, seed: int, numbers: Sequence[int], owners: Sequence[int] | None = None
) -> Tensor:
    """Starting parameters (R, P), one row for each restart number; ``owners`` tells which data set each belongs to."""
    rows = []
    for position, number in enumerate(numbers):
        owner = 0 if owners is None else owners[position]
        rows.append(_one_start(layout, batch, owner, restart_seed(seed, number), first=number == 0))
    return torch.cat(rows)


def _one_start(layout: Layout, batch: Batch, owner: int, seed: int, *, first: bool) -> Tensor:
    structure = layout.structure
    completed = complete_table(structure, batch, owner, np.random.default_rng(seed), first=first)
    naturals = start_naturals(structure, batch, completed, owner)
    lifted = {node: {name: value.unsqueeze(0) for name, value in found.items()} for node, found in naturals.items()}
    theta = structure.raw(lifted)
    generator = torch.Generator().manual_seed(seed)
    for node, names in structure.keys.items():
        fresh = structure.mechanisms[node].initial_raw(1, generator, first=first)
        theta |= {names[name]: value for name, value in fresh.items() if names[name] not in theta}
    for key, parameter in structure.parameters().items():
        theta.setdefault(key, torch.zeros(1, *parameter.shape, dtype=torch.float64))
    for backward in layout.maps:
        phi = backward.init(1, generator)
        backward.start_from(phi, 0, batch, completed, owner)
        theta |= phi
    like = batch.weight
    return pack({key: theta[key].to(like) for key in layout.shapes})


def train(
    structure: Structure,
    batch: Batch,
    method: Method,
    *,
    seed: int,
    restarts: int,
    monitor: Monitor,
    course: Course | None = None,
) -> Trained:
    """Run the whole course."""
    course = course or Course()
    layout = prepare(structure, batch, method, seed)
    # one start looks at all rows; of many, each looks at the part that the short runs see
    seen = batch if restarts == 1 else short_batch(batch, course.short_rows, seed)
    points = initial_points(layout, seen, seed, range(restarts))
    if method.optimiser == "adam":
        return _train_adam(layout, batch, method, points, seed, monitor, course)
    return _train_lbfgs(layout, batch, method, points, seed, monitor, course)


def short_batch(batch: Batch, rows: int, seed: int) -> Batch:
    """A random part of the rows for the short runs."""
    if batch.rows <= rows:
        return batch
    index = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(seed))[:rows]
    return batch.take(index)


def _train_lbfgs(
    layout: Layout, batch: Batch, method: Method, points: Tensor, seed: int, monitor: Monitor, course: Course
) -> Trained:
    problem = build_problem(layout.structure, batch, method, layout.shapes, seed, layout.maps)
    restarts = points.shape[0]
    kept = torch.arange(restarts)
    short_losses = torch.full((restarts,), torch.nan, dtype=torch.float64)
    losses, ends = short_losses.clone(), points.clone()
    if restarts > 1:
        short_losses, ends, kept = _short_runs(layout, batch, method, points, seed, monitor, course)
        points = ends[kept]
    if len(kept) > 1:
        stage = f"best {len(kept)} on all rows"
        state = _run(problem, points, course.finalist_steps, monitor, stage, kept, keep=False)
        losses[kept], ends[kept] = state.loss.cpu().double(), state.point
        best = best_of(state, 1)
        kept, points = kept[best], state.point[best]
    problem, _ = _on_fitting_grids(problem, points)
    state = _run(problem, points, method.steps, monitor, "best start", kept, keep=True)
    problem, state = _adapt(problem, state, monitor, kept)
    for refinement in range(method.refinements if method.kappa and not monitor.stopped else 0):
        problem = problem.refined(state.point, seed + refinement)
        state = _run(problem, state.point, method.steps, monitor, "refined weights", kept, keep=True)
    losses[kept], ends[kept] = state.loss.cpu().double(), state.point
    reports = restart_reports(seed, short_losses, losses, int(kept[0]), ends)
    return Trained(
        layout,
        problem,
        state.point,
        float(state.loss[0]),
        bool(state.converged[0]),
        bool(state.failed[0]),
        state.steps,
        reports,
    )


def _short_runs(
    layout: Layout, batch: Batch, method: Method, points: Tensor, seed: int, monitor: Monitor, course: Course
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and ends of short runs on a part of the rows, and the starts that go on."""
    restarts = points.shape[0]
    coarse = replace(method, gibbs=replace(method.gibbs, grid=min(method.gibbs.grid, course.short_grid)))
    points_per_row = _points_per_row(layout, batch, coarse, seed)
    rows = max(300, min(course.short_rows, course.short_elements // (restarts * points_per_row)))
    part = short_batch(batch, rows, seed)
    short = build_problem(layout.structure, part, coarse, layout.shapes, seed, layout.maps)
    everyone = torch.arange(restarts)
    half = course.short_steps // 2
    state = _run(short, points, half, monitor, f"{restarts} short starts", everyone, keep=False)
    losses, ends = state.loss.cpu().double(), state.point.clone()
    better = best_of(state, max(course.finalists, (restarts + 1) // 2))
    state = _run(
        short, ends[better], course.short_steps - half, monitor, f"better {len(better)} starts", better, keep=False
    )
    losses[better], ends[better] = state.loss.cpu().double(), state.point
    finalists = distinct(best_of(state, len(better)), state.loss)[: course.finalists]
    return losses, ends, better[finalists]


def _points_per_row(layout: Layout, batch: Batch, method: Method, seed: int) -> int:
    if not method.reconstruction:
        return 1
    few = short_batch(batch, 50, seed)
    problem = build_problem(layout.structure, few, replace(method, kappa=0.0), layout.shapes, seed, layout.maps)
    return max((group.least_points for group in problem.groups), default=1)


def _adapt(problem: Problem, state: LBFGSState, monitor: Monitor, kept: Tensor) -> tuple[Problem, LBFGSState]:
    """Move the grids to the posteriors and go on, until that changes the loss no more; mostly it never does."""
    for _ in range(MOST_ADAPTATIONS):
        if bool(state.failed[0]) or monitor.stopped:
            break
        problem, has_moved = _on_fitting_grids(problem, state.point)
        if not has_moved:
            break
        state = _run(problem, state.point, problem.method.steps, monitor, "moved grids", kept, keep=True)
    return problem, state


def _on_fitting_grids(problem: Problem, point: Tensor) -> tuple[Problem, bool]:
    """The problem with its points at the posteriors, if that makes a difference to the loss at ``point`` (1, P)."""
    if not problem.has_numbers:
        return problem, False
    moved = problem.adapted(point)
    with torch.no_grad():
        before, after = problem.loss(point), moved.loss(point)
    same = (after - before).abs() <= SAME_SUM * (1 + after.abs())
    return (problem, False) if bool(same.all()) or not bool(torch.isfinite(after).all()) else (moved, True)


def _run(
    problem: Problem, points: Tensor, steps: int, monitor: Monitor, stage: str, starts: Tensor, *, keep: bool
) -> LBFGSState:
    monitor.stage(stage, steps, starts.tolist(), problem)
    problem = problem.placed(points)

    def on_step(step: int, state: LBFGSState) -> bool:
        terms = problem.last.as_floats(int(best_of(state, 1)[0])) if problem.last is not None else {}
        record = {**terms, "loss": float(state.loss.min())}
        return monitor.record(stage, step, record, keep=keep, losses=state.loss.tolist())

    return minimise(problem.loss, points, steps=steps, on_step=on_step)


def best_of(state: LBFGSState, many: int) -> Tensor:
    """Indices of the lowest losses; failed rows come last."""
    loss = torch.where(state.failed | ~torch.isfinite(state.loss), torch.inf, state.loss)
    return loss.argsort()[: min(many, len(loss))]


def distinct(order: Tensor, loss: Tensor) -> Tensor:
    """Of starts that reached the same loss, and so most likely the same optimum, the first only."""
    chosen: list[int] = []
    for start in order.tolist():
        gap = SAME_LOSS * (1 + float(loss[start].abs()))
        if all(abs(float(loss[start] - loss[other])) > gap for other in chosen):
            chosen.append(start)
    return torch.tensor(chosen, device=loss.device)


def _train_adam(
    layout: Layout, batch: Batch, method: Method, points: Tensor, seed: int, monitor: Monitor, course: Course
) -> Trained:
    problem = build_problem(layout.structure, batch, method, layout.shapes, seed, layout.maps)
    restarts = points.shape[0]
    seeds = [restart_seed(seed, number) for number in range(restarts)]
    short_losses = torch.full((restarts,), torch.nan, dtype=torch.float64)
    ends, best = points.clone(), 0
    if restarts > 1:
        steps = max(1, int(course.short_share * method.steps))
        short = replace(problem, method=replace(method, steps=steps))
        stage, starts = f"{restarts} short starts", range(restarts)
        outcome = _descend(short, points, Streams(seeds), steps, monitor, stage, starts, keep=False)
        short_losses, ends = outcome.loss.cpu().double(), outcome.point.clone()
        best = int(torch.where(outcome.failed | ~torch.isfinite(short_losses), torch.inf, short_losses).argmin())
        points = outcome.point[best : best + 1]
    outcome = _descend(problem, points, Streams([seeds[best]]), method.steps, monitor, "best start", [best], keep=True)
    losses = torch.full((restarts,), torch.nan, dtype=torch.float64)
    losses[best], ends[best] = outcome.loss.cpu().double()[0], outcome.point[0]
    settled = bool(outcome.settled[0])
    reports = restart_reports(seed, short_losses, losses, best, ends)
    return Trained(
        layout,
        problem,
        outcome.point,
        float(outcome.loss[0]),
        settled,
        bool(outcome.failed[0]),
        outcome.steps,
        reports,
    )


def _descend(
    problem: Problem,
    points: Tensor,
    streams: Streams,
    steps: int,
    monitor: Monitor,
    stage: str,
    starts: Iterable[int],
    *,
    keep: bool,
) -> AdamOutcome:
    monitor.stage(stage, steps, starts)

    def on_step(step: int, terms: LossTerms) -> bool:
        losses = terms.total.detach()
        record = terms.as_floats(int(losses.argmin()))
        return monitor.record(stage, step, record, keep=keep, losses=losses.reshape(-1).tolist())

    return descend(problem, points, streams, steps=steps, on_step=on_step)


def restart_reports(seed: int, short: Tensor, final: Tensor, kept: int, ends: Tensor) -> tuple[Restart, ...]:
    """What became of every start."""
    return tuple(
        Restart(
            number,
            restart_seed(seed, number),
            float(short[number]),
            float(final[number]),
            number == kept,
            ends[number],
        )
        for number in range(len(short))
    )
