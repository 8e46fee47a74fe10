"""How many regimes do two classic series of counts have, and when did they change?

Earthquakes of magnitude 7 and above, world-wide, 1900 to 2006, and British coal-mining disasters, 1851 to 1962. The
number of states is chosen by the likelihood of steps that no fit has seen: each fit misses a random tenth of the years,
which a hidden Markov model simply takes as missing. Both files come from the folder that OTPDAG_DATA names.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from otpdag.estimators import HiddenMarkovModel
from otpdag.plots import plot_segments


def held_out(counts: np.ndarray, states: int, folds: int, seed: int) -> float:
    """Mean log-likelihood of a year that the fit did not see, given those that it saw."""
    fold = np.random.default_rng(seed).permutation(len(counts)) % folds
    gained = 0.0
    for number in range(folds):
        seen = np.where(fold == number, np.nan, counts)[:, None]
        hmm = HiddenMarkovModel(states, random_state=seed, emission="poisson").fit(seen)
        gained += hmm.score(counts[:, None]) - hmm.score(seen)
    return gained / len(counts)


def main(out: Path, folds: int) -> None:
    console = Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("earthquakes", "coal_disasters"):
        series = pd.read_csv(Path(os.environ["OTPDAG_DATA"]) / "counts" / f"{name}.csv")
        counts = series["count"].to_numpy(dtype=float)
        table = Table("states", "held-out log-likelihood of a year", "BIC", "rates", box=None, pad_edge=False)
        scores = {}
        for states in (2, 3, 4):
            hmm = HiddenMarkovModel(states, emission="poisson").fit(counts)
            scores[states] = held_out(counts, states, folds, seed=0)
            rates = ", ".join(f"{rate:.2f}" for rate in hmm.lambdas_[:, 0])
            table.add_row(str(states), f"{scores[states]:.4f}", f"{hmm.bic(counts):.1f}", rates)
        console.print(f"[bold]{name}[/bold]")
        console.print(table)
        best = HiddenMarkovModel(max(scores, key=lambda states: scores[states]), emission="poisson").fit(counts)
        levels = best.lambdas_[:, 0]
        figure = plot_segments(counts, best.predict(counts), times=series["year"].to_numpy(), levels=levels)
        figure.axes[0].set(title=name.replace("_", " "), xlabel="year", ylabel="count")
        figure.savefig(out / f"{name}.png", dpi=150)
        console.print(f"{best.n_components} states; drawn in {out / f'{name}.png'}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/count_series"))
    parser.add_argument("--folds", type=int, default=10)
    options = parser.parse_args()
    main(options.out, options.folds)
