"""Mechanisms: how a node's value comes from its parents and its noise."""

from otpdag.mechanisms.base import Family, Mechanism, Noise
from otpdag.mechanisms.beta import Beta
from otpdag.mechanisms.categorical import Bernoulli, Categorical
from otpdag.mechanisms.codebook import Codebook, Codes, Quantized
from otpdag.mechanisms.counts import NegativeBinomial, Poisson
from otpdag.mechanisms.decoder import Decoder
from otpdag.mechanisms.deterministic import Deterministic, Given
from otpdag.mechanisms.dirichlet import Dirichlet
from otpdag.mechanisms.gamma import Gamma
from otpdag.mechanisms.lognormal import LogNormal
from otpdag.mechanisms.multinomial import Multinomial
from otpdag.mechanisms.multivariate_normal import MultivariateNormal
from otpdag.mechanisms.normal import Normal
from otpdag.mechanisms.parameters import Axis, start, tie
from otpdag.mechanisms.spec import from_spec, register
from otpdag.mechanisms.stay_or_move import StayOrMove
from otpdag.mechanisms.student import StudentT

__all__ = [
    "Axis",
    "Bernoulli",
    "Beta",
    "Categorical",
    "Codebook",
    "Codes",
    "Decoder",
    "Deterministic",
    "Dirichlet",
    "Family",
    "Gamma",
    "Given",
    "LogNormal",
    "Mechanism",
    "Multinomial",
    "MultivariateNormal",
    "NegativeBinomial",
    "Noise",
    "Normal",
    "Poisson",
    "Quantized",
    "StayOrMove",
    "StudentT",
    "from_spec",
    "register",
    "start",
    "tie",
]

for _name in __all__:
    _kind = globals()[_name]
    if isinstance(_kind, type) and issubclass(_kind, Mechanism) and _kind is not Mechanism:
        register(_kind)
