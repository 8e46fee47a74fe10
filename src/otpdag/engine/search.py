"""The one course of a fit: short runs of all starts, the best continued, its problem moved until nothing changes.

All starts are replicas of one problem and run together. Where several data sets are fitted at once, each start belongs
to one of them; all run to their ends, and every data set keeps its own best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from otpdag.engine.checkpoint import Journal
from otpdag.engine.monitor import Monitor
from otpdag.engine.optimiser import (
    Acceleration,
    Memory,
    Optimiser,
    Outcome,
    Progress,
    Rivalry,
    Run,
    carried,
    gave_up,
    mixed_of,
)
from otpdag.errors import OutOfTime, check_count, check_numbers, out_of_time_if
from otpdag.mechanisms.normal import LocationScale
from otpdag.problem import Problem, Proposals, Refinement, TableRows, Units, units_of


@dataclass(frozen=True)
class SearchSchedule:
    """Sizes of the stages: a race or short runs of all starts, finalists on (nearly) all rows, a part, the finish.

    Starts race where a problem's closed-form updates lead to its optima; elsewhere short runs choose among them.

    Args:
        race_starts: Most starts of a race, if the user does not say.
        race_batch: Starts that race at a time.
        race_rows: Most rows in a race.
        race_steps: Steps of its rounds.
        slow_steps: Steps of its rounds where no quick updates lead to an optimum, but descent does.
        race_margin: By how much a start may be behind an earlier one to go on, in total log-likelihood times the steps
            that it has made; or by twice what it gained in the last round, if that is more.
        race_tolerance: Relative change of the loss at which a start has reached its optimum.
        race_alike: Difference in total log-likelihood below which starts of a race came to the same optimum.
        enough: Starts that have reached the best optimum after which no more are tried, if no optimum was found once.
        plenty: Starts that have reached it after which no more are tried whatever else was found.
        short_rows: Most rows (steps of sequences) in the short runs.
        short_elements: Most starts times rows times points in the short runs; fewer than 300 rows are never taken.
        short_steps: Steps of the short runs; none, and all starts run to the end.
        short_share: Of a stochastic optimiser the share of its steps that the short runs take.
        short_tolerance: Relative change of the loss at which a start has settled there; the optimiser's if left out.
        short_moves: How often a problem may be moved in them.
        halving: Whether the better half of the starts goes on, round by round, until no more than the finalists are
            left: a round is as long as all before it together.
        finalists: How many continue on all rows.
        finalist_gap: By how much a start's loss may be above the best one's after the short runs, or after a race on a
            part of the rows, times these rows, for it to be a finalist: more is no chance. Any if left out.
        finalist_steps: For how many steps, before the best alone goes on.
        finalist_moves: How often their problem may be moved.
        finalist_rows: Most rows that they see; all if left out.
        part_rows: Rows on which the best settles before it sees everything, if there are more.
        part_tolerance: Relative change of the loss at which it has settled there; all rows then need no finer one.
        alternative_steps: Steps on a part of the rows of points that a problem suggests beside the optimum: of all of
            them, then twice of those that came near it.
        alternatives_kept: How many of them are left after each of these stages but the last, which leaves one.
        alternative_gap: By how much the loss of these may be above the optimum's then: what is further above comes
            back to it, or ends above (decision 0048).
        moves: How often the problem of the best may be moved to its end.
        small_gain: Relative fall of the loss that two moves in a row must reach, or the best of them is the end.
        same_loss: Relative difference below which two starts count as having reached the same optimum.
    """

    race_starts: int = 224
    race_batch: int = 32
    race_rows: int = 2_000
    race_steps: tuple[int, ...] = (20, 20, 40, 80)
    slow_steps: tuple[int, ...] = (5, 5, 10, 20)
    race_margin: float = 300.0
    race_tolerance: float = 1e-7
    race_alike: float = 0.5
    enough: int = 3
    plenty: int = 50
    short_rows: int = 600
    short_elements: int = 150_000
    short_steps: int = 24
    short_share: float = 0.15
    short_tolerance: float | None = None
    short_moves: int = 0
    halving: bool = True
    finalists: int = 3
    finalist_gap: float | None = None
    finalist_steps: int = 15
    finalist_moves: int = 0
    finalist_rows: int | None = None
    part_rows: int | None = None
    part_tolerance: float = 1e-7
    alternative_steps: tuple[int, int, int] = (3, 6, 12)
    alternatives_kept: int = 3
    alternative_gap: float = 0.01
    moves: int = 12
    small_gain: float = 1e-5
    same_loss: float = 2e-4

    def __post_init__(self) -> None:
        """Refuse stages that make no sense."""
        for name in ("short_rows", "short_elements", "finalists", "finalist_steps", "alternatives_kept"):
            check_count(name, getattr(self, name))
        check_numbers("alternative_steps", self.alternative_steps, 1)
        for name in ("short_steps", "short_moves", "finalist_moves", "moves"):
            check_count(name, getattr(self, name), least=0)

    def rows_for(self, points: int, least: int = 300) -> int:
        """Rows of the short runs, where a row of all starts has so many points; ``least`` at least."""
        return max(min(least, self.short_rows), min(self.short_rows, self.short_elements // points))


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
class SearchResult:
    """The end of a search: of each data set the best point (S, P) and its loss, how it ended, and all restarts.

    Attributes:
        kept: Numbers of the starts that were kept (S,).
        reached: How many starts came to the loss of the best, where they raced.
        settled: How many ran until nothing changed: the others gave up, or were still on their way.
    """

    problem: Problem
    point: Tensor
    loss: Tensor
    converged: Tensor
    failed: Tensor
    steps: int
    kept: Tensor
    restarts: tuple[Restart, ...] = ()
    reached: int | None = None
    settled: int = 0


def restart_seed(seed: int, number: int) -> int:
    """The seed of one restart, the same whether it runs alone or together with others."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


