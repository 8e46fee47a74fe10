r"""What sums and fixed points are computed by, whatever they are of.

Anderson's mixing finds the fixed point of a map from its last few values. With the map g and :math:`f(x) = g(x) - x`,
the next point is that combination of the last ones at which f, taken as linear, is smallest (Anderson 1965; Walker and
Ni 2011),

.. math:: x_{k+1} = g(x_k) - (\Delta X + \Delta F) \gamma, \qquad \gamma = \arg\min \|f_k - \Delta F \gamma\|^2.

Going from :math:`x` to :math:`g(x)` again and again converges as slowly as the map contracts: of completed data by the
share of information that is missing. A linear map of few slow directions is settled at once by mixing.

Also joint states of several categories, tensors with a replica axis, and threads bounded by the size of the work.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, reduce
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

RIDGE = 1e-10  # relative to the largest difference: what keeps a combination of nearly equal ones small


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
    last, moved, changed = (one.cpu().numpy() for one in (change, moves, changes))  # its calls cost less
    products = changed @ changed.swapaxes(-1, -2)
    diagonal = np.einsum("rkk->rk", products)
    diagonal += RIDGE * diagonal.max(-1, keepdims=True).clip(min=1e-300)
    share = np.linalg.solve(products, changed @ last[..., None])
    return torch.from_numpy(((moved + changed).swapaxes(-1, -2) @ share)[..., 0]).to(change)


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
    return [one_hot(code, size) for size, code in zip(sizes, joint_codes(sizes), strict=True)]


def one_hot(codes: Tensor, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Vectors (..., size) with a one at a code, and none where that is negative; large ones take memory at ones alone.

    >>> one_hot(torch.tensor([1, -1]), 2).tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """
    many, at = codes.numel() * size, codes.unsqueeze(-1)
    if many < 2**20:
        empty = torch.zeros(many, dtype=dtype)
    else:
        empty = torch.frombuffer(mmap.mmap(-1, many * dtype.itemsize, access=mmap.ACCESS_COPY), dtype=dtype)
    return empty.reshape(*codes.shape, size).scatter_(-1, at.clamp(min=0), (at >= 0).to(dtype))


# -- tensors with a replica axis ---------------------------------------------------------------------------------------


def nearest(costs: Tensor) -> Tensor:
    """Index of the smallest number along the last axis; on a CPU by numpy, which is ten times as fast as torch.

    >>> nearest(torch.tensor([[3.0, 1.0, 2.0]]))
    tensor([1])
    """
    held = costs.detach()
    return torch.from_numpy(held.numpy().argmin(-1)) if held.device.type == "cpu" else held.argmin(-1)


def cholesky(matrices: Tensor) -> Tensor:
    """Lower factors; not numbers where a matrix is not positive, so that its density is none either."""
    factor, failed = torch.linalg.cholesky_ex(matrices)
    return torch.where((failed > 0)[..., None, None], torch.nan, factor)


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


def sums_by_row(inputs: Tensor, values: Tensor) -> Tensor:
    """Multiply ``inputs`` (..., N, P), transposed, by ``values`` (..., N, d): where each chooses one row, by adding up.

    >>> sums_by_row(torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0], [2.0], [3.0]])).tolist()
    [[2.0], [4.0]]
    """
    row = _chosen_rows(inputs) if inputs.shape[-1] >= 256 else None
    if row is None:
        return inputs.mT @ values
    total = values.new_zeros(*values.shape[:-2], inputs.shape[-1], values.shape[-1])
    return total.scatter_add(-2, row.unsqueeze(-1).expand(values.shape), values)


def _chosen_rows(inputs: Tensor) -> Tensor | None:
    """Where each of some inputs (..., P) is one and all else zero (...); None if they are not like that.

    A tensor is looked at once, and so is each part of one: rows stay the same in all evaluations of a fit.
    """
    known = _CHOSEN.setdefault(inputs if inputs._base is None else inputs._base, {})
    part = inputs._version, inputs.storage_offset(), inputs.shape, inputs.stride()
    if part not in known:
        one = inputs[tuple(slice(None if step else 1) for step in inputs.stride()[:-1])]  # what is expanded is alike
        flat = one.flatten(0, -2)
        place, row = flat.nonzero().T if torch.count_nonzero(flat) == len(flat) else torch.zeros(2, 0).long()
        is_each = len(row) == len(flat) and bool((place.diff() == 1).all() & (flat[place, row] == 1).all())
        known[part] = row.reshape(one.shape[:-1]).expand(inputs.shape[:-1]) if is_each else None
    return known[part]


_CHOSEN: MutableMapping[Tensor, dict[tuple[object, ...], Tensor | None]] = WeakIdKeyDictionary()


def products(parts: Sequence[Tensor]) -> Tensor:
    """All products of the columns of tensors (..., width), those of the last tensor fastest.

    >>> products([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])])
    tensor([ 3.,  5.,  6., 10.])
    """
    return reduce(lambda left, right: (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2), parts)


def under(named: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What stands under a prefix, without it.

    >>> under({"a.x": torch.tensor(1), "b.x": torch.tensor(2)}, "a.")
    {'x': tensor(1)}
    """
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


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


def first_connected(many: int, left: Ints, right: Ints) -> Ints:
    """The first of all that each is connected with, by pairs of neighbours: SciPy's takes long to import.

    >>> first_connected(5, np.array([2, 0]), np.array([3, 2])).tolist()
    [0, 1, 0, 0, 4]
    """
    first = np.arange(many)
    while (apart := first[left] != first[right]).any():
        low, high = np.sort([first[left][apart], first[right][apart]], axis=0)
        np.minimum.at(first, high, low)
        while (first[first] != first).any():
            first = first[first]
    return first


# -- threads -----------------------------------------------------------------------------------------------------------

ELEMENTS_WORTH_A_THREAD = 5_000_000  # of a tensor: below, starting a thread costs more than it saves

T = TypeVar("T")

_allowed: ContextVar[int] = ContextVar("threads that torch had before they were bounded", default=1)


@contextmanager
def at_work(elements: int) -> Iterator[None]:
    """Use one thread for small tensors, and keep the memory of those that are freed.

    Waking a second thread costs more than it saves; what has several large pieces may still share them out,
    :func:`in_order`.
    """
    _keep_freed_memory()
    before = torch.get_num_threads()
    outer = _allowed.set(max(before, _allowed.get()))
    torch.set_num_threads(before if elements >= ELEMENTS_WORTH_A_THREAD else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _allowed.reset(outer)


@cache
def _keep_freed_memory() -> None:
    """Let the GNU C library keep up to 64 MB of what is freed, for the next tensor.

    Otherwise it may return the pages of each tensor of some megabytes at once, and to be given them anew takes longer
    than the arithmetic. Its own rule comes to the same values as soon as a program frees 32 MB in one piece.
    """
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    with suppress(AttributeError, OSError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(mmap_threshold, 32 << 20)
        set_option(trim_threshold, 64 << 20)


def in_order(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Results of tasks in their order, each by one thread, as many at a time as torch had threads before a fit.

    Every result is the one that a single thread would find, to the last digit; at most one task more than there are
    threads is held. Elsewhere than within :func:`at_work` one task follows another.

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
