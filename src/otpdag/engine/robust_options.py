"""How much a fit that survives outliers may leave out."""

from __future__ import annotations

from dataclasses import dataclass, field

from otpdag.errors import ModelError
from otpdag.outlying_rows import ApartOptions

__all__ = ["RobustOptions"]


@dataclass(frozen=True)
class RobustOptions:
    """How much a fit may leave out: ``otp.fit(..., robust=otp.RobustOptions(most_dropped=0.4))``.

    Args:
        most_dropped: Largest share of rows that may be left out; beyond it the most likely rows are kept.
        slack: How far the data's mass in a region may exceed the model's.
        chance: The same in standard errors, which count where rows are few.
        apart: What counts as apart from the rest; rows apart take no part in the search for a start.
        tails: Upper tail probabilities of the loss under the model that cut the regions.
        cap: Tail probability whose loss caps a row's loss when starts are compared.
        rounds: How often fit and weights alternate at most.
        round_steps: Steps of the fit in each of these rounds.
        same_weights: Mean change of a row's weight below which they stop.
        concentration: Rounds of the short runs on the most likely rows alone, and as many with capped weights.
        sample: Model rows that the loss's distribution is taken from.
    """

    most_dropped: float = 0.25
    slack: float = 1.25
    chance: float = 2.0
    apart: ApartOptions = field(default_factory=ApartOptions)
    tails: tuple[float, ...] = (0.1, 0.05, 0.02, 0.01, 0.004, 0.001)
    cap: float = 0.004
    rounds: int = 8
    round_steps: int = 15
    same_weights: float = 5e-4
    concentration: int = 3
    sample: int = 4000

    def __post_init__(self) -> None:
        """Refuse shares that are none, and limits below what they limit."""
        if not 0 < self.most_dropped < 1:
            raise ModelError(f"most_dropped must be a share between 0 and 1; got {self.most_dropped!r}")
        if not self.slack >= 1:
            raise ModelError(f"slack must be at least 1, the model's own mass; got {self.slack!r}")
        falling = all(0 < later < earlier < 1 for earlier, later in zip(self.tails, self.tails[1:], strict=False))
        if not self.tails or not falling or not 0 < self.tails[0] < 1:
            raise ModelError(f"tails must be probabilities that fall; got {self.tails!r}")
        if not 0 < self.cap < 1:
            raise ModelError(f"cap must be a probability between 0 and 1; got {self.cap!r}")
