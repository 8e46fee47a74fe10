"""Data with a known truth: synthetic generators, discrete networks read from BIF files; public images and texts.

A generator takes the number of rows and a numpy ``Generator``, draws a truth and then rows, and returns both.
The truth has the layout of ``Model.params()``: parameters by name, by node.
"""

from otpdag.datasets._bars import Bars, bars
from otpdag.datasets._bif import parse_bif, read_bif
from otpdag.datasets._corpus import Corpus, corpus, read_corpus
from otpdag.datasets._factor import factor, siblings
from otpdag.datasets._folder import data_folder, load_network
from otpdag.datasets._images import ImageSet, load_images
from otpdag.datasets._latent_class import latent_class
from otpdag.datasets._missing import delete_cells
from otpdag.datasets._mixed_dag import mixed_dag
from otpdag.datasets._mixture import mixture
from otpdag.datasets._network import DiscreteNetwork
from otpdag.datasets._outliers import replace_rows
from otpdag.datasets._poisson_chain import poisson_chain
from otpdag.datasets._truth import Truth

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
