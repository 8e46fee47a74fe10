r"""Linear normal numbers, integrated out exactly in all rows at once.

A linear normal family is an equation: its noise :math:`u = a^\top q + u_0` is standard normal, where q are the unknown
numbers that it reads and :math:`u_0` comes from what is seen. A cluster of unknown numbers has precision
:math:`J = \sum a a^\top` and potential :math:`h = -\sum a u_0`, and

.. math:: \log \int \prod_v p_v \, dq = \tfrac{d}{2} \log 2\pi - \tfrac12 \log |J| + \tfrac12 h^\top J^{-1} h
          + \sum_v (\log c_v - \tfrac12 u_{0v}^2).

Clusters of the same number of unknowns are computed together, whatever nodes they are of. J depends on the kind of
piece and the categories alone, so it is computed once for all rows that share them. Unknown categories multiply the
integrals; unknown numbers or counts that are placed on points (y) stay, as the quadratic form that remains of them.

Long chains of unknowns have a precision whose entries lie near the diagonal, which is solved as a chain of blocks: with
blocks :math:`A_k` on the diagonal and :math:`B_k` above it, elimination from the first block on leaves

.. math:: D_k = A_k - B_{k-1}^\top D_{k-1}^{-1} B_{k-1}, \qquad G_k = D_k^{-1} B_k,

so that :math:`\log |J| = \sum_k \log |D_k|`, and the covariance has the blocks :math:`\Sigma_{kk} = D_k^{-1} + G_k
\Sigma_{k+1,k+1} G_k^\top` and :math:`\Sigma_{k,k+1} = -G_k \Sigma_{k+1,k+1}`: all that families of neighbours read. Its
cost is linear in the number of unknowns, where that of a dense inverse is cubic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otpdag.likelihood.elimination.sum_product import RandomNumbers


@dataclass(frozen=True, eq=False)
class BlockTridiagonal:
    """The inverse of a precision that is a chain of blocks.

    Attributes:
        inverses: Of the blocks that elimination leaves, :math:`D_k^{-1}` (K, ..., w, w).
        gains: How each block follows the next, :math:`G_k` (K - 1, ..., w, w).
        diagonal: Covariances of the blocks (K, ..., w, w).
        upper: Covariances of neighbouring blocks (K - 1, ..., w, w).
        log_determinant: Of the precision (...).
    """

    inverses: Tensor
    gains: Tensor
    diagonal: Tensor
    upper: Tensor
    log_determinant: Tensor

    @classmethod
    def of(cls, diagonal: Tensor, upper: Tensor) -> BlockTridiagonal:
        """Invert a precision with blocks ``diagonal`` (K, ..., w, w) and ``upper`` (K - 1, ..., w, w).

        >>> two, one = 2 * torch.ones(3, 1, 1).double(), -torch.ones(2, 1, 1).double()
        >>> BlockTridiagonal.of(two, one).diagonal.flatten()
        tensor([0.7500, 1.0000, 0.7500], dtype=torch.float64)
        """
        inverses: list[Tensor] = []
        gains: list[Tensor] = []
        log_determinant = torch.zeros(diagonal.shape[1:-2]).to(diagonal)
        for k in range(len(diagonal)):
            left = diagonal[k] if k == 0 else diagonal[k] - upper[k - 1].mT @ gains[-1]
            factor, failed = torch.linalg.cholesky_ex(left)
            factor = torch.where((failed > 0)[..., None, None], torch.nan, factor)
            log_determinant = log_determinant + 2 * torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1)
            inverses.append(torch.cholesky_inverse(factor))
            if k < len(upper):
                gains.append(inverses[-1] @ upper[k])
        covariances, neighbours = [inverses[-1]], []
        for k in range(len(upper) - 1, -1, -1):
            neighbours.append(-gains[k] @ covariances[-1])
            covariances.append(inverses[k] - neighbours[-1] @ gains[k].mT)
        none = diagonal[:0]
        return cls(
            torch.stack(inverses),
            torch.stack(gains) if gains else none,
            torch.stack(covariances[::-1]),
            torch.stack(neighbours[::-1]) if gains else none,
            log_determinant,
        )

    def times(self, vector: Tensor, instance: Tensor | None = None) -> Tensor:
        """Covariance times vectors (R, n, T, K w), where row n has the matrix of its ``instance`` among (R, m, T)."""

        def own(matrix: Tensor) -> Tensor:
            return matrix if instance is None else matrix.index_select(1, instance)

        parts = vector.unflatten(-1, (len(self.inverses), -1)).unsqueeze(-1).unbind(-3)
        forward = [parts[0]]
        for k in range(len(self.gains)):
            forward.append(parts[k + 1] - own(self.gains[k]).mT @ forward[-1])
        solved = [own(self.inverses[-1]) @ forward[-1]]
        for k in range(len(self.gains) - 1, -1, -1):
            solved.append(own(self.inverses[k]) @ forward[k] - own(self.gains[k]) @ solved[-1])
        return torch.stack(solved[::-1], -3).squeeze(-1).flatten(-2)

    def pairs(self) -> Tensor:
        """All covariances of neighbours in one row (..., entries), where :func:`position` says."""
        stacked = torch.cat([self.diagonal, self.upper])
        return stacked.movedim(0, -3).flatten(-3)

    def noise(self, standard: Tensor, which: tuple[Tensor, Tensor]) -> Tensor:
        """Turn standard normal noise (n, draws, K w) into draws of zero mean, in the first replica.

        The last block comes first, each other given the one after it. Each draw says ``which`` of the matrices (m, T)
        it has.
        """
        parts = standard.unflatten(-1, (len(self.inverses), -1)).unsqueeze(-1).unbind(-3)
        drawn: list[Tensor] = []
        for k in range(len(self.inverses) - 1, -1, -1):
            factor, _ = torch.linalg.cholesky_ex(self.inverses[k][0])
            value = factor[which] @ parts[k]
            drawn.append(value if not drawn else value - self.gains[k][0][which] @ drawn[-1])
        return torch.stack(drawn[::-1], -3).squeeze(-1).flatten(-2)


def position(row: Tensor, column: Tensor, width: int, blocks: int) -> Tensor:
    """Where an entry of a chain of blocks stands among those of the diagonal and then the upper ones; -1 if below.

    >>> position(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 1]), 2, 2).tolist()
    [0, 10, -1]
    """
    above, left = row.div(width, rounding_mode="floor"), column.div(width, rounding_mode="floor")
    inside = (row % width) * width + column % width
    entry = torch.where(above == left, above, blocks + above) * width * width + inside
    return torch.where((left == above) | (left == above + 1), entry, -1)


GATHERED = 32  # dimension up to which every row gets its own copy of a covariance: one call for all of them


@dataclass(frozen=True)
class Equations:
    """Coefficients of all linear families by configuration of their categories; the first row is empty.

    Attributes:
        coefficients: Noise from (own coordinates, numeric parents, 1): (R, rows, dim, W).
        constants: Logarithms of the densities' constants (R, rows).
        shift: What is subtracted from the columns before moments are taken (rows, W).
    """

    coefficients: Tensor
    constants: Tensor
    shift: Tensor


@dataclass(frozen=True)
class LinearGroup:
    """Clusters with d unknown numbers each, of n pieces.

    Attributes:
        dim: d, the numbers that are integrated out.
        states: Sizes of the unknown categories, T states in all.
        axes: Order of the axes (categories, then placed numbers) in the table that remains.
        placed: For each placed number which points it is on in turn, and where the rows stand in their placements.
        sizes: The axes of the table.
        rows: Number of the row of each piece (n,).
        instance: Which of m distinct systems of equations a piece has (n,).
        config: Row of the equations for each state and family (m, T, F).
        unknown: For each column which unknown it is, d + b for none (m, F, W).
        seen: Whether the family's node is seen (m, F).
        values: Columns that are seen, zero for unknown ones (n, F, W).
        cells: Node and coordinate of each unknown (m, d, 2).
        around: Nodes of the categories and placed numbers (m, axes).
        band: Where the unknowns that share a family stand close to each other, how far apart at most; otherwise zero.
    """

    dim: int
    states: tuple[int, ...]
    axes: tuple[int, ...]
    placed: tuple[tuple[tuple[tuple[int, int], Tensor], ...], ...]
    sizes: tuple[int, ...]
    rows: Tensor
    instance: Tensor
    config: Tensor
    unknown: Tensor
    seen: Tensor
    values: Tensor
    cells: Tensor
    around: Tensor
    band: int = 0

    @property
    def elements(self) -> int:
        """Entries of the largest arrays, for the budget."""
        rows, families, width = self.values.shape
        matrix = self.dim**2 if self.band == 0 else 6 * self.blocks * self.band**2
        per_row = families * width * (width + 2)
        return math.prod(self.states) * (rows * per_row + len(self.config) * matrix)

    @property
    def blocks(self) -> int:
        """Blocks along the diagonal of a banded precision, the last one filled up."""
        return -(-self.dim // self.band)

    def integrate(self, equations: Equations, points: Sequence[Tensor], power: float = 1.0) -> Integrals:
        """Integrate the clusters out of the product of their families, those of seen nodes to a power."""
        width = self.values.shape[-1]
        scale = 1 + (math.sqrt(power) - 1) * self.seen.to(self.values)
        coefficients = equations.coefficients[:, self.config, :, :width] * scale[:, None, :, None, None]
        constants = (equations.constants[:, self.config] * scale.square().unsqueeze(1)).sum(-1)
        products = coefficients.mT @ coefficients
        own = coefficients[:, self.instance]
        noise = (own @ self.values[:, None, :, :, None]).squeeze(-1)  # (R, n, T, F, dim)
        pull = self._scatter(-(noise.unsqueeze(-2) @ own).squeeze(-2))  # (R, n, T, d + b)

        def around(unknowns: Tensor) -> tuple[Tensor, Tensor]:
            """Log-density and pull at unknowns (R, n, T, d): near the mean, digits are kept that are lost far out."""
            columns = self.columns(torch.nn.functional.pad(unknowns, (0, len(self.placed))))
            rest = noise + (own @ columns.unsqueeze(-1)).squeeze(-1)
            value = constants[:, self.instance] - 0.5 * rest.square().sum((-1, -2))
            return value, self._scatter(-(rest.unsqueeze(-2) @ own).squeeze(-2))

        if self.band:
            return Integrals.of_band(self, self._assemble_band(products), pull, around)
        return Integrals.of(self, self._assemble(products), pull, around, points)

    def _assemble(self, products: Tensor) -> Tensor:
        """Sum products of coefficients (R, m, T, F, W, W) into precisions (R, m, T, d + b, d + b)."""
        size = self.dim + len(self.placed)
        index = self.unknown.unsqueeze(-1) * (size + 1) + self.unknown.unsqueeze(-2)
        flat = products.flatten(3)
        index = index.flatten(1)[None, :, None].expand_as(flat)
        total = flat.new_zeros(*flat.shape[:3], (size + 1) ** 2).scatter_add_(-1, index, flat)
        return total.unflatten(-1, (size + 1, size + 1))[..., :size, :size]

    def _assemble_band(self, products: Tensor) -> BlockTridiagonal:
        """The same for a band, as an inverse; what fills the last block up has unit precision."""
        width, blocks = self.band, self.blocks
        many = (2 * blocks - 1) * width**2
        one, other = self.unknown.unsqueeze(-1), self.unknown.unsqueeze(-2)
        place = position(one, other, width, blocks)
        place = torch.where((one < self.dim) & (other < self.dim) & (place >= 0), place, many)
        flat = products.flatten(3)
        index = place.flatten(1)[None, :, None].expand_as(flat)
        total = flat.new_zeros(*flat.shape[:3], many + 1).scatter_add_(-1, index, flat)[..., :many]
        extra = torch.arange(self.dim, blocks * width)
        total[..., position(extra, extra, width, blocks)] = 1.0
        chain = total.unflatten(-1, (2 * blocks - 1, width, width)).movedim(-3, 0)
        return BlockTridiagonal.of(chain[:blocks], chain[blocks:])

    def _scatter(self, columns: Tensor) -> Tensor:
        """Sum columns (R, n, T, F, W) into unknowns (R, n, T, d + b)."""
        size = self.dim + len(self.placed)
        flat = columns.flatten(3)
        index = self.unknown[self.instance].flatten(1)[None, :, None].expand_as(flat)
        return flat.new_zeros(*flat.shape[:3], size + 1).scatter_add_(-1, index, flat)[..., :size]

    def columns(self, unknowns: Tensor) -> Tensor:
        """Unknowns (R, n, T, d + b) by column: (R, n, T, F, W), zero where a column is seen."""
        padded = torch.nn.functional.pad(unknowns, (0, 1))
        index = self.unknown[self.instance]
        flat = index.flatten(1)[None, :, None].expand(*unknowns.shape[:3], -1)
        return padded.gather(-1, flat).unflatten(-1, index.shape[1:])


@dataclass(frozen=True)
class Integrals:
    """What is left of a group's clusters, and the posterior of what was integrated out.

    Attributes:
        group: The clusters.
        table: Logarithms of the integrals (R, n, *sizes).
        points: Values of the placed numbers (R, n, P).
        covariance: Of the unknowns (R, m, T, d, d), or of neighbours along a band.
        mean: Of the unknowns, where the placed numbers are zero (R, n, T, d).
        gain: How the mean follows the placed numbers (R, m, T, d, b).
    """

    group: LinearGroup
    table: Tensor
    points: tuple[Tensor, ...]
    covariance: Tensor | BlockTridiagonal
    mean: Tensor
    gain: Tensor

    @classmethod
    def of(
        cls,
        group: LinearGroup,
        precision: Tensor,
        pull: Tensor,
        around: Callable[[Tensor], tuple[Tensor, Tensor]],
        points: Sequence[Tensor],
    ) -> Integrals:
        """Complete the square."""
        d, instance = group.dim, group.instance
        covariance, log_determinant = _inverse(precision[..., :d, :d])
        mean = _times(covariance, pull[..., :d], instance)
        value, pull = around(mean)
        step = _times(covariance, pull[..., :d], instance)
        value = value + 0.5 * (pull[..., :d] * step).sum(-1)
        table = value - 0.5 * log_determinant[:, instance] + 0.5 * d * math.log(2 * math.pi)
        gain = covariance @ precision[..., :d, d:]
        if points:
            rest = precision[..., d:, d:] - precision[..., d:, :d] @ gain
            slope = pull[..., d:] - (precision[:, instance, :, d:, :d] @ step.unsqueeze(-1)).squeeze(-1)
            table = _quadratic(table, slope, rest[:, instance], points)
        table = table.unflatten(2, group.states) if group.states else table.squeeze(2)
        table = table.permute(0, 1, *(2 + axis for axis in group.axes))
        return cls(group, table, tuple(points), covariance, mean + step, gain)

    @classmethod
    def of_band(
        cls,
        group: LinearGroup,
        covariance: BlockTridiagonal,
        pull: Tensor,
        around: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Integrals:
        """The same along a band, without placed numbers."""
        d = group.dim
        filled = torch.nn.functional.pad(pull, (0, group.blocks * group.band - d))
        mean = covariance.times(filled, group.instance)[..., :d]
        table = around(mean)[0] - 0.5 * covariance.log_determinant[:, group.instance]
        table = table + 0.5 * d * math.log(2 * math.pi)
        table = table.unflatten(2, group.states) if group.states else table.squeeze(2)
        table = table.permute(0, 1, *(2 + axis for axis in group.axes))
        return cls(group, table, (), covariance, mean, mean[..., :0])

    def moments(self, weight: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Second moments of every family's columns under the posterior, weighed.

        Args:
            weight: Belief of each entry of the table (R, n, *sizes).
            shift: What is subtracted from each column, by row of the equations (rows, W).

        Returns:
            Row of the equations (n, T, F), and the sums (R, n, T, F, W, W).
        """
        group, rows = self.group, self.group.config[self.group.instance]
        weight = self.by_state(weight)  # (R, n, T, *P)
        total = weight.flatten(3).sum(-1) if self.points else weight
        shift = shift[rows][..., : group.values.shape[-1]]
        fixed = torch.nn.functional.pad(self.mean, (0, len(self.points)))
        first = group.values[:, None] - shift + group.columns(fixed)
        moments = (first * total[..., None, None]).unsqueeze(-1) * first.unsqueeze(-2)
        moments += total[..., None, None, None] * self._spread()[:, group.instance]
        if self.points:
            moments = moments + self._of_points(weight, first)
        return rows, moments

    def by_state(self, weight: Tensor) -> Tensor:
        """A table (R, n, *sizes) with its states first, as one axis: (R, n, T, *P)."""
        group = self.group
        if not group.sizes:
            return weight.unsqueeze(2)
        back = sorted(range(len(group.axes)), key=lambda place: group.axes[place])
        ordered = weight.permute(0, 1, *(2 + axis for axis in back))
        return ordered.flatten(2, 1 + len(group.states)) if group.states else ordered.unsqueeze(2)

    def variances(self) -> Tensor:
        """Variances of the unknowns (R, m, T, d)."""
        if isinstance(self.covariance, BlockTridiagonal):
            by_block = self.covariance.diagonal.diagonal(dim1=-2, dim2=-1)  # (K, R, m, T, w)
            return by_block.movedim(0, -2).flatten(-2)[..., : self.group.dim]
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    def _spread(self) -> Tensor:
        """The covariance by columns: (R, m, T, F, W, W)."""
        group, size = self.group, self.group.dim
        index = group.unknown.clamp(max=size)  # placed numbers are no part of it
        if isinstance(self.covariance, BlockTridiagonal):
            one, other = index.unsqueeze(-1), index.unsqueeze(-2)
            place = position(torch.minimum(one, other), torch.maximum(one, other), group.band, group.blocks)
            known = torch.nn.functional.pad(self.covariance.pairs(), (0, 1))
            place = torch.where((one < size) & (other < size), place, known.shape[-1] - 1).flatten(1)
            chosen = known.gather(-1, place[None, :, None].expand(*known.shape[:3], -1))
            return chosen.unflatten(-1, (*index.shape[1:], index.shape[-1]))
        padded = torch.nn.functional.pad(self.covariance, (0, 1, 0, 1)).flatten(3)
        pairs = (index.unsqueeze(-1) * (size + 1) + index.unsqueeze(-2)).flatten(1)
        flat = padded.gather(-1, pairs[None, :, None].expand(*padded.shape[:3], -1))
        return flat.unflatten(-1, (*index.shape[1:], index.shape[-1]))

    def _of_points(self, weight: Tensor, first: Tensor) -> Tensor:
        """What the placed numbers y add: columns are first + A y."""
        group = self.group
        many, one, two = point_moments(weight, self.points)
        eye = torch.eye(many).to(self.gain).expand(*self.gain.shape[:3], -1, -1)
        follow = torch.cat([-self.gain, eye], -2)[:, group.instance]  # (R, n, T, d + b, b)
        by_column = torch.stack([group.columns(follow[..., i]) for i in range(many)], -1)
        drift = (by_column * one[..., None, None, :]).sum(-1)
        cross = drift.unsqueeze(-1) * first.unsqueeze(-2)
        return cross + cross.mT + by_column @ two.unsqueeze(3) @ by_column.mT

    def draws(self, states: Tensor, placed: Sequence[Tensor], numbers: RandomNumbers) -> Tensor:
        """Draw the unknowns of the first replica given states and placed numbers (n, draws): (n, draws, d)."""
        at = states.unsqueeze(-1).expand(-1, -1, self.group.dim)
        mean = self.mean[0].gather(1, at)
        noise = numbers.normal(mean.shape, mean.dtype)
        instance = self.group.instance.unsqueeze(-1).expand_as(states)
        if isinstance(self.covariance, BlockTridiagonal):
            filled = torch.nn.functional.pad(noise, (0, self.group.blocks * self.group.band - self.group.dim))
            return mean + self.covariance.noise(filled, (instance, states))[..., : self.group.dim]
        factor, _ = torch.linalg.cholesky_ex(self.covariance[0])
        drawn = mean + (factor[instance, states] @ noise.unsqueeze(-1)).squeeze(-1)
        if placed:
            y = torch.stack(list(placed), -1).unsqueeze(-1)
            drawn = drawn - (self.gain[0][instance, states] @ y).squeeze(-1)
        return drawn


