"""Backward maps: hidden and missing values from what is seen."""

from otpdag.backward.amortized import AmortizedMap, RowCode
from otpdag.backward.closed_form import SumSizes

__all__ = ["AmortizedMap", "RowCode", "SumSizes"]
