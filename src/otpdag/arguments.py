"""Checks of arguments that many functions have: whole numbers, seeds of random draws, times, names of choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from otpdag.errors import ModelError


def check_count(name: str, value: object, least: int = 1) -> int:
    """A whole number of at least ``least``; everything else is refused by the argument's name.

    >>> check_count("rows", 3)
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ModelError(f"{name} must be a whole number of at least {least}; got {value!r:.100}")
    return int(value)


def check_seed(seed: object) -> int:
    """A seed that random generators take.

    >>> check_seed(7)
    7
    """
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
        raise ModelError(f"seed must be a non-negative integer below 2^63; got {seed!r:.100}")
    return int(seed)


def check_level(level: object) -> None:
    """Refuse what is no coverage of an interval."""
    if isinstance(level, bool) or not isinstance(level, Real) or not 0 < float(level) < 1:
        raise ModelError(f"level must lie between 0 and 1; got {level!r:.100}")


def check_seconds(name: str, seconds: object) -> None:
    """Refuse times that are not positive numbers; None is no limit."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and float(str(seconds)) > 0):
        raise ModelError(f"{name} must be a number of seconds above zero; got {seconds!r}")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse all but some names."""
    if value not in allowed:
        raise ModelError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_mapping(name: str, values: object) -> Mapping[Any, Any]:
    """Values by name; everything else is refused.

    >>> check_mapping("do", {"x": 1.0})
    {'x': 1.0}
    """
    if not isinstance(values, Mapping):
        raise ModelError(f"{name} must give values by name, as a dict does; got {values!r:.100}")
    return values