def _inverse(precision: Tensor) -> tuple[Tensor, Tensor]:
    """Covariance and log-determinant; of a single number by a division."""
    if precision.shape[-1] == 1:
        return precision.reciprocal(), torch.log(precision[..., 0, 0])
    factor, failed = torch.linalg.cholesky_ex(precision)
    factor = torch.where((failed > 0)[..., None, None], torch.nan, factor)
    return torch.cholesky_inverse(factor), 2 * torch.log(factor.diagonal(dim1=-2, dim2=-1)).sum(-1)


def _times(matrix: Tensor, vector: Tensor, instance: Tensor) -> Tensor:
    """Multiply each piece's vector (R, n, T, d) by its instance's matrix (R, m, T, d, d)."""
    if matrix.shape[-1] <= GATHERED:
        return (matrix[:, instance] @ vector.unsqueeze(-1)).squeeze(-1)
    product = torch.empty_like(vector)
    for number in range(matrix.shape[1]):
        rows = torch.nonzero(instance == number)[:, 0]
        product[:, rows] = torch.einsum("rtij,rntj->rnti", matrix[:, number], vector[:, rows])
    return product


def _quadratic(constant: Tensor, slope: Tensor, curvature: Tensor, points: Sequence[Tensor]) -> Tensor:
    """``constant + slope y - y curvature y / 2`` on all combinations of points: (R, n, T, *P)."""
    many = len(points)

    def along(value: Tensor, axis: int) -> Tensor:
        """Points (R, n, P) as one axis of the table."""
        shape = [1] * many
        shape[axis] = value.shape[-1]
        return value.reshape(*value.shape[:2], 1, *shape)

    def spread(value: Tensor) -> Tensor:
        return value.reshape(*value.shape, *[1] * many)

    table = spread(constant)
    for i, y in enumerate(points):
        table = table + along(y, i) * (spread(slope[..., i]) - 0.5 * spread(curvature[..., i, i]) * along(y, i))
        for j in range(i):
            table = table - spread(curvature[..., i, j]) * along(y, i) * along(points[j], j)
    return table


def _summed_out(weight: Tensor, away: Sequence[int]) -> Tensor:
    """Sum over some axes of points; over no axis, unlike torch, where there is none."""
    return weight.sum([3 + axis for axis in away]) if away else weight


def point_moments(weight: Tensor, points: Sequence[Tensor]) -> tuple[int, Tensor, Tensor]:
    """Weighed sums of points and of their products: (R, n, T, b) and (R, n, T, b, b)."""
    many = len(points)
    one = weight.new_zeros(*weight.shape[:3], many)
    two = weight.new_zeros(*weight.shape[:3], many, many)
    for i, y in enumerate(points):
        single = _summed_out(weight, [k for k in range(many) if k != i])
        one[..., i] = (single * y.unsqueeze(2)).sum(-1)
        two[..., i, i] = (single * y.square().unsqueeze(2)).sum(-1)
        for j in range(i):
            pair = _summed_out(weight, [k for k in range(many) if k not in (i, j)])  # (..., P_j, P_i)
            value = (pair * points[j][:, :, None, :, None] * y[:, :, None, None]).sum((-1, -2))
            two[..., i, j] = two[..., j, i] = value
    return many, one, two
