"""Table 1: how well the topics of documents about bars are recovered, beside batch EM, SVI, ProdLDA and tomotopy."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.bars import Setting, run_setting, settings, starts
from experiments.registry import Page, Run, experiment
from experiments.topic_models import COLOURS, CONVERGED, HASTE, TITLES, label_decades, spread

MEASURES = {
    "hellinger": ("Hellinger", 4),
    "kl": ("KL (nats)", 4),
    "wasserstein": ("Wasserstein (cells)", 4),
    "patterns": ("patterns", 3),
    "top_words": ("by top words", 3),
    "alpha": ("mean α", 4),
    "seconds": ("seconds", 1),
    "hellinger_halfway": ("Hellinger, halfway", 4),
}
PAPER = {
    10: {
        "OTP-DAG": ("2.327 ± 0.009", "1.701 ± 0.005", "0.027 ± 0.004"),
        "Batch EM": ("2.807 ± 0.189", "1.634 ± 0.022", "0.058 ± 0.000"),
        "SVI": ("2.712 ± 0.087", "1.602 ± 0.014", "0.059 ± 0.000"),
        "Prod LDA": ("2.353 ± 0.012", "1.627 ± 0.027", "0.052 ± 0.001"),
    },
    20: {
        "OTP-DAG": ("3.800 ± 0.058", "2.652 ± 0.080", "0.010 ± 0.001"),
        "Batch EM": ("4.256 ± 0.084", "2.304 ± 0.004", "0.022 ± 0.000"),
        "SVI": ("4.259 ± 0.096", "2.305 ± 0.003", "0.022 ± 0.001"),
        "Prod LDA": ("3.700 ± 0.012", "2.316 ± 0.026", "0.018 ± 0.000"),
    },
    30: {
        "OTP-DAG": ("4.740 ± 0.029", "2.959 ± 0.015", "0.005 ± 0.001"),
        "Batch EM": ("5.262 ± 0.077", "2.708 ± 0.002", "0.012 ± 0.000"),
        "SVI": ("5.245 ± 0.035", "2.709 ± 0.001", "0.012 ± 0.000"),
        "Prod LDA": ("4.723 ± 0.017", "2.746 ± 0.034", "0.009 ± 0.000"),
    },
}
"""Hellinger, KL and Wasserstein as the paper prints them."""


DIFFERENCES = (
    "The paper's protocol compares topics in the order in which they come, after a second softmax; the true topics in "
    "another order score there as EM does, so that these rows, ours and the paper's, say nothing of quality. With "
    "topics lined up, baselines that run to where they end recover bars too, unlike those that are cut off; the "
    "distance that is left tells methods apart. *Paper mode*, the published practice by our code, finds "
    "every one of ten and of twenty bars from all starts, and 28 of thirty by their top words from the one start that "
    "has been run; a Hellinger distance of 0.27 is what its relaxed words leave. Its alpha, learned freely, is 5 % too "
    "small for ten topics, and 2.7 and 4.9 times the true one for twenty and thirty, where the paper has 0.10, 0.049 "
    "and 0.033."
)


def page(folder: Path) -> Page:
    """The table from the errors of a run's estimates, and the picture of it."""
    read = pd.read_csv(folder / "table1.csv")
    chosen = tuple(one for one in (*settings(False), *settings(True)) if (read["topics"] == one.topics).any())
    text = report(read, chosen) + "\n" + DIFFERENCES
    return Page(text, {"Errors and run times of topics of documents about bars": draw(read, chosen)})


@experiment("table1", "Topics of documents about bars: errors, patterns, alpha and time", resumable=True, page=page)
def table1(run: Run) -> None:
    """Fit all settings, each fit a part of the run; write every estimate's errors, the table and a picture of it."""
    made = run.together(part for setting in settings(run.quick) for part in run_setting(run, setting))
    errors = run.joined(made, "table1.csv", ("topics", "method", "start"))
    run.write("table1.csv", errors, float_format="%.6g")
    chosen = tuple(one for one in settings(run.quick) if (errors["topics"] == one.topics).any())
    run.write("table1.md", report(errors, chosen, quick=run.quick))
    run.write("table1.png", draw(errors, chosen), dpi=150)
    print((run.folder / "table1.md").read_text())


