"""Curves along steps: the course of a fit, series over their segments."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.engine import Stage
from otpdag.errors import DataError
from otpdag.plots import learning_curve, plot_segments, search_curve, style


def test_learning_curve_draws_every_term() -> None:
    figure = learning_curve({"cost": [3.0, 2.0, 1.0], "divergence": [1.0, 0.5]})
    axes = figure.axes[0]
    assert [line.get_label() for line in axes.lines] == ["cost", "divergence"]
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert axes.lines[1].get_ydata().tolist() == [1.0, 0.5]
    assert axes.get_yscale() == "linear"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["cost", "divergence"]


def test_single_term_needs_no_legend() -> None:
    axes = learning_curve({"loss": [3.0]}).axes[0]
    assert axes.get_legend() is None
    assert axes.get_ylabel() == "loss"
    assert axes.lines[0].get_marker() == "o"


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1000.0, 1.0], "log"), ([10.0, 1.0], "linear"), ([1000.0, 0.0], "linear"), ([1000.0, -1.0], "linear")],
)
def test_scale_of_learning_curve(values: list[float], scale: str) -> None:
    assert learning_curve({"loss": values}).axes[0].get_yscale() == scale


def test_steps_and_gaps_of_learning_curve() -> None:
    axes = learning_curve({"step": [10, 20, 30], "loss": [1.0, np.nan, 2.0], "other": [np.inf, 1, 1]}).axes[0]
    assert len(axes.lines) == 2
    assert axes.lines[0].get_xdata().tolist() == [10, 30]
    assert axes.lines[1].get_xdata().tolist() == [20, 30]


def test_learning_curve_without_a_finite_value() -> None:
    assert learning_curve({"loss": [np.nan, np.nan]}).axes[0].get_yscale() == "linear"


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ({}, r"history must hold at least one term; got none"),
        ({"step": [1, 2]}, r"history must hold at least one term; got none"),
        ({"loss": []}, r"history must hold at least one term; got none"),
        ({"loss": ["a", "b"]}, r"a dictionary of terms with lists of numbers; got \{'loss': \['a', 'b'\]\}"),
        ({"loss": [[1.0]]}, r"a dictionary of terms with lists of numbers; got"),
        ({"step": [1], "loss": [1.0, 2.0]}, r"history\['step'\] must number all 2 steps; got 1"),
    ],
)
def test_bad_histories(history: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        learning_curve(history)


def test_search_curve_marks_stages_and_the_kept_start():
    stages = [
        Stage("3 short starts", (0, 1, 2), [(5.0, 4.0, 6.0), (2.0, 1.5, 5.0)]),
        Stage("best start", (1,), [(1.4,), (1.2,), (1.1,)]),
    ]
    axes = search_curve(stages).axes[0]
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    assert told == ["3 short starts", "best start", "kept start", "other starts"]
    assert [(band.get_x(), band.get_width()) for band in axes.patches] == [(0.5, 2), (2.5, 3)]
    assert axes.get_yscale() == "log"
    starts = [line for line in axes.lines if len(line.get_xdata()) in (2, 3)]
    assert len(starts) == 4  # three short ones and the continued one
    kept = starts[-1]
    np.testing.assert_allclose(kept.get_ydata()[:2], [0.3, 0.1])  # above the lowest loss of its rows


def test_search_curve_compares_stages_of_one_objective_only():
    stages = [
        Stage("2 short starts", (0, 1), [(1.0, 2.0), (0.5, 1.0)], objective=0),
        Stage("best start", (0,), [(7.0,), (6.0,)], objective=1),
    ]
    lines = search_curve(stages, kept=1).axes[0].lines
    kept = [line for line in lines if line.get_color() == style.INK and len(line.get_xdata())]
    np.testing.assert_allclose(kept[0].get_ydata(), [1.5, 0.5])  # above 0.5, not above 6


def test_search_curve_shows_noisy_losses_as_they_are():
    losses = [(3.0 + np.sin(step),) for step in range(40)]
    axes = search_curve([Stage("best start", (0,), losses)]).axes[0]
    assert axes.get_yscale() == "linear"
    assert axes.get_ylabel() == "loss"


def test_search_curve_leaves_failed_starts_out():
    stages = [Stage("2 short starts", (0, 1), [(np.inf, 2.0), (np.nan, 1.0)]), Stage("best start", (1,), [(1.0,)])]
    assert search_curve(stages).axes[0].get_yscale() == "log"


def test_search_curve_needs_a_step():
    with pytest.raises(DataError, match="stages must hold at least one step; got none"):
        search_curve([Stage("nothing", (0,))])


def test_curves_of_a_result() -> None:
    model = otp.Model(otp.Graph([("z", "x")], hidden=["z"]), {"z": m.Categorical(2), "x": m.Normal()})
    result = otp.fit(model, {"x": np.random.default_rng(0).normal(size=60)}, restarts=2)
    whole, history = (learning_curve(one).axes[0] for one in (result, result.history))
    losses = [record["loss"] for record in result.history]
    for axes in (whole, history):
        line = next(line for line in axes.lines if line.get_label() == "loss")
        assert line.get_ydata().tolist() == losses
    assert len(search_curve(result).axes[0].lines) == len(search_curve(result.stages).axes[0].lines)
    with pytest.raises(DataError, match=r"history must be a result of otp.fit, its history, or a dictionary"):
        learning_curve([1.0, 2.0])


def test_segments_are_bands_with_levels():
    figure = plot_segments([1.0, 2.0, np.nan, 9.0, 8.0], [0, 0, 2, 2, 0], times=[1, 2, 3, 5, 6], levels=[1.5, 0, 8])
    ax = figure.axes[0]
    assert len(ax.patches) == 3  # two stretches in state 0, one in state 2
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["state 0", "state 2"]
    assert {line.get_ydata()[0] for line in ax.lines[:3]} == {1.5, 8.0}
    assert ax.get_xlim() == (0.5, 6.5)


def test_segments_of_one_step():
    assert plot_segments([1.0], [0], names=["calm"]).axes[0].get_legend().get_texts()[0].get_text() == "calm"


@pytest.mark.parametrize(("values", "states", "message"), [([1, 2], [0], "must be as many"), ([1], [-1], "at least 0")])
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
