"""Training of auto-encoders: as many epochs as were asked for."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from otpdag.data import Images
from otpdag.engine import FitResult, Method, fit
from otpdag.errors import ConvergenceWarning
from otpdag.model import Model

__all__ = ["train_encoder"]


def train_encoder(model: Model, rows: Tensor, method: Method, **arguments: Any) -> FitResult:
    """Fit images; a network is trained for the epochs that were asked for, and ``status`` tells if more would help."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return fit(model, Images(rows), method=method, restarts=1, **arguments)
