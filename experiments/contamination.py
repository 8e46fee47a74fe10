"""Contamination: errors of the default, the robust setting and an oracle as the data get worse.

Three models (mixture, factor, mixed DAG); 0 to 20 % outliers in a box or a cluster, heavy tails in place of normal
noise, and counts from a wrong family. The oracle is maximum likelihood on the clean rows.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import otpdag as otp
from benchmarks.problems import FACTOR, MIXED_DAG, MIXTURE, Problem
from experiments.outliers import replace_rows
from experiments.registry import Run, experiment
from otpdag.datasets import Truth

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2)
PROBLEMS = (MIXTURE, FACTOR, MIXED_DAG)
CATEGORIES = {"mixed_dag": ("x3",)}
ROWS = 1500
STYLES = {
    "EM (default)": {"color": "#4a6fa5", "marker": "o"},
    "robust='outliers'": {"color": "#a8434b", "marker": "s"},
    "oracle (clean rows)": {"color": "#777777", "marker": "", "linestyle": "--"},
}


@experiment("contamination", "Outliers, heavy tails and a wrong family: default, robust setting and oracle")
def contamination(run: Run) -> None:
    """Fit everything; write every error, the table and the figure."""
    repeats = 2 if run.quick else 10
    table = pd.concat([*(outliers(p, run.seed, repeats) for p in PROBLEMS), wrong_family(run.seed, repeats)])
    run.write("contamination.csv", table)
    text = report(table, repeats)
    run.write("contamination.md", text)
    run.write("contamination.png", draw(table[table["kind"].isin(["box", "cluster"])]), dpi=130)
    print(text)


def outliers(problem: Problem, seed: int, repeats: int) -> pd.DataFrame:
    """Errors for every share and both kinds of outliers."""
    rows = []
    for repeat in range(repeats):
        clean, truth = problem.draw(ROWS, np.random.default_rng([seed, repeat]))
        oracle = _error(problem, clean, truth, seed, robust=False)
        for kind in ("box", "cluster"):
            for share in SHARES:
                generator = np.random.default_rng([seed, repeat, round(100 * share)])
                categories = CATEGORIES.get(problem.name, ())
                spoilt, _ = replace_rows(clean, share, kind, generator, categories=categories)
                errors = {
                    "EM (default)": _error(problem, spoilt, truth, seed, robust=False),
                    "robust='outliers'": _error(problem, spoilt, truth, seed, robust=True),
                    "oracle (clean rows)": oracle,
                }
                rows += [(problem.name, kind, share, repeat, method, error) for method, error in errors.items()]
    return pd.DataFrame(rows, columns=["model", "kind", "share", "repeat", "method", "error"])


def wrong_family(seed: int, repeats: int) -> pd.DataFrame:
    """Noise from another family than the model's: Student-t in the factor model, over-dispersed counts in the DAG."""
    rows = []
    for repeat in range(repeats):
        for problem, kind, redraw in ((FACTOR, "heavy tails", _heavy_tails), (MIXED_DAG, "wrong counts", _wide_counts)):
            generator = np.random.default_rng([seed, repeat, 777])
            clean, truth = problem.draw(ROWS, generator)
            wrong = redraw(truth, generator)
            errors = {
                "EM (default)": _error(problem, wrong, truth, seed, robust=False),
                "robust='outliers'": _error(problem, wrong, truth, seed, robust=True),
                "oracle (clean rows)": _error(problem, clean, truth, seed, robust=False),
            }
            rows += [(problem.name, kind, 1.0, repeat, method, error) for method, error in errors.items()]
    return pd.DataFrame(rows, columns=["model", "kind", "share", "repeat", "method", "error"])


def _heavy_tails(truth: Truth, generator: np.random.Generator) -> pd.DataFrame:
    """The factor model with Student-t noise of three degrees of freedom and the true scales."""
    factor = generator.standard_normal(ROWS)
    columns = {}
    for name in (node for node in truth if node != "f"):
        loc, weight, scale = (float(np.squeeze(truth[name][part])) for part in ("loc", "weight", "scale"))
        columns[name] = loc + weight * factor + scale * generator.standard_t(3, ROWS)
    return pd.DataFrame(columns)


def _wide_counts(truth: Truth, generator: np.random.Generator) -> pd.DataFrame:
    """The mixed DAG with negative binomial counts of the true means and dispersion four."""
    state = generator.choice(3, ROWS, p=truth["h"]["probs"])
    x1 = truth["x1"]["loc"][state] + truth["x1"]["scale"][state] * generator.standard_normal(ROWS)
    mean = np.exp(truth["x2"]["log_rate"][state] + float(np.squeeze(truth["x2"]["weight"])) * x1)
    x2 = generator.negative_binomial(4, 4 / (4 + mean))
    x3 = [generator.choice(3, p=truth["x3"]["probs"][h]) for h in state]
    return pd.DataFrame({"x1": x1, "x2": x2, "x3": x3})


def _error(problem: Problem, frame: pd.DataFrame, truth: Truth, seed: int, *, robust: bool) -> float:
    model = problem.model()
    otp.fit(model, frame, seed=seed, robust=robust)
    return problem.error(truth, model.params())


def report(table: pd.DataFrame, repeats: int) -> str:
    """Mean errors as a Markdown table."""
    wide = table.pivot_table(index=["model", "kind", "share"], columns="method", values="error")[list(STYLES)]
    lines = [
        "# Contamination",
        "",
        f"Mean parameter error over {repeats} data sets of {ROWS} rows; share of outliers in the third column.",
        "",
        "| model | kind | share | " + " | ".join(STYLES) + " |",
        "|---|---|---|" + "---|" * len(STYLES),
    ]
    for (model, kind, share), row in wide.iterrows():
        cells = " | ".join(f"{row[method]:.4f}" for method in STYLES)
        lines.append(f"| {model} | {kind} | {share:.0%} | {cells} |")
    return "\n".join(lines) + "\n"


def draw(table: pd.DataFrame) -> Figure:
    """One panel for each model and kind of outliers, errors on a logarithmic scale."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, len(PROBLEMS), sharex=True)
    for row, kind in enumerate(("box", "cluster")):
        for column, problem in enumerate(PROBLEMS):
            axis = axes[row, column]
            part = table[(table["model"] == problem.name) & (table["kind"] == kind)]
            for method, style in STYLES.items():
                mean = part[part["method"] == method].groupby("share")["error"].mean()
                axis.plot(100 * mean.index, mean.to_numpy(), label=method, **style)
            axis.set_yscale("log")
            axis.set_title(f"{problem.name.replace('_', ' ')}, {kind}", fontsize=10)
            axis.grid(alpha=0.25)
    figure.supxlabel("outliers, % of rows")
    figure.supylabel("mean error of the parameters")
    axes[0, 0].legend(fontsize=8, frameon=False)
    return figure
