"""Mechanisms and a space as a user would write them, for tests of what the library knows of them."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from otpdag import mechanisms as m
from otpdag.mechanisms.base import sum_cells
from otpdag.mechanisms.normal import LOG_SQRT_2PI, LocationScale
from otpdag.mechanisms.parameters import SIMPLEX, Parameter
from otpdag.spaces import Discrete, Space


class Chances(m.Mechanism):
    """A root category whose parameter has a name of its own, and which says nothing about labels."""

    def __init__(self, size=2):
        self.size = size

    @property
    def space(self):
        return Discrete(self.size)

    @property
    def noise(self):
        return m.Noise(1, "uniform")

    @property
    def relaxed_noise(self):
        return m.Noise(self.size, "uniform")

    def parameters(self):
        return {"chances": Parameter((self.size,), SIMPLEX)}

    def start(self, value, parents, weight):
        counts = (weight.unsqueeze(-1) * value).sum(0) + 0.5
        return {"chances": counts / counts.sum()}

    def forward(self, params, parents, noise):
        upper = params["chances"].reshape(-1, *(1,) * (noise.ndim - 2), self.size).cumsum(-1)[..., :-1]
        return torch.nn.functional.one_hot((noise > upper).sum(-1), self.size).to(noise)

    def relaxed(self, params, parents, noise, temperature):
        gumbel = -torch.log(-torch.log(noise.clamp(1e-12, 1 - 1e-12)))
        logs = torch.log(params["chances"]).reshape(-1, *(1,) * (noise.ndim - 2), self.size)
        return torch.softmax((logs + gumbel) / temperature, -1)

    def log_prob(self, params, value, parents, mask=None):
        logs = torch.log(params["chances"]).reshape(-1, *(1,) * (value.ndim - 2), self.size)
        log_prob = (value * logs).sum(-1)
        return log_prob if mask is None else torch.where(mask[..., 0], log_prob, 0.0)


class LabelledChances(Chances):
    """The same, which says what its parameter runs over."""

    def axes(self):
        return {"chances": (m.Axis.of_values(self.family.node, self.space),)}


class Skewed(LocationScale):
    """A Gumbel node: its location may be turned round, its noise may not."""

    @property
    def noise(self):
        return m.Noise(self.dim, "uniform")

    def forward(self, params, parents, noise):
        loc, scale = self.at(params, parents, noise)
        return loc - scale * torch.log(-torch.log(noise.clamp(1e-12, 1 - 1e-12)))

    def log_prob(self, params, value, parents, mask=None):
        loc, scale = self.at(params, parents, value)
        away = (value - loc) / scale
        return sum_cells(-away - torch.exp(-away) - torch.log(scale), mask)


@dataclass(frozen=True)
class PartialCorrelation(Space):
    """A new kind of values: vectors of numbers strictly between minus one and one."""

    dim: int = 1

    holds = "numbers strictly between -1 and 1"

    @property
    def width(self):
        return self.dim

    def outside(self, cells):
        return np.abs(cells) >= 1

    def constrain(self, free):
        return torch.tanh(free), 2 * (math.log(2) - free - torch.nn.functional.softplus(-2 * free))

    def unconstrain(self, value):
        return torch.atanh(value.clamp(-1 + 1e-12, 1 - 1e-12))


class TanhNormal(LocationScale):
    """The hyperbolic tangent of a normal variable."""

    @property
    def space(self):
        return PartialCorrelation(self.dim)

    def on_line(self, value):
        return self.space.unconstrain(value)

    def forward(self, params, parents, noise):
        loc, scale = self.at(params, parents, noise)
        return torch.tanh(loc + scale * noise).clamp(-1 + torch.finfo(loc.dtype).eps, 1 - torch.finfo(loc.dtype).eps)

    def log_prob(self, params, value, parents, mask=None):
        loc, scale = self.at(params, parents, value)
        line = self.on_line(value)
        slope = self.space.constrain(line)[1]
        return sum_cells(-0.5 * ((line - loc) / scale) ** 2 - torch.log(scale) - LOG_SQRT_2PI - slope, mask)

    def abduct(self, params, value, parents, uniform):
        loc, scale = self.at(params, parents, value)
        return (self.on_line(value) - loc) / scale


def register():
    """Make the classes known to files."""
    for kind in (Chances, LabelledChances, Skewed, TanhNormal):
        m.register(kind)
