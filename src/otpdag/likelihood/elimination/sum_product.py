r"""Random numbers for several draws of each row: independent, or one in each stratum.

Sum-product along elimination orders, for the pieces of all rows at once.

All tables of one size stand in one bank, a row for each: factors, and the messages that steps leave. A step sums one
variable out of the product of all tables that mention it,

.. math:: m(s) = \log \sum_x \exp T(x, s), \qquad P(x \mid s) = \exp\{T(x, s) - m(s)\},

and writes the message over the separator s into the bank of its size, where a later step reads it. Steps of different
pieces, whatever their nodes, are run together if they have the same sizes and their inputs are ready at the same time:
the number of calls depends on the depth and width of pieces, not on how many kinds of them there are.

Taken backwards, the beliefs of a message's row are those of the step that read it, and times the conditional they give
the beliefs of everything that went into the product. All of it is in logarithms: no evidence, however unlikely,
underflows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomNumbers:
    """Uniform and normal numbers (..., draws, dim).

    Args:
        generator: Their source.
        stratified: Divide the line evenly among the draws, in random order (a Latin hypercube). Each draw has the
            distribution that it would have anyway, and means over the draws of a row are far more precise.

    >>> numbers = RandomNumbers(torch.Generator().manual_seed(0), stratified=True)
    >>> (numbers.uniform((1, 4, 1), torch.float64) * 4).floor().sort(1).values.flatten()
    tensor([0., 1., 2., 3.], dtype=torch.float64)
    """

    generator: torch.Generator
    stratified: bool = False

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Between zero and one."""
        if not self.stratified:
            return torch.rand(*shape, generator=self.generator, dtype=dtype)
        order = torch.rand(*shape, generator=self.generator, dtype=dtype).argsort(-2)
        return (order + torch.rand(*shape, generator=self.generator, dtype=dtype)) / shape[-2]

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Standard normal."""
        if not self.stratified:
            return torch.randn(*shape, generator=self.generator, dtype=dtype)
        return torch.special.ndtri(self.uniform(shape, dtype).clamp(1e-12, 1 - 1e-12))


Sizes = tuple[int, ...]
Axes = tuple[int, ...]
"""Which axes of a step's product a table has."""
Banks = dict[Sizes, Tensor]
"""Log-tables, or their beliefs, by size: (R, rows, entries). The first row is the empty product."""


def put(banks: Banks, stored: Sizes, start: int, table: Tensor) -> None:
    """Write tables (R, n, *sizes) into a bank; states beyond their sizes are impossible."""
    if table.shape[2:] != stored:
        beyond = [
            pad for size, whole in zip(table.shape[:1:-1], stored[::-1], strict=True) for pad in (0, whole - size)
        ]
        table = torch.nn.functional.pad(table, beyond, value=-torch.inf)
    banks[stored][:, start : start + table.shape[1]] = table.reshape(*table.shape[:2], -1)


def taken(banks: Banks, stored: Sizes, start: int, count: int, sizes: Sizes) -> Tensor:
    """Read beliefs of tables (R, count, *sizes) from a bank."""
    table = banks[stored][:, start : start + count].unflatten(-1, stored or (1,))
    if not sizes:
        return table.squeeze(-1)
    for axis, size in enumerate(sizes):
        table = table.narrow(2 + axis, 0, size)
    return table


@dataclass(frozen=True, eq=False)
class Step:
    """Sums over one variable in each of n pieces.

    Attributes:
        sizes: Axes of the product: the separator, then the variable.
        inputs: Rows of the tables that are multiplied (n, F), by the axes that they have.
        output: Row of the first message in the bank of its size; the others follow.
        cell: Number of the variable among all unknown cells (n,).
        separator: Numbers of the separator's variables (n, axes - 1).
    """

    sizes: Sizes
    inputs: Mapping[Axes, Tensor]
    output: int
    cell: Tensor
    separator: Tensor

    @property
    def elements(self) -> int:
        """Entries of the products."""
        return len(self.cell) * math.prod(self.sizes)

    def bank(self, axes: Axes) -> Sizes:
        """The sizes of tables with these axes."""
        return tuple(self.sizes[axis] for axis in axes)

    def view(self, axes: Axes) -> Sizes:
        """These sizes, with ones for the axes that such tables lack."""
        return tuple(size if axis in axes else 1 for axis, size in enumerate(self.sizes))


def eliminate(steps: Sequence[Step], banks: Banks, *, best: bool = False) -> list[Tensor]:
    """Run all steps, and return the conditional probabilities of each (R, n, *sizes); messages go into the banks.

    Args:
        steps: Each after those whose messages it reads.
        banks: Tables of factors, and room for messages.
        best: Take the largest entry instead of the sum.

    >>> table = torch.tensor([[[0.0, 0.0], [0.2, 0.8]]]).double().log()
    >>> banks = {(2,): table, (): torch.zeros(1, 2, 1).double()}
    >>> step = Step((2,), {(0,): torch.tensor([[1]])}, 1, torch.tensor([0]), torch.zeros(1, 0).long())
    >>> eliminate([step], banks)[0]
    tensor([[[0.2000, 0.8000]]], dtype=torch.float64)
    >>> round(float(banks[()][0, 1]), 9)
    0.0
    """
    conditionals = []
    for step in steps:
        message, conditional = (_best if best else _sum)(_product(step, banks))
        bank = banks[step.sizes[:-1]]
        bank[:, step.output : step.output + len(step.cell)] = (
            message.flatten(2) if message.ndim > 2 else message.unsqueeze(-1)
        )
        conditionals.append(conditional)
    return conditionals


