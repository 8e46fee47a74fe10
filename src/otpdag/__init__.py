"""Parameters of directed graphical models from incomplete data, by optimal transport."""

from otpdag import backward, costs, datasets, divergences, estimators, mechanisms, metrics, plots, schedules, tables
from otpdag.engine import Course, FitResult, Method, entropic, fit, paper, transport
from otpdag.errors import ConvergenceWarning, DataError, GraphError, ModelError, NotFittedError, OtpdagError
from otpdag.graph import Graph, Lag, lag
from otpdag.mechanisms.parameters import start, tie
from otpdag.model import Model, load
from otpdag.sequences import Sequences

__version__ = "0.1.0"

__all__ = [
    "ConvergenceWarning",
    "Course",
    "DataError",
    "FitResult",
    "Graph",
    "GraphError",
    "Lag",
    "Method",
    "Model",
    "ModelError",
    "NotFittedError",
    "OtpdagError",
    "Sequences",
    "backward",
    "costs",
    "datasets",
    "divergences",
    "entropic",
    "estimators",
    "fit",
    "lag",
    "load",
    "mechanisms",
    "metrics",
    "paper",
    "plots",
    "schedules",
    "start",
    "tables",
    "tie",
    "transport",
]
