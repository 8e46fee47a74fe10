"""Fit graphs with lagged edges: the same starts and the same optimiser, on sequences instead of rows.

Starts run briefly and together on a part of the steps; the best is settled on a larger part, and then on all of them
with the curvature that was learned on the way, so that few passes over everything are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from otpdag.backward.amortized import RowCode
from otpdag.backward.chain import Chain, lay_out_chain
from otpdag.backward.smoother import SequenceMap
from otpdag.engine.lbfgs import LBFGSState, minimise
from otpdag.engine.methods import Method
from otpdag.engine.monitor import Monitor
from otpdag.engine.search import Course, Layout, Trained, _best, _reports, restart_seed
from otpdag.engine.starts import complete_table
from otpdag.errors import ModelError
from otpdag.objective import LossTerms, split_theta
from otpdag.objective.chain import Steps, chain_terms, lay_out_steps, smoother_terms
from otpdag.sequences import SequenceBatch
from otpdag.structure import Structure, lag_name, pack, unpack

__all__ = ["ChainProblem", "check_method", "some_steps", "train_sequences"]

START_STEPS = 20_000  # steps that starts are guessed from
SHORT_STEPS = 10_000  # steps in the short runs
MIDDLE_STEPS = 100_000  # steps on which the best start settles before it sees everything
DRAWN = 8000  # draws of hidden numbers in all, each with its mirror image, where the steps are fewer
LONGEST_PIECE = 400  # steps in one piece of a sequence with hidden numbers
PIECE = 250  # steps in a piece of a long sequence, where only a part is needed
MOST_CURVED = 200  # parameters up to which the curvature is worth its passes
FLATTEST = 1e-7  # the smallest curvature, relative to the largest
ROUGH, FINE = 1e-7, 1e-9  # relative changes of the loss at which a part, and everything, has settled


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


def check_method(method: Method) -> None:
    """Refuse what sequences are not fitted by."""
    if method.noise != "marginal" or not method.reconstruction or method.optimiser != "lbfgs" or method.kappa:
        raise ModelError(
            f"sequences are fitted by method='auto' or 'entropic', with the chain's exact backward map; got "
            f"{method.name!r}"
        )
    if not method.at("eps", 1.0) > 0 or method.at("eta", 1.0):
        raise ModelError("sequences need eps above 0 and eta = 0")


def some_steps(batch: SequenceBatch, steps: int, seed: int) -> SequenceBatch:
    """A random part of about that many steps: whole sequences, or pieces of long ones."""
    if batch.rows <= steps:
        return batch
    pieces = batch.cut(max(PIECE, min(int(batch.lengths.max()), steps // 40)))
    order = torch.randperm(len(pieces.lengths), generator=torch.Generator().manual_seed(seed))
    enough = int((pieces.lengths[order].cumsum(0) < steps).sum()) + 1
    return pieces.take(order[:enough])


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
    if any(not structure.mechanisms[node].space.is_discrete for node in structure.graph.hidden):
        return _train_numbers(structure, batch, method, seed, restarts, monitor, course)
    few = some_steps(batch, START_STEPS, seed)
    layout = _prepare(structure, few, seed)
    points = torch.cat([_one_start(layout, few, restart_seed(seed, k), first=k == 0) for k in range(restarts)])
    kept = torch.arange(restarts)
    short_losses = torch.full((restarts,), torch.nan, dtype=torch.float64)
    losses, ends = short_losses.clone(), points.clone()
    if restarts > 1:
        problem = _problem(layout, some_steps(batch, SHORT_STEPS, seed), method)
        axes = Coordinates.of(problem, points)
        state = _run(problem, axes, None, course.short_steps, monitor, f"{restarts} short starts", kept)
        short_losses, ends = state.loss.double(), axes.point(state.point)
        kept = _best(state, 1)
        points = ends[kept]
    middle = some_steps(batch, MIDDLE_STEPS, seed)
    problem = _problem(layout, middle, method)
    axes, before = Coordinates.of(problem, points), None
    if middle is not batch:
        before = _run(problem, axes, None, method.steps, monitor, "best start, part", kept, tolerance=ROUGH)
        problem = _problem(layout, batch, method)
    settled = ROUGH if middle is not batch else FINE
    state = _run(problem, axes, before, method.steps, monitor, "best start", kept, tolerance=settled, keep=True)
    state.point = axes.point(state.point)
    losses[kept], ends[kept] = state.loss.double(), state.point
    return Trained(
        layout, problem, state.point, float(state.loss[0]), bool(state.converged[0]), bool(state.failed[0]),  # type: ignore[arg-type]
        state.steps, _reports(seed, short_losses, losses, int(kept[0]), ends),
    )  # fmt: skip


def _problem(layout: Layout, batch: SequenceBatch, method: Method) -> ChainProblem:
    return ChainProblem(layout.structure, lay_out_chain(layout.structure, batch), method, layout.shapes)


@dataclass(frozen=True)
class Coordinates:
    r"""Coordinates in which the expected complete-data cost is round: ``point = origin + matrix @ y``.

    A step of steepest descent in them is close to one of expectation-maximisation, and L-BFGS has only to learn what
    that misses (the quasi-Newton acceleration of EM of Jamshidian and Jennrich, 1997).
    """

    origin: Tensor
    matrix: Tensor

    @classmethod
    def of(cls, problem: ChainProblem, points: Tensor) -> Coordinates:
        """Take the curvature at ``points`` (R, P); the chain's probabilities are held fixed in it."""
        replicas, size = points.shape
        if size > MOST_CURVED:
            return cls(points, torch.eye(size, dtype=points.dtype).expand(replicas, -1, -1))
        with torch.enable_grad():
            leaf = points.detach().clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(problem.loss(leaf).sum(), leaf, create_graph=True)
            rows = [torch.autograd.grad(column.sum(), leaf, retain_graph=True)[0] for column in gradient.unbind(-1)]
        curvature = torch.stack(rows, 1).detach()
        curvature = torch.where(
            curvature.isfinite().flatten(1).all(-1)[:, None, None], curvature, torch.eye(size).to(curvature)
        )
        values, vectors = torch.linalg.eigh(0.5 * (curvature + curvature.transpose(1, 2)))
        level = values.abs().maximum(FLATTEST * values.abs().amax(-1, keepdim=True)).clamp(min=1e-30)
        return cls(points, vectors * level.rsqrt().unsqueeze(1))

    def point(self, flat: Tensor) -> Tensor:
        """From these coordinates to parameters."""
        return self.origin + (self.matrix @ flat.unsqueeze(-1)).squeeze(-1)


