"""Sections of a page that hold charts: data and model, checks, hidden nodes, gaps, the search."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from otpdag.data import Sequences
from otpdag.errors import DataError, ModelError
from otpdag.mechanisms import Given
from otpdag.model import Model
from otpdag.plots.pictures import MADE_ROWS, observed_columns
from otpdag.report.charts import (
    Floats,
    against_model,
    along_time,
    gaps_by_column,
    gaps_together,
    learning,
    posteriors,
    residuals,
    states,
)
from otpdag.report.page import note, soft, text

_FOREIGN_TAG = re.compile(r"<(?!br>|extra>|/extra>)")  # Plotly draws some tags: those of names are none of ours
MOST_CHARTS = 60  # nodes with a picture of their own; a page of more is not read


# --- parts ------------------------------------------------------------------------------------------------------------


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
    def of(cls, table: pd.DataFrame, sequence: str | None, time: str | None, most: int = 2_000) -> Steps:
        """The steps of a table whose columns tell sequences apart and order them; charts show no more than so many."""
        ordered = Sequences(table.reset_index(drop=True), sequence=sequence, time=time)
        rows = table.iloc[ordered.index.to_numpy()].reset_index(drop=True)
        first = min(int(ordered.lengths[0]), most)
        if time in rows.columns and pd.api.types.is_numeric_dtype(rows[time]):
            return cls(rows, first, rows[time].to_numpy(dtype=float)[:first], str(time))
        return cls(rows, first, np.arange(first, dtype=float), "step")

    def shown(self) -> pd.DataFrame:
        """The steps that charts show."""
        return self.table.head(self.first)


# --- sections ---------------------------------------------------------------------------------------------------------


def data_and_model(
    model: Model, table: pd.DataFrame, steps: Steps | None, seed: int, charts: Charts, *, paths: int = 300
) -> str:
    """Each observed column beside what the model makes.

    Of sequences also the first one over the central 90 % of what ``paths`` sequences of the model have at each step.
    """
    given = any(isinstance(mechanism, Given) for mechanism in model.mechanisms.values())
    shown = table.head(MADE_ROWS) if steps is None else steps.table
    if steps is None:
        made = model.sample(len(shown) if given else MADE_ROWS, seed=seed, given=shown if given else None)
    elif given:
        return soft("No pictures: the model has given nodes, which it cannot make.")
    else:
        made = model.sample(paths, seed=seed, length=steps.first)
    boxes = []
    for node, column in observed_columns(model, shown)[:MOST_CHARTS]:
        if column not in made.columns or not shown[column].notna().any():
            continue
        if steps is not None and not model.spaces[node].is_discrete:
            values = made[column].to_numpy(dtype=float).reshape(paths, steps.first)
            seen = steps.shown()[column].to_numpy(dtype=float, na_value=np.nan)
            figure = along_time(column, steps.x, values, seen, axis=steps.axis)
            boxes.append(charts.add(figure, f"{column}: the series over the model's band"))
        figure = against_model(column, model.spaces[node], shown[column], made[column])
        boxes.append(charts.add(figure, f"{column}: data against model"))
    if steps is not None:
        words = (
            "The first sequence over the central 90 % of what the fitted model makes at each step, without knowing the "
            "data; beside it the values of all steps, in orange those of the model."
        )
        return soft(words, boxes)
    part = f" Shown are the first {len(shown):,} of {len(table):,} rows." if len(shown) < len(table) else ""
    words = (
        "Bars are the filled cells of the table, in orange is what the fitted model makes. Where cells are missing by "
        f"the values of other columns, the two may differ although the model is right.{part}"
    )
    return soft(words, boxes)


def hidden_nodes(
    model: Model, table: pd.DataFrame, steps: Steps | None, seed: int, charts: Charts, *, rows: int = 1_000
) -> str:
    """What the first rows say about the hidden nodes: 20 draws of each, for a histogram; of sequences, step by step."""
    if not model.graph.hidden:
        return ""
    asked: Any = table.head(rows) if steps is None else Sequences(steps.shown())
    try:
        drawn = model.posterior(asked, draws=20 if steps is None else 100, seed=seed)
    except (ModelError, DataError) as error:
        return soft(f"Not available here: {error}")
    boxes = []
    for node in model.graph.hidden:
        for column in [str(name) for name in drawn.columns if name == node or str(name).startswith(f"{node}.")]:
            if steps is None:
                figure = posteriors(column, model.spaces[node], drawn[column])
                boxes.append(charts.add(figure, f"{column}: posterior"))
                continue
            by_step = drawn[column].to_numpy().reshape(steps.first, -1)
            if model.spaces[node].is_discrete:
                told = pd.DataFrame({label: (by_step == label).mean(1) for label in model.labels(node)})
                figure = states(column, steps.x, told, axis=steps.axis)
            else:
                figure = along_time(column, steps.x, by_step.astype(float).T, axis=steps.axis)
            boxes.append(charts.add(figure, f"{column}: posterior along the steps"))
    words = (
        f"What the first {len(table.head(rows)):,} rows say about the hidden nodes, all rows together."
        if steps is None
        else "What the whole of the first sequence says about the hidden nodes at each of its steps."
    )
    return soft(words, boxes[:MOST_CHARTS])


def checks(model: Model, table: pd.DataFrame, seed: int, charts: Charts) -> str:
    """Which nodes do not follow their mechanism."""
    try:
        check = model.check(table.head(MADE_ROWS), seed=seed)
    except (ModelError, DataError) as error:
        return soft(f"Not available here: {error}")
    bad = [str(node) for node, value in check["excess"].items() if value > 3]
    words = (
        f"These nodes do not follow their mechanism: {', '.join(bad)}. Another family, another parent or a "
        "hidden node may be missing."
        if bad
        else "No node's noise differs from what its mechanism assumes by more than chance."
    )
    verdict = note(words, "bad" if bad else "good")
    how = "The noise that each node's mechanism must have had, compared with fresh noise; the worst node first."
    return verdict + soft(how) + charts.add(residuals(check), "residual checks, worst first")


def gaps(model: Model, table: pd.DataFrame, charts: Charts) -> str:
    """Which cells are empty, and which together."""
    own = table[[column for _, column in observed_columns(model, table)]]
    if not own.shape[1] or not own.isna().to_numpy().any():
        return "<p>No cell of the model's columns is empty.</p>"
    words = (
        f"{int(own.isna().to_numpy().sum()):,} of {own.size:,} cells are empty. The estimates use every row as it is; "
        "they are right where gaps are random given what is seen."
    )
    return (
        f"<p>{words}</p>"
        + charts.add(gaps_by_column(own), "share of empty cells by column")
        + charts.add(gaps_together(own), "which columns are empty together")
    )


def search(history: pd.DataFrame, restarts: pd.DataFrame, charts: Charts) -> str:
    """The course of the loss, and how many starts came to the same end."""
    parts = []
    if len(history) > 1:
        parts.append(charts.add(learning(history), "loss by step"))
    if len(restarts) > 1 and "loss" in restarts:
        losses = restarts["loss"].dropna()
        best = losses.min()
        near = int((losses <= best + 1e-3 * (1 + abs(best))).sum())
        parts.append(
            f"<p>{len(restarts)} starts; of the {len(losses)} that were continued, {near} ended within a "
            "thousandth of the best loss.</p>"
        )
    return "".join(parts)
