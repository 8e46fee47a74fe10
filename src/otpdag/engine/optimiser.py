"""Optimisers: what a search asks of one run, what is told on the way, where it ends; and those of losses without noise.

:class:`Deterministic` takes a problem's closed-form updates where it has some, and L-BFGS otherwise. Updates are
combined by Anderson's mixing (:mod:`otpdag.numerics`; for those of expectation-maximisation see Henderson and Varadhan
2019): as few passes as a quasi-Newton method takes, without a gradient or a step length. Where that raises the loss,
the plain update is taken, and the history forgotten. It never does if it maximises; one that a sample guides
(:mod:`otpdag.likelihood.m_step`) may, and is then shortened. :class:`EM` over-relaxes updates instead: it goes further
where they point, as long as that pays.

L-BFGS runs over many replicas at once, in coordinates in which the loss is round. Each row of the parameter matrix
``(R, P)`` is a problem of its own, with its own curvature history and step length; one evaluation serves all rows, and
the result equals that of R separate runs. A step of steepest descent in the coordinates is close to one of Newton's
method or, where a problem's gradient holds what is unknown fixed, to one of expectation-maximisation; L-BFGS has only
to learn what that misses (Jamshidian and Jennrich, 1997). Directions in which the loss bends down count by the size of
their curvature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from otpdag.errors import check_count
from otpdag.numerics import Array, Flags, correction, under
from otpdag.problem import LossTerms, Problem, loss_and_gradient

SMALL_IN_A_ROW = 3  # small changes in a row that make an end: one or two happen in narrow valleys
MIXED = "mixed."  # under which a memory has what updates were mixed from

# what an optimiser has learned on its way, as named tensors: it can be handed on, and written to a file
Memory = Mapping[str, Tensor]

State = TypeVar("State")


def as_memory(state: Any) -> dict[str, Tensor]:
    """The fields of a state that are tensors, arrays or whole numbers, by name."""
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    held = {name: value for name, value in values.items() if isinstance(value, Tensor | np.ndarray | int)}
    return {name: torch.as_tensor(value) for name, value in held.items()}


def from_memory(kind: type[State], memory: Memory, /, **others: Any) -> State:
    """Invert :func:`as_memory`; fields that it left out are given."""
    own = {}
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name not in others:
            value = memory[one.name]
            own[one.name] = int(value) if one.type == "int" else value.numpy().copy() if one.type == "Array" else value
    return kind(**own, **others)


@dataclass(frozen=True)
class Rivalry:
    """How replicas compete that run only until one of them is chosen.

    Args:
        margin: By how much a replica's loss may end above the best one's for its end to matter.
        same: Relative difference of losses below which two replicas count as having come to the same end.
    """

    margin: float
    same: float


@dataclass(frozen=True)
class Run:
    """One run of an optimiser: a part of a search.

    Args:
        problem: What to minimise.
        points: From where (R, P).
        steps: Most steps.
        tolerance: Relative change of the loss at which it has converged; the optimiser's own if left out.
        seeds: One for each replica's random stream.
        memory: What an earlier run learned, if this one goes on from it.
        is_over: Whether work before the first step shall be cut short: somebody asked for the end.
        rivalry: How replicas compete, if all but one are given up afterwards; every end matters if left out.
        gives_up: Of accelerated updates, which replicas (R,) have no chance any more and stay where they are.
    """

    problem: Problem
    points: Tensor
    steps: int
    tolerance: float | None = None
    seeds: Sequence[int] = ()
    memory: Memory = field(default_factory=dict)
    is_over: Callable[[], bool] = lambda: False
    rivalry: Rivalry | None = None
    gives_up: Callable[[Progress, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Outcome:
    """Where a run ended, for each replica: point and loss, whether it converged, whether it met an infinite loss."""

    point: Tensor
    loss: Tensor
    converged: Tensor
    failed: Tensor
    steps: int
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """A step that was made: its number, terms, losses and points of all replicas, and how to write it down.

    Attributes:
        snapshot: All that is needed to go on from here.
    """

    step: int
    terms: LossTerms
    losses: Tensor
    points: Tensor
    snapshot: Callable[[], Memory]


Watch = Callable[[Progress], bool]  # called after every step; returning True stops the run


@runtime_checkable
class Optimiser(Protocol):
    """Minimises a problem for all replicas at once: a dataclass, so that a fit may have another number of steps."""

    @property
    def steps(self) -> int:
        """Most steps of the last, longest run."""
        ...

    @property
    def is_stochastic(self) -> bool:
        """Whether it draws minibatches and noise, so that losses of single steps do not compare."""
        ...

    def run(self, run: Run, watch: Watch, resume: Memory | None = None) -> Outcome:
        """Run a run, from its beginning or from a snapshot of it."""
        ...


# -- closed-form updates -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acceleration:
    """How updates are combined, and when they end.

    Args:
        remembered: Differences of points and of updates that are combined.
        quick_share: Where changes shrink to this share of the one before, updates need no help: old differences would
            mislead them.
        at_the_end: A change of all parameters, in units of the data, that makes an end by itself: updates have nowhere
            to go.
        rounding: A relative rise of the loss below which it is rounding.
        quick_falls: Quick falls in a row after which the rest is believed to be what they foretell: one may be chance.
        rest: Share of a small fall that may be left where the end is foretold: points are off by its root, and what is
            said of flat directions is read off second derivatives at the end.
        shorter: What an update is shortened by where it raises the loss: as the shares that a step of Newton's method
            tries.
        least_share: The least share of an update that a climb tries: the rest is left to descent, which has a line
            search.
        most_gain: How many times as much as its last step each step that is left could bring a replica: falls grow on
            plateaus.
    """

    remembered: int = 8
    quick_share: float = 0.3
    at_the_end: float = 1e-8
    rounding: float = 1e-11
    quick_falls: int = 2
    rest: float = 1e-3
    shorter: float = 0.25
    least_share: float = 0.05
    most_gain: float = 10.0


@dataclass
class _Accelerated:
    """Where all replicas stand: a point whose loss is known, and the trial that comes next.

    Arrays, not tensors: with few parameters the calls are what a step costs, and these are cheaper.

    Attributes:
        fall: By how much the loss fell in the last step that was kept.
        rest: By how much it would fall from here on if falls went on to shrink as the last one did; infinite if it did
            not.
        quick_falls: How many falls in a row were each a small share of the one before.
        share: How much of the plain update the trial is; more than one where it is a combination.
        given_up: Whether somebody asked a replica to stay where it is.
    """

    point: Array
    loss: Array
    trial: Array
    plain: Array
    change: Array
    moves: Array
    changes: Array
    small: Array
    fall: Array
    rest: Array
    quick_falls: Array
    rules: ClassVar[Acceleration] = Acceleration()
    share: Array
    given_up: Array
    step: int

    @classmethod
    def of(cls, points: Tensor, seen: Memory | None = None) -> _Accelerated:
        """Where a run begins, perhaps with what was :meth:`seen` before it."""
        start = points.detach().cpu().double().numpy().copy()
        empty, none = np.zeros((len(start), cls.rules.remembered, start.shape[1])), np.zeros(len(start))
        held = {"moves": empty, "changes": empty, "fall": none}
        held = {name: seen[name].numpy().copy() if seen else one.copy() for name, one in held.items()}
        infinite = np.full_like(none, np.inf)
        return cls(
            point=start,
            loss=infinite,
            trial=start,
            plain=start,
            change=np.zeros_like(start),
            **held,
            small=none,
            rest=infinite.copy(),
            quick_falls=none.copy(),
            share=np.ones_like(none),
            given_up=none.copy(),
            step=0,
        )

    @np.errstate(invalid="ignore", over="ignore", divide="ignore")
    def follow(self, updates: Array, loss: Array, tolerance: float, mixed: Array | None = None) -> None:
        """Keep or refuse the trial, and choose the next one; only coordinates that are ``mixed`` (P,) go further."""
        change = updates - self.trial if mixed is None else (updates - self.trial) * mixed
        ended = self.is_settled
        finite = np.isfinite(loss) & np.isfinite(change).all(-1) & ~ended
        fallen = self.loss - loss
        good = finite & (fallen >= -self.rules.rounding * (1 + np.abs(loss)))
        small_fall = tolerance * (1 + np.abs(loss))
        near = good & (np.abs(fallen) <= small_fall)
        small = np.where(_size(change)[:, 0] <= self.rules.at_the_end, SMALL_IN_A_ROW, self.small + 1)
        self.small = np.where(good, np.where(near, small, 0.0), self.small)
        good = good & (loss <= self.loss)
        kept, known = good[:, None], np.isfinite(self.loss)[:, None]  # the first point has none before it
        # the loss falls by the square of what points come nearer by; and some have nowhere to come to, as the logits of
        # a probability of zero
        falling = fallen <= self.rules.quick_share**2 * self.fall
        quick = kept & known & (falling[:, None] | (_size(change) <= self.rules.quick_share * _size(self.change)))
        self.quick_falls = np.where(good & falling, self.quick_falls + 1, 0.0)
        rest = np.where(fallen < self.fall, fallen**2 / (self.fall - fallen), np.inf)
        self.rest = np.where(good, rest, self.rest)
        at_rest = (self.quick_falls >= self.rules.quick_falls) & (rest <= self.rules.rest * small_fall)
        self.small[good & at_rest] = SMALL_IN_A_ROW
        self.fall = np.where(good & known[:, 0], fallen, self.fall)
        slot = self.step % self.rules.remembered
        if not good.all():
            self.moves, self.changes = (np.where(kept[..., None], held, 0.0) for held in (self.moves, self.changes))
        move = self.trial - self.point if mixed is None else (self.trial - self.point) * mixed
        self.moves[:, slot] = np.where(kept & known, move, 0.0)
        self.changes[:, slot] = np.where(kept & known, change - self.change, 0.0)
        self.plain = np.where(kept, updates, self.plain)
        self.point = np.where(kept, self.trial, self.point)
        self.change = np.where(kept, change, self.change)
        self.loss = np.where(good, loss, self.loss)
        self.trial = self.plain
        self.share = np.where(good, 1.0, np.where(ended, self.share, self.rules.shorter * self.share))
        if self.plain_is_higher.any():
            part = self.point + self.share[:, None] * (self.plain - self.point)
            self.trial = np.where(self.plain_is_higher[:, None], part, self.plain)
        if not quick.all():
            ahead = self.plain - correction(*map(torch.from_numpy, (self.change, self.moves, self.changes))).numpy()
            helped = kept & ~quick & np.isfinite(ahead).all(-1, keepdims=True)
            self.trial = np.where(helped, ahead, self.trial)
            combined = helped[:, 0] & (ahead != self.plain).any(-1)
            self.share = np.where(combined, 1.0 / self.rules.shorter, self.share)
        self.step += 1

    def seen(self) -> dict[str, Tensor]:
        """What a run on the same or a similar problem may go on with: differences, the oldest first, and falls."""
        moves, changes = (np.roll(one, -(self.step % self.rules.remembered), 1) for one in (self.moves, self.changes))
        held = {"moves": moves, "changes": changes, "fall": self.fall, "given_up": self.given_up}
        return {name: torch.from_numpy(one.copy()) for name, one in held.items()}

    @property
    def is_settled(self) -> Flags:
        """Which replicas (R,) have come to their end: they stay where they are, and depend on no other."""
        return (self.small >= SMALL_IN_A_ROW) | (self.given_up > 0)

    @property
    def plain_is_higher(self) -> Flags:
        """Whether the plain update (R,) was tried and raised the loss."""
        return self.share < 1.0

    @np.errstate(invalid="ignore")
    def have_ended(self, rivalry: Rivalry | None, left: int) -> bool:
        """Whether all replicas have settled; of rivals, whether it is known which of them is to be kept."""
        settled = self.is_settled
        if rivalry is None or self.step < 2:  # a single loss tells no fall
            return bool(settled.all())
        best = self.loss.argmin()
        above = self.loss - self.loss[best]
        behind = above > rivalry.margin + left * self.rules.most_gain * self.fall
        alike = above + self.rest + self.rest[best] <= rivalry.same * (1 + np.abs(self.loss))
        beaten = behind | alike
        beaten[best] = True
        return bool(beaten.all() or (settled[best] and (settled | beaten).all()))


def _size(change: Array) -> Array:
    """Of the largest change of each replica (R, 1)."""
    return np.abs(change).max(-1, keepdims=True, initial=0.0)


def accelerated_updates(run: Run, tolerance: float, watch: Watch, resume: Memory | None = None) -> Outcome:
    """Update all replicas of a run until nothing changes; one that goes on mixes what the one before had seen."""
    begun = _Accelerated.of(run.points, under(run.memory, MIXED))
    state = begun if resume is None else from_memory(_Accelerated, resume)
    outcome = _updated(run, state, tolerance, watch)
    return replace(outcome, memory={MIXED + name: value for name, value in state.seen().items()})


def _updated(run: Run, state: _Accelerated | _OverRelaxed, tolerance: float, watch: Watch) -> Outcome:
    """Follow updates until nothing changes."""
    terms: LossTerms | None = None
    for step in range(state.step, run.steps):
        _, terms = _followed(run, state, tolerance, terms)
        loss, point = (torch.from_numpy(array).to(run.points) for array in (state.loss, state.point))
        progress = Progress(step, terms, loss, point, partial(as_memory, state))
        if run.gives_up is not None and isinstance(state, _Accelerated):
            out = run.gives_up(progress, torch.from_numpy(state.fall)).numpy()
            state.given_up = np.where(state.is_settled, state.given_up, out)
        stop = watch(progress)
        if stop or state.have_ended(run.rivalry, run.steps - state.step):
            break
    converged = torch.from_numpy(state.small >= SMALL_IN_A_ROW)
    loss, point = (torch.from_numpy(array).to(run.points) for array in (state.loss, state.point))
    return Outcome(point, loss, converged.to(loss.device), ~torch.isfinite(loss), state.step)


def gave_up(outcome: Outcome) -> Tensor:
    """Which replicas (R,) of a run gave up."""
    return outcome.memory.get(f"{MIXED}given_up", torch.zeros_like(outcome.loss)) > 0


def mixed_of(memory: Memory, replicas: Tensor) -> Memory:
    """What updates were mixed from, of some replicas (R,) alone; what else a memory has is of all of them."""
    return {name: held[replicas] for name, held in memory.items() if name.startswith(MIXED)}


def climbed(run: Run, little: float) -> Tensor:
    """Where updates lead (R, P) until each replica has gained little, relative to its loss, in a step that was kept.

    The last update is not looked at, but for replicas of which one went too far: these end where they were lowest.
    """
    state = _Accelerated.of(run.points)
    too_far = np.zeros(len(state.loss), dtype=bool)
    for _ in range(run.steps):
        before = state.loss
        loss = _followed(run, state, little)[0]
        too_far |= state.plain_is_higher
        small = little * (1 + np.abs(state.loss))
        with np.errstate(invalid="ignore"):  # a loss that never was finite has gained nothing
            gained_little, close = ~(before - state.loss > small), loss - before <= small
        # a step too far is no end: less of it follows, unless that has been tried or could bring little
        no_further = state.plain_is_higher & (close | (state.share < state.rules.least_share))
        if (gained_little & ((loss <= before) | no_further | state.is_settled)).all() or run.is_over():
            break
    reached = np.where(too_far[:, None], state.point, state.plain)
    return torch.from_numpy(reached).to(run.points)


def _followed(
    run: Run, state: _Accelerated | _OverRelaxed, tolerance: float, before: LossTerms | None = None
) -> tuple[Array, LossTerms]:
    """Update the trial of every replica, and follow; the losses at the trials, and terms as the step ``before`` had."""
    stretched = None if run.problem.updates is None else run.problem.updates.stretched
    mixed = None if stretched is None else stretched.cpu().double().numpy()
    trial = torch.from_numpy(state.trial).to(run.points)
    if isinstance(state, _OverRelaxed):
        updates, terms = _one_by_one(run.problem, trial)
    elif run.problem.updates is None or not run.problem.updates.apart or not state.is_settled.any():
        updates, terms = run.problem.update(trial)
    else:
        losses = torch.from_numpy(state.loss)  # all that a snapshot tells
        before = LossTerms.of(losses, reconstruction=losses) if before is None else before
        updates, terms = _unsettled(run.problem, trial, before, torch.from_numpy(~state.is_settled))
    loss = terms.total.detach().double().expand(len(state.point)).cpu().numpy()
    state.follow(updates.detach().cpu().double().numpy(), loss, tolerance, mixed)
    return loss, terms


def _unsettled(problem: Problem, points: Tensor, before: LossTerms, moving: Tensor) -> tuple[Tensor, LossTerms]:
    """Updates of the replicas that are ``moving`` (R,); those that have settled keep their points, and terms."""
    images, told = problem.update(points[moving])
    updates, terms = points.clone(), LossTerms(*(getattr(before, one.name).clone() for one in fields(before)))
    updates[moving] = images
    for one in fields(terms):
        getattr(terms, one.name)[moving] = getattr(told, one.name)
    return updates, terms


def _one_by_one(problem: Problem, points: Tensor) -> tuple[Tensor, LossTerms]:
    """The updates of all replicas, one after another: each is a pass over all of the data."""
    pairs = [problem.update(point) for point in points.split(1)]
    terms = LossTerms(*(torch.cat([getattr(one, f.name).reshape(1) for _, one in pairs]) for f in fields(LossTerms)))
    return torch.cat([point for point, _ in pairs]), terms


@dataclass
class _OverRelaxed:
    """Where all replicas stand, with the pace of each."""

    point: Array
    loss: Array
    pace: Array
    small: Array
    step: int
    how: EM

    @classmethod
    def of(cls, points: Tensor, how: EM) -> _OverRelaxed:
        none = np.zeros(len(points))
        return cls(points.detach().cpu().double().numpy().copy(), none + np.inf, none + 1.0, none, 0, how)

    @property
    def trial(self) -> Array:
        """Where updates are asked for next."""
        return self.point

    @np.errstate(invalid="ignore")
    def follow(self, updates: Array, loss: Array, tolerance: float, stretched: Array | None = None) -> None:
        """Go where the updates point, and further."""
        small = np.abs(self.loss - loss) <= tolerance * (1 + np.abs(loss))
        self.small = np.where(small, self.small + 1, 0.0)
        self.pace = np.where(loss <= self.loss, np.minimum(self.how.growth * self.pace, self.how.longest), 1.0)
        finite = np.isfinite(loss) & np.isfinite(updates).all(-1)
        pace = self.pace[:, None] if stretched is None else np.where(stretched, self.pace[:, None], 1.0)
        self.point = np.where(finite[:, None], self.point + pace * (updates - self.point), self.point)
        self.loss, self.step = loss, self.step + 1

    def have_ended(self, rivalry: Rivalry | None, left: int) -> bool:
        """Whether all replicas have settled."""
        return bool((self.small >= SMALL_IN_A_ROW).all())


# -- L-BFGS ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coordinates:
    """``point = origin + matrix @ y``, or ``origin + scale * y``, or ``origin + y``."""

    origin: Tensor
    matrix: Tensor | None = None
    scale: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, points: Tensor, flattest: float = 1e-7) -> Coordinates:
        """By the problem's metric at ``points`` (R, P), where it has one.

        The smallest curvature is ``flattest`` of the largest: flatter directions are as good as unknown.
        """
        metric = problem.metric(points)
        if metric is None or metric.dim() == 2:
            return cls(points, scale=None if metric is None else metric.rsqrt())
        finite = metric.isfinite().flatten(1).all(-1)[:, None, None]
        metric = torch.where(finite, metric, torch.eye(points.shape[1]).to(metric))
        values, vectors = torch.linalg.eigh(0.5 * (metric + metric.transpose(1, 2)))
        level = values.abs().maximum(flattest * values.abs().amax(-1, keepdim=True)).clamp(min=1e-30)
        # laid out like a matrix that was read from a file, so that a resumed run multiplies alike
        return cls(points, (vectors * level.rsqrt().unsqueeze(1)).contiguous())

    def point(self, y: Tensor) -> Tensor:
        """From these coordinates to parameters."""
        if self.matrix is None:
            return self.origin + (y if self.scale is None else self.scale * y)
        return self.origin + (self.matrix @ y.unsqueeze(-1)).squeeze(-1)


ORIGIN = "axes.origin"  # what tells that a memory is of a run of L-BFGS

Evaluate = Callable[[Tensor], Tensor | LossTerms]  # maps parameters (R, P) to losses (R,), or to their terms


@dataclass
class LBFGSState:
    """Where a run stands.

    Attributes:
        small_changes: In how many steps in a row each row's loss has hardly changed.
        moves: Past steps s (M, R, P), the oldest first.
        changes: Changes y of the gradient along them (M, R, P).
        rho: 1 / (s . y), (M, R); zero where a pair carries no curvature.
    """

    point: Tensor
    loss: Tensor
    gradient: Tensor
    converged: Tensor
    failed: Tensor
    small_changes: Tensor
    moves: Tensor
    changes: Tensor
    rho: Tensor
    steps: int = 0
    evaluations: int = 1


def descended(run: Run, tolerance: float, watch: Watch, resume: Memory | None = None) -> Outcome:
    """Minimise in the problem's own coordinates, which a run that goes on shares with the one before."""
    before = resume or (run.memory if ORIGIN in run.memory else {})
    axes = Coordinates(**under(before, "axes.")) if ORIGIN in before else Coordinates.of(run.problem, run.points)
    last: list[LossTerms] = []
    stopped = False

    def evaluate(y: Tensor) -> LossTerms:
        last[:] = [run.problem.loss(axes.point(y))]
        return last[0]

    def memory(state: LBFGSState) -> Memory:
        return {**as_memory(state), **{f"axes.{name}": value for name, value in as_memory(axes).items()}}

    def on_step(step: int, state: LBFGSState) -> bool:
        nonlocal stopped
        stopped = watch(Progress(step, last[0], state.loss, axes.point(state.point), lambda: memory(state)))
        return stopped

    start = before["point"] if before else torch.zeros_like(run.points)
    state = _begin(evaluate, start, before) if resume is None else from_memory(LBFGSState, resume)
    stride = run.problem.pace.metric_steps or max(1, run.steps)
    while not stopped and state.steps < run.steps and not bool((state.converged | state.failed).all()):
        if state.steps and state.steps % stride == 0:
            axes = Coordinates.of(run.problem, axes.point(state.point))
            state = replace(_begin(evaluate, torch.zeros_like(run.points), {}), steps=state.steps)
        until = min(run.steps, state.steps - state.steps % stride + stride)
        least = run.problem.pace.least
        state = minimise(evaluate, state, steps=until, tolerance=tolerance, least=least, on_step=on_step)
    return Outcome(axes.point(state.point), state.loss, state.converged, state.failed, state.steps, memory(state))


