"""Familiar models with the methods of scikit-learn and its relatives, each a thin face of a graph."""

from otpdag.estimators.autoencoder import WassersteinAutoencoder
from otpdag.estimators.gaussian_mixture import GaussianMixture
from otpdag.estimators.hidden_markov import HiddenMarkovModel
from otpdag.estimators.latent_dirichlet import LatentDirichletAllocation
from otpdag.estimators.vector_quantized import CodePrior, VectorQuantizedAutoencoder

__all__ = [
    "CodePrior",
    "GaussianMixture",
    "HiddenMarkovModel",
    "LatentDirichletAllocation",
    "VectorQuantizedAutoencoder",
    "WassersteinAutoencoder",
]
