"""A column: where and how a table holds one node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from otpdag.spaces import Space

__all__ = ["Column", "Label", "cell_names", "column_title"]


Label: TypeAlias = str | bool | int | float


@dataclass(frozen=True)
class Column:
    """Where and how a table holds one node.

    Attributes:
        space: The node's values.
        labels: What the categories are called, in the order of their codes; None for plain codes.
        names: The columns, one for each cell.
    """

    space: Space
    labels: tuple[Label, ...] | None
    names: tuple[str, ...]


def cell_names(node: str, space: Space) -> tuple[str, ...]:
    """The columns of a node: its own name, or ``x.0``, ``x.1`` and so on if it has several cells."""
    return (node,) if space.cells == 1 else tuple(f"{node}.{cell}" for cell in range(space.cells))


def column_title(node: str, name: str) -> str:
    """What an error message calls a column."""
    return f"column {name!r}" if name == node else f"column {name!r} of node {node!r}"
