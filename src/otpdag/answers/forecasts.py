"""Futures of sequences: states at the end are drawn from what the sequence shows, then the model goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from otpdag.data import Schema, decode
from otpdag.data.sequences import SequenceBatch
from otpdag.likelihood.sequence_posterior import fill_in
from otpdag.simulation import draw
from otpdag.structure import Naturals, Structure, lag_name


def future_draws(
    structure: Structure,
    naturals: Naturals,
    batch: SequenceBatch,
    steps: int,
    *,
    draws: int,
    seed: int,
    given: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Draw what follows each sequence: node -> (sequences, steps, draws, width).

    ``given`` has the values of Given nodes, (1, sequences * steps, width).
    """
    generator = torch.Generator().manual_seed(seed)
    past = fill_in(structure, naturals, batch, draws, generator)
    graph, many = structure.graph, len(batch.lengths)
    last = batch.starts + batch.lengths - 1
    known: list[dict[str, Tensor]] = []
    for ahead in range(steps):
        values: dict[str, Tensor] = {}
        for edge in graph.lags:
            behind = edge.by - ahead
            if behind <= 0:
                values[lag_name(edge.parent, edge.by)] = known[ahead - edge.by][edge.parent]
            else:  # before the first step there is nothing: the first one stands for it
                at = torch.maximum(last - (behind - 1), batch.starts)
                values[lag_name(edge.parent, edge.by)] = past[edge.parent][at].unsqueeze(0)
        for node in graph.order:
            if node in given:
                own = given[node].reshape(1, many, steps, -1)[:, :, ahead]
                values[node] = own.unsqueeze(2).expand(-1, -1, draws, -1)
                continue
            name = structure.name_at(node, int(batch.lengths.max()) + ahead)
            values[node] = draw(structure, naturals, name, values, (many, draws), generator)
        known.append(values)
    return {node: torch.stack([values[node][0] for values in known], 1) for node in graph.nodes}


def forecast_table(drawn: Mapping[str, Tensor], schema: Schema, nodes: Sequence[str], level: float) -> pd.DataFrame:
    """Means and quantiles of numbers, likeliest categories and their probabilities, by sequence and step."""
    many, steps = next(iter(drawn.values())).shape[:2]
    index = pd.MultiIndex.from_product([range(many), range(1, steps + 1)], names=["sequence", "step"])
    table = pd.DataFrame(index=index)
    for node in nodes:
        values, column = drawn[node].flatten(0, 1), schema[node]
        if column.space.is_discrete:
            shares = values.mean(1)
            table[node] = decode({node: shares}, schema)[node].to_numpy()
            table[f"{node}.probability"] = shares.amax(-1).numpy()
            continue
        lower, upper = np.quantile(values.numpy(), [(1 - level) / 2, (1 + level) / 2], axis=1)
        for cell, name in enumerate(column.names):
            table[name] = values[..., cell].mean(1).numpy()
            table[f"{name}.lower"], table[f"{name}.upper"] = lower[:, cell], upper[:, cell]
    return table
