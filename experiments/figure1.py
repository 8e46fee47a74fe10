"""Figure 1: errors of the means of two overlapping Gaussians when variances, weights or both are wrong.

The paper's three cases and the one that it leaves out, in which nothing is wrong. Written: the figure, the mean errors
by step, the final error of each simulation, and a table of final errors with paired differences to EM.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.mixtures import METHODS, OTHERWISE, ROBUST, Paired, SearchSchedule, Simulations, paper_mode, simulate
from experiments.registry import Page, Run, experiment

STEPS = 300
OTHERWISE_SIMS = 30  # of settings that the paper leaves open
EVERY_STEP = 30  # is drawn up to this one; later ones lie close together
COLOURS = {
    "EM": "#2f5d9b",
    "Sinkhorn EM": "#6f6f6f",
    "ours, paper mode": "#d1762b",
    "ours, default": "#3d8b5a",
    "ours, robust": "#a8434b",
}
DASHES = {"Sinkhorn EM": (0, (1, 1.2)), "ours, default": (0, (5, 3))}

Results = dict[str, dict[str, SearchSchedule]]


DIFFERENCES = (
    "The paper draws three cases as curves, without numbers, and says that its estimates survive a wrong model better "
    "than EM's: EM comes to rest early while they go on converging. *Ours, paper mode* is that: Algorithm 1 at the "
    "rate of 1e-3 that the paper prints for all models, both sides once in each of 300 steps, other settings as it "
    "prints them for its other model of hidden categories. Its curve goes on falling, and ends below EM's where "
    "weights or both are wrong, beside it where variances are; intervals of all three differences include zero. It "
    "ends at 0.22 whatever it is told, right or wrong: means have moved by a third of the way from the common start, "
    "and what is told hardly counts so far. The objective's own minimum is further from the truth than EM's, and 300 "
    "steps at 1e-3 do not reach it (the table below: a rate of 0.01 does). So that it ends below EM holds for the "
    "printed rate and start, and where variances are wrong for some sets of simulations and not for others; of 100 "
    "others (seed 280117) ratios are 0.80, 0.73 and 0.70 in the three cases, all beyond chance. *Ours, default* has "
    "the noise integrated out and ends where EM does, as maximum likelihood should; what is gained over EM where the "
    "model is wrong is gained by the robust setting, and the fourth case, which is ours, shows what that costs where "
    "nothing is wrong."
)


def page(folder: Path) -> Page:
    """The summary of a run's final errors, and its curves."""
    finals_read = pd.read_csv(folder / "figure1_final.csv")
    summary = pd.read_csv(folder / "figure1_table.csv")
    sims = int(finals_read["simulation"].nunique())
    there = set(summary["case"])
    titles = {case: told.title for case, told in simulate(0, sims=2).cases.items() if case in there}
    text = as_markdown(summary, titles, sims) + "\n" + DIFFERENCES
    if (folder / "figure1_settings.csv").is_file():
        text += "\n\n" + settings_as_markdown(pd.read_csv(folder / "figure1_settings.csv"))
    return Page(text, {"Mean error of the means by step": draw(pd.read_csv(folder / "figure1.csv"), titles)})


@experiment(
    "figure1", "Means of a Gaussian mixture when variances, weights or both are wrong", resumable=True, page=page
)
def figure1(run: Run) -> None:
    """Run all methods on all cases, each a part of the run, and write what they did."""
    sims = 12 if run.quick else 100
    given = simulate(run.seed, sims=sims)
    results: Results = {}
    for case, told in given.cases.items():
        for name, method in METHODS.items():
            part = run.part(f"{case}-{name}".replace(" ", "-"), partial(rows_of, method, given, told, run.seed))
            if len(part):
                results.setdefault(case, {})[name] = as_course(part)
    # what others are compared with is EM
    compared = {case: courses for case, courses in results.items() if "EM" in courses}
    if compared:
        write(run, given, compared)
        print((run.folder / "figure1.md").read_text())
    settings = otherwise(run)
    if len(settings):
        run.write("figure1_settings.csv", settings, float_format="%.6g")


