"""Simulators in a graph, without a density.

Three instruments bend and blur a common cause that nobody sees. Each is a function of its parents, noise and named
parameters; what it makes of the noise has no density in closed form. The fit moves simulated rows onto the table by
optimal transport. Then ten rows are spoilt, and the fit names those that it could not match.
"""

import numpy as np
import pandas as pd
import torch

import otpdag as otp
from otpdag import mechanisms as m
from otpdag import plots


def bent(parents, noise, slope, scale):
    return torch.sinh(slope * parents["cause"]) + scale * noise


rng = np.random.default_rng(2)
cause = rng.normal(size=1000)
truth = {"a": (0.8, 0.3), "b": (0.5, 0.2), "c": (0.6, 0.4)}
table = pd.DataFrame({name: np.sinh(s * cause) + w * rng.normal(size=1000) for name, (s, w) in truth.items()})
bounds = {"slope": (0, 2), "scale": (0, 1)}
nodes = {name: m.Simulator(bent, dict.fromkeys(bounds), bounds=bounds) for name in truth}
graph = otp.Graph([("cause", name) for name in truth], hidden=["cause"])
model = otp.Model(graph, {"cause": m.Normal(loc=0.0, scale=1.0), **nodes})
otp.fit(model, table, seed=0)
found = {name: [round(float(model.params()[name][one]), 2) for one in bounds] for name in truth}
print("true slopes and scales ", truth)
print("found slopes and scales", found)
print(model.distance(table).describe())

table.loc[:9, "a"] = 6.0
table.loc[:9, "b"] = -4.0
result = otp.fit(model, table, method=otp.transport(unmatched=0.01), seed=0)
print("rows left unmatched", sorted(map(int, result.unmatched)))
figure = plots.plot_plan(model, table.head(200))
