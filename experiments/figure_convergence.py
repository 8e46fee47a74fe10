"""The figure of convergence: patterns after 100, 200 and 300 iterations, and the error of every method by time."""

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from threadpoolctl import threadpool_limits

from baselines.base import Array
from baselines.topics import hellinger_course
from experiments.bars import settings
from experiments.figure_topics import recovered
from experiments.metrics import match_topics
from experiments.registry import Page, Run, experiment
from experiments.topic_models import COLOURS, HASTE, TITLES, Method, course_of_ours, draw_grid, label_decades, methods
from otpdag.datasets import Bars

AFTER = (100, 200, 300)
KEPT = (1, 2, 3, 5, 10, 20, 50, *AFTER)
SHOWN = {"ours": (1, 5, *AFTER), "ours_paper": AFTER}


DIFFERENCES = (
    "The paper shows patterns after 100, 200 and 300 iterations of its own practice, which is our *paper mode*: all "
    "ten bars from 200 epochs on, by their top words and with most of their mass; the repaired objective has the "
    "bars after its first iterations and then stands still. Baselines are followed to where they end: Gibbs sampling "
    "comes nearest to it, EM and SVI take several times as long and stay farther off."
)


def page(folder: Path) -> Page:
    """Patterns on the way and errors by time, from those of a run."""
    table = pd.read_csv(folder / "figure_convergence.csv")
    title = str(table["setting"].iloc[0])
    true = next(one for one in (*settings(False), *settings(True)) if one.title == title).draw(0).topics
    pictures = {"Error of topics by time": draw(table, title), "Topics on the way": draw_patterns(true, table)}
    return Page(report(title, table) + "\n" + DIFFERENCES, pictures)


@experiment(
    "figure-convergence",
    "Topics of documents about bars after 100, 200 and 300 iterations; errors by time",
    resumable=True,
    page=page,
)
def figure_convergence(run: Run) -> None:
    """Follow every method on the first setting, each a part of the run; write all errors by time, and our patterns."""
    setting = settings(run.quick)[0]
    drawn = setting.draw(run.seed)
    parts = run.parts(
        (name, partial(followed, name.split("-")[0], drawn, follow, 1000 * run.seed))
        for name, follow in followers(run.quick).items()
    )
    made = run.together(parts).assign(setting=setting.title)
    table = run.joined(made, "figure_convergence.csv", ("method", "iteration"))
    run.write("figure_convergence.csv", table, float_format="%.6g")
    run.write("figure_convergence_patterns.png", draw_patterns(drawn.topics, table), dpi=150)
    run.write("figure_convergence.png", draw(table, setting.title), dpi=150)
    text = report(setting.title, table, quick=run.quick)
    run.write("figure_convergence.md", text)
    print(text)


def followers(quick: bool) -> dict[str, Method]:
    """Every method, in a way that keeps its course; each bound on paper mode by itself, for it takes minutes."""
    chosen = {name: run for name, run in methods(quick).items() if not name.startswith("ours")}
    chosen["ours"] = partial(course_of_ours, after=KEPT)
    if not quick:
        chosen |= {f"ours_paper-{most}": partial(course_of_ours, after=(most,), method="paper") for most in AFTER}
    return chosen


def followed(name: str, drawn: Bars, follow: Method, seed: int) -> pd.DataFrame:
    """Error and share of recovered bars of a method after each iteration that was kept; some of our patterns."""
    with threadpool_limits(1):
        estimate = follow(drawn.counts, topics=len(drawn.topics), seed=seed)
    kept = [topics[match_topics(drawn.topics, topics)] for topics in estimate.history["topics"]]
    steps = estimate.history.get("iterations", np.arange(1, len(kept) + 1))
    columns = {"method": name, "iteration": steps, "seconds": estimate.history["seconds"]}
    columns |= {"hellinger": hellinger_course(drawn.topics, estimate)}
    columns |= {"bars": [np.mean(recovered(drawn.topics, topics)) for topics in kept]}
    shown = SHOWN.get(name, ())
    written = [as_text(topics) if step in shown else "" for step, topics in zip(steps, kept, strict=True)]
    return pd.DataFrame(columns | {"patterns": written})


def as_text(topics: Array) -> str:
    """All probabilities, one after another."""
    return " ".join(f"{value:.4f}" for value in topics.ravel())


def report(title: str, table: pd.DataFrame, *, quick: bool = False) -> str:
    """Where ours is after some iterations, and where each method ends."""
    lines = [f"# Convergence, {title}", *(["", HASTE] if quick else [])]
    for method in [name for name in SHOWN if (table["method"] == name).any()]:
        lines += ["", f"## {TITLES[method]}", ""]
        lines += ["| at most | seconds | Hellinger | bars recovered |", "|---:|---:|---:|---:|"]
        part = table[table["method"] == method]
        for row in part[part["iteration"].isin(SHOWN[method])].itertuples():
            cells = f"{row.seconds:.2f} | {row.hellinger:.4f} | {100 * row.bars:.0f} %"
            lines.append(f"| {row.iteration:g} iterations | {cells} |")
    lines += ["", "## At the end", "", "| | seconds | Hellinger | bars recovered |", "|---|---:|---:|---:|"]
    for method, part in table.groupby("method", sort=False):
        last = part.iloc[-1]
        cells = f"{last['seconds']:.2f} | {last['hellinger']:.4f} | {100 * last['bars']:.0f} %"
        lines.append(f"| {TITLES[str(method)]} | {cells} |")
    lines += ["", "Each bound of ours is a fit of its own: a fit that converges before it ends there.", ""]
    return "\n".join(lines)


def draw_patterns(true: Array, table: pd.DataFrame) -> Figure:
    """The truth, and our topics on their way to it."""
    rows = {"truth": true}
    for row in table[table["patterns"].fillna("") != ""].itertuples():
        topics = np.array(row.patterns.split(), dtype=float).reshape(true.shape)
        # what was written is rounded
        rows[f"{TITLES[row.method]}, {row.iteration:g}"] = topics / topics.sum(1, keepdims=True)
    figure = Figure(figsize=(10.5, 0.9 * len(rows) + 0.6), layout="constrained")
    axes = figure.subplots(len(rows), len(true), squeeze=False)
    for line, (label, topics) in zip(axes, rows.items(), strict=True):
        for ax, topic, flag in zip(line, topics, recovered(true, topics), strict=True):
            draw_grid(ax, topic, recovered=flag)
        line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9, labelpad=8)
    figure.suptitle("Topics after so many iterations at most; a red frame: not the true pattern", fontsize=10)
    return figure


def draw(table: pd.DataFrame, title: str) -> Figure:
    """Hellinger distance by seconds, both on logarithmic axes."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    ax = figure.subplots()
    for method, part in table.groupby("method", sort=False):
        name, last = str(method), part.iloc[-1]
        # each of our dots is a fit of its own, and its time varies by itself
        style = {"linestyle": "", "marker": "o", "markersize": 4} if name.startswith("ours") else {"linewidth": 1.6}
        ax.plot(part["seconds"], part["hellinger"], color=COLOURS[name], label=TITLES[name], **style)
        ax.plot(last["seconds"], last["hellinger"], "o", color=COLOURS[name], markersize=7)
    ax.set(xscale="log", yscale="log", xlabel="seconds", ylabel="Hellinger distance to the true topics")
    ax.set_title(f"{title}: error by time; a large dot where a method ends", fontsize=10)
    label_decades(ax.xaxis, table["seconds"])
    label_decades(ax.yaxis, table["hellinger"])
    ax.grid(color="0.92")
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
