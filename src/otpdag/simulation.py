"""Data that a model makes: complete, with interventions, or with the gaps and covariates of given data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from otpdag.data import Batch
from otpdag.data.sequences import SequenceBatch
from otpdag.errors import ModelError
from otpdag.noise import draw_noise
from otpdag.structure import Naturals, Structure, lag_name


def ancestral(
    structure: Structure,
    naturals: Naturals,
    rows: int,
    generator: torch.Generator,
    *,
    do: Mapping[str, Tensor | Callable[[Mapping[str, Tensor]], Tensor]] | None = None,
    only: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Draw every node from its mechanism, in topological order; nodes in ``do`` are set instead: (1, rows, width).

    A function in ``do`` is given what was drawn so far, the node itself as it would have been included. ``only`` some
    nodes are drawn, with their ancestors, where it names them.
    """
    values: dict[str, Tensor] = {}
    above = None if only is None else {name for node in only for name in (node, *structure.graph.ancestors(node))}
    for node in structure.graph.order:
        if above is not None and node not in above:
            continue
        action = None if do is None else do.get(node)
        if isinstance(action, Tensor):
            values[node] = action.expand(-1, rows, -1)
            continue
        values[node] = draw(structure, naturals, node, values, (rows,), generator)
        if action is not None:
            values[node] = action(values)
    return values


def ancestral_sequences(
    structure: Structure,
    naturals: Naturals,
    sequences: int,
    length: int,
    generator: torch.Generator,
    *,
    do: Mapping[str, Tensor] | None = None,
    past: Sequence[Mapping[str, Tensor]] = (),
    warm_up: int = 100,
) -> dict[str, Tensor]:
    """Draw sequences step by step: (1, sequences, length, width); nodes in ``do`` are set instead.

    With a ``past``, all nodes (1, sequences, width) in the last steps, the latest last, sequences go on from there. An
    observed node that depends on earlier steps has no distribution of its own for the first ones: they are what a
    hundred steps from nowhere lead to.
    """
    graph, do = structure.graph, do or {}
    # what a start from zero leaves of itself is 3e-5 even where nine tenths carry over from step to step
    warm = warm_up if not past and any(structure.longest_lag(n) for n in graph.observed if n not in do) else 0
    kept: list[dict[str, Tensor]] = []
    longest = max((edge.by for edge in graph.lags), default=0)
    for step in range(-warm, length):
        values: dict[str, Tensor] = {}
        for edge in graph.lags:
            known = past[-edge.by] if edge.by <= len(past) else None
            width = structure.mechanisms[edge.parent].space.width
            nothing = torch.zeros(1, sequences, width, dtype=torch.float64)
            values[lag_name(edge.parent, edge.by)] = nothing if known is None else known[edge.parent]
        for node in graph.order:
            if node in do:
                values[node] = do[node][:, :, max(step, 0)].expand(-1, sequences, -1)
                continue
            name = structure.name_at(node, len(past))
            values[node] = draw(structure, naturals, name, values, (sequences,), generator)
        past = [*past, values][-longest:] if longest else []
        if step >= 0:
            kept.append(values)
    return {node: torch.stack([values[node] for values in kept], 2) for node in graph.nodes}


def draw(
    structure: Structure,
    naturals: Naturals,
    name: str,
    values: Mapping[str, Tensor],
    shape: tuple[int, ...],
    generator: torch.Generator,
) -> Tensor:
    """Draw (1, *shape, width) from the mechanism called ``name``, given its parents' values."""
    mechanism = structure.mechanisms[name]
    if mechanism.is_given:
        raise ModelError(f"node {name!r} is Given: pass its values, for instance sample(given=table)")
    noise = draw_noise(mechanism.noise, (1, *shape), generator)
    value = mechanism.forward(naturals[name], structure.parents(name, values), noise)
    return value.detach().expand(-1, *shape, -1)


def batch_of(structure: Structure, values: Mapping[str, Tensor], weight: Tensor | None = None) -> Batch:
    """Rows that show these values (R or 1, N or 1, width) and nothing else of the observed nodes.

    They are of weight one unless others are given.
    """
    rows = max((value.shape[1] for value in values.values()), default=1)
    shown, mask = {}, {}
    for node in structure.graph.observed:
        space, given = structure.mechanisms[node].space, values.get(node)
        empty = torch.zeros(1, rows, space.width, dtype=torch.float64)
        shown[node] = empty if given is None else given.expand(-1, rows, -1).to(torch.float64)
        mask[node] = torch.full((len(shown[node]), rows, space.cells), given is not None)
    return Batch(shown, mask, torch.ones(1, rows, dtype=torch.float64) if weight is None else weight)


def simulated_rows(structure: Structure, naturals: Naturals, batch: Batch, size: int, seed: int) -> Batch:
    """Rows that the model makes, each with the gaps and covariates of a random row of a batch."""
    generator = torch.Generator().manual_seed(seed)
    pattern = batch.take(torch.randint(batch.rows, (size,), generator=generator))
    given = {node: pattern.values[node][:1] for node in structure.given}
    with torch.no_grad():
        values = ancestral(structure, naturals, size, generator, do=given)
    return _with_gaps(pattern, values)


def simulated_sequences(
    structure: Structure, naturals: Naturals, batch: SequenceBatch, size: int, seed: int
) -> SequenceBatch:
    """Sequences that the model makes, each as long as a random one of a batch, with its gaps and covariates."""
    generator = torch.Generator().manual_seed(seed)
    pattern = batch.take(torch.randint(len(batch.lengths), (size,), generator=generator))
    return sequences_like(structure, naturals, pattern, generator)


def sequences_like(
    structure: Structure, naturals: Naturals, pattern: SequenceBatch, generator: torch.Generator
) -> SequenceBatch:
    """Sequences that the model makes, each as long as one of a batch, with its gaps and covariates."""
    longest = int(pattern.lengths.max())
    column = torch.arange(longest).unsqueeze(0)
    last = (pattern.lengths - 1).unsqueeze(1)
    rows = pattern.starts.unsqueeze(1) + torch.minimum(column, last)
    given = {n: pattern.steps.values[n][:1, rows.flatten()].unflatten(1, rows.shape) for n in structure.given}
    with torch.no_grad():
        drawn = ancestral_sequences(structure, naturals, len(pattern.lengths), longest, generator, do=given)
    inside = (column <= last).flatten()
    values = {n: drawn[n].flatten(1, 2)[:, inside] for n in pattern.steps.values}
    return SequenceBatch(_with_gaps(pattern.steps, values), pattern.lengths)


def _with_gaps(pattern: Batch, values: dict[str, Tensor]) -> Batch:
    made = {n: torch.where(pattern.mask[n], values[n], 0.0) for n in pattern.values}
    return Batch(made, pattern.mask, torch.ones_like(pattern.weight[:1]))
