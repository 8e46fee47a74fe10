"""Closed-form updates, accelerated: as few passes as a quasi-Newton method takes, without a gradient or a step length.

Updates are combined by Anderson's mixing (:mod:`otpdag.numerics`; for those of expectation-maximisation see Henderson
and Varadhan 2019). Where that raises the loss, the plain update is taken, and the history forgotten. It never does if
it maximises; one that a sample guides (:mod:`otpdag.likelihood.m_step`) may, and is then shortened.

:class:`Deterministic` runs them where a problem has them, and L-BFGS otherwise; :class:`EM` over-relaxes them instead:
it goes further where they point, as long as that pays.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.engine.lbfgs import ORIGIN, descended
from otpdag.engine.optimiser import (
    SMALL_IN_A_ROW,
    Memory,
    Outcome,
    Progress,
    Rivalry,
    Run,
    Watch,
    as_memory,
    from_memory,
    under,
)
from otpdag.errors import ModelError
from otpdag.numerics import correction
from otpdag.problem import LossTerms

Array: TypeAlias = NDArray[np.float64]


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
class _State:
    """Where all replicas stand: a point whose loss is known, and the trial that comes next.

    Arrays, not tensors: with few parameters the calls are what a step costs, and these are cheaper.
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
    """By how much the loss fell in the last step that was kept."""
    rest: Array
    """By how much it would fall from here on if falls went on to shrink as the last one did; infinite if it did not."""
    quick_falls: Array
    """How many falls in a row were each a small share of the one before."""
    rules: ClassVar[Acceleration] = Acceleration()
    share: Array
    """How much of the plain update the trial is; more than one where it is a combination."""
    step: int

    @classmethod
    def of(cls, points: Tensor) -> _State:
        start = points.detach().cpu().double().numpy().copy()
        empty, none = np.zeros((len(start), cls.rules.remembered, start.shape[1])), np.zeros(len(start))
        infinite = np.full_like(none, np.inf)
        return cls(
            point=start,
            loss=infinite,
            trial=start,
            plain=start,
            change=np.zeros_like(start),
            moves=empty,
            changes=empty.copy(),
            small=none,
            fall=none.copy(),
            rest=infinite.copy(),
            quick_falls=none.copy(),
            share=np.ones_like(none),
            step=0,
        )

    def as_tensors(self) -> Memory:
        """All of it, for a file."""
        return {f"update.{name}": torch.as_tensor(value) for name, value in vars(self).items()}

    @classmethod
    def restored(cls, tensors: Memory) -> _State:
        """Invert :meth:`as_tensors`."""
        held = under(tensors, "update.")
        step = int(held.pop("step"))
        return cls(**{name: one.numpy().copy() for name, one in held.items()}, step=step)

    @np.errstate(invalid="ignore", over="ignore", divide="ignore")
    def follow(self, updates: Array, loss: Array, tolerance: float, mixed: Array | None = None) -> None:
        """Keep or refuse the trial, and choose the next one; only coordinates that are ``mixed`` (P,) go further."""
        change = updates - self.trial if mixed is None else (updates - self.trial) * mixed
        # one that has ended stays where it is: it depends on no other
        ended = self.small >= SMALL_IN_A_ROW
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
        self.small[good & (self.quick_falls >= self.rules.quick_falls) & (rest <= self.rules.rest * small_fall)] = (
            SMALL_IN_A_ROW
        )
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

    @property
    def plain_is_higher(self) -> NDArray[np.bool_]:
        """Whether the plain update (R,) was tried and raised the loss."""
        return self.share < 1.0

    @np.errstate(invalid="ignore")
    def have_ended(self, rivalry: Rivalry | None, left: int) -> bool:
        """Whether all replicas have settled; of rivals, whether it is known which of them is to be kept."""
        settled = self.small >= SMALL_IN_A_ROW
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
    """Update all replicas of a run until nothing changes."""
    state = _State.of(run.points) if resume is None else _State.restored(resume)
    for step in range(state.step, run.steps):
        terms = _followed(run, state, tolerance)[1]
        loss, point = (torch.from_numpy(array).to(run.points) for array in (state.loss, state.point))
        stop = watch(Progress(step, terms, loss, point, state.as_tensors))
        if stop or state.have_ended(run.rivalry, run.steps - state.step):
            break
    converged = torch.from_numpy(state.small >= SMALL_IN_A_ROW)
    loss, point = (torch.from_numpy(array).to(run.points) for array in (state.loss, state.point))
    return Outcome(point, loss, converged.to(loss.device), ~torch.isfinite(loss), state.step)


