"""Fits for ArviZ."""

from __future__ import annotations

from typing import Any

import numpy as np

from otpdag.data.columns import as_frame
from otpdag.engine.result import FitResult
from otpdag.errors import ModelError
from otpdag.model import Model
from otpdag.tables import estimates


def to_arviz(fitted: Model | FitResult, data: Any, *, draws: int = 200, seed: int = 0) -> Any:
    """An ``arviz.InferenceData`` of a fit and a table.

    It holds what the rows say about hidden nodes (``posterior``: chain, draw, row), tables of the same size that the
    model makes (``posterior_predictive``), the observed columns (``observed_data``) and the estimates
    (``constant_data``). Of a :class:`otpdag.FitResult` the ``posterior`` also holds the parameters, drawn by the
    bootstrap: ``arviz.summary(to_arviz(result, table), var_names=["x.loc"])``.

    Args:
        fitted: A result of a fit, or a fitted model of a table.
        data: The rows.
        draws: Draws of each.
        seed: Determines them.
    """
    import arviz

    model = fitted.model if isinstance(fitted, FitResult) else fitted
    table = as_frame(data)
    if draws * len(table) * len(model.graph.observed) > 50_000_000:  # 400 MB
        raise ModelError(f"{draws} draws of {len(table)} rows need too much memory; ask for fewer draws")
    made = model.sample(len(table) * draws, seed=seed)
    groups: dict[str, Any] = {
        "observed_data": {name: table[name].to_numpy() for name in model.graph.observed if name in table},
        "constant_data": {
            f"{node}.{name}": np.asarray(value) for node, own in model.params().items() for name, value in own.items()
        },
        "posterior_predictive": {
            name: made[name].to_numpy().reshape(1, draws, len(table)) for name in made if name in model.graph.observed
        },
    }
    posterior: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    if isinstance(fitted, FitResult):
        for (node, name), values in fitted.bootstrap(draws=draws, seed=seed).items():
            posterior[f"{node}.{name}"] = values.reshape(1, draws, -1) if values.ndim > 1 else values[None]
        names = _names(model)
    if model.graph.hidden:
        drawn = model.posterior(table, draws=draws, seed=seed)
        posterior |= {str(name): drawn[name].to_numpy().reshape(-1, draws).T[None] for name in drawn.columns}
    if posterior:
        groups["posterior"] = posterior
    axes = {name: [f"{name} at"] for name in names if posterior[name].ndim > 2}
    return arviz.from_dict(**groups, coords={f"{name} at": names[name] for name in axes}, dims=axes)


def _names(model: Model) -> dict[str, list[str]]:
    """What the single numbers of each parameter are called: parents' categories, the parent of a slope."""
    by_parameter = estimates(model).groupby(["node", "parameter"], sort=False)["at"]
    return {f"{node}.{name}": list(places) for (node, name), places in by_parameter}
