"""Images as rows of numbers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from otpdag.errors import DataError

__all__ = ["Images"]


class Images:
    """Images, or rows of numbers, for :func:`otpdag.fit` of an auto-encoder.

    Args:
        pixels: An array (n, ...): each image is flattened, channels first.

    >>> Images(np.zeros((5, 1, 8, 8))).rows.shape
    torch.Size([5, 64])
    """

    def __init__(self, pixels: ArrayLike | Tensor) -> None:
        held = pixels.detach().cpu().numpy() if isinstance(pixels, Tensor) else np.asarray(pixels)
        if held.ndim < 2 or len(held) < 2:
            raise DataError(f"images must have shape (n, ...) with at least 2 of them; got {held.shape}")
        if not np.isfinite(held).all():
            raise DataError("images must be finite; got NaN or infinity")
        self.rows = torch.from_numpy(np.ascontiguousarray(held.reshape(len(held), -1), dtype=np.float32))
