"""Sequences with hidden numbers: a learned Gaussian chain draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.backward.amortized import RowCode
from otpdag.backward.smoother import SequenceMap
from otpdag.engine.methods import Method
from otpdag.engine.monitor import Monitor
from otpdag.engine.search import Course, Layout, Trained, _best, _reports, restart_seed
from otpdag.engine.sequence_starts import START_STEPS, prepare_steps, some_steps, start_of
from otpdag.engine.settling import plain, settle
from otpdag.errors import ModelError
from otpdag.objective import LossTerms, split_theta
from otpdag.objective.chain import Steps, lay_out_steps, smoother_terms
from otpdag.sequences import SequenceBatch
from otpdag.structure import Structure, pack, unpack

__all__ = ["NumberProblem", "train_numbers"]

SHORT_STEPS = 2500  # steps in the short runs
DRAWN = 8000  # draws of hidden numbers in all, each with its mirror image, where the steps are fewer
LONGEST_PIECE = 400  # steps in one piece of a sequence with hidden numbers


@dataclass
class NumberProblem:
    """Sequences with hidden numbers, whose backward map is learned along with the model."""

    structure: Structure
    backward: SequenceMap
    steps: Steps
    method: Method
    shapes: Mapping[str, tuple[int, ...]]
    last: LossTerms | None = None

    def loss(self, flat: Tensor) -> Tensor:
        """Total loss of every replica, for one step of a sequence."""
        theta, phi = split_theta(unpack(flat, self.shapes))
        self.last = smoother_terms(
            self.structure, self.structure.naturals(theta), phi, self.backward, self.steps,
            eps=self.method.at("eps", 1.0),
        )  # fmt: skip
        return self.last.total.expand(flat.shape[0])


def train_numbers(
    structure: Structure,
    batch: SequenceBatch,
    method: Method,
    seed: int,
    restarts: int,
    monitor: Monitor,
    course: Course,
) -> Trained:
    """Draws from a learned chain of normals with fixed noise, in pieces where sequences are long."""
    hidden = structure.graph.hidden
    if any(structure.mechanisms[node].space.support in ("discrete", "count") for node in hidden):
        raise ModelError("hidden categories or counts together with hidden numbers are not fitted in sequences yet")
    pieces = batch.cut(LONGEST_PIECE)
    few = some_steps(pieces, START_STEPS, seed)
    layout = prepare_steps(structure, few, seed)
    targets = tuple(node for node in structure.graph.order if node in hidden)
    backward = SequenceMap(layout.structure, RowCode.of(structure, batch.steps, structure.graph.observed), targets)
    features = backward.features(few)
    points = []
    for number in range(restarts):
        theta, completed = start_of(layout, few, restart_seed(seed, number), first=number == 0)
        theta |= backward.start(few, features, completed)
        points.append(theta)
    shapes = {key: tuple(value.shape[1:]) for key, value in points[0].items()}
    flat = torch.cat([pack(theta) for theta in points])
    layout = Layout(layout.structure, (), shapes)

    def problem(part: SequenceBatch) -> NumberProblem:
        generator = torch.Generator().manual_seed(seed)
        draws = min(8, max(1, DRAWN // part.rows))
        noise = torch.randn(1, draws, part.rows, sum(backward.widths), generator=generator, dtype=torch.float64)
        steps = lay_out_steps(layout.structure, part, backward, torch.cat([noise, -noise], 1))
        return NumberProblem(layout.structure, backward, steps, method, shapes)

    kept = torch.arange(restarts)
    short_losses = torch.full((restarts,), torch.nan, dtype=torch.float64)
    losses, ends = short_losses.clone(), flat.clone()
    if restarts > 1:
        state = settle(problem(some_steps(pieces, SHORT_STEPS, seed)), plain(flat), None, course.short_steps,
                     monitor, f"{restarts} short starts", kept)  # fmt: skip
        short_losses, ends = state.loss.double(), flat + state.point
        kept = _best(state, 1)
        flat = ends[kept]
    final = problem(pieces)
    state = settle(final, plain(flat), None, method.steps, monitor, "best start", kept, tolerance=1e-7, keep=True)
    state.point = flat + state.point
    losses[kept], ends[kept] = state.loss.double(), state.point
    return Trained(
        layout, final, state.point, float(state.loss[0]), bool(state.converged[0]), bool(state.failed[0]),  # type: ignore[arg-type]
        state.steps, _reports(seed, short_losses, losses, int(kept[0]), ends),
    )  # fmt: skip