def climbed(run: Run, little: float) -> Tensor:
    """Where updates lead (R, P) until each replica has gained little, relative to its loss, in a step that was kept.

    The last update is not looked at, but for replicas of which one went too far: these end where they were lowest.
    """
    state = _State.of(run.points)
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
        settled = state.small >= SMALL_IN_A_ROW
        if (gained_little & ((loss <= before) | no_further | settled)).all() or run.is_over():
            break
    reached = np.where(too_far[:, None], state.point, state.plain)
    return torch.from_numpy(reached).to(run.points)


def _followed(run: Run, state: _State, tolerance: float) -> tuple[Array, LossTerms]:
    """Update the trial of every replica, and follow; the losses at the trials."""
    stretched = None if run.problem.updates is None else run.problem.updates.stretched
    mixed = None if stretched is None else stretched.cpu().double().numpy()
    updates, terms = run.problem.update(torch.from_numpy(state.trial).to(run.points))
    loss = terms.total.detach().double().expand(len(state.point)).cpu().numpy()
    state.follow(updates.detach().cpu().double().numpy(), loss, tolerance, mixed)
    return loss, terms


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
    """

    steps: int = 400
    tolerance: float = 1e-9
    alone: int = 120
    first: int = 40
    little: float = 1e-7

    def __post_init__(self) -> None:
        """Refuse what makes no step."""
        if self.steps < 1:
            raise ModelError(f"steps must be at least 1; got {self.steps}")

    is_stochastic: ClassVar[bool] = False
    """Every loss is the same at the same point."""

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
    """

    steps: int = 100
    tolerance: float = 1e-6
    growth: float = 1.1
    longest: float = 4.0

    def __post_init__(self) -> None:
        """Refuse what makes no step."""
        if self.steps < 1:
            raise ModelError(f"steps must be at least 1; got {self.steps}")

    is_stochastic: ClassVar[bool] = False
    """Every loss is the same at the same point."""

    def run(self, run: Run, watch: Watch, resume: Memory | None = None) -> Outcome:
        """Update until nothing changes; the loss is that of the point before the last update."""
        state = _EMState.of(run.points) if resume is None else from_memory(_EMState, resume)
        tolerance = self.tolerance if run.tolerance is None else run.tolerance
        stretched = None if run.problem.updates is None else run.problem.updates.stretched
        for step in range(state.step, run.steps):
            updates, terms = _updated(run, state.point)
            loss = terms.total.detach().double().expand(len(state.point))
            state.follow(self, updates, loss, tolerance, stretched)
            progress = Progress(step, terms, loss, state.point, partial(as_memory, state))
            if watch(progress) or bool((state.small_changes >= SMALL_IN_A_ROW).all()):
                break
        converged = state.small_changes >= SMALL_IN_A_ROW
        failed = ~torch.isfinite(state.loss) & (state.step > 0)
        return Outcome(state.point, state.loss, converged, failed, state.step, {})


def _updated(run: Run, points: Tensor) -> tuple[Tensor, LossTerms]:
    """The updates of all replicas, one after another: each is a pass over all of the data."""
    pairs = [run.problem.update(point) for point in points.split(1)]
    terms = LossTerms(*(torch.cat([getattr(one, f.name).reshape(1) for _, one in pairs]) for f in fields(LossTerms)))
    return torch.cat([point for point, _ in pairs]).detach(), terms


@dataclass
class _EMState:
    point: Tensor
    loss: Tensor
    pace: Tensor
    small_changes: Tensor
    step: int = 0

    @classmethod
    def of(cls, points: Tensor) -> _EMState:
        replicas = points.shape[0]
        none = torch.zeros(replicas, dtype=torch.float64)
        return cls(points.detach().clone(), torch.full_like(none, torch.inf), torch.ones_like(none), none)

    def follow(self, em: EM, updates: Tensor, loss: Tensor, tolerance: float, stretched: Tensor | None) -> None:
        """Go where the updates point, and further."""
        small = (self.loss - loss).abs() <= tolerance * (1 + loss.abs())
        self.small_changes = torch.where(small, self.small_changes + 1, torch.zeros_like(self.small_changes))
        grown = (em.growth * self.pace).clamp(max=em.longest)
        self.pace = torch.where(loss <= self.loss, grown, torch.ones_like(self.pace))
        finite = torch.isfinite(loss) & torch.isfinite(updates).all(-1)
        pace = self.pace.to(updates).unsqueeze(-1)
        pace = pace if stretched is None else torch.where(stretched, pace, 1.0)
        moved = self.point + pace * (updates - self.point)
        self.point = torch.where(finite.unsqueeze(-1), moved, self.point)
        self.loss, self.step = loss, self.step + 1
