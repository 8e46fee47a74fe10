r"""Means and variances of unknown numbers in each row, summed exactly: nothing is drawn.

A number that is linear and normal with all around it has, given the categories s of its piece, a normal posterior;

.. math:: E[x] = \sum_s P(s) m_s, \qquad E[x^2] = \sum_s P(s) (m_s^2 + V_s).

Any other number stands on points, whose beliefs are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.backward.elimination.linear_normal import Integrals, point_moments
from otpdag.backward.elimination.row_layout import Layout
from otpdag.backward.elimination.sum_product import Banks, taken
from otpdag.backward.elimination.sums import Evaluated, Factors, Tempering
from otpdag.structure import Naturals

__all__ = ["node_moments"]


def node_moments(naturals: Naturals, layout: Layout, node: str) -> tuple[Tensor, Tensor]:
    """Posterior mean and variance of a number or vector in each row, (N, width) each; what is seen has no variance.

    Args:
        naturals: Parameters of one replica (1, ...).
        layout: Rows, laid out with ``keep=(node,)``, whose points were :func:`~otpdag.backward.elimination.moved`.
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
