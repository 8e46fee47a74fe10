r"""What sums and fixed points are computed by, whatever they are of.

Anderson's mixing finds the fixed point of a map from its last few values. With the map g and :math:`f(x) = g(x) - x`,
the next point is that combination of the last ones at which f, taken as linear, is smallest (Anderson 1965; Walker and
Ni 2011),

.. math:: x_{k+1} = g(x_k) - (\Delta X + \Delta F) \gamma, \qquad \gamma = \arg\min \|f_k - \Delta F \gamma\|^2.

Going from :math:`x` to :math:`g(x)` again and again converges as slowly as the map contracts: of completed data by the
share of information that is missing. A linear map of few slow directions is settled at once by mixing.

Also joint states of several categories, threads bounded by the size of the work, and sums over rows of products of
columns that are the same to the last digit in whatever order the rows stand.

A sum of floating numbers is rounded at every step, so that it depends on their order in its last digits; where data do
not determine a parameter, these digits choose its estimate. Ordering the rows of a large table first takes longer than
everything else that is done with them. Instead every number is cut in two,

.. math:: x = h + l, \qquad h \in u \mathbb Z, \quad |l| \le u / 2, \quad u = 2^{-b} \max |x|,

with b such that sums of products of the coarse parts h are whole numbers of their unit below :math:`2^{53}`: no such
sum is rounded at all (Demmel and Nguyen 2015). The rest is smaller by :math:`2^{-b}`, and so are its roundings. They
change the total, which is rounded a few digits earlier, with odds of one in a hundred thousand.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

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


DEPTH = 5  # images that are combined
FURTHEST = 50.0  # steps of the map that a combination may go beyond its image


@dataclass(frozen=True)
class FixedPoint:
    """Points (R, P) at which a map was or is being evaluated, and their images, the newest last.

    >>> slope = torch.tensor([[0.9, 0.2], [0.0, 0.5]], dtype=torch.float64)
    >>> known = FixedPoint().at(torch.ones(1, 2, dtype=torch.float64))
    >>> for _ in range(4):
    ...     known = known.with_image(known.begin @ slope.T + 1)
    ...     known = known.at(known.best())
    >>> torch.allclose(known.begin, torch.linalg.solve(torch.eye(2).double() - slope, torch.ones(2).double()))
    True
    """

    points: tuple[Tensor, ...] = ()
    images: tuple[Tensor, ...] = ()

    @property
    def begin(self) -> Tensor:
        """The point that the map is being evaluated at."""
        return self.points[-1]

    def at(self, point: Tensor) -> FixedPoint:
        """The map is evaluated at another point."""
        return FixedPoint((*self.points, point)[-DEPTH:], self.images[-DEPTH + 1 :])

    def with_image(self, image: Tensor) -> FixedPoint:
        """The image of the last point is known."""
        return FixedPoint(tuple(point.expand_as(image) for point in self.points), (*self.images, image))

    def best(self) -> Tensor:
        """Where to go next (R, P): the last image, corrected by the others; just the image where that goes too far."""
        images = torch.stack(self.images)
        left = images - torch.stack(self.points)
        if len(images) == 1:
            return images[-1]
        moves = torch.stack(self.points).diff(dim=0).transpose(0, 1)
        step = correction(left[-1], moves, left.diff(dim=0).transpose(0, 1))
        usable = torch.isfinite(step).all(-1) & (step.norm(dim=-1) <= FURTHEST * left[-1].norm(dim=-1))
        return torch.where(usable.unsqueeze(-1), images[-1] - step, images[-1])


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


# -- tensors with a replica axis ---------------------------------------------------------------------------------------


def nearest(costs: Tensor) -> Tensor:
    """Index of the smallest number along the last axis; on a CPU by numpy, which is ten times as fast as torch.

    >>> nearest(torch.tensor([[3.0, 1.0, 2.0]]))
    tensor([1])
    """
    held = costs.detach()
    return torch.from_numpy(held.numpy().argmin(-1)) if held.device.type == "cpu" else held.argmin(-1)


def expand_to(parameter: Tensor, ndim: int, event_dims: int = 1) -> Tensor:
    """Insert axes after the replica axis, so that a parameter broadcasts against values with ``ndim`` axes.

    >>> expand_to(torch.zeros(2, 3), ndim=4).shape
    torch.Size([2, 1, 1, 3])
    """
    missing = ndim - 1 - event_dims
    shape = (parameter.shape[0],) + (1,) * max(missing, 0) + tuple(parameter.shape[1:])
    return parameter.reshape(shape)


def apply_linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``inputs`` (R, ..., P) by ``weight`` (R, P, d), replica by replica.

    Many inputs are mostly a category's: where each chooses one row of the weights, it is looked up.
    """
    row = _chosen_rows(inputs) if inputs.shape[-1] >= 256 and not inputs.requires_grad else None
    if row is not None:
        return weight[torch.arange(len(weight)).reshape(-1, *(1,) * (row.ndim - 1)), row]
    if inputs.ndim == 2:
        return torch.matmul(inputs.unsqueeze(1), weight).squeeze(1)
    return torch.matmul(inputs, expand_to(weight, inputs.ndim, event_dims=2))


