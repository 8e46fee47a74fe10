"""A mechanism of your own: a Laplace node, checked and used like the library's own.

Everything with a location and a scale shares its parameters, units and starting values through LocationScale; what is
left is how a value comes from its noise, and back. The checks tell what is missing: without ``start`` below, for
instance, that the starting values lose likelihood.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

import otpdag as otp
from otpdag import mechanisms as m
from otpdag.mechanisms.base import Params, Parents, sum_cells
from otpdag.mechanisms.normal import LocationScale
from otpdag.spaces import Real
from otpdag.testing import check_mechanism


@m.register  # so that saved models can be loaded again
class Laplace(LocationScale):
    """A node with exponential tails: ``x = loc[pa] + W' pa + scale[pa] * F^-1(u)``, u uniform."""

    is_symmetric = True  # so that a hidden one may be turned round

    @property
    def noise(self) -> m.Noise:
        return m.Noise(self.dim, "uniform")

    def start(self, value: Tensor, parents: Parents, weight: Tensor) -> dict[str, Tensor]:
        begun = super().start(value, parents, weight)  # a regression, and the residuals' standard deviation
        return {**begun, "scale": begun["scale"] / math.sqrt(2)}

    def forward(self, params: Params, parents: Parents, noise: Tensor) -> Tensor:
        loc, scale = self.at(params, parents, noise)
        away = noise.clamp(1e-12, 1 - 1e-12) - 0.5
        return loc - scale * torch.sign(away) * torch.log1p(-2 * away.abs())

    def log_prob(self, params: Params, value: Tensor, parents: Parents, mask: Tensor | None = None) -> Tensor:
        loc, scale = self.at(params, parents, value)
        return sum_cells(-(value - loc).abs() / scale - torch.log(2 * scale), mask)

    def abduct(self, params: Params, value: Tensor, parents: Parents, uniform: Tensor) -> Tensor:
        loc, scale = self.at(params, parents, value)
        away = (value - loc) / scale
        tail = 0.5 * torch.exp(-away.abs())
        return torch.where(away > 0, 1 - tail, tail)

    def mean(self, params: Params, parents: Parents) -> Tensor:
        return self.predictor(params, parents)


def main(rows: int) -> None:
    console = Console(highlight=False)
    check_mechanism(Laplace(), m.Family("x", (("z", Real()),)))
    console.print("Laplace keeps every promise of a mechanism (otpdag.testing.check_mechanism).")

    rng = np.random.default_rng(0)
    mood = rng.normal(size=rows)
    table = pd.DataFrame(
        {
            "sales": 20 + 5 * mood + rng.laplace(scale=2.0, size=rows),
            "returns": 3 + 2 * mood + rng.laplace(scale=0.7, size=rows),
            "visits": rng.poisson(np.exp(2 + 0.5 * mood)),
        }
    )
    graph = otp.Graph([("mood", "sales"), ("mood", "returns"), ("mood", "visits")], hidden=["mood"])
    for kind in (Laplace, m.Normal):
        nodes = {"mood": m.Normal(), "sales": kind(), "returns": kind(), "visits": m.Poisson()}
        model = otp.Model(graph, nodes)
        otp.fit(model, table, seed=0, restarts=3)
        params = model.params()
        spread = math.sqrt(2) if kind is Laplace else 1.0  # standard deviation of a unit of scale
        console.print(
            f"{kind.__name__:>7}: slopes {params['sales']['weight'][0]:.2f} and {params['returns']['weight'][0]:.2f} "
            f"(true 5 and 2), standard deviations {spread * params['sales']['scale']:.2f} and "
            f"{spread * params['returns']['scale']:.2f} (true 2.83 and 0.99), "
            f"log-likelihood {model.score(table, kind='likelihood'):.3f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000, help="rows of the table (default 1000)")
    main(parser.parse_args().rows)
