"""How far an estimate is from the truth: hidden labels matched first, distances between distributions, topics."""

from otpdag.metrics._coherence import npmi_coherence, top_words, topic_diversity
from otpdag.metrics._distributions import hellinger, kl_divergence
from otpdag.metrics._matching import match_labels, match_signs, match_states, matched_errors
from otpdag.metrics._topics import (
    grid_distances,
    match_topics,
    patterns_recovered,
    published_topic_errors,
    topic_errors,
)

__all__ = [
    "grid_distances",
    "hellinger",
    "kl_divergence",
    "match_labels",
    "match_signs",
    "match_states",
    "match_topics",
    "matched_errors",
    "npmi_coherence",
    "patterns_recovered",
    "published_topic_errors",
    "top_words",
    "topic_diversity",
    "topic_errors",
]
