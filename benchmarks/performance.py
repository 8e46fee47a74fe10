"""Keeps what `speed`, `scale` and `growth` measured, and draws docs/performance.md from it without running anything.

``python -m benchmarks speed --write`` keeps the cases that it ran in ``results/performance/speed.json``, each with its
seed, size and command, and draws the page anew; full runs do so by themselves. ``python -m benchmarks.performance``
draws the page alone.
"""

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.harness import Record

ROOT = Path(__file__).parent.parent
KEPT, PAGE = ROOT / "results" / "performance", ROOT / "docs" / "performance.md"
BENCHMARKS = ("speed", "scale", "growth")
PACKAGES = ("otpdag", "torch", "numpy", "scikit-learn", "semopy", "stepmix", "pyagrum", "pgmpy")
PACKAGES += ("pomegranate", "hmmlearn", "dynamax", "jax", "pyro-ppl", "pyarrow", "dask")

WORDS = {
    "factor1_100k": ("semopy", "one factor, 6 columns, 100,000 rows"),
    "factor4_100k": ("semopy", "four factors, 20 columns, 100,000 rows"),
    "factor4_1k": ("semopy", "four factors, 20 columns, 1,000 rows"),
    "mixture10_10k": ("scikit-learn", "ten normal components in ten dimensions, 10,000 rows, 16 starts"),
    "mixture10_100k": ("scikit-learn", "the same, 100,000 rows"),
    "latent_class_20k": ("StepMix", "two latent classes, 20,000 rows, 16 starts"),
    "hmm_1m": ("hmmlearn", "hidden Markov model, a million steps, 5 starts"),
    "hmm_dynamax_1x10k": ("dynamax", "hidden Markov model, one series of 10,000 steps, 4 starts"),
    "hmm_dynamax_100x1k": ("dynamax", "the same, 100 series of 1,000 steps"),
    "pyro_mixed_dag": ("Pyro", "mixed network with a hidden class, 5,000 rows, 2 starts"),
    "starts16": ("ourselves", "sixteen starts over one"),
    "import_time": ("torch", "importing the package over importing torch"),
    "rows_exponent": ("ourselves", "power of rows by which time grows, mixed table with gaps"),
    "parquet_rate": ("ourselves", "time from a file over that in memory"),
    "dask_same": ("ourselves", "difference of parameters, two workers and memory, over 1e-6"),
    "dask_rate": ("ourselves", "time by two workers over that by one"),
    "threads": ("ourselves", "time by two threads over that by one"),
}
"""The peer of each case, and what is fitted."""

LIMITS = {"rows_exponent": 1.0, "parquet_rate": 1 / 0.7, "dask_same": 1.0, "dask_rate": 1 / 1.5, "threads": 1.0}
"""Where a record has none."""

GROWTH = {
    "rows": "a mixture of three normal components in four dimensions, four starts",
    "nodes": "a tree of binary columns with 5 % gaps, 2,000 rows, one start",
    "hidden": "a chain of hidden binary nodes with three binary columns each, 2,000 rows, one start",
}
STYLES = {
    "otpdag": ("#3f51b5", "o"),
    "scikit-learn": ("#d9822b", "s"),
    "pomegranate": ("#2e8b57", "^"),
    "pyAgrum": ("#8e44ad", "D"),
    "pgmpy": ("#7f8c8d", "v"),
}
OPENING = """
Drawn by `python -m benchmarks.performance` from `results/performance/`, without running anything. Times are
processor seconds of whole fits by one thread, on two cores without a GPU that had other work to do as well; each side
has a process of its own, the same data and as many starts. Ratios are ours over theirs in one run, so below one we are
faster; they count only where our loss is at most 1e-4 of a row above theirs. What JAX takes to compile is apart.
Hmmlearn's time for a million steps is that of three steps of one start, times the steps and starts of a fit: each costs
the same. The package imports what is used when it is used; a first fit therefore pays for pandas and others as well.
"""
GROWTH_OPENING = """
Each library to its own tolerance: here likelihoods are not compared, so that curves tell how time grows rather than who
is faster.
"""
NOTES = {
    "rows": "{:,} rows",
    "memory_over_table": "memory {:.1f} times the table (limit 4)",
    "peak_mb": "peak {:.0f} MB",
    "beyond_rows": "then {:,} rows",
    "beyond_peak_mb": "at a peak of {:.0f} MB",
    "load_before": "load {:.1f} before",
}
"""What else a case of `scale` measured."""
LEFT_OUT = {"details"}  # of records: whole lists of what each side returned