def carried(memory: Memory, point: Tensor, replicas: Tensor | None = None) -> Memory:
    """What a run learned, or some replicas (n,) of it, to begin with at another point (n, P).

    Nothing where its coordinates are not the point's.
    """
    if ORIGIN not in memory or "axes.matrix" in memory:
        return {}
    if replicas is not None:
        along = ("moves", "changes", "rho")  # step by step
        memory = {
            name: held[:, replicas] if name in along else held[replicas] for name, held in memory.items() if held.ndim
        }
    return {**memory, "point": (point - memory[ORIGIN]) / memory.get("axes.scale", 1.0)}


def minimise(
    evaluate: Evaluate,
    start: Tensor | LBFGSState,
    *,
    steps: int = 200,
    tolerance: float = 1e-9,
    gradient_tolerance: float = 1e-7,
    least: float = -math.inf,
    on_step: Callable[[int, LBFGSState], bool | None] = lambda step, state: False,
) -> LBFGSState:
    """Minimise each row's loss from ``start`` (R, P), or go on from a state as if the run had never stopped.

    A row has converged when its loss has changed by less than ``tolerance`` (relative) in three steps in a row, or its
    largest gradient component is below ``gradient_tolerance``. A row whose loss is not finite is marked failed and
    keeps its last good point. Where ``on_step`` returns True, the run stops.
    """
    state = start if isinstance(start, LBFGSState) else _begin(evaluate, start, {})
    for step in range(state.steps, steps):
        if bool((state.converged | state.failed).all()):
            break
        point, loss, gradient = _line_search(evaluate, state, _direction(state), least)
        previous = state.loss
        _remember(state, point - state.point, gradient - state.gradient)
        state.point, state.loss, state.gradient = point, loss, gradient
        state.steps = step + 1
        small = (previous - state.loss).abs() <= tolerance * (1 + state.loss.abs())
        state.small_changes = torch.where(small, state.small_changes + 1, torch.zeros_like(state.small_changes))
        flat = state.gradient.abs().amax(-1) <= gradient_tolerance
        state.converged = state.converged | (state.small_changes >= SMALL_IN_A_ROW) | flat
        if on_step(step, state):
            break
    return state


