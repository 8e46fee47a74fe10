r"""Families of a graph as the sums see them, and what of them each row does not know.

A family is a node with its parents: its joint states if all are categories, its equation if it is linear and normal.
Given what a row shows, its density is a product over the families. A family all of whose members are seen is a number.
The unknown members of the others are linked, and the links cut the row's unknowns into connected pieces,

.. math:: P(x) = \prod_{\text{complete } v} P(x_v \mid x_{pa(v)})
                 \prod_{\text{pieces } A} \int \prod_{v \text{ that reads } A} P(x_v \mid x_{pa(v)}) \, dA .

An unknown node without a seen descendant integrates to one and is left out, with its family. Cutting works on whole
tables at once: its cost is linear in rows and in edges.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from pandas.util import hash_array
from torch import Tensor

from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.mechanisms.base import LINE, Mechanism, Params, Parents, abducted, can_abduct, defines_together, is_linear
from otpdag.mechanisms.categorical import Categorical
from otpdag.mechanisms.predictor import Predicted
from otpdag.numerics import Array, Flags, Ints, first_connected, joint_one_hot
from otpdag.structure import Structure

Hashes = NDArray[np.uint64]

SMALLEST_WINDOW = 8  # points of a count that was never seen above zero


@dataclass(frozen=True)
class WeighedRows:
    """Rows of a family with weights: values (1 or R, n, ..., width), weights (1 or R, n, ...)."""

    values: Mapping[str, Tensor]
    weight: Tensor
    mask: Tensor | None = None

    def at(self, some: slice | Tensor) -> WeighedRows:
        """Some of them."""
        values = {name: value[:, some] for name, value in self.values.items()}
        return WeighedRows(values, self.weight[:, some], None if self.mask is None else self.mask[:, some])


# where slopes are read off, by the largest parameter: further out than any mean, so that no digits are lost
FAR_OUT = 2.0**60


@dataclass(frozen=True, eq=False)
class FamilyView:
    """A node with its parents, by their places in topological order.

    Linear normal families are written as equations in the columns ``(own coordinates, numeric parents, 1)``.

    Attributes:
        node: The node's name.
        place: Its place in topological order.
        names: Parents in the order of the mechanism, then the node.
        members: The places of the same.
        mechanism: How the node comes about.
        widths: Coordinates of each member.
        categories: Whether each member is a category.
        hidden: Whether the node is never seen.
        follows: Hidden parents that are functions of others, without noise: the members are those others.
    """

    node: str
    place: int
    names: tuple[str, ...]
    members: tuple[int, ...]
    mechanism: Mechanism
    widths: tuple[int, ...]
    categories: tuple[bool, ...]
    hidden: bool
    follows: tuple[Mechanism, ...] = ()

    @property
    def is_function(self) -> bool:
        """Whether the node is hidden and follows from its parents: it is no unknown of its own."""
        mechanism = self.mechanism
        return self.hidden and not mechanism.has_density and not mechanism.noise.dim and not mechanism.declared()

    @property
    def is_table(self) -> bool:
        """Whether node and parents are all categories."""
        return all(self.categories) and self.mechanism.has_density

    @cached_property
    def is_linear(self) -> bool:
        """Whether the noise is normal and an affine function of node and numeric parents, which can be computed."""
        mechanism, noise = self.mechanism, self.mechanism.noise
        return (
            is_linear(mechanism)
            and not self.follows
            and can_abduct(mechanism)
            and defines_together(mechanism, "abduct")
            and mechanism.has_density
            and noise.kind == "normal"
            and noise.dim == mechanism.space.width
        )

    @cached_property
    def lines(self) -> int:
        """Linear predictions through which alone the density reads numbers; zero if it reads them otherwise."""
        otherwise = self.is_linear or self.follows or all(self.categories[:-1])
        return int(getattr(self.mechanism, "lines", 0)) if self.mechanism.has_density and not otherwise else 0

    @cached_property
    def selectors(self) -> tuple[tuple[int, int], ...]:
        """Place and size of the parents that are categories."""
        parents = zip(self.members[:-1], self.widths[:-1], self.categories[:-1], strict=True)
        return tuple((place, width) for place, width, category in parents if category)

    @property
    def configurations(self) -> int:
        """Joint states of the parents that are categories."""
        return math.prod(width for _, width in self.selectors)

    @cached_property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """The node's own coordinates and those of its numeric parents, each as (place, coordinate)."""
        own = [(self.place, cell) for cell in range(self.widths[-1])]
        parents = zip(self.members[:-1], self.widths[:-1], self.categories[:-1], strict=True)
        return (*own, *((place, cell) for place, width, category in parents if not category for cell in range(width)))

    def log_prob(self, params: Params, values: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        """Log-density of the node's value given its parents' ones."""
        known = dict(values)
        for followed in self.follows:
            above = {name: known[name] for name, _ in followed.family.parents}
            none = values[self.node].new_zeros(*[1] * (values[self.node].ndim - 1), 0)
            known[followed.family.node] = followed.forward({}, above, none)
        parents = {name: known[name] for name, _ in self.mechanism.family.parents}
        parents |= {LINE: values[LINE]} if LINE in values else {}
        return self.mechanism.log_prob(params, values[self.node], parents, mask)

    def log_table(self, params: Params) -> Tensor:
        """Log-probabilities of all joint states: (R, *parents, states).

        A table of probabilities has them all; others tell them of one state after another, as one-hot vectors.
        """
        if isinstance(self.mechanism, Categorical) and self.mechanism.is_table and not self.follows:
            held = self.mechanism.coefficients(params)
            return held.reshape(len(held), *self.widths)
        values = one_hot_states(self.names, self.widths, next(iter(params.values()), torch.zeros(1).double()))
        table = self.log_prob(params, values)
        return table.reshape(len(table), *self.widths)

    def evaluated(self, params: Params) -> tuple[Tensor, ...]:
        """What sums over rows need of the parameters: log-probabilities of a table, or equations of a linear family."""
        return (self.log_table(params),) if self.is_table else self.equations(params)

    def equations(self, params: Params) -> tuple[Tensor, Tensor]:
        r"""Coefficients of the noise :math:`u = A (x, pa, 1)^\top`, and :math:`\log |du/dx| - d/2 \log 2\pi`.

        Both for each configuration of the categories: (R, C, dim, columns + 1) and (R, C). The noise is affine, so its
        values at the origin and far out on each axis tell all of it.
        """
        values, far = self._far_out(params)
        parents: Parents = {name: values[name] for name in self.names[:-1]}
        noise = abducted(self.mechanism, params, values[self.node], parents, torch.zeros_like(values[self.node]))
        noise = noise.expand(-1, self.configurations, -1, -1).mT
        origin = noise[..., :1]
        slopes = (noise[..., 1:] - origin) / far
        dim = self.widths[-1]
        own = slopes[..., :dim]
        log_slope = own[..., 0, 0].abs().log() if dim == 1 else torch.linalg.slogdet(own)[1]
        return torch.cat([slopes, origin], -1), log_slope - 0.5 * dim * math.log(2 * math.pi)

    def slopes(self, params: Params) -> Tensor:
        """Of the lines in each column, for each configuration of the categories: (R, C, lines, columns)."""
        assert isinstance(self.mechanism, Predicted), "only predictions are lines"
        values, far = self._far_out(params)
        line = self.mechanism.predictor(params, {name: values[name] for name in self.names[:-1]})
        line = line.expand(-1, self.configurations, -1, -1).mT
        slopes = (line[..., 1:] - line[..., :1]) / far
        return slopes if self.lines == slopes.shape[2] else slopes[:, :, 1:] - slopes[:, :, :1]

    def _far_out(self, params: Params) -> tuple[dict[str, Tensor], Tensor]:
        """All members at the origin and far out on each numeric axis, and how far that is."""
        sizes = [value.detach().abs().amax() for value in params.values() if value.numel()]
        largest = max(sizes, default=torch.ones(()))
        far = FAR_OUT * 2.0 ** torch.log2(largest.clamp(min=1.0)).ceil()  # a power of two: nothing is rounded
        categories = dict(zip(self.names, self.categories, strict=True))
        return {name: one if categories[name] else far * one for name, one in self._axes.items()}, far

    @cached_property
    def _axes(self) -> dict[str, Tensor]:
        """Zero and one on each numeric axis, for each configuration: (1, C, columns + 1, width)."""
        points = len(self.columns) + 1
        like = torch.zeros(1, dtype=torch.float64)
        names = [name for name, c in zip(self.names[:-1], self.categories[:-1], strict=True) if c]
        states = one_hot_states(names, [width for _, width in self.selectors], like)
        values = {name: state.unsqueeze(2).expand(-1, -1, points, -1) for name, state in states.items()}
        for name, place, width in zip(self.names, self.members, self.widths, strict=True):
            if name not in values:
                column = torch.zeros(points, width, dtype=torch.float64)
                column[[1 + self.columns.index((place, cell)) for cell in range(width)], range(width)] = 1.0
                values[name] = column.reshape(1, 1, points, width).expand(1, self.configurations, -1, -1)
        return values


def line_of(places: Sequence[int], families: Sequence[FamilyView]) -> int:
    """All lines of some families as one variable of the sums, beyond those of all nodes."""
    return sum(families[v].lines for v in places) * len(families) + min(places)


def name_of(variable: int, families: Sequence[FamilyView]) -> str:
    """What messages call a node, or lines."""
    node = families[variable % len(families)].node
    return repr(node) if variable < len(families) else f"the prediction of {node!r}"


def one_hot_states(names: Iterable[str], sizes: Iterable[int], like: Tensor) -> dict[str, Tensor]:
    """All joint states of categories as one-hot vectors (1, C, size), the last name fastest.

    >>> {name: state.argmax(-1).tolist() for name, state in one_hot_states("ab", (2, 2), torch.ones(1)).items()}
    {'a': [[0, 0, 1, 1]], 'b': [[0, 1, 0, 1]]}
    """
    return {name: state.to(like).unsqueeze(0) for name, state in zip(names, joint_one_hot(tuple(sizes)), strict=True)}


def describe_families(structure: Structure) -> tuple[FamilyView, ...]:
    """All families in topological order.

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> graph = otp.Graph([("z", "x"), ("y", "x")])
    >>> structure = Structure.bind(graph, {"z": m.Categorical(3), "y": m.Normal(), "x": m.Normal()})
    >>> family = describe_families(structure)[-1]
    >>> family.names, family.columns, family.configurations, family.is_linear
    (('z', 'y', 'x'), ((2, 0), (1, 0)), 3, True)
    """
    graph = structure.graph
    if graph.is_dynamic:
        raise ModelError("rows of a graph with lagged edges depend on each other; sum over sequences instead")
    place = {node: i for i, node in enumerate(graph.order)}
    views: list[FamilyView] = []
    for node in graph.order:
        mechanism = structure.mechanisms[node]
        parents: list[str] = []
        follows: list[Mechanism] = []
        for parent, _ in mechanism.family.parents:
            above = views[place[parent]]
            parents += above.names[:-1] if above.is_function else [parent]
            follows += (*above.follows, above.mechanism) if above.is_function else ()
        names = (*dict.fromkeys(parents), node)
        spaces = [structure.mechanisms[name].space for name in names]
        views.append(
            FamilyView(
                node,
                place[node],
                names,
                tuple(place[name] for name in names),
                mechanism,
                tuple(space.width for space in spaces),
                tuple(space.is_discrete for space in spaces),
                node in graph.hidden,
                tuple(dict.fromkeys(follows)),
            )
        )
    return tuple(views)


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
    first, label = np.unique(first_connected(len(rows), left, right), return_inverse=True)
    by_piece = np.argsort(label, kind="stable")
    piece_row = np.zeros(len(first), dtype=np.int64)
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


@dataclass(frozen=True, eq=False)
class Complete:
    """Rows of data in which a family has no unknown member.

    Attributes:
        rows: The rows (n,).
        code: The joint state of a family of categories (n,); none for other families.
        values: Of other families, all members (1, n, width).
        mask: Which cells of the node are seen, where that is not all of them (1, n, width).
    """

    rows: Tensor
    code: Tensor | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None


class TableView:
    """Rows by nodes in topological order.

    Attributes:
        families: All families.
        batch: The rows.
        seen: Nodes of which all cells are seen (N, V).
        partly: Nodes of which some are (N, V).
        codes: States of categories, zero where they are not seen or no categories (N, V).
        numbers: Coordinates of numbers side by side, after a column of zeros and one of ones; zero where not seen.
        column_of: Where each coordinate of each node stands among them.
        offsets: First row of each linear family among the equations, of which row zero is empty.
        shifts: The mean of each column of each linear family.
    """

    def __init__(self, families: Sequence[FamilyView], batch: Batch) -> None:
        self.families, self.batch = families, batch
        self.like = batch.weight
        shape = (batch.rows, len(families))
        self.seen, self.partly = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        self.codes = np.zeros(shape, dtype=np.int64)
        self.column_of: dict[tuple[int, int], int] = {}
        columns, at = [np.zeros((batch.rows, 1)), np.ones((batch.rows, 1))], 2
        for family in families:
            value, place, width = self._read(family), family.place, family.widths[-1]
            if family.categories[-1]:
                self.codes[:, place] = 0 if value is None else value.argmax(-1) * self.seen[:, place]
            else:
                columns.append(np.zeros((batch.rows, width)) if value is None else value)
                self.column_of |= {(place, cell): at + cell for cell in range(width)}
                at += width
        self.numbers: Array = np.concatenate(columns, 1)
        linear = [family for family in families if family.is_linear]
        firsts = np.cumsum([1, *(family.configurations for family in linear)]).tolist()
        self.offsets = {family.place: first for family, first in zip(linear, firsts, strict=False)}
        self.shifts = {family.place: self._shift(family) for family in linear}

    def _read(self, family: FamilyView) -> Array | None:
        """Note what is seen of a node, and read its values; zero where no category is not seen."""
        if family.node not in self.batch.values:
            return None
        cells = self.batch.mask[family.node][0].cpu().numpy()
        self.seen[:, family.place] = cells.all(-1)
        self.partly[:, family.place] = cells.any(-1) & ~self.seen[:, family.place]
        value: Array = self.batch.values[family.node][0].cpu().numpy()
        return value if family.categories[-1] else np.where(cells, value, 0.0)

    def missing(self, row: int, node: int) -> tuple[int, ...]:
        """Coordinates of a node that a row does not show."""
        mask = self.batch.mask[self.families[node].node][0, row]
        return tuple(torch.nonzero(~mask)[:, 0].tolist())

    def _shift(self, family: FamilyView) -> Tensor:
        """The mean of each column where it is seen, so that second moments lose no digits."""
        means = []
        for place, cell in family.columns:
            seen = self.seen[:, place]
            column = self.numbers[:, self.column_of[place, cell]]
            means.append(float(column[seen].mean()) if seen.any() else 0.0)
        return torch.tensor([*means, 0.0], dtype=torch.float64).to(self.like)

    def complete(self, parts: Sequence[tuple[Ints, Flags]]) -> dict[int, list[Complete]]:
        """Rows that show all of each family; linear ones that are seen in part go by themselves."""
        complete = {}
        for family in self.families:
            rows = np.concatenate([chosen[flags[:, family.place]] for chosen, flags in parts])
            part = self.partly[rows, family.place]
            each = (rows[~part], rows[part])
            complete[family.place] = [self._complete_rows(family, some) for some in each if len(some)]
        return complete

    def _complete_rows(self, family: FamilyView, rows: Ints) -> Complete:
        index = torch.from_numpy(rows)
        if family.is_table:
            sizes = dict(zip(family.members, family.widths, strict=True))
            return Complete(index, torch.from_numpy(self.code(rows, list(sizes.items()))))
        values, mask = self.shown(family, index)
        return Complete(index, values=values, mask=mask)

    def shown(self, family: FamilyView, rows: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Values of all members of a family in some rows, and which cells of its node are seen, unless all are."""
        values = {name: self.batch.values[name] for name in family.names}
        mask = self.batch.mask[family.node]
        if len(rows) < self.batch.rows:
            values = {name: value.index_select(1, rows) for name, value in values.items()}
            mask = mask.index_select(1, rows)
        return values, None if bool(mask.all()) else mask

    def code(self, rows: Ints, members: Sequence[tuple[int, int]]) -> Ints:
        """Joint states of some categories, the last fastest."""
        code = np.zeros(len(rows), dtype=np.int64)
        for place, size in members:
            code = code * size + self.codes[rows, place]
        return code

    def count_points(self, family: FamilyView, most: int) -> int:
        """Number of points of a count; those that are never large need fewer."""
        if family.node not in self.batch.values:
            return most
        enough = 1.5 * float(self.batch.values[family.node].max()) + SMALLEST_WINDOW
        return most // 2 if enough <= most // 2 else most


def piece_hashes(table: TableView, rows: Ints, pieces: Pieces) -> tuple[Hashes, Hashes]:
    """Numbers that are equal for pieces of one kind, and for pieces that also show the same.

    Args:
        table: All rows.
        rows: Numbers of the rows whose pieces they are.
        pieces: Their pieces.
    """
    names = np.random.default_rng(0).integers(2**63, size=(2, len(table.families)), dtype=np.uint64)
    kind = np.zeros(len(pieces.row), dtype=np.uint64)
    np.add.at(kind, pieces.cell_piece, hash_array(names[0][pieces.cell_node]))
    np.add.at(kind, pieces.touch_piece, hash_array(names[1][pieces.touch_node]))
    data_row = rows[pieces.row[pieces.cell_piece]]
    for node in np.flatnonzero(
        table.partly.any(0)
    ).tolist():  # vectors that miss different coordinates are of different kinds
        here = np.flatnonzero((pieces.cell_node == node) & table.partly[data_row, node])
        missing = ~table.batch.mask[table.families[node].node][0].cpu().numpy()[data_row[here]]
        cells = hash_array(names[0][node] + np.arange(1, missing.shape[1] + 1, dtype=np.uint64))
        np.add.at(kind, pieces.cell_piece[here], hash_array(np.where(missing, cells, np.uint64(0)).sum(1)))
    evidence = np.zeros(len(pieces.touch_node), dtype=np.uint64)
    data_row = rows[pieces.row[pieces.touch_piece]]
    by_node = np.argsort(pieces.touch_node, kind="stable")
    ends = np.searchsorted(pieces.touch_node[by_node], np.arange(len(table.families) + 1))
    for family in table.families:
        here = by_node[ends[family.place] : ends[family.place + 1]]
        shown = data_row[here]
        if family.is_table:
            shown = table.code(shown, list(zip(family.members, family.widths, strict=True)))
        evidence[here] = hash_array(shown.astype(np.uint64) + names[1][family.place])
    piece = kind.copy()
    np.add.at(piece, pieces.touch_piece, hash_array(evidence))
    return kind, piece
