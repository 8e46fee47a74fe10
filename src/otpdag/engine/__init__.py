"""The engine: from a model and data to estimates, on one way for all kinds of data.

``recognise`` the data, ``resolve`` method and arguments, lay out the problem, ``search``, and leave the end in the
model.
"""

import warnings
from typing import Any

from otpdag.engine.adam import Adam as Adam
from otpdag.engine.data_kind import DataKind as DataKind
from otpdag.engine.data_kind import Layout as Layout
from otpdag.engine.fit import fit as fit
from otpdag.engine.method import Method as Method
from otpdag.engine.method import entropic as entropic
from otpdag.engine.method import likelihood as likelihood
from otpdag.engine.method import paper as paper
from otpdag.engine.method import transport as transport
from otpdag.engine.monitor import Monitor as Monitor
from otpdag.engine.monitor import Stage as Stage
from otpdag.engine.optimiser import EM as EM
from otpdag.engine.optimiser import Deterministic as Deterministic
from otpdag.engine.optimiser import Memory as Memory
from otpdag.engine.optimiser import Optimiser as Optimiser
from otpdag.engine.optimiser import Outcome as Outcome
from otpdag.engine.optimiser import Progress as Progress
from otpdag.engine.optimiser import Run as Run
from otpdag.engine.optimiser import Watch as Watch
from otpdag.engine.result import FitResult as FitResult
from otpdag.engine.result import Status as Status
from otpdag.engine.robust import RobustOptions as RobustOptions
from otpdag.engine.search import Restart as Restart
from otpdag.engine.search import Searcher as Searcher
from otpdag.engine.search import SearchResult as SearchResult
from otpdag.engine.search import SearchSchedule as SearchSchedule
from otpdag.engine.search import search as search

_RENAMED = {"LBFGS": "Deterministic", "Course": "SearchSchedule"}


def __getattr__(name: str) -> Any:
    """Earlier names, until 1.0."""
    if name not in _RENAMED:
        raise AttributeError(f"module 'otpdag.engine' has no attribute {name!r}")
    warnings.warn(f"otpdag.engine.{name} is now otpdag.engine.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
