r"""The objective: pure functions from parameters and points to loss terms.

.. math::
    \sum_{i \in O} E\,c_i(x_i, \psi_i(\mathrm{pa}_i, u_i))
    + \eta \sum_f D(P_\phi(f), P_\theta(f))
    + \epsilon\, E\,\mathrm{KL}(\phi(z \mid x) \,\|\, P_\theta(z))
    + \kappa\, D_{obs}(P_{data}, P_\theta)

Two ways to evaluate it: :func:`gibbs_terms` with the closed-form backward map and noise integrated out,
:func:`sampled_terms` with a learned map and drawn or abducted noise (Algorithm 1). :func:`direct_term` is the last.
"""

from otpdag.objective.closed import direct_term, gibbs_terms, row_losses
from otpdag.objective.sampled import Streams, build_maps, sampled_terms
from otpdag.objective.terms import LossTerms, split_theta

__all__ = [
    "LossTerms",
    "Streams",
    "build_maps",
    "direct_term",
    "gibbs_terms",
    "row_losses",
    "sampled_terms",
    "split_theta",
]