def keep(report: Record, *, quick: bool, folder: Path = KEPT) -> None:
    """Put a report's cases beside those that were kept before, and draw the page."""
    folder.mkdir(parents=True, exist_ok=True)
    name = report["benchmark"]
    kept = read(folder, name)
    for record in report["cases"]:
        size = " --quick" if quick else ""
        command = f"python -m benchmarks {name}{size} --seed {report['seed']} --case {record['case']}"
        about = {"command": command, "seed": report["seed"], "size": "quick" if quick else "full"}
        about |= {"code": report.get("code") or _commit(), "versions": _versions()}
        kept[record["case"]] = {key: value for key, value in record.items() if key not in LEFT_OUT} | about
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def read(folder: Path, name: str) -> dict[str, Record]:
    """What was kept of a benchmark, by case."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _commit() -> str:
    """The commit that ran, where the code lies in a repository, and whether code was changed since."""

    def told(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = told("status", "--porcelain", "--", "src", "benchmarks", "baselines")
    return told("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def _versions() -> dict[str, str]:
    known = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            continue
    return known


# -- the page ----------------------------------------------------------------------------------------------------------


def draw(folder: Path = KEPT, page: Path = PAGE) -> None:
    """Write the page and its pictures from what is kept."""
    kept = {name: read(folder, name) for name in BENCHMARKS}
    pictures = page.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    lines = [*_opening(), *_beside_peers(kept["speed"], pictures), *_growth(kept["growth"], pictures)]
    lines += [*_scale(kept["scale"]), *_missing(kept), *_made_by(kept)]
    page.write_text("\n".join(lines) + "\n")


def _opening() -> list[str]:
    return ["# Performance", "", *OPENING.strip().splitlines(), ""]


def _beside_peers(records: dict[str, Record], pictures: Path) -> list[str]:
    lines = ["## Beside specialists", "", "![Ratios of time to specialists](performance/peers.svg)", ""]
    lines += [
        "| what | peer | ours, s | theirs, s | ratio | limit | size, seed, code |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for case, (peer, what) in WORDS.items():
        if case not in records:
            continue
        one = records[case]
        if one.get("ratio") is None:
            reason = one.get("error") or f"skipped, {one.get('skipped')}"
            lines.append(f"| {what} (`{case}`) | {peer} | | | {reason} | | {_run(one)} |")
            continue
        figures = (_number(one[key]) for key in ("ours", "oracle", "ratio"))
        limit = _number(one.get("limit"))
        lines.append(f"| {what} (`{case}`) | {peer} | {' | '.join(figures)} | {limit} | {_run(one)} |")
    _draw_peers({case: one for case, one in records.items() if one.get("ratio") and "limit" in one}, pictures)
    return [*lines, "", *_apart(records)]


def _apart(records: dict[str, Record]) -> list[str]:
    """Cases above their limits."""
    above = [case for case, one in records.items() if one.get("ratio") is None or one["ratio"] > one.get("limit", 1e9)]
    return [f"Above its limit, or not comparable: {', '.join(f'`{case}`' for case in above)}.", ""] if above else []


def _draw_peers(records: dict[str, Record], pictures: Path) -> None:
    cases = [case for case in WORDS if case in records and case not in ("starts16", "import_time")][::-1]
    figure, axes = plt.subplots(figsize=(7.5, 0.42 * len(cases) + 1.1), layout="constrained")
    for place, case in enumerate(cases):
        ratio, limit = records[case]["ratio"], records[case]["limit"]
        color = "#3f51b5" if ratio <= limit else "#c0392b"
        axes.plot([1.0, ratio], [place, place], color=color, linewidth=1.5, zorder=1)
        axes.plot(ratio, place, "o", color=color, markersize=7, zorder=3)
        axes.plot([limit, limit], [place - 0.3, place + 0.3], color="black", linewidth=1.5, zorder=2)
        axes.annotate(f"{ratio:.2g}", (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    axes.set_xscale("log")
    axes.axvline(1.0, color="0.6", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(cases)), [f"{case}  ({WORDS[case][0]})" for case in cases], fontsize=8)
    axes.set_ylim(-0.6, len(cases) - 0.4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("our time over theirs (dot), and the limit (black line)")
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, pictures / "peers.svg")


def _growth(records: dict[str, Record], pictures: Path) -> list[str]:
    if not any("curves" in one for one in records.values()):
        return []
    lines = ["## Growth", "", *GROWTH_OPENING.strip().splitlines(), ""]
    for case, what in GROWTH.items():
        if "curves" not in records.get(case, {}):
            continue
        one = records[case]
        _draw_growth(one, pictures / f"{case}.svg")
        lines += [f"**{one['size_of'].capitalize()}**: {what}. Our time grows by the power {one['ratio']:.2f}.", ""]
        lines += [f"![Growth in {one['size_of']}](performance/{case}.svg)", ""]
        sizes = [size for size, _ in one["curves"]["otpdag"]]
        lines += [f"| {one['size_of']} | {' | '.join(f'{size:,}' for size in sizes)} |", f"|---|{'---:|' * len(sizes)}"]
        for side, curve in one["curves"].items():
            known = dict(map(tuple, curve))
            cells = [_number(known[size]) if size in known else "not run" for size in sizes]
            lines.append(f"| {side}, s | {' | '.join(cells)} |")
        lines.append("")
    return lines


def _draw_growth(record: Record, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
    for side, curve in record["curves"].items():
        color, marker = STYLES.get(side, ("black", "x"))
        sizes, seconds = zip(*curve, strict=True)
        axes.plot(sizes, seconds, color=color, marker=marker, markersize=5, linewidth=1.6, label=side)
    axes.set(xscale="log", yscale="log", xlabel=record["size_of"], ylabel="processor seconds of a fit")
    axes.set_xticks(sizes := [size for size, _ in record["curves"]["otpdag"]], [f"{size:,}" for size in sizes])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _scale(records: dict[str, Record]) -> list[str]:
    if not records:
        return []
    lines = ["## Rows beyond memory", "", "See [rows beyond memory](scale.md).", ""]
    lines += ["| case | figure | limit | beside | size, seed, code |", "|---|---:|---:|---|---|"]
    for case, one in records.items():
        if one.get("ratio") is None:
            figure = one.get("error") or f"skipped, {one.get('skipped')}"
        else:
            figure = _number(one["ratio"])
        words = f"{WORDS[case][1]} (`{case}`)"
        lines.append(f"| {words} | {figure} | {_number(LIMITS.get(case))} | {_notes(one)} | {_run(one)} |")
    return [*lines, ""]


def _notes(record: Record) -> str:
    """What else a case of `scale` measured."""
    return ", ".join(text.format(record[key]) for key, text in NOTES.items() if key in record)


def _missing(kept: dict[str, dict[str, Record]]) -> list[str]:
    wanted = {
        "scale": tuple(LIMITS),
        "speed": tuple(case for case in WORDS if case not in LIMITS),
        "growth": tuple(GROWTH),
    }
    absent = [f"`{name} {case}`" for name, cases in wanted.items() for case in cases if case not in kept[name]]
    lines = ["## What was not run", ""]
    quick = [f"`{case}`" for cases in kept.values() for case, one in cases.items() if one["size"] == "quick"]
    if quick:
        lines += [f"At the quick size, not the full one: {', '.join(quick)}.", ""]
    return [*lines, f"Not at all: {', '.join(absent)}." if absent else "Nothing else is missing.", ""]


def _made_by(kept: dict[str, dict[str, Record]]) -> list[str]:
    versions: dict[str, str] = {}
    for cases in kept.values():
        for one in cases.values():
            versions |= one["versions"]
    made = ", ".join(f"{package} {number}" for package, number in versions.items())
    return [
        f"*Each case by `python -m benchmarks NAME --seed SEED --case CASE` (with `--quick` where it says so); {made}.*"
    ]


def _run(record: Record) -> str:
    """How it was run: size, seed and commit."""
    return ", ".join(str(record[key]) for key in ("size", "seed", "code") if record.get(key))


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"


def _save(figure: Any, path: Path) -> None:
    with plt.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "path"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "Agg")
    draw()
