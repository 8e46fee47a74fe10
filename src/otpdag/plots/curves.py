"""The names of the stages of a search, above the curves: none lies on another, and a line leads to each stage.

The course of a fit: every term of a loss, and the losses of all starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from otpdag.engine.monitor import Stage
from otpdag.engine.result import FitResult
from otpdag.errors import DataError
from otpdag.plots.style import (
    COLOURS,
    INK,
    PALE_INK,
    SMALL_FONT,
    Picture,
    figure_of,
    place_axes,
    text_width,
    tidy_steps,
)

_ROW_HEIGHT, _GAP = 11.0, 6.0  # in points
_MOST_ROWS = 8  # more would leave the curves no room


class NamePlace(NamedTuple):
    """Where a name stands: its left end, as a share of the width, and its row above the curves."""

    left: float
    row: int


def name_stages(ax: Axes, stages: Sequence[tuple[str, int]]) -> None:
    """Draw a line where a stage ends, and the stages' names above; names that find no room are left out.

    Args:
        ax: Axes along which the stages lie one after another, from step 1 on.
        stages: The name and number of steps of each.
    """
    total = sum(length for _, length in stages)
    ax.set_xlim(0.5, total + 0.5)
    width, _ = place_axes(ax)
    ends = [sum(length for _, length in stages[: number + 1]) / total for number in range(len(stages))]
    spans = list(zip([0.0, *ends], ends, strict=False))
    for end in ends[:-1]:
        ax.axvline(end * total + 0.5, color="#c3cad4", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    lengths = [text_width(name, SMALL_FONT) + _GAP for name, _ in stages]
    places = name_places(spans, [length / width for length in lengths])
    for (name, _), (begin, end), (left, row), length in zip(stages, spans, places, lengths, strict=True):
        if row >= _MOST_ROWS:
            continue
        middle = (begin + end) / 2
        share = min(max((middle - left) * width / length, 0.0), 1.0)  # of the name that lies left of the line
        line = {"arrowstyle": "-", "color": PALE_INK, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
        text = ax.annotate(
            name,
            (middle, 1.0),
            ((left - middle) * width + share * _GAP, 4 + _ROW_HEIGHT * row),
            xycoords="axes fraction",
            textcoords="offset points",
            arrowprops=line | {"relpos": (share, 0.5)} if length > (end - begin) * width else None,
            annotation_clip=False,
            fontsize=SMALL_FONT,
            color=INK,
        )
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})


def name_places(spans: Sequence[tuple[float, float]], widths: Sequence[float]) -> list[NamePlace]:
    """Put names above their stages.

    A name that fits its stage stands in the middle of it, in the lowest row. The others begin or end at the middle of
    their stage and run towards the middle of the picture, each above all that it meets, the innermost lowest: so lines
    from names down to their stages cross no other name, save near the middle.

    Args:
        spans: Where each stage begins and ends, from 0 to 1.
        widths: The widths of the names.

    Returns:
        A place for each name.

    >>> name_places([(0.0, 0.5), (0.5, 0.625), (0.625, 1.0)], [0.25, 0.25, 0.25])
    [NamePlace(left=0.125, row=0), NamePlace(left=0.3125, row=1), NamePlace(left=0.6875, row=0)]
    """
    places: dict[int, NamePlace] = {}
    middles = [(begin + end) / 2 for begin, end in spans]
    crowded = [width > end - begin for (begin, end), width in zip(spans, widths, strict=True)]
    for number in sorted(range(len(spans)), key=lambda number: (crowded[number], abs(middles[number] - 0.5))):
        middle, width = middles[number], widths[number]
        if crowded[number]:
            left = min(max(middle if middle < 0.5 else middle - width, 0.0), max(1.0 - width, 0.0))
        else:
            left = middle - width / 2
        met = [
            place.row
            for other, place in places.items()
            if place.left < left + width and left < place.left + widths[other]
        ]
        places[number] = NamePlace(left, 1 + max(met, default=-1))
    return [places[number] for number in range(len(spans))]


Floats: TypeAlias = npt.NDArray[np.float64]

_SMOOTHED_FROM = 20  # steps; noisy losses of longer stages are drawn with a running mean


History: TypeAlias = Mapping[str, Sequence[float]] | Sequence[Mapping[str, float]] | FitResult


def learning_curve(history: History, *, ax: Axes | None = None) -> Figure:
    """Draw every term of a loss over the steps of a fit.

    The scale is logarithmic if all values are positive and the largest is more than a hundred times the
    smallest.

    Args:
        history: The result of a fit, its ``history``, or for each term its values, one for each step, in the order of
            the steps; NaN is left out. An entry ``step`` gives the numbers of the steps; without it they are 1, 2, and
            so on.
        ax: Where to draw; if left out, a figure is made.

    Returns:
        The figure.

    Raises:
        DataError: There is no term, or a term is not a list of numbers.

    >>> figure = learning_curve({"cost": [9.0, 4.0, 2.0], "divergence": [1.0, 0.5, 0.1]})
    >>> figure.axes[0].get_xlabel()
    'step'
    """
    terms = {name: _series(name, values) for name, values in _by_term(history).items()}
    steps = terms.pop("step", None)
    if not terms:
        raise DataError("history must hold at least one term; got none")
    if ax is None:
        ax = Picture(figsize=(6.4, 3.8), layout="constrained").add_subplot()
    for number, (name, values) in enumerate(terms.items()):
        x = np.arange(1, len(values) + 1) if steps is None else steps[: len(values)]
        if len(x) != len(values):
            raise DataError(
                f"history[{name!r}] must have at most {len(x)} values, one for each step; got {len(values)}"
            )
        finite = ~np.isnan(values)
        marker = "o" if finite.sum() == 1 else None
        colour = COLOURS[number % len(COLOURS)]
        style = "-" if number < len(COLOURS) else "--"
        ax.plot(x[finite], values[finite], label=name, color=colour, linestyle=style, linewidth=1.4, marker=marker)
    if _spans_decades(terms):
        ax.set_yscale("log")
    _tidy(ax, len(terms))
    return figure_of(ax)


def _by_term(history: History) -> Mapping[str, Sequence[float]]:
    """The values of each term, NaN at steps whose record lacks it."""
    records = history.history if isinstance(history, FitResult) else history
    if isinstance(records, Mapping):
        return records
    if not isinstance(records, Sequence) or not all(isinstance(record, Mapping) for record in records):
        raise DataError(
            f"history must be a result of otp.fit, its history, or a dictionary of terms; got {type(history).__name__}"
        )
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [float(record.get(name, np.nan)) for record in records] for name in names}


def search_curve(stages: Sequence[Stage] | FitResult, *, kept: int | None = None, ax: Axes | None = None) -> Figure:
    """Draw the losses of all starts along the stages of a search, the kept one on top.

    Where losses only fall, as those of a quasi-Newton method do, the height of a line is how far it lies above the
    lowest loss of the stages that compare with it, on a logarithmic scale: starts that are stuck stay high. Noisy
    losses are drawn as they are, with a running mean.

    Args:
        stages: The result of a fit, or its ``stages``.
        kept: Number of the start that was kept; if left out, the first of the last stage.
        ax: Where to draw; if left out, a figure is made.

    Returns:
        The figure.

    Raises:
        DataError: No stage has a step.

    >>> figure = search_curve(
    ...     [Stage("2 short starts", (0, 1), [(3.0, 4.0), (1.5, 2.0)]), Stage("best", (0,), [(1.2,)])]
    ... )
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['2 short starts', 'best']
    """
    stages = stages.stages if isinstance(stages, FitResult) else stages
    tables = [(stage, np.array(stage.losses, dtype=np.float64)) for stage in stages if stage.losses]
    if not tables:
        raise DataError("stages must hold at least one step; got none")
    if ax is None:
        ax = Picture(figsize=(6.4, 3.8), layout="constrained").add_subplot()
    falling = all(_only_falls(losses) for _, losses in tables)
    kept = tables[-1][0].starts[0] if kept is None else kept
    begin = 0
    for stage, losses in tables:
        comparable = [table for other, table in tables if other.objective == stage.objective]
        heights = _above_lowest(losses, comparable) if falling else losses
        steps = np.arange(begin + 1, begin + len(losses) + 1)
        order = sorted(range(len(stage.starts)), key=lambda place: stage.starts[place] == kept)
        for place in order:
            _draw_start(ax, steps, heights[:, place], is_kept=stage.starts[place] == kept, smooth=not falling)
        begin += len(losses)
    if falling:
        ax.set_yscale("log")
    ax.set_ylabel("loss above the lowest" if falling else "loss")
    tidy_steps(ax)
    name_stages(ax, [(stage.name, len(losses)) for stage, losses in tables])
    _mark_lines(ax, several=len(tables[0][0].starts) > 1)
    return figure_of(ax)


def _only_falls(losses: Floats) -> bool:
    before, after = losses[:-1], losses[1:]
    return not bool((np.isfinite(before) & (after > before + 1e-9 * (1 + np.abs(before)))).any())


def _above_lowest(losses: Floats, tables: Sequence[Floats]) -> Floats:
    """Distance to the lowest loss of some tables, NaN where rounding would show."""
    finite = np.concatenate([table[np.isfinite(table)] for table in tables])
    lowest = float(finite.min()) if len(finite) else 0.0
    above = losses - lowest
    return np.where(np.isfinite(above) & (above > 1e-10 * (1 + abs(lowest))), above, np.nan)


def _draw_start(
    ax: Axes, steps: Floats | npt.NDArray[np.int64], heights: Floats, *, is_kept: bool, smooth: bool
) -> None:
    colour, width, front = (COLOURS[0], 1.8, 3) if is_kept else (PALE_INK, 0.9, 2)
    marker = "o" if np.isfinite(heights).sum() == 1 else None
    if smooth and len(heights) > _SMOOTHED_FROM:
        ax.plot(steps, heights, color=colour, linewidth=0.5, alpha=0.25, zorder=front)
        window = max(3, len(heights) // 25)
        heights = np.convolve(np.pad(heights, window // 2, mode="edge"), np.ones(window) / window, "same")
        heights = heights[window // 2 : window // 2 + len(steps)]
    ax.plot(steps, heights, color=colour, linewidth=width, marker=marker, markersize=3, zorder=front)


def _mark_lines(ax: Axes, *, several: bool) -> None:
    if several:
        ax.plot([], [], color=COLOURS[0], linewidth=1.8, label="kept start")
        ax.plot([], [], color=PALE_INK, linewidth=0.9, label="other starts")
        ax.legend(frameon=False, loc="best", handlelength=1.4, fontsize=SMALL_FONT)


def _series(name: str, values: Sequence[float]) -> Floats:
    """Numbers, NaN where they are not finite."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"history[{name!r}] must be a list of numbers; got {values!r:.60}") from error
    if array.ndim != 1 or not len(array):
        raise DataError(f"history[{name!r}] must be a list of at least one number; got shape {array.shape}")
    return np.where(np.isfinite(array), array, np.nan)


def _spans_decades(terms: Mapping[str, Floats]) -> bool:
    values = np.concatenate([array[~np.isnan(array)] for array in terms.values()])
    return bool(len(values) and values.min() > 0 and values.max() > 100 * values.min())


def _tidy(ax: Axes, terms: int) -> None:
    tidy_steps(ax)
    ax.set_ylabel("value")
    ax.margins(x=0.01)
    if terms > 1:
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.4)
    else:
        ax.set_ylabel(str(ax.lines[-1].get_label()))