def otherwise(run: Run) -> pd.DataFrame:
    """Final errors of paper mode at other settings, and EM's, where variances are wrong; of other simulations."""
    given = simulate(run.seed + 1, sims=3 if run.quick else OTHERWISE_SIMS)
    tried = {"EM": METHODS["EM"]} | {label: paper_mode(**changes) for label, changes in OTHERWISE.items()}

    def ends(label: str) -> pd.DataFrame:
        errors = tried[label](given, given.cases["wrong_variances"], STEPS, run.seed).final
        return pd.DataFrame({"setting": label, "simulation": np.arange(len(errors)), "error": errors})

    parts = run.parts((f"settings-{label}".replace(" ", "-"), partial(ends, label)) for label in tried)
    return pd.concat(parts, ignore_index=True)


def settings_as_markdown(ends: pd.DataFrame) -> str:
    """The mean error by setting, its ratio to EM's, and the paired difference with its standard error."""
    by = ends.pivot(index="simulation", columns="setting", values="error")
    lines = [
        f"Variances wrong, {len(by)} other simulations: paper mode at settings that the paper leaves open, or has "
        "elsewhere.",
        "",
        "| | error | ratio to EM | difference to EM ± standard error |",
        "|---|---:|---:|---:|",
    ]
    for setting in [known for known in ("EM", *OTHERWISE) if known in by]:
        apart = by[setting] - by["EM"]
        cells = f"{by[setting].mean():.3f} | {by[setting].mean() / by['EM'].mean():.2f}"
        lines.append(f"| {setting} | {cells} | {apart.mean():+.3f} ± {apart.sem():.3f} |")
    return "\n".join(lines)


def rows_of(method, given: Simulations, told, seed: int) -> pd.DataFrame:
    """The errors of a method as a table: a row for each simulation and step, and whether it failed."""
    course = method(given, told, STEPS, seed)
    steps, sims = course.errors.shape
    return pd.DataFrame(
        {
            "step": np.repeat(np.arange(steps), sims),
            "simulation": np.tile(np.arange(sims), steps),
            "error": course.errors.ravel(),
            "failed": np.tile(course.failed, steps),
        }
    )


def as_course(rows: pd.DataFrame) -> SearchSchedule:
    """A method's errors from that table."""
    sims = rows["simulation"].nunique()
    failed = rows["failed"].to_numpy(dtype=bool)[:sims]
    return SearchSchedule(rows["error"].to_numpy(dtype=float).reshape(-1, sims), failed)


def run_all(given: Simulations, *, seed: int, steps: int = STEPS) -> Results:
    """Errors of every method in every case."""
    return {
        case: {name: method(given, told, steps, seed) for name, method in METHODS.items()}
        for case, told in given.cases.items()
    }


def write(run: Run, given: Simulations, results: Results) -> None:
    """Write the figure, both tables of numbers and the summary."""
    titles = {case: given.cases[case].title for case in results}
    table = curves(results)
    run.write("figure1.png", draw(table, titles), dpi=150)
    table = run.joined(table, "figure1.csv", ("case", "method", "step"))
    ends = run.joined(finals(results), "figure1_final.csv", ("case", "method", "simulation"))
    summary = run.joined(summarise(results), "figure1_table.csv", ("case", "method"))
    run.write("figure1.csv", table, float_format="%.6g")
    run.write("figure1_final.csv", ends, float_format="%.6g")
    run.write("figure1_table.csv", summary, float_format="%.6g")
    run.write("figure1.md", as_markdown(summary, titles, len(given.data)))


def curves(results: Results) -> pd.DataFrame:
    """Mean error by case, method and step, with the 95 % interval of the mean; of later steps every tenth."""
    parts = []
    for case, courses in results.items():
        for method, course in courses.items():
            mean, half = band(course.errors)
            steps = np.arange(len(mean))
            columns = {"case": case, "method": method, "step": steps, "error": mean}
            kept = (steps <= EVERY_STEP) | (steps % 10 == 0)
            parts.append(pd.DataFrame(columns | {"low": mean - half, "high": mean + half})[kept])
    return pd.concat(parts, ignore_index=True)