def _begin(evaluate: Evaluate, start: Tensor, learned: Memory) -> LBFGSState:
    """The first state of a run, with the curvature that an earlier one on a similar problem learned, if any."""
    loss, gradient = loss_and_gradient(evaluate, start)
    failed = ~torch.isfinite(loss) | ~torch.isfinite(gradient).all(-1)
    gradient = torch.where(failed.unsqueeze(-1), torch.zeros_like(gradient), gradient)
    none = start.new_zeros(0, *start.shape)
    return LBFGSState(
        point=start.detach().clone(),
        loss=loss,
        gradient=gradient,
        converged=torch.zeros_like(failed),
        failed=failed,
        small_changes=torch.zeros_like(loss),
        moves=learned.get("moves", none),
        changes=learned.get("changes", none),
        rho=learned.get("rho", none[..., 0]),
    )


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def _direction(state: LBFGSState) -> Tensor:
    """The two-loop recursion, row by row."""
    q, alphas = state.gradient.clone(), []
    pairs = list(zip(state.moves, state.changes, state.rho, strict=True))
    for s, y, rho in reversed(pairs):
        alpha = rho * _dot(s, q)
        q = q - alpha.unsqueeze(-1) * y
        alphas.append(alpha)
    q = q * _initial_scale(state).unsqueeze(-1)
    for (s, y, rho), alpha in zip(pairs, reversed(alphas), strict=True):
        beta = rho * _dot(y, q)
        q = q + (alpha - beta).unsqueeze(-1) * s
    uphill = _dot(q, state.gradient) <= 0
    return -torch.where(uphill.unsqueeze(-1), state.gradient, q)


