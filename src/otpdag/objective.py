r"""The objective: pure functions from parameters and points to loss terms, and the problems that they make of data.

.. math::
    \sum_{i \in O} E\,c_i(x_i, \psi_i(\mathrm{pa}_i, u_i))
    + \eta \sum_f D(P_\phi(f), P_\theta(f))
    + \epsilon\, E\,\mathrm{KL}(\phi(z \mid x) \,\|\, P_\theta(z))

Or, alone, the direct term :math:`W_c(P_{data}, P_\theta)`.

Two ways to evaluate it: in closed form, with the best backward map known and noise integrated out, and drawn, with a
learned map and drawn or abducted noise (Algorithm 1). A :class:`~otpdag.problem.Problem` is one of them on
one data set: rows, sequences, documents or images.
"""

from otpdag.learned.algorithm import Drawn as Drawn
from otpdag.learned.autoencoder import Codewords as Codewords
from otpdag.learned.autoencoder import Encoded as Encoded
from otpdag.learned.paper_topics import PaperTopics as PaperTopics
from otpdag.likelihood.topic_problem import TopicSweeps as TopicSweeps
from otpdag.noise import Streams as Streams
from otpdag.problem import LossTerms as LossTerms
from otpdag.problem import Problem as Problem
from otpdag.problem import Refinement as Refinement
from otpdag.problem import Units as Units
from otpdag.problem import split_theta as split_theta
from otpdag.settings import ClosedForm as ClosedForm
from otpdag.settings import Direct as Direct
from otpdag.settings import Objective as Objective
from otpdag.settings import PushForward as PushForward
