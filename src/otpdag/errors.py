"""The errors and warnings that the library raises, all under one root, and how their messages list names.

Text that is safe to print: what is called a name in a file must not move a terminal's cursor.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any


class OtpdagError(Exception):
    """Root of every error that the library raises on purpose."""


class GraphError(OtpdagError, ValueError):
    """The graph is not a directed acyclic graph, or names a node that is not in it."""


class ModelError(OtpdagError, ValueError):
    """A mechanism, parameter or option does not fit the graph."""


class DataError(OtpdagError, ValueError):
    """The table does not fit the model."""


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
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def label_text(value: object) -> str:
    """A category as text: the same for a code that is whole, however its column stores it.

    >>> label_text(1.0), label_text(1), label_text("red"), label_text(0.5)
    ('1', '1', 'red', '0.5')
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
