"""The names of the stages of a search, above the curves: none lies on another, and a line leads to each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from otpdag.plots.style import INK, PALE_INK, SMALL_FONT, place_axes, text_width

__all__ = ["NamePlace", "name_places", "name_stages"]

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
