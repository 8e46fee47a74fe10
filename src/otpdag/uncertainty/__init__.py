"""How sure an estimate is: the observed information of a problem, standard errors, and the summary that shows them."""

from otpdag.uncertainty.linear_normal import rotated_loadings
from otpdag.uncertainty.standard_errors import Errors, parameter_covariance, point_of, standard_errors, without_errors
from otpdag.uncertainty.summary import Summary, summarise

__all__ = [
    "Errors",
    "Summary",
    "parameter_covariance",
    "point_of",
    "rotated_loadings",
    "standard_errors",
    "summarise",
    "without_errors",
]
