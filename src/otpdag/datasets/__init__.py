"""Data with a known truth: synthetic generators, discrete networks read from BIF files; public images and texts.

A generator takes the number of rows and a numpy ``Generator``, draws a truth and then rows, and returns both.
The truth has the layout of ``Model.params()``: parameters by name, by node.
"""

from otpdag.datasets._corpus import Corpus as Corpus
from otpdag.datasets._corpus import corpus as corpus
from otpdag.datasets._corpus import read_corpus as read_corpus
from otpdag.datasets._folder import data_folder as data_folder
from otpdag.datasets._folder import load_network as load_network
from otpdag.datasets._images import ImageSet as ImageSet
from otpdag.datasets._images import load_images as load_images
from otpdag.datasets._networks import DiscreteNetwork as DiscreteNetwork
from otpdag.datasets._networks import parse_bif as parse_bif
from otpdag.datasets._networks import read_bif as read_bif
from otpdag.datasets._synthetic import Bars as Bars
from otpdag.datasets._synthetic import Truth as Truth
from otpdag.datasets._synthetic import bars as bars
from otpdag.datasets._synthetic import delete_cells as delete_cells
from otpdag.datasets._synthetic import factor as factor
from otpdag.datasets._synthetic import latent_class as latent_class
from otpdag.datasets._synthetic import mixed_dag as mixed_dag
from otpdag.datasets._synthetic import mixture as mixture
from otpdag.datasets._synthetic import poisson_chain as poisson_chain
from otpdag.datasets._synthetic import replace_rows as replace_rows
from otpdag.datasets._synthetic import siblings as siblings
