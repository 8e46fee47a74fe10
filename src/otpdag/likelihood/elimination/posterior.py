r"""What a model says of each row's unknowns: probabilities of states, and joint draws of everything.

The joint state of all unknown categories of a row that is more probable than any other (max-product).

Means and variances of unknown numbers in each row, summed exactly: nothing is drawn.

A number that is linear and normal with all around it has, given the categories s of its piece, a normal posterior;

.. math:: E[x] = \sum_s P(s) m_s, \qquad E[x^2] = \sum_s P(s) (m_s^2 + V_s).

Any other number stands on points, whose beliefs are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.errors import ModelError
from otpdag.likelihood.elimination.blocks import Block
from otpdag.likelihood.elimination.linear_normal import Integrals, point_moments
from otpdag.likelihood.elimination.row_layout import Layout
from otpdag.likelihood.elimination.sum_product import (
    Banks,
    RandomNumbers,
    Step,
    draws,
    replica_draws,
    taken,
    variable_beliefs,
)
from otpdag.likelihood.elimination.sums import Evaluated, Factors, Tempering, drawn_copies
from otpdag.structure import Naturals

PROPOSALS_BEFORE = 8  # draws of variables with copies, before those that count
DRAWN_ENTRIES = 2**24  # entries of all tables of the proposals that are made at a time


def state_probabilities(naturals: Naturals, layout: Layout, node: str) -> Tensor:
    """Posterior probabilities of a category in each row (N, K); where it is seen, one or zero.

    Args:
        naturals: Parameters of one replica (1, ...).
        layout: Rows, laid out with ``keep=(node,)`` so that every row in which the node is unknown has it.
        node: A hidden node, or one with missing cells.

    Raises:
        ModelError: The node is no category, or some row leaves it out because nothing seen depends on it.
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
            f"node {node!r} is unknown in row {int(left_out[0])} and nothing seen there depends on it: lay the rows "
            f"out with keep=({node!r},)"
        )
    return probabilities


def _fill_in(probabilities: Tensor, evaluated: Evaluated, place: int) -> None:
    """Write the beliefs of one node's cells into the rows of their pieces."""
    block = evaluated.block
    banks = evaluated.seeds(torch.ones(1, block.distinct).to(probabilities))
    by_piece = probabilities.new_zeros(block.distinct, probabilities.shape[-1])
    for cells, belief in variable_beliefs(block.steps, evaluated.conditionals, banks):
        here = torch.nonzero(block.cell_node[cells] == place)[:, 0]
        if not len(here):
            continue
        by_piece[block.cell_piece[cells[here]]] = belief[0, here, : probabilities.shape[-1]]
    has = torch.zeros(block.distinct, dtype=torch.bool)
    has[block.cell_piece[block.cell_node == place]] = True
    chosen = has[block.piece]
    probabilities[block.piece_row[chosen]] = by_piece[block.piece[chosen]]


def posterior_draws(
    naturals: Naturals, layout: Layout, many: int, generator: torch.Generator, *, stratified: bool = False
) -> dict[str, Tensor]:
    """Joint draws of every node given what each row shows: node -> (N, draws, width).

    Pieces are drawn backwards along their orders of elimination, linear normal numbers given the rest of their piece,
    and what tells nothing about the row from the model. What is seen keeps its value.

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


@dataclass(frozen=True)
class _Cells:
    """Variables of all pieces: their states (cells, draws), nodes and rows of data."""

    states: Tensor
    node: Tensor
    row: Tensor


class _Drawn:
    """Values of all nodes while pieces are being drawn."""

    def __init__(self, naturals: Naturals, layout: Layout, many: int, numbers: RandomNumbers) -> None:
        self.naturals, self.layout, self.many, self.numbers = naturals, layout, many, numbers
        rows, like = layout.batch.rows, layout.batch.weight
        self.values: dict[str, Tensor] = {}
        self.known: dict[str, Tensor] = {}
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
        if evaluated.block.is_exact:
            cells = drawn_states(evaluated, self.many, self.numbers)
        else:
            cells = _draw_copied_cells(evaluated, self.many, self.numbers.generator)
        for family in self.layout.families:
            here = torch.nonzero(cells.node == family.place)[:, 0]
            if not len(here):
                continue
            rows, states = cells.row[here], cells.states[here]
            if family.categories[-1]:
                value = torch.nn.functional.one_hot(states, family.widths[-1])
            else:
                value = self._placed(evaluated.block, family.place, rows, states)
            self.values[family.node][rows] = value.to(self.values[family.node])
            self.known[family.node][rows] = True
        for integrals in evaluated.integrals:
            self._add_linear(integrals)

    def _placed(self, block: Block, place: int, rows: Tensor, states: Tensor) -> Tensor:
        """Values (n, draws, width) of drawn points; a row has its points in one of the node's placements."""
        values = torch.zeros(*states.shape, self.layout.families[place].widths[-1]).to(self.layout.batch.weight)
        for (node, _), placement in block.placements.items():
            if node == place:
                at = torch.full((self.layout.batch.rows,), -1)
                at[placement.rows] = torch.arange(len(placement.rows))
                here = torch.nonzero(at[rows] >= 0)[:, 0]
                some = placement.at(rows[here], at[rows[here]])
                values[here] = some.jittered(states[here], self.numbers.generator)
        return values

    def _add_linear(self, integrals: Integrals) -> None:
        """Draw linear normal numbers given the categories and placed numbers around them."""
        group, families = integrals.group, self.layout.families
        around = group.around[group.instance]
        many = len(group.states)
        state = torch.zeros(len(group.rows), self.many, dtype=torch.long)
        for axis, size in enumerate(group.states):
            codes = torch.empty_like(state)
            for place in around[:, axis].unique().tolist():
                here = around[:, axis] == place
                codes[here] = self.values[families[place].node][group.rows[here]].argmax(-1)
            state = state * size + codes
        placed = []
        for axis in range(many, around.shape[1]):
            values = torch.empty(state.shape, dtype=integrals.mean.dtype)
            for place in around[:, axis].unique().tolist():
                here = around[:, axis] == place
                values[here] = self.values[families[place].node][group.rows[here], :, 0]
            placed.append(values)
        self._write(integrals, integrals.draws(state, placed, self.numbers))

    def _write(self, integrals: Integrals, value: Tensor) -> None:
        group = integrals.group
        cells = group.cells[group.instance]
        for coordinate in range(group.dim):
            for place, cell in cells[:, coordinate].unique(dim=0).tolist():
                here = (cells[:, coordinate] == torch.tensor([place, cell])).all(-1)
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


