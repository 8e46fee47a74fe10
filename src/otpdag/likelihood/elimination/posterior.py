r"""What a model says of each row's unknowns: probabilities of states, and joint draws of everything.

The joint state of all unknown categories of a row that is more probable than any other (max-product).

Means and variances of unknown numbers in each row, summed exactly: nothing is drawn.

A number that is linear and normal with all around it has, given the categories s of its piece, a normal posterior;

.. math:: E[x] = \sum_s P(s) m_s, \qquad E[x^2] = \sum_s P(s) (m_s^2 + V_s).

Any other number stands on points, whose beliefs are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.likelihood.elimination.layout import Block, Layout
from otpdag.likelihood.elimination.sums import Banks, Evaluated, Factors, Tempering, beliefs_of
from otpdag.likelihood.elimination.unknown_numbers import Integrals, LinearGroup
from otpdag.structure import Naturals


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


def state_probabilities(naturals: Naturals, layout: Layout, node: str) -> Tensor:
    """Posterior probabilities of a category in each row (N, K); where it is seen, one or zero.

    Args:
        naturals: Parameters of one replica (1, ...).
        layout: Rows, laid out with ``keep=(node,)`` so that every row in which the node is unknown has it.
        node: A hidden node, or one with missing cells.

    Raises:
        ModelError: The node is no category, or no state explains some row, or it leaves the node out.
    """
    family = next(f for f in layout.families if f.node == node)
    if not family.categories[-1]:
        raise ModelError(f"node {node!r} is no category: {family.mechanism.space} has no state probabilities")
    size, rows = family.widths[-1], layout.batch.rows
    probabilities = torch.zeros(rows, size).to(layout.batch.weight)
    if node in layout.batch.values:
        probabilities += layout.batch.values[node][0]
    with torch.no_grad():
        factors = Factors(layout, naturals, Tempering())
        for block in layout.blocks:
            if bool((block.cell_node == family.place).any()):
                _fill_in(probabilities, factors.evaluate(block), family.place)
    left_out = torch.nonzero(probabilities.sum(-1) < 0.5)[:, 0]
    if len(left_out):
        raise ModelError(
            f"no state of node {node!r} explains what row {int(left_out[0])} shows: its density is 0 under each, or "
            f"the rows were laid out without keep=({node!r},)"
        )
    return probabilities


def _fill_in(probabilities: Tensor, evaluated: Evaluated, place: int) -> None:
    """Write the beliefs of one node's cells into the rows of their pieces."""
    block = evaluated.block
    _, steps = evaluated.steps(torch.ones(1, block.distinct).to(probabilities))
    by_piece = torch.full((block.distinct, probabilities.shape[-1]), torch.nan).to(probabilities)
    for step, belief in steps:
        here = torch.nonzero(block.cell_node[step.cell] == place)[:, 0]
        if len(here):
            own = belief[0, here].reshape(len(here), -1, belief.shape[-1]).sum(1)
            by_piece[block.cell_piece[step.cell[here]]] = own
    chosen = ~by_piece[block.piece, 0].isnan()
    probabilities[block.piece_row[chosen]] = by_piece[block.piece[chosen]]


def posterior_draws(
    naturals: Naturals, layout: Layout, many: int, generator: torch.Generator, *, stratified: bool = False
) -> dict[str, Tensor]:
    """Joint draws of every node given what each row shows: node -> (N, draws, width).

    Pieces are drawn backwards along their orders of elimination, linear normal numbers given the rest of their piece,
    and what tells nothing about the row from the model. What is seen keeps its value. Pieces that look alike share
    their draws, unless they were laid out apart (``merged=False``).

    Args:
        naturals: Parameters of one replica (1, ...).
        layout: Rows whose points, if there are any, were :func:`~otpdag.likelihood.elimination.moved`.
        many: Draws of each row.
        generator: The source of the draws.
        stratified: Spread the draws of a row evenly over each unknown's distribution, so that their means are precise.
    """
    with torch.no_grad():
        drawn = _Drawn(naturals, layout, many, RandomNumbers(generator, stratified))
        factors = Factors(layout, naturals, Tempering())
        for block in layout.blocks:
            drawn.add(factors.evaluate(block))
        return drawn.completed()


