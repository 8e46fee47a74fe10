"""Where the published objective fails, beside the repaired ones: a hidden factor, and a hidden class of categories.

Noise that is drawn by itself only adds cost, so that scales shrink; relaxed categories are cheapest where they are
certain. Both are looked at as such: the scale of the noise, and the probability of the likeliest category, each over
the true one.
"""

from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import otpdag as otp
from benchmarks.problems import FACTOR, LATENT_CLASS, Problem, factor_groups, latent_class_groups
from experiments.registry import Page, Run, experiment
from otpdag.datasets import Truth

SIZES = ((2000, 10), (500, 2))  # rows and data sets, at full size and quick
PROBLEMS = {"factor": FACTOR, "class": LATENT_CLASS}
TITLES = {
    "factor": "One hidden factor, four normal indicators",
    "class": "A hidden class, four children of three categories",
}
OVER_TRUE = {"factor": "noise scale over the true one", "class": "likeliest category's probability over the true one"}
METHODS = {
    "paper": "paper mode",
    "transport": "transport",
    "entropic": "entropic (default)",
    "likelihood": "factor analysis, or EM",
}
NAMED = {"paper": "paper", "transport": "transport", "entropic": "likelihood"}  # as the library calls them
COLOURS = {
    "paper": "#d1762b",
    "transport": "#2f5d9b",
    "entropic": "#1f7a46",
    "likelihood": "#6f6f6f",
}
DIFFERENCES = (
    "The published practice draws each row's noise by itself, so a scale only adds its square to the cost and shrinks "
    "towards zero: in every data set it is 0.6 of the true one after the 1,000 steps at the paper's rate that are run "
    "here, and falls on (at twenty times the rate 0.04 is left). Relaxed categories cost least where they are certain, "
    "which makes tables wrong by twice the error of the others, too certain in some data sets, not in others. "
    "Transport and entropic fits integrate the noise out and enumerate the categories: they stand at one, with the "
    "error of maximum likelihood as scikit-learn's factor analysis and a separate EM for latent classes have it."
)


def page(folder: Path) -> Page:
    """The comparison from the errors of a run, and the picture of it."""
    table = pd.read_csv(folder / "paper_mode.csv")
    return Page(report(table) + "\n" + DIFFERENCES, {"Errors, scales and certainty by method": draw(table)})


@experiment("paper-mode", "Where the published objective fails, beside the repaired ones", resumable=True, page=page)
def paper_mode(run: Run) -> None:
    """Fit both models by every method to several data sets, each fit a part of the run."""
    rows, repeats = SIZES[run.quick]
    parts = run.parts(
        (f"{name}-{method}-{repeat}", partial(fitted, name, method, rows, run.seed, repeat))
        for repeat in range(repeats)
        for name in PROBLEMS
        for method in METHODS
    )
    table = run.together(parts)
    run.write("paper_mode.csv", table, float_format="%.6g")
    run.write("paper_mode.png", draw(table), dpi=150)
    text = report(table)
    run.write("paper_mode.md", text)
    print(text)


def fitted(name: str, method: str, rows: int, seed: int, repeat: int) -> pd.DataFrame:
    """One fit of one data set: its error, and the scale or certainty that it found over the true one."""
    problem = PROBLEMS[name]
    frame, truth = problem.draw(rows, np.random.default_rng([seed, repeat]))
    estimate = estimated(problem, method, frame, truth, seed=1000 * seed + repeat)
    over_true = spread_of(name, estimate) / spread_of(name, truth)
    row = {"problem": name, "method": method, "rows": rows, "repeat": repeat}
    return pd.DataFrame([row | {"error": problem.error(truth, estimate), "over_true": over_true}])


def estimated(problem: Problem, method: str, frame: pd.DataFrame, truth: Truth, *, seed: int) -> Truth:
    """Parameters by a method of the library, or by the trusted estimator of others."""
    if method == "likelihood":
        return problem.oracle(frame, truth, seed)
    model = problem.model()
    otp.fit(model, frame, method=NAMED[method], seed=seed)
    return model.params()


def spread_of(name: str, params: Truth) -> float:
    """The mean scale of the noise, or the mean probability of the likeliest category."""
    if name == "factor":
        return float(factor_groups(params)["scale"].mean())
    return float(latent_class_groups(params)["table"].max(-1).mean())


def report(table: pd.DataFrame) -> str:
    """Both models, a row for each method."""
    repeats = next(number for rows, number in SIZES if rows == table["rows"].iloc[0])
    lines = [
        "# Paper mode where it fails, and the repaired objectives",
        "",
        f"{repeats} data sets of {table['rows'].iloc[0]:,} rows of each model, drawn with truths of their own; mean ± "
        "standard deviation over those that have been fitted. The error is the mean absolute error of all parameters, "
        "with signs and labels lined up; a method without fault has a one in the last column. The comparison is ours, "
        "not one of the paper's.",
    ]
    for name, title in TITLES.items():
        part = table[table["problem"] == name]
        lines += ["", f"## {title}", "", f"| | data sets | error | {OVER_TRUE[name]} |", "|---|---:|---:|---:|"]
        for method, label in METHODS.items():
            rows = part[part["method"] == method]
            if len(rows):
                cells = [
                    f"{rows[column].mean():.3f} ± {rows[column].std(ddof=0):.3f}" for column in ("error", "over_true")
                ]
                lines.append(f"| {label} | {len(rows)} of {repeats} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(table: pd.DataFrame) -> Figure:
    """A row of panels for each model: the error, and the scale or certainty over the true one; a dot a data set."""
    with mpl.rc_context({"font.size": 9, "axes.titlesize": 10}):
        figure = Figure(figsize=(9.5, 5.2), layout="constrained")
        panels = figure.subplots(len(TITLES), 2, sharey=True)
        for (left, right), (name, title) in zip(panels, TITLES.items(), strict=True):
            part = table[table["problem"] == name]
            _dots(left, part, "error")
            _dots(right, part, "over_true")
            right.axvline(1.0, color="0.4", linewidth=0.9, linestyle="--", zorder=0)
            left.set(xlabel="mean absolute error of the parameters", title=title)
            left.set_xlim(left=0)
            right.set(xlabel=OVER_TRUE[name])
            left.title.set_horizontalalignment("left")
            left.title.set_x(0.0)
    return figure


def _dots(panel: Axes, part: pd.DataFrame, column: str) -> None:
    for place, method in enumerate(METHODS):
        rows = part[part["method"] == method]
        heights = place + np.linspace(-0.18, 0.18, len(rows)) if len(rows) > 1 else [place] * len(rows)
        panel.plot(rows[column], heights, "o", color=COLOURS[method], alpha=0.75, markersize=5, markeredgewidth=0)
    panel.set_yticks(range(len(METHODS)), list(METHODS.values()))
    panel.set_ylim(len(METHODS) - 0.5, -0.5)
    panel.grid(axis="x", color="0.92")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
