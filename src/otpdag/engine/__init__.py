"""The engine: from a model and data to estimates, on one way for all kinds of data.

``recognise`` the data, ``resolve`` method and arguments, lay out the problem, ``search``, and leave the end in the
model.
"""

from otpdag.engine.adam import Adam
from otpdag.engine.data_kind import DataKind, Layout
from otpdag.engine.fit import fit
from otpdag.engine.lbfgs import LBFGS
from otpdag.engine.method import Method, entropic, paper, transport
from otpdag.engine.optimiser import Course
from otpdag.engine.outlying_rows import RobustOptions
from otpdag.engine.result import FitResult, Status
from otpdag.engine.search import Restart
from otpdag.engine.updates import EM

__all__ = [
    "EM",
    "LBFGS",
    "Adam",
    "Course",
    "DataKind",
    "FitResult",
    "Layout",
    "Method",
    "Restart",
    "RobustOptions",
    "Status",
    "entropic",
    "fit",
    "paper",
    "transport",
]