def _initial_scale(state: LBFGSState) -> Tensor:
    """Of the inverse curvature (R,): s.y / y.y of the latest pair that has some; one where none has."""
    if not len(state.rho):
        return torch.ones_like(state.loss)
    curved = state.rho > 0
    gamma = torch.where(curved, 1.0 / (state.rho * _dot(state.changes, state.changes)).clamp(min=1e-300), 1.0)
    latest = (curved * torch.arange(len(curved), device=curved.device).unsqueeze(-1)).argmax(0, keepdim=True)
    return gamma.gather(0, latest)[0]


def _line_search(
    evaluate: Evaluate, state: LBFGSState, direction: Tensor, least: float = -math.inf, trials: int = 20
) -> tuple[Tensor, Tensor, Tensor]:
    """Points, losses and gradients after every row has decreased enough (Armijo); rows that cannot stay as they are.

    So many step lengths are tried: 0.1 to the power of 20 of a step moves nothing. A step along a parabola lowers the
    loss by half of what its slope says: that must not be more than there is above the least loss.
    """
    slope, room = _dot(direction, state.gradient), state.loss - least
    step = torch.where(room > 0, 2.0 * room / slope.abs().clamp(min=1e-300), 1.0).clamp(max=1.0)
    if not len(state.rho):
        step = step / state.gradient.norm(dim=-1).clamp(min=1.0)
    point, loss, gradient = state.point.clone(), state.loss.clone(), state.gradient.clone()
    waiting = ~(state.converged | state.failed)
    for _ in range(trials):
        state.evaluations += 1
        trial = torch.where(waiting.unsqueeze(-1), state.point + step.unsqueeze(-1) * direction, point)
        trial_loss, trial_gradient = loss_and_gradient(evaluate, trial)
        finite = torch.isfinite(trial_loss) & torch.isfinite(trial_gradient).all(-1)
        enough = trial_loss <= state.loss + 1e-4 * step * slope + 1e-13 * state.loss.abs()
        accepted = waiting & finite & enough
        take = accepted.unsqueeze(-1)
        point = torch.where(take, trial, point)
        loss = torch.where(accepted, trial_loss, loss)
        gradient = torch.where(take, trial_gradient, gradient)
        waiting = waiting & ~accepted
        if not bool(waiting.any()):
            break
        step = torch.where(waiting, step * _shrink(state.loss, slope, step, trial_loss, finite), step)
    # a row that found no decrease restarts from the gradient; if it has no history, it is done
    if not len(state.rho):
        state.converged = state.converged | waiting
    state.rho = torch.where(waiting, torch.zeros_like(state.rho), state.rho)
    return point, loss, gradient


