"""Parameters of directed graphical models from incomplete data, by optimal transport."""

import warnings
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
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
    from otpdag.engine import (
        FitResult,
        Method,
        RobustOptions,
        SearchSchedule,
        entropic,
        fit,
        paper,
        transport,
    )
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
    "SearchSchedule",
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

_HOMES = ("errors", "graph", "mechanisms.parameters", "model", "model.streaming", "data", "engine", "choice")
"""Modules that define the names which are no modules, the light ones first: to find an error imports nothing heavy."""

_DEPRECATED = {"neighbours": "interop", "Course": "SearchSchedule"}
_SEARCHED = ("mechanisms", "estimators", "interop", "plots", "divergences", "datasets", "metrics", "costs")


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is first used: torch and its like take seconds, which ``--help`` need not."""
    if name in _DEPRECATED:
        new = _DEPRECATED[name]
        warnings.warn(f"otpdag.{name} is now otpdag.{new}", DeprecationWarning, stacklevel=2)
        return getattr(import_module("otpdag"), new)
    if name not in __all__:
        raise AttributeError(f"module 'otpdag' has no attribute {name!r}{_where(name)}")
    globals()[name] = value = _found(name)
    return value


def _found(name: str) -> Any:
    if find_spec(f"otpdag.{name}") is not None:
        return import_module(f"otpdag.{name}")
    homes = (import_module(f"otpdag.{home}") for home in _HOMES)
    return next(getattr(home, name) for home in homes if hasattr(home, name))


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
