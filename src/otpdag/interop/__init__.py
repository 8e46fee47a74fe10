"""Other libraries' models, formats and formulas, in both directions.

Each function imports its library when it is called, so that none of them has to be installed.
"""

from otpdag.interop.discrete_networks import from_bif as from_bif
from otpdag.interop.discrete_networks import from_pgmpy as from_pgmpy
from otpdag.interop.discrete_networks import from_pyagrum as from_pyagrum
from otpdag.interop.discrete_networks import to_bif as to_bif
from otpdag.interop.discrete_networks import to_pgmpy as to_pgmpy
from otpdag.interop.discrete_networks import to_pyagrum as to_pyagrum
from otpdag.interop.estimands import estimand as estimand
from otpdag.interop.estimands import to_y0 as to_y0
from otpdag.interop.fitted_estimators import from_hmmlearn as from_hmmlearn
from otpdag.interop.fitted_estimators import from_sklearn_mixture as from_sklearn_mixture
from otpdag.interop.fitted_estimators import to_arviz as to_arviz
from otpdag.interop.formulas import by_group as by_group
from otpdag.interop.formulas import formula_estimates as formula_estimates
from otpdag.interop.formulas import from_formulas as from_formulas
