"""The engine: from a model and a table to estimates."""

from otpdag.engine.fit import fit
from otpdag.engine.method import Method, entropic, paper, transport
from otpdag.engine.result import FitResult, Status
from otpdag.engine.search import Course, Restart

__all__ = ["Course", "FitResult", "Method", "Restart", "Status", "entropic", "fit", "paper", "transport"]
