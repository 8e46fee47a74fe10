"""Joint states of several categories, enumerated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["joint_codes", "joint_one_hot"]


def joint_codes(sizes: Sequence[int]) -> list[Tensor]:
    """The code of each category in every joint state, the last category fastest.

    Args:
        sizes: How many values each category has.

    Returns:
        For each category a tensor of codes, as long as there are joint states: the product of all sizes.

    >>> [codes.tolist() for codes in joint_codes([2, 3])]
    [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    """
    total = math.prod(sizes)
    strides = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    every = torch.arange(total)
    return [every.div(stride, rounding_mode="floor") % size for stride, size in zip(strides, sizes, strict=True)]


def joint_one_hot(sizes: Sequence[int]) -> list[Tensor]:
    """The same as one-hot vectors: for each category (states, size).

    >>> joint_one_hot([1, 2])[1].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return [torch.eye(size, dtype=torch.float64)[code] for size, code in zip(sizes, joint_codes(sizes), strict=True)]
