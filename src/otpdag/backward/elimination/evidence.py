r"""The evidence of rows under the model, its gradient, and the expected statistics of every family.

The evidence of a row is the log-density of what it shows, everything unknown integrated out. Its sum over rows has an
exact gradient without differentiating through the sums (:mod:`~otpdag.backward.elimination.family_statistics`): one
pass without gradients gives beliefs, then each family's expected log-density is differentiated alone, chunk by chunk.
The memory that this takes does not grow with rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from otpdag.backward.elimination.blocks import Block
from otpdag.backward.elimination.clouds import Cloud
from otpdag.backward.elimination.family_statistics import Statistics
from otpdag.backward.elimination.points import Placement
from otpdag.backward.elimination.row_layout import Layout
from otpdag.backward.elimination.summary import Slopes, Summary
from otpdag.backward.elimination.sums import Factors, Tempering, taken
from otpdag.structure import Naturals

__all__ = ["Expectations", "expectations", "log_evidence", "moved", "total_evidence"]

LIKELIHOOD = Tempering()
MOST_ROUNDS = 12  # of placing points: a window doubles where it is too narrow


@dataclass(frozen=True, eq=False)
class Expectations:
    """What rows say of a model under the backward map.

    Attributes:
        pieces: Weighed sum of the log-sums of all pieces (R,).
        families: The statistics of each node's family.
        power: Power of the densities of complete families.
    """

    pieces: Tensor
    families: Mapping[str, tuple[Statistics, ...]]
    power: float = 1.0


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
    naturals: Naturals, layout: Layout, weight: Tensor | None = None, tempering: Tempering = LIKELIHOOD
) -> Expectations:
    """Sum the pieces, and summarise the rows for each family.

    Args:
        naturals: Parameters (R, ...).
        layout: The rows.
        weight: Row weights (1 or R, N); by default those of the batch.
        tempering: How likelihood and prior are weighed against each other.
    """
    with torch.no_grad():
        summary = Summary(naturals, layout, layout.batch.weight if weight is None else weight, tempering)
        families = summary.families()
        return Expectations(summary.pieces, families, tempering.power)


def total_evidence(
    naturals: Naturals, layout: Layout, weight: Tensor | None = None, tempering: Tempering = LIKELIHOOD
) -> Tensor:
    """Weighed sum of the rows' evidence (R,), with an exact gradient in the parameters (of first order only).

    Args:
        naturals: Parameters (R, ...).
        layout: The rows.
        weight: Row weights (1 or R, N); by default those of the batch.
        tempering: How likelihood and prior are weighed against each other.
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
    leaves = {
        node: {name: slopes.leaves.get((node, name), value.detach()) for name, value in params.items()}
        for node, params in naturals.items()
    }
    with torch.no_grad():
        summary = Summary(leaves, layout, weight, tempering, slopes)
        families = summary.families()
    value = summary.pieces
    for node, statistics in families.items():
        with torch.set_grad_enabled(bool(wanted)):
            for complete, expected in (part for one in statistics for part in one.parts(leaves[node])):
                value += tempering.power * complete.detach()
                slopes.add([node], [tempering.power * complete + expected], [torch.ones_like(expected)])
    return _WithGradient.apply(value, list(slopes.total.values()), *wanted.values())


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
        return replace(layout, blocks=tuple(_moved_block(factors, block) for block in layout.blocks))


def _moved_block(factors: Factors, block: Block) -> Block:
    """Place points until no window changes."""
    widened: dict[int, Tensor] = {}
    for _ in range(MOST_ROUNDS if block.placements else 0):
        evaluated = factors.evaluate(block)
        beliefs = evaluated.beliefs(torch.ones(1, block.distinct).to(evaluated.log_z))
        placements: dict[int, Placement | Cloud] = {}
        settled = True
        for source in block.lengths:
            belief = taken(beliefs, source.sizes, source.start, source.count, source.sizes)
            moved_one = block.placements[source.node].moved(belief, widened.get(source.node))
            placements[source.node], widened[source.node], enough = moved_one
            settled = settled and enough
        block = replace(block, placements=placements)
        if settled:
            break
    return block