def _shrink(loss: Tensor, slope: Tensor, step: Tensor, trial_loss: Tensor, finite: Tensor) -> Tensor:
    """Minimise the parabola through what is known, within [0.1, 0.5] of the step."""
    curvature = 2 * (trial_loss - loss - step * slope)
    best = -slope * step / curvature.clamp(min=1e-300)
    return torch.where(finite, best.nan_to_num(0.5).clamp(0.1, 0.5), torch.full_like(step, 0.1))


def _remember(state: LBFGSState, s: Tensor, y: Tensor, most: int = 12) -> None:
    curvature = _dot(s, y)
    useful = curvature > 1e-12 * _dot(y, y).clamp(min=1e-300)
    rho = torch.where(useful, 1.0 / torch.where(useful, curvature, 1.0), 0.0)
    held = ((state.moves, s), (state.changes, y), (state.rho, rho))
    state.moves, state.changes, state.rho = (torch.cat([old[1 - most :], new[None]]) for old, new in held)


# -- what a method names -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deterministic:
    """For losses that are the same in every evaluation: closed-form updates where there are some, else L-BFGS.

    Where a problem's updates move every parameter, they come first, accelerated; what they have not settled after many
    steps, such as a probability that goes to zero, is left to descent. Other updates only lead to where descent begins.

    Args:
        steps: Most steps.
        tolerance: Relative change of the loss, in three steps in a row, at which it has converged.
        alone: Most updates of all parameters before descent takes over.
        first: Most updates before descent, where they do not suffice.
        little: Relative gain below which these stop: they lead far in few steps, and creep then.

    Attributes:
        is_stochastic: Every loss is the same at the same point.
    """

    steps: int = 400
    tolerance: float = 1e-9
    alone: int = 120
    first: int = 40
    little: float = 1e-7

    def __post_init__(self) -> None:
        """Refuse what makes no step."""
        check_count("steps", self.steps)

    is_stochastic: ClassVar[bool] = False

    def run(self, run: Run, watch: Watch, resume: Memory | None = None) -> Outcome:
        """Update, and descend; a run that goes on, or is resumed, does so as what it was."""
        tolerance = self.tolerance if run.tolerance is None else run.tolerance
        updates = run.problem.updates
        if updates is not None and updates.suffice and ORIGIN not in (resume or {}):
            first = accelerated_updates(replace(run, steps=min(run.steps, self.alone)), tolerance, watch, resume)
            if bool((first.converged | first.failed).all()) or first.steps < self.alone or run.steps <= self.alone:
                return first
            run, resume = replace(run, points=first.point, steps=run.steps - self.alone, memory={}), None
        elif updates is not None and not updates.suffice and ORIGIN not in (resume or run.memory):
            run = replace(run, points=climbed(replace(run, steps=min(run.steps, self.first)), self.little))
        return descended(run, tolerance, watch, resume)