@dataclass(frozen=True)
class Searcher:
    """What all searches of a fit share: how to minimise, by which seed, who watches, and what is already done.

    Attributes:
        trace: Sees the points of all replicas after every step.
        judge: By what starts are compared (R,), the lower the better: their losses, unless told otherwise.
    """

    optimiser: Optimiser
    seed: int = 0
    monitor: Monitor = field(default_factory=lambda: Monitor(show=False))
    journal: Journal | None = None
    trace: Callable[[Tensor], None] | None = None
    judge: Callable[[Problem, Tensor, Tensor], Tensor] = lambda problem, points, losses: losses


def with_narrow_scales(problem: Units, points: Tensor, losses: Tensor) -> Tensor:
    r"""Losses (R,) of rows, with the price of narrow scales by which starts of a race are compared.

    The likelihood of a state around a single row has no bound but the scale's floor, whatever else the point explains.
    By the penalty of Chen, Tan and Zhang (2008), :math:`\sum (s / \sigma)^2 / n` in units of the column's spread s, the
    highest of the other optima is consistent; a scale of a twentieth costs 0.4 of 1,000 rows' log-likelihood, one of a
    thousandth costs 1,000, which many equal rows outweigh.
    """
    naturals, price = problem.naturals(points), torch.zeros_like(losses)
    for node, mechanism in problem.structure.mechanisms.items():
        unit = mechanism.unit if isinstance(mechanism, LocationScale) else None
        if unit is not None and mechanism.declared()["scale"].learned:
            price = price + (unit.to(losses) / naturals[node]["scale"]).square().flatten(1).sum(-1)
    return losses + price / problem.unit_mass.sum(-1).square()


def races(problem: Problem, optimiser: Optimiser) -> bool:
    """Whether starts race: something is hidden, and quick updates lead to optima; or categories in a table are."""
    if not isinstance(problem, Units) or optimiser.is_stochastic or not problem.structure.graph.hidden:
        return False
    is_table = isinstance(problem, TableRows) and problem.is_likelihood
    return has_quick_updates(problem) or (is_table and bool(problem.structure.hidden_categories))


def has_quick_updates(problem: Problem) -> bool:
    """Whether closed-form updates alone lead to its optima."""
    return problem.updates is not None and problem.updates.suffice


def search(
    problem: Problem,
    starts: Tensor | Iterable[Tensor],
    course: SearchSchedule,
    searcher: Searcher,
    owners: Sequence[int] | None = None,
) -> SearchResult:
    """Minimise a problem from several starts.

    Args:
        problem: What to minimise.
        starts: Where to begin (R, P), all at once or batch by batch: a race asks for another only where it needs one.
        course: Sizes of the stages.
        searcher: How to minimise.
        owners: To which data set each start belongs; if left out, all to one.
    """
    return _Field(problem, course, searcher, starts, owners).run()


