"""How much work each stage of a search does."""

from __future__ import annotations

from dataclasses import dataclass

from otpdag.errors import ModelError

__all__ = ["Course"]

FEWEST_ROWS = 300
"""Rows that a short run sees at least, however many starts there are: fewer would not tell them apart."""


@dataclass(frozen=True)
class Course:
    """Sizes of the stages: short runs of all starts, finalists on (nearly) all rows, a part for the best, the finish.

    Args:
        short_rows: Most rows (steps of sequences) in the short runs.
        short_elements: Most starts times rows times points in the short runs; fewer than 300 rows are never taken.
        short_steps: Steps of the short runs; none, and all starts run to the end.
        short_share: Of a stochastic optimiser the share of its steps that the short runs take.
        short_tolerance: Relative change of the loss at which a start has settled there; the optimiser's if left out.
        short_moves: How often a problem may be moved in them.
        halving: Whether the better half of the starts goes on, round by round, until no more than the finalists are
            left: a round is as long as all before it together.
        finalists: How many continue on all rows.
        finalist_gap: By how much a start's loss may be above the best one's after the short runs, times the rows of
            these, for it to be a finalist: more is no chance. Any if left out.
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
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1; got {getattr(self, name)}")
        if min(self.alternative_steps) < 1:
            raise ModelError(f"alternative_steps must be at least 1; got {self.alternative_steps}")
        for name in ("short_steps", "short_moves", "finalist_moves", "moves"):
            if getattr(self, name) < 0:
                raise ModelError(f"{name} must not be negative; got {getattr(self, name)}")

    def rows_for(self, points: int) -> int:
        """Rows of the short runs, where a row of all starts has so many points."""
        return max(min(FEWEST_ROWS, self.short_rows), min(self.short_rows, self.short_elements // points))
