"""Filling gaps, beside scikit-learn.

Measurements of 569 tumours; a quarter of the cells of five columns is taken away and filled again: by the mean of the
column, by scikit-learn's `IterativeImputer`, and by a model that says what stands behind the five: a size and a kind.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer

import otpdag as otp
from otpdag import mechanisms as m

columns = ["mean radius", "mean concavity", "mean compactness", "mean smoothness", "mean texture"]
whole = load_breast_cancer(as_frame=True).data[columns]
whole = (whole - whole.mean()) / whole.std()
gaps = np.random.default_rng(0).random(whole.shape) < 0.25
table = whole.mask(gaps)

graph = otp.Graph([("kind", c) for c in columns] + [("load", c) for c in columns], hidden=["kind", "load"])
hidden = {"kind": m.Categorical(2), "load": m.Normal(loc=0.0, scale=1.0)}
model = otp.Model.from_frame(graph, table, mechanisms=hidden)
otp.fit(model, table, seed=0, restarts=4)

filled = {
    "column mean": table.fillna(table.mean()),
    "IterativeImputer": pd.DataFrame(
        IterativeImputer(max_iter=50, random_state=0).fit_transform(table), columns=columns
    ),
    "otpdag": model.impute(table, seed=0)[columns],
}
errors = {name: float(np.sqrt(((one - whole) ** 2).to_numpy()[gaps].mean())) for name, one in filled.items()}
for name, error in errors.items():
    print(f"{name:17} root mean square error {error:.3f} (in standard deviations)")

figure = Figure(figsize=(8, 3), layout="constrained")
for ax, (name, one) in zip(figure.subplots(1, 3, sharex=True, sharey=True), filled.items(), strict=True):
    ax.plot(whole.to_numpy()[gaps], one.to_numpy()[gaps], "o", markersize=2, alpha=0.5, color="#2f5d9b")
    ax.plot([-2, 4], [-2, 4], color="#9aa5b4", linewidth=0.8)
    ax.set(title=f"{name}: {errors[name]:.2f}", xlabel="true value")
figure.axes[0].set_ylabel("filled in")
