"""Tables 2 and 7: coherence and diversity of the topics of three corpora, and their top words."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from baselines.base import Array, Estimate
from experiments.topic_models import COLOURS, HASTE, TITLES, fits, methods, spread
from otpdag.cli.registry import Run, experiment
from otpdag.datasets import Corpus, corpus
from otpdag.errors import DataError
from otpdag.metrics import npmi_coherence, top_words, topic_diversity

TOPICS, WORDS = 10, 10
STARTS = 5
RELEVANCE = 0.6  # the default of otpdag's `top_words`
ITERATIONS = {
    "20NewsGroup": {"em": 50, "svi": 10, "prodlda": 100, "tomotopy": 500},
    "BBC_News": {"em": 50, "svi": 20, "prodlda": 200, "tomotopy": 500},
    "DBLP": {"em": 50, "svi": 10, "prodlda": 50, "tomotopy": 500},
}
PAPER = {
    "20NewsGroup": {
        "OTP-DAG": ("10.45 ± 0.56", "92.00 ± 2.65"),
        "Batch EM": ("6.71 ± 0.16", "72.33 ± 1.15"),
        "SVI": ("5.90 ± 0.51", "85.33 ± 5.51"),
        "Prod LDA": ("4.78 ± 2.64", "92.67 ± 4.51"),
    },
    "BBC_News": {
        "OTP-DAG": ("9.12 ± 0.81", "87.67 ± 2.65"),
        "Batch EM": ("8.67 ± 0.62", "86.00 ± 1.00"),
        "SVI": ("7.84 ± 0.49", "92.33 ± 2.31"),
        "Prod LDA": ("2.17 ± 2.36", "87.67 ± 3.79"),
    },
    "DBLP": {
        "OTP-DAG": ("7.66 ± 0.44", "97.33 ± 1.53"),
        "Batch EM": ("4.52 ± 0.53", "81.33 ± 1.15"),
        "SVI": ("1.47 ± 0.39", "92.67 ± 2.52"),
        "Prod LDA": ("2.91 ± 1.70", "98.67 ± 1.53"),
    },
}
"""Coherence and diversity in per cent, as the paper prints them."""


@dataclass(frozen=True)
class Found:
    """What was found in one corpus: figures of each start, and the likeliest words of the first start by method."""

    text: Corpus
    figures: pd.DataFrame
    words: dict[str, list[list[str]]]


@experiment("table2", "Coherence, diversity and top words of the topics of three corpora", resumable=True)
def table2(run: Run) -> None:
    """Fit all corpora; write the figures, the top words, the table and a picture of it."""
    texts, missing = available(["BBC_News"] if run.quick else list(PAPER))
    if run.quick:
        texts = {name: shortened(text, 300) for name, text in texts.items()}
    results = earlier(run, texts) if run.resume else {}
    for name in [name for name in texts if name not in results]:
        results[name] = run_corpus(name, texts[name], run.seed, starts=1 if run.quick else STARTS, quick=run.quick)
        write(run, results, missing)  # what is finished is kept if the run is interrupted
    print(report(results, missing, quick=run.quick))


def available(names: list[str]) -> tuple[dict[str, Corpus], list[str]]:
    """The corpora that are there, before any work is done, and why others are not; an error if none is."""
    found, missing = {}, []
    for name in names:
        try:
            found[name] = corpus(name)
        except DataError as error:
            missing.append(str(error))
    if not found:
        raise DataError(missing[0])
    return found, missing


def earlier(run: Run, texts: dict[str, Corpus]) -> dict[str, Found]:
    """The corpora that an earlier run has finished."""
    paths = run.folder / "table2.csv", run.folder / "table7_words.csv"
    if not all(path.exists() for path in paths):
        return {}
    figures, words = (pd.read_csv(path) for path in paths)
    found = {}
    for name in [name for name in texts if (figures["corpus"] == name).any()]:
        top = words[words["corpus"] == name].groupby("method", sort=False)["words"]
        lists = {str(method): [line.split() for line in lines] for method, lines in top}
        found[name] = Found(texts[name], figures[figures["corpus"] == name], lists)
    return found


def shortened(text: Corpus, documents: int) -> Corpus:
    """The first documents, and the words that they have."""
    kept = text.documents[:documents]
    vocabulary = tuple(sorted({word for document in kept for word in document}))
    return Corpus(f"{text.title} (first {documents})", kept, vocabulary, (), (), text.source, text.rebuilt)


def run_corpus(name: str, text: Corpus, seed: int, *, starts: int, quick: bool) -> Found:
    """Fit every method from every start."""
    rows, words = [], {}
    chosen = methods(quick, **ITERATIONS[name])
    for method, start, estimate in fits(text.counts, topics=TOPICS, seed=seed, starts=starts, chosen=chosen):
        words.setdefault(method, top_words(estimate.params["topics"], text.vocabulary, WORDS))
        rows.append({"corpus": name, "method": method, "start": start, **measure(text, estimate)})
    return Found(text, pd.DataFrame(rows), words)


def measure(text: Corpus, estimate: Estimate) -> dict[str, float]:
    """Coherence and diversity in per cent, their product as a share, by both rankings of words; and time."""
    topics = estimate.params["topics"]
    rankings = {"": topics, "relevant_": relevance(topics, text)}
    found = {"seconds": estimate.seconds}
    for prefix, weights in rankings.items():
        words = top_words(weights, text.vocabulary, WORDS)
        coherence, diversity = float(npmi_coherence(words, text.documents).mean()), topic_diversity(words)
        found |= {f"{prefix}coherence": 100 * coherence, f"{prefix}diversity": 100 * diversity}
        found |= {f"{prefix}product": coherence * diversity}
    return found


def relevance(topics: Array, text: Corpus) -> Array:
    """Weigh words by how likely, and how much likelier than elsewhere, a topic makes them (Sievert & Shirley 2014)."""
    overall = np.asarray(text.counts.sum(axis=0)) / text.counts.sum()
    return np.log(np.maximum(topics, 1e-300)) - (1 - RELEVANCE) * np.log(overall)


def write(run: Run, results: dict[str, Found], missing: list[str]) -> None:
    """Write all results so far."""
    figures = pd.concat([found.figures for found in results.values()], ignore_index=True)
    figures.to_csv(run.folder / "table2.csv", index=False, float_format="%.6g")
    as_rows(results).to_csv(run.folder / "table7_words.csv", index=False)
    (run.folder / "table2.md").write_text(report(results, missing, quick=run.quick))
    draw(results).savefig(run.folder / "table2.png", dpi=150)


def as_rows(results: dict[str, Found]) -> pd.DataFrame:
    """A row for each topic of each method of each corpus."""
    rows = [
        {"corpus": name, "method": method, "topic": number, "words": " ".join(words)}
        for name, found in results.items()
        for method, topics in found.words.items()
        for number, words in enumerate(topics, start=1)
    ]
    return pd.DataFrame(rows)


def report(results: dict[str, Found], missing: list[str], *, quick: bool = False) -> str:
    """Both tables, each corpus beside the paper's figures."""
    starts = max(found.figures["start"].nunique() for found in results.values())
    lines = [
        "# Table 2: coherence and diversity of topics",
        "",
        f"{TOPICS} topics, {WORDS} top words of each; mean ± standard deviation over starts, {starts} of them. "
        "Coherence is gensim's `c_npmi` over the whole corpus, diversity OCTIS's share of distinct words, both in per "
        "cent. All methods see the counts of all documents. The first table of each corpus ranks words by their "
        "probability, as the paper does; the second one, for all methods alike, by their relevance (Sievert & Shirley "
        f"2014, weight {RELEVANCE}), which keeps words out that are frequent everywhere.",
        *(["", HASTE] if quick else []),
    ]
    for name, found in results.items():
        size = f"{len(found.text):,} documents, {len(found.text.vocabulary):,} words"
        lines += ["", f"## {found.text.title}: {size}", ""]
        if found.text.rebuilt:
            lines += ["A reconstruction of the corpus, close to the one that OCTIS publishes but not equal to it.", ""]
        lines += _table(found.figures, "")
        for paper, (coherence, diversity) in PAPER[name].items():
            lines.append(f"| *{paper}, as the paper prints it* | {coherence} | {diversity} | | |")
        lines += ["", "Words ranked by relevance:", "", *_table(found.figures, "relevant_")]
    lines += [line for reason in missing for line in ("", f"Left out: {reason}.")]
    lines += ["", "# Table 7: likeliest words of otpdag's topics, first start"]
    for found in results.values():
        for method in [name for name in found.words if name.startswith("ours")]:
            lines += ["", f"## {found.text.title}, {TITLES[method]}", ""]
            lines += [f"{number}. {', '.join(words)}" for number, words in enumerate(found.words[method], start=1)]
    return "\n".join(lines) + "\n"


