"""Tables for a terminal, readable at 80 columns and in a file."""

from __future__ import annotations

from typing import Any

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from otpdag.cli.showing import EstimateLine, lines_table, number
from otpdag.engine import FitResult
from otpdag.model import Model
from otpdag.tables import estimates


def headline(result: FitResult) -> Text:
    """How a fit ended, in a line or two."""
    state = Text(result.status.name, style="bold green" if result.status else "bold yellow")
    kept = next((r.number + 1 for r in result.restarts if r.kept), 1)
    steps = sum(len(stage.losses) for stage in result.stages) or len(result.history)
    details = (
        f": {result.status.reason} (method {result.method.name}, loss {number(result.loss)}, {steps} steps, start "
        f"{kept} of {len(result.restarts)}, {result.rows_used:,} rows, {result.seconds:.1f} s)"
    )
    return state + Text(details, style="none")


def estimates_table(model: Model, intervals: pd.DataFrame | None = None) -> RenderableType:
    """Every estimate, grouped by node; with the ends of its interval where they are known."""
    return lines_table(estimate_lines(model, intervals), ends=intervals is not None)


def estimate_lines(model: Model, intervals: pd.DataFrame | None = None) -> list[EstimateLine]:
    """One line for each number of a fitted model."""
    lines = []
    for (node, parameter), group in estimates(model).groupby(["node", "parameter"], sort=False):
        ends = iter(_ends(intervals, str(node), str(parameter), int((~group["fixed"]).sum())))
        for row in group.itertuples(index=False):
            own = [] if intervals is None else ["", ""] if row.fixed else next(ends)
            value = number(float(str(row.value)))
            line = EstimateLine(
                str(node), _kind(model, str(node)), str(parameter), str(row.at), value, bool(row.fixed), own
            )
            lines.append(line)
    return lines


def described(model: Model) -> dict[str, Any]:
    """A model as plain data, for JSON."""
    graph, params = model.graph, None
    if model.is_fitted:
        params = {node: {name: value.tolist() for name, value in own.items()} for node, own in model.params().items()}
    return {
        "edges": [*map(list, graph.edges), *([edge.parent, edge.child, edge.by] for edge in graph.lags)],
        "hidden": list(graph.hidden),
        "nodes": {node: type(mechanism).__name__ for node, mechanism in model.mechanisms.items()},
        "params": params,
    }


def _ends(intervals: pd.DataFrame | None, node: str, parameter: str, size: int) -> list[list[str]]:
    """Lower and upper ends of each entry of a parameter, empty where there are none."""
    if intervals is None:
        return []
    names = intervals.index.to_frame(index=False)
    own = intervals[((names["node"] == node) & (names["parameter"] == parameter)).to_numpy()]
    if own.empty:
        return [["", ""] for _ in range(size)]
    return [[number(low), number(high)] for low, high in zip(own["lower"], own["upper"], strict=True)]


def _kind(model: Model, node: str) -> str:
    hidden = ", hidden" if model.structure.base(node) in model.graph.hidden else ""
    return f"{type(model.mechanisms[node]).__name__}{hidden}"
