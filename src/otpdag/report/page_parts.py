"""What all sections of a page are made of: text that is safe, numbers, notes, places for charts."""

from __future__ import annotations

import html
import re
from typing import Any

import pandas as pd

from otpdag.printable import printable

__all__ = ["Charts", "note", "number", "text"]

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
