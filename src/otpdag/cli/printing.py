"""Tables for a terminal, readable at 80 columns and in a file."""

from __future__ import annotations

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from otpdag.engine import FitResult
from otpdag.model import Model
from otpdag.printable import printable
from otpdag.tables import estimates

__all__ = ["estimates_table", "headline", "number"]

MOST_ENTRIES = 40  # of one parameter


def number(value: float) -> str:
    """Five significant digits.

    >>> number(0.123456), number(123456.7), number(-2.0)
    ('0.12346', '1.2346e+05', '-2')
    """
    return f"{value:.5g}"


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
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("node", "parameter", "at"):
        table.add_column(title, overflow="fold")
    for title in ("estimate", "lower", "upper")[: 1 if intervals is None else 3]:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    last, cut = "", False
    for (node, parameter), group in estimates(model).groupby(["node", "parameter"], sort=False):
        ends = _ends(intervals, str(node), str(parameter), len(group))
        for position, row in enumerate(group.head(MOST_ENTRIES).itertuples(index=False)):
            whose = _node(model, str(node)) if node != last else Text("")
            which = Text("" if position else printable(str(parameter), keep=""))
            numbers = [number(float(str(row.value))), *ends[position]]
            table.add_row(whose, which, Text(printable(str(row.at), keep="")), *numbers, "fixed" if row.fixed else "")
            last = str(node)
        if len(group) > MOST_ENTRIES:
            table.add_row("", "", f"... and {len(group) - MOST_ENTRIES} more")
            cut = True
    note = [Text("The rest of the long tables is in params.json.", style="dim")] if cut else []
    return Group(table, *note)


def _ends(intervals: pd.DataFrame | None, node: str, parameter: str, size: int) -> list[list[str]]:
    """Lower and upper ends of each entry of a parameter, empty where there are none."""
    if intervals is None:
        return [[] for _ in range(size)]
    names = intervals.index.to_frame(index=False)
    own = intervals[((names["node"] == node) & (names["parameter"] == parameter)).to_numpy()]
    if own.empty:
        return [["", ""] for _ in range(size)]
    return [[number(low), number(high)] for low, high in zip(own["lower"], own["upper"], strict=True)]


def _node(model: Model, node: str) -> Text:
    kind = type(model.mechanisms[node]).__name__
    hidden = ", hidden" if model.structure.base(node) in model.graph.hidden else ""
    return Text(printable(node, keep=""), style="bold") + Text(f" ({kind}{hidden})", style="not bold dim")
