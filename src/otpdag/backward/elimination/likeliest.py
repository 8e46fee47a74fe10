"""The joint state of all unknown categories of a row that is more probable than any other (max-product)."""

from __future__ import annotations

import torch
from torch import Tensor

from otpdag.backward.elimination.posterior import drawn_states
from otpdag.backward.elimination.random_numbers import RandomNumbers
from otpdag.backward.elimination.row_layout import Layout
from otpdag.backward.elimination.sums import Factors, Tempering
from otpdag.errors import ModelError
from otpdag.structure import Naturals

__all__ = ["likeliest_states"]


def likeliest_states(naturals: Naturals, layout: Layout) -> tuple[dict[str, Tensor], Tensor]:
    """One-hot states (N, K) of every category, seen ones as they are, and the log-density of each row with them.

    Linear normal numbers are integrated out before the largest entry is sought.

    Args:
        naturals: Parameters of one replica (1, ...).
        layout: Rows, laid out with ``keep`` of all unknown categories.
    """
    if not all(block.is_exact for block in layout.blocks):
        raise ModelError("the most probable explanation needs exact sums; those of some rows are approximate")
    if layout.has_points:
        raise ModelError(
            "the most probable explanation needs unknown numbers to be linear and normal; one of them stands on points"
        )
    values: dict[str, Tensor] = {}
    for family in layout.families:
        if family.categories[-1]:
            seen = layout.batch.values.get(family.node)
            empty = torch.zeros(layout.batch.rows, family.widths[-1]).to(layout.batch.weight)
            values[family.node] = empty if seen is None else seen[0].clone()
    total = torch.zeros(layout.batch.rows).to(layout.batch.weight)
    numbers = RandomNumbers(torch.Generator().manual_seed(0))  # conditionals are one or zero: nothing is left to chance
    with torch.no_grad():
        factors = Factors(layout, naturals, Tempering(), largest=True)
        for complete in layout.complete:
            total[complete.rows] += factors.complete_log_prob(complete)[0]
        for block in layout.blocks:
            evaluated = factors.evaluate(block)
            total.index_add_(0, block.piece_row, evaluated.log_z[0, block.piece])
            cells = drawn_states(evaluated, 1, numbers)
            for family in layout.families:
                here = torch.nonzero(cells.node == family.place)[:, 0]
                if family.categories[-1] and len(here):
                    one_hot = torch.nn.functional.one_hot(cells.states[here, 0], family.widths[-1])
                    values[family.node][cells.row[here]] = one_hot.to(total)
    return values, total
