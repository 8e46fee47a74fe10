"""Bands for the segments of a series."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from otpdag.errors import DataError
from otpdag.plots import plot_segments


def test_segments_are_bands_with_levels():
    figure = plot_segments([1.0, 2.0, np.nan, 9.0, 8.0], [0, 0, 2, 2, 0], times=[1, 2, 3, 5, 6], levels=[1.5, 0, 8])
    ax = figure.axes[0]
    assert len(ax.patches) == 3  # two stretches in state 0, one in state 2
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["state 0", "state 2"]
    assert {line.get_ydata()[0] for line in ax.lines[:3]} == {1.5, 8.0}
    assert ax.get_xlim() == (0.5, 6.5)


def test_segments_of_one_step():
    assert plot_segments([1.0], [0], names=["calm"]).axes[0].get_legend().get_texts()[0].get_text() == "calm"


@pytest.mark.parametrize(("values", "states", "message"), [([1, 2], [0], "one length"), ([1], [-1], "at least 0")])
def test_segments_refuse_what_does_not_fit(values, states, message):
    with pytest.raises(DataError, match=message):
        plot_segments(values, states)


def test_axes_of_segments_have_names():
    ax = plot_segments([1.0, 2.0], [0, 1]).axes[0]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "value")
    ax = plot_segments([1.0, 2.0], [0, 1], times=[1990, 1991]).axes[0]
    assert ax.get_xlabel() == "time"
    frame = pd.DataFrame({"year": [1990, 1991], "quakes": [13, 14]})
    ax = plot_segments(frame["quakes"], [0, 1], times=frame["year"]).axes[0]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("year", "quakes")
