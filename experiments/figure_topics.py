"""The figures of topics: every topic as a grid of its words, the truth and all methods one above another."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from baselines.base import Array
from experiments.bars import Setting, first_fits, settings
from experiments.metrics import match_topics, patterns_recovered
from experiments.registry import Run, experiment
from experiments.topic_models import HASTE, TITLES, draw_grid


@experiment("figure-topics", "Topics of documents about bars as pictures: the truth and every method")
def figure_topics(run: Run) -> None:
    """Fit each setting once; write the pictures, the topics and which of them are the true ones."""
    lines = ["# Topics of documents about bars, one start each", "", *([HASTE, ""] if run.quick else [])]
    for setting in settings(run.quick):
        true = setting.draw(run.seed).topics
        first = first_fits(setting, run.seed, quick=run.quick)
        estimated = {name: estimate.params["topics"] for name, estimate in first.items()}
        lined_up = {name: topics[match_topics(true, topics)] for name, topics in estimated.items()}
        right = {name: recovered(true, topics) for name, topics in lined_up.items()}
        stem = f"figure_topics_{setting.topics}"
        run.write(f"{stem}.png", draw(setting, true, lined_up, right), dpi=150)
        run.write(f"{stem}.csv", as_table(true, lined_up, right), float_format="%.6g")
        lines += [f"## {setting.title}", "", "| | bars recovered exactly |", "|---|---:|"]
        lines += [f"| {TITLES[name]} | {sum(flags)} of {len(true)} |" for name, flags in right.items()]
        lines += ["", f"![Topics of every method]({stem}.png)", ""]
        run.write("figure_topics.md", "\n".join(lines))
    print("\n".join(lines))


def recovered(true: Array, lined_up: Array) -> list[bool]:
    """Whether each topic, lined up with the truth, has the true pattern."""
    return [patterns_recovered(p[None], q[None]) == 1.0 for p, q in zip(true, lined_up, strict=True)]


def as_table(true: Array, estimated: dict[str, Array], right: dict[str, list[bool]]) -> pd.DataFrame:
    """A row for each topic of each method, with the probabilities of its words."""
    every = {"truth": np.ones(len(true), dtype=bool), **right}
    parts = []
    for name, topics in {"truth": true, **estimated}.items():
        part = pd.DataFrame(topics, columns=[f"word_{at}" for at in range(topics.shape[1])])
        parts.append(part.assign(method=name, topic=np.arange(len(topics)) + 1, recovered=every[name]))
    table = pd.concat(parts, ignore_index=True)
    return table[["method", "topic", "recovered", *(name for name in table if str(name).startswith("word_"))]]


def draw(setting: Setting, true: Array, estimated: dict[str, Array], right: dict[str, list[bool]]) -> Figure:
    """Rows are methods, columns topics in the order of the truth; wrong patterns have a red frame."""
    rows = {"truth": true, **estimated}
    wide = max(10.0, 0.42 * len(true) + 2.6)
    tall = (wide - 2.6) / len(true) + 0.1
    figure = Figure(figsize=(wide, tall * len(rows) + 0.75), layout="constrained")
    axes = figure.subplots(len(rows), len(true))
    for line, (name, topics) in zip(axes, rows.items(), strict=True):
        flags = right.get(name, [True] * len(true))
        for ax, topic, flag in zip(line, topics, flags, strict=True):
            draw_grid(ax, topic, recovered=flag)
        label = "truth" if name == "truth" else f"{TITLES[name]}\n{sum(flags)} of {len(true)}"
        line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9, labelpad=8)
    figure.suptitle(f"Words of each topic, {setting.title}; a red frame: not the true pattern", fontsize=10)
    return figure