def _chosen_rows(inputs: Tensor) -> Tensor | None:
    """Where each of some inputs (..., P) is one and all else zero (...); None if they are not like that.

    A tensor is looked at once: rows stay the same in all evaluations of a fit.
    """
    if _CHOSEN.get(inputs, (-1, None))[0] != inputs._version:
        one = (inputs.sum(-1) == 1) & (inputs.amax(-1) == 1) & (inputs.amin(-1) == 0)
        _CHOSEN[inputs] = inputs._version, inputs.argmax(-1) if bool(one.all()) else None
    return _CHOSEN[inputs][1]


_CHOSEN: MutableMapping[Tensor, tuple[int, Tensor | None]] = WeakIdKeyDictionary()


def side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """Join tensors (..., width) on their last axis, after broadcasting the axes before it.

    >>> side_by_side([torch.zeros(1, 5, 2), torch.ones(3, 1, 1)]).shape
    torch.Size([3, 5, 3])
    """
    if len(columns) == 1:
        return columns[0]
    shapes = [column.shape[:-1] for column in columns]
    if any(shape != shapes[0] for shape in shapes):
        common = np.broadcast_shapes(*shapes)  # much faster than torch's own
        columns = [column.expand(*common, column.shape[-1]) for column in columns]
    return torch.cat(tuple(columns), -1)


# -- threads -----------------------------------------------------------------------------------------------------------

ELEMENTS_WORTH_A_THREAD = 5_000_000  # of a tensor: below, starting a thread costs more than it saves

T = TypeVar("T")

_allowed: ContextVar[int] = ContextVar("threads that torch had before they were bounded", default=1)


@contextmanager
def bounded_threads(elements: int) -> Iterator[None]:
    """Use one thread for small tensors: waking a second one costs more than it saves.

    What has several large pieces may still share them out, :func:`in_order`.
    """
    before = torch.get_num_threads()
    outer = _allowed.set(max(before, _allowed.get()))
    torch.set_num_threads(before if elements >= ELEMENTS_WORTH_A_THREAD else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _allowed.reset(outer)


def in_order(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Results of tasks in their order, each by one thread, as many at a time as torch had threads before a fit.

    Every result is the one that a single thread would find, to the last digit; at most one task more than there are
    threads is held. Elsewhere than within :func:`bounded_threads` one task follows another.

    >>> list(in_order([lambda: 1, lambda: 2, lambda: 3]))
    [1, 2, 3]
    """
    threads = _allowed.get()
    if threads < 2:
        yield from (task() for task in tasks)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that begin from here on have it, too
    try:
        with ThreadPoolExecutor(threads) as pool:
            waiting: deque[Future[T]] = deque()
            for task in tasks:
                waiting.append(pool.submit(task))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(before)