class _Field:
    """All starts of a search: where each is now, the losses that it reached, and who is still in."""

    # shares of a time limit by which a step, and the last one after the limit, may be late before it is given up
    long_step, last_step = 0.05, 0.25

    def __init__(
        self,
        problem: Problem,
        course: SearchSchedule,
        searcher: Searcher,
        starts: Tensor | Iterable[Tensor],
        owners: Sequence[int] | None,
    ) -> None:
        self.problem, self.course, self.searcher = problem, course, searcher
        self.batches = iter([starts] if isinstance(starts, Tensor) else starts)
        self.points = torch.zeros(0)
        self.short_losses = self.losses = torch.zeros(0, dtype=torch.float64)
        self.ended = self.settled = self.given_up = torch.zeros(0, dtype=torch.bool)
        self.alike = 0.0
        self.learned: tuple[Tensor, Memory] = (torch.zeros(0, dtype=torch.long), {})
        self._admit()
        if owners is not None:
            self.owners = torch.as_tensor(owners)

    def _admit(self) -> Tensor:
        """Let one more batch of starts in; their numbers, none if there is no batch."""
        known, batch = len(self.losses), next(self.batches, None)
        if batch is None:
            return torch.zeros(0, dtype=torch.long)
        unknown = torch.full((len(batch),), torch.nan, dtype=torch.float64)
        self.points = torch.cat([self.points, batch]) if known else batch.clone()
        self.short_losses, self.losses = (torch.cat([one, unknown]) for one in (self.short_losses, self.losses))
        none = torch.zeros_like(unknown, dtype=torch.bool)
        flags = (self.ended, self.settled, self.given_up)
        self.ended, self.settled, self.given_up = (torch.cat([one, none]) for one in flags)
        self.owners = torch.zeros(len(self.points), dtype=torch.long)
        return torch.arange(known, len(self.points))

    def run(self) -> SearchResult:
        """The whole course."""
        # data sets do not compete: all run to the end
        compete = len(self.owners.unique()) == 1 and bool(self.course.short_steps)
        raced = compete and (self._saw_all or len(self.points) > 1) and races(self.problem, self.searcher.optimiser)
        while not raced and len(self._admit()):
            pass
        alive = torch.arange(len(self.points))
        if raced:
            alive = self._race(alive)
        elif compete and len(alive) > 1:
            alive = self._short_runs(alive)
        if compete and len(alive) > 1 and not self._is_over and not (raced and self._saw_all):
            alive = self._finalists(alive)
        if compete and self._is_over:  # one step of the best, on all rows, is all that is still done
            alive = self._best(alive, self.short_losses[alive], None, 1)
        finished = [(one, *self._finish(one, self._on_part(one))) for one in (alive.split(1) if raced else [alive])]
        lowest = min(range(len(finished)), key=lambda at: float(self._judged(*finished[at][1:]).mean()))
        alive, problem, outcome = finished[lowest]
        judged = self.searcher.judge(problem, outcome.point, outcome.loss)
        best = self._best(alive, judged, outcome.failed, 1)
        rows = torch.tensor([int((alive == number).nonzero()) for number in best])
        return SearchResult(
            problem=problem,
            point=outcome.point[rows],
            loss=outcome.loss[rows],
            converged=outcome.converged[rows],
            failed=outcome.failed[rows],
            steps=outcome.steps,
            kept=best,
            restarts=self._reports(best),
            # those that were finished may have been told apart in the race by how narrow a state was alone
            reached=max(map(self._reached, (self.short_losses, self.losses))) if raced else None,
            settled=int(self.settled.sum()),
        )

    @property
    def _saw_all(self) -> bool:
        """Whether a race is run on all rows, and exactly: whatever it finds is finished then."""
        return has_quick_updates(self.problem) and self.course.race_rows >= self.problem.rows

    @property
    def _is_over(self) -> bool:
        return self.searcher.monitor.stopped

    # -- stages -------------------------------------------------------------------------------------------------------

    def _race(self, numbers: Tensor) -> Tensor:
        """Batch after batch until enough starts have reached the best optimum; those that are to be finished.

        Whether a start goes on depends on those with lower numbers alone, and so does where it ends. On all rows every
        one that came to a lower loss than all before it is finished, for a poorer optimum may have a better one beside
        it. So of more starts none is missing that fewer would have finished: more are never worse.
        """
        course, part = self.course, self.problem
        if not has_quick_updates(part):
            part = part.subset(course.short_rows)
        elif not self._saw_all:
            part = part.subset(course.race_rows)
        self.alike = course.race_alike / float(units_of(part).unit_mass.sum())
        while len(numbers):
            self._race_of(part, numbers)
            reached = self._reached(self.short_losses)
            if self._is_over or reached >= (course.plenty if self._found_once() else course.enough):
                break
            numbers = self._admit()
        ends = self.short_losses.nan_to_num(nan=torch.inf)
        if not self._saw_all:  # which of near ends is lower with all rows, a part does not tell
            return self._distinct(ends.argsort(stable=True), ends, course.finalists, self._gap(part))
        self.losses = self.short_losses.clone()
        before = torch.cat([ends.new_full((1,), torch.inf), ends.cummin(0).values[:-1]])
        lower = (ends < before - self._small(ends)).nonzero().flatten()
        return lower if len(lower) else torch.zeros(1, dtype=torch.long)

    def _race_of(self, part: Problem, alive: Tensor) -> None:
        """Rounds of updates of some starts; those that are far behind an earlier one, for what they gain, give up.

        Where an update is dear, so do those that several earlier ones are ahead of: eight, then four, then two.
        """
        course, done, mass = self.course, 0, float(units_of(part).unit_mass.sum())
        memory: Memory = {}
        is_quick = has_quick_updates(part)
        rounds = course.race_steps if is_quick else course.slow_steps
        for ahead, steps in zip(reversed(range(len(rounds))), rounds, strict=True):
            before = self.short_losses[alive]
            name, tolerance = f"{len(alive)} starts", course.race_tolerance
            _, outcome = self._settled(
                name,
                part,
                alive,
                steps=steps,
                moves=0,
                keep=False,
                tolerance=tolerance,
                memory=memory,
                gives_up=partial(self._hopeless, part, alive, done, mass) if is_quick else None,
            )
            losses = self._judged(part, outcome)
            self.short_losses[alive] = losses
            behind = self._behind(alive, losses)
            done += steps if is_quick else 2 * steps  # descent follows updates
            gained = (before - losses).nan_to_num(nan=torch.inf)
            in_it = (behind <= (2 * gained).clamp(min=course.race_margin / (done * mass))) & losses.isfinite()
            if ahead and not is_quick:
                known = self.short_losses.nan_to_num(nan=torch.inf)
                earlier = torch.arange(len(known)) < alive.unsqueeze(1)
                in_it &= ((known < losses.unsqueeze(1)) & earlier).sum(1) < 2**ahead
            self.settled[alive] = outcome.converged.cpu()
            self.ended[alive] = self.settled[alive] & in_it
            self.given_up[alive] = gave_up(outcome)
            going_on = in_it & ~self.ended[alive] & ~self.given_up[alive]
            memory, alive = mixed_of(outcome.memory, going_on), alive[going_on]
            if not len(alive) or self._is_over:
                return
        self.ended[alive] = True  # they have come far enough to be told apart
        self.settled[alive] |= not is_quick

    def _hopeless(
        self, part: Problem, alive: Tensor, done: int, mass: float, progress: Progress, fall: Tensor, every: int = 5
    ) -> Tensor:
        """Which starts stay behind an earlier one even if each step that is left gains many times as much as the last.

        They are asked ``every`` few steps: whether a start is behind is told by more than its loss.
        """
        steps, course = done + progress.step + 1, self.course
        if steps % every:
            return torch.zeros_like(alive, dtype=torch.bool)
        none = torch.zeros_like(alive, dtype=torch.bool)
        losses = self._judged(part, Outcome(progress.points, progress.losses, none, none, 0))
        most = Acceleration.most_gain * (sum(course.race_steps) - steps) * fall
        return self._behind(alive, losses) > most.clamp(min=course.race_margin / (steps * mass))

    def _behind(self, alive: Tensor, losses: Tensor) -> Tensor:
        """By how much the losses of these starts are above the lowest of those with lower numbers, or their own."""
        known = self.short_losses.index_copy(0, alive, losses).nan_to_num(nan=torch.inf)
        return losses - known.cummin(0).values[alive]

    def _found_once(self) -> int:
        """How many optima a single start of a race came to: about as many in as many more starts would be new.

        So Good and Turing (1953) estimate how often something is met that was not met before. A start that gave up
        beside an optimum was on its way there.
        """
        ends = self.short_losses[self.ended].sort().values
        apart = ends.diff() > self._small(ends[1:])
        ones = torch.ones(1, dtype=torch.bool)
        once = ends[torch.cat([ones, apart]) & torch.cat([apart, ones])]
        beside = (self.short_losses[self.given_up] - once.unsqueeze(1)).abs() <= self.alike
        return int((~beside.any(1)).sum())

    def _reached(self, ends: Tensor) -> int:
        """How many of these ends of a race are the lowest loss, nearly: some starts are still creeping towards it."""
        lowest = ends.nan_to_num(nan=torch.inf).min()
        return int((ends - lowest <= self._small(lowest).clamp(min=self.alike)).sum())

    def _short_runs(self, alive: Tensor) -> Tensor:
        """All starts on a part of the rows, the better half of them longer, and so on: those that go on."""
        course, optimiser = self.course, self.searcher.optimiser
        finalists = 1 if optimiser.is_stochastic else course.finalists
        starts = len(alive)
        if optimiser.is_stochastic:
            part, rounds = self.problem, [(starts, max(1, int(course.short_share * optimiser.steps)))]
        else:
            rows = course.rows_for(len(alive) * self.problem.pace.points_per_row)
            part = self.problem.subset(rows, coarse=True)
            least = finalists if course.halving else starts
            rounds = _rounds(starts, least, course.short_steps)
        (_, first), *later = rounds
        part, judged = self._short_run(f"{len(alive)} short starts", part, alive, first, course.short_moves)
        for size, steps in later:
            if self._is_over:
                break
            alive = self._best(alive, judged[alive], None, size)
            part, judged = self._short_run(f"better {len(alive)} starts", part, alive, steps, course.short_moves)
        order = self._best(alive, judged[alive], None, len(alive))
        return self._distinct(order, judged, finalists, self._gap(part))

    def _gap(self, part: Problem) -> float:
        """By how much the loss of a finalist may be above the best one's on a part of the rows."""
        return torch.inf if self.course.finalist_gap is None else self.course.finalist_gap / part.rows

    def _short_run(self, name: str, part: Problem, alive: Tensor, steps: int, moves: int) -> tuple[Problem, Tensor]:
        tolerance, gap = self.course.short_tolerance, self._gap(part)
        part, outcome = self._settled(
            name,
            part,
            alive,
            steps=steps,
            moves=moves,
            keep=False,
            tolerance=tolerance,
            rivalry=Rivalry(gap, self.course.same_loss) if gap < torch.inf else None,
        )
        judged = self.searcher.judge(part, outcome.point, outcome.loss).cpu().double()
        self.short_losses[alive] = _spoilt(judged, outcome.failed)
        return part, torch.where(self.short_losses.isnan(), torch.inf, self.short_losses)

    def _finalists(self, alive: Tensor) -> Tensor:
        """The best few on all rows, or as many as the course says: the best of them."""
        course, rows = self.course, self.course.finalist_rows
        part = self.problem if rows is None or rows >= self.problem.rows else self.problem.subset(rows)
        name = f"best {len(alive)} on {'all' if part is self.problem else 'many'} rows"
        steps, moves = course.finalist_steps, course.finalist_moves
        problem, outcome = self._settled(name, part, alive, steps=steps, moves=moves, keep=False)
        judged = self.searcher.judge(problem, outcome.point, outcome.loss).cpu().double()
        self.losses[alive] = judged
        return self._best(alive, judged, outcome.failed, 1)

    def _on_part(self, alive: Tensor) -> Memory | None:
        """Let the best settle on easy rows, or on a part of many: what was learned of these serves for all."""
        easy, rows = self.problem.pace.easy_rows, self.course.part_rows
        many = None if rows is None or rows >= self.problem.rows else rows
        chosen = many if easy is None else easy
        if chosen is None or self.searcher.optimiser.is_stochastic or self._is_over:
            return None
        part = self.problem.subset(chosen).laid_out_for(self.points[alive])
        tolerance, steps = self.course.part_tolerance, self.searcher.optimiser.steps
        run = Run(part, self.points[alive], steps, tolerance, self._seeds(alive))
        outcome = self._run("best start, part", run, alive, keep=False)
        self.points[alive] = outcome.point
        return outcome.memory if easy is None and not self.problem.pace.renews_curvature else None

    def _finish(self, alive: Tensor, memory: Memory | None) -> tuple[Problem, Outcome]:
        course, steps = self.course, self.searcher.optimiser.steps
        problem, outcome = self._settled(
            "best start",
            self.problem,
            alive,
            steps=steps,
            moves=max(course.moves, self.problem.pace.refinements) if course.moves else 0,
            tolerance=None if memory is None else course.part_tolerance,
            memory=memory or self._curvature(alive),
            keep=True,
        )
        self.losses[alive] = outcome.loss.cpu().double()
        self.settled[alive] |= outcome.converged.cpu()
        return problem, outcome

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _settled(
        self,
        name: str,
        problem: Problem,
        alive: Tensor,
        *,
        steps: int,
        moves: int,
        keep: bool,
        tolerance: float | None = None,
        memory: Memory | None = None,
        rivalry: Rivalry | None = None,
        gives_up: Callable[[Progress, Tensor], Tensor] | None = None,
    ) -> tuple[Problem, Outcome]:
        """Minimise, move the problem, go on, until it moves no more; the starts' points are where that ends."""
        most = problem.pace.steps
        limited = steps if most is None else min(steps, most)
        with suppress(OutOfTime), out_of_time_if(lambda: self.searcher.monitor.stopping.is_late(self.long_step)):
            problem = problem.laid_out_for(self.points[alive])
        run = Run(problem, self.points[alive], limited, tolerance, self._seeds(alive), memory or {}, rivalry=rivalry)
        run = replace(run, gives_up=gives_up)
        patient = keep and moves > 0 and len(alive) == 1  # of several, all would wait for the one that is asked
        problem, outcome = self._descended(name, run, alive, keep=keep, patient=patient)
        gains = _Gains(self.course.small_gain)
        for _ in range(moves):
            if bool(outcome.failed.all()) or self._is_over:
                break
            moved = problem.refine(outcome.point)
            if moved is None and keep:
                moved = self._elsewhere(problem, outcome, alive)
            if moved is None:
                if most is not None and limited == most:  # it settled in as many steps as it asked for
                    outcome = replace(outcome, converged=torch.ones_like(outcome.converged))
                break
            if gains.have_ended(moved):
                problem, outcome = gains.end(outcome)
                break
            run = _after(run, moved, outcome)
            problem, outcome = self._descended(moved.what, run, alive, keep=keep, patient=patient)
        else:
            if keep and moves and problem.pace.refinements:  # it was still moving: its end is not the end
                outcome = replace(outcome, converged=torch.zeros_like(outcome.converged))
        self.points[alive], self.learned = outcome.point, (alive, outcome.memory)
        return problem, outcome

    def _curvature(self, alive: Tensor) -> Memory:
        """What these starts learned in the stage before, of the curvature of nearly the same loss."""
        before, memory = self.learned
        same, renews = before == alive.unsqueeze(1), self.problem.pace.renews_curvature
        if renews or self.problem.updates is not None or not bool(same.any(1).all()):
            return {}
        return carried(memory, self.points[alive], same.int().argmax(1))

    def _descended(self, name: str, run: Run, alive: Tensor, *, keep: bool, patient: bool) -> tuple[Problem, Outcome]:
        """A run to its end; a patient one that takes long moves on the way: near a poor optimum, steps are small."""
        patience = run.problem.pace.patience if patient else None
        if patience is None or run.steps <= patience:
            return run.problem, self._run(name, run, alive, keep=keep)
        outcome = self._run(name, replace(run, steps=patience), alive, keep=keep)
        if bool((outcome.converged | outcome.failed).all()) or self._is_over:
            return run.problem, outcome
        moved, rest = run.problem.refine(outcome.point), replace(run, steps=run.steps - patience)
        if moved is None:
            rest = replace(rest, points=outcome.point, memory=outcome.memory)
        else:
            name, rest = moved.what, _after(rest, moved, outcome)
        return rest.problem, self._run(name, rest, alive, keep=keep)

    def _elsewhere(self, problem: Problem, outcome: Outcome, alive: Tensor) -> Refinement | None:
        """Where the best of a problem's alternatives leads to, if that is lower than where the search has come to."""
        tried = None if self.searcher.optimiser.is_stochastic else problem.proposals(outcome.point)
        point = None if tried is None else self._best_alternative(tried, outcome, alive)
        if point is None:
            return None
        again = problem.laid_out_for(point)
        many = self.course.finalist_rows is not None and problem.rows > self.course.finalist_rows
        steps = 1 if many else self.course.finalist_steps  # of many rows each costs much
        late = self._run("best alternative", Run(again, point, steps, None, self._seeds(alive)), alive, keep=False)
        before, after = (self._judged(problem, end).to(late.loss) for end in (outcome, late))
        lower = after < before - self._small(before)
        return Refinement(again, late.point, "best alternative", late.loss) if bool(lower & ~late.failed) else None

    def _best_alternative(self, tried: Proposals, outcome: Outcome, alive: Tensor) -> Tensor | None:
        """The point (1, P) that is lowest after steps on a part of the rows; None if none gets below the optimum.

        The optimum goes along: on a part of the rows it is none. After few steps the lowest are left, after some more
        those that came near it.
        """
        course = self.course
        points = torch.cat([outcome.point, tried.points])
        numbers = torch.cat([alive, len(self.points) + torch.arange(len(tried.points))])
        for number, steps in enumerate(course.alternative_steps, start=1):
            is_last = number == len(course.alternative_steps)
            rivalry = Rivalry(0.0 if is_last else course.alternative_gap, course.small_gain)
            run = Run(tried.part.laid_out_for(points), points, steps, None, self._seeds(numbers), rivalry=rivalry)
            ended = self._run("alternatives", run, numbers, keep=False)
            losses = _spoilt(ended.loss.cpu().double(), ended.failed)
            bar = losses[0] + (-self._small(losses[0]) if is_last else course.alternative_gap)
            order = 1 + losses[1:].argsort()[: 1 if is_last else course.alternatives_kept]
            order = order[losses[order] < bar]
            if self._is_over or not len(order):
                return None
            kept = torch.cat([torch.zeros_like(order[:1]), order])
            points, numbers = ended.point[kept], numbers[kept]
        return points[1:]

    def _judged(self, problem: Problem, outcome: Outcome) -> Tensor:
        """By what ends are compared (R,): of a race, not by how narrow a state is around few rows."""
        losses = self.searcher.judge(problem, outcome.point, outcome.loss)
        if races(problem, self.searcher.optimiser):
            losses = with_narrow_scales(units_of(problem), outcome.point, losses)
        return _spoilt(losses.cpu().double(), outcome.failed)

    def _small(self, loss: Tensor) -> Tensor:
        """By how much a loss must be lower for that to count."""
        return self.course.small_gain * (1 + loss.abs())

    def _run(self, name: str, run: Run, alive: Tensor, *, keep: bool) -> Outcome:
        """One run, or what the journal knows of it; after somebody asked for the end, a single step."""
        monitor, journal, trace = self.searcher.monitor, self.searcher.journal, self.searcher.trace
        known = len(monitor.stages)
        monitor.stage(name, run.steps, alive.tolist(), run.problem)
        outcome, resume = (None, None) if journal is None else journal.next_run(run)
        if outcome is not None or resume is not None:  # its stage is among those that were read
            del monitor.stages[known:]
        if outcome is not None:
            return outcome
        hurried = monitor.stopped  # what is cut short must not be gone on with
        latest: list[Progress] = []

        def is_over() -> bool:
            nonlocal hurried
            hurried = hurried or monitor.stopped
            return hurried

        def watch(progress: Progress) -> bool:
            latest[:] = [progress]
            if trace is not None:
                trace(progress.points)
            losses = progress.losses.reshape(-1)
            best = int(losses.nan_to_num(nan=torch.inf).argmin())
            record = {**progress.terms.as_floats(best), "loss": float(losses[best])}
            stop = monitor.record(name, progress.step, record, keep=keep, losses=losses.tolist())
            if journal is not None and not hurried:
                journal.keep(progress, now=stop)
            return stop

        steps, resume = (min(1, run.steps), None) if hurried else (run.steps, resume)
        share = self.last_step if hurried else self.long_step
        try:
            with out_of_time_if(lambda: monitor.stopping.is_late(share)):
                outcome = self.searcher.optimiser.run(replace(run, steps=steps, is_over=is_over), watch, resume)
        except OutOfTime:
            outcome = _unfinished(run, latest)
        if journal is not None and not monitor.stopped:
            journal.end(outcome)
        return outcome

    # -- selection ----------------------------------------------------------------------------------------------------

    def _seeds(self, alive: Tensor) -> list[int]:
        return [restart_seed(self.searcher.seed, number) for number in alive.tolist()]

    def _best(self, alive: Tensor, judged: Tensor, failed: Tensor | None, many: int) -> Tensor:
        """Numbers of the starts with the lowest losses, as many of each data set; failed ones come last."""
        judged = _spoilt(judged.cpu().double(), torch.zeros_like(alive, dtype=torch.bool) if failed is None else failed)
        order = alive[judged.argsort(stable=True)]
        return torch.cat([order[self.owners[order] == owner][:many] for owner in self.owners.unique()])

    def _distinct(self, order: Tensor, judged: Tensor, many: int, most: float) -> Tensor:
        """Of starts that reached the same loss, and so most likely the same optimum, the first only; the best few.

        A start that is by more than ``most`` above the best is left out.
        """
        chosen: list[int] = []
        for start in order.tolist():
            gap = self.course.same_loss * (1 + abs(float(judged[start])))
            if chosen and float(judged[start] - judged[chosen[0]]) > most:
                continue
            if len(chosen) < many and all(not abs(float(judged[start] - judged[other])) <= gap for other in chosen):
                chosen.append(start)
        return torch.tensor(chosen)

    def _reports(self, kept: Tensor) -> tuple[Restart, ...]:
        return tuple(
            Restart(
                number,
                restart_seed(self.searcher.seed, number),
                float(self.short_losses[number]),
                float(self.losses[number]),
                number in kept,
                self.points[number],
            )
            for number in range(len(self.points))
        )