def report(errors: pd.DataFrame, chosen: tuple[Setting, ...], *, quick: bool = False) -> str:
    """Errors with topics lined up; then what the paper's protocol gives, beside the paper's own figures."""
    lines = [
        "# Table 1: topics of documents about bars",
        "",
        f"One data set a setting, {starts(quick)} starts; mean ± standard deviation over those that have been run. "
        "Errors are means over topics, lined up by optimal assignment; Wasserstein distances are Euclidean, in cells "
        "of the grid; patterns is the share of true bars recovered exactly, with three quarters of a topic's mass, "
        "and by top words, whatever their mass, as the paper's figures show them. EM and SVI are given the true "
        "α = 1/K, ProdLDA has α = 1; otpdag and tomotopy learn it. ProdLDA is no mixture: its topics are what "
        "its decoder gives to documents about one topic. "
        "The paper mode is the published practice, by our code, at its printed settings, the best of twelve starts. "
        f"Seconds are of one core. {CONVERGED}",
        *(["", HASTE] if quick else []),
    ]
    for setting in chosen:
        part = errors[errors["topics"] == setting.topics]
        lines += ["", f"## {setting.title}", "", _table(part, quick=quick)]
    lines += [
        "",
        "# The same estimates by the protocol of the paper's table",
        "",
        "Topics are not lined up, probabilities go through a softmax once more (KL and Wasserstein), and Hellinger is "
        "that of whole matrices. A perfect estimate scores as EM does there; these figures say nothing about quality, "
        "and are here because the paper prints them.",
    ]
    for setting in chosen:
        part = errors[errors["topics"] == setting.topics]
        lines += ["", f"## K = {setting.topics}", "", _published(part, PAPER.get(setting.topics, {}))]
    return "\n".join(lines) + "\n"


def _table(part: pd.DataFrame, *, quick: bool) -> str:
    lines = [f"| | starts | {' | '.join(title for title, _ in MEASURES.values())} |"]
    lines += ["|---|" + "---:|" * (1 + len(MEASURES))]
    for method in [name for name in TITLES if (part["method"] == name).any()]:
        rows = part[part["method"] == method]
        cells = [f"{len(rows)} of {starts(quick)}"]
        cells += [spread(rows[name], digits) if name in rows else "" for name, (_, digits) in MEASURES.items()]
        lines.append(f"| {TITLES[method]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _published(part: pd.DataFrame, paper: dict[str, tuple[str, ...]]) -> str:
    lines = ["| | HL | KL | WS |", "|---|---:|---:|---:|"]
    for method in [name for name in TITLES if (part["method"] == name).any()]:
        rows = part[part["method"] == method]
        cells = [spread(rows[f"published_{name}"], 3) for name in ("hellinger", "kl", "wasserstein")]
        lines.append(f"| {TITLES[method]} (this run) | {' | '.join(cells)} |")
    lines += [f"| *{name}, as the paper prints it* | {' | '.join(values)} |" for name, values in paper.items()]
    return "\n".join(lines)


def draw(errors: pd.DataFrame, chosen: tuple[Setting, ...]) -> Figure:
    """One panel a setting: the Hellinger distance of each start, and how many patterns were recovered."""
    order = [name for name in TITLES if (errors["method"] == name).any()]
    figure = Figure(figsize=(2.6 + 3.2 * len(chosen), 1.5 + 0.42 * len(order)), layout="constrained")
    axes = figure.subplots(1, len(chosen), sharey=True, squeeze=False)[0]
    for ax, setting in zip(axes, chosen, strict=True):
        part = errors[errors["topics"] == setting.topics]
        for row, name in enumerate(order):
            rows = part[part["method"] == name]
            ax.plot(rows["hellinger"], np.full(len(rows), row), "o", color=COLOURS[name], alpha=0.6, markersize=6)
            share = f"{100 * rows['patterns'].mean():.0f} %"
            ax.annotate(share, (1.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        ax.annotate("bars", (1.02, 1.0), xycoords="axes fraction", va="top", fontsize=8)
        ax.set(xscale="log", xlabel="Hellinger distance", ylim=(len(order) - 0.5, -0.8))
        label_decades(ax.xaxis, part["hellinger"])
        ax.set_title(setting.title, fontsize=9)
        ax.grid(axis="x", color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(order)), [TITLES[name] for name in order])
    figure.suptitle("Distance to the true topics, a dot each start;\nat the right, bars recovered exactly", fontsize=10)
    return figure
