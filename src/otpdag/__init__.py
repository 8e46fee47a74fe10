"""Parameters of directed graphical models from incomplete data, by optimal transport."""

from difflib import get_close_matches
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
        interop,
        mechanisms,
        metrics,
        objective,
        plots,
        schedules,
        tables,
    )
    from otpdag.choice import Selection, compare, select
    from otpdag.data import Documents, Images, Partitioned, Sequences
    from otpdag.engine import Course, FitResult, Method, RobustOptions, entropic, fit, paper, transport
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
    from otpdag.model.streaming import impute_to, posterior_to, score_to

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
    "RobustOptions",
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
    "interop",
    "lag",
    "load",
    "mechanisms",
    "metrics",
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
    "otpdag.engine": ("Course", "FitResult", "Method", "RobustOptions", "entropic", "fit", "paper", "transport"),
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
    "otpdag.model.streaming": ("impute_to", "posterior_to", "score_to"),
}
_SEARCHED = ("mechanisms", "estimators", "interop", "plots", "divergences", "datasets", "metrics", "costs")
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is first used: torch and its like take seconds, which ``--help`` need not."""
    if name not in __all__:
        raise AttributeError(f"module 'otpdag' has no attribute {name!r}{_where(name)}")
    home = _MODULE_OF.get(name)
    value = import_module(f"otpdag.{name}") if home is None else getattr(import_module(home), name)
    globals()[name] = value
    return value


def _where(name: str) -> str:
    """A hint at the module that has what a user looked for in the package itself: ``otpdag.mechanisms.Normal``."""
    if name.startswith("_"):
        return ""
    home = next((one for one in _SEARCHED if name in import_module(f"otpdag.{one}").__all__), None)
    if home is not None:
        return f"; it is otpdag.{home}.{name}"
    near = get_close_matches(name, __all__, n=1)
    return f"; is it {near[0]!r}?" if near else ""


def __dir__() -> list[str]:
    return sorted(__all__)
