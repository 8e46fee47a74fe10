r"""Estimates that survive outliers: partial transport, in which the model need not explain every row.

The data's mass in a region of low model density may not exceed a little more than the model's own mass there; what
exceeds it is left untransported. Regions are cut by the row's loss :math:`-\log p_\theta(x)`, whose distribution under
the model is known from samples, so this works for rows of any types and dimension:

.. math:: w_i = \min\{1, s \, P_\theta(\ell \in B_k) / P_w(\ell \in B_k)\}, \qquad \ell(x_i) \in B_k.

On clean data the weights stay near one. Fits and weights alternate; starts come from trimmed rows, because a start at
the maximum-likelihood estimate of contaminated data is already spoilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

from otpdag.data import Batch
from otpdag.engine.lbfgs import minimise
from otpdag.engine.method import Method
from otpdag.engine.monitor import Monitor
from otpdag.engine.outlying_groups import RemoteOptions, near_rows, standard_columns
from otpdag.engine.problem import Problem, build_problem
from otpdag.engine.search import (
    Course,
    Layout,
    Restart,
    Trained,
    distinct,
    initial_points,
    prepare,
    restart_seed,
    short_batch,
    train,
)
from otpdag.engine.starts import k_means, squared_distances
from otpdag.errors import ModelError
from otpdag.inference.ancestral import ancestral
from otpdag.objective import row_losses, split_theta
from otpdag.structure import Structure, unpack

__all__ = ["RobustOptions", "train_robust"]

Array = NDArray[np.float64]

GUESSES = 4
"""How many ways there are to guess the clean rows that a start is taken from."""


@dataclass(frozen=True)
class RobustOptions:
    """How much the fit may leave out.

    Args:
        most_dropped: Largest share of rows that may be left out; beyond it the most likely rows are kept.
        slack: How far the data's mass in a region may exceed the model's.
        remote: What counts as apart from the rest; rows apart take no part in the search for a start.
        tails: Upper tail probabilities of the loss under the model that cut the regions.
        cap: Tail probability whose loss caps a row's loss when starts are compared.
        rounds: How often fit and weights alternate at most.
        round_steps: Steps of the fit in each of these rounds.
        same_weights: Mean change of a row's weight below which they stop.
        concentration: Rounds of the short runs on the most likely rows alone, and as many with capped weights.
        sample: Model rows that the loss's distribution is taken from.
    """

    most_dropped: float = 0.25
    slack: float = 1.25
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    tails: tuple[float, ...] = (0.1, 0.05, 0.02, 0.01, 0.004, 0.001)
    cap: float = 0.004
    rounds: int = 8
    round_steps: int = 15
    same_weights: float = 5e-4
    concentration: int = 3
    sample: int = 4000


def train_robust(
    structure: Structure,
    batch: Batch,
    method: Method,
    *,
    seed: int,
    restarts: int,
    monitor: Monitor,
    course: Course | None = None,
    options: RobustOptions | None = None,
) -> tuple[Trained, Tensor]:
    """Fit with outliers left out; also the final weight of each row (N,)."""
    course, options = course or Course(), options or RobustOptions()
    if method.optimiser != "lbfgs" or not method.reconstruction:
        raise ModelError(f"robust='outliers' needs the entropic method; got {method.name!r}")
    layout = prepare(structure, batch, method, seed)
    near = batch.take(_near_rows(layout, batch, method, options, seed, restarts))
    points = _trimmed_starts(layout, near, seed, restarts)
    part = _laid_out(layout, short_batch(near, course.short_rows, seed), method, seed)
    points, short_losses = _concentrate(part, points, options, course, monitor, seed)
    order = distinct(short_losses.argsort(), short_losses)[: course.finalists]
    problem = _laid_out(layout, batch, method, seed)
    finals = _alternate(problem, points[order], options, monitor, order.tolist(), seed)
    judged = _truncated_loss(_laid_out(layout, near, method, seed), finals, options, seed)
    best = int(judged.argmin())
    weights = _capped_weights(problem, finals[best : best + 1], options, seed)
    final = minimise(reweighted(problem, weights).loss, finals[best : best + 1], steps=method.steps)
    losses, ends = torch.full_like(short_losses, torch.nan), points.clone()
    losses[order], ends[order] = judged, finals
    reports = tuple(
        Restart(n, restart_seed(seed, n), float(short_losses[n]), float(losses[n]), n == int(order[best]), ends[n])
        for n in range(restarts)
    )
    trained = Trained(
        layout, reweighted(problem, weights), final.point, float(final.loss[0]), bool(final.converged[0]),
        bool(final.failed[0]), final.steps, reports,
    )  # fmt: skip
    return trained, weights[0]


def _laid_out(layout: Layout, batch: Batch, method: Method, seed: int) -> Problem:
    return build_problem(layout.structure, batch, method, layout.shapes, seed, layout.maps)


def _alternate(
    problem: Problem, points: Tensor, options: RobustOptions, monitor: Monitor, starts: Sequence[int], seed: int
) -> Tensor:
    """Weights and fits in turn, on all rows."""
    monitor.stage("leave out outliers", options.rounds, starts)
    before: Tensor | None = None
    for step in range(options.rounds):
        weights = _capped_weights(problem, points, options, seed)
        if before is not None and bool(((weights - before).abs().mean(-1) < options.same_weights).all()):
            break
        before = weights
        state = minimise(reweighted(problem, weights).loss, points, steps=options.round_steps)
        points = torch.where(state.failed.unsqueeze(-1), points, state.point)
        record = {"loss": float(state.loss.min()), "kept": float(weights.mean(-1).max())}
        monitor.record("leave out outliers", step, record, keep=True, losses=state.loss.tolist())
    return points


def reweighted(problem: Problem, weights: Tensor) -> Problem:
    """The same problem with row weights (R, N) on top of its own."""
    groups = [replace(group, weight=group.weight * weights[:, group.rows]) for group in problem.groups]
    return replace(problem, groups=groups)


def _near_rows(
    layout: Layout, batch: Batch, method: Method, options: RobustOptions, seed: int, restarts: int
) -> Tensor:
    """Rows among which starts are looked for and judged."""

    def losses(part: Batch) -> tuple[Array, int]:
        with Monitor(show=False) as quiet:
            found = train(layout.structure, part, method, seed=seed, restarts=restarts, monitor=quiet)
        return row_losses_at(found.problem, found.point)[0].cpu().numpy(), found.point.shape[-1]

    limits = replace(options.remote, most=options.most_dropped)
    return near_rows(layout.structure, batch, limits, losses, np.random.default_rng([seed, 11]))


# -- starts -----------------------------------------------------------------------------------------------------------


def _trimmed_starts(layout: Layout, batch: Batch, seed: int, restarts: int) -> Tensor:
    """Starts from different guesses of the clean rows: all, without isolated groups, dense, central; parts of those.

    All rows, because a small component that belongs to the model looks like a group of outliers until it is fitted.
    """
    columns = standard_columns(layout.structure, batch)
    generator = np.random.default_rng([seed, 7])
    guesses = (
        np.arange(batch.rows), _joined_rows(columns, generator), _dense_rows(columns, generator), _central_rows(columns)
    )  # fmt: skip
    points = []
    for number in range(restarts):
        rows = guesses[number % GUESSES]
        if number >= GUESSES:
            rows = generator.choice(rows, size=max(len(rows) // 2, 2), replace=False)
        part = batch.take(torch.as_tensor(np.sort(rows)))
        points.append(initial_points(layout, part, seed, [number]))
    return torch.cat(points)


def _central_rows(columns: Array) -> NDArray[np.int64]:
    norm = np.abs(columns).max(1)
    return np.argsort(norm)[: max(2, int(0.75 * len(norm)))]


def _dense_rows(columns: Array, generator: np.random.Generator) -> NDArray[np.int64]:
    """Rows whose tenth neighbour among a sample is near."""
    jittered = columns + 1e-6 * generator.standard_normal(columns.shape)
    sample = jittered[generator.choice(len(columns), min(len(columns), 1500), replace=False)]
    neighbour = min(10, len(sample))
    distance = np.asarray(cKDTree(sample).query(jittered, k=[neighbour])[0])
    return np.argsort(distance[:, 0])[: max(2, int(0.8 * len(columns)))]


def _joined_rows(columns: Array, generator: np.random.Generator, groups: int = 8) -> NDArray[np.int64]:
    """Rows without the most isolated of a few groups, up to a quarter of all."""
    sample = columns[generator.choice(len(columns), min(len(columns), 1500), replace=False)]
    centres, _ = k_means(sample, min(groups, len(sample)), generator)
    squared = squared_distances(columns, centres)
    group, distance = squared.argmin(1), np.sqrt(np.maximum(squared.min(1), 0.0))
    apart = np.sort(np.linalg.norm(centres[:, None] - centres[None], axis=-1), axis=1)[:, 1]
    radius = np.array([np.median(distance[group == g]) if (group == g).any() else 1.0 for g in range(len(centres))])
    kept = np.ones(len(columns), dtype=bool)
    for g in np.argsort(-apart / np.maximum(radius, 1e-9)):
        if (group[kept] == g).sum() + (~kept).sum() <= 0.25 * len(columns):
            kept[group == g] = False
            break
    return np.flatnonzero(kept)


def _concentrate(
    problem: Problem, points: Tensor, options: RobustOptions, course: Course, monitor: Monitor, seed: int
) -> tuple[Tensor, Tensor]:
    """Short runs, each on the rows that are most likely at present; then the starts' truncated losses."""
    monitor.stage("trimmed short starts", 2 * options.concentration, range(len(points)))
    from_all_rows = (torch.arange(len(points), device=points.device) % GUESSES == 0).unsqueeze(-1)
    rough = replace(options, sample=options.sample // 3)
    for step in range(2 * options.concentration):
        if step < options.concentration:
            losses = row_losses_at(problem, points)
            likely = losses <= losses.quantile(1 - options.most_dropped, dim=-1, keepdim=True)
            weights = (likely | from_all_rows).to(losses)
        else:  # hard trimming shrinks what it keeps; capped weights let it recover before starts are judged
            weights = _capped_weights(problem, points, rough, seed)
        state = minimise(reweighted(problem, weights).loss, points, steps=course.short_steps // 2)
        points = torch.where(state.failed.unsqueeze(-1), points, state.point)
        monitor.record("", step, {"loss": float(state.loss.min())}, keep=False, losses=state.loss.tolist())
    return points, _truncated_loss(problem, points, rough, seed)


# -- weights ----------------------------------------------------------------------------------------------------------


def row_losses_at(problem: Problem, points: Tensor) -> Tensor:
    """The loss of every row at every replica's parameters: (R, N)."""
    theta, _ = split_theta(unpack(points.detach(), problem.shapes))
    with torch.no_grad():
        naturals = problem.structure.naturals(theta)
        groups = problem.placed(points).groups
        found = row_losses(problem.structure, naturals, groups, problem.method.at("eps", 1.0))
    return found.nan_to_num(nan=1e12, posinf=1e12)


def _model_losses(problem: Problem, point: Tensor, options: RobustOptions, seed: int) -> Tensor:
    """Losses of rows that the model itself makes, with the data's pattern of missing cells: (sample,)."""
    theta, _ = split_theta(unpack(point.detach(), problem.shapes))
    structure, batch = problem.structure, problem.batch
    with torch.no_grad():
        naturals = structure.naturals(theta)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(batch.rows, (options.sample,), generator=generator)
        pattern = batch.take(rows)
        given = {node: pattern.values[node][:1] for node in structure.given}
        values = ancestral(structure, naturals, options.sample, generator, do=given)
    made = {node: torch.where(_cells(pattern.mask[node], values[node]), values[node], 0.0) for node in pattern.values}
    sample = Batch(made, pattern.mask, torch.ones_like(pattern.weight))
    made_problem = build_problem(structure, sample, problem.method, problem.shapes, seed, problem.maps)
    return row_losses_at(made_problem, point)[0]


def _cells(mask: Tensor, value: Tensor) -> Tensor:
    return mask if mask.shape[-1] == value.shape[-1] else mask[..., :1]


def _capped_weights(problem: Problem, points: Tensor, options: RobustOptions, seed: int) -> Tensor:
    """Weights (R, N) that keep the data's mass in each tail region near the model's."""
    losses = row_losses_at(problem, points)
    return torch.stack(
        [_cap(losses[r], _model_losses(problem, points[r : r + 1], options, seed), options) for r in range(len(points))]
    )


def _cap(losses: Tensor, model: Tensor, options: RobustOptions) -> Tensor:
    edges = torch.stack([model.quantile(1 - tail) for tail in options.tails])
    beyond = edges[-1] + 0.5 * (edges[-1] - edges[0])
    region = torch.bucketize(losses, edges)
    masses = [
        options.tails[k] - (options.tails[k + 1] if k + 1 < len(options.tails) else 0.0)
        for k in range(len(options.tails))
    ]
    weights, lowest = torch.ones_like(losses), 1.0
    for k, mass in enumerate(masses, start=1):
        inside = region == k
        share = float(inside.to(losses).mean())
        lowest = min(lowest, options.slack * mass / share) if share > 0 else lowest
        weights[inside] = lowest
    weights[losses > beyond] = 0.0
    return _within_limit(weights, losses, options.most_dropped)


def _within_limit(weights: Tensor, losses: Tensor, most: float) -> Tensor:
    """If too much would be left out, keep the most likely rows instead."""
    if float(1 - weights.mean()) <= most:
        return weights
    return (losses <= losses.quantile(1 - most)).to(losses)


def _truncated_loss(problem: Problem, points: Tensor, options: RobustOptions, seed: int) -> Tensor:
    """Mean loss with each row's loss capped at the model's own tail: what leaving a row out costs."""
    losses = row_losses_at(problem, points)
    caps = [
        _model_losses(problem, points[r : r + 1], options, seed).quantile(1 - options.cap) for r in range(len(points))
    ]
    return torch.minimum(losses, torch.stack(caps).unsqueeze(-1)).mean(-1)
