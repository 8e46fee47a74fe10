"""How far an estimate is from the truth: hidden labels matched first, distances between distributions."""

from otpdag.metrics._distributions import hellinger, kl_divergence
from otpdag.metrics._matching import match_labels, match_signs, match_states, matched_errors

__all__ = ["hellinger", "kl_divergence", "match_labels", "match_signs", "match_states", "matched_errors"]
