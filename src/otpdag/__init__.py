"""Parameters of directed graphical models from incomplete data, by optimal transport."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from otpdag import backward, costs, datasets, divergences, engine, mechanisms, metrics, objective, schedules, tables
from otpdag.choice import Selection, compare, select
from otpdag.data.sequences import Sequences
from otpdag.engine import (
    Course,
    Documents,
    FitResult,
    Images,
    Method,
    entropic,
    fit,
    paper,
    transport,
)
from otpdag.errors import ConvergenceWarning, DataError, GraphError, ModelError, NotFittedError, OtpdagError
from otpdag.graph import Graph, Lag, lag
from otpdag.mechanisms.parameters import start, tie
from otpdag.model import Model, load

if TYPE_CHECKING:
    from otpdag import estimators, plots

__version__ = "0.1.0"

__all__ = [
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
    "lag",
    "load",
    "mechanisms",
    "metrics",
    "objective",
    "paper",
    "plots",
    "schedules",
    "select",
    "start",
    "tables",
    "tie",
    "transport",
]


def __getattr__(name: str) -> ModuleType:
    """Import scikit-learn and matplotlib, which take as long as all the rest, when they are first used."""
    if name in ("estimators", "plots"):
        return import_module(f"otpdag.{name}")
    raise AttributeError(f"module 'otpdag' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
