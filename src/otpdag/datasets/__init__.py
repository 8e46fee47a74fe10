"""Data with a known truth: synthetic generators, and discrete networks read from BIF files.

A generator takes the number of rows and a numpy ``Generator``, draws a truth and then rows, and returns both.
The truth has the layout of ``Model.params()``: parameters by name, by node.
"""

from otpdag.datasets._networks import DiscreteNetwork as DiscreteNetwork
from otpdag.datasets._networks import parse_bif as parse_bif
from otpdag.datasets._networks import read_bif as read_bif
from otpdag.datasets._synthetic import Bars as Bars
from otpdag.datasets._synthetic import Truth as Truth
from otpdag.datasets._synthetic import bars as bars
from otpdag.datasets._synthetic import draw_states as draw_states
