"""What sums may cost: exact ones first, with coarser points where that is enough, and then approximate ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from otpdag.backward.elimination.row_layout import EliminationOptions, Layout, lay_out, lay_out_by_first
from otpdag.data import Batch
from otpdag.errors import DataError, ModelError
from otpdag.structure import Structure

__all__ = ["Budget", "lay_out_within", "told"]

USUAL_TABLE = 2**20  # entries of a table, before coarser points are tried
COARSE, COARSEST = (16, 32), (9, 18)  # points of a number and of a count, where many meet
SPLIT_TABLES = (2**12, 2**9, 2**6)  # entries of tables of rows that are approximated: the largest that are affordable
AFFORDABLE = 2**23  # entries of all tables in one evaluation of approximate sums
LARGE_ROW = 2**15  # entries of all tables of a row, from which on many rows are too many


@dataclass(frozen=True)
class Budget:
    """What the sums over a table's rows may take.

    Args:
        largest_table: Most entries of one table of one row; rows that need more are approximated.
        memory: Bytes that the tables of one block of rows may take.
        entries: Most entries of all tables of all rows in one evaluation of exact sums, where rows need large ones.
        approximate: Whether rows that need a larger table are approximated rather than refused.
        finest: Points of a number and of a count that are tried first, if others than usual.
        merged: Whether pieces that show the same are one piece with a weight, where they are approximated.
        fine_table: Entries of one table of one row, beyond which points are as many as posteriors ask for; None leaves
            them alone.
    """

    largest_table: int = 2**23
    memory: int = 2**27
    entries: int = 2**31
    approximate: bool = True
    finest: tuple[int, int] | None = None
    merged: bool = True
    fine_table: int | None = None

    def exact(self) -> Iterator[EliminationOptions]:
        """Sizes that are tried in turn: where many numbers meet, coarser points cost far less than larger tables."""
        table = min(USUAL_TABLE, self.largest_table)
        usual = EliminationOptions(largest_table=table, memory=self.memory, fine_table=self.fine_table)
        if self.finest is not None:
            yield replace(usual, grid=self.finest[0], count_points=self.finest[1])
        yield usual
        coarse = usual
        if self.fine_table is None:
            coarse = replace(usual, grid=COARSE[0], count_points=COARSE[1])
            yield coarse
        yield replace(coarse, largest_table=self.largest_table)

    def approximated(self, points: tuple[int, int], table: int, *, costly: bool) -> EliminationOptions:
        """The same beyond exact sums; where these are not too large but ``costly``, all larger tables are split."""
        return EliminationOptions(
            grid=points[0],
            count_points=points[1],
            largest_table=table if costly else self.largest_table,
            split_table=table,
            memory=self.memory,
            merged=self.merged,
        )


def lay_out_within(structure: Structure, batch: Batch, budget: Budget, *, keep: Collection[str] = ()) -> Layout | None:
    """Lay rows out by exact sums if the budget allows it, else by approximate ones; None if neither serves.

    >>> import torch
    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> graph = otp.Graph([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("d", "x")], hidden=list("abcd"))
    >>> structure = Structure.bind(graph, {node: m.Bernoulli() for node in "abcdx"})
    >>> x = torch.eye(2, dtype=torch.float64)[torch.tensor([0, 1])].unsqueeze(0)
    >>> batch = Batch({"x": x}, {"x": x[..., :1] >= 0}, torch.ones(1, 2, dtype=torch.float64))
    >>> lay_out_within(structure, batch, Budget()).beyond is None
    True
    """
    exact = lay_out_by_first(structure, batch, tuple(budget.exact()), keep=keep)
    costly = exact is not None and exact.elements > max(budget.entries, LARGE_ROW * batch.rows)
    if not budget.approximate or (exact is not None and not costly):
        return exact
    for points in (COARSE, COARSEST):  # the coarsest only where single families are too large otherwise
        approximate: Layout | None = None
        for table in SPLIT_TABLES:
            try:
                approximate = lay_out(structure, batch, budget.approximated(points, table, costly=costly), keep=keep)
            except (ModelError, DataError):
                continue
            if sum(block.elements for block in approximate.blocks if not block.is_exact) <= AFFORDABLE:
                break
        if approximate is not None:
            return approximate
    return exact


def told(layout: Layout) -> str:
    """What exact sums over a layout's rows would take, and what is done instead."""
    beyond = layout.beyond
    if beyond is None:
        return "all sums are exact"
    nodes = ", ".join(map(repr, beyond.nodes[:6])) + (" and more" if len(beyond.nodes) > 6 else "")
    return (
        f"sums over what {beyond.rows} of {layout.batch.rows} rows do not show are approximate: exact ones need a "
        f"table of {beyond.table:.3g} entries for one row ({len(beyond.nodes)} nodes meet: {nodes}) and "
        f"{beyond.entries:.3g} entries in all; instead, copies of nodes exchange messages (generalised belief "
        f"propagation) in tables of at most {layout.largest_table} entries, {layout.elements:.3g} in all"
    )
