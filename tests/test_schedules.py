"""Schedules begin and end where they say, and go the way that their names say."""

import pytest

from otpdag.schedules import Constant, Cosine, Linear
from otpdag.settings import value_at


@pytest.mark.parametrize("schedule", [Linear(4.0, 1.0), Cosine(4.0, 1.0)])
def test_ends(schedule):
    assert [schedule(progress) for progress in (0.0, 1.0, 1.5)] == pytest.approx([4.0, 1.0, 1.0])


def test_the_middle_is_the_mean():
    assert Linear(4.0, 1.0)(0.5) == 2.5
    assert Cosine(4.0, 1.0)(0.5) == pytest.approx(2.5)
    assert Cosine(4.0, 1.0)(0.25) == pytest.approx(2.5 + 1.5 * 0.5**0.5)


def test_an_early_end_is_kept():
    assert [Linear(0.0, 1.0, until=0.5)(progress) for progress in (0.25, 0.5, 0.9)] == [0.5, 1.0, 1.0]


def test_a_number_stays_and_a_schedule_is_followed():
    assert value_at(3, 0.7) == Constant(3.0)(0.7) == 3.0
    assert value_at(Linear(0.0, 1.0), 0.7) == 0.7