def drawn_states(evaluated: Evaluated, many: int, numbers: RandomNumbers) -> _Cells:
    """Draw each piece by itself, also those that look alike."""
    block = evaluated.block
    first, offset, owner = _numbering(block)
    order = torch.argsort(block.piece, stable=True)
    many_of = torch.bincount(block.piece, minlength=block.distinct)
    begin = torch.cumsum(many_of, 0) - many_of
    steps, conditionals = [], []
    for step, conditional in zip(block.steps, evaluated.conditionals, strict=True):
        distinct = block.cell_piece[step.cell]
        repeats = many_of[distinct]
        take = torch.repeat_interleave(torch.arange(len(distinct)), repeats)
        within = torch.arange(len(take)) - torch.repeat_interleave(torch.cumsum(repeats, 0) - repeats, repeats)
        piece = order[begin[distinct[take]] + within]
        moved = offset[piece] - first[distinct[take]]
        separator = step.separator[take] + moved.unsqueeze(-1)
        steps.append(Step(step.sizes, {}, 0, step.cell[take] + moved, separator))
        conditionals.append(conditional[:, take])
    states = draws(steps, conditionals, len(owner), many, numbers)
    distinct = block.piece[owner]
    node = block.cell_node[first[distinct] + torch.arange(len(owner)) - offset[owner]]
    return _Cells(states, node, block.piece_row[owner])


