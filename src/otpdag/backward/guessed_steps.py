"""A first guess of what sequences do not show: that of tables, with earlier values as further columns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from otpdag.backward.guessed_rows import complete_table
from otpdag.data.sequences import SequenceBatch
from otpdag.structure import Structure, lag_name

__all__ = ["complete_steps", "step_weights"]


def complete_steps(
    structure: Structure,
    batch: SequenceBatch,
    generator: np.random.Generator,
    *,
    first: bool,
    reach: int = 0,
    even_categories: bool = False,
) -> dict[str, Tensor]:
    """Completed steps (M, width) with earlier values under their own names.

    With a ``reach``, hidden numbers are averaged over so many steps around; with ``even_categories``, hidden categories
    are not guessed (see :func:`complete_table`).
    """
    completed = complete_table(structure, batch.steps, 0, generator, first=first, even_categories=even_categories)
    if reach:
        completed = _smoothed(structure, batch, completed, reach)
    lags = ((edge.parent, edge.by) for edge in structure.graph.lags)
    earlier = {lag_name(node, by): batch.lagged(completed[node].unsqueeze(0), by)[0] for node, by in lags}
    return {**completed, **earlier}


def _smoothed(
    structure: Structure, batch: SequenceBatch, completed: dict[str, Tensor], reach: int
) -> dict[str, Tensor]:
    """Guessed hidden numbers averaged over neighbouring steps, and scaled so that what is new in a step has spread one.

    The guess of a number from its own step alone explains its children without noise, a trap that no descent leaves.
    """
    smooth = dict(completed)
    for node in structure.graph.hidden:
        if not structure.mechanisms[node].space.is_unbounded or not structure.longest_lag(node):
            continue
        left = batch.lengths.repeat_interleave(batch.lengths) - 1 - batch.times
        shifts = [torch.arange(batch.rows) + torch.minimum(left, torch.full_like(left, k)) for k in range(1, reach + 1)]
        shifts += [torch.arange(batch.rows) - batch.times.clamp(max=k) for k in range(1, reach + 1)]
        mean = torch.stack([completed[node], *(completed[node][at] for at in shifts)]).mean(0)
        before = batch.lagged(mean.unsqueeze(0), 1)[0]
        slope = (mean * before).sum(0) / (before**2).sum(0).clamp(min=1e-12)
        fresh = (mean - slope * before)[batch.times > 0]
        spread = fresh.std(0) if len(fresh) > 1 else torch.ones_like(slope)
        smooth[node] = mean / torch.where(spread > 1e-6, spread, torch.ones_like(spread))
    return smooth


def step_weights(structure: Structure, batch: SequenceBatch) -> dict[str, Tensor]:
    """One for the steps that a mechanism makes, zero for first steps (or, of ``z[0]``, for all others): (M,)."""
    weights = {}
    for name in structure.mechanisms:
        base = structure.base(name)
        lag = structure.longest_lag(base)
        made = batch.times >= lag if name == base else batch.times < lag
        if base in batch.steps.mask:
            made = made & batch.steps.mask[base][0].all(-1)
        weights[name] = made.to(batch.steps.weight)
    return weights
