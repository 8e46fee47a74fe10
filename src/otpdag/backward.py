"""Backward maps: hidden and missing values from what is seen."""

from otpdag.learned.amortized import AmortizedMap, RowCode
from otpdag.learned.autoencoder import EncoderMap, QuantizedMap
from otpdag.likelihood.enumeration import SumSizes

__all__ = ["AmortizedMap", "EncoderMap", "QuantizedMap", "RowCode", "SumSizes"]
