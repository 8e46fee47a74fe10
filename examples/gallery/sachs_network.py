"""Protein signalling: Sachs.

The discrete network of Sachs and others (2005) of eleven proteins, learned from 2,000 cells of which a third of the
entries is empty. What happens to Akt if Erk is held low, middle or high? The network comes from
the folder that `OTPDAG_DATA` names.
"""

import os
from pathlib import Path

import numpy as np

import otpdag as otp
from otpdag import plots
from otpdag.datasets import read_bif

network = read_bif(Path(os.environ["OTPDAG_DATA"]) / "bif" / "sachs.bif")
rng = np.random.default_rng(0)
table = network.sample(2000, rng)
table = table.apply(lambda codes: codes.map(dict(enumerate(network.states[codes.name]))))  # names of the states
table = table.mask(rng.random(table.shape) < 0.33)
model = otp.Model.from_frame(network.graph, table)
result = otp.fit(model, table, seed=0, restarts=1)
print(result.status)

levels = list(network.states["Erk"])
for level in levels:
    drawn = model.sample(20_000, seed=1, do={"Erk": level})["Akt"].value_counts(normalize=True)
    print(f"Erk {level:5} Akt: " + ", ".join(f"{name} {drawn.get(name, 0.0):.2f}" for name in network.states["Akt"]))
figure = plots.plot_effects(result, "Erk", "Akt", levels)
