"""The closed-form backward map that follows the graph: exact sums over what each row does not show.

Lay a table out once (:func:`lay_out`); then, at any parameters, read the evidence of rows (:func:`log_evidence`), its
weighed sum with a gradient (:func:`total_evidence`), the statistics of every family (:func:`expectations`),
probabilities of categories (:func:`state_probabilities`), means and variances of numbers (:func:`node_moments`), the
likeliest joint state (:func:`likeliest_states`) and joint draws of everything unknown (:func:`posterior_draws`).
Points of numbers that have no closed form follow the posterior by :func:`moved`. Rows that need larger tables than a
:class:`Budget` allows are approximated (:func:`lay_out_within`).
"""

from otpdag.likelihood.elimination.evidence import (
    Budget,
    Expectations,
    expectations,
    lay_out_within,
    log_evidence,
    moved,
    restless_copies,
    told,
    total_evidence,
)
from otpdag.likelihood.elimination.expected_statistics import complete_sums
from otpdag.likelihood.elimination.families import WeighedRows
from otpdag.likelihood.elimination.family_statistics import Counts, Moments, Rows
from otpdag.likelihood.elimination.posterior import likeliest_states, node_moments, posterior_draws, state_probabilities
from otpdag.likelihood.elimination.row_layout import Beyond, EliminationOptions, Layout, lay_out
from otpdag.likelihood.elimination.sums import Tempering

__all__ = [
    "Beyond",
    "Budget",
    "Counts",
    "EliminationOptions",
    "Expectations",
    "Layout",
    "Moments",
    "Rows",
    "Tempering",
    "WeighedRows",
    "complete_sums",
    "expectations",
    "lay_out",
    "lay_out_within",
    "likeliest_states",
    "log_evidence",
    "moved",
    "node_moments",
    "posterior_draws",
    "restless_copies",
    "state_probabilities",
    "told",
    "total_evidence",
]
