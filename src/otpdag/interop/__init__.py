"""Other libraries' models, formats and formulas, in both directions.

Each function imports its library when it is called, so that none of them has to be installed.
"""

from otpdag.interop.discrete_networks import from_bif, from_pgmpy, from_pyagrum, to_bif, to_pgmpy, to_pyagrum
from otpdag.interop.estimands import estimand, to_y0
from otpdag.interop.fitted_estimators import from_hmmlearn, from_sklearn_mixture, to_arviz
from otpdag.interop.formulas import formula_estimates, from_formulas

__all__ = [
    "estimand",
    "formula_estimates",
    "from_bif",
    "from_formulas",
    "from_hmmlearn",
    "from_pgmpy",
    "from_pyagrum",
    "from_sklearn_mixture",
    "to_arviz",
    "to_bif",
    "to_pgmpy",
    "to_pyagrum",
    "to_y0",
]
