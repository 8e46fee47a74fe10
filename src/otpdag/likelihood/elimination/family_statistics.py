r"""What the rows say of each family under the backward map: the statistics of an EM step, and of the gradient.

By Fisher's identity the gradient of the evidence is that of the expected complete-data log-density under the backward
map held fixed,

.. math:: \nabla_\theta \log P_\theta(x)
          = \sum_v E_{\phi(\cdot \mid x)} \nabla_\theta \log P_\theta(x_v \mid x_{pa(v)}),

so each family needs only a summary of all rows: a table of categories its expected counts, a linear normal family its
expected second moments for each configuration of its categories. Any other needs the rows, weighed on their points.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from otpdag.likelihood.elimination.blocks import Complete
from otpdag.likelihood.elimination.families import FamilyView, WeighedRows, stacked_replicas
from otpdag.likelihood.elimination.row_layout import Layout
from otpdag.mechanisms.base import Params, configurations, numeric
from otpdag.numerics import side_by_side

CHUNK = 2**21  # entries of a log-density with its gradient that are held at a time


@dataclass(frozen=True, eq=False)
class _Sums(ABC):
    """A summary of all rows.

    Attributes:
        family: Which family.
        complete: Sums over rows that show all of it (1 or R, ...).
        expected: Over all others, under the backward map (R, ...).
        known: What the family's parameters make of it, if that is known already: what :meth:`evaluated` returns.
    """

    family: FamilyView
    complete: Tensor
    expected: Tensor
    known: tuple[Tensor, ...] | None = None

    @abstractmethod
    def evaluated(self, params: Params) -> tuple[Tensor, ...]:
        """What a sum of log-densities needs of the parameters (R, ...)."""

    @abstractmethod
    def total(self, sums: Tensor, evaluated: Sequence[Tensor]) -> Tensor:
        """The sum of log-densities (R,)."""

    def parts(self, params: Params) -> Iterator[tuple[Tensor, Tensor]]:
        """Sums of log-densities (R,) over complete and over expected rows."""
        evaluated = self.evaluated(params) if self.known is None else self.known
        yield self.total(self.complete, evaluated), self.total(self.expected, evaluated)

    def height(self, params: Params) -> Tensor:
        """The sum of all log-densities (R,)."""
        return _total(self.parts(params))

    @classmethod
    def side_by_side(cls, parts: Sequence[Self], replicas: int, **more: Tensor) -> Self:
        """Those of several twins on the replica axis (R * n, ...), replica by replica; the first family's names."""
        known = [one.known for one in parts if one.known is not None]
        complete, expected = ([getattr(one, name) for one in parts] for name in ("complete", "expected"))
        return cls(
            parts[0].family,
            stacked_replicas(complete, replicas),
            stacked_replicas(expected, replicas),
            tuple(stacked_replicas(each, replicas) for each in zip(*known, strict=True))
            if len(known) == len(parts)
            else None,
            **more,
        )


@dataclass(frozen=True, eq=False)
class Counts(_Sums):
    """How often each joint state of a family of categories occurs (R, states); known are their log-probabilities."""

    def evaluated(self, params: Params) -> tuple[Tensor, ...]:
        """Log-probabilities of all states."""
        return (self.family.log_table(params),)

    def total(self, sums: Tensor, evaluated: Sequence[Tensor]) -> Tensor:
        """Counts times log-probabilities."""
        return weighed(sums, evaluated[0].flatten(1))

    def table(self) -> Tensor:
        """All counts: (R, *parents, states)."""
        total = self.complete + self.expected
        return total.reshape(len(total), *self.family.widths)


