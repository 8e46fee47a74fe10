"""Mechanisms: how a node's value comes from its parents and its noise."""

from otpdag.mechanisms.base import Family, Mechanism, Noise, from_spec, register
from otpdag.mechanisms.categorical import Bernoulli, Categorical, Multinomial, StayOrMove
from otpdag.mechanisms.codebook import Codebook, Codes, Quantized
from otpdag.mechanisms.decoder import Decoder
from otpdag.mechanisms.deterministic import Deterministic, Given
from otpdag.mechanisms.dirichlet import Dirichlet
from otpdag.mechanisms.generalised_linear import Beta, Exponential, Gamma, NegativeBinomial, Poisson, Weibull
from otpdag.mechanisms.multivariate_normal import MultivariateNormal
from otpdag.mechanisms.normal import LogNormal, Normal, StudentT
from otpdag.mechanisms.ordinal import Ordinal
from otpdag.mechanisms.parameters import Axis, start, tie
from otpdag.mechanisms.simulator import Simulator

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
    "Exponential",
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
    "Ordinal",
    "Poisson",
    "Quantized",
    "Simulator",
    "StayOrMove",
    "StudentT",
    "Weibull",
    "from_spec",
    "register",
    "start",
    "tie",
]

for _name in __all__:
    _kind = globals()[_name]
    if isinstance(_kind, type) and issubclass(_kind, Mechanism) and _kind is not Mechanism:
        register(_kind)
