"""How much work each stage of a search does."""

import pytest

from otpdag.engine.method import SearchSchedule
from otpdag.errors import ModelError


@pytest.mark.parametrize(
    ("points", "rows"),
    [
        (1, 600),  # cheap rows: as many as are wanted
        (250, 600),  # 600 * 250 is all that is allowed
        (300, 500),
        (499, 300),
        (100_000, 300),  # never fewer
    ],
)
def test_rows_fall_with_the_points_of_a_row(points, rows):
    assert SearchSchedule().rows_for(points) == rows


def test_no_more_rows_than_are_asked_for():
    few = SearchSchedule(short_rows=50)
    assert few.rows_for(1) == few.rows_for(10**9) == 50
    assert 300 > 50


@pytest.mark.parametrize("name", ["short_rows", "short_elements", "finalists", "finalist_steps", "alternatives_kept"])
def test_stages_of_nothing_are_refused(name):
    with pytest.raises(ModelError, match=f"{name} must be at least 1; got 0"):
        SearchSchedule(**{name: 0})


@pytest.mark.parametrize("name", ["short_steps", "short_moves", "finalist_moves", "moves"])
def test_stages_that_may_be_left_out_are_not_negative(name):
    assert getattr(SearchSchedule(**{name: 0}), name) == 0
    with pytest.raises(ModelError, match=f"{name} must not be negative; got -1"):
        SearchSchedule(**{name: -1})


def test_alternatives_take_at_least_a_step():
    with pytest.raises(ModelError, match=r"alternative_steps must be at least 1; got \(3, 6, 0\)"):
        SearchSchedule(alternative_steps=(3, 6, 0))
