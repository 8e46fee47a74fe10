"""Adam on pieces of sequences, with the amortised bidirectional map: any length, in memory that pieces bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from otpdag.backward.bidirectional import BidirectionalMap
from otpdag.backward.pieces import Cuts, check_context
from otpdag.data.sequences import SequenceBatch
from otpdag.engine.adam import AdamOutcome, descend
from otpdag.engine.method import Method
from otpdag.engine.monitor import Monitor
from otpdag.engine.problem import sampled_options
from otpdag.engine.search import Course, Layout, Trained, restart_reports, restart_seed
from otpdag.engine.sequence_starts import START_STEPS, prepare_steps, some_steps, start_of
from otpdag.errors import ModelError
from otpdag.objective import LossTerms, Streams, split_theta
from otpdag.objective.pieces import piece_terms
from otpdag.structure import Structure, pack, unpack

__all__ = [
    "PieceProblem",
    "bidirectional_map",
    "check_pieces",
    "descend_pieces",
    "piece_problem",
    "train_pieces",
]

FEWEST_PIECES = 8


@dataclass
class PieceProblem:
    """Sequences cut in pieces for one method; every step of Adam draws some, the same for all replicas."""

    structure: Structure
    backward: BidirectionalMap
    cuts: Cuts
    features: Tensor
    method: Method
    shapes: Mapping[str, tuple[int, ...]]
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def pieces(self) -> int:
        """How many pieces make about a batch of steps."""
        return min(len(self.cuts), max(FEWEST_PIECES, self.method.batch_size // self.cuts.span))

    def sampled(self, flat: Tensor, streams: Streams, progress: float) -> LossTerms:
        """Loss terms of every replica on fresh pieces with fresh noise."""
        theta, phi = split_theta(unpack(flat, self.shapes))
        pieces = self.cuts.draw(self.structure, self.features, self.pieces, self.generator)
        options = sampled_options(self.method, progress)
        return piece_terms(self.structure, self.backward, theta, phi, pieces, streams, options)


def check_pieces(structure: Structure, method: Method) -> None:
    """Refuse what pieces of sequences are not fitted by."""
    supports = {structure.mechanisms[node].space.support for node in structure.graph.hidden}
    check_context(structure)
    if "count" in supports:
        raise ModelError("hidden counts are not fitted in sequences; take a hidden number or category")
    if method.backward is not None and method.backward != "bidirectional":
        raise ModelError(f"sequences are drawn by backward='bidirectional'; got {method.backward!r}")
    if method.noise == "marginal" and (not method.eps or method.eta) and structure.graph.hidden:
        raise ModelError("with noise='marginal', sequences need eps above 0 and eta = 0")


def bidirectional_map(structure: Structure, batch: SequenceBatch, method: Method) -> BidirectionalMap:
    """The map that a method learns; categories beside numbers need none where noise is integrated out."""
    found = BidirectionalMap.of(structure, batch)
    summed = method.noise == "marginal" and bool(found.smoother.targets)
    return replace(found, categories=()) if summed else found


def train_pieces(
    structure: Structure,
    batch: SequenceBatch,
    method: Method,
    seed: int,
    restarts: int,
    monitor: Monitor,
    course: Course,
) -> Trained:
    """Short runs of all starts together, the best continued."""
    few = some_steps(batch, START_STEPS, seed)
    layout = prepare_steps(structure, few, seed)
    backward = bidirectional_map(layout.structure, few, method)
    features = backward.features(few)
    points = []
    for number in range(restarts):
        own = restart_seed(seed, number)
        theta, completed = start_of(layout, few, own, first=number == 0)
        points.append(theta | backward.start(few, features, completed, torch.Generator().manual_seed(own)))
    shapes = {key: tuple(value.shape[1:]) for key, value in points[0].items()}
    problem = piece_problem(Layout(layout.structure, (), shapes), backward, batch, method, seed)
    flat = torch.cat([pack(theta) for theta in points])
    seeds = [restart_seed(seed, number) for number in range(restarts)]
    short_losses = torch.full((restarts,), torch.nan, dtype=torch.float64)
    ends, best = flat.clone(), 0
    if restarts > 1:
        steps = max(1, int(course.short_share * method.steps))
        short = replace(problem, method=replace(method, steps=steps))
        outcome = descend_pieces(short, flat, seeds, monitor, f"{restarts} short starts", range(restarts), keep=False)
        short_losses, ends = outcome.loss.double(), outcome.point.clone()
        best = int(torch.where(outcome.failed | ~torch.isfinite(short_losses), torch.inf, short_losses).argmin())
        flat = outcome.point[best : best + 1]
    outcome = descend_pieces(problem, flat, [seeds[best]], monitor, "best start", [best], keep=True)
    losses = torch.full((restarts,), torch.nan, dtype=torch.float64)
    losses[best], ends[best] = outcome.loss.double()[0], outcome.point[0]
    return Trained(
        Layout(layout.structure, (), shapes), problem, outcome.point, float(outcome.loss[0]),  # type: ignore[arg-type]
        bool(outcome.settled[0]), bool(outcome.failed[0]), outcome.steps,
        restart_reports(seed, short_losses, losses, best, ends),
    )  # fmt: skip


def piece_problem(
    layout: Layout, backward: BidirectionalMap, batch: SequenceBatch, method: Method, seed: int
) -> PieceProblem:
    """Cut all sequences; what steps read is laid out once."""
    generator = torch.Generator().manual_seed(seed)
    features = backward.features(batch)
    return PieceProblem(layout.structure, backward, Cuts.of(batch), features, method, layout.shapes, generator)


def descend_pieces(
    problem: PieceProblem,
    points: Tensor,
    seeds: list[int],
    monitor: Monitor,
    stage: str,
    starts: range | list[int],
    *,
    keep: bool,
) -> AdamOutcome:
    """Run Adam over all steps of the method."""
    monitor.stage(stage, problem.method.steps, starts)

    def on_step(step: int, terms: LossTerms) -> bool:
        losses = terms.total.detach()
        record = terms.as_floats(int(losses.argmin()))
        return monitor.record(stage, step, record, keep=keep, losses=losses.reshape(-1).tolist())

    return descend(problem, points, Streams(seeds), steps=problem.method.steps, on_step=on_step)
