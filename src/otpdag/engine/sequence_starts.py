"""Data-driven starts of sequences: the guesses of tables, with earlier values as further columns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from otpdag.data.sequences import SequenceBatch
from otpdag.engine.starts import complete_table
from otpdag.structure import Structure, lag_name

__all__ = ["completed_start", "lay_out_steps"]


def lay_out_steps(structure: Structure, batch: SequenceBatch, seed: int) -> Structure:
    """The structure in the units of the completed steps."""
    completed = complete_table(structure, batch.steps, 0, np.random.default_rng([seed, 2**20]), first=True)
    values = _with_lags(structure, batch, completed)
    scaled = {
        name: mechanism.scaled_to(
            values[structure.base(name)], structure.parents(name, values), _weight(structure, batch, name)
        )
        for name, mechanism in structure.mechanisms.items()
    }
    return structure.with_mechanisms(scaled)


def completed_start(
    structure: Structure, batch: SequenceBatch, seed: int, *, first: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Raw parameters (1, ...), each mechanism fitted to the completed steps that it makes; and those steps."""
    completed = complete_table(structure, batch.steps, 0, np.random.default_rng(seed), first=first)
    completed = _smoothed(structure, batch, completed, 1 if first else 1 + seed % 4)
    values = _with_lags(structure, batch, completed)
    naturals = {}
    for name, mechanism in structure.mechanisms.items():
        weight = _weight(structure, batch, name)
        start = mechanism.start(values[structure.base(name)], structure.parents(name, values), weight)
        settled = structure.with_settings(name, start)
        naturals[name] = {key: value.unsqueeze(0) for key, value in settled.items()}
    theta = structure.raw(naturals)
    generator = torch.Generator().manual_seed(seed)
    for name, mechanism in structure.mechanisms.items():
        for key, value in mechanism.initial_raw(1, generator).items():
            theta.setdefault(structure.keys[name][key], value)
    for key, parameter in structure.parameters().items():
        theta.setdefault(key, torch.zeros(1, *parameter.shape, dtype=torch.float64))
    return {key: value.to(batch.steps.weight) for key, value in theta.items()}, completed


def _smoothed(
    structure: Structure, batch: SequenceBatch, completed: dict[str, Tensor], reach: int
) -> dict[str, Tensor]:
    """Guessed hidden numbers averaged over neighbouring steps, and scaled so that what is new in a step has spread one.

    The guess of a number from its own step alone explains its children without noise, a trap that no descent leaves.
    """
    smooth = dict(completed)
    left = batch.lengths.repeat_interleave(batch.lengths) - 1 - batch.times
    for node in structure.graph.hidden:
        if not structure.mechanisms[node].space.is_unbounded or not structure.longest_lag(node):
            continue
        shifts = [torch.arange(batch.rows) + torch.minimum(left, torch.full_like(left, k)) for k in range(1, reach + 1)]
        shifts += [torch.arange(batch.rows) - batch.times.clamp(max=k) for k in range(1, reach + 1)]
        mean = torch.stack([completed[node], *(completed[node][at] for at in shifts)]).mean(0)
        before = batch.lagged(mean.unsqueeze(0), 1)[0]
        slope = (mean * before).sum(0) / (before**2).sum(0).clamp(min=1e-12)
        fresh = (mean - slope * before)[batch.times > 0]
        spread = fresh.std(0) if len(fresh) > 1 else torch.ones_like(slope)
        smooth[node] = mean / torch.where(spread > 1e-6, spread, torch.ones_like(spread))
    return smooth


def _with_lags(structure: Structure, batch: SequenceBatch, completed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    lagged = {
        lag_name(edge.parent, edge.by): batch.lagged(completed[edge.parent].unsqueeze(0), edge.by)[0]
        for edge in structure.graph.lags
    }
    return {**completed, **lagged}


def _weight(structure: Structure, batch: SequenceBatch, name: str) -> Tensor:
    """One for the steps that a mechanism makes, zero for first steps (or, of ``z[0]``, for all others)."""
    base = structure.base(name)
    lag = structure.longest_lag(base)
    made = batch.times >= lag if name == base else batch.times < lag
    if base in batch.steps.mask:
        made = made & batch.steps.mask[base][0].all(-1)
    return made.to(batch.steps.weight)
