"""Other libraries' models, formats and formulas, in both directions.

Each function imports its library when it is called, so that none of them has to be installed.
"""

from otpdag.neighbours.arviz_data import to_arviz
from otpdag.neighbours.bif import from_bif, to_bif
from otpdag.neighbours.discrete_networks import from_pgmpy, from_pyagrum, to_pgmpy, to_pyagrum
from otpdag.neighbours.estimands import estimand, to_y0
from otpdag.neighbours.fitted_estimators import from_hmmlearn, from_sklearn_mixture
from otpdag.neighbours.formula_estimates import formula_estimates
from otpdag.neighbours.formulas import from_formulas

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