def _product(step: Step, banks: Banks) -> Tensor:
    """The sum of log-tables over all axes of a step: (R, n, *sizes)."""
    joined: Tensor | None = None
    for axes in sorted(step.inputs, key=len, reverse=True):
        rows = step.inputs[axes]
        bank = banks[step.bank(axes)]
        table = bank.index_select(1, rows[:, 0])
        for column in rows.unbind(1)[1:]:
            table += bank.index_select(1, column)
        table = table.view(*table.shape[:2], *step.view(axes))
        if joined is None:
            joined = table if len(axes) == len(step.sizes) else table.expand(*table.shape[:2], *step.sizes).clone()
        else:
            joined += table
    if joined is None:
        raise RuntimeError("a step needs at least one table")
    return joined


def _sum(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum over the last axis, and the shares of its entries; ``joined`` is overwritten."""
    limits = torch.finfo(joined.dtype)
    top = joined.amax(-1, keepdim=True).clamp_(min=limits.min)  # nothing possible: not NaN
    shares = joined.sub_(top).exp_()
    total = shares.sum(-1, keepdim=True)
    message = top.add_(total.log()).squeeze(-1)
    return message, shares.div_(total.clamp_(min=limits.tiny))


def _best(joined: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of the last axis, and where it is."""
    message, at = joined.max(-1)
    return message, torch.nn.functional.one_hot(at, joined.shape[-1]).to(joined)


def _step_beliefs(steps: Sequence[Step], conditionals: Sequence[Tensor], banks: Banks) -> Iterator[tuple[Step, Tensor]]:
    """Beliefs of the products of all steps, last step first (R, n, *sizes); those of the tables go into the banks."""
    for step, conditional in zip(reversed(steps), reversed(conditionals), strict=True):
        above = banks[step.sizes[:-1]][:, step.output : step.output + len(step.cell)]
        belief = conditional * above.view(*above.shape[:2], *step.sizes[:-1], 1)
        for axes, rows in step.inputs.items():
            away = [2 + axis for axis in range(len(step.sizes)) if axis not in axes]
            marginal = (belief.sum(away) if away else belief).reshape(*belief.shape[:2], -1)
            _add(banks[step.bank(axes)], rows, marginal)
        yield step, belief


def beliefs(steps: Sequence[Step], conditionals: Sequence[Tensor], banks: Banks) -> None:
    """Send beliefs from the evidence to all tables.

    Args:
        steps: The steps.
        conditionals: What :func:`eliminate` returned.
        banks: Zeros for every entry, and in the bank of single numbers the weight of each piece's evidence. Ends with
            weight times belief everywhere: the derivative of the weighed evidence by each entry (Fisher's identity).
    """
    for _ in _step_beliefs(steps, conditionals, banks):
        pass


def variable_beliefs(
    steps: Sequence[Step], conditionals: Sequence[Tensor], banks: Banks
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same, telling of each step the numbers of its variables (n,) and their beliefs (R, n, states)."""
    for step, belief in _step_beliefs(steps, conditionals, banks):
        away = list(range(2, belief.ndim - 1))
        yield step.cell, belief.sum(away) if away else belief


def _add(bank: Tensor, rows: Tensor, marginal: Tensor) -> None:
    """Add beliefs (R, n, entries) to the rows of all tables that share them (n, F)."""
    for column in rows.unbind(1):
        for replica in range(len(bank)):
            bank[replica].index_add_(0, column, marginal[replica])


def draws(
    steps: Sequence[Step], conditionals: Sequence[Tensor], cells: int, many: int, numbers: RandomNumbers
) -> Tensor:
    """Joint draws of all variables in the first replica: states (cells, draws)."""
    states = torch.zeros(cells, many, dtype=torch.long)
    for step, conditional in zip(reversed(steps), reversed(conditionals), strict=True):
        table = conditional[0].flatten(1, -2) if len(step.sizes) > 1 else conditional[0].unsqueeze(1)
        at = torch.zeros(len(step.cell), many, dtype=torch.long)
        for axis, size in enumerate(step.sizes[:-1]):
            at = at * size + states[step.separator[:, axis]]
        chosen = table.gather(1, at.unsqueeze(-1).expand(-1, -1, step.sizes[-1])).cumsum(-1)
        uniform = numbers.uniform((*at.shape, 1), table.dtype) * chosen[..., -1:]
        states[step.cell] = (uniform > chosen).sum(-1).clamp(max=step.sizes[-1] - 1)
    return states


def replica_draws(
    steps: Sequence[Step], conditionals: Sequence[Tensor], cells: int, generator: torch.Generator
) -> Tensor:
    """One joint draw of all variables in every replica: states (cells, R)."""
    replicas = len(conditionals[0])
    states = torch.zeros(cells, replicas, dtype=torch.long)
    for step, conditional in zip(reversed(steps), reversed(conditionals), strict=True):
        table = conditional.reshape(replicas, len(step.cell), -1, step.sizes[-1])
        at = torch.zeros(replicas, len(step.cell), 1, 1, dtype=torch.long)
        for axis, size in enumerate(step.sizes[:-1]):
            at = at * size + states[step.separator[:, axis]].T[..., None, None]
        chosen = table.gather(2, at.expand(-1, -1, -1, step.sizes[-1])).squeeze(2).cumsum(-1)
        uniform = torch.rand(*chosen.shape[:2], 1, generator=generator, dtype=table.dtype) * chosen[..., -1:]
        states[step.cell] = (uniform > chosen).sum(-1).clamp(max=step.sizes[-1] - 1).T
    return states
