"""Rows of a table as tensors, and which rows agree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from otpdag.errors import DataError
from otpdag.numerics import Array, Flags

Codes: TypeAlias = NDArray[np.int64]
Hashes: TypeAlias = NDArray[np.uint64]

ROWS_AT_ONCE = 2**13  # few enough for a processor's cache: new memory costs more than the arithmetic


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a table as tensors, with a leading replica axis.

    The replica axis of a tensor has length R, or 1 where all replicas share it. A missing value is 0 in
    ``values``; the row of a missing category is all zeros. A table of many rows may keep its one-hot vectors as bytes:
    rows that are taken of it, and ``widened()``, are floating throughout.

    Attributes:
        values: For each node a tensor ``(R or 1, N, width)``.
        mask: For each node a Boolean tensor ``(R or 1, N, cells)``, true where the cell was seen.
        weight: Weights of the rows, ``(R or 1, N)``.

    >>> batch = Batch({"x": torch.zeros(1, 5, 2)}, {"x": torch.ones(1, 5, 2).bool()}, torch.ones(1, 5))
    >>> batch.rows, batch.replicas, batch.nodes
    (5, 1, ('x',))
    >>> batch.take(torch.tensor([[0, 1, 2], [4, 4, 4]]))
    Batch(3 rows, 2 replicas: x)
    """

    values: dict[str, Tensor]
    mask: dict[str, Tensor]
    weight: Tensor

    def __repr__(self) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"Batch({self.rows} rows{replicas}: {', '.join(self.nodes)})"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that the batch holds."""
        return tuple(self.values)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.weight.shape[1]

    @property
    def shares_rows(self) -> bool:
        """Whether all replicas read the same rows with the same gaps; their weights may differ."""
        return all(len(one) == 1 for one in (*self.values.values(), *self.mask.values()))

    @property
    def replicas(self) -> int:
        """Number of replicas; 1 if all tensors are shared."""
        return max(tensor.shape[0] for tensor in (self.weight, *self.values.values(), *self.mask.values()))

    def take(self, index: Tensor) -> Batch:
        """Pick rows.

        Args:
            index: Row numbers ``(n,)``, the same for all replicas (or a Boolean tensor of length N), or row
                numbers ``(R, n)`` for each replica.

        Returns:
            A batch of the rows in the order of ``index``.

        Raises:
            DataError: ``index`` has another number of dimensions.
        """
        if index.ndim not in (1, 2):
            raise DataError(f"index must have shape (n,) or (replicas, n); got {tuple(index.shape)}")
        if index.ndim == 1:
            index = index.nonzero()[:, 0] if index.dtype == torch.bool else index
            return self._map(lambda tensor: tensor.index_select(1, index)).widened()
        replicas = max(self.replicas, len(index))
        index = index.expand(replicas, -1)
        start = torch.arange(0, replicas * self.rows, self.rows, device=index.device)[:, None]
        own, shared = (index + start).flatten(), index.flatten()

        def gathered(tensor: Tensor) -> Tensor:
            flat = tensor.flatten(0, 1).index_select(0, shared if len(tensor) == 1 else own)
            return flat.unflatten(0, index.shape)

        return self._map(gathered).widened()

    def shows(self, nodes: Collection[str]) -> Tensor:
        """Which rows (N,) show all cells of these nodes; none does where one of them is hidden."""
        every = torch.ones(self.rows, dtype=torch.bool, device=self.weight.device)
        for node in nodes:
            every = every & self.mask[node][0].all(-1) if node in self.mask else torch.zeros_like(every)
        return every

    def part(self, rows: int | Tensor, seed: int) -> Batch:
        """The rows that are given, or so many at random; the batch itself if all are wanted."""
        part = random_part(self.rows, rows, seed)
        return self if part is None else self.take(part)

    def first(self, rows: int) -> Batch:
        """The first rows, or all if there are no more: views, no copies.

        >>> Batch({"x": torch.zeros(1, 5, 2)}, {"x": torch.ones(1, 5, 2).bool()}, torch.ones(1, 5)).first(2)
        Batch(2 rows: x)
        """
        return self.between(0, rows)

    def between(self, begin: int, end: int) -> Batch:
        """The rows from one on and before another: views, no copies of what is floating already."""
        return self._map(lambda tensor: tensor[:, begin:end]).widened()

    def without(self, node: str) -> Batch:
        """The same rows, which do not show a node."""
        values, mask = ({name: own for name, own in held.items() if name != node} for held in (self.values, self.mask))
        return Batch(values, mask, self.weight)

    def showing(self, shown: Mapping[str, Tensor]) -> Batch:
        """The same rows, which show these categories and single numbers (1, N, width), too."""
        seen = {node: torch.ones_like(value[..., :1], dtype=torch.bool) for node, value in shown.items()}
        return Batch({**self.values, **shown}, {**self.mask, **seen}, self.weight)

    def widened(self) -> Batch:
        """One-hot vectors that are bytes as floating ones; the batch itself where there are none."""
        dtype = self.weight.dtype
        if all(value.dtype == dtype for value in self.values.values()):
            return self
        return Batch({node: value.to(dtype) for node, value in self.values.items()}, self.mask, self.weight)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batch:
        """Move to another device, or change the floating type.

        Args:
            device: Where to; if left out, stay.
            dtype: Floating type of values and weights; masks stay Boolean.

        Returns:
            A new batch.
        """
        return self._map(lambda tensor: tensor.to(device, None if tensor.dtype == torch.bool else dtype))

    @staticmethod
    def join(batches: Sequence[Batch]) -> Batch:
        """The rows of batches with the same nodes, one after another.

        >>> batch = Batch({}, {}, torch.ones(1, 5))
        >>> Batch.join([batch, batch]).rows
        10
        """
        return Batch(
            {node: torch.cat([batch.values[node] for batch in batches], 1) for node in batches[0].nodes},
            {node: torch.cat([batch.mask[node] for batch in batches], 1) for node in batches[0].nodes},
            torch.cat([batch.weight for batch in batches], 1),
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        flags = {id(mask): mask for mask in self.mask.values()}  # columns without gaps share theirs
        mapped = {key: function(mask) for key, mask in flags.items()}
        return Batch(
            {node: function(tensor) for node, tensor in self.values.items()},
            {node: mapped[id(mask)] for node, mask in self.mask.items()},
            function(self.weight),
        )


def unique_rows(batch: Batch, *, shrink: float = 0.5) -> Batch:
    """Collapse rows that agree in all values and masks, and add up their weights.

    Tables of categories often have few distinct rows. The total weight stays what it was, so that the mean
    weight of the collapsed rows is above one.

    Args:
        batch: Any batch; with several replicas, rows collapse only where they agree in all of them.
        shrink: Collapse only to at most this share of the rows; otherwise return the batch as it is.

    Returns:
        The distinct rows in the order of their first appearance.

    >>> from otpdag.data import Schema, encode
    >>> from otpdag.graph import Graph
    >>> from otpdag.spaces import Discrete
    >>> schema = Schema.of({"a": Discrete(2)}, Graph([], nodes=["a"]))
    >>> unique_rows(encode({"a": [0, 1, 1, 1]}, schema, hidden=())).weight
    tensor([[1., 3.]], dtype=torch.float64)
    """
    group, groups = distinct_rows((*batch.values.values(), *batch.mask.values()))
    if groups > shrink * batch.rows:
        return batch
    first = np.empty(groups, dtype=np.int64)
    first[group[::-1]] = np.arange(batch.rows)[::-1]
    collapsed = batch.take(torch.from_numpy(first).to(batch.weight.device))
    summed = torch.zeros_like(collapsed.weight)
    summed.index_add_(1, torch.from_numpy(group).to(batch.weight.device), batch.weight)
    return Batch(collapsed.values, collapsed.mask, summed)


def canonical_order(columns: Iterable[Array], rows: int) -> Codes:
    """Row numbers in an order that depends on what the rows hold, not on where they stand: by a hash of their content.

    It reads ranks, so that the units of a column do not matter either, and only as many columns as tell rows apart.
    What is drawn from rows in that order (parts, donors, minibatches) is then the same however a table was sorted; and
    sums are taken in the same order, so that nothing at all changes. The order looks random: the first rows are no
    special ones.

    Args:
        columns: Cells (rows,) of every column, NaN where missing; best those first that have most distinct values.
        rows: How many rows there are.

    >>> x = np.array([3.0, 1.0, 2.0])
    >>> turned = x[[2, 0, 1]]
    >>> (x[canonical_order([x], 3)] == turned[canonical_order([turned], 3)]).all()
    np.True_
    """
    hashed = np.zeros(rows, dtype=np.uint64)
    alike: Codes | None = None  # rows that no column so far tells apart from all others; all of them at first
    for column in columns:
        order, differs = _ordered(column if alike is None else column[alike])
        if alike is None and differs.all():
            return order[np.random.default_rng(rows).permutation(rows)]
        ranks, at = np.zeros(len(order), dtype=np.uint64), order if alike is None else alike[order]
        np.cumsum(differs, out=ranks[1:])
        hashed[at] = mixed(hashed[at] ^ ranks)
        alike = np.sort(at[np.append(False, ~differs) | np.append(~differs, False)])
        if not len(alike):
            break
    return np.argsort(hashed)


def _ordered(column: Array) -> tuple[Codes, Flags]:
    """Places in ascending order, gaps last, and where one value differs from the next."""
    order = np.argsort(column)
    ordered = column[order]
    if np.isnan(ordered[-1]):
        ordered[np.isnan(ordered)] = np.inf  # gaps are all alike, and no cell is infinite
    return order, ordered[1:] != ordered[:-1]


def row_hashes(batch: Batch) -> Hashes:
    """A number for what each row holds, by ranks: equal for rows that are alike, whatever their order and units."""
    hashed = np.zeros(batch.rows, dtype=np.uint64)
    seen = (torch.where(batch.mask[node], value, -torch.inf) for node, value in batch.values.items())
    for tensor in chain(seen, batch.mask.values(), [batch.weight.unsqueeze(-1)]):  # one at a time: tables are large
        for cells in tensor.transpose(0, 1).flatten(1).unbind(1):
            ranks = np.zeros(batch.rows, dtype=np.uint64)
            if bool((cells != cells[:1]).any()):  # masks and weights mostly tell no rows apart
                order, differs = _ordered(cells.cpu().double().numpy())
                ranks[order[1:]] = np.cumsum(differs)
            hashed = mixed(np.bitwise_xor(hashed, ranks, out=ranks))
    return hashed


def mixed(numbers: Hashes) -> Hashes:
    """The same whole numbers spread over 64 bits (Knuth's multiplicative hashing)."""
    spread = numbers * np.uint64(0x9E3779B97F4A7C15)
    for begin in range(0, len(spread), ROWS_AT_ONCE):
        part = spread[begin : begin + ROWS_AT_ONCE]
        part ^= part >> np.uint64(29)
    return spread


def distinct_rows(tensors: Sequence[Tensor]) -> tuple[Codes, int]:
    """Number the distinct rows of tensors ``(R, N, width)`` taken together.

    Args:
        tensors: At least one tensor, all with the same rows.

    Returns:
        The number of each row's kind, and how many kinds there are.

    >>> distinct_rows([torch.tensor([[[5.0], [7.0], [5.0]]])])
    (array([0, 1, 0]), 2)
    """
    group, groups = np.zeros(tensors[0].shape[1], dtype=np.int64), 1
    for tensor in tensors:
        for codes, size in _tensor_codes(tensor):
            if groups > 2**62 // size:
                group, groups = _factorize(group)
            group, groups = group * size + codes, groups * size
    return _factorize(group)


def random_part(total: int, rows: int | Tensor, seed: int) -> Tensor | None:
    """Row numbers of a part: those that are given, or so many at random; None if all are wanted.

    >>> random_part(10, 10, seed=0), len(random_part(10, 4, seed=0))
    (None, 4)
    """
    if isinstance(rows, Tensor):
        return rows
    if rows >= total:
        return None
    every = torch.randperm(total, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return every[:rows].long()


def _factorize(array: NDArray[Any]) -> tuple[Codes, int]:
    codes, distinct = pd.factorize(array, use_na_sentinel=False)
    return codes.astype(np.int64), len(distinct)


def _tensor_codes(tensor: Tensor) -> Iterable[tuple[Codes, int]]:
    """Integers that differ where rows differ: one array for a one-hot tensor, else one per coordinate."""
    array = tensor.detach().cpu().numpy()
    if array.dtype == bool and array.all():  # as masks mostly are: nothing that tells rows apart
        return
    wide = array.transpose(1, 0, 2).reshape(array.shape[1], -1)
    if array.dtype != bool and array.shape[0] == 1 and _is_one_hot(wide):
        yield (wide @ np.arange(1, wide.shape[1] + 1)).astype(np.int64), wide.shape[1] + 1
        return
    for column in wide.T:
        yield _factorize(column)


def _is_one_hot(wide: NDArray[Any]) -> bool:
    return bool(((wide == 0) | (wide == 1)).all() and (wide.sum(1) <= 1).all())