def _run(
    problem: ChainProblem | NumberProblem,
    axes: Coordinates,
    before: LBFGSState | None,
    steps: int,
    monitor: Monitor,
    stage: str,
    starts: Tensor,
    *,
    tolerance: float = ROUGH,
    keep: bool = False,
) -> LBFGSState:
    """Minimise in new coordinates, from their origin or from where a run on a part of the steps ended."""
    monitor.stage(stage, steps, starts.tolist())

    def on_step(step: int, state: LBFGSState) -> bool:
        terms = problem.last.as_floats(int(_best(state, 1)[0])) if problem.last is not None else {}
        record = {**terms, "loss": float(state.loss.min())}
        return monitor.record(stage, step, record, keep=keep, losses=state.loss.tolist())

    def loss(flat: Tensor) -> Tensor:
        return problem.loss(axes.point(flat))

    start = torch.zeros_like(axes.origin) if before is None else before.point
    history = () if before is None else before.history
    return minimise(loss, start, steps=steps, tolerance=tolerance, history=history, on_step=on_step)


# --- hidden numbers --------------------------------------------------------------------------------------------------


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


def _train_numbers(
    structure: Structure,
    batch: SequenceBatch,
    method: Method,
    seed: int,
    restarts: int,
    monitor: Monitor,
    course: Course,
) -> Trained:
    """Hidden numbers: draws from a learned chain of normals with fixed noise, in pieces where sequences are long."""
    hidden = structure.graph.hidden
    if any(structure.mechanisms[node].space.support in ("discrete", "count") for node in hidden):
        raise ModelError("hidden categories or counts together with hidden numbers are not fitted in sequences yet")
    pieces = batch.cut(LONGEST_PIECE)
    few = some_steps(pieces, START_STEPS, seed)
    layout = _prepare(structure, few, seed)
    targets = tuple(node for node in structure.graph.order if node in hidden)
    backward = SequenceMap(layout.structure, RowCode.of(structure, batch.steps, structure.graph.observed), targets)
    features = backward.features(few)
    points = []
    for number in range(restarts):
        theta, completed = _start(layout, few, restart_seed(seed, number), first=number == 0)
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
        state = _run(problem(some_steps(pieces, SHORT_STEPS // 4, seed)), _plain(flat), None, course.short_steps,
                     monitor, f"{restarts} short starts", kept)  # fmt: skip
        short_losses, ends = state.loss.double(), flat + state.point
        kept = _best(state, 1)
        flat = ends[kept]
    final = problem(pieces)
    state = _run(final, _plain(flat), None, method.steps, monitor, "best start", kept, tolerance=1e-7, keep=True)
    state.point = flat + state.point
    losses[kept], ends[kept] = state.loss.double(), state.point
    return Trained(
        layout, final, state.point, float(state.loss[0]), bool(state.converged[0]), bool(state.failed[0]),  # type: ignore[arg-type]
        state.steps, _reports(seed, short_losses, losses, int(kept[0]), ends),
    )  # fmt: skip


def _plain(points: Tensor) -> Coordinates:
    return Coordinates(points, torch.eye(points.shape[1], dtype=points.dtype).expand(len(points), -1, -1))


# --- starts ----------------------------------------------------------------------------------------------------------


def _prepare(structure: Structure, batch: SequenceBatch, seed: int) -> Layout:
    """Adopt the data's units and declare all parameters."""
    completed = complete_table(structure, batch.steps, 0, np.random.default_rng([seed, 2**20]), first=True)
    values = _with_lags(structure, batch, completed)
    scaled = {
        name: mechanism.scaled_to(
            values[structure.base(name)], structure.parents(name, values), _weight(structure, batch, name)
        )
        for name, mechanism in structure.mechanisms.items()
    }
    found = structure.with_mechanisms(scaled)
    return Layout(found, (), {key: parameter.shape for key, parameter in found.parameters().items()})


def _one_start(layout: Layout, batch: SequenceBatch, seed: int, *, first: bool) -> Tensor:
    """Starting parameters (1, P)."""
    theta, _ = _start(layout, batch, seed, first=first)
    return pack({key: theta[key] for key in layout.shapes})


def _start(
    layout: Layout, batch: SequenceBatch, seed: int, *, first: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Raw parameters (1, ...), each mechanism fitted to the completed steps that it makes; and those steps."""
    structure = layout.structure
    completed = complete_table(structure, batch.steps, 0, np.random.default_rng(seed), first=first)
    completed = _smoothed(structure, batch, completed, 1 if first else 1 + seed % 4)
    values = _with_lags(structure, batch, completed)
    naturals = {}
    for name, mechanism in structure.mechanisms.items():
        weight = _weight(structure, batch, name)
        start = mechanism.start(values[structure.base(name)], structure.parents(name, values), weight)
        found = structure.with_settings(name, start)
        naturals[name] = {key: value.unsqueeze(0) for key, value in found.items()}
    theta = structure.raw(naturals)
    generator = torch.Generator().manual_seed(seed)
    for name, mechanism in structure.mechanisms.items():
        for key, value in mechanism.initial_raw(1, generator).items():
            theta.setdefault(structure.keys[name][key], value)
    for key, shape in layout.shapes.items():
        theta.setdefault(key, torch.zeros(1, *shape, dtype=torch.float64))
    return {key: theta[key].to(batch.steps.weight) for key in layout.shapes}, completed


def _smoothed(
    structure: Structure, batch: SequenceBatch, completed: dict[str, Tensor], reach: int
) -> dict[str, Tensor]:
    """Guessed hidden numbers averaged over neighbouring steps, and scaled so that what is new in a step has spread one.

    The guess of a number from its own step alone explains its children without noise, a trap that no descent leaves.
    """
    found = dict(completed)
    left = batch.lengths.repeat_interleave(batch.lengths) - 1 - batch.times
    for node in structure.graph.hidden:
        if structure.mechanisms[node].space.support != "real" or not structure.longest_lag(node):
            continue
        shifts = [torch.arange(batch.rows) + torch.minimum(left, torch.full_like(left, k)) for k in range(1, reach + 1)]
        shifts += [torch.arange(batch.rows) - batch.times.clamp(max=k) for k in range(1, reach + 1)]
        mean = torch.stack([completed[node], *(completed[node][at] for at in shifts)]).mean(0)
        before = batch.lagged(mean.unsqueeze(0), 1)[0]
        slope = (mean * before).sum(0) / (before**2).sum(0).clamp(min=1e-12)
        fresh = (mean - slope * before)[batch.times > 0]
        spread = fresh.std(0) if len(fresh) > 1 else torch.ones_like(slope)
        found[node] = mean / torch.where(spread > 1e-6, spread, torch.ones_like(spread))
    return found


def _with_lags(structure: Structure, batch: SequenceBatch, completed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    lagged = {
        lag_name(edge.parent, edge.by): batch.lagged(completed[edge.parent].unsqueeze(0), edge.by)[0]
        for edge in structure.graph.lags
    }
    return {**completed, **lagged}


def _weight(structure: Structure, batch: SequenceBatch, name: str) -> Tensor:
    """One for the steps that a mechanism makes, zero for first steps (or, of ``z[0]``, for all others)."""
    base = structure.base(name)
    lag = structure.longest_lag(base)
    made = batch.times >= lag if name == base else batch.times < lag
    if base in batch.steps.mask:
        made = made & batch.steps.mask[base][0].all(-1)
    return made.to(batch.steps.weight)
