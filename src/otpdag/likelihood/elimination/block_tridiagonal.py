r"""Precisions whose entries lie near the diagonal, as chains of blocks: solved, inverted and drawn from in linear time.

With blocks :math:`A_k` on the diagonal and :math:`B_k` above it, elimination from the first block on leaves

.. math:: D_k = A_k - B_{k-1}^\top D_{k-1}^{-1} B_{k-1}, \qquad G_k = D_k^{-1} B_k,

so that :math:`\log |J| = \sum_k \log |D_k|`, and the covariance has the blocks :math:`\Sigma_{kk} = D_k^{-1} + G_k
\Sigma_{k+1,k+1} G_k^\top` and :math:`\Sigma_{k,k+1} = -G_k \Sigma_{k+1,k+1}`: all that families of neighbours read. Its
cost is linear in the number of unknowns, where that of a dense inverse is cubic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