@dataclass(frozen=True, eq=False)
class Moments(_Sums):
    """Second moments of the columns (node, numeric parents, 1), by configuration of the categories (R, C, W, W).

    Known are the coefficients and constants of the family's equations; ``shift`` is what was subtracted from the
    columns (W,), or (R, 1, 1, W).
    """

    shift: Tensor = field(kw_only=True)

    def evaluated(self, params: Params) -> tuple[Tensor, ...]:
        """The family's equations."""
        return self.family.equations(params)

    def total(self, sums: Tensor, evaluated: Sequence[Tensor]) -> Tensor:
        r""":math:`\sum_c n_c \log c_c - \tfrac12 \mathrm{tr}(A_c M_c A_c^\top)`."""
        coefficients, constants = evaluated
        moved = (coefficients * self.shift).sum(-1, keepdim=True)
        coefficients = torch.cat([coefficients[..., :-1], coefficients[..., -1:] + moved], -1)
        squares = ((coefficients @ sums) * coefficients).flatten(2).sum(-1)
        return (sums[..., -1, -1] * constants - 0.5 * squares).sum(-1)

    def by_coordinate(self) -> Tensor:
        """All moments of each own coordinate with the numeric parents and one (R, C, dim, P + 2, P + 2)."""
        total, dim = self.complete + self.expected, self.family.widths[-1]
        others = list(range(dim, total.shape[-1]))
        return torch.stack([total[..., [cell, *others], :][..., [cell, *others]] for cell in range(dim)], 2)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows themselves, for families without a summary.

    Attributes:
        layout: Where the values are.
        family: Which family.
        complete: Rows that show all of it, with their weights (1 or R, n).
        expected: All that others may be, with weights times beliefs (R, n).
        sample: If rows are too many to keep, some that stand for all, complete and expected.
        thinned: Whether the sample lacks some of them.
    """

    layout: Layout
    family: FamilyView
    complete: tuple[tuple[Complete, Tensor], ...]
    expected: tuple[WeighedRows, ...]
    sample: tuple[WeighedRows, ...] | None = None
    thinned: bool = False

    def height(self, params: Params) -> Tensor:
        """The sum of all log-densities (R,), or its estimate from the sample."""
        if self.sample is None:
            return _total(self.parts(params))
        sums = [weighed(one.weight, self.family.log_prob(params, one.values, one.mask)) for one in self.sample]
        return torch.stack(torch.broadcast_tensors(*sums)).sum(0)

    def parts(self, params: Params) -> Iterator[tuple[Tensor, Tensor]]:
        """Sums of log-densities (R,) over complete and over expected rows, in chunks."""
        for chunk in self._complete_rows():
            total = weighed(chunk.weight, self.family.log_prob(params, chunk.values, chunk.mask))
            yield total, torch.zeros_like(total)
        for chunk in self._expected_rows():
            total = weighed(chunk.weight, self.family.log_prob(params, chunk.values, chunk.mask))
            yield torch.zeros_like(total), total

    def by_coordinate(self, shift: Tensor) -> Tensor:
        """Moments about a shift (W,) as :meth:`Moments.by_coordinate` has them, of the coordinates that are seen."""
        family, dim = self.family.mechanism.family, self.family.widths[-1]
        total = torch.zeros((), dtype=torch.float64)
        for rows in (*self._complete_rows(), *self._expected_rows()):
            weight, value = rows.weight.unsqueeze(-1), rows.values[self.family.node]
            config, beside = configurations(family, rows.values), numeric(family, rows.values)
            share = weight if config is None else weight * config
            seen = torch.ones_like(value) if rows.mask is None else rows.mask.to(value)
            parts = [share, seen, value, *([] if beside is None else [beside]), torch.ones_like(weight)]
            widths = (share.shape[-1], dim, dim, shift.shape[-1] - dim)
            share, seen, own, others = side_by_side(parts).flatten(1, -2).split(widths, -1)
            own, others = own - shift[:dim], others - shift[dim:]
            columns = torch.stack([torch.cat([own[..., i : i + 1], others], -1) for i in range(dim)], -2)
            total = total + torch.einsum("rnc,rnd,rndi,rndj->rcdij", share, seen, columns, columns)
        return total

    @property
    def can_be_stacked(self) -> bool:
        """Whether all there is are rows in one array, and a sample in another, that show all cells of the node."""
        sample = self.sample or ()
        if len(sample) != 1 or sample[0].mask is not None or self.expected or not self.complete:
            return False
        return self.family.widths[-1] == 1 or all(bool(self._mask(one.rows).all()) for one, _ in self.complete)

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows that show the family, and rows of the sample."""
        sampled = sum(one.weight.shape[1] for one in self.sample or ())
        return sum(len(complete.rows) for complete, _ in self.complete), sampled

    def shown(self) -> WeighedRows:
        """All rows that show the family."""
        rows = torch.cat([complete.rows for complete, _ in self.complete])
        return complete_rows(self.layout, self.family, rows, torch.cat([weight for _, weight in self.complete], 1))

    def _mask(self, rows: Tensor) -> Tensor:
        return self.layout.batch.mask[self.family.node].index_select(1, rows)

    def _complete_rows(self) -> Iterator[WeighedRows]:
        for complete, weight in self.complete:
            for at in range(0, len(complete.rows), CHUNK):
                rows = complete.rows[at : at + CHUNK]
                yield complete_rows(self.layout, self.family, rows, weight[:, at : at + CHUNK])

    def _expected_rows(self) -> Iterator[WeighedRows]:
        for rows in self.expected:
            step = max(1, CHUNK // len(rows.weight))
            for at in range(0, rows.weight.shape[1], step):
                some = slice(at, at + step)
                values = {name: value[:, some] for name, value in rows.values.items()}
                yield WeighedRows(values, rows.weight[:, some], None if rows.mask is None else rows.mask[:, some])


Statistics = Counts | Moments | Rows


def complete_rows(layout: Layout, family: FamilyView, rows: Tensor, weight: Tensor) -> WeighedRows:
    """Rows of data that show a family."""
    values = {name: layout.batch.values[name].index_select(1, rows) for name in family.names}
    mask = layout.batch.mask[family.node].index_select(1, rows)
    return WeighedRows(values, weight, None if bool(mask.all()) else mask)


def joined(parts: Sequence[WeighedRows]) -> tuple[WeighedRows, ...]:
    """Rows side by side (R, n, width): those that show all of a node, and one by one those that show a part of it."""
    whole = [part for part in parts if part.mask is None]
    apart = tuple(part for part in parts if part.mask is not None)
    if not whole:
        return apart
    replicas = max(len(one) for part in whole for one in (part.weight, *part.values.values()))

    def side_by_side(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([one.expand(replicas, *one.shape[1:]) for one in tensors], 1)

    values = {name: side_by_side(part.values[name] for part in whole) for name in whole[0].values}
    return (WeighedRows(values, side_by_side(part.weight for part in whole)), *apart)


def _total(parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    sums = [complete + expected for complete, expected in parts]
    return torch.stack(torch.broadcast_tensors(*sums)).sum(0)


def weighed(weight: Tensor, log_prob: Tensor) -> Tensor:
    """Sum of weight times log-density (R,); what has no weight counts as zero even at minus infinity."""
    known = torch.where(weight != 0, log_prob, torch.zeros((), dtype=log_prob.dtype, device=log_prob.device))
    return (weight * known).flatten(1).sum(-1)
