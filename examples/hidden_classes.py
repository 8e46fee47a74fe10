"""How many hidden classes? Fit two to five, and ask rows that no fit has seen.

Customers fall into three groups that nobody wrote down. What is known of each is of different kinds: a number, a count,
a category; some of it is missing.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

import otpdag as otp
from otpdag import mechanisms as m


def customers(rows: int, seed: int) -> pd.DataFrame:
    """Three groups: bargain hunters, regulars, big spenders."""
    rng = np.random.default_rng(seed)
    group = rng.choice(3, rows, p=[0.5, 0.3, 0.2])
    table = pd.DataFrame(
        {
            "basket": np.array([15.0, 40.0, 95.0])[group] * np.exp(0.35 * rng.normal(size=rows)),
            "visits": rng.poisson(np.array([1.0, 6.0, 3.0])[group]),
            "channel": np.where(rng.random(rows) < np.array([0.8, 0.3, 0.5])[group], "web", "shop"),
        }
    ).astype({"visits": "Int64"})
    return table.mask(rng.random(table.shape) < 0.1)


def main(rows: int) -> None:
    console = Console(highlight=False)
    train, test = customers(rows, seed=0), customers(rows, seed=1)
    graph = otp.Graph([("group", "basket"), ("group", "visits"), ("group", "channel")], hidden=["group"])
    table = Table("classes", "log-likelihood of new rows", "transport distance", box=None, pad_edge=False)
    fits = {}
    for classes in (1, 2, 3, 4):
        if classes == 1:  # no hidden node at all
            model = otp.Model.from_frame(
                otp.Graph([], nodes=graph.observed), train, mechanisms={"basket": m.LogNormal(), "visits": m.Poisson()}
            )
        else:
            model = otp.Model.from_frame(
                graph,
                train,
                hidden={"group": m.Categorical(classes)},
                mechanisms={"basket": m.LogNormal(), "visits": m.Poisson()},
            )
        otp.fit(model, train, seed=0)
        fits[classes] = model
        likelihood, distance = model.score(test, kind="likelihood"), model.distance(test)
        table.add_row(str(classes), f"{likelihood:.3f}", f"{distance:.4f}")
    console.print(table)
    model = fits[3]
    params = model.params()
    console.print("\nWith three classes (ordered by basket):")
    for k in range(3):
        console.print(
            f"  class {k}: {params['group']['probs'][k]:.0%} of customers, median basket "
            f"{np.exp(params['basket']['loc'][k]):.0f}, {np.exp(params['visits']['log_rate'][k]):.1f} visits, "
            f"{params['channel']['probs'][k][1]:.0%} by web"
        )
    console.print("\nProbabilities of the first three new customers:")
    shown = pd.concat([test.head(3), model.predict_proba(test.head(3), "group").round(3).add_prefix("class ")], axis=1)
    console.print(shown.to_string(index=False), markup=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1500, help="rows of each table (default 1500)")
    main(parser.parse_args().rows)
