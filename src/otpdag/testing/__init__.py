"""Contract checks for your own mechanisms and divergences: run them in your tests.

>>> from otpdag import mechanisms as m
>>> from otpdag.testing import check_mechanism
>>> check_mechanism(m.Normal(), m.Family("x"), rows=100)

They raise an :class:`AssertionError` that says what is broken, or return nothing.
"""

from otpdag.testing.divergences import DIVERGENCE_CHECKS, check_divergence
from otpdag.testing.mechanisms import MECHANISM_CHECKS, Case, check_mechanism

__all__ = ["DIVERGENCE_CHECKS", "MECHANISM_CHECKS", "Case", "check_divergence", "check_mechanism"]
