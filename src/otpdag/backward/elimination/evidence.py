r"""The evidence of rows under the model, its gradient, and the expected statistics of every family.

The evidence of a row is the log-density of what it shows, everything unknown integrated out. Its sum over rows has an
exact gradient without differentiating through the sums (:mod:`~otpdag.backward.elimination.family_statistics`): one
pass without gradients gives beliefs, then each family's expected log-density is differentiated alone, chunk by chunk.
The memory that this takes does not grow with rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from otpdag.backward.elimination.blocks import Block, PointsKey
from otpdag.backward.elimination.clouds import Cloud
from otpdag.backward.elimination.expected_statistics import Slopes, Summary
from otpdag.backward.elimination.family_statistics import Statistics
from otpdag.backward.elimination.points import Placement
from otpdag.backward.elimination.resizing import FINER
from otpdag.backward.elimination.row_layout import Layout
from otpdag.backward.elimination.sum_product import taken
from otpdag.backward.elimination.sums import Factors, Tempering
from otpdag.structure import Naturals

__all__ = ["Expectations", "expectations", "log_evidence", "moved", "restless_copies", "total_evidence"]

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
    >>> from otpdag.backward.elimination import lay_out
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
