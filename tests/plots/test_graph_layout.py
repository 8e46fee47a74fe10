"""Where nodes stand."""

from __future__ import annotations

import numpy as np
import pytest

from otpdag.graph import Graph
from otpdag.plots.graph_layout import POINTS, Layout


def width(text: str, size: float) -> float:
    return 0.6 * size * max(map(len, text.split("\n")))


@pytest.mark.parametrize("name", ["x{}", "symptom_{}", "observed_symptom_number_{}", "anunbreakablename{}"])
def test_ten_siblings_stand_in_one_row(name: str) -> None:
    children = [name.format(place) for place in range(10)]
    layout = Layout(Graph([("z", child) for child in children]), width)
    assert layout.rows == [["z"], children]
    gaps = np.diff([layout.x[child] for child in children])
    assert (gaps >= max(layout.size[child][0] for child in children)).all()


def test_crowded_rows_break_names_until_they_fit_the_page() -> None:
    layout = Layout(Graph([("z", f"observed_symptom_number_{place}") for place in range(10)]), width)
    left, right, _, _ = layout.bounds
    assert right - left <= POINTS.page
    assert layout.text["observed_symptom_number_3"] == "observed_\nsymptom_\nnumber_3"
    alone = Layout(Graph([("z", "observed_symptom_number_3")]), width)
    assert alone.text["observed_symptom_number_3"] == "observed_\nsymptom_number_3"


def test_long_rows_are_broken() -> None:
    layout = Layout(Graph([("z", f"symptom_{place}") for place in range(39)]), width)
    assert [len(row) for row in layout.rows] != [1, 39]
    assert max(sum(isinstance(item, str) for item in row) for row in layout.rows) <= 12
