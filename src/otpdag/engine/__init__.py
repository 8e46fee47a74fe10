"""The engine: from a model and data to estimates, on one way for all kinds of data.

``recognise`` the data, ``resolve`` method and arguments, lay out the problem, ``search``, and leave the end in the
model.
"""

from otpdag.engine.adam import Adam
from otpdag.engine.course import Course
from otpdag.engine.em import EM
from otpdag.engine.fit import fit
from otpdag.engine.kinds.kind import DataKind
from otpdag.engine.lbfgs import LBFGS
from otpdag.engine.method import Method, entropic, paper, transport
from otpdag.engine.point_layout import Layout
from otpdag.engine.result import FitResult, Status
from otpdag.engine.robust_options import RobustOptions
from otpdag.engine.search import Restart

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
