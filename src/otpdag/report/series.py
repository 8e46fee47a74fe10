"""What all sections of a page are made of: text that is safe, numbers, notes, places for charts.

Sections of a page about sequences: a series beside what the model makes, and its hidden nodes along the steps.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from otpdag.data import Sequences
from otpdag.errors import DataError, ModelError, printable
from otpdag.mechanisms import Given
from otpdag.model import Model
from otpdag.report.run_folder import Run

if TYPE_CHECKING:
    from otpdag.report.charts import Floats


_FOREIGN_TAG = re.compile(r"<(?!br>|extra>|/extra>)")  # Plotly draws some tags: those of names are none of ours


class Charts:
    """Puts figures into the page: their numbers as JSON, their place as a box."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, figure: Any, label: str) -> str:
        """The box of a figure, which a reader who sees no pictures knows by its label."""
        self._count += 1
        content = _FOREIGN_TAG.sub("&lt;", figure.to_json()).replace("<", "\\u003c")
        return (
            f'<script type="application/json" id="figure-{self._count}">{content}</script>'
            f'<div class="chart" role="img" aria-label="{text(label)}" data-figure="figure-{self._count}" '
            f'style="height:{int(figure.layout.height or 300)}px"></div>'
        )


def note(words: str, kind: str = "") -> str:
    """A box of words: a warning, or what its kind says (``good``, ``bad``)."""
    return f'<div class="note {kind}">{text(words)}</div>'


def text(value: object) -> str:
    """Names and values come from files: no tag and no control character of theirs reaches the page."""
    return html.escape(printable(str(value), keep="\n"))


def number(value: Any) -> str:
    """Five significant digits; nothing for what is missing."""
    return "" if value is None or pd.isna(value) else f"{float(value):.5g}"


MOST_STEPS = 2_000
"""Steps of a series that a chart shows."""

PATHS, DRAWS = 300, 100
"""Sequences whose spread at each step is the model's band, and draws of hidden nodes."""


@dataclass(frozen=True)
class Steps:
    """A table whose rows are steps in their order.

    Attributes:
        table: All steps, sequence after sequence.
        first: How many of them the first sequence has, and charts show.
        x: Where these lie on the axis: the values of the column of times if they are numbers, else 0, 1, 2, ...
        axis: What that axis is called.
    """

    table: pd.DataFrame
    first: int
    x: Floats
    axis: str

    @classmethod
    def of(cls, run: Run, table: pd.DataFrame) -> Steps:
        """The steps of a fit, whose summary names the columns that tell sequences apart and order them."""
        sequence, time = run.summary.get("sequence"), run.summary.get("time")
        ordered = Sequences(table.reset_index(drop=True), sequence=sequence, time=time)
        rows = table.iloc[ordered.index.to_numpy()].reset_index(drop=True)
        first = min(int(ordered.lengths[0]), MOST_STEPS)
        if time in rows.columns and pd.api.types.is_numeric_dtype(rows[time]):
            return cls(rows, first, rows[time].to_numpy(dtype=float)[:first], str(time))
        return cls(rows, first, np.arange(first, dtype=float), "step")

    def shown(self) -> pd.DataFrame:
        """The steps that charts show."""
        return self.table.head(self.first)


def series(model: Model, steps: Steps, seed: int, charts: Charts) -> str:
    """Each observed column along the first sequence over the model's band, and its values beside the model's."""
    from otpdag.report.charts import against_model, along_time

    if any(isinstance(mechanism, Given) for mechanism in model.mechanisms.values()):
        return "<p class='soft'>No pictures: the model has given nodes, which it cannot make.</p>"
    made = model.sample(PATHS, seed=seed, length=steps.first)
    boxes = []
    for node, column in observed_columns(model, steps.table):
        if column not in made.columns or not steps.table[column].notna().any():
            continue
        if not model.spaces[node].is_discrete:
            paths = made[column].to_numpy(dtype=float).reshape(PATHS, steps.first)
            low, high = np.quantile(paths, [0.05, 0.95], axis=0)
            seen = steps.shown()[column].to_numpy(dtype=float, na_value=np.nan)
            figure = along_time(column, steps.x, paths.mean(axis=0), low, high, seen, axis=steps.axis)
            boxes.append(charts.add(figure, f"{column}: the series over the model's band"))
        figure = against_model(column, model.spaces[node], steps.table[column], made[column])
        boxes.append(charts.add(figure, f"{column}: data against model"))
    words = (
        "The first sequence over the central 90 % of what the fitted model makes at each step, without knowing the "
        "data; beside it the values of all steps, in orange those of the model."
    )
    return f'<p class="soft">{words}</p><div class="charts">{"".join(boxes)}</div>'


def hidden_series(model: Model, steps: Steps, seed: int, charts: Charts) -> str:
    """What the first sequence says about the hidden nodes at each step."""
    from otpdag.report.charts import along_time, states

    if not model.graph.hidden:
        return ""
    try:
        drawn = model.posterior(Sequences(steps.shown()), draws=DRAWS, seed=seed)
    except (ModelError, DataError) as error:
        return f"<p class='soft'>Not available here: {text(error)}</p>"
    boxes = []
    for node in model.graph.hidden:
        for column in [name for name in drawn.columns if name == node or str(name).startswith(f"{node}.")]:
            by_step = drawn[column].groupby(level="row", sort=False)
            if model.spaces[node].is_discrete:
                told = pd.DataFrame({label: by_step.agg(_share(label)) for label in model.labels(node)})
                figure = states(str(column), steps.x, told, axis=steps.axis)
            else:
                low, high = (by_step.quantile(q).to_numpy(dtype=float) for q in (0.05, 0.95))
                figure = along_time(
                    str(column), steps.x, by_step.mean().to_numpy(dtype=float), low, high, axis=steps.axis
                )
            boxes.append(charts.add(figure, f"{column}: posterior along the steps"))
    words = "What the whole of the first sequence says about the hidden nodes at each of its steps."
    return f'<p class="soft">{words}</p><div class="charts">{"".join(boxes)}</div>'


def _share(label: Any) -> Any:
    return lambda drawn: float((drawn == label).mean())


def observed_columns(model: Model, table: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Observed nodes with the columns that show them."""
    for node in model.graph.observed:
        names = [node] if node in table.columns else [f"{node}.{k}" for k in range(model.spaces[node].cells)]
        yield from ((node, name) for name in names if name in table.columns)
