"""Minimum transport on sequences: windows of the data against windows of the model, by L-BFGS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.engine.method import Method
from otpdag.engine.monitor import Monitor
from otpdag.engine.search import Course, Trained, best_of, restart_reports, restart_seed
from otpdag.engine.sequence_starts import START_STEPS, one_start, prepare_steps, some_steps
from otpdag.engine.settling import plain, settle
from otpdag.inference.ancestral import ancestral_sequences
from otpdag.objective import LossTerms
from otpdag.objective.windows import Windows, lay_out_windows, refined_windows, window_terms
from otpdag.structure import Structure, unpack

__all__ = ["WindowProblem", "train_windows"]

SHORT_FEATURES = 200  # features in the short runs
MODEL_STEPS = 20_000  # steps drawn from the model, by which features are whitened a second time
LONGEST_DRAWN = 200


@dataclass
class WindowProblem:
    """Windows laid out for one method; :meth:`loss` keeps the last terms for the history."""

    structure: Structure
    windows: Windows
    method: Method
    shapes: Mapping[str, tuple[int, ...]]
    last: LossTerms | None = None

    def loss(self, flat: Tensor) -> Tensor:
        """Total loss of every replica."""
        naturals = self.structure.naturals(unpack(flat, self.shapes))
        self.last = window_terms(self.structure, naturals, self.windows, self.method.kappa)
        return self.last.total.expand(flat.shape[0])

    def refined(self, point: Tensor, longest: int, seed: int) -> WindowProblem:
        """The same problem with its features whitened by the covariance under the model at ``point`` (1, P)."""
        naturals = self.structure.naturals(unpack(point.detach(), self.shapes))
        length = min(longest, LONGEST_DRAWN)
        many = -(-MODEL_STEPS // length)
        drawn = ancestral_sequences(self.structure, naturals, many, length, torch.Generator().manual_seed(seed))
        values = {node: drawn[node].flatten(1, 2) for node in self.structure.graph.observed}
        cells = {node: self.structure.mechanisms[node].space.cells for node in values}
        mask = {node: torch.ones(1, many * length, cells[node], dtype=torch.bool) for node in values}
        steps = Batch(values, mask, torch.ones(1, many * length, dtype=torch.float64))
        sample = SequenceBatch(steps, torch.full((many,), length))
        windows = refined_windows(self.structure, self.windows, sample, self.method.features.model_ridge)
        return replace(self, windows=windows)


def train_windows(
    structure: Structure,
    batch: SequenceBatch,
    method: Method,
    seed: int,
    restarts: int,
    monitor: Monitor,
    course: Course,
) -> Trained:
    """Short runs of all starts on few features, the best on all of them, then whitened by the model's own windows."""
    few = some_steps(batch, START_STEPS, seed)
    layout = prepare_steps(structure, few, seed)
    points = torch.cat([one_start(layout, few, restart_seed(seed, k), first=k == 0) for k in range(restarts)])
    kept = torch.arange(restarts)
    short_losses = torch.full((restarts,), torch.nan, dtype=torch.float64)
    losses, ends = short_losses.clone(), points.clone()

    def problem(part: SequenceBatch, features: int) -> WindowProblem:
        divergence = replace(method.features, features=min(features, method.features.features))
        windows = lay_out_windows(layout.structure, part, divergence, torch.Generator().manual_seed(seed))
        return WindowProblem(layout.structure, windows, method, layout.shapes)

    if restarts > 1:
        short = problem(few, SHORT_FEATURES)
        stage = f"{restarts} short starts"
        state = settle(short, plain(points), None, 2 * course.short_steps, monitor, stage, kept)
        short_losses, ends = state.loss.double(), points + state.point
        kept = best_of(state, 1)
        points = ends[kept]
    final = problem(batch, method.features.features)
    state = settle(final, plain(points), None, method.steps, monitor, "best start", kept, keep=True)
    points = points + state.point
    for refinement in range(method.refinements):
        if monitor.stopped or bool(state.failed[0]):
            break
        final = final.refined(points, int(batch.lengths.max()), seed + refinement)
        state = settle(final, plain(points), None, method.steps, monitor, "refined weights", kept, keep=True)
        points = points + state.point
    losses[kept], ends[kept] = state.loss.double(), points
    return Trained(
        layout, final, points, float(state.loss[0]), bool(state.converged[0]), bool(state.failed[0]),  # type: ignore[arg-type]
        state.steps, restart_reports(seed, short_losses, losses, int(kept[0]), ends),
    )  # fmt: skip
