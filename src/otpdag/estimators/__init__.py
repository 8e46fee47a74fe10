"""Familiar models with the methods of scikit-learn and its relatives, each a thin face of a graph."""

from otpdag.estimators.autoencoder import WassersteinAutoencoder as WassersteinAutoencoder
from otpdag.estimators.gaussian_mixture import GaussianMixture as GaussianMixture
from otpdag.estimators.graph_estimators import GraphClassifier as GraphClassifier
from otpdag.estimators.graph_estimators import GraphImputer as GraphImputer
from otpdag.estimators.graph_estimators import GraphRegressor as GraphRegressor
from otpdag.estimators.hidden_markov import HiddenMarkovModel as HiddenMarkovModel
from otpdag.estimators.latent_dirichlet import LatentDirichletAllocation as LatentDirichletAllocation
from otpdag.estimators.vector_quantized import VectorQuantizedAutoencoder as VectorQuantizedAutoencoder
