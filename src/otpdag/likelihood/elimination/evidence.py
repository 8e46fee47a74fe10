r"""The evidence of rows under the model, its gradient, and the expected statistics of every family.

The evidence of a row is the log-density of what it shows, everything unknown integrated out. Its sum over rows has an
exact gradient without differentiating through the sums (:mod:`~otpdag.likelihood.elimination.family_statistics`): one
pass without gradients gives beliefs, then each family's expected log-density is differentiated alone, chunk by chunk.
The memory that this takes does not grow with rows.

What sums may cost: exact ones first, with coarser points where that is enough, and then approximate ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.errors import ModelError
from otpdag.likelihood.elimination.blocks import Block, PointsKey
from otpdag.likelihood.elimination.expected_statistics import Slopes, Summary
from otpdag.likelihood.elimination.family_statistics import Statistics
from otpdag.likelihood.elimination.points import FINER, Cloud, Placement
from otpdag.likelihood.elimination.row_layout import EliminationOptions, Layout, try_layout
from otpdag.likelihood.elimination.sum_product import taken
from otpdag.likelihood.elimination.sums import Factors, Tempering, piece_weights
from otpdag.structure import Naturals, Structure

LIKELIHOOD = Tempering()
CLOSE_ENOUGH = 1e-4  # difference of a row's evidence between two numbers of points
MOST_ROUNDS = 12  # of placing points: a window doubles where it is too narrow


@dataclass(frozen=True, eq=False)
class Expectations:
    """What rows say of a model under the backward map.

    Attributes:
        pieces: Weighed sum of the log-sums of all pieces (R,).
        families: The statistics of each node's family.
        power: Power of the densities of complete families.
        slopes: Of the nodes that were sampled, the gradient of the expected log-density of all rows that do not show
            their family, in each natural parameter (R, ...).
    """

    pieces: Tensor
    families: Mapping[str, tuple[Statistics, ...]]
    power: float = 1.0
    slopes: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)


def log_evidence(naturals: Naturals, layout: Layout, tempering: Tempering = LIKELIHOOD) -> Tensor:
    """Log-density of what each row shows (R, N), without gradients.

    >>> import otpdag as otp
    >>> from otpdag import mechanisms as m
    >>> from otpdag.likelihood.elimination import lay_out
    >>> from otpdag.data import Batch
    >>> from otpdag.structure import Structure
    >>> graph = otp.Graph([("f", "x")], hidden=["f"])
    >>> structure = Structure.bind(graph, {"f": m.Normal(), "x": m.Normal(loc=0.0, weight=1.0, scale=1.0)})
    >>> x = torch.zeros(1, 1, 1, dtype=torch.float64)
    >>> batch = Batch({"x": x}, {"x": x == 0}, torch.ones(1, 1, dtype=torch.float64))
    >>> found = log_evidence(structure.naturals({}), lay_out(structure, batch))
    >>> torch.allclose(found, torch.distributions.Normal(x, 2**0.5).log_prob(x))
    True
    """
    with torch.no_grad():
        factors = Factors(layout, naturals, tempering)
        total = torch.zeros(factors.replicas, layout.batch.rows).to(layout.batch.weight)
        for complete in layout.complete:
            total[:, complete.rows] += tempering.power * factors.complete_log_prob(complete)
        for block in layout.blocks:
            total.index_add_(1, block.piece_row, factors.evaluate(block).log_z[:, block.piece])
        return total


def expectations(
    naturals: Naturals,
    layout: Layout,
    weight: Tensor | None = None,
    tempering: Tempering = LIKELIHOOD,
    *,
    sampled: Mapping[str, int] | None = None,
    complete: Mapping[int, Tensor] | None = None,
) -> Expectations:
    """Sum the pieces, and summarise the rows for each family.

    Args:
        naturals: Parameters (R, ...).
        layout: The rows.
        weight: Row weights (1 or R, N); by default those of the batch.
        tempering: How likelihood and prior are weighed against each other.
        sampled: Nodes of which a sample of so many entries stands for the tables of all rows; the gradient of those
            that do not show the family is still that of all.
        complete: The :func:`complete_sums` of the rows and weights, where they are known.
    """
    weight = layout.batch.weight if weight is None else weight
    sampled = {} if sampled is None else sampled
    replicas = max(max((len(v) for params in naturals.values() for v in params.values()), default=1), len(weight))
    slopes = Slopes(
        {
            (node, name): value.detach().expand(replicas, *value.shape[1:]).clone().requires_grad_()
            for node in sampled
            for name, value in naturals[node].items()
        }
    )
    with torch.no_grad():
        leaves = _at_leaves(naturals, slopes)
        summary = Summary(leaves, layout, weight, tempering, slopes=slopes, sampled=sampled, complete=complete)
        return Expectations(summary.pieces, summary.families(), tempering.power, slopes.total)


def _at_leaves(naturals: Naturals, slopes: Slopes) -> dict[str, dict[str, Tensor]]:
    """Parameters with the leaves of a gradient in their places."""
    return {
        node: {name: slopes.leaves.get((node, name), value.detach()) for name, value in params.items()}
        for node, params in naturals.items()
    }


def total_evidence(
    naturals: Naturals,
    layout: Layout,
    weight: Tensor | None = None,
    tempering: Tempering = LIKELIHOOD,
    complete: Mapping[int, Tensor] | None = None,
) -> Tensor:
    """Weighed sum of the rows' evidence (R,), with an exact gradient in the parameters (of first order only).

    Args:
        naturals: Parameters (R, ...).
        layout: The rows.
        weight: Row weights (1 or R, N); by default those of the batch.
        tempering: How likelihood and prior are weighed against each other.
        complete: The :func:`complete_sums` of the rows and weights, where they are known.
    """
    weight = layout.batch.weight if weight is None else weight
    replicas = max(Factors(layout, naturals, tempering).replicas, len(weight))
    wanted = {
        (node, name): value.expand(replicas, *value.shape[1:])
        for node, params in naturals.items()
        for name, value in params.items()
        if value.requires_grad and torch.is_grad_enabled()
    }
    slopes = Slopes({key: value.detach().requires_grad_() for key, value in wanted.items()})
    leaves = _at_leaves(naturals, slopes)
    with torch.no_grad():
        none = dict.fromkeys(naturals, 0)
        summary = Summary(leaves, layout, weight, tempering, slopes=slopes, sampled=none, complete=complete)
        families = summary.families()
    value = summary.pieces
    for node, statistics in families.items():
        with torch.set_grad_enabled(bool(wanted)):
            for shown, expected in (part for one in statistics for part in one.parts(leaves[node])):
                value += tempering.power * shown.detach()
                slopes.add([node], [tempering.power * shown + expected], [torch.ones_like(expected)])
    return _WithGradient.apply(value, list(slopes.total.values()), *wanted.values())


def family_beliefs(
    naturals: Naturals, layout: Layout, weight: Tensor, tempering: Tempering, places: Sequence[int]
) -> dict[int, Tensor]:
    """Weighed posterior probabilities of the joint states of families of categories: (R, *parents, states) each."""
    factors = Factors(layout, naturals, tempering)
    shape = (max(factors.replicas, len(weight)),)
    total = {n: weight.new_zeros(*shape, *layout.families[n].widths) for n in places}
    for block in layout.blocks:
        sources = [source for source in block.tables if source.family in total]
        beliefs = factors.evaluate(block).beliefs(piece_weights(block, weight)) if sources else {}
        for source in sources:
            total[source.family] += source.by_member(layout.families[source.family], beliefs)
    return total


def restless_copies(naturals: Naturals, layout: Layout, tempering: Tempering = LIKELIHOOD) -> tuple[int, int]:
    """Pairs of copies whose messages had not come to rest at these parameters, and pairs of copies in all."""
    blocks = [block for block in layout.blocks if not block.is_exact]
    with torch.no_grad():
        factors = Factors(layout, naturals, tempering)
        restless = sum(factors.evaluate(block).restless for block in blocks)
    return restless, sum(len(split.piece) for block in blocks for split in block.splits)


class _WithGradient(torch.autograd.Function):
    """A value (R,) whose gradient in some inputs (R, ...) is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        saved = (outer.reshape(-1, *[1] * (gradient.ndim - 1)) * gradient for gradient in ctx.saved_tensors)
        return (None, None, *saved)