def _table(figures: pd.DataFrame, prefix: str) -> list[str]:
    lines = ["| | coherence | diversity | product | seconds |", "|---|---:|---:|---:|---:|"]
    for method in figures["method"].unique():
        rows = figures[figures["method"] == method]
        digits = {"coherence": 2, "diversity": 1, "product": 4}
        cells = [spread(rows[prefix + name], number) for name, number in digits.items()]
        lines.append(f"| {TITLES[method]} | {' | '.join(cells)} | {rows['seconds'].mean():.1f} |")
    return lines


def draw(results: dict[str, Found]) -> Figure:
    """One panel a corpus: coherence and diversity of each start; crosses are the paper's means."""
    figure = Figure(figsize=(3.6 * max(len(results), 2), 4.0), layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    same = {"OTP-DAG": "ours", "Batch EM": "em", "SVI": "svi", "Prod LDA": "prodlda"}
    for ax, (name, found) in zip(axes, results.items(), strict=True):
        for method in found.words:
            rows = found.figures[found.figures["method"] == method]
            label = TITLES[method]
            ax.plot(rows["coherence"], rows["diversity"], "o", color=COLOURS[method], alpha=0.7, label=label)
        for paper, values in PAPER[name].items():
            coherence, diversity = (float(value.split()[0]) for value in values)
            ax.plot(coherence, diversity, "x", color=COLOURS[same[paper]], markersize=8)
        ax.plot([], [], "x", color="0.3", markersize=8, label="crosses: the paper's own figures, same colours")
        ax.set(xlabel="coherence (c_npmi, %)", title=found.text.title)
        ax.grid(color="0.92")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("diversity (%)")
    low = min(float(np.min(found.figures["diversity"])) for found in results.values())
    for ax in axes:
        ax.set_ylim(min(low, 70) - 3, 102)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