@dataclass
class _Gains:
    """Whether moving a problem still pays: an optimiser may go round in circles, as it exploits each new layout.

    Attributes:
        most_idle: Refinements in a row without a gain that make an end.
    """

    small: float
    best: Refinement | None = None
    idle: int = 0
    most_idle: int = 2

    def have_ended(self, moved: Refinement) -> bool:
        """Compare what a move found with the best before; two moves in a row without a gain are enough."""
        if moved.loss is None:
            return False
        loss, lowest = _mean(moved), torch.inf if self.best is None else _mean(self.best)
        self.idle = 0 if loss < lowest - self.small * (1 + abs(loss)) else self.idle + 1
        self.best = moved if loss < lowest else self.best
        return self.idle >= self.most_idle

    def end(self, outcome: Outcome) -> tuple[Problem, Outcome]:
        """The best that was found, as an end."""
        if self.best is None or self.best.loss is None:
            raise RuntimeError("nothing was moved")
        converged = torch.ones_like(outcome.converged)
        return self.best.problem, replace(outcome, point=self.best.point, loss=self.best.loss, converged=converged)


def _rounds(starts: int, least: int, steps: int) -> list[tuple[int, int]]:
    """How many starts run in each round, and for how many steps of all: half as many as before for as long as before.

    >>> _rounds(16, 3, 24), _rounds(2, 3, 24), _rounds(16, 3, 2)
    ([(16, 3), (8, 3), (4, 6), (3, 12)], [(2, 24)], [(16, 1), (8, 1)])
    """
    sizes = [starts]
    while sizes[-1] > least and 2 ** len(sizes) <= steps:
        sizes.append(max(least, (sizes[-1] + 1) // 2))
    ends = [0, *(steps >> back for back in reversed(range(len(sizes))))]
    return [(size, after - before) for size, (before, after) in zip(sizes, pairwise(ends), strict=True)]


def _mean(moved: Refinement) -> float:
    return torch.inf if moved.loss is None else float(moved.loss.mean())


def _after(run: Run, moved: Refinement, outcome: Outcome) -> Run:
    """The run that goes on where a problem was moved to after another one ended."""
    learned = carried(outcome.memory, moved.point) if moved.curved_alike else {}
    problem = moved.problem.laid_out_for(moved.point)
    return replace(run, problem=problem, points=moved.point, memory=learned, rivalry=None)


def _unfinished(run: Run, latest: Sequence[Progress]) -> Outcome:
    """Where a run was when its time was up in the middle of a step: after the step before, or where it began."""
    points, losses = (latest[0].points, latest[0].losses) if latest else (run.points, None)
    losses = points.new_full((len(points),), torch.nan) if losses is None else losses.reshape(-1)
    none = torch.zeros_like(losses, dtype=torch.bool)
    return Outcome(points.detach(), losses.detach(), none, none, len(latest) and latest[0].step + 1)


def _spoilt(judged: Tensor, failed: Tensor) -> Tensor:
    """Losses, infinite where a start failed."""
    return torch.where(failed.cpu() | ~torch.isfinite(judged), torch.inf, judged)