class _Drawn:
    """Values of all nodes while pieces are being drawn."""

    def __init__(self, naturals: Naturals, layout: Layout, many: int, numbers: RandomNumbers) -> None:
        self.naturals, self.layout, self.many, self.numbers = naturals, layout, many, numbers
        rows, like = layout.batch.rows, layout.batch.weight
        self.values: dict[str, Tensor] = {}
        self.known: dict[str, Tensor] = {}
        self.lines: dict[int, Tensor] = {}
        for family in layout.families:
            width = family.widths[-1]
            value = layout.batch.values.get(family.node)
            self.values[family.node] = (
                torch.zeros(rows, many, width).to(like) if value is None else value[0].unsqueeze(1).repeat(1, many, 1)
            )
            mask = layout.batch.mask.get(family.node)
            self.known[family.node] = torch.zeros(rows, dtype=torch.bool) if mask is None else mask[0].all(-1).clone()

    def add(self, evaluated: Evaluated) -> None:
        """Draw the pieces of one block."""
        block = evaluated.block
        states = draws(block, evaluated.conditionals, self.many, self.numbers)
        families = self.layout.families
        for place, rows, own in _by_variable(block, states):
            if place >= len(families):
                drawn = self._placed(block, place, rows, own)
                blank = drawn.new_zeros(self.layout.batch.rows, *drawn.shape[1:])
                self.lines.setdefault(place, blank)[rows] = drawn
                continue
            family = families[place]
            if family.categories[-1]:
                value = torch.nn.functional.one_hot(own, family.widths[-1])
            else:
                value = self._placed(block, place, rows, own)
            self.values[family.node][rows] = value.to(self.values[family.node])
            self.known[family.node][rows] = True
        for integrals in evaluated.integrals:
            self._add_linear(integrals)

    def _placed(self, block: Block, place: int, rows: Tensor, states: Tensor) -> Tensor:
        """Values (n, draws, width) of drawn points; a row has its points in one of the node's placements."""
        families = self.layout.families
        width = families[place].widths[-1] if place < len(families) else place // len(families)
        values = torch.zeros(*states.shape, width).to(self.layout.batch.weight)
        for (node, size), placement in block.placements.items():
            if node == place:
                at = torch.full((self.layout.batch.rows,), -1)
                at[placement.rows] = torch.arange(len(placement.rows))
                here = torch.nonzero(at[rows] >= 0)[:, 0]
                some = placement.at(rows[here], at[rows[here]], size)
                values[here] = some.jittered(states[here], self.numbers.generator)
        return values

    def _add_linear(self, integrals: Integrals) -> None:
        """Draw linear normal numbers given the categories and placed numbers around them."""
        group, draws = integrals.group, (len(integrals.group.rows), self.many)
        state = torch.zeros(draws, dtype=torch.long)
        for axis, size in enumerate(group.states):
            state = state * size + self._around(integrals, axis).argmax(-1)
        placed = [self._around(integrals, axis) for axis in range(len(group.states), group.around.shape[1])]
        dtype = integrals.mean.dtype
        self._write(integrals, integrals.draws(state, placed, lambda shape: self.numbers.normal(shape, dtype)))

    def _around(self, integrals: Integrals, axis: int) -> Tensor:
        """The value of a node or of lines that each of the clusters meets (n, draws, width)."""
        group, families = integrals.group, self.layout.families
        nodes = group.around[group.instance][:, axis]
        each = {n: self.values[families[n].node] if n < len(families) else self.lines[n] for n in set(nodes.tolist())}
        values = torch.empty(len(nodes), self.many, next(iter(each.values())).shape[-1], dtype=integrals.mean.dtype)
        for place, value in each.items():
            here = nodes == place
            values[here] = value[group.rows[here]].to(values)
        return values

    def _write(self, integrals: Integrals, value: Tensor) -> None:
        group = integrals.group
        for here, place, cell, coordinate in group.coordinates():
            node, rows = self.layout.families[place].node, group.rows[here]
            self.values[node][rows, :, cell] = value[here, :, coordinate]
            self.known[node][rows] = True

    def completed(self) -> dict[str, Tensor]:
        """Everything else comes from the model, in topological order."""
        structure = self.layout.structure
        for family in self.layout.families:
            rows = torch.nonzero(~self.known[family.node])[:, 0]
            if not len(rows):
                continue
            mechanism = family.mechanism
            parents = {name: self.values[name][rows].unsqueeze(0) for name in family.names[:-1]}
            noise = self._noise(mechanism.noise.kind, len(rows), mechanism.noise.dim)
            params = self.naturals[family.node]
            if family.node in self.layout.batch.mask and mechanism.space.cells > 1:
                seen = self.layout.batch.mask[family.node][:, rows].unsqueeze(2)
                value = self.layout.batch.values[family.node][:, rows].unsqueeze(2)
                drawn = mechanism.complete(params, value, parents, seen, noise)
            else:
                drawn = mechanism.forward(params, parents, noise)
            self.values[family.node][rows] = drawn[0].expand(len(rows), self.many, -1)
        return {node: self.values[node] for node in structure.graph.nodes}

    def _noise(self, kind: str, rows: int, dim: int) -> Tensor:
        sampler = self.numbers.normal if kind == "normal" else self.numbers.uniform
        return sampler((1, rows, self.many, dim), self.layout.batch.weight.dtype)