def _draw_copied_cells(evaluated: Evaluated, many: int, generator: torch.Generator) -> _Cells:
    """Draw pieces whose variables have copies: proposals, which replace each other as their weights say.

    This is Metropolis' rule for proposals that do not depend on each other: after the first few the draws are those of
    the exact posterior, however far the beliefs are from it. Pieces that look alike share their draws, unless they were
    laid out apart.
    """
    block, banks = evaluated.block, evaluated.banks
    if banks is None:
        raise RuntimeError("a block with copies keeps its banks")
    at_once = max(1, DRAWN_ENTRIES // max(block.elements, 1))
    proposals, weights = [], []
    for first in range(0, many + PROPOSALS_BEFORE, at_once):
        number = min(at_once, many + PROPOSALS_BEFORE - first)
        some = {sizes: bank[:1].expand(number, -1, -1).clone() for sizes, bank in banks.items()}
        conditionals, log_weight = drawn_copies(block, some, generator)
        proposals.append(replica_draws(block.steps, conditionals, len(block.cell_node), generator))
        weights.append(log_weight)
    taken = _accepted(torch.cat(weights), generator)[PROPOSALS_BEFORE:]
    states = torch.cat(proposals, 1).gather(1, taken.T[block.cell_piece])
    first_cell, offset, owner = _numbering(block)
    cells = first_cell[block.piece[owner]] + torch.arange(len(owner)) - offset[owner]
    return _Cells(states[cells], block.cell_node[cells], block.piece_row[owner])


def _accepted(log_weight: Tensor, generator: torch.Generator) -> Tensor:
    """Which proposal each piece has after each step of Metropolis' rule, from log-weights (proposals, D)."""
    uniform = torch.rand(log_weight.shape, generator=generator, dtype=log_weight.dtype).log()
    now = torch.zeros(log_weight.shape[1], dtype=torch.long)
    taken = [now]
    for number in range(1, len(log_weight)):
        ratio = log_weight[number] - log_weight.gather(0, now.unsqueeze(0))[0]
        now = torch.where(uniform[number] < ratio, number, now)
        taken.append(now)
    return torch.stack(taken)


def _numbering(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """The first cell of each distinct piece; the first number of each piece's cells; the piece of each number."""
    size = torch.bincount(block.cell_piece, minlength=block.distinct)
    first = torch.zeros(block.distinct, dtype=torch.long)
    # the cells of a piece follow each other
    first.scatter_reduce_(0, block.cell_piece, torch.arange(len(block.cell_piece)), "amin", include_self=False)
    own = size[block.piece]
    return first, torch.cumsum(own, 0) - own, torch.repeat_interleave(torch.arange(len(own)), own)


def likeliest_states(naturals: Naturals, layout: Layout) -> tuple[dict[str, Tensor], Tensor]:
    """One-hot states (N, K) of every category, seen ones as they are, and the log-density of each row with them.

    Linear normal numbers are integrated out before the largest entry is sought.

    Args:
        naturals: Parameters of one replica (1, ...).
        layout: Rows, laid out with ``keep`` of all unknown categories.
    """
    if not all(block.is_exact for block in layout.blocks):
        raise ModelError("the most probable explanation needs exact sums; those of some rows are approximate")
    if layout.has_points:
        raise ModelError(
            "the most probable explanation needs unknown numbers to be linear and normal; one of them stands on points"
        )
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
        for complete in layout.complete:
            total[complete.rows] += factors.complete_log_prob(complete)[0]
        for block in layout.blocks:
            evaluated = factors.evaluate(block)
            total.index_add_(0, block.piece_row, evaluated.log_z[0, block.piece])
            cells = drawn_states(evaluated, 1, numbers)
            for family in layout.families:
                here = torch.nonzero(cells.node == family.place)[:, 0]
                if family.categories[-1] and len(here):
                    one_hot = torch.nn.functional.one_hot(cells.states[here, 0], family.widths[-1])
                    values[family.node][cells.row[here]] = one_hot.to(total)
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
            if placed or any(_holds(source.group.cells, family.place) for source in block.linear):
                evaluated = factors.evaluate(block)
                beliefs = evaluated.beliefs(torch.ones(1, block.distinct).to(first))
                _add_placed(evaluated, beliefs, family.place, first, second)
                _add_linear(evaluated, beliefs, family.place, first, second)
    return first, (second - first.square()).clamp(min=0.0)


def _holds(cells: Tensor, place: int) -> bool:
    return bool((cells[..., 0] == place).any())


def _add_placed(evaluated: Evaluated, beliefs: Banks, place: int, first: Tensor, second: Tensor) -> None:
    block = evaluated.block
    for source in block.lengths:
        if source.node != place:
            continue
        belief = taken(beliefs, source.sizes, source.start, source.count, source.sizes)[0]
        placement = block.placements[source.key]
        values, rows = placement.points().values, placement.rows
        value = values.expand(1, *values.shape[1:])[0]
        total = belief.sum(-1, keepdim=True).clamp(min=torch.finfo(belief.dtype).tiny)
        share = (belief / total).unsqueeze(-1)
        first[rows] = (share * value).sum(-2)
        second[rows] = (share * value.square()).sum(-2)


def _add_linear(evaluated: Evaluated, beliefs: Banks, place: int, first: Tensor, second: Tensor) -> None:
    for source, integrals in zip(evaluated.block.linear, evaluated.integrals, strict=True):
        group = source.group
        if not _holds(group.cells, place):
            continue
        weight = taken(beliefs, source.stored, source.start, len(group.rows), group.sizes)
        one, two = _unknown_moments(integrals, weight)
        cells = group.cells[group.instance]
        for coordinate in range(group.dim):
            for cell in cells[cells[:, coordinate, 0] == place][:, coordinate, 1].unique().tolist():
                here = (cells[:, coordinate, 0] == place) & (cells[:, coordinate, 1] == cell)
                first[group.rows[here], cell] = one[here, coordinate]
                second[group.rows[here], cell] = two[here, coordinate]


def _unknown_moments(integrals: Integrals, weight: Tensor) -> tuple[Tensor, Tensor]:
    """First and second moments of the unknowns of each piece (n, d), given beliefs (1, n, *sizes)."""
    group = integrals.group
    by_state = integrals.by_state(weight)
    total = (by_state.flatten(3).sum(-1) if integrals.points else by_state)[0]  # (n, T)
    size = total.sum(-1, keepdim=True).clamp(min=torch.finfo(total.dtype).tiny)
    variance = integrals.variances()[0][group.instance]  # (n, T, d)
    mean = integrals.mean[0]
    one = total.unsqueeze(-1) * mean
    two = total.unsqueeze(-1) * (mean.square() + variance)
    if integrals.points:
        _, y, yy = point_moments(by_state, integrals.points)
        gain = integrals.gain[0][group.instance]  # (n, T, d, b)
        drift = (gain @ y[0].unsqueeze(-1)).squeeze(-1)
        one = one - drift
        two = two - 2 * mean * drift + (gain @ yy[0] @ gain.mT).diagonal(dim1=-2, dim2=-1)
    return one.sum(1) / size, two.sum(1) / size
