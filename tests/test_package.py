"""What the package itself says."""

from __future__ import annotations

import pytest

import otpdag


@pytest.mark.parametrize(
    ("name", "home"), [("Normal", "mechanisms"), ("HiddenMarkovModel", "estimators"), ("draw_graph", "plots")]
)
def test_a_name_from_another_room_is_pointed_at(name: str, home: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; it is otpdag.{home}.{name}$"):
        getattr(otpdag, name)


def test_a_name_from_nowhere() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = otpdag.nonsense
