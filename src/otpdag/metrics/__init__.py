"""How far an estimate is from the truth: hidden labels matched first, distributions, topics, images."""

from otpdag.metrics._coherence import npmi_coherence, top_words, topic_diversity
from otpdag.metrics._image_quality import code_perplexity, feature_distance, fid, frechet_distance, lpips, psnr, ssim
from otpdag.metrics._topics import (
    grid_distances,
    hellinger,
    kl_divergence,
    match_labels,
    match_signs,
    match_states,
    match_topics,
    matched_errors,
    patterns_recovered,
    published_topic_errors,
    topic_errors,
)

__all__ = [
    "code_perplexity",
    "feature_distance",
    "fid",
    "frechet_distance",
    "grid_distances",
    "hellinger",
    "kl_divergence",
    "lpips",
    "match_labels",
    "match_signs",
    "match_states",
    "match_topics",
    "matched_errors",
    "npmi_coherence",
    "patterns_recovered",
    "psnr",
    "published_topic_errors",
    "ssim",
    "top_words",
    "topic_diversity",
    "topic_errors",
]
