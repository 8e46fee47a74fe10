r"""What each row does not know, cut into pieces that do not touch.

Given what a row shows, its density is a product over the families of the graph. A family all of whose members are seen
is a number. The unknown members of the others are linked, and the links cut the row's unknowns into connected pieces,

.. math:: P(x) = \prod_{\text{complete } v} P(x_v \mid x_{pa(v)})
                 \prod_{\text{pieces } A} \int \prod_{v \text{ that reads } A} P(x_v \mid x_{pa(v)}) \, dA .

An unknown node without a seen descendant integrates to one and is left out, with its family. Everything here works on
whole tables at once: its cost is linear in rows and in edges.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from otpdag.likelihood.elimination.families import FamilyView
from otpdag.mechanisms.protocols import is_linear

Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Needs:
    """Which cells must be filled in and which families count, row by row; columns are nodes in topological order.

    Attributes:
        unknown: Nodes that must be integrated out (N, V).
        active: Families whose factor counts (N, V).
    """

    unknown: Flags
    active: Flags


@dataclass(frozen=True)
class Pieces:
    """The connected pieces of all rows.

    Attributes:
        row: The row of each piece (P,).
        cell_piece: The piece of each unknown cell, ascending (M,).
        cell_node: The node of each unknown cell, ascending inside a piece (M,).
        touch_piece: The piece of each factor that reads an unknown cell, ascending (F,).
        touch_node: The node whose family that factor is, ascending inside a piece (F,).
        complete: Families that count and have no unknown member (N, V).
    """

    row: Ints
    cell_piece: Ints
    cell_node: Ints
    touch_piece: Ints
    touch_node: Ints
    complete: Flags


def needs(families: Sequence[FamilyView], seen: Flags, partly: Flags, keep: Collection[str] = ()) -> Needs:
    """Tell which nodes must be filled in, and which families count.

    Args:
        families: All families, in topological order.
        seen: Nodes of which every cell is seen (N, V).
        partly: Nodes of which some cells are (N, V).
        keep: Nodes to fill in even where nothing seen depends on them, so that their beliefs can be read.

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> from otpdag.likelihood.elimination.families import describe_families
    >>> from otpdag.structure import Structure
    >>> graph = otp.Graph([("a", "b"), ("b", "c")])
    >>> structure = Structure.bind(graph, {node: m.Normal() for node in "abc"})
    >>> seen = np.array([[True, False, True], [True, False, False]])
    >>> needs(describe_families(structure), seen, np.zeros_like(seen)).unknown.tolist()
    [[False, True, False], [False, False, False]]
    """
    unknown, active = np.zeros_like(seen), seen | partly
    read = np.zeros_like(seen)
    for family in reversed(families):
        at = family.place
        if family.is_function:
            continue
        below = read[:, at]
        if family.node in keep:
            below[:] = True
        unknown[:, at] = ~seen[:, at] & below
        active[:, at] |= below
        read[:, list(family.members[:-1])] |= active[:, [at]]
    for family in families:
        # a linear normal vector that is seen in part is integrated along with the unknown numbers that it depends on
        numbers = [n for n, c in zip(family.members[:-1], family.categories[:-1], strict=True) if not c]
        if is_linear(family.mechanism):
            unknown[:, family.place] |= partly[:, family.place] & unknown[:, numbers].any(1)
    active[:, [family.place for family in families if family.mechanism.is_given]] = False
    return Needs(unknown, active)


def cut(families: Sequence[FamilyView], need: Needs) -> Pieces:
    """Cut the unknown cells of every row into connected pieces.

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> from otpdag.likelihood.elimination.families import describe_families
    >>> from otpdag.structure import Structure
    >>> graph = otp.Graph([("a", "b"), ("b", "c"), ("c", "d"), ("d", "e")])
    >>> families = describe_families(Structure.bind(graph, {node: m.Normal() for node in "abcde"}))
    >>> seen = np.array([[False, False, True, False, True]])
    >>> pieces = cut(families, needs(families, seen, np.zeros_like(seen)))
    >>> pieces.cell_piece.tolist(), pieces.cell_node.tolist()
    ([0, 0, 1], [0, 1, 3])
    >>> pieces.touch_node.tolist()
    [0, 1, 2, 3, 4]
    """
    rows, nodes = np.nonzero(need.unknown)
    cell_of = np.full(need.unknown.shape, -1, dtype=np.int64)
    cell_of[rows, nodes] = np.arange(len(rows))
    left, right, touch_cell, touch_node, complete = _links(families, need, cell_of)
    matrix = coo_array((np.ones(len(left), dtype=np.int8), (left, right)), shape=(len(rows), len(rows)))
    many, label = connected_components(matrix, directed=False)
    by_piece = np.argsort(label, kind="stable")
    piece_row = np.zeros(many, dtype=np.int64)
    piece_row[label] = rows
    touch_piece = label[touch_cell].astype(np.int64)
    touches = np.argsort(touch_piece, kind="stable")
    return Pieces(
        piece_row,
        label[by_piece].astype(np.int64),
        nodes[by_piece],
        touch_piece[touches],
        touch_node[touches],
        complete,
    )


def _links(families: Sequence[FamilyView], need: Needs, cell_of: Ints) -> tuple[Ints, Ints, Ints, Ints, Flags]:
    """Pairs of cells that share a factor; the first unknown cell of every factor that has one; complete families."""
    complete = need.active.copy()
    left, right, touch_cell, touch_node = [], [], [], []
    for family in families:
        at, members = family.place, np.array([family.place, *family.members[:-1]])
        incomplete = need.active[:, at] & need.unknown[:, members].any(1)
        complete[:, at] &= ~incomplete
        rows = np.flatnonzero(incomplete)
        cells = cell_of[np.ix_(rows, members)]
        first = cells[np.arange(len(rows)), (cells >= 0).argmax(1)]
        touch_cell.append(first)
        touch_node.append(np.full(len(rows), at))
        for column in cells.T[1:]:
            linked = (column >= 0) & (column != first)
            left.append(first[linked])
            right.append(column[linked])
    empty = [np.zeros(0, dtype=np.int64)]
    return (
        np.concatenate(left + empty),
        np.concatenate(right + empty),
        np.concatenate(touch_cell + empty),
        np.concatenate(touch_node + empty),
        complete,
    )