def moved(naturals: Naturals, layout: Layout, tempering: Tempering = LIKELIHOOD) -> Layout:
    """The same layout with the points of numbers and counts where their posteriors at these parameters are.

    The points then serve as many replicas as the parameters have.
    """
    if not layout.has_points:
        return layout
    with torch.no_grad():
        factors = Factors(layout, naturals, tempering)
        blocks: list[Block] = []
        for block in layout.blocks:
            placed = _moved_block(factors, block)
            blocks += _resized(factors, placed) if placed.is_coarse else [placed]
        return replace(layout, blocks=tuple(blocks))


def _resized(factors: Factors, coarse: Block) -> list[Block]:
    """Give every piece as many points as it needs: those of its posterior, and more where more would tell more."""
    layout = factors.layout
    blocks = layout.resized(coarse)
    finer = _log_z(factors, layout.resized(coarse, by=FINER), coarse)
    unsure = ((finer - _log_z(factors, blocks, coarse)).abs().amax(0) > CLOSE_ENOUGH).cpu().numpy()
    if unsure.any():
        blocks = layout.resized(coarse, unsure=unsure)
    return [_moved_block(factors, block) for block in blocks]


def _log_z(factors: Factors, blocks: Sequence[Block], coarse: Block) -> Tensor:
    """Log-sums of the pieces of a coarse block, each of one row and now in one of several blocks."""
    log_z = torch.zeros(factors.replicas, coarse.distinct).to(factors.layout.batch.weight)
    for block in blocks:
        assert block.origin is not None
        log_z[:, block.origin] = factors.evaluate(block).log_z
    return log_z


