r"""Anderson's mixing: the fixed point of a map from its last few values.

With the map g and :math:`f(x) = g(x) - x`, the next point is that combination of the last ones at which f, taken as
linear, is smallest (Anderson 1965; Walker and Ni 2011),

.. math:: x_{k+1} = g(x_k) - (\Delta X + \Delta F) \gamma, \qquad \gamma = \arg\min \|f_k - \Delta F \gamma\|^2.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["correction"]

RIDGE = 1e-10
"""Relative to the largest difference: what keeps a combination of nearly equal ones small."""


def correction(change: Tensor, moves: Tensor, changes: Tensor) -> Tensor:
    """What is to be subtracted from the last value of the map (R, P).

    Args:
        change: The last :math:`f_k` (R, P).
        moves: Differences of points (R, K, P); rows of zeros do not count.
        changes: Differences of f at these points (R, K, P).

    >>> point = torch.tensor([[1.0]]).double()
    >>> halved = lambda x: 0.5 * x + 1  # whose fixed point is two
    >>> image = halved(point)
    >>> change, next_change = image - point, halved(image) - image
    >>> step = correction(next_change, change.unsqueeze(1), (next_change - change).unsqueeze(1))
    >>> round(float(halved(image) - step), 6)
    2.0
    """
    products = changes @ changes.mT
    level = products.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=1e-300)
    ridge = RIDGE * level[:, None, None] * torch.eye(changes.shape[1]).to(products)
    share = torch.linalg.solve(products + ridge, changes @ change.unsqueeze(-1))
    return ((moves + changes).mT @ share).squeeze(-1)
