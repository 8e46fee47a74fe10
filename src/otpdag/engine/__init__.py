"""The engine: from a model and data to estimates, on one way for all kinds of data.

``recognise`` the data, ``resolve`` method and arguments, lay out the problem, ``search``, and leave the end in the
model.
"""

import warnings
from typing import Any

from otpdag.engine.adam import Adam
from otpdag.engine.data_kind import DataKind, Layout
from otpdag.engine.fit import fit
from otpdag.engine.method import Method, entropic, likelihood, paper, transport
from otpdag.engine.monitor import Stage
from otpdag.engine.optimiser import EM, Deterministic, Memory, Optimiser, Outcome, Progress, Run, Watch
from otpdag.engine.result import FitResult, Status
from otpdag.engine.robust import RobustOptions
from otpdag.engine.search import Restart, Searcher, SearchResult, SearchSchedule, search

__all__ = [
    "EM",
    "Adam",
    "DataKind",
    "Deterministic",
    "FitResult",
    "Layout",
    "Memory",
    "Method",
    "Optimiser",
    "Outcome",
    "Progress",
    "Restart",
    "RobustOptions",
    "Run",
    "SearchResult",
    "SearchSchedule",
    "Searcher",
    "Stage",
    "Status",
    "Watch",
    "entropic",
    "fit",
    "likelihood",
    "paper",
    "search",
    "transport",
]

_RENAMED = {"LBFGS": "Deterministic", "Course": "SearchSchedule"}


def __getattr__(name: str) -> Any:
    """Earlier names, until 1.0."""
    if name not in _RENAMED:
        raise AttributeError(f"module 'otpdag.engine' has no attribute {name!r}")
    warnings.warn(f"otpdag.engine.{name} is now otpdag.engine.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
