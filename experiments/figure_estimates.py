"""The figure of the estimates' distribution: rates over many data sets, beside what they are drawn from."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.poisson_chain import METHODS, RANGES, Size, estimates
from experiments.registry import Run, experiment

SHOWN = {"ours": "#2f5d9b", "em": "#d1762b", "paper": "#3d8b5a"}


@experiment("figure-estimates", "Distribution of the estimated rates of Poisson hidden Markov models")
def figure_estimates(run: Run) -> None:
    """Draw the distribution of true and estimated rates; use Table 3's estimates if they are in the same folder."""
    path = run.folder / "estimates.csv"
    estimated = pd.read_csv(path) if path.exists() else estimates(run, Size.of(run.quick))
    run.write("estimates.csv", estimated)
    run.write("figure_estimates.png", draw(estimated), dpi=150)


def draw(estimated: pd.DataFrame) -> Figure:
    """One panel for each method: estimates as a histogram, the uniform distributions as boxes."""
    methods = [method for method in SHOWN if (estimated["method"] == method).any()]
    figure = Figure(figsize=(9, 2.2 * len(methods)), layout="constrained")
    axes = figure.subplots(len(methods), sharex=True, sharey=True, squeeze=False)[:, 0]
    for ax, method in zip(axes, methods, strict=True):
        part = estimated[estimated["method"] == method]
        values = part["estimate"]
        for low, high in RANGES:
            ax.fill_between([low, high], 0.25 / (high - low), color="#cccccc", label=None)
        bins = np.arange(0, max(100, values.max() + 2), 2)
        ax.hist(values, bins=bins, density=True, color=SHOWN[method], alpha=0.75)
        ax.set_title(f"{METHODS[method]}, {part['dataset'].nunique()} data sets", fontsize=10)
        ax.set(ylabel="density", xlim=(0, 110))
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("rate; grey: what true rates are drawn from")
    return figure
