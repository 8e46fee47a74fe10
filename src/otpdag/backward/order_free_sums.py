r"""Sums over rows of products of columns that are the same to the last digit in whatever order the rows stand.

A sum of floating numbers is rounded at every step, so that it depends on their order in its last digits; where data do
not determine a parameter, these digits choose its estimate. Ordering the rows of a large table first takes longer than
everything else that is done with them. Instead every number is cut in two,

.. math:: x = h + l, \qquad h \in u \mathbb Z, \quad |l| \le u / 2, \quad u = 2^{-b} \max |x|,

with b such that sums of products of the coarse parts h are whole numbers of their unit below :math:`2^{53}`: no such
sum is rounded at all (Demmel and Nguyen 2015). The rest is smaller by :math:`2^{-b}`, and so are its roundings. They
change the total, which is rounded a few digits earlier, with odds of one in a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["order_free_products"]

Array = NDArray[np.float64]

DIGITS = 53  # of a floating number, binary ones
KEPT = 49  # digits of the sums, relative to those of the columns' squares
BLOCK_ENTRIES = 2**16  # of columns that are held at a time: few enough for a processor's cache


def order_free_products(columns: Sequence[Array], centres: Sequence[float], rows: int) -> Array:
    """Sums over rows of products (d + 1, d + 1) of columns (rows,) less their centres and of a one, which comes last.

    >>> x, y = np.array([0.1, 0.2, 0.7]), np.array([1.0, 2.0, 4.0])
    >>> turned = order_free_products([x[::-1], y[::-1]], [0.3, 2.0], 3)
    >>> bool((turned == order_free_products([x, y], [0.3, 2.0], 3)).all()), [round(v, 9) for v in turned[1].tolist()]
    (True, [1.0, 5.0, 1.0])
    """
    many = len(columns)
    roundings = [_rounding(column, centre, rows) for column, centre in zip(columns, centres, strict=True)]
    held = np.ones((2 * many + 1, min(rows, max(1, BLOCK_ENTRIES // (2 * many + 1)))))
    total = np.zeros((2 * many + 1, 2 * many + 1))
    for begin in range(0, rows, held.shape[1] or 1):
        block = held[:, : min(rows - begin, held.shape[1])]
        for at, (column, centre, rounding) in enumerate(zip(columns, centres, roundings, strict=True)):
            coarse, fine = block[at], block[many + 1 + at]
            np.subtract(column[begin : begin + len(fine)], centre, out=fine)
            np.add(fine, rounding, out=coarse)
            coarse -= rounding
            fine -= coarse
        total += block @ block.T
    exact, across, least = total[: many + 1, : many + 1], total[: many + 1, many + 1 :], total[many + 1 :, many + 1 :]
    rest = np.zeros_like(exact)
    rest[:, :many] += across
    rest[:many] += across.T
    rest[:many, :many] += least
    return _rounded(exact + rest)


def _rounding(column: Array, centre: float, rows: int) -> float:
    """What, added and subtracted again, leaves the coarse part of a number less the centre."""
    reach = max(abs(float(column.min()) - centre), abs(float(column.max()) - centre))
    digits = (DIGITS - rows.bit_length()) // 2
    unit = np.ldexp(1.0, int(np.frexp(reach)[1]) - digits)
    return float(1.5 * 2.0 ** (DIGITS - 1) * unit)


def _rounded(sums: Array) -> Array:
    """Without digits that are lost in any case, so that those of the order are, too."""
    size = np.sqrt(np.abs(sums.diagonal()))
    digits = KEPT - np.frexp(size[:, None] * size)[1]
    return np.ldexp(np.rint(np.ldexp(sums, digits)), -digits)
