"""Data with a known truth: synthetic generators, discrete networks read from BIF files; public images and texts.

A generator takes the number of rows and a numpy ``Generator``, draws a truth and then rows, and returns both.
The truth has the layout of ``Model.params()``: parameters by name, by node.
"""

from otpdag.datasets._corpus import Corpus, corpus, read_corpus
from otpdag.datasets._folder import data_folder, load_network
from otpdag.datasets._images import ImageSet, load_images
from otpdag.datasets._networks import DiscreteNetwork, parse_bif, read_bif
from otpdag.datasets._synthetic import (
    Bars,
    Truth,
    bars,
    delete_cells,
    factor,
    latent_class,
    mixed_dag,
    mixture,
    poisson_chain,
    replace_rows,
    siblings,
)

__all__ = [
    "Bars",
    "Corpus",
    "DiscreteNetwork",
    "ImageSet",
    "Truth",
    "bars",
    "corpus",
    "data_folder",
    "delete_cells",
    "factor",
    "latent_class",
    "load_images",
    "load_network",
    "mixed_dag",
    "mixture",
    "parse_bif",
    "poisson_chain",
    "read_bif",
    "read_corpus",
    "replace_rows",
    "siblings",
]
