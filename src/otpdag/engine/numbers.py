"""Sequences with hidden numbers: a learned Gaussian chain draws them, with a network where linear ones fall short.

Hidden categories beside them are summed over exactly, given each draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otpdag.backward.amortized import RowCode
from otpdag.backward.chain_layout import Chain
from otpdag.backward.chain_states import joint_states
from otpdag.backward.pieces import CONTEXT, check_context
from otpdag.backward.smoother import SequenceMap
from otpdag.data.sequences import SequenceBatch
from otpdag.engine.method import Method
from otpdag.engine.monitor import Monitor
from otpdag.engine.pieces import PieceProblem, bidirectional_map, descend_pieces, piece_problem
from otpdag.engine.search import Course, Layout, Trained, best_of, restart_reports, restart_seed
from otpdag.engine.sequence_starts import START_STEPS, prepare_steps, some_steps, start_of
from otpdag.engine.settling import plain, settle
from otpdag.errors import ModelError
from otpdag.mechanisms import Normal
from otpdag.objective import LossTerms, Streams, split_theta
from otpdag.objective.chain import (
    Steps,
    lay_out_steps,
    lay_out_switching,
    read_states,
    smoother_terms,
    switching_terms,
)
from otpdag.structure import Structure, pack, unpack

__all__ = ["NumberProblem", "check_numbers", "train_numbers"]

SHORT_STEPS = 2500  # steps in the short runs
DRAWN = 8000  # draws of hidden numbers in all, each with its mirror image, where the steps are fewer
LONGEST_PIECE = 400  # steps in one piece of a sequence with hidden numbers
NETWORK_STEPS, NETWORK_RATE, NETWORK_BATCH = 400, 0.01, 800  # of Adam, when a network joins the smoother
MOST_READINGS, READ = 8, 1e-4  # times that the map reads the categories anew, and a fall of the loss that ends it
EACH_READING = 100  # most steps before the map reads them again
COMPARISONS = 40  # batches on which the two maps are compared
CLEARLY = 2.0  # standard errors by which the network must be better


@dataclass
class NumberProblem:
    """Sequences with hidden numbers, whose backward map is learned along with the model."""

    structure: Structure
    backward: SequenceMap
    steps: Steps
    method: Method
    shapes: Mapping[str, tuple[int, ...]]
    chain: Chain | None = None
    """The hidden categories, if there are any."""
    last: LossTerms | None = None

    def loss(self, flat: Tensor) -> Tensor:
        """Total loss of every replica, for one step of a sequence."""
        theta, phi = split_theta(unpack(flat, self.shapes))
        naturals = self.structure.naturals(theta)
        if self.chain is not None:
            self.last = switching_terms(self.structure, naturals, phi, self.backward, self.steps, self.chain)
        else:
            eps = self.method.at("eps", 1.0)
            self.last = smoother_terms(self.structure, naturals, phi, self.backward, self.steps, eps=eps)
        return self.last.total.expand(flat.shape[0])

    def reading_states(self, flat: Tensor) -> NumberProblem:
        """The same problem, whose map reads the probabilities that the categories have at ``flat`` (1, P)."""
        if self.chain is None:
            return self
        theta, phi = split_theta(unpack(flat, self.shapes))
        steps = read_states(self.structure, self.structure.naturals(theta), phi, self.backward, self.steps, self.chain)
        return replace(self, steps=steps)


def check_numbers(structure: Structure, method: Method) -> None:
    """Refuse what sequences with hidden numbers are not fitted by."""
    supports = {structure.mechanisms[node].space.support for node in structure.graph.hidden}
    if "count" in supports:
        raise ModelError("hidden counts are not fitted in sequences; take a hidden number or category")
    if method.backward == "bidirectional":
        check_context(structure)
        if "discrete" in supports:
            raise ModelError("hidden categories and numbers with backward='bidirectional' need optimiser='adam'")
    if "discrete" in supports and method.at("eps", 1.0) != 1.0:
        raise ModelError(f"hidden categories and numbers together need eps = 1; got {method.at('eps', 1.0)}")


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
    pieces = batch.cut(LONGEST_PIECE)
    few = some_steps(pieces, START_STEPS, seed)
    layout = prepare_steps(structure, few, seed)
    targets = _numbers(structure)
    backward = SequenceMap(layout.structure, RowCode.of(structure, batch.steps, structure.graph.observed), targets)
    mixed = len(targets) < len(structure.graph.hidden)
    states = joint_states(structure, _categories(structure)).size if mixed else 0
    features = torch.nn.functional.pad(backward.features(few), (0, 2 * states))
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
        draws = min(4 if mixed else 8, max(1, DRAWN // part.rows))
        noise = torch.randn(1, draws, part.rows, sum(backward.widths), generator=generator, dtype=torch.float64)
        steps = lay_out_steps(layout.structure, part, backward, torch.cat([noise, -noise], 1))
        steps = replace(steps, features=torch.nn.functional.pad(steps.features, (0, 2 * states)))
        chain = lay_out_switching(layout.structure, steps, targets) if mixed else None
        return NumberProblem(layout.structure, backward, steps, method, shapes, chain)

    kept = torch.arange(restarts)
    short_losses = torch.full((restarts,), torch.nan, dtype=torch.float64)
    losses, ends = short_losses.clone(), flat.clone()
    if restarts > 1:
        short, stage = problem(some_steps(pieces, SHORT_STEPS, seed)), f"{restarts} short starts"
        state = settle(short, plain(flat), None, course.short_steps, monitor, stage, kept)
        short_losses, ends = state.loss.double(), flat + state.point
        kept = best_of(state, 1)
        flat = ends[kept]
    final = problem(pieces)
    steps = min(method.steps, EACH_READING) if mixed else method.steps
    state = settle(final, plain(flat), None, steps, monitor, "best start", kept, tolerance=1e-7, keep=True)
    state.point = flat + state.point
    for number in range(MOST_READINGS if mixed else 0):
        if monitor.stopped or bool(state.failed[0]):
            break
        final, before = final.reading_states(state.point), state
        stage = f"categories read {number + 1}"
        state = settle(final, plain(before.point), None, steps, monitor, stage, kept, tolerance=1e-7, keep=True)
        state.point = before.point + state.point
        if float(before.loss[0] - state.loss[0]) < READ:
            state.converged = torch.ones_like(state.converged)
            break
    losses[kept], ends[kept] = state.loss.double(), state.point
    done = len(monitor.history) if mixed else state.steps
    trained = Trained(
        layout, final, state.point, float(state.loss[0]), bool(state.converged[0]), bool(state.failed[0]),  # type: ignore[arg-type]
        done, restart_reports(seed, short_losses, losses, int(kept[0]), ends),
    )  # fmt: skip
    if _network_may_help(structure, method) and not (trained.failed or monitor.stopped):
        return _with_network(trained, batch, method, seed, monitor)
    return trained


def _numbers(structure: Structure) -> tuple[str, ...]:
    hidden = structure.graph.hidden
    return tuple(n for n in structure.graph.order if n in hidden and not structure.mechanisms[n].space.is_discrete)


def _categories(structure: Structure) -> tuple[str, ...]:
    return tuple(n for n in structure.graph.order if n in structure.graph.hidden and n not in _numbers(structure))


# --- a network beside the linear potentials --------------------------------------------------------------------------


def _network_may_help(structure: Structure, method: Method) -> bool:
    """Not where it is unwanted, and not in linear Gaussian models, whose smoother is exact."""
    if method.backward is not None:
        return method.backward == "bidirectional"
    if max(edge.by for edge in structure.graph.lags) > CONTEXT:
        return False
    numbers = _numbers(structure)
    if len(numbers) < len(structure.graph.hidden):
        return False
    touched = [
        mechanism
        for name, mechanism in structure.mechanisms.items()
        if structure.base(name) in numbers or any(structure.base(p) in numbers for p, _ in mechanism.family.parents)
    ]
    return not all(isinstance(one, Normal) and not one.network for one in touched)


def _with_network(trained: Trained, batch: SequenceBatch, method: Method, seed: int, monitor: Monitor) -> Trained:
    """Let a network join the smoother, train both and the model on, and keep the better of before and after.

    The network's last layer starts at zero, so that both are points of one problem, compared on the same batches.
    """
    structure = trained.layout.structure
    backward = bidirectional_map(structure, batch, method)
    theta, phi = split_theta(unpack(trained.point, trained.layout.shapes))
    parameters = theta | phi | backward.init(torch.Generator().manual_seed(seed))
    shapes = {key: tuple(value.shape[1:]) for key, value in parameters.items()}
    adam = replace(
        method, optimiser="adam", steps=NETWORK_STEPS, learning_rate=NETWORK_RATE, batch_size=NETWORK_BATCH,
    )  # fmt: skip
    layout = Layout(structure, (), shapes)
    problem = piece_problem(layout, backward, batch, adam, seed)
    before = pack(parameters)
    number = next(start.number for start in trained.restarts if start.kept)
    outcome = descend_pieces(
        problem, before, [restart_seed(seed, number)], monitor, "network joins", [number], keep=False
    )
    gain, error = _gain(problem, before, outcome.point, seed)
    if bool(outcome.failed[0]) or not gain > CLEARLY * error:
        return trained if method.backward != "bidirectional" else _ended(trained, layout, before, trained.loss)
    return _ended(trained, layout, outcome.point, trained.loss - gain)


def _gain(problem: PieceProblem, before: Tensor, after: Tensor, seed: int) -> tuple[float, float]:
    """By how much the loss of ``after`` is lower on the same pieces and noise, and the standard error of that."""
    gaps = []
    with torch.no_grad():
        for number in range(COMPARISONS):
            found = []
            for point in (before, after):
                problem.generator.manual_seed(seed + number)
                terms = problem.sampled(point, Streams([seed + number]), 1.0)
                found.append(float(terms.total[0]))
            gaps.append(found[0] - found[1])
    drawn = torch.tensor(gaps, dtype=torch.float64)
    return float(drawn.mean()), float(drawn.std() / COMPARISONS**0.5)


def _ended(trained: Trained, layout: Layout, point: Tensor, loss: float) -> Trained:
    restarts = tuple(replace(one, loss=loss, point=point[0]) if one.kept else one for one in trained.restarts)
    return replace(trained, layout=layout, point=point, loss=loss, restarts=restarts)