def draws(block: Block, conditionals: Sequence[Tensor], many: int, numbers: RandomNumbers) -> Tensor:
    """Joint draws of all variables (cells, draws), from the conditionals of one replica."""
    states = torch.zeros(len(block.cell_node), many, dtype=torch.long)
    for step, conditional in zip(reversed(block.steps), reversed(conditionals), strict=True):
        size = step.sizes[-1]
        table = conditional.reshape(len(conditional), len(step.cell), -1, size).expand(many, -1, -1, -1)
        at = torch.zeros(len(step.cell), many, dtype=torch.long)
        for axis, width in enumerate(step.sizes[:-1]):
            at = at * width + states[step.separator[:, axis]]
        chosen = table.gather(2, at.T[..., None, None].expand(-1, -1, 1, size)).squeeze(2).cumsum(-1)
        uniform = numbers.uniform((*at.shape, 1), table.dtype).transpose(0, 1) * chosen[..., -1:]
        states[step.cell] = (uniform > chosen).sum(-1).clamp(max=size - 1).T
    return states


def _by_variable(block: Block, states: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of each node or line the rows in which it is a variable, and its states there, from those of distinct pieces."""
    size = torch.bincount(block.cell_piece, minlength=block.distinct)
    first = torch.zeros(block.distinct, dtype=torch.long)
    # the cells of a piece follow each other
    first.scatter_reduce_(0, block.cell_piece, torch.arange(len(block.cell_piece)), "amin", include_self=False)
    own = size[block.piece]
    begin = torch.repeat_interleave(first[block.piece] - torch.cumsum(own, 0) + own, own)
    cells, rows = begin + torch.arange(len(begin)), torch.repeat_interleave(block.piece_row, own)
    for variable in block.cell_node.unique().tolist():
        here = torch.nonzero(block.cell_node[cells] == variable)[:, 0]
        yield variable, rows[here], states[cells[here]]


def likeliest_states(naturals: Naturals, layout: Layout) -> tuple[dict[str, Tensor], Tensor]:
    """One-hot states (N, K) of every category, seen ones as they are, and the log-density of each row with them.

    Linear normal numbers are integrated out before the largest entry is sought.

    Args:
        naturals: Parameters of one replica (1, ...).
        layout: Rows, laid out with ``keep`` of all unknown categories.
    """
    if layout.has_points:
        raise ModelError("the most probable explanation needs unknown numbers that are linear and normal; one is not")
    values: dict[str, Tensor] = {}
    for family in layout.families:
        if family.categories[-1]:
            seen = layout.batch.values.get(family.node)
            empty = torch.zeros(layout.batch.rows, family.widths[-1]).to(layout.batch.weight)
            values[family.node] = empty if seen is None else seen[0].clone()
    total = torch.zeros(layout.batch.rows).to(layout.batch.weight)
    numbers = RandomNumbers(torch.Generator().manual_seed(0))  # conditionals are one or zero: nothing is left to chance
    with torch.no_grad():
        factors = Factors(layout, naturals, Tempering(), largest=True)
        for rows, log_prob in factors.complete_log_probs():
            total[rows] += log_prob[0]
        for block in layout.blocks:
            evaluated = factors.evaluate(block)
            total.index_add_(0, block.piece_row, evaluated.log_z[0, block.piece])
            states = draws(block, evaluated.conditionals, 1, numbers)
            for place, rows, own in _by_variable(block, states):
                family = layout.families[place]  # nothing is on points: there are no lines
                if family.categories[-1]:
                    values[family.node][rows] = torch.nn.functional.one_hot(own[:, 0], family.widths[-1]).to(total)
    return values, total


def node_moments(naturals: Naturals, layout: Layout, node: str) -> tuple[Tensor, Tensor]:
    """Posterior mean and variance of a number or vector in each row, (N, width) each; what is seen has no variance.

    Args:
        naturals: Parameters of one replica (1, ...).
        layout: Rows, laid out with ``keep=(node,)``, whose points were :func:`~otpdag.likelihood.elimination.moved`.
        node: A node that is no category.
    """
    family = next(f for f in layout.families if f.node == node)
    width, rows = family.widths[-1], layout.batch.rows
    first, second = torch.zeros(2, rows, width).to(layout.batch.weight).unbind(0)
    if node in layout.batch.values:
        first += layout.batch.values[node][0]
        second += layout.batch.values[node][0].square()
    with torch.no_grad():
        factors = Factors(layout, naturals, Tempering())
        for block in layout.blocks:
            placed = any(place == family.place for place, _ in block.placements)
            if placed or any(_holds(group, family.place) for group in block.linear):
                evaluated = factors.evaluate(block)
                beliefs = evaluated.beliefs(torch.ones(1, block.distinct).to(first))
                _add_placed(evaluated, beliefs, family.place, first, second)
                _add_linear(evaluated, beliefs, family.place, first, second)
    return first, (second - first.square()).clamp(min=0.0)


def _holds(group: LinearGroup, place: int) -> bool:
    return bool((group.cells[..., 0] == place).any())


def _add_placed(evaluated: Evaluated, beliefs: Banks, place: int, first: Tensor, second: Tensor) -> None:
    for source in evaluated.block.lengths:
        if source.place == place:
            belief = beliefs_of(beliefs, source)[0]
            placement = evaluated.block.placements[source.points_of(place)]
            value, rows = placement.points().values[0], placement.rows
            total = belief.sum(-1, keepdim=True).clamp(min=torch.finfo(belief.dtype).tiny)
            share = (belief / total).unsqueeze(-1)
            first[rows] = (share * value).sum(-2)
            second[rows] = (share * value.square()).sum(-2)


def _add_linear(evaluated: Evaluated, beliefs: Banks, place: int, first: Tensor, second: Tensor) -> None:
    for group, integrals in zip(evaluated.block.linear, evaluated.integrals, strict=True):
        if _holds(group, place):
            one, two = _unknown_moments(integrals, beliefs_of(beliefs, group))
            for here, node, cell, coordinate in group.coordinates():
                if node == place:
                    first[group.rows[here], cell] = one[here, coordinate]
                    second[group.rows[here], cell] = two[here, coordinate]


def _unknown_moments(integrals: Integrals, weight: Tensor) -> tuple[Tensor, Tensor]:
    """First and second moments of the unknowns of each piece (n, d), given beliefs (1, n, *sizes)."""
    group = integrals.group
    by_state = group.by_state(weight)
    total = by_state[0].sum(-1)  # (n, T)
    size = total.sum(-1, keepdim=True).clamp(min=torch.finfo(total.dtype).tiny)
    variance = integrals.covariance[0].diagonal(dim1=-2, dim2=-1)[group.instance]  # (n, T, d)
    mean = integrals.mean[0]
    one = total.unsqueeze(-1) * mean
    two = total.unsqueeze(-1) * (mean.square() + variance)
    if integrals.grid is not None:
        y, yy = integrals.point_moments(by_state)
        gain = integrals.gain[0][group.instance]  # (n, T, d, b)
        drift = (gain @ y[0].unsqueeze(-1)).squeeze(-1)
        one = one - drift
        two = two - 2 * mean * drift + (gain @ yy[0] @ gain.mT).diagonal(dim1=-2, dim2=-1)
    return one.sum(1) / size, two.sum(1) / size
