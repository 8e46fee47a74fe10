"""Backward maps: hidden and missing values from what is seen."""

from otpdag.backward.amortized import AmortizedMap, RowCode
from otpdag.backward.closed_form import SumSizes
from otpdag.backward.encoder import EncoderMap
from otpdag.backward.quantized import QuantizedMap

__all__ = ["AmortizedMap", "EncoderMap", "QuantizedMap", "RowCode", "SumSizes"]
