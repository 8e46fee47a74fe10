"""Trusted estimators of the benchmarks' models; each returns parameters in the layout of `Model.params()`."""

from benchmarks.oracles.factor import factor_analysis, sibling_sample
from benchmarks.oracles.latent_class import latent_class_em
from benchmarks.oracles.mixed_dag import mixed_dag_ml
from benchmarks.oracles.mixture import gaussian_mixture_em
from benchmarks.oracles.network import network_em

__all__ = [
    "factor_analysis",
    "gaussian_mixture_em",
    "latent_class_em",
    "mixed_dag_ml",
    "network_em",
    "sibling_sample",
]
