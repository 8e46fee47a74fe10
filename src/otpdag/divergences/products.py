"""Products of lines of numbers, each line in one product: what features of several columns are.

Most of the time of a distance between features goes into these products and their gradient, of which the general rules
of differentiation keep every intermediate one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["products_of_lines"]


def products_of_lines(lines: Tensor, factors: Sequence[Tensor]) -> Tensor:
    r"""Products :math:`p_j = \prod_k l_{f_k(j)}` of lines (..., C, S): (..., J, S).

    Args:
        lines: Lines of numbers, each of which is a factor of one product.
        factors: For each k, the numbers of the lines that are the k-th factor of the first products; of fewer and fewer
            products, so that the first ones have most factors.

    >>> lines = torch.tensor([[2.0], [3.0], [5.0]])
    >>> products_of_lines(lines, [torch.tensor([0, 1]), torch.tensor([2])])
    tensor([[10.],
            [ 3.]])
    """
    product: Tensor = _Products.apply(lines, *factors)
    return product


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lines: Tensor, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(lines, *factors)
        return _multiplied(lines.index_select(-2, factors[0]), lines, factors[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of a factor is that of its product times all other factors."""
        (gradient,) = gradients
        lines, *factors = ctx.saved_tensors
        total = torch.zeros_like(lines)
        for index, own in enumerate(factors):
            others = [factor for other, factor in enumerate(factors) if other != index]
            part = _multiplied(gradient[..., : len(own), :].clone(), lines, others)
            total.index_copy_(-2, own, part)
        return (total, *(None for _ in factors))


def _multiplied(product: Tensor, lines: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Multiply the first products by their factors, in place."""
    most = product.shape[-2]
    for factor in factors:
        product[..., : len(factor), :].mul_(lines.index_select(-2, factor[:most]))
    return product
