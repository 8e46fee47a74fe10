"""The errors and warnings that the library raises, all under one root, and how their messages list names.

Also checks of arguments that many functions have, which raise them, and text that is safe to print: what is called a
name in a file must not move a terminal's cursor.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")


class OtpdagError(Exception):
    """Root of every error that the library raises on purpose."""


class GraphError(OtpdagError, ValueError):
    """The graph is not a directed acyclic graph, or names a node that is not in it."""


class ModelError(OtpdagError, ValueError):
    """A mechanism, parameter or option does not fit the graph."""


class DataError(OtpdagError, ValueError):
    """The table does not fit the model."""


class OutOfTime(OtpdagError):
    """The time limit of a fit went by: before the first step, when there is nothing to keep.

    In the middle of a step the search catches it, and keeps what it has.
    """


if TYPE_CHECKING:

    class NotFittedError(OtpdagError, RuntimeError):
        """The model or estimator has no parameters yet; scikit-learn's ``NotFittedError`` too."""


def __getattr__(name: str) -> Any:
    """Make ``NotFittedError`` when it is first asked for: its second parent is scikit-learn's, slow to import."""
    if name != "NotFittedError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sklearn.exceptions import NotFittedError as ScikitLearnError

    text = "The model or estimator has no parameters yet; scikit-learn's ``NotFittedError`` too."
    made = type(name, (OtpdagError, RuntimeError, ScikitLearnError), {"__doc__": text, "__module__": __name__})
    globals()[name] = made
    return made


class ColumnTypeWarning(UserWarning):
    """What a column holds is doubtful."""


class ApproximationWarning(UserWarning):
    """Sums over what rows do not show are approximate: exact ones would need more than the budget."""


class ConvergenceWarning(UserWarning):
    """A fit stopped before it converged."""


def listed(items: Sequence[Any], *, most: int = 8, show: Callable[[Any], str] = repr) -> str:
    """Write items one after another, the first ``most`` of them.

    >>> listed(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(show, items[:most])) + more


def printable(text: str, keep: str = "\n") -> str:
    r"""A text without characters that a terminal would obey: each becomes its escape.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.replace(keep, "").isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def label_text(value: object) -> str:
    """A category as text: the same for a code that is whole, however its column stores it.

    >>> label_text(1.0), label_text(1), label_text("red"), label_text(0.5)
    ('1', '1', 'red', '0.5')
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


# -- arguments ---------------------------------------------------------------------------------------------------------


@contextmanager
def told_as(kind: type[OtpdagError], what: str, *errors: type[Exception]) -> Iterator[None]:
    """Errors of others as one of ours, which says what was asked for and what they say of it.

    >>> with told_as(DataError, "rows must be numbers", ValueError):
    ...     float("many")
    Traceback (most recent call last):
    otpdag.errors.DataError: rows must be numbers: could not convert string to float: 'many'
    """
    try:
        yield
    except errors as error:
        raise kind(f"{what}: {error}") from None


def check_count(name: str, value: object, least: int = 1) -> int:
    """A whole number of at least ``least``; everything else is refused by the argument's name.

    >>> check_count("rows", 3)
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ModelError(f"{name} must be a whole number of at least {least}; got {value!r:.100}")
    if int(value) >= 2**63:
        raise ModelError(f"{name} must be below 2^63; got {value!r:.100}")
    return int(value)


def check_number(name: str, value: object, least: float = -math.inf) -> None:
    """Refuse what is no number of at least ``least``.

    >>> check_number("eps", "a")
    Traceback (most recent call last):
    otpdag.errors.ModelError: eps must be a number; got 'a'
    """
    if isinstance(value, int) and abs(value) > 2**1000:
        raise ModelError(f"{name} must be a number of at most 1e300 in size; got {value!r:.100}")
    if isinstance(value, bool) or not isinstance(value, Real) or (least > -math.inf and not float(value) >= least):
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ModelError(f"{name} must be a number{bound}; got {value!r:.100}")


def check_positive(name: str, value: object) -> None:
    """Refuse what is no number above zero."""
    check_number(name, value)
    if not float(value) > 0:  # type: ignore[arg-type]
        raise ModelError(f"{name} must be positive; got {value!r}")


def check_numbers(name: str, values: object, least: float = -math.inf) -> None:
    """Refuse what is no list of numbers of at least ``least``."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ModelError(f"{name} must be a list of numbers; got {values!r:.100}")
    for value in values:
        check_number(name, value, least)


_is_late: ContextVar[Callable[[], bool] | None] = ContextVar("is_late", default=None)


@contextmanager
def out_of_time_if(is_late: Callable[[], bool]) -> Iterator[None]:
    """Let :func:`check_time` raise in here once it is late."""
    token = _is_late.set(is_late)
    try:
        yield
    finally:
        _is_late.reset(token)


def check_time() -> None:
    """Give up in the middle of a long sum that somebody no longer waits for."""
    is_late = _is_late.get()
    if is_late is not None and is_late():
        raise OutOfTime(
            "the time limit went by while it was planned how to sum over what rows do not show: there is no estimate; "
            "allow more time, take a part of the rows, or use method='transport'"
        )


def until_late(values: Iterable[T]) -> Iterator[T]:
    """The first of some values that are made one by one, and the others until it is late."""
    for value in values:
        yield value
        if (is_late := _is_late.get()) is not None and is_late():
            return


def check_seed(seed: object) -> int:
    """A seed that random generators take.

    >>> check_seed(7)
    7
    """
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
        raise ModelError(f"seed must be a non-negative integer below 2^63; got {seed!r:.100}")
    return int(seed)


def check_share(name: str, value: object) -> None:
    """Refuse what is no share of a whole, such as the coverage of an interval."""
    if isinstance(value, Integral) or not isinstance(value, Real) or not 0 < float(value) < 1:
        raise ModelError(f"{name} must lie between 0 and 1; got {value!r:.100}")


def check_seconds(name: str, seconds: object) -> None:
    """Refuse times that are not positive numbers; None is no limit."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and float(str(seconds)) > 0 and len(str(seconds)) < 300):
        raise ModelError(f"{name} must be a number of seconds above zero; got {seconds!r}")


def check_choice(name: str, value: object, allowed: Sequence[str | None]) -> None:
    """Refuse all but some names."""
    if not isinstance(value, str | None) or value not in allowed:
        raise ModelError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r:.100}")


def check_mapping(name: str, values: object, *, optional: bool = False) -> Mapping[Any, Any]:
    """Values by name; everything else is refused, but None where they are optional.

    >>> check_mapping("do", {"x": 1.0}), check_mapping("do", None, optional=True)
    ({'x': 1.0}, {})
    """
    if optional and values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ModelError(f"{name} must give values by name, as a dict does; got {values!r:.100}")
    return values
