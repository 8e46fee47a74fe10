"""Fit graphs with lagged edges: the same starts and the same optimisers, on sequences instead of rows.

Starts run briefly and together on a part of the steps; the best is settled on a larger part, and then on all of them
with the curvature that was learned on the way, so that few passes over everything are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.backward.chain_layout import Chain, lay_out_chain
from otpdag.data.sequences import SequenceBatch
from otpdag.engine.method import Method, entropic, method_of, transport
from otpdag.engine.monitor import Monitor
from otpdag.engine.numbers import check_numbers, train_numbers
from otpdag.engine.pieces import check_pieces, train_pieces
from otpdag.engine.search import Course, Layout, Trained, best_of, restart_reports, restart_seed
from otpdag.engine.sequence_starts import START_STEPS, one_start, prepare_steps, some_steps
from otpdag.engine.settling import FINE, ROUGH, Coordinates, settle
from otpdag.engine.windows import train_windows
from otpdag.errors import ModelError
from otpdag.inference.sequence_posterior import has_numbers
from otpdag.objective import LossTerms
from otpdag.objective.chain import chain_terms
from otpdag.objective.windows import check_windows
from otpdag.structure import Structure, unpack

__all__ = ["ChainProblem", "sequence_method", "train_sequences"]

SHORT_STEPS = 10_000  # steps in the short runs
MIDDLE_STEPS = 100_000  # steps on which the best start settles before it sees everything


@dataclass
class ChainProblem:
    """Sequences laid out for one method; :meth:`loss` keeps the last terms for the history."""

    structure: Structure
    chain: Chain
    method: Method
    shapes: Mapping[str, tuple[int, ...]]
    last: LossTerms | None = None

    def loss(self, flat: Tensor) -> Tensor:
        """Total loss of every replica, for one step of a sequence."""
        naturals = self.structure.naturals(unpack(flat, self.shapes))
        self.last = chain_terms(self.structure, naturals, self.chain, eps=self.method.at("eps", 1.0))
        return self.last.total.expand(flat.shape[0])


def sequence_method(structure: Structure, method: str | Method) -> Method:
    """Read the ``method`` argument of a fit of sequences, and refuse what they are not fitted by."""
    if method == "transport":
        chosen = transport("direct" if _windows_serve(structure) else "backward")
    else:
        chosen = entropic() if method == "auto" else method_of(method)
    if chosen.scope == "local":
        raise ModelError("sequences are drawn as a whole: scope must be 'joint'; got 'local'")
    if chosen.optimiser == "lbfgs":
        _check_smooth(structure, chosen)
    elif chosen.kappa:
        raise ModelError("the direct term of sequences is minimised by L-BFGS: use optimiser='lbfgs' or kappa=0")
    else:
        check_pieces(structure, chosen)
    return chosen


def _windows_serve(structure: Structure) -> bool:
    try:
        check_windows(structure)
    except ModelError:
        return False
    return True


def _check_smooth(structure: Structure, method: Method) -> None:
    if method.kappa:
        if method.reconstruction:
            raise ModelError("sequences have the direct term or the others, not both: set reconstruction or kappa to 0")
        check_windows(structure)
        return
    if not method.at("eps", 1.0) > 0 or method.at("eta", 1.0):
        raise ModelError("sequences in closed form need eps above 0 and eta = 0; with optimiser='adam' both are free")
    if has_numbers(structure):
        check_numbers(structure, method)
    elif method.backward is not None:
        raise ModelError(f"backward={method.backward!r} is for hidden numbers, or for optimiser='adam'")


def train_sequences(
    structure: Structure,
    batch: SequenceBatch,
    method: Method,
    *,
    seed: int,
    restarts: int,
    monitor: Monitor,
    course: Course | None = None,
) -> Trained:
    """Run the whole course."""
    course = course or Course()
    if method.optimiser == "adam":
        return train_pieces(structure, batch, method, seed, restarts, monitor, course)
    if method.kappa:
        return train_windows(structure, batch, method, seed, restarts, monitor, course)
    if has_numbers(structure):
        return train_numbers(structure, batch, method, seed, restarts, monitor, course)
    few = some_steps(batch, START_STEPS, seed)
    layout = prepare_steps(structure, few, seed)
    points = torch.cat([one_start(layout, few, restart_seed(seed, k), first=k == 0) for k in range(restarts)])
    kept = torch.arange(restarts)
    short_losses = torch.full((restarts,), torch.nan, dtype=torch.float64)
    losses, ends = short_losses.clone(), points.clone()
    if restarts > 1:
        problem = _problem(layout, some_steps(batch, SHORT_STEPS, seed), method)
        axes = Coordinates.of(problem, points)
        state = settle(problem, axes, None, course.short_steps, monitor, f"{restarts} short starts", kept)
        short_losses, ends = state.loss.double(), axes.point(state.point)
        kept = best_of(state, 1)
        points = ends[kept]
    middle = some_steps(batch, MIDDLE_STEPS, seed)
    problem = _problem(layout, middle, method)
    axes, before = Coordinates.of(problem, points), None
    if middle is not batch:
        before = settle(problem, axes, None, method.steps, monitor, "best start, part", kept, tolerance=ROUGH)
        problem = _problem(layout, batch, method)
    settled = ROUGH if middle is not batch else FINE
    state = settle(problem, axes, before, method.steps, monitor, "best start", kept, tolerance=settled, keep=True)
    state.point = axes.point(state.point)
    losses[kept], ends[kept] = state.loss.double(), state.point
    return Trained(
        layout, problem, state.point, float(state.loss[0]), bool(state.converged[0]), bool(state.failed[0]),  # type: ignore[arg-type]
        state.steps, restart_reports(seed, short_losses, losses, int(kept[0]), ends),
    )  # fmt: skip


def _problem(layout: Layout, batch: SequenceBatch, method: Method) -> ChainProblem:
    return ChainProblem(layout.structure, lay_out_chain(layout.structure, batch), method, layout.shapes)
