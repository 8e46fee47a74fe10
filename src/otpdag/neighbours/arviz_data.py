"""Draws for ArviZ: of hidden nodes, of parameters, and of data that the model makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from otpdag.model import Model

__all__ = ["to_arviz"]


def to_arviz(model: Model, data: pd.DataFrame, *, draws: int = 200, seed: int = 0) -> Any:
    """An ``arviz.InferenceData`` of a fitted model and a table.

    It holds what the rows say about hidden nodes (``posterior``: draw, row), tables of the same size that the model
    makes (``posterior_predictive``), the observed columns (``observed_data``) and the estimates (``constant_data``).

    Args:
        model: A fitted model of a table.
        data: The rows.
        draws: Draws of each.
        seed: Determines them.
    """
    import arviz

    groups: dict[str, Any] = {
        "observed_data": {name: data[name].to_numpy() for name in model.graph.observed if name in data},
        "constant_data": {
            f"{node}.{name}": np.asarray(value) for node, own in model.params().items() for name, value in own.items()
        },
        "posterior_predictive": _predictive(model, len(data), draws, seed),
    }
    if model.graph.hidden:
        drawn = model.posterior(data, draws=draws, seed=seed)
        groups["posterior"] = {str(name): _by_draw(drawn[name], draws) for name in drawn.columns}
    return arviz.from_dict(**groups)


def _by_draw(column: pd.Series[Any], draws: int) -> np.ndarray[Any, Any]:
    """(chain, draw, row), from a table with a line for each row and draw."""
    table = column.unstack("draw") if "draw" in (column.index.names or []) else None
    values = column.to_numpy().reshape(-1, draws) if table is None else table.to_numpy()
    return values.T[None]


def _predictive(model: Model, rows: int, draws: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    made = model.sample(rows * draws, seed=seed)
    observed = [name for name in made.columns if name in model.graph.observed]
    return {name: made[name].to_numpy().reshape(1, draws, rows) for name in observed}