@dataclass(frozen=True)
class EM:
    r"""Closed-form updates, for problems that have them.

    With ``M`` the update and a pace :math:`p \geq 1`, a step goes to :math:`x + p (M(x) - x)` in unconstrained
    coordinates (Salakhutdinov & Roweis 2003). The pace grows as long as the loss falls, and is one again when it rises.

    Args:
        steps: Most steps.
        tolerance: Relative change of the loss, in three steps in a row, at which it has converged.
        growth: By what the pace grows in a step; one for plain updates.
        longest: The largest pace.

    Attributes:
        is_stochastic: Every loss is the same at the same point.
    """

    steps: int = 100
    tolerance: float = 1e-6
    growth: float = 1.1
    longest: float = 4.0

    def __post_init__(self) -> None:
        """Refuse what makes no step."""
        check_count("steps", self.steps)

    is_stochastic: ClassVar[bool] = False

    def run(self, run: Run, watch: Watch, resume: Memory | None = None) -> Outcome:
        """Update until nothing changes; the loss is that of the point before the last update."""
        tolerance = self.tolerance if run.tolerance is None else run.tolerance
        state = _OverRelaxed.of(run.points, self) if resume is None else from_memory(_OverRelaxed, resume, how=self)
        return _updated(run, state, tolerance, watch)
