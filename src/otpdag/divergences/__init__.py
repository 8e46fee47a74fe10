"""Divergences: how far two weighted samples are from each other.

Every divergence is called as ``divergence(x, y, a, b, generator=generator)`` with samples ``x`` (R, N, d) and
``y`` (R, M, d), optional weights ``a`` (R, N) and ``b`` (R, M), and returns one number per replica, (R,).
"""

from otpdag.divergences.base import AbstractDivergence
from otpdag.divergences.kernel import MMD, Energy
from otpdag.divergences.sinkhorn import Sinkhorn
from otpdag.divergences.sliced import SlicedWasserstein
from otpdag.divergences.wasserstein import Wasserstein

__all__ = ["MMD", "AbstractDivergence", "Energy", "Sinkhorn", "SlicedWasserstein", "Wasserstein"]