def finals(results: Results) -> pd.DataFrame:
    """The final error of each simulation."""
    parts = [
        pd.DataFrame({"case": case, "method": method, "simulation": np.arange(len(c.final)), "error": c.final})
        for case, courses in results.items()
        for method, c in courses.items()
    ]
    return pd.concat(parts, ignore_index=True)


def band(errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean over simulations, and half its 95 % interval."""
    return errors.mean(-1), 1.96 * errors.std(-1, ddof=1) / np.sqrt(errors.shape[-1])


def summarise(results: Results) -> pd.DataFrame:
    """Final errors, their ratio to EM's, and paired differences to EM with 95 % intervals."""
    rows = []
    for case, courses in results.items():
        reference = courses["EM"].final
        for method, course in courses.items():
            paired = Paired.of(course.final, reference)
            rows.append(
                {
                    "case": case,
                    "method": method,
                    "error": course.final.mean(),
                    "std": course.final.std(ddof=1),
                    "ratio": course.final.mean() / reference.mean(),
                    "difference": paired.mean,
                    "low": paired.low,
                    "high": paired.high,
                    "failed": int(course.failed.sum()),
                }
            )
    return pd.DataFrame(rows)


def as_markdown(summary: pd.DataFrame, titles: Mapping[str, str], sims: int) -> str:
    """The summary for people."""
    lines = [
        f"# Figure 1: mean absolute error of the means, {sims} simulations",
        "",
        "Errors have their labels lined up; all methods have the same two starts and keep the one that they like best.",
        "Intervals of the paired difference to EM are 95 %; a star marks those without zero. The robust setting is "
        f'`entropic(eps={ROBUST.objective.eps}, reference="{ROBUST.evaluation.reference}")`: it does not read the '
        "weights that it is given, and trusts the variances less. Where nothing is wrong, that costs accuracy.",
        "",
        "| case | method | error | ratio to EM | difference to EM | failed |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in summary.itertuples():
        star = "*" if row.low > 0 or row.high < 0 else ""
        difference = "" if row.method == "EM" else f"{row.difference:+.3f} [{row.low:+.3f}, {row.high:+.3f}]{star}"
        lines.append(
            f"| {titles[row.case]} | {row.method} | {row.error:.3f} ± {row.std:.3f} | {row.ratio:.2f} | {difference} "
            f"| {row.failed} |"
        )
    return "\n".join(lines) + "\n"


def draw(table: pd.DataFrame, titles: Mapping[str, str]) -> Figure:
    """Draw what :func:`curves` returns: one panel for each case, mean error by step with bands.

    The first steps, in which most happens, have most of the room.
    """
    with mpl.rc_context({"font.size": 9, "axes.titlesize": 10, "font.family": "sans-serif"}):
        figure = Figure(figsize=(11.5, 3.8), layout="constrained")
        panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
        for panel, (case, title) in zip(panels, titles.items(), strict=True):
            _panel(panel, title, table[table["case"] == case])
        panels[0].set(ylabel="mean absolute error of the means", ylim=(0, 1.04 * table["high"].max()))
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _panel(panel: Axes, title: str, table: pd.DataFrame) -> None:
    for method, part in table.groupby("method", sort=False):
        colour, style = COLOURS[str(method)], DASHES.get(str(method), "-")
        panel.fill_between(part["step"], part["low"], part["high"], color=colour, alpha=0.13, linewidth=0)
        panel.plot(part["step"], part["error"], color=colour, linestyle=style, linewidth=1.6, label=method)
    last = int(table["step"].max())
    panel.set_xscale("symlog", linthresh=3)
    ticks = [0, *(tick for tick in (3, 10, 30, 100) if tick < last), last]
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.set(title=title, xlabel="step", xlim=(0, last))
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="0.9", linewidth=0.6)
    panel.set_axisbelow(True)
