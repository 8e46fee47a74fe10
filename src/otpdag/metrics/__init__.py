"""How far an estimate is from the truth: hidden labels matched first, distributions, topics, images."""

from otpdag.metrics._image_quality import code_perplexity as code_perplexity
from otpdag.metrics._image_quality import feature_distance as feature_distance
from otpdag.metrics._image_quality import fid as fid
from otpdag.metrics._image_quality import frechet_distance as frechet_distance
from otpdag.metrics._image_quality import lpips as lpips
from otpdag.metrics._image_quality import psnr as psnr
from otpdag.metrics._image_quality import ssim as ssim
from otpdag.metrics._topics import grid_distances as grid_distances
from otpdag.metrics._topics import hellinger as hellinger
from otpdag.metrics._topics import kl_divergence as kl_divergence
from otpdag.metrics._topics import match_labels as match_labels
from otpdag.metrics._topics import match_signs as match_signs
from otpdag.metrics._topics import match_states as match_states
from otpdag.metrics._topics import match_topics as match_topics
from otpdag.metrics._topics import matched_errors as matched_errors
from otpdag.metrics._topics import npmi_coherence as npmi_coherence
from otpdag.metrics._topics import patterns_recovered as patterns_recovered
from otpdag.metrics._topics import published_topic_errors as published_topic_errors
from otpdag.metrics._topics import top_words as top_words
from otpdag.metrics._topics import topic_diversity as topic_diversity
from otpdag.metrics._topics import topic_errors as topic_errors
