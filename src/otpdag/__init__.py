"""Parameters of directed graphical models from incomplete data, by optimal transport."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from otpdag import (
        backward,
        costs,
        datasets,
        divergences,
        engine,
        estimators,
        mechanisms,
        metrics,
        neighbours,
        objective,
        plots,
        schedules,
        tables,
    )
    from otpdag.choice import Selection, compare, select
    from otpdag.data import Documents, Images, Partitioned, Sequences
    from otpdag.engine import Course, FitResult, Method, entropic, fit, paper, transport
    from otpdag.errors import (
        ApproximationWarning,
        ColumnTypeWarning,
        ConvergenceWarning,
        DataError,
        GraphError,
        ModelError,
        NotFittedError,
        OtpdagError,
    )
    from otpdag.graph import Graph, Lag, lag
    from otpdag.mechanisms.parameters import start, tie
    from otpdag.model import Model, load
    from otpdag.model.part_by_part import impute_to, posterior_to, score_to

__version__ = "0.1.0"

__all__ = [
    "ApproximationWarning",
    "ColumnTypeWarning",
    "ConvergenceWarning",
    "Course",
    "DataError",
    "Documents",
    "FitResult",
    "Graph",
    "GraphError",
    "Images",
    "Lag",
    "Method",
    "Model",
    "ModelError",
    "NotFittedError",
    "OtpdagError",
    "Partitioned",
    "Selection",
    "Sequences",
    "backward",
    "compare",
    "costs",
    "datasets",
    "divergences",
    "engine",
    "entropic",
    "estimators",
    "fit",
    "impute_to",
    "lag",
    "load",
    "mechanisms",
    "metrics",
    "neighbours",
    "objective",
    "paper",
    "plots",
    "posterior_to",
    "schedules",
    "score_to",
    "select",
    "start",
    "tables",
    "tie",
    "transport",
]

_HOME = {
    "otpdag.choice": ("Selection", "compare", "select"),
    "otpdag.data": ("Documents", "Images", "Partitioned", "Sequences"),
    "otpdag.engine": ("Course", "FitResult", "Method", "entropic", "fit", "paper", "transport"),
    "otpdag.errors": (
        "ApproximationWarning",
        "ColumnTypeWarning",
        "ConvergenceWarning",
        "DataError",
        "GraphError",
        "ModelError",
        "NotFittedError",
        "OtpdagError",
    ),
    "otpdag.graph": ("Graph", "Lag", "lag"),
    "otpdag.mechanisms.parameters": ("start", "tie"),
    "otpdag.model": ("Model", "load"),
    "otpdag.model.part_by_part": ("impute_to", "posterior_to", "score_to"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is first used: torch and its like take seconds, which ``--help`` need not."""
    if name not in __all__:
        raise AttributeError(f"module 'otpdag' has no attribute {name!r}{_elsewhere(name)}")
    home = _MODULE_OF.get(name)
    value = import_module(f"otpdag.{name}") if home is None else getattr(import_module(home), name)
    globals()[name] = value
    return value


def _elsewhere(name: str) -> str:
    """Where a name lives that was looked for here."""
    if name.startswith("_"):  # what tools look for
        return ""
    rooms = ("mechanisms", "divergences", "estimators", "plots", "costs", "neighbours", "metrics")
    homes = [room for room in rooms if name in getattr(import_module(f"otpdag.{room}"), "__all__", ())]
    return f"; it is otpdag.{homes[0]}.{name}" if homes else ""


def __dir__() -> list[str]:
    return sorted(__all__)
