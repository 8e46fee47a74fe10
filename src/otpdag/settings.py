r"""What an objective is made of: its terms with their weights, and how it is evaluated.

.. math:: \text{reconstruction} + \eta\, \text{push-forward} + \epsilon\, \text{entropic} + \kappa\, \text{direct}
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields
from typing import Literal

from otpdag.divergences import Energy
from otpdag.divergences.base import AbstractDivergence
from otpdag.divergences.whitened import WhitenedFeatures
from otpdag.errors import ModelError, check_choice
from otpdag.schedules import Schedule


def value_at(setting: float | Schedule, progress: float) -> float:
    """What a number, or a schedule, is at a share of the steps."""
    return setting(progress) if callable(setting) else float(setting)


@dataclass(frozen=True)
class PushForward:
    """Hidden values must look like the model's own.

    Args:
        eta: The weight, a number or a schedule (in closed form, the schedule's end counts).
        divergence: What compares the two.
    """

    eta: float | Schedule = 1.0
    divergence: AbstractDivergence = field(default_factory=Energy)


@dataclass(frozen=True)
class PointSizes:
    """How many points stand for the model's inner nodes: those that observed ones hang below.

    Args:
        few: Points in every step of a fit, joint states times noise.
        many: Points where a mean is taken once, at an estimate: errors of a thousandth of a feature's spread.
        thinned: Points in every step once an estimate tells which of them count, where counts have many.
        states: Joint states of categories and counts that are listed; of more, some are drawn.
        counts: Values of a count; beyond, every few stand for all.
        noise: Most quasi-random points, for each state, of several numbers.
        fewest: Least such points.
        grid: Points of a single number.
        grid_with_counts: The same beside a count: how likely a large one is changes fast with the number.
    """

    few: int = 4096
    many: int = 16_384
    thinned: int = 2048
    states: int = 4096
    counts: int = 96
    noise: int = 512
    fewest: int = 8
    grid: int = 48
    grid_with_counts: int = 160


@dataclass(frozen=True)
class Completion:
    """How rows with gaps are filled in by the model at an estimate, and how often, until both agree.

    Args:
        draws: Of a row, at least and at most.
        drawn_rows: Draws of all rows, between these.
        fewest_effective: Share of the draws that must still count; below, rows are drawn anew. A mean over few draws
            that are weighed falls short of the change that the weights stand for, by about the change over their
            number, and what is missing of the information multiplies that: with half of the draws of 16 it was as
            large as the standard errors.
        most: How often rows may be completed anew; few suffice unless most of the information is missing.
        first: How often before weights of features change: with the first weights it may take forty times to end
            elsewhere.
        settled: Squared change of an estimate, in standard errors, below which completing rows anew is of no use. What
            is left to go is the change divided by the share of information that is there, perhaps a tenth: a change of
            a thirtieth of a standard error would leave a third of one.
        settled_roughly: The same before weights of features change.
        settled_resample: The same of one of many resampled estimates.
    """

    draws: tuple[int, int] = (8, 16)
    drawn_rows: int = 32_000
    fewest_effective: float = 0.9
    most: int = 40
    first: int = 3
    settled: float = 1e-5
    settled_roughly: float = 0.01
    settled_resample: float = 0.03


@dataclass(frozen=True)
class Direct:
    """The left side of Theorem 1: the data against the model, in the space of what is observed.

    Args:
        kappa: The weight.
        features: What compares the two.
        refinements: How often features are whitened anew, by the model's own covariance, and the fit continued; not of
            sequences.
        window: Of sequences: neighbouring steps that are compared together, fewer where states are many. Two already
            tell transitions and emissions apart.
        points: Of rows: how many points stand for the model.
        completion: Of rows: how gaps are filled in.
        whitening_rows: Rows drawn from the model for the covariance of its features: thirty times as many as there are
            features by default. Chance in the weights adds features over rows to the variance of estimates, and more
            where gaps leave less to know.
    """

    kappa: float = 1.0
    features: WhitenedFeatures = field(default_factory=WhitenedFeatures)
    refinements: int = 1
    window: int = 3
    points: PointSizes = field(default_factory=PointSizes)
    completion: Completion = field(default_factory=Completion)
    whitening_rows: int = 16_000

    def __post_init__(self) -> None:
        """Refuse weights that mean nothing."""
        if not self.kappa > 0:
            raise ModelError(f"kappa must be above zero, or the direct term left out; got {self.kappa}")
        if self.window < 1:
            raise ModelError(f"window must be at least 1; got {self.window}")


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
        direct: The direct term, if it counts.
    """

    reconstruction: float = 1.0
    eps: float | Schedule = 0.0
    push_forward: PushForward | None = None
    direct: Direct | None = None

    def __post_init__(self) -> None:
        """Refuse objectives without a term."""
        if self.reconstruction < 0:
            raise ModelError(f"reconstruction must not be negative; got {self.reconstruction}")
        if not self.reconstruction and self.direct is None and self.push_forward is None:
            raise ModelError("the objective has no term: let reconstruction, push_forward or direct count")

    def at(self, progress: float) -> Weights:
        """The weights at a share of the steps."""
        eta = 0.0 if self.push_forward is None else value_at(self.push_forward.eta, progress)
        return Weights(self.reconstruction, eta, value_at(self.eps, progress))

    @property
    def is_likelihood(self) -> bool:
        """Whether the closed form of it is a log-likelihood at some temperature: eps above zero at all times."""
        return isinstance(self.eps, int | float) and self.eps > 0 and self.push_forward is None

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
        easy_states, draws, patterns: Not used any more.
        grid: Points for one unknown number: those of a posterior that is asked for; a fit takes half of them.
        prior_draws: Points for an unknown vector.
        count_atoms: The same for an unknown count.
        largest_table: Most entries of one table of one row. Rows that need more are approximated.
        entries: Most entries of all tables of all rows in one evaluation of exact sums, where rows have large ones.
        approximate: Whether rows beyond these two are approximated rather than refused.
        memory: Bytes that the tables of a block of rows may take.
    """

    states: int = 4096
    easy_states: int = 32
    grid: int = 48
    draws: int = 32
    prior_draws: int = 512
    patterns: int = 12
    count_atoms: int = 96
    largest_table: int = 2**23
    entries: int = 2**31
    approximate: bool = True
    memory: int = 2**27

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing, and say which count for nothing."""
        for name in ("largest_table", "entries", "memory"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1; got {getattr(self, name)}")
        for one in fields(self):
            if one.name in ("easy_states", "draws", "patterns") and getattr(self, one.name) != one.default:
                warnings.warn(f"SumSizes({one.name}=...) has no effect any more", DeprecationWarning, stacklevel=3)


@dataclass(frozen=True)
class ClosedForm:
    """Noise integrated out and the best backward map known: the loss is a smooth, deterministic function.

    Args:
        reference: Of the entropic term. ``"model"``: KL to the model's distribution of what is hidden. ``"uniform"``:
            the entropy of hidden categories, which leaves their weights out (semi-relaxed transport): where these are
            given and perhaps wrong, nothing else follows them. Weights that are learned then need a push-forward term.
        sums: Sizes of the sums over what is unknown.
        network: Of sequences with hidden numbers: whether a network joins the linear smoother that draws them. If left
            out, it does where that lowers the objective.
    """

    reference: Literal["model", "uniform"] = "model"
    sums: SumSizes = field(default_factory=SumSizes)
    network: bool | None = None

    def __post_init__(self) -> None:
        """Refuse other references."""
        check_choice("reference", self.reference, ("model", "uniform"))