def _moved_block(factors: Factors, block: Block) -> Block:
    """Place points until no window changes."""
    widened: dict[PointsKey, Tensor] = {}
    for _ in range(MOST_ROUNDS if block.placements else 0):
        evaluated = factors.evaluate(block)
        beliefs = evaluated.beliefs(torch.ones(1, block.distinct).to(evaluated.log_z))
        placements: dict[PointsKey, Placement | Cloud] = {}
        settled = True
        for source in block.lengths:
            belief = taken(beliefs, source.sizes, source.start, source.count, source.sizes)
            moved_one = block.placements[source.key].moved(belief, widened.get(source.key))
            placements[source.key], widened[source.key], enough = moved_one
            settled = settled and enough
        block = replace(block, placements=placements)
        if settled:
            break
    return block


USUAL_TABLE = 2**20  # entries of a table, before coarser points are tried
USUAL, COARSE, COARSEST = (24, 48), (16, 32), (9, 18)  # points of a number and of a count; fewer where many meet
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
        points: Points of a number and of a count that are tried first.
        merged: Whether pieces that show the same are one piece with a weight, where they are approximated.
        fine_table: Entries of one table of one row, beyond which points are as many as posteriors ask for; None leaves
            them alone.
        vector_points: Points of a vector.
        integrate: Whether linear normal numbers are integrated exactly.
    """

    largest_table: int = 2**23
    memory: int = 2**27
    entries: int = 2**31
    approximate: bool = True
    points: tuple[int, int] = USUAL
    merged: bool = True
    fine_table: int | None = None
    vector_points: int = 512
    integrate: bool = True

    def exact(self) -> Iterator[EliminationOptions]:
        """Sizes that are tried in turn: where many numbers meet, coarser points cost far less than larger tables."""
        table = min(USUAL_TABLE, self.largest_table)
        first = EliminationOptions(
            *self.points,
            vector_points=self.vector_points,
            largest_table=table,
            memory=self.memory,
            fine_table=self.fine_table,
            integrate=self.integrate,
        )
        yield first
        usual = replace(first, grid=min(USUAL[0], first.grid), count_points=min(USUAL[1], first.count_points))
        if usual != first:
            yield usual
        coarse = usual
        if self.fine_table is None:
            coarse = replace(usual, grid=min(COARSE[0], usual.grid), count_points=min(COARSE[1], usual.count_points))
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
            vector_points=self.vector_points,
            integrate=self.integrate,
        )


def lay_out_within(structure: Structure, batch: Batch, budget: Budget, *, keep: Collection[str] = ()) -> Layout:
    """Lay rows out by exact sums if the budget allows it, else by approximate ones.

    Raises:
        ModelError: Neither serves.

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
    exact = _by_first(structure, batch, budget.exact(), keep)
    costly = not exact.refused and exact.elements > max(budget.entries, LARGE_ROW * batch.rows)
    found = exact
    if budget.approximate and (exact.refused or costly):
        for points in (COARSE, COARSEST):  # the coarsest only where single families are too large otherwise
            choices = (budget.approximated(points, table, costly=costly) for table in SPLIT_TABLES)
            found = _by_first(structure, batch, choices, keep, affordable=AFFORDABLE)
            if not found.refused:
                break
    found = exact if found.refused else found
    if found.refused:
        raise ModelError(found.refused)
    return found


def _by_first(
    structure: Structure,
    batch: Batch,
    choices: Iterable[EliminationOptions],
    keep: Collection[str],
    affordable: float = math.inf,
) -> Layout:
    """Lay the rows out by the first options that serve, with approximate sums of so many entries; else by the last.

    A few rows in which several numbers meet may need larger tables, or coarser points, than all others.
    """
    found: Layout | None = None
    for options in choices:
        tried = try_layout(structure, batch, options, keep=keep)
        if tried.refused and found is not None:
            continue
        found = tried
        split = sum(block.elements for block in tried.blocks if not block.is_exact)
        if not tried.refused and split <= affordable:
            break
    assert found is not None, "there is at least one choice"
    return found


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
