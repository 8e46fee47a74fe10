"""Familiar models with the methods of scikit-learn and its relatives, each a thin face of a graph."""

from otpdag.estimators.code_prior import CodePrior
from otpdag.estimators.gaussian_mixture import GaussianMixture
from otpdag.estimators.hidden_markov import HiddenMarkovModel
from otpdag.estimators.latent_dirichlet import LatentDirichletAllocation
from otpdag.estimators.vector_quantized import VectorQuantizedAutoencoder
from otpdag.estimators.wasserstein_autoencoder import WassersteinAutoencoder

__all__ = [
    "CodePrior",
    "GaussianMixture",
    "HiddenMarkovModel",
    "LatentDirichletAllocation",
    "VectorQuantizedAutoencoder",
    "WassersteinAutoencoder",
]
