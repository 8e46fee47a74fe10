"""Make data/grid.csv: days of an electricity grid whose load nobody metered.

The season moves the load; the load moves the price, the number of outages, the mains frequency and what customers
complain about. The load is left out of the table, and about 15 % of the other cells are missing. TRUTH holds the
parameters that the rows are drawn with, in the shapes of ``model.params()``, so that demo.py can compare.

Run ``python examples/make_grid.py`` to make the file again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

ROWS, SEED, MISSING = 1500, 7, 0.15
SEASONS = ("autumn", "spring", "summer", "winter")
COMPLAINTS = ("billing", "none", "outage")

TRUTH = {
    "season": {"probs": [0.25, 0.25, 0.25, 0.25]},
    "load": {"loc": [-0.3, -0.9, -0.4, 1.6], "scale": [1.0, 1.0, 1.0, 1.0]},
    "price": {"loc": 62.0, "weight": [11.0], "scale": 6.0},
    "outages": {"log_rate": 0.6, "weight": [0.45]},
    "frequency": {"loc": 50.0, "weight": [-0.05], "scale": 0.04},
    "complaint": {"logits": [0.0, 1.0, -1.2], "weight": [[0.0, -0.9, 0.8]]},
}


def complete_table(rows: int = ROWS, seed: int = SEED) -> pd.DataFrame:
    """Every cell, the hidden load included."""
    rng = np.random.default_rng(seed)
    season = rng.choice(4, rows, p=TRUTH["season"]["probs"])
    load = np.array(TRUTH["load"]["loc"])[season] + rng.normal(size=rows)
    price, frequency = (
        TRUTH[node]["loc"] + TRUTH[node]["weight"][0] * load + TRUTH[node]["scale"] * rng.normal(size=rows)
        for node in ("price", "frequency")
    )
    outages = rng.poisson(np.exp(TRUTH["outages"]["log_rate"] + TRUTH["outages"]["weight"][0] * load))
    logits = np.array(TRUTH["complaint"]["logits"]) + load[:, None] * np.array(TRUTH["complaint"]["weight"][0])
    complaint = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    return pd.DataFrame(
        {
            "season": np.array(SEASONS)[season],
            "load": load.round(4),
            "price": price.round(2),
            "outages": outages,
            "frequency": frequency.round(4),
            "complaint": np.array(COMPLAINTS)[complaint],
        }
    )


def with_gaps(table: pd.DataFrame, seed: int = SEED) -> pd.DataFrame:
    """What a user has: no load, and a share of the cells empty."""
    seen = table.drop(columns="load").astype({"outages": "Int64"})
    return seen.mask(np.random.default_rng([seed, 1]).random(seen.shape) < MISSING)


if __name__ == "__main__":
    path = Path(__file__).parent / "data" / "grid.csv"
    table = with_gaps(complete_table())
    table.to_csv(path, index=False, lineterminator="\n")
    print(f"wrote {len(table):,} rows to {path}; {table.isna().to_numpy().mean():.1%} of the cells are missing")
