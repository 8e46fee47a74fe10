r"""What an objective is made of: its terms with their weights, and how it is evaluated.

.. math:: \text{reconstruction} + \eta\, \text{push-forward} + \epsilon\, \text{entropic}

Or, alone, the direct term: a transport cost between data and model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from otpdag.costs import AbstractCost, PointFunction
from otpdag.divergences import Energy, Sinkhorn, SlicedWasserstein
from otpdag.divergences.base import AbstractDivergence
from otpdag.errors import ModelError, check_choice, check_count, check_number, check_share
from otpdag.schedules import Schedule


def value_at(setting: float | Schedule, progress: float) -> float:
    """What a number, or a schedule, is at a share of the steps."""
    return setting(progress) if callable(setting) else float(setting)


def _check_weight(name: str, value: object) -> None:
    if not callable(value):
        check_number(name, value, least=0.0)


def _check_divergence(divergence: object) -> None:
    if not isinstance(divergence, AbstractDivergence):
        raise ModelError(f"divergence must be one of otpdag.divergences; got {divergence!r:.60}")


@dataclass(frozen=True)
class PushForward:
    """Hidden values must look like the model's own.

    Args:
        eta: The weight, a number or a schedule (in closed form, the schedule's end counts).
        divergence: What compares the two.
    """

    eta: float | Schedule = 1.0
    divergence: AbstractDivergence = field(default_factory=Energy)

    def __post_init__(self) -> None:
        """Refuse a weight and a divergence that are none."""
        _check_weight("eta", self.eta)
        _check_divergence(self.divergence)


@dataclass(frozen=True)
class Direct:
    """The left side of Theorem 1: a transport cost between the data and points of the model, where it is observed.

    Args:
        divergence: The transport cost. Sliced, its directions follow the neighbourhoods of the graph; any other
            divergence of weighted samples compares whole rows. If left out, the sliced one with p = 1, its directions
            weighed by what they tell where densities are known; of few different rows and listed states, Sinkhorn's,
            which is smooth where the others have kinks.
        costs: Ground costs of nodes, in units of their spread, for a divergence that has one: a cost, a function of two
            values, ``"squared"`` (the default), ``"absolute"`` or ``"0/1"``.
        unmatched: The share of the rows that the model need not explain, or ``"auto"``: the least
            share without which chance may explain the cost of the others.
        most_unmatched: Of ``"auto"``: the largest share.
        points: Points that stand for the model, a power of two for each listed state; about 2,048, or 200 for each of
            more than ten columns, if left out.
        states: Joint states of categories that are listed; further categories, and counts, are drawn.
        steps: Steps that drawn points serve for.
        draws: Of what a row with gaps misses.
        rounds: How often points may be drawn and rows completed anew.
        window: Of sequences: neighbouring steps that are compared together, fewer where states are many.
    """

    divergence: AbstractDivergence | None = None
    costs: Mapping[str, AbstractCost | PointFunction | str] = field(default_factory=dict)
    unmatched: float | Literal["auto"] = 0.0
    most_unmatched: float = 0.25
    points: int | None = None
    states: int = 256
    steps: int = 25
    draws: int = 4
    rounds: int = 30
    window: int = 3

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing, shares that are none, and costs that nothing would read."""
        if self.divergence is not None:
            _check_divergence(self.divergence)
        for name in ("points", "states", "steps", "draws", "rounds", "window"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.unmatched != "auto" and not (isinstance(self.unmatched, int | float) and 0 <= self.unmatched < 1):
            raise ModelError(f"unmatched must be a share of at least 0 and below 1, or 'auto'; got {self.unmatched!r}")
        if self.unmatched and self.is_unbalanced:
            raise ModelError("unmatched and an unbalanced divergence both leave rows out: give one of them")
        check_share("most_unmatched", self.most_unmatched)
        if self.costs and not hasattr(self.divergence or Sinkhorn(), "cost"):
            raise ModelError(f"costs are of Wasserstein or Sinkhorn, which have a ground cost; got {self.divergence!r}")

    @property
    def is_unbalanced(self) -> bool:
        """Whether the cost itself tells what to leave out."""
        return isinstance(self.divergence, Sinkhorn) and self.divergence.unbalanced is not None

    def size(self, columns: int) -> int:
        """How many points stand for a model of so many columns."""
        return self.points or max(2048, 200 * columns)

    def sliced(self, columns: int) -> SlicedWasserstein:
        """What chooses directions: ten for each of many columns, if nothing was said."""
        if isinstance(self.divergence, SlicedWasserstein):
            return self.divergence
        return SlicedWasserstein(max(64, 10 * columns), p=1.0)


@dataclass(frozen=True)
class Weights:
    """The weights of the terms at one moment of a fit."""

    reconstruction: float = 1.0
    eta: float = 0.0
    eps: float = 0.0


@dataclass(frozen=True)
class Objective:
    """Which terms count, and how much.

    Args:
        reconstruction: Weight of rebuilding what is observed.
        eps: Weight of the entropic term, a number or a schedule (in closed form, the schedule's end counts).
        push_forward: The push-forward term, if it counts.
        direct: The direct term, which stands alone.
    """

    reconstruction: float = 1.0
    eps: float | Schedule = 0.0
    push_forward: PushForward | None = None
    direct: Direct | None = None

    def __post_init__(self) -> None:
        """Refuse objectives without a term."""
        check_number("reconstruction", self.reconstruction, least=0.0)
        _check_weight("eps", self.eps)
        if not self.reconstruction and self.direct is None and self.push_forward is None:
            raise ModelError("the objective has no term: let reconstruction, push_forward or direct count")
        if self.direct is not None and (self.reconstruction or self.push_forward is not None):
            raise ModelError("the direct term stands alone: give reconstruction=0 and no push_forward with it")

    def at(self, progress: float) -> Weights:
        """The weights at a share of the steps."""
        eta = 0.0 if self.push_forward is None else value_at(self.push_forward.eta, progress)
        return Weights(self.reconstruction, eta, value_at(self.eps, progress))

    @property
    def is_sum_over_rows(self) -> bool:
        """Whether the objective is a mean over rows: no term compares all of them with the model."""
        return self.direct is None and self.push_forward is None


@dataclass(frozen=True)
class SumSizes:
    """Sizes of the sums over what rows do not show.

    Args:
        states: Most joint states of inner categories for which transport is chosen rather than the paper's way, where
            a node has no density.
        grid: Points for one unknown number: those of a posterior that is asked for; a fit takes half of them.
        prior_draws: Points for an unknown vector.
        count_atoms: The same for an unknown count.
        largest_table: Most entries of one table of one row. Rows that need more are refused.
        memory: Bytes that the tables of a block of rows may take.
    """

    states: int = 4096
    grid: int = 48
    prior_draws: int = 512
    count_atoms: int = 96
    largest_table: int = 2**23
    memory: int = 2**27

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing."""
        for name in ("largest_table", "memory"):
            check_count(name, getattr(self, name))


@dataclass(frozen=True)
class ClosedForm:
    """Noise integrated out and the best backward map known: the loss is a smooth, deterministic function.

    Args:
        reference: Of the entropic term. ``"model"``: KL to the model's distribution of what is hidden. ``"uniform"``:
            the entropy of hidden categories, which leaves their weights out (semi-relaxed transport): where these are
            given and perhaps wrong, nothing else follows them. Weights that are learned then need a push-forward term.
        sums: Sizes of the sums over what is unknown.
    """

    reference: Literal["model", "uniform"] = "model"
    sums: SumSizes = field(default_factory=SumSizes)

    def __post_init__(self) -> None:
        """Refuse other references."""
        check_choice("reference", self.reference, ("model", "uniform"))
