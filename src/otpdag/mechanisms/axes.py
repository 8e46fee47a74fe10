"""What the axes of a parameter run over, so that tables can name its numbers and labels can be exchanged."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from otpdag.spaces import Space

__all__ = ["Axis"]

Sizes = tuple[tuple[str, int], ...]
"""Names of nodes, as the mechanism's family has them, each with a number of categories or coordinates."""


@dataclass(frozen=True)
class Axis:
    """One axis of a parameter: the categories of some nodes, the coordinates of some nodes, or nothing.

    Attributes:
        categories: One entry for each joint configuration of these nodes, the last node fastest. Exchanging two
            categories of a node must come to exchanging their entries, and to nothing else.
        coordinates: One entry for each coordinate of these nodes, side by side.

    >>> from otpdag.spaces import Discrete, Real
    >>> Axis.of_categories([("season", Discrete(4)), ("town", Discrete(2))]).length
    8
    >>> Axis.of_coordinates([("height", Real()), ("place", Real(2))]).length
    3
    >>> Axis().length
    1
    """

    categories: Sizes = ()
    coordinates: Sizes = ()

    @classmethod
    def of_categories(cls, nodes: Sequence[tuple[str, Space]]) -> Axis:
        """All joint configurations of nodes that are categories."""
        return cls(categories=tuple((name, space.width) for name, space in nodes))

    @classmethod
    def of_coordinates(cls, nodes: Sequence[tuple[str, Space]]) -> Axis:
        """The coordinates of nodes that are numbers, side by side."""
        return cls(coordinates=tuple((name, space.width) for name, space in nodes))

    @classmethod
    def of_values(cls, node: str, space: Space) -> Axis:
        """The categories or the coordinates of one node, whichever it has."""
        return cls.of_categories([(node, space)]) if space.is_discrete else cls.of_coordinates([(node, space)])

    @property
    def length(self) -> int:
        """Number of entries along the axis."""
        if self.coordinates:
            return sum(size for _, size in self.coordinates)
        return prod(size for _, size in self.categories)

    @property
    def labelled_by(self) -> frozenset[str]:
        """Nodes whose categories the axis runs over."""
        return frozenset(name for name, _ in self.categories)

    def relabelled(self, value: Tensor, dim: int, nodes: Collection[str], order: Sequence[int]) -> Tensor:
        """Take the categories of ``nodes`` in another order along axis ``dim`` of ``value``.

        >>> axis = Axis(categories=(("season", 2), ("town", 2)))
        >>> axis.relabelled(torch.tensor([1, 2, 3, 4]), 0, {"town"}, [1, 0])
        tensor([2, 1, 4, 3])
        """
        if not self.labelled_by & set(nodes):
            return value
        split = value.unflatten(dim, [size for _, size in self.categories])
        index = torch.tensor(order, device=value.device)
        for place, (name, _) in enumerate(self.categories):
            if name in nodes:
                split = split.index_select(dim + place, index)
        return split.reshape(value.shape)
