"""A mixture under a wrong model.

Three groups on a line. The model is told their spread, and told wrongly: 2.5 instead of 1. Maximum likelihood then
moves the means to make up for it; `robust="misfit"`, which lets rows claim less of the hidden class, moves them less.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import otpdag as otp
from otpdag import mechanisms as m

rng = np.random.default_rng(0)
true = np.array([-4.0, 0.0, 4.0])
table = pd.DataFrame({"x": true[rng.integers(0, 3, 900)] + rng.normal(size=900)})
graph = otp.Graph([("group", "x")], hidden=["group"])

means = {}
for name, robust in (("likelihood", False), ("robust to misfit", "misfit")):
    model = otp.Model(graph, {"group": m.Categorical(3, probs=[1 / 3] * 3), "x": m.Normal(scale=2.5)})
    otp.fit(model, table, robust=robust, seed=0)
    means[name] = np.sort(model.params()["x"]["loc"].ravel())
    print(f"{name:17} means {means[name].round(2)}, largest error {np.abs(means[name] - true).max():.2f}")

figure = Figure(figsize=(7, 3.2), layout="constrained")
ax = figure.add_subplot()
ax.hist(table["x"], 50, color="#d5e0ee")
for (name, values), colour in zip(means.items(), ("#a8434b", "#2f5d9b"), strict=True):
    ax.vlines(values, 0, 55, color=colour, label=name)
ax.plot(true, [58] * 3, "kv", label="true means")
ax.set(xlabel="x", ylabel="rows")
ax.legend(frameon=False)
