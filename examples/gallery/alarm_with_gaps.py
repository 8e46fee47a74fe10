"""ALARM with gaps.

The ALARM network has 37 nodes and 509 probabilities to be told. A fifth of all cells is taken away; the tables
are learned from what is left, without dropping a row. The network comes from the folder that `OTPDAG_DATA` names.
"""

import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import otpdag as otp
from otpdag.datasets import read_bif

network = read_bif(Path(os.environ["OTPDAG_DATA"]) / "bif" / "alarm.bif")
rng = np.random.default_rng(0)
table = network.sample(1000, rng)
table = table.apply(lambda codes: codes.map(dict(enumerate(network.states[codes.name]))))  # names of the states
table = table.mask(rng.random(table.shape) < 0.2)
model = otp.Model.from_frame(network.graph, table)
result = otp.fit(model, table, seed=0, restarts=1)
print(result.status)

wrong, made = [], model.sample(50_000, seed=1)
for node in network.nodes:
    true = dict(zip(network.states[node], network.joint([node]), strict=True))
    shares = made[node].value_counts(normalize=True)
    wrong.append(sum(abs(shares.get(state, 0.0) - share) for state, share in true.items()) / 2)
print(f"total variation of a node's distribution from the truth: {np.mean(wrong):.3f} on average")

figure = Figure(figsize=(7, 3.4), layout="constrained")
ax = figure.add_subplot()
ax.bar(range(len(wrong)), wrong, color="#2f5d9b")
ax.set_xticks(range(len(wrong)), network.nodes, rotation=90, fontsize=6)
ax.set_ylabel("total variation")
